"""Ray as `pageferry serve` starts it, with one empty Serve deployment behind the same proxy: what Ray costs by itself.

python ops/bench/empty_serve.py PORT
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from app.commands.serve import Service
from cluster.spec import ClusterSpec


async def answer(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"data": [{"id": "empty"}]}'})


def application() -> Any:
    return answer


def main(port: int) -> None:
    from ray import serve

    @serve.ingress(application)
    class Empty:
        pass

    empty: Any = serve.deployment(Empty)

    class EmptyService(Service):
        def deploy(self, spec: ClusterSpec) -> None:
            self.spec = spec
            serve.run(empty.bind(), name="empty", route_prefix="/")

    service = EmptyService(ClusterSpec.load("local-cpu", {"frontend.port": port}), None)

    def end_at_signal() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    try:
        service.start(end_at_signal)
        service.watch()
    finally:
        service.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]))
