"""Two applications with real engines in one Ray cluster, both under load; one is killed: what the other's clients see.

python -m ops.bench.side_by_side --repeats 6 --record side-by-side.jsonl

Each repeat measures `b` for some seconds while both work, then every process of `a` that holds state (its controller,
its replicas' engines) gets SIGKILL, and `b` is measured again for as long, while Serve starts `a` anew. The ratio of a
figure after and before is paired by repeat. Both share the cores: an engine that starts takes some of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from typing import Any

import httpx
import ray

from app.commands.serve import Service
from app.main import application
from cluster.names import NAMESPACE, controller_actor
from cluster.spec import ClusterSpec, parse_overrides
from ops.bench import load
from ops.bench.flood import State, keep, parser, read, stamp, with_service
from ops.bench.pages import page
from ops.bench.stats import paired_ratio

STREAMS, TOKENS = 3, 40
HEALTHY_S = 400.0
SETTINGS = {"pools.prefill.replicas": 0, "pools.decode.engine_args.num_gpu_blocks_override": 320}
TITLE = "Two applications side by side, one of them killed"
INTRO = (
    "Two applications of `local-cpu` with decode alone in one Ray cluster, each under three streams at a time. "
    "Every process of `a`'s pools and its controller get SIGKILL; `b` is measured for as long before as after. "
    "Both share the machine's cores, so `b` may become faster while `a` is away and slower while its engine "
    "starts."
)
FIGURES = ("ttft_s", "tpot_s", "tokens_per_s")


class Clients:
    """Streams of one application, one after another in each of `STREAMS` places."""

    def __init__(self, session: Any, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model
        self.answers: list[load.Answer] = []
        self._over = False
        self._tasks = [asyncio.create_task(self._work(number)) for number in range(STREAMS)]

    async def _work(self, place: int) -> None:
        number = 0
        while not self._over:
            number += 1
            body = load.body_of(self._model, f"{place}/{number}: The sea and the people who live by it", TOKENS)
            answer = await load.ask(self._session, self._url, body, place)
            self.answers.append(answer)
            if answer.error:
                await asyncio.sleep(0.5)

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    def since(self, began: float) -> State:
        """Of what was answered since then."""
        mine = [answer for answer in self.answers if answer.start_s >= began and answer.end_s]
        good = [answer for answer in mine if not answer.error]
        seconds = time.perf_counter() - began
        return {
            "requests": len(mine),
            "failed": len(mine) - len(good),
            "ttft_s": statistics.median(answer.ttft_s for answer in good) if good else None,
            "tpot_s": statistics.median(answer.tpot_s for answer in good) if good else None,
            "tokens_per_s": sum(answer.num_output_tokens for answer in good) / seconds,
            "answers": [(round(a.ttft_s, 4), round(a.tpot_s, 5), a.num_output_tokens, a.error) for a in mine],
        }


async def _status(session: httpx.AsyncClient, url: str) -> State:
    found: State = (await session.get(f"{url}/status")).json()
    return found


async def _wait_healthy(session: httpx.AsyncClient, url: str) -> None:
    until = time.monotonic() + HEALTHY_S
    while True:
        try:
            if (await session.get(f"{url}/health")).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > until:
            raise TimeoutError(f"{url} is not healthy within {HEALTHY_S:g} s")
        await asyncio.sleep(0.5)


def _kill(name: str, status: State) -> int:
    """Every process of the application's pools, and its controller; returns how many."""
    engines = [replica["engine"] for pool in status["pools"].values() for replica in pool["replicas"]]
    pids = {int(engine[key]) for engine in engines for key in ("replica_pid", "worker_pid")}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    actor: Any = ray.get_actor(controller_actor(name), namespace=NAMESPACE)
    ray.kill(actor, no_restart=False)
    return len(pids) + 1


async def repeat(session: Any, urls: dict[str, str], number: int, seconds: float) -> State:
    for url in urls.values():
        await _wait_healthy(session, url)
    model = (await _status(session, urls["b"]))["model"]
    clients = {name: Clients(session, url, model) for name, url in urls.items()}
    await asyncio.sleep(3.0)
    began, was = time.perf_counter(), await _status(session, urls["b"])
    await asyncio.sleep(seconds)
    before = clients["b"].since(began)
    killed = _kill("a", await _status(session, urls["a"]))
    struck = time.perf_counter()
    await asyncio.sleep(seconds)
    after = clients["b"].since(struck)
    now = await _status(session, urls["b"])
    await _wait_healthy(session, urls["a"])
    back_s = time.perf_counter() - struck
    await asyncio.gather(*(each.end() for each in clients.values()))
    return {
        "number": number,
        "killed": killed,
        "before": before,
        "after": after,
        "a_back_s": round(back_s, 1),
        "a_failed": sum(bool(answer.error) for answer in clients["a"].answers),
        "b_same_controller": was["epoch"] == now["epoch"],
        "b_tickets_failed": now["tickets"]["ended"]["failed"] - was["tickets"]["ended"]["failed"],
        "b_scale_decisions": len(now["scaling"]["decisions"]) - len(was["scaling"]["decisions"]),
    }


async def play(service: Service, args: argparse.Namespace, until: float) -> None:
    from ray import serve

    base = service.url.removesuffix("/a")
    overrides = {**SETTINGS, "frontend.port": service.spec.frontend.port, **parse_overrides(args.overrides)}
    spec = ClusterSpec.load(args.topology, overrides)
    await asyncio.to_thread(lambda: serve.run(application(spec), name="b", route_prefix="/b", blocking=False))
    done = len(read(args.record))
    async with load.open_session() as session:
        for number in range(done, done + args.repeats):
            if time.monotonic() > until:
                break
            urls = {"a": f"{base}/a", "b": f"{base}/b"}
            found = stamp(args) | await repeat(session, urls, number, args.seconds)
            keep(found, args.record)
            print(table([found]), file=sys.stderr, flush=True)


HEAD = ("repeat", "b's requests", "failed", "TTFT p50 s, before / after", "s a token", "tokens/s", "a back after s")


def table(record: list[State]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---:|" * len(HEAD)]
    for row in record:
        before, after = row["before"], row["after"]
        requests, failed = (before[key] + after[key] for key in ("requests", "failed"))
        cells = [str(row["number"]), str(requests), str(failed)]
        cells += [f"{before[name] or 0:.3f} / {after[name] or 0:.3f}" for name in FIGURES]
        lines.append("| " + " | ".join([*cells, str(row["a_back_s"])]) + " |")
    whole = [row for row in record if all(row[when][name] for when in ("before", "after") for name in FIGURES)]
    if len(whole) > 1:
        for name in FIGURES:
            ratio = paired_ratio([(row["after"][name], row["before"][name]) for row in whole])
            lines.append(f"\n{name}: after / before {ratio.text(2)} over {ratio.num} repeats.")
    strange = [row["number"] for row in record if not row["b_same_controller"] or row["b_scale_decisions"]]
    lines.append(f"\nRepeats in which b's controller or pools changed: {strange or 'none'}.")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    make = parser(__doc__.split("\n\n")[0])
    make.add_argument("--seconds", type=float, default=15.0, help="measured before and after, each")
    make.set_defaults(topology="local-cpu")
    args = make.parse_args(argv)
    if args.repeats:
        with_service(args, play, SETTINGS, "a")
    record = read(args.record)
    print(table(record))
    if args.page is not None:
        command = "python -m ops.bench.side_by_side --repeats N --record FILE --page FILE"
        args.page.write_text(page(TITLE, command, record, args.record, INTRO, table(record)))
    return 0 if all(not (row["before"]["failed"] or row["after"]["failed"]) for row in record) else 1


if __name__ == "__main__":
    raise SystemExit(main())
