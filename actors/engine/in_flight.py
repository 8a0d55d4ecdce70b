"""What a replica keeps of a request that its engine has, and how a request fails there."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from actors.messages import Ticket


class ReplicaError(RuntimeError):
    """A replica could not do what a ticket asked of it; the frontend goes elsewhere."""


class EngineDied(ReplicaError):
    """The engine has ended or hangs, with this request in it."""


class PrefillRefused(ReplicaError):
    """No staging room in time, or the engine gave the prompt up."""


@dataclass(slots=True)
class InFlight:
    """A request in this replica's engine."""

    ticket: Ticket
    frontend_id: str
    aborted: bool = False
    in_engine: bool = False
    started: bool = False
    done: asyncio.Future[Any] | None = None  # prefill waits for this
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began
