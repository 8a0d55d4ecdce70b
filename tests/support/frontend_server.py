"""vLLM's own server code on the engine core client, with decodes that answer by themselves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fake_cluster import FakeCluster
from vllm.v1.engine import FinishReason

from actors.messages import HandOver, Role, Ticket
from actors.spans import Tracer
from app.api.keys import API_KEYS, KeyRing
from app.api.llm import FerryLLM
from app.api.server import build_server, frontend_config, server_args
from app.client import asgi
from app.request.core_client import FerryCoreClient
from app.rpc.ports import ControllerGone
from cluster.spec import ClusterSpec

WORDS = [28, 29, 30, 31, 32]  # token ids that decode answers with, in turn


class Echoing(FakeCluster):
    """Decodes answer by themselves: `max_tokens` tokens, one a step; `after` says how many before they stop to."""

    def __init__(self) -> None:
        super().__init__()
        self.after = 10**6
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, replica_id: str, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None) -> None:
        await super().submit(replica_id, frames, ticket, hand_over)
        engine_id = list(self.decodes[replica_id].submitted)[-1]
        task = asyncio.ensure_future(self._answer(replica_id, engine_id))
        self._tasks.add(task)

    async def _answer(self, replica_id: str, engine_id: str) -> None:
        decode = self.decodes[replica_id]
        request = decode.submitted[engine_id]
        assert request.sampling_params is not None
        count = request.sampling_params.max_tokens or 1
        for index in range(min(count, self.after)):
            await asyncio.sleep(0)
            if engine_id in decode.aborted:
                return
            last = index == count - 1
            cached = 0 if index == 0 else None
            finish = FinishReason.LENGTH if last else None
            decode.emit(engine_id, WORDS[index % len(WORDS)], finish=finish, cached=cached)


class Server:
    def __init__(self) -> None:
        self.far = Echoing()
        self.missing = ""
        self.away = ""  # why the controller does not answer
        self.sizes: list[tuple[Role, int, float]] = []
        self.client: FerryCoreClient
        self.llm: FerryLLM

    async def start(self) -> None:
        spec = ClusterSpec.load("local-cpu")
        args = server_args(spec)
        self.client = FerryCoreClient("f", self.far, self.far, self.far, block_tokens=32, num_engines=2)
        self.app, _, self.llm = await build_server(
            spec,
            args,
            frontend_config(args),
            self.client,
            KeyRing(None, {API_KEYS: "red=sk-red,blue=sk-blue"}),
            Tracer(),
            status=self._status,
            audit=self._audit,
            pages=self._audit,
            health=self._health,
            scale=self._scale,
        )

    async def _status(self) -> dict[str, Any]:
        if self.away:
            raise ControllerGone(self.away)
        return {"pools": {}}

    async def _audit(self) -> dict[str, Any]:
        return {"breaches": []}

    async def _health(self) -> str:
        return self.missing

    async def _scale(self, pool: Role, replicas: int, hold_s: float) -> str:
        self.sizes.append((pool, replicas, hold_s))
        return "" if replicas < 5 else "outside its bounds"

    async def ask(
        self, path: str, body: dict[str, Any] | None = None, key: str = "sk-red"
    ) -> tuple[int, dict[str, str], bytes]:
        method = "GET" if body is None else "POST"
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        raw = None if body is None else json.dumps({"model": "smollm2", **body}).encode()
        reply, *chunks = [item async for item in asgi.call(self.app, method, path, headers, raw)]
        return reply[0], reply[1], b"".join(chunks)

    async def complete(self, **body: Any) -> tuple[int, dict[str, str], Any]:
        status, headers, raw = await self.ask("/v1/completions", {"prompt": "Hello there", "max_tokens": 4, **body})
        stream = headers["content-type"].startswith("text/event-stream")
        return status, headers, raw.decode() if stream else json.loads(raw)
