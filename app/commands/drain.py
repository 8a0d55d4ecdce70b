"""`pageferry drain`: this Ray node is about to go. Its replicas get no new requests and leave when theirs have ended.

The hook that Kubernetes runs before it stops a pod (`preStop`), and for a person before a machine is taken away.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 1.0


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry drain",
        description="Tells Ray that a node is going. Serve starts other replicas elsewhere; the node's own get no new "
        "requests, and what still runs shortly before the time is over is taken elsewhere. Returns when no replica is "
        "left on the node, or when the time is over.",
    )
    make.add_argument("--seconds", type=int, default=3_600, help="until the node is taken away; default: %(default)s")
    make.add_argument("--address", default="auto", help="of the Ray cluster; default: the one of this machine")
    make.add_argument("--node-id", help="default: the node of this machine")
    return make


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    import ray

    began = time.monotonic()
    try:
        context = ray.init(address=args.address, log_to_driver=False, configure_logging=False)
        node_id = args.node_id or ray.get_runtime_context().get_node_id()
        _drain(context.address_info["gcs_address"], node_id, args.seconds)
        left = _wait(node_id, began + args.seconds)
    except (ConnectionError, ValueError, RuntimeError) as error:
        print(f"pageferry drain: {error}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
    if left:
        print(f"pageferry drain: still on the node after {args.seconds} s: {', '.join(left)}", file=sys.stderr)
        return 1
    print(f"node {node_id} is free of replicas after {time.monotonic() - began:.0f} s")
    return 0


def _drain(address: str, node_id: str, seconds: int) -> None:
    """Raises RuntimeError when Ray refuses."""
    command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", address, "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "pageferry drain"]
    done = subprocess.run(
        [*command, "--deadline-remaining-seconds", str(seconds)], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise RuntimeError(f"ray drain-node: {(done.stderr or done.stdout).strip()[-500:]}")


def _wait(node_id: str, until: float) -> list[str]:
    """Replicas that are still on the node when the time is over."""
    while (left := replicas_on(node_id)) and time.monotonic() < until:
        time.sleep(POLL_S)
    return left


def replicas_on(node_id: str) -> list[str]:
    """Serve's replicas on a node, as `application/deployment/replica`; none where no Serve runs."""
    import ray
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return []
    details: dict[str, Any] = ray.get(client._controller.get_serve_instance_details.remote())
    return [
        f"{application}/{deployment}/{replica['replica_id']}"
        for application, each in details["applications"].items()
        for deployment, found in each["deployments"].items()
        for replica in found["replicas"]
        if replica.get("node_id") == node_id
    ]
