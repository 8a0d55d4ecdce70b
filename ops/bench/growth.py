"""What more requests at once cost: short requests at concurrency 1 to 256 through one frontend and through three.

    python -m ops.bench.growth --out ops/results/growth.json

By process: CPU time a request, and memory after the load. Tickets: the most that were in flight, and what was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from cluster.spec import ClusterSpec
from ops.bench import facts, idle, load, noise, pages, picture, stats
from ops.bench.systems import Running, StartError, ours

PROMPT_TOKENS, OUTPUT_TOKENS = 16, 8
REQUESTS_LEAST = 16
OVERRIDES = ("pools.decode.max_num_seqs=256", "admission.queue_max=512")
INTRO = (
    f"Prompts of {PROMPT_TOKENS} tokens, answers of {OUTPUT_TOKENS}, as many requests as the concurrency "
    f"({REQUESTS_LEAST} at least), `{' '.join(OVERRIDES)}`; medians over passes. CPU time of all processes of a name "
    "between the first request and the last answer."
)


async def _most_in_flight(http: httpx.AsyncClient, url: str, found: list[int]) -> None:
    while True:
        found.append(await _in_flight(http, url))
        await asyncio.sleep(0.1)


async def _in_flight(http: httpx.AsyncClient, url: str) -> int:
    tree = (await http.get(f"{url}/status")).raise_for_status().json()
    return int(tree["tickets"]["in_flight"]) + int(tree["queue"]["waiting"])


async def _left(http: httpx.AsyncClient, url: str) -> int:
    """Tickets that stay after five seconds."""
    for _ in range(50):
        if (left := await _in_flight(http, url)) == 0:
            break
        await asyncio.sleep(0.1)
    return left


def _by_name(names: dict[int, str], values: dict[int, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for pid, value in values.items():
        found[names[pid]] = found.get(names[pid], 0.0) + value
    return found


async def _load(running: Running, http: httpx.AsyncClient, concurrency: int, number: int) -> dict[str, Any]:
    url, requests = running.spec.url, max(REQUESTS_LEAST, concurrency)
    prompts = [
        [100 + number, 200 + concurrency, *range(1000 + i, 1000 + i + PROMPT_TOKENS - 2)] for i in range(requests)
    ]
    before, meter, in_flight = running.usage(), noise.Meter([running]), [0]
    watching = asyncio.create_task(_most_in_flight(http, url, in_flight))
    wave = await load.wave(http, url, running.spec.model, prompts, OUTPUT_TOKENS, concurrency)
    watching.cancel()
    after, foreign = running.usage(), meter.foreign()
    names = {pid: idle.name_of(use.command) for pid, use in after.items()}
    spent = {pid: use.cpu_s - before[pid].cpu_s for pid, use in after.items() if pid in before}
    memory = {pid: mib for pid, mib in running.memory_mib().items() if pid in names}
    good = [answer for answer in wave.answers if not answer.error]
    return {
        "concurrency": concurrency,
        "pass": number,
        "requests": requests,
        "errors": [answer.error for answer in wave.answers if answer.error],
        "seconds": wave.seconds,
        "ttft_s": [round(answer.ttft_s, 5) for answer in good],
        "in_flight_most": max(in_flight),
        "left": await _left(http, url),
        "foreign_cpu": foreign,
        "cpu_ms_a_request": {name: 1e3 * s / requests for name, s in _by_name(names, spent).items()},
        "memory_mib": _by_name(names, memory),
    }


async def measure(args: argparse.Namespace, frontends: int, log: Path) -> list[dict[str, Any]]:
    overrides = [*OVERRIDES, *args.overrides, f"frontend.replicas={frontends}"]
    system = ours(ClusterSpec.load(args.config), args.config, overrides, args.port, 1)
    rows = []
    async with Running(system, print, log) as running, load.open_session() as http:
        await load.wave(http, system.url, system.model, [list(range(50, 66))] * 8, OUTPUT_TOKENS, 4)  # warm-up
        until = time.monotonic() + 120
        while len((await http.get(f"{system.url}/status")).json()["frontends"]) < frontends:
            if time.monotonic() > until:
                raise StartError(f"fewer than {frontends} frontends after two minutes:\n{running.tail()}")
            await asyncio.sleep(0.5)
        for number in range(args.passes):
            for concurrency in args.concurrency:
                rows.append({"frontends": frontends} | await _load(running, http, concurrency, number))
                done = rows[-1]
                print(
                    f"{frontends} frontends, concurrency {concurrency}: {done['requests']} requests in "
                    f"{done['seconds']:.1f} s, {len(done['errors'])} errors, {done['left']} tickets left",
                    flush=True,
                )
    return rows


def series(rows: Sequence[dict[str, Any]], frontends: int, key: str) -> tuple[list[int], dict[str, list[float]]]:
    """Concurrencies, and by process the median over passes at each; the largest process first."""
    mine = [row for row in rows if row["frontends"] == frontends]
    loads = sorted({row["concurrency"] for row in mine})
    at = {c: [row[key] for row in mine if row["concurrency"] == c] for c in loads}
    names = {name for row in mine for name in row[key]}
    found = {name: [stats.p50([each.get(name, 0.0) for each in at[c]]) for c in loads] for name in names}
    return loads, dict(sorted(found.items(), key=lambda item: -max(item[1])))


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| frontends | concurrency | requests/s | TTFT p50 ms | p95 | tickets and waiting, most | left | errors |"]
    lines += ["|---:|" + "---:|" * 7]
    for frontends in sorted({row["frontends"] for row in rows}):
        for c in sorted({row["concurrency"] for row in rows}):
            mine = [row for row in rows if (row["frontends"], row["concurrency"]) == (frontends, c)]
            first = [s for row in mine for s in row["ttft_s"]] or [0.0]
            rate = stats.p50([(row["requests"] - len(row["errors"])) / row["seconds"] for row in mine])
            cells = (f"{rate:.1f}", f"{stats.p50(first) * 1e3:.0f}", f"{stats.p95(first) * 1e3:.0f}")
            counts = (max(row["in_flight_most"] for row in mine), sum(row["left"] for row in mine))
            errors = sum(len(row["errors"]) for row in mine)
            lines.append(f"| {frontends} | {c} | {' | '.join(cells)} | {counts[0]} | {counts[1]} | {errors} |")
    for key, title, least in (("cpu_ms_a_request", "CPU ms a request", 0.5), ("memory_mib", "memory MiB", 50.0)):
        for frontends in sorted({row["frontends"] for row in rows}):
            loads, found = series(rows, frontends, key)
            lines += [
                "",
                f"| {title}, {frontends} frontend{'s' * (frontends > 1)}, at | {' | '.join(map(str, loads))} |",
            ]
            lines += ["|---|" + "---:|" * len(loads)]
            shown = {name: values for name, values in found.items() if max(values) >= least}
            shown["all"] = [sum(values[i] for values in found.values()) for i in range(len(loads))]
            lines += [f"| {name} | {' | '.join(f'{x:.1f}' for x in values)} |" for name, values in shown.items()]
    return "\n".join([*lines, "", noise.warning(max(row["foreign_cpu"] for row in rows))])


def write(out: Path, made: dict[str, Any]) -> None:
    """The record, its page and its picture."""
    rows = made["rows"]
    out.write_text(json.dumps(made) + "\n")
    drawn = out.with_suffix(".png")
    panels = {
        f"{n} frontend{'s' * (n > 1)}": series(rows, n, "cpu_ms_a_request") for n in {r["frontends"] for r in rows}
    }
    picture.growth(panels, "CPU ms a request", f"{made['command']}\n{facts.one_line(made)}", drawn)
    text = pages.page("Growth", made["command"], [made], out, INTRO, table(rows), drawn)
    out.with_suffix(".md").write_text(text)


async def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config", default="local-cpu")
    parser.add_argument("--frontends", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--port", type=int, default=8390)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_intermixed_args(argv)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # ends the running service too
    rows = []
    with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log:
        print(f"log of the services: {log.name}")
        for frontends in args.frontends:
            rows += await measure(args, frontends, Path(log.name))
    command = {"command": f"python -m ops.bench.growth {' '.join(argv or sys.argv[1:])}"}
    write(args.out, facts.gather([]) | command | {"rows": rows})


if __name__ == "__main__":
    asyncio.run(main())
