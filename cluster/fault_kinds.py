"""Every fault that can be put into a running service: in pages, and in processes. Plain data.

A specification allows page faults in `faults.kinds`, `actors.engine.fault_injection` makes them in engines, each has a
trial in `ops.chaos.pages`. Process faults are what `pageferry chaos processes` does to a service.
"""

from __future__ import annotations

from enum import StrEnum
from signal import SIGKILL, SIGSTOP, Signals


class FaultError(ValueError):
    """A fault that is not allowed or not possible here."""


class Guard(StrEnum):
    """What has to notice a page fault."""

    TAGS = "tags"  # before each forward
    LIVES = "lives"  # tags again, when pages land
    SEALS = "seals"
    HAND_OVER = "hand_over"  # its deadline, and the state of the request
    LEDGER = "ledger"
    PROOFS = "proofs"  # the count of steps without one


class Side(StrEnum):
    """The process in which a page fault is made. WORKER: decode's."""

    WORKER = "worker"
    PREFILL = "prefill"
    SCHEDULER = "scheduler"


TAGS, LIVES, SEALS, HAND_OVER, LEDGER, PROOFS = Guard
WORKER, PREFILL, SCHEDULER = Side


class PageFault(StrEnum):
    """`escapes`: without its guard it changes what a request reads, so that wrong tokens are to be expected."""

    guard: Guard
    side: Side
    escapes: bool
    what: str

    TABLE_OTHER_REQUEST = "table_other_request", TAGS, WORKER, True, "a block table entry names another request's page"
    TABLE_FREE_PAGE = "table_free_page", TAGS, WORKER, True, "a block table entry names a free page"
    TABLE_OWN_PAGE = "table_own_page", TAGS, WORKER, True, "a block table entry names another page of the same request"
    PAGE_FREED_AND_TAKEN = "page_freed_and_taken", TAGS, SCHEDULER, True, "a page is freed early, another takes it"
    STALE_TAG = "stale_tag", TAGS, WORKER, False, "a page's tag is an earlier one"
    TAG_BUMPED = "tag_bumped", TAGS, WORKER, False, "a page's tag is one that no request was given"
    LATE_LANDING = "late_landing", LIVES, WORKER, True, "an aborted request's pages land after another got them"
    REPLAYED_PAGE = "replayed_page", SEALS, WORKER, True, "staging holds a page of an earlier ticket"
    BIT_FLIP = "bit_flip", SEALS, WORKER, True, "one bit of a page in staging is turned over"
    PAGE_PERMUTATION = "page_permutation", SEALS, WORKER, True, "two pages of a ticket are swapped in staging"
    TOKEN_PERMUTATION = "token_permutation", SEALS, WORKER, True, "two tokens of a page are swapped in staging"
    TRUNCATED_PAGE = "truncated_page", SEALS, WORKER, True, "the end of a page never reached staging"
    STAGING_REVOKED = "staging_revoked", SEALS, WORKER, False, "a ticket's staging bytes are gone before they are read"
    WRONG_SCALE = "wrong_scale", SEALS, PREFILL, False, "prefill converts with other scales than decode reads with"
    SEAL_LOST = "seal_lost", HAND_OVER, PREFILL, False, "the seal of a ticket is lost"
    SEAL_LATE = "seal_late", HAND_OVER, PREFILL, False, "the seal comes after the deadline"
    SEAL_DUPLICATED = "seal_duplicated", HAND_OVER, PREFILL, False, "the seal comes twice"
    PROOF_LOST = "proof_lost", PROOFS, WORKER, False, "for a time the worker's answers to steps hold no proof"
    PAGE_FREED_EARLY = "page_freed_early", LEDGER, SCHEDULER, True, "a page goes back to the free list while it is read"
    SHARED_PAGE_FREED_EARLY = "shared_page_freed_early", LEDGER, SCHEDULER, True, "a shared page loses a reference"

    def __new__(cls, name: str, guard: Guard, side: Side, escapes: bool, what: str) -> PageFault:
        fault = str.__new__(cls, name)
        fault._value_ = name
        fault.guard, fault.side, fault.escapes, fault.what = guard, side, escapes, what
        return fault


def page_fault(name: str) -> PageFault:
    """Raises `FaultError` for a name that is none."""
    for fault in PageFault:
        if fault == name:
            return fault
    raise FaultError(f"no fault {name!r}; known: {', '.join(PageFault)}")


class Target(StrEnum):
    """The process that a process fault strikes."""

    PREFILL = "prefill"  # the replica's process; its engine is a child
    PREFILL_CORE = "prefill engine core"
    PREFILL_WORKER = "prefill worker"
    DECODE = "decode"
    DECODE_CORE = "decode engine core"
    DECODE_WORKER = "decode worker"
    TRANSFER = "transfer"
    CONTROLLER = "controller"
    FRONTEND = "frontend"

    @property
    def pool(self) -> str:
        """The pool whose replica is lost; "" for an actor."""
        first = self.value.split()[0]
        return first if first in ("prefill", "decode") else ""


class ProcessFault(StrEnum):
    """`pause_s`: a stopped process goes on after a time between these. None: it is never continued by us."""

    target: Target
    signal: Signals
    pause_s: tuple[float, float] | None

    PREFILL_KILL = "prefill-kill", Target.PREFILL
    PREFILL_CORE_KILL = "prefill-core-kill", Target.PREFILL_CORE
    PREFILL_WORKER_KILL = "prefill-worker-kill", Target.PREFILL_WORKER
    PREFILL_HANG = "prefill-hang", Target.PREFILL, SIGSTOP
    PREFILL_CORE_HANG = "prefill-core-hang", Target.PREFILL_CORE, SIGSTOP
    DECODE_KILL = "decode-kill", Target.DECODE
    DECODE_CORE_KILL = "decode-core-kill", Target.DECODE_CORE
    DECODE_WORKER_KILL = "decode-worker-kill", Target.DECODE_WORKER
    DECODE_HANG = "decode-hang", Target.DECODE, SIGSTOP
    DECODE_CORE_HANG = "decode-core-hang", Target.DECODE_CORE, SIGSTOP
    DECODE_PAUSE = "decode-pause", Target.DECODE, SIGSTOP, (0.5, 4.0)
    TRANSFER_KILL = "transfer-kill", Target.TRANSFER
    TRANSFER_HANG = "transfer-hang", Target.TRANSFER, SIGSTOP
    TRANSFER_PAUSE = "transfer-pause", Target.TRANSFER, SIGSTOP, (0.5, 6.0)
    CONTROLLER_KILL = "controller-kill", Target.CONTROLLER
    CONTROLLER_HANG = "controller-hang", Target.CONTROLLER, SIGSTOP
    CONTROLLER_PAUSE = "controller-pause", Target.CONTROLLER, SIGSTOP, (0.5, 8.0)
    FRONTEND_KILL = "frontend-kill", Target.FRONTEND
    FRONTEND_PAUSE = "frontend-pause", Target.FRONTEND, SIGSTOP, (0.5, 4.0)

    def __new__(
        cls, name: str, target: Target, signal: Signals = SIGKILL, pause_s: tuple[float, float] | None = None
    ) -> ProcessFault:
        fault = str.__new__(cls, name)
        fault._value_ = name
        fault.target, fault.signal, fault.pause_s = target, signal, pause_s
        return fault

    @property
    def breaks_connections(self) -> bool:
        return self.target is Target.FRONTEND and self.pause_s is None

    @property
    def forgets(self) -> bool:
        """The controller's own counters start again."""
        return self.target is Target.CONTROLLER and self.pause_s is None


def process_fault(name: str) -> ProcessFault:
    return next(fault for fault in ProcessFault if fault == name)
