"""How evenly tokens arrive at a client: gaps between the tokens of a stream, and what a system costs when it is idle.

One socket a stream, read as the bytes come: an event's time is that of the read that brought its last byte. A token's
gap is the time since the token before; tokens that come in one read have gap 0.

    python -m ops.bench.gaps --arm before=1 --arm after=0.003 --out ops/results/stream-gaps.json

An arm is a name and the seconds that readers of vLLM's queues spin (`PAGEFERRY_QUEUE_BUSY_LOOP_S`); arms take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11

from actors.engine.config import QUEUE_BUSY_LOOP
from cluster.spec import ClusterSpec
from ops.bench import facts, noise, pages
from ops.bench.load import body_of
from ops.bench.systems import Running, ours

IDLE_S = 10.0
EOM = h11.EndOfMessage()


@dataclass(slots=True)
class Stream:
    """What one client saw. Seconds since its first byte was sent."""

    tokens_s: list[float] = field(default_factory=list)
    events_a_read: list[int] = field(default_factory=list)


async def stream(port: int, body: dict[str, Any]) -> Stream:
    """One `/v1/completions` stream over a plain socket, to its end. Raises on an answer that is not 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    http = h11.Connection(h11.CLIENT)
    headers = [("Host", "x"), ("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
    request = h11.Request(method="POST", target="/v1/completions", headers=headers)
    began = time.perf_counter()
    writer.write((http.send(request) or b"") + (http.send(h11.Data(data=data)) or b"") + (http.send(EOM) or b""))
    seen, rest = Stream(), b""
    try:
        while http.their_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            http.receive_data(await reader.read(1 << 16))
            now = time.perf_counter() - began
            *lines, rest = (rest + _body(http)).split(b"\n")
            events = [json.loads(line[5:]) for line in lines if line.startswith(b"data: {")]
            tokens = sum(len(c.get("token_ids") or ()) for event in events for c in event.get("choices", ()))
            seen.tokens_s += [now] * tokens
            if tokens:
                seen.events_a_read.append(sum(1 for event in events if event.get("choices")))
    finally:
        writer.close()
    return seen


def _body(http: h11.Connection) -> bytes:
    """What of the body one read has brought, without the chunks' frames, which may stand in the middle of a line."""
    body = b""
    while (event := http.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
        if isinstance(event, h11.Response) and event.status_code != 200:
            raise RuntimeError(f"the answer is {event.status_code}")
        if isinstance(event, h11.Data):
            body += bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            break
    return body


def summary(streams: list[Stream]) -> dict[str, float]:
    gaps = sorted(b - a for s in streams for a, b in zip(s.tokens_s, s.tokens_s[1:]))
    reads = [n for s in streams for n in s.events_a_read]
    tokens = sum(len(s.tokens_s) for s in streams)
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / max(s.tokens_s[-1] for s in streams),
        "ttft_ms_max": 1e3 * max(s.tokens_s[0] for s in streams),
        "gap_ms_p50": 1e3 * gaps[len(gaps) // 2],
        "gap_ms_p95": 1e3 * gaps[int(0.95 * len(gaps))],
        "gap_ms_p99": 1e3 * gaps[int(0.99 * len(gaps))],
        "gap_ms_max": 1e3 * gaps[-1],
        "events_a_read_mean": sum(reads) / len(reads),
        "events_a_read_max": max(reads),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| arm | spin s | gap p50 ms | p95 | p99 | max | events a read, most | tokens/s | CPU s | idle cores |"]
    lines.append("|---|---:|" + "---:|" * 8)
    for row in rows:
        cells = [f"{row[key]:.1f}" for key in ("gap_ms_p50", "gap_ms_p95", "gap_ms_p99", "gap_ms_max")]
        cells += [f"{row['events_a_read_max']}", *(f"{row[key]:.1f}" for key in ("tokens_per_s", "cpu_s"))]
        lines.append(f"| {row['arm']} | {row['busy_loop_s']:g} | {' | '.join(cells)} | {row['idle_cores']:.2f} |")
    return "\n".join([*lines, "", noise.warning(max(row["foreign_cpu"] for row in rows))])


async def measure(args: argparse.Namespace, arm: str, spin_s: str, log: Path) -> dict[str, Any]:
    overrides = [f"{name}={value}" for name, value in (s.split("=", 1) for s in args.set)]
    pools = [f"pools.{pool}.env={{{QUEUE_BUSY_LOOP}: '{spin_s}'}}" for pool in ("prefill", "decode")]
    spec = ClusterSpec.load(args.config)
    system = ours(spec, args.config, [*overrides, *pools], args.port, 1)
    async with Running(system, print, log) as running:
        prompts = [f"Story number {i}: once upon a time there was" for i in range(args.streams)]
        bodies = [body_of(system.model, prompt, args.tokens) for prompt in prompts]
        await asyncio.gather(*(stream(args.port, body | {"max_tokens": 8}) for body in bodies))
        cpu, meter = running.cpu_seconds(), noise.Meter([running])
        streams = await asyncio.gather(*(stream(args.port, body) for body in bodies))
        busy, foreign = running.cpu_seconds() - cpu, meter.foreign()
        await asyncio.sleep(3.0)
        cpu, began = running.cpu_seconds(), time.monotonic()
        await asyncio.sleep(IDLE_S)
        idle = (running.cpu_seconds() - cpu) / (time.monotonic() - began)
    figures = summary(streams) | {"cpu_s": busy, "idle_cores": idle, "foreign_cpu": foreign}
    print(arm, {name: round(value, 2) for name, value in figures.items()}, flush=True)
    raw = [{"tokens_s": [round(t, 5) for t in s.tokens_s], "events_a_read": s.events_a_read} for s in streams]
    return {"arm": arm, "busy_loop_s": float(spin_s), **figures, "streams": raw}


async def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="local-cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=SECONDS")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--port", type=int, default=8190)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # ends the running service too
    rows = []
    with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log:
        print(f"log of the services: {log.name}")
        for number in range(args.rounds):
            for arm in args.arm if number % 2 == 0 else reversed(args.arm):
                name, _, spin_s = arm.partition("=")
                rows.append(await measure(args, name, spin_s, Path(log.name)))
                command = f"python -m ops.bench.gaps {' '.join(argv or sys.argv[1:])}"
                known = facts.gather([]) | {"command": command}
                args.out.write_text(json.dumps(known | {"rows": rows}) + "\n")
                intro = (
                    f"{args.streams} streams of {args.tokens} tokens, gaps read at the client's socket; {args.config}."
                )
                page = pages.page(
                    "Gaps between a stream's tokens", command, [known["commit"]], args.out, intro, table(rows)
                )
                args.out.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    asyncio.run(main())
