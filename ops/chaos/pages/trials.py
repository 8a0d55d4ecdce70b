"""One trial of each family of faults: start requests, do the fault, see who noticed, who ended and what left.

Every trial has a victim and neighbours that run beside it; what each of them emits is compared, token by token, with
its prompt's known answer. A trial whose fault could not be placed is done again with another draw and never counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from actors.messages import Verdict
from cluster.fault_kinds import PageFault, page_fault
from ops.chaos.pages.harness import MAX_TOKENS, Harness, Watched

ATTEMPTS = 5
SCENE_S = 60.0


@dataclass(slots=True)
class Trial:
    kind: str
    number: int
    detected: bool = False
    by: str = ""  # what noticed it
    victims_only: bool = False  # only the victim was ended or disturbed
    wrong_tokens: int = 0
    false_alarms: int = 0  # requests ended although nothing was wrong with them
    ledger_clean: bool = False
    engine_alive: bool = False
    tokens_after_fault: int | None = None  # of the victim, from the fault to its end
    seconds: float = 0.0
    fault: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class EngineDied(Exception):
    """The engine, or the whole scene, stands still: the trial counts, and the next one needs another engine."""


class NotPlaced(Exception):
    """The fault found nothing to spoil: the victim had ended, or has no such page."""


Scene = Callable[[Harness, Trial, random.Random], Coroutine[Any, Any, None]]


def _pick(harness: Harness, rng: random.Random, count: int) -> list[Any]:
    return rng.sample(harness.prompts, count)


def _placed(trial: Trial, done: dict[str, Any]) -> None:
    if not done.get("fired"):
        raise NotPlaced(str(done.get("why", "not placed")))
    trial.fault = done


def _watch(trial: Trial, victim: Watched | None, others: list[Watched], *, victim_ends: bool) -> None:
    """What left the engine, and who was ended."""
    everybody = others if victim is None else [victim, *others]
    trial.wrong_tokens = sum(w.num_wrong for w in everybody)
    ended = [w for w in others if w.finish_reason == "error"]
    if victim is not None and not victim_ends and victim.finish_reason == "error":
        ended.append(victim)
    trial.false_alarms = len(ended)
    trial.victims_only = all(w.whole for w in others)
    if victim is not None and not victim_ends:
        trial.victims_only &= victim.whole
    trial.notes += [f"{w.prompt.name}: {w.finish_reason} {w.token_ids}" for w in everybody if w.num_wrong]


async def tables(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """A spoiled block table or tag: the victim alone ends, with the error of its own."""
    mine, *others = _pick(harness, rng, 3)
    # One neighbour shares the victim's prompt head through the prefix cache half of the time.
    victim = await harness.start_request(mine, salt=harness.salt() if rng.random() < 0.5 else None)
    neighbours = [await harness.start_request(p) for p in others]
    await victim.emitted(rng.randint(2, 4))
    _placed(trial, await harness.worker_fault(trial.kind, trial.number, victim.request_id))
    at = len(victim.token_ids)
    await asyncio.gather(*(w.ended() for w in [victim, *neighbours]))
    trial.tokens_after_fault = len(victim.token_ids) - at
    await _verdict(harness, trial, victim)
    _watch(trial, victim, neighbours, victim_ends=True)


async def _verdict(harness: Harness, trial: Trial, victim: Watched) -> None:
    """Fills `detected` from the victim's end and the tracker's own report of it."""
    audit = await harness.audit()
    named = [v["request_id"] for v in audit.get("verdicts", ())]
    trial.detected = victim.stop_reason == "page_integrity" and victim.request_id in named
    trial.by = "tag check" if trial.detected else ""


async def taken(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """A page of the victim is freed early and the next request takes it: the victim ends, the taker is right."""
    mine, other, newcomer = _pick(harness, rng, 3)
    victim = await harness.start_request(mine, max_tokens=2 * MAX_TOKENS, salt=harness.salt())
    neighbour = await harness.start_request(other)
    await victim.emitted(rng.randint(2, 4))
    _placed(trial, await harness.pool_fault(trial.kind, trial.number, victim.request_id))
    at = len(victim.token_ids)
    in_time: list[bool] = []

    def victim_ended() -> None:
        in_time.append(bool(taker.token_ids or harness.pair.num_unread(taker.request_id)))

    taker = await harness.start_request(newcomer, salt=harness.salt())
    victim.at_end = victim_ended
    await asyncio.gather(*(w.ended() for w in (victim, neighbour, taker)))
    if victim.finish_reason == "length":
        # When something else made the ledger look at the page first, it was never handed out.
        await _breach(harness, trial)
        if not (trial.detected or any(in_time)):
            raise NotPlaced("no request had taken the page when the victim's last step ran")
        _watch(trial, victim, [neighbour, taker], victim_ends=False)
        return
    trial.tokens_after_fault = len(victim.token_ids) - at
    await _verdict(harness, trial, victim)
    _watch(trial, victim, [neighbour, taker], victim_ends=True)


async def kept(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """A page goes back to the free list while it is read: the ledger takes it out again and no request is harmed."""
    mine, other, newcomer = _pick(harness, rng, 3)
    victim = await harness.start_request(mine, max_tokens=2 * MAX_TOKENS, salt=harness.salt())
    neighbour = await harness.start_request(other)
    await victim.emitted(rng.randint(2, 4))
    _placed(trial, await harness.pool_fault(trial.kind, trial.number, victim.request_id))
    newcomers = await harness.start_request(newcomer, salt=harness.salt())
    await asyncio.gather(*(w.ended() for w in (victim, neighbour, newcomers)))
    await _breach(harness, trial)
    _watch(trial, victim, [neighbour, newcomers], victim_ends=False)


async def shared(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """A page of two readers loses a reference too many; one of them ends, a third request wants pages."""
    mine, newcomer = _pick(harness, rng, 2)
    salt = harness.salt()
    first = await harness.start_request(mine, max_tokens=6, salt=salt)
    await first.emitted(1)
    second = await harness.start_request(mine, max_tokens=2 * MAX_TOKENS, salt=salt)
    await second.emitted(1)
    _placed(trial, await harness.pool_fault(trial.kind, trial.number, second.request_id))
    await first.ended()
    newcomers = await harness.start_request(newcomer, salt=harness.salt())
    await asyncio.gather(second.ended(), newcomers.ended())
    await _breach(harness, trial)
    _watch(trial, second, [first, newcomers], victim_ends=False)


async def _breach(harness: Harness, trial: Trial) -> None:
    audit = await harness.audit()
    mine = [b for b in audit.get("breaches", ()) if b["page"] == trial.fault["page"]]
    trial.detected = bool(mine) and all(b["history"] for b in mine)
    trial.by = f"ledger law {mine[0]['law']}" if mine else ""


async def staging(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """Bytes in staging are spoiled before decode opens them: the verdict says so and decode computes the prompt."""
    before, mine, other = _pick(harness, rng, 3)
    neighbour = await harness.start_request(other)
    if trial.kind == PageFault.REPLAYED_PAGE:
        earlier = await harness.start_request(
            before, max_tokens=1, salt=harness.salt(), over=await harness.seal(before)
        )
        await earlier.ended()
    over = await harness.seal(mine)
    await harness.worker_fault(trial.kind, trial.number, over.ticket_id)
    victim = await harness.start_request(mine, salt=harness.salt(), over=over)
    await asyncio.gather(victim.ended(), neighbour.ended())
    done = [entry for entry in await harness.fault_log() if entry.get("ticket_id") == over.ticket_id]
    _placed(trial, done[0] if done else {})
    expected = Verdict.MISSING if trial.kind == PageFault.STAGING_REVOKED else Verdict.MISMATCH
    await _opened(harness, trial, (over.ticket_id, over.attempt), expected)
    _watch(trial, victim, [neighbour], victim_ends=False)


async def _opened(harness: Harness, trial: Trial, key: tuple[int, int], expected: Verdict) -> None:
    opened = await harness.pair.wait_opened(key)
    verdicts = opened.verdicts if opened is not None else {}
    trial.detected = verdicts.get(expected, 0) > 0
    trial.by = f"seal verdict {expected}" if trial.detected else ""


async def scale(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """Prefill converts with scales that are not decode's: refused as another layout."""
    mine, other = _pick(harness, rng, 2)
    neighbour = await harness.start_request(other)

    async def arm(ticket: Any) -> None:
        await harness.worker_fault(trial.kind, trial.number, ticket.ticket_id)

    over = await harness.seal(mine, arm)
    victim = await harness.start_request(mine, salt=harness.salt(), over=over)
    await asyncio.gather(victim.ended(), neighbour.ended())
    _placed(trial, (await harness.fault_log("prefill") or [{}])[0])
    await _opened(harness, trial, (over.ticket_id, over.attempt), Verdict.WRONG_LAYOUT)
    _watch(trial, victim, [neighbour], victim_ends=False)


async def late_seals(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """The seal is lost, late or doubled: decode computes the prompt, or the second one is absorbed."""
    mine, other = _pick(harness, rng, 2)
    neighbour = await harness.start_request(other)
    seals = harness.pair.transfer.machine.seals
    late, duplicates = seals.late, seals.duplicates
    deadline_s = harness.pair.spec.transfer.hand_over_s

    key = (0, 0)

    async def arm(ticket: Any) -> None:
        nonlocal key
        key = (ticket.ticket_id, ticket.attempt)
        delay_s = deadline_s + rng.uniform(0.05, 0.3)
        await harness.worker_fault(trial.kind, trial.number, ticket.ticket_id, delay_s)

    try:
        over = await harness.seal(mine, arm)
    except TimeoutError:
        over = None
    victim = await harness.start_request(mine, salt=harness.salt(), over=over)
    await asyncio.gather(victim.ended(), neighbour.ended())
    _placed(trial, (await harness.fault_log("prefill") or [{}])[0])
    if trial.kind == PageFault.SEAL_DUPLICATED:
        trial.detected, trial.by = over is not None and seals.duplicates > duplicates, "absorbed as a duplicate"
    elif trial.kind == PageFault.SEAL_LATE:
        if over is not None:
            raise NotPlaced("prefill's answer took so long that the delayed seal was in time")
        for _ in range(250):
            if seals.late > late:
                break
            await asyncio.sleep(0.02)
        if seals.late == late and key in harness.pair.controller.unawaited:
            raise NotPlaced("the seal came between the deadline and the release of its ticket")
        trial.detected, trial.by = over is None and seals.late > late, "deadline: missing; then absorbed as late"
    else:
        trial.detected, trial.by = over is None, "deadline: missing"
    _watch(trial, victim, [neighbour], victim_ends=False)


async def landing(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """An aborted request's pages land after another request has got them: refused as stale."""
    mine, other, newcomer = _pick(harness, rng, 3)
    neighbour = await harness.start_request(other)
    over = await harness.seal(mine)
    await harness.worker_fault(trial.kind, trial.number, over.ticket_id)
    victim = await harness.start_request(mine, salt=harness.salt(), over=over)
    for _ in range(200):
        if any(entry.get("held") == over.ticket_id for entry in await harness.fault_log()):
            break
        await asyncio.sleep(0.005)
    else:
        raise NotPlaced("the landing was not held back")
    await harness.abort(victim)
    # The aborted request's pages are free when its opening has been reported.
    await harness.pair.wait_opened((over.ticket_id, over.attempt))
    del harness.pair.controller.opened[(over.ticket_id, over.attempt)]
    taker = await harness.start_request(newcomer, salt=harness.salt())
    await taker.emitted(rng.randint(1, 3))
    done = (await harness.pair.decode.core.collective_rpc_async("pageferry_land_late", args=(over.ticket_id,)))[0]
    _placed(trial, done)
    await asyncio.gather(neighbour.ended(), taker.ended())
    await harness.fault_log()
    trial.detected = set(done["verdicts"]) == {str(Verdict.STALE)}
    trial.by = "page lives: stale" if trial.detected else ""
    _watch(trial, None, [neighbour, taker], victim_ends=False)


async def proofs(harness: Harness, trial: Trial, rng: random.Random) -> None:
    """Steps without a proof are counted, and no request is harmed: no page was wrong."""

    async def unproven() -> int:
        counters = (await harness.pair.decode.audit())["scheduler"]["counters"]
        return int(counters["integrity_steps_unproven"])

    mine, other = _pick(harness, rng, 2)
    before = await unproven()
    victim, neighbour = await harness.start_request(mine), await harness.start_request(other)
    await victim.emitted(rng.randint(2, 4))
    _placed(trial, await harness.worker_fault(trial.kind, trial.number, victim.request_id, SCENE_S))
    await asyncio.gather(victim.ended(), neighbour.ended())
    await harness.worker_fault(trial.kind, trial.number, victim.request_id, 0.0)  # from here on there are proofs again
    trial.detected = await unproven() > before
    trial.by = "steps counted as unproven" if trial.detected else ""
    _watch(trial, victim, [neighbour], victim_ends=False)


SCENES: dict[PageFault, Scene] = {
    PageFault.TABLE_OTHER_REQUEST: tables,
    PageFault.TABLE_FREE_PAGE: tables,
    PageFault.TABLE_OWN_PAGE: tables,
    PageFault.STALE_TAG: tables,
    PageFault.TAG_BUMPED: tables,
    PageFault.PAGE_FREED_AND_TAKEN: taken,
    PageFault.PAGE_FREED_EARLY: kept,
    PageFault.SHARED_PAGE_FREED_EARLY: shared,
    PageFault.REPLAYED_PAGE: staging,
    PageFault.BIT_FLIP: staging,
    PageFault.PAGE_PERMUTATION: staging,
    PageFault.TOKEN_PERMUTATION: staging,
    PageFault.TRUNCATED_PAGE: staging,
    PageFault.STAGING_REVOKED: staging,
    PageFault.WRONG_SCALE: scale,
    PageFault.SEAL_LOST: late_seals,
    PageFault.SEAL_LATE: late_seals,
    PageFault.SEAL_DUPLICATED: late_seals,
    PageFault.LATE_LANDING: landing,
    PageFault.PROOF_LOST: proofs,
}
assert set(SCENES) == set(PageFault)


async def run_trial(harness: Harness, kind: str, number: int) -> Trial:
    """One counted trial. Raises `NotPlaced` when the fault could not be placed in several draws."""
    started = time.perf_counter()
    for attempt in range(ATTEMPTS):
        trial = Trial(kind, number)
        rng = random.Random(f"{harness.seed}/{kind}/{number}/{attempt}/scene")
        await harness.audit()  # what earlier trials left there is theirs
        try:
            await _while_alive(harness, SCENES[page_fault(kind)](harness, trial, rng))
        except EngineDied as error:
            trial.notes.append(str(error))
            trial.seconds = time.perf_counter() - started
            return trial
        except NotPlaced as error:
            trial.notes.append(str(error))
            await _clean(harness, trial)
            if attempt == ATTEMPTS - 1:
                raise
            continue
        await _clean(harness, trial)
        break
    trial.seconds = time.perf_counter() - started
    return trial


async def _while_alive(harness: Harness, scene: Coroutine[Any, Any, None]) -> None:
    """Raises `EngineDied` when the engine ends before the scene does (what some faults do to it without the check)."""
    task, until = asyncio.ensure_future(scene), time.monotonic() + SCENE_S
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=0.2)
            if harness.pair.decode._failure and not task.done():
                raise EngineDied(harness.pair.decode._failure)
            if time.monotonic() > until:
                raise EngineDied(f"the scene is not over after {SCENE_S:g} s")
        try:
            task.result()
        except EngineDeadError as error:
            raise EngineDied(f"the engine died: {error}") from error
    finally:
        task.cancel()


async def _clean(harness: Harness, trial: Trial) -> None:
    for queue_owner in list(harness.pair._queues):
        await harness.pair.decode.abort("rig", [queue_owner])
    trial.engine_alive = await harness.alive()
    if not trial.engine_alive:
        return
    left = await harness.settle()
    audit = await harness.audit()
    broken = left + list(audit.get("laws_broken", ()))
    trial.ledger_clean = not broken
    trial.notes += broken
    await harness.lift_quarantine()
