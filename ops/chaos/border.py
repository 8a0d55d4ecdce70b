"""`python -m ops.chaos.border --out FILE`: what slow, idle and huge clients do to the others of a running service.

In each round, in turned order, the arms of `ARMS`. Meanwhile one client asks for eight tokens again and again, each
time on a new connection; its times are compared within the round. Memory is that of all the service's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from app.commands.serve import Service
from app.processes import marked
from cluster.spec import ClusterSpec
from ops.bench import facts
from ops.bench.stats import Statistic, detectable, p50, quantile, rounds_ratio
from ops.chaos.fuzz import Case, Fuzz

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\n"
BODY_BYTES, PIECE = 100 << 20, b" " * (256 << 10)
NUM_CASES = 1500  # tried before the rounds, so that those which would compute tokens can be left out
ANSWER_BY_HEAD_S = 1.0
ASKS = 40  # of the other client, an arm and round
Attack = Callable[[str, int], Awaitable[str]]  # what came of one connection
_refused: list[Case] = []  # of the process that sends them


async def _open(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(host, port)


async def _answer(reader: asyncio.StreamReader) -> str:
    line = await asyncio.wait_for(reader.readline(), 60)
    return line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "closed"


async def slow_head(host: str, port: int) -> str:
    return await _slowly(host, port, HEAD[:-2] + b"\r\nX-A: ")


async def slow_body(host: str, port: int) -> str:
    return await _slowly(host, port, HEAD + b"Content-Length: 100000\r\n\r\n")


async def _slowly(host: str, port: int, begin: bytes) -> str:
    reader, writer = await _open(host, port)
    try:
        writer.write(begin)
        answer = asyncio.ensure_future(_answer(reader))
        while not answer.done():
            writer.write(b"a")
            await asyncio.sleep(1.0)
        return await answer
    finally:
        writer.close()


async def idle(host: str, port: int) -> str:
    reader, writer = await _open(host, port)
    try:
        return await asyncio.wait_for(_answer(reader), 60)
    finally:
        writer.close()


async def declared_body(host: str, port: int) -> str:
    return await _large(host, port, f"Content-Length: {BODY_BYTES}\r\n\r\n".encode(), b"", b"")


async def undeclared_body(host: str, port: int) -> str:
    return await _large(host, port, b"Transfer-Encoding: chunked\r\n\r\n", f"{len(PIECE):x}\r\n".encode(), b"\r\n")


async def _large(host: str, port: int, rest: bytes, before: bytes, after: bytes) -> str:
    reader, writer = await _open(host, port)
    try:
        writer.write(HEAD + rest)
        answer = asyncio.ensure_future(_answer(reader))
        # Who is refused by the head alone hears it before the rest makes the server reset the connection.
        await asyncio.wait({answer}, timeout=ANSWER_BY_HEAD_S)
        for _ in range(BODY_BYTES // len(PIECE)):
            if answer.done():
                break
            writer.write(before + PIECE + after)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(0)
        return await answer
    finally:
        writer.close()


async def fuzzed(host: str, port: int) -> str:
    case = random.choice(_refused)
    reader, writer = await _open(host, port)
    try:
        head = f"POST {case.path} HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(case.body)}\r\n\r\n".encode() + case.body)
        return await _answer(reader)
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class Clients:
    """`pause_s`: from the end of a client's connection to its next."""

    what: str
    kinds: tuple[Attack, ...]
    each: int = 0
    pause_s: float = 0.2


ARMS = {
    "calm": Clients("no other client", ()),
    "slow": Clients("200 clients that send a head or a body a byte a second", (slow_head, slow_body), 100),
    "idle": Clients("1,000 connections that say nothing", (idle,), 1000),
    "100 MB": Clients("two clients that send 100 MB every five seconds", (declared_body, undeclared_body), 1, 5.0),
    "calm again": Clients("the same again: the noise", ()),
    "100 MB flood": Clients("four that send 100 MB as fast as they can", (declared_body, undeclared_body), 2),
    "refused": Clients("one client whose fuzzed requests are refused, a few a second", (fuzzed,), 1),
    "refused flood": Clients("eight such clients, some 40 requests a second", (fuzzed,), 8),
}


def attack(arm: str, host: str, port: int, refused: list[Case], over: Any, said: Any) -> None:
    """A process of its own: each connection is made anew when it has ended."""
    os.nice(19)  # elsewhere these clients are on other machines; here they must not take the service's CPU
    _refused.extend(refused)
    clients = ARMS[arm]

    async def again(kind: Attack, counts: Counter[str]) -> None:
        while not over.is_set():
            try:
                what = await kind(host, port)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                what = type(error).__name__
            counts[f"{kind.__name__}: {what}"] += 1
            await asyncio.sleep(clients.pause_s)

    async def run() -> None:
        counts: Counter[str] = Counter()
        tasks = [asyncio.ensure_future(again(kind, counts)) for kind in clients.kinds for _ in range(clients.each)]
        while not over.is_set():
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        said.put(dict(counts))

    asyncio.run(run())


async def ask(url: str, times: int) -> tuple[list[float], list[int]]:
    seconds, codes = [], []
    body = {"model": "smollm2", "prompt": "A ship is", "max_tokens": 8, "ignore_eos": True}
    for _ in range(times):
        began = time.monotonic()
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as answer:
            await answer.read()
            codes.append(answer.status)
        seconds.append(round(time.monotonic() - began, 4))
    return seconds, codes


async def refused_by(url: str, number: int) -> list[Case]:
    """Those of `number` fuzzed requests that the service refuses: the others ask for tokens, which is real work."""
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/openapi.json") as answer:
            fuzz = Fuzz(await answer.json(), seed=1)
        found = []
        for case in [fuzz.case() for _ in range(number)]:
            headers = {"Content-Type": "application/json"}
            async with session.post(case.path, data=case.body, headers=headers) as answer:
                await answer.read()
                if 400 <= answer.status < 500:
                    found.append(case)
    return found


def memory_mib(mark: str) -> float:
    """Resident memory of every process of the service; shared pages count once for each that maps them."""
    total = 0
    for pid in marked(mark):
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return round(total / 2**20, 1)


async def one(arm: str, service: Service, times: int, refused: list[Case]) -> dict[str, Any]:
    address = urlsplit(service.url)
    context = multiprocessing.get_context("spawn")
    over, said = context.Event(), context.Queue()
    process = context.Process(target=attack, args=(arm, address.hostname, address.port, refused, over, said))
    if ARMS[arm].kinds:
        process.start()
        await asyncio.sleep(3.0)
    seconds, codes = await ask(service.url, times)
    memory = memory_mib(service.mark)
    connections: dict[str, int] = {}
    if ARMS[arm].kinds:
        over.set()
        connections = await asyncio.to_thread(said.get, True, 60)
        process.join(30)
    return {"arm": arm, "seconds": seconds, "codes": codes, "memory_mib": memory, "connections": connections}


Rows = list[dict[str, Any]]


async def rounds(service: Service, number: int, times: int, save: Callable[[Rows], None]) -> None:
    await ask(service.url, 10)  # warm
    refused = await refused_by(service.url, NUM_CASES)
    print(f"{len(refused)} of {NUM_CASES} fuzzed requests are refused", flush=True)
    found: Rows = []
    names = list(ARMS)
    for turn in range(number):
        for arm in names[turn % len(names) :] + names[: turn % len(names)]:
            row = {"round": turn} | await one(arm, service, times, refused)
            found.append(row)
            shown = {name: row[name] for name in ("memory_mib", "connections")}
            print(f"{turn} {arm:10} p50 {p50(row['seconds']):.3f} max {max(row['seconds']):.3f} {shown}", flush=True)
        save(found)  # one that is cut short leaves its whole rounds


Samples = list[list[float]]  # seconds, by round


def p99(values: Sequence[float]) -> float:
    return quantile(values, 0.99)


def summary(rows: Rows) -> dict[str, Any]:
    of = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    calm, again = ([row["seconds"] for row in of[arm]] for arm in ("calm", "calm again"))
    found = {}
    for arm, those in of.items():
        seconds = [row["seconds"] for row in those]
        flat = [each for group in seconds for each in group]
        found[arm] = {
            "asked": len(flat),
            "answered_200": sum(code == 200 for row in those for code in row["codes"]),
            "p50_s": round(p50(flat), 4),
            "p99_s": round(p99(flat), 4),
            "memory_mib_max": max(row["memory_mib"] for row in those),
            "connections": dict(sum((Counter(row["connections"]) for row in those), Counter())),
        }
        if arm != "calm" and len(those) > 1:
            against = [calm] if arm == "calm again" else [calm, again]
            found[arm]["p50_ratio"], found[arm]["p99_ratio"] = (_ratio_to(seconds, against, f) for f in (p50, p99))
    if len(calm) > 1:
        noise = [math.log(p99(a) / p99(b)) for a, b in zip(calm, again)]
        found["calm again"]["p99_detectable"] = round(detectable(statistics.stdev(noise), len(noise)), 3)
    return found


def _ratio_to(seconds: Samples, against: list[Samples], statistic: Statistic) -> list[float]:
    """To the geometric mean of the arms in `against`, within each round."""
    means = [[math.exp(statistics.fmean(math.log(statistic(each)) for each in turn))] for turn in zip(*against)]
    found = rounds_ratio([[statistic(each)] for each in seconds], means, p50)
    return [round(value, 3) for value in (found.value, found.low, found.high)]


def page(record: dict[str, Any], raw: str) -> str:
    """Markdown. `raw`: the raw file's name, beside the page."""
    found = record["summary"]
    lines = [
        "# What slow, idle and huge clients do to the others",
        "",
        f"`{record['command']}`: {facts.one_line(record)}.",
        "",
        "One service of the demo model. In each round, in turned order, the arms below; all other clients run at the "
        "lowest priority (nice 19), as they share the service's cores. Meanwhile one client asks for eight tokens "
        "again and again, each time on a new connection. Ratios are to the geometric mean of the two calm arms of the "
        "same round, that of `calm again` to `calm`, with 95 % intervals over rounds (Student's t on log ratios); "
        f"memory is the resident memory of all the service's processes. Raw data: `{raw}`.",
        *_noise(found),
        "",
        "| arm | asked | answered | p50 | p99 | p50 ratio | p99 ratio | memory at most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, each in found.items():
        ratios = [_ratio(each.get(name)) for name in ("p50_ratio", "p99_ratio")]
        lines.append(
            f"| {arm} | {each['asked']} | {each['answered_200']} | {1000 * each['p50_s']:.0f} ms | "
            f"{1000 * each['p99_s']:.0f} ms | {' | '.join(ratios)} | {each['memory_mib_max']:,.0f} MiB |"
        )
    lines += ["", *(f"- {arm}: {ARMS[arm].what}" for arm in found)]
    lines += ["", "What the others' connections came to:", ""]
    for arm, each in found.items():
        if each["connections"]:
            ends = ", ".join(f"{what} {number:,}" for what, number in sorted(each["connections"].items()))
            lines.append(f"- {arm}: {ends}")
    return "\n".join(lines) + "\n"


def _noise(found: dict[str, Any]) -> list[str]:
    least = found["calm again"].get("p99_detectable")
    if least is None:
        return []
    return [
        "",
        f"The two calm arms differ so much that a p99 {100 * least:.0f} % greater than one of them is found in 80 % of "
        "such campaigns.",
    ]


def _ratio(interval: list[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f} ({interval[1]:.2f} to {interval[2]:.2f})"


def main(argv: list[str]) -> int:
    make = argparse.ArgumentParser(prog="python -m ops.chaos.border", description=(__doc__ or "").split("\n")[0])
    make.add_argument(
        "--out", type=Path, required=True, help="JSON file with every time; its page is written beside it"
    )
    make.add_argument("--rounds", type=int, default=5)
    make.add_argument("--asks", type=int, default=ASKS)
    make.add_argument("--port", type=int, default=8012)
    args = make.parse_args(argv)
    record = facts.gather(argv) | {"command": " ".join(["python -m ops.chaos.border", *argv])}

    def save(rows: Rows) -> None:
        record.update(summary=summary(rows), rows=rows)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(page(record, args.out.name))

    service = Service(ClusterSpec.load("local-cpu", {"frontend.port": args.port}), None)
    try:
        service.start()
        service.wait_healthy(600)
        asyncio.run(rounds(service, args.rounds, args.asks, save))
    finally:
        service.stop()
    print(json.dumps(record["summary"], indent=1))
    whole = all(each["asked"] == each["answered_200"] for each in record["summary"].values())
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
