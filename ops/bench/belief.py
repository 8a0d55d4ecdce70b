"""What the controller believes of Serve's targets, while it is killed and the application redeployed during scaling.

python -m ops.bench.belief --repeats 20 --record belief.jsonl

Each repeat sets decode's size by hand and, while Serve carries that out, kills the controller or deploys the service
again with another setting, under two streams that go on. Both sides are asked ten times a second; what is counted is
the longest time from the look before they differ to the look after. One period of reconciliation is what a question of
Serve's policy may take to come: it asks once a second, at a turn of Serve's control loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors.controller.serve_policy import ASK_EVERY_S
from actors.messages import Role, SetTarget
from app.commands.serve import Service
from cluster.fault_kinds import Target
from cluster.names import NAMESPACE, controller_actor
from ops.bench import load
from ops.bench.flood import keep, parser, read, stamp, with_service
from ops.bench.pages import page
from ops.chaos.processes import targets

SAMPLE_S = 0.1
LOOP_S = 1.0  # as `pageferry serve` sets it, see `RAY_SERVE_CONTROL_LOOP_INTERVAL_S`
PERIOD_S = ASK_EVERY_S + LOOP_S
ANSWER_S = 2.0
SETTLE_S = 300.0
DEPLOYED_EVERY = 4  # repeats; a redeploy starts every engine anew
STREAMS, STREAM_TOKENS = 2, 100
TITLE = "What the controller believes of Serve's targets, while either is struck"
INTRO = (
    "Each repeat sets decode's size by hand and, within 1.5 s, kills the controller or deploys the application "
    f"again. Both targets are looked at every {SAMPLE_S:g} s and what a look takes. `longest disagreement` counts "
    "from the look before the two differ to the look after, so it is an upper bound; `not known` is while the "
    f"controller is away or has not been asked yet. A period of reconciliation is {PERIOD_S:g} s: Serve's policy asks "
    f"every {ASK_EVERY_S:g} s, at a turn of Serve's control loop, which is {LOOP_S:g} s. Where `reached` is not the "
    "size set, the controller was killed before Serve had asked: an order by hand that Serve has not taken is lost."
)
State = dict[str, Any]
Sample = tuple[float, int | None, int | None]  # (seconds, what the controller believes, Serve's target)


class Watch:
    """Both targets of decode ten times a second; None where one side does not answer or does not know."""

    def __init__(self, application: str) -> None:
        from ray.serve.context import _get_global_client

        client = _get_global_client()
        assert client is not None
        self._serve, self._application = client._controller, application
        self.samples: list[Sample] = []
        self.status: State = {}
        self.is_running = False

    async def look(self) -> None:
        asked = time.perf_counter()
        belief, target = await asyncio.gather(self._belief(), self._target())
        self.samples.append((asked, belief, target))

    async def _belief(self) -> int | None:
        try:
            actor: Any = ray.get_actor(controller_actor(self._application), namespace=NAMESPACE)
            self.status = await asyncio.wait_for(actor.status.remote(), ANSWER_S)
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            return None
        found: int | None = self.status["pools"]["decode"]["target"]
        return found

    async def _target(self) -> int | None:
        details = await self._serve.get_serve_instance_details.remote()
        application = details["applications"].get(self._application)
        self.is_running = bool(application) and application["status"] == "RUNNING"
        decode = (application or {}).get("deployments", {}).get("Decode")
        return None if decode is None else int(decode["target_num_replicas"])


def longest(samples: Sequence[Sample], is_so: Callable[[int | None, int | None], bool]) -> float:
    """Seconds of the longest stretch in which `is_so(belief, target)`, from the look before it to the look after it."""
    most, begin, before = 0.0, None, samples[0][0]
    for at_s, belief, target in samples:
        if is_so(belief, target):
            begin = before if begin is None else begin
            most = max(most, at_s - begin)
        elif begin is not None:
            most, begin = max(most, at_s - begin), None
        before = at_s
    return round(most, 3)


def differ(belief: int | None, target: int | None) -> bool:
    return None not in (belief, target) and belief != target


def unknown(belief: int | None, target: int | None) -> bool:
    return None in (belief, target)


async def repeat(service: Service, number: int, session: Any) -> State:
    dice = random.Random(f"belief/{number}")
    watch, over, answers = Watch(service.application), asyncio.Event(), list[load.Answer]()
    model = service.spec.model.served_name
    looking = asyncio.create_task(_keep_looking(watch, over))
    await _settled(watch)
    size = 1 if watch.samples[-1][2] == 2 else 2

    async def stream(index: int) -> None:
        while not over.is_set():
            body = load.body_of(model, f"{number}/{index}: The sea and the people who live by it", STREAM_TOKENS)
            answers.append(await load.ask(session, service.url, body, index))

    streams = [asyncio.create_task(stream(index)) for index in range(STREAMS)]
    watch.samples, began = watch.samples[-1:], time.perf_counter()
    actor: Any = ray.get_actor(controller_actor(service.application), namespace=NAMESPACE)
    problem = await actor.call.remote(SetTarget(Role.DECODE, size, 2 * SETTLE_S))
    await asyncio.sleep(dice.uniform(0.0, 1.5))
    what = "controller-kill" if number % DEPLOYED_EVERY else "redeploy"
    struck = time.perf_counter() - began
    if what == "redeploy":
        bound = 256 + number
        admission = service.spec.admission.model_copy(update={"queue_max": bound})
        await asyncio.to_thread(service.deploy, service.spec.model_copy(update={"admission": admission}))
    else:
        pid, _ = targets.find(Target.CONTROLLER, watch.status, service.mark, dice)
        os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(3.0)
    problems = [problem] if problem else []
    try:
        await _settled(watch)
    except TimeoutError as error:
        problems.append(str(error))
    over.set()
    await asyncio.gather(*streams, looking)
    return {
        "number": number,
        "what": what,
        "size": size,
        "reached": watch.samples[-1][2],
        "seconds": round(time.perf_counter() - began, 1),
        "struck_s": round(struck, 2),
        "longest_disagreement_s": longest(watch.samples, differ),
        "longest_unknown_s": longest(watch.samples, unknown),
        "looks": len(watch.samples),
        "longest_look_s": round(max(b[0] - a[0] for a, b in itertools.pairwise(watch.samples)), 3),
        "requests": len(answers),
        "lost": sum(bool(answer.error) or answer.num_output_tokens != STREAM_TOKENS for answer in answers),
        "problems": problems + sorted({answer.error for answer in answers if answer.error}),
        "samples": [(round(at_s - began, 2), belief, target) for at_s, belief, target in watch.samples],
    }


async def _keep_looking(watch: Watch, over: asyncio.Event) -> None:
    while not over.is_set():
        await watch.look()
        await asyncio.sleep(SAMPLE_S)


async def _settled(watch: Watch) -> None:
    """Serve says that all is as deployed, and both targets are known and equal. Replicas may be on their way."""
    until = time.perf_counter() + SETTLE_S
    while True:
        _, belief, target = watch.samples[-1] if watch.samples else (0.0, None, None)
        if watch.is_running and belief is not None and belief == target:
            return
        if time.perf_counter() > until:
            raise TimeoutError(f"not settled within {SETTLE_S:g} s: {belief}, {target}")
        await asyncio.sleep(SAMPLE_S)


async def play(service: Service, args: argparse.Namespace, until: float) -> None:
    done = len(read(args.record))
    async with load.open_session() as session:
        for number in range(done, done + args.repeats):
            if time.monotonic() > until:
                break
            found = stamp(args) | await repeat(service, number, session)
            keep(found, args.record)
            print(table([found]), file=sys.stderr, flush=True)


HEAD = (
    "repeat",
    "what",
    "to size",
    "reached",
    "seconds",
    "longest disagreement s",
    "not known s",
    "longest look s",
    "requests",
)


def table(record: list[State]) -> str:
    lines = ["| " + " | ".join((*HEAD, "lost")) + " |", "|" + "---:|" * (len(HEAD) + 1)]
    names = (
        "number",
        "what",
        "size",
        "reached",
        "seconds",
        "longest_disagreement_s",
        "longest_unknown_s",
        "longest_look_s",
    )
    for row in record:
        lines.append("| " + " | ".join(str(row[name]) for name in (*names, "requests", "lost")) + " |")
        lines += [f"\nRepeat {row['number']}: {problem}\n" for problem in row["problems"]]
    most = max((row["longest_disagreement_s"] for row in record), default=0.0)
    lost, requests = sum(row["lost"] for row in record), sum(row["requests"] for row in record)
    longer = sum(row["longest_disagreement_s"] > PERIOD_S for row in record)
    lines.append(
        f"\n{len(record)} repeats: longest disagreement {most:.2f} s; "
        f"longer than a period of {PERIOD_S:g} s in {longer}; {lost} of {requests} requests lost."
    )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__.split("\n\n")[0]).parse_args(argv)
    if args.repeats:
        with_service(args, play)
    record = read(args.record)
    print(table(record))
    if args.page is not None:
        command = "python -m ops.bench.belief --repeats N --record FILE --page FILE"
        args.page.write_text(page(TITLE, command, record, args.record, INTRO, table(record)))
    return 0 if all(not (row["lost"] or row["problems"]) for row in record) else 1


if __name__ == "__main__":
    raise SystemExit(main())
