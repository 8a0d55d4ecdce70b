"""The life of a ticket as a table. Pure: the controller, the simulator and the tests run the same one.

A pair that is not in the table changes nothing: early, late, doubled and reordered messages are absorbed, and
`step` says so, so that they can be counted. Terminal states absorb everything.
"""

from __future__ import annotations

from enum import StrEnum


class TicketState(StrEnum):
    ADMITTED = "admitted"
    PREFILLING = "prefilling"
    SEALED = "sealed"
    MOVING = "moving"
    VERIFIED = "verified"
    RECOMPUTING = "recomputing"
    DECODING = "decoding"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TicketEvent(StrEnum):
    PREFILL_STARTED = "prefill_started"
    SEALED = "sealed"  # every page of the prompt has a seal
    MOVE = "move"  # proof and place were given to decode
    OPENED = "opened"  # every page verified and scattered
    OPEN_FAILED = "open_failed"  # a bad, missing, stale or foreign page
    DECODE_ALONE = "decode_alone"  # decode computes the prompt itself
    DECODE_STARTED = "decode_started"  # the first token left decode
    PREFILL_LOST = "prefill_lost"  # replica died, hung or refused: prefill elsewhere
    DECODE_LOST = "decode_lost"  # resume elsewhere from the tokens so far
    FINISH = "finish"
    CANCEL = "cancel"
    FAIL = "fail"


S, E = TicketState, TicketEvent

TERMINAL = frozenset({S.DONE, S.CANCELLED, S.FAILED})
LIVE = frozenset(S) - TERMINAL
# States in which the ticket's staging bytes may still be needed.
HOLDS_LEASE = frozenset({S.ADMITTED, S.PREFILLING, S.SEALED, S.MOVING})

TRANSITIONS: dict[tuple[TicketState, TicketEvent], TicketState] = {
    (S.ADMITTED, E.PREFILL_STARTED): S.PREFILLING,
    (S.ADMITTED, E.DECODE_ALONE): S.DECODING,
    (S.ADMITTED, E.SEALED): S.SEALED,  # the seal overtook "started"
    (S.PREFILLING, E.SEALED): S.SEALED,
    (S.PREFILLING, E.DECODE_ALONE): S.DECODING,  # prefill refused; decode takes it
    (S.SEALED, E.MOVE): S.MOVING,
    (S.SEALED, E.DECODE_ALONE): S.DECODING,
    (S.MOVING, E.OPENED): S.VERIFIED,
    (S.MOVING, E.OPEN_FAILED): S.RECOMPUTING,
    (S.MOVING, E.DECODE_STARTED): S.DECODING,  # the first token overtook "opened"
    (S.MOVING, E.DECODE_ALONE): S.DECODING,
    (S.VERIFIED, E.DECODE_STARTED): S.DECODING,
    (S.RECOMPUTING, E.DECODE_STARTED): S.DECODING,
    (S.RECOMPUTING, E.DECODE_ALONE): S.DECODING,
    # Its frontend had decode compute the prompt without asking again, because the hand-over was refused as stale.
    **{(state, E.DECODE_STARTED): S.DECODING for state in (S.ADMITTED, S.PREFILLING, S.SEALED)},
    **{(state, E.PREFILL_LOST): S.ADMITTED for state in (S.ADMITTED, S.PREFILLING, S.SEALED, S.MOVING)},
    **{(state, E.DECODE_LOST): S.ADMITTED for state in LIVE},
    # A short answer may finish before the messages about its pages arrive.
    **{(state, E.FINISH): S.DONE for state in LIVE},
    **{(state, E.CANCEL): S.CANCELLED for state in LIVE},
    **{(state, E.FAIL): S.FAILED for state in LIVE},
}


def step(state: TicketState, event: TicketEvent) -> tuple[TicketState, bool]:
    """The next state, and whether the event meant anything here (False: absorbed)."""
    following = TRANSITIONS.get((state, event))
    return (state, False) if following is None else (following, True)
