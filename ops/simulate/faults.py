"""Faults as data: what happens to whom, when, for how long. A seed gives a plan; a plan can be replayed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from ops.simulate.world import MS, SECOND


class FaultKind(StrEnum):
    CRASH_PREFILL = "crash_prefill"
    CRASH_DECODE = "crash_decode"
    CRASH_TRANSFER = "crash_transfer"
    CRASH_CONTROLLER = "crash_controller"
    CRASH_FRONTEND = "crash_frontend"
    HANG_PREFILL = "hang_prefill"
    HANG_DECODE = "hang_decode"
    HANG_TRANSFER = "hang_transfer"
    HANG_CONTROLLER = "hang_controller"
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    SLOW_PREFILL = "slow_prefill"
    SLOW_DECODE = "slow_decode"
    FULL_STAGING = "full_staging"
    CANCEL = "cancel"
    SCALE_DOWN = "scale_down"
    REFUSE_SCALING = "refuse_scaling"
    FORGET_SCALING = "forget_scaling"
    PAGE_MISMATCH = "page_mismatch"
    BREAK_LINK = "break_link"


NETWORK_FAULTS = (FaultKind.DROP, FaultKind.DELAY, FaultKind.DUPLICATE, FaultKind.REORDER)


# Every message there is; a message fault hits one of them, or all.
MESSAGES = (
    "Join",
    "ReplicaHeartbeat",
    "TransferReport",
    "FrontendHeartbeat",
    "orders",
    "Adopt",
    "Configure",
    "AdmitRequest",
    "WaitForHandOver",
    "ReplicaLost",
    "Ended",
    "ReplicaLeaving",
    "ReplicaLeft",
    "PlatformSize",
    "prefill",
    "submit",
    "abort",
    "outputs",
    "tokens",
    "lease",
    "begin_read",
    "drop_writer",
    "drop_reader",
    "release",
    "fetch",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """`target` picks one of the processes of its kind (modulo how many there are then). Times in nanoseconds."""

    kind: FaultKind
    at_ns: int
    target: int = 0
    duration_ns: int = 0
    amount: float = 0.0  # probability (messages) or factor (slow)
    only: tuple[str, ...] = ()  # message kinds; empty: all


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """`all`, `none`, or names with commas."""
    if text == "all":
        return tuple(FaultKind)
    if text == "none":
        return ()
    try:
        return tuple(FaultKind(name.strip()) for name in text.split(","))
    except ValueError as error:
        raise ValueError(f"{error}; known faults: {', '.join(FaultKind)}") from None


def plan(dice: random.Random, kinds: tuple[FaultKind, ...], window_ns: int, most: int = 8) -> tuple[Fault, ...]:
    """Up to `most` faults within the window, of kinds drawn evenly."""
    if not kinds:
        return ()
    return tuple(
        sorted(
            (_draw(dice, dice.choice(kinds), window_ns) for _ in range(dice.randint(1, most))),
            key=lambda fault: fault.at_ns,
        )
    )


def _draw(dice: random.Random, kind: FaultKind, window_ns: int) -> Fault:
    at_ns, target = dice.randrange(window_ns), dice.randrange(1 << 16)
    if kind in NETWORK_FAULTS:
        base = dice.choice(MESSAGES)
        only = () if dice.random() < 0.4 else (base, f"{base}_reply", f"{base}_cancel")
        amount = dice.choice((0.05, 0.2)) if not only else dice.choice((0.1, 0.3, 0.6))
        return Fault(kind, at_ns, target, dice.randrange(1, 5) * SECOND, amount, only)
    if kind in (FaultKind.SLOW_DECODE, FaultKind.SLOW_PREFILL):
        return Fault(kind, at_ns, target, dice.randrange(1, 8) * SECOND, dice.choice((3.0, 10.0, 50.0)))
    # Hangs shorter than staleness, between staleness and fencing, and longer than fencing.
    duration_ns = dice.choice((500 * MS, 3 * SECOND, 12 * SECOND))
    return Fault(kind, at_ns, target, duration_ns, dice.random())
