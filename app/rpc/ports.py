"""What a frontend's engine core client needs of the rest of the cluster, as protocols.

The real ones speak Ray (`app.rpc.remote`); a test may put a single vLLM engine on the far side.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from actors.messages import HandOver, PrefillDone, ReplicaId, Request, T, Ticket


class ReplicaGone(Exception):
    """The replica named by a ticket is not there any more, or died during the call (`died`)."""

    def __init__(self, replica_id: ReplicaId, why: str, died: bool = False) -> None:
        super().__init__(f"replica {replica_id} is gone: {why}")
        self.replica_id = replica_id
        self.died = died
        self.why = why


class ControllerGone(Exception):
    """The controller did not answer, and did not come back in time."""


class ControllerPort(Protocol):
    async def call(self, message: Request[T]) -> T:
        """The controller's answer. Raises `ControllerGone`, or `StepFailed` when it could not handle the message."""
        ...


class PrefillPort(Protocol):
    async def prefill(self, replica_id: ReplicaId, ticket: Ticket, frames: list[bytes]) -> PrefillDone:
        """Cancelling the call cancels the work. Raises `ReplicaGone` or what the replica raised."""
        ...

    async def utility(self, method: str, args: list[Any]) -> list[Any]:
        """The method's result on every live replica of the pool."""
        ...


class DecodePort(Protocol):
    async def submit(
        self, replica_id: ReplicaId, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None
    ) -> None: ...

    async def abort(self, replica_id: ReplicaId, engine_ids: list[str]) -> None:
        """Idempotent; a replica that is gone has aborted everything."""
        ...

    def outputs(self, replica_id: ReplicaId) -> AsyncIterator[list[bytes]]:
        """Frames of one `EngineCoreOutputs` an item; ends or raises when the replica is gone. Closing it cancels."""
        ...

    async def utility(self, method: str, args: list[Any]) -> list[Any]:
        """The method's result on every live replica of the pool."""
        ...
