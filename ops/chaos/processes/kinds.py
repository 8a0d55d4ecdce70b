"""What is done to a service, as data: which process, which signal, and what a client may see of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum


class Target(StrEnum):
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


@dataclass(frozen=True, slots=True)
class Kind:
    """`pause_s`: a stopped process goes on after a time between these. None: it is never continued by us."""

    name: str
    target: Target
    signal: signal.Signals = signal.SIGKILL
    pause_s: tuple[float, float] | None = None

    @property
    def breaks_connections(self) -> bool:
        return self.target is Target.FRONTEND and self.pause_s is None

    @property
    def forgets(self) -> bool:
        """The controller's own counters start again."""
        return self.target is Target.CONTROLLER and self.pause_s is None


KINDS = {
    kind.name: kind
    for kind in (
        Kind("prefill-kill", Target.PREFILL),
        Kind("prefill-core-kill", Target.PREFILL_CORE),
        Kind("prefill-worker-kill", Target.PREFILL_WORKER),
        Kind("prefill-hang", Target.PREFILL, signal.SIGSTOP),
        Kind("prefill-core-hang", Target.PREFILL_CORE, signal.SIGSTOP),
        Kind("decode-kill", Target.DECODE),
        Kind("decode-core-kill", Target.DECODE_CORE),
        Kind("decode-worker-kill", Target.DECODE_WORKER),
        Kind("decode-hang", Target.DECODE, signal.SIGSTOP),
        Kind("decode-core-hang", Target.DECODE_CORE, signal.SIGSTOP),
        Kind("decode-pause", Target.DECODE, signal.SIGSTOP, (0.5, 4.0)),
        Kind("transfer-kill", Target.TRANSFER),
        Kind("transfer-hang", Target.TRANSFER, signal.SIGSTOP),
        Kind("transfer-pause", Target.TRANSFER, signal.SIGSTOP, (0.5, 6.0)),
        Kind("controller-kill", Target.CONTROLLER),
        Kind("controller-hang", Target.CONTROLLER, signal.SIGSTOP),
        Kind("controller-pause", Target.CONTROLLER, signal.SIGSTOP, (0.5, 8.0)),
        Kind("frontend-kill", Target.FRONTEND),
        Kind("frontend-pause", Target.FRONTEND, signal.SIGSTOP, (0.5, 4.0)),
    )
}
