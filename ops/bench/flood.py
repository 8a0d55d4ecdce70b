"""A flood of long answers moves the pools of a real service, 1 -> 2 -> 1 and 0 -> 1 -> 0: a timeline, and what it cost.

python -m ops.bench.flood --repeats 5 --record flood.jsonl
python -m ops.bench.flood --record flood.jsonl --plot flood.png --page flood.md

The topology is `local-scale`; KEY=VALUE changes it, as for `pageferry serve`. Some streams go on for the whole time, so
that the leaving replica has streams. A repeat is good when every request got all its tokens, and
no stream broke that was there while a replica left. The record has one JSON line a repeat, with samples and answers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from app.commands.serve import Service
from cluster.spec import ClusterSpec, parse_overrides
from ops.bench import facts, load
from ops.bench.flood_report import draw, table
from ops.bench.pages import page

STREAMS, STREAM_TOKENS = 2, 150
SAMPLE_S = 0.5
UNKEPT = ("text", "token_s", "token_ids")  # of an answer, in the record
REST_S, MOVE_S = 300.0, 400.0  # a pool at rest has been idle for as long as an engine takes to start
PROMPT = "a long story about the sea and the people who live by it, " * 24

State = dict[str, Any]
TITLE = "A flood moves the pools of a real service"
INTRO = (
    "`local-scale.yaml` (decode 1 to 2 replicas, prefill 0 to 1, occupancy mode), real engines on CPU. "
    f"A flood of requests at once, and {STREAMS} streams that go on until the pool is small again, so that "
    "the replica that leaves has streams when it has to leave. Both pools' targets are what Serve held, one after "
    "another."
)


def sample(status: State, at_s: float) -> State:
    """What one look at `/status` says of both pools."""
    found: State = {"at_s": round(at_s, 2), "queue": status["queue"]["waiting"]}
    for pool, each in status["pools"].items():
        replicas = each["replicas"]
        draining = [replica for replica in replicas if replica["state"] == "draining"]
        found[pool] = {
            "target": each["target"],
            "running": each["running"],
            "ready": sum(replica["state"] == "ready" for replica in replicas),
            "draining": len(draining),
            "draining_tickets": sum(replica["tickets"] for replica in draining),
            "blocks_held": sum(replica["blocks_held"] for replica in replicas),
            "blocks_reserved": sum(replica["blocks_reserved"] for replica in replicas),
            "blocks_total": sum(replica["blocks_total"] for replica in replicas),
            "reason": each["scaling"],
        }
    return found


def decided(status: State, at_s: float) -> list[State]:
    """What `/status` says was decided since the flood began, oldest first, with the reason of that moment."""
    whole = status["scaling"]["decisions"]
    made = [{**each, "at_s": round(at_s - each["s_ago"], 2)} for each in whole if each["s_ago"] <= at_s]
    return sorted(made, key=lambda each: float(each["at_s"]))


class Repeat:
    """One flood, from rest to rest."""

    def __init__(self, session: httpx.AsyncClient, service: Service, args: argparse.Namespace, number: int) -> None:
        self.session, self.url, self.model = session, service.url, service.spec.model.served_name
        self.number, self.flood, self.tokens = number, args.flood, args.tokens
        self.samples: list[State] = []
        self.decisions: list[State] = []
        self.answers: list[load.Answer] = []
        self.began = time.perf_counter()
        self._over = False

    async def run(self) -> State:
        await self._until(_at_rest, REST_S, "both pools are at rest")
        self.began, self.samples = time.perf_counter(), []
        streams = [asyncio.create_task(self._stream(1_000 + number)) for number in range(STREAMS)]
        flood = [asyncio.create_task(self._ask(number, self.tokens)) for number in range(self.flood)]
        problems = []
        try:
            await self._until(_is_grown, MOVE_S, "decode has two replicas")
            await self._until(lambda _: all(task.done() for task in flood), MOVE_S, "the flood is answered")
            await self._until(_is_shrunk, MOVE_S, "decode has one replica again")
        except TimeoutError as error:
            problems.append(str(error))
        self._over = True
        await asyncio.gather(*flood, *streams)
        return self._result(problems)

    async def _ask(self, index: int, num_tokens: int) -> None:
        body = load.body_of(self.model, f"Request {self.number}/{index}: {PROMPT}", num_tokens)
        answer = await load.ask(self.session, self.url, body, index)
        if not answer.error and answer.num_output_tokens != num_tokens:
            answer.error = f"{answer.num_output_tokens} of {num_tokens} tokens"
        answer.text = ""
        self.answers.append(answer)

    async def _stream(self, index: int) -> None:
        while not self._over:
            await self._ask(index, STREAM_TOKENS)

    async def _until(self, what: Callable[[State], bool], timeout_s: float, words: str) -> None:
        until = time.perf_counter() + timeout_s
        while True:
            answer = await self.session.get(f"{self.url}/status")
            status: State = answer.json()
            found = sample(status, time.perf_counter() - self.began)
            self.samples.append(found)
            self.decisions = decided(status, found["at_s"])
            if what(found):
                return
            if time.perf_counter() > until:
                raise TimeoutError(f"not within {timeout_s:g} s: {words}; last: {found}")
            await asyncio.sleep(SAMPLE_S)

    def _result(self, problems: list[str]) -> State:
        answers = [asdict(a) | {"start_s": a.start_s - self.began, "end_s": a.end_s - self.began} for a in self.answers]
        result: State = {
            "number": self.number,
            "seconds": round(time.perf_counter() - self.began, 1),
            "requests": len(answers),
            "lost": sum(bool(answer["error"]) for answer in answers),
            **leaving(self.samples, answers),
            "problems": problems + sorted({answer["error"] for answer in answers if answer["error"]}),
            "targets": {pool: _changes([s[pool]["target"] for s in self.samples]) for pool in ("decode", "prefill")},
            "decisions": self.decisions,
            "samples": self.samples,
            "answers": [{key: value for key, value in answer.items() if key not in UNKEPT} for answer in answers],
        }
        return result


def leaving(samples: list[State], answers: list[State]) -> State:
    """Scale-downs of decode, tickets on the replicas that left, and streams that were there then and broke."""
    spans: list[tuple[float, float]] = []
    for before, now in itertools.pairwise(samples):
        if now["decode"]["draining"]:
            if before["decode"]["draining"]:
                spans[-1] = (spans[-1][0], now["at_s"])
            else:
                spans.append((before["at_s"], now["at_s"]))
    there = [a for a in answers if any(a["start_s"] < end and a["end_s"] > begin for begin, end in spans)]
    return {
        "scale_downs": len(spans),
        "tickets_on_leaving": max((s["decode"]["draining_tickets"] for s in samples), default=0),
        "streams_while_leaving": len(there),
        "streams_cut": sum(bool(answer["error"]) for answer in there),
    }


def _changes(values: list[Any]) -> list[Any]:
    known = [value for value in values if value is not None]
    return [value for number, value in enumerate(known) if not number or value != known[number - 1]]


def _at_rest(found: State) -> bool:
    decode, prefill = found["decode"], found["prefill"]
    sizes = (decode["target"], decode["ready"], decode["draining"], prefill["target"], prefill["ready"])
    return sizes == (1, 1, 0, 0, 0) and found["queue"] == 0


def _is_grown(found: State) -> bool:
    return bool(found["decode"]["ready"] == 2)


def _is_shrunk(found: State) -> bool:
    decode = found["decode"]
    return bool(decode["target"] == 1 and decode["ready"] == 1 and not decode["draining"])


async def play(service: Service, args: argparse.Namespace, until: float) -> list[State]:
    done = len(read(args.record))
    found = []
    async with load.open_session() as session:
        for number in range(done, done + args.repeats):
            if time.monotonic() > until:
                break
            repeat = Repeat(session, service, args, number)
            found.append(stamp(args) | await repeat.run())
            keep(found[-1], args.record)
            print(table(found[-1:]), file=sys.stderr, flush=True)
    return found


def stamp(args: argparse.Namespace) -> State:
    """What a row of a record needs to mean anything; taken before the repeat, for the load that others made."""
    machine = facts.gather([])["machine"]
    return {"commit": facts.commit(), "load": machine["load_at_start"][0], "cpu": machine["cpu"], "set": args.overrides}


def keep(row: State, record: Path) -> None:
    with record.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def read(record: Path) -> list[State]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def with_service(
    args: argparse.Namespace,
    work: Callable[[Service, argparse.Namespace, float], Awaitable[Any]],
    settings: dict[str, Any] | None = None,
    name: str = "",
) -> None:
    """Starts the topology as `pageferry serve` does, below its `name` where it has one, and ends everything of it."""
    until = time.monotonic() + 60.0 * args.minutes
    overrides = {"frontend.port": _free_port(), **(settings or {}), **parse_overrides(args.overrides)}
    spec = ClusterSpec.load(args.topology, overrides)
    service = Service(spec, None, _free_port(), *((name, f"/{name}") if name else ()))
    try:
        service.start(_end_whole)
        service.wait_healthy(400.0)
        asyncio.run(_await(work(service, args, until)))
    finally:
        service.stop()


def _end_whole() -> None:
    """SIGTERM, which Ray takes for itself, ends the service as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


async def _await(work: Awaitable[Any]) -> Any:
    return await work


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parser(description: str) -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(description=description)
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="over the topology's, such as a KV dtype")
    make.add_argument("--repeats", type=int, default=0, help="more of them; what is in the record stays")
    make.add_argument("--minutes", type=float, default=60.0, help="no new repeat after this, service start included")
    make.add_argument("--topology", default="local-scale")
    make.add_argument("--record", type=Path, required=True, help="JSON lines, one a repeat")
    make.add_argument("--page", type=Path, help="write the results page of the whole record to this file")
    return make


def main(argv: list[str] | None = None) -> int:
    make = parser(__doc__.split("\n\n")[0])
    make.add_argument("--flood", type=int, default=28, help="requests at once")
    make.add_argument("--tokens", type=int, default=120, help="of each answer")
    make.add_argument("--plot", type=Path, help="draw the timeline of one repeat to this PNG")
    make.add_argument("--show", type=int, default=-1, help="which repeat is drawn; default: the last one")
    args = make.parse_args(argv)
    if args.repeats:
        with_service(args, play)
    record = read(args.record)
    print(table(record))
    if args.plot is not None:
        draw(record[args.show], args.plot)
    if args.page is not None:
        command = "python -m ops.bench.flood --repeats N --record FILE --plot FILE --page FILE"
        command += f" --flood {args.flood} --tokens {args.tokens}"
        args.page.write_text(page(TITLE, command, record, args.record, INTRO, table(record), args.plot))
    return 0 if all(not (row["lost"] or row["streams_cut"] or row["problems"]) for row in record) else 1


if __name__ == "__main__":
    raise SystemExit(main())
