"""How a replica asks its node's transfer actor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from actors import deadlines
from actors.engine.in_flight import ReplicaError
from actors.transfer.staging import StagingError

logger = logging.getLogger("pageferry.replica")


class TransferClient:
    """`get_transfer` finds the actor of node `node_id`, or starts it."""

    def __init__(self, node_id: str, get_transfer: Callable[[], Any]) -> None:
        self._node_id = node_id
        self._get = get_transfer
        self._actor = get_transfer()

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Raises `ReplicaError` when the actor is away or silent; the next call looks it up again."""
        try:
            return await asyncio.wait_for(getattr(self._actor, method).remote(*args), timeout_s)
        except TimeoutError:
            raise ReplicaError(f"the transfer actor of node {self._node_id} is silent for {timeout_s:g} s") from None
        except StagingError:
            raise
        except Exception as error:  # Ray's many ways to say that an actor is away
            with contextlib.suppress(Exception):
                self._actor = self._get()
            raise ReplicaError(f"the transfer actor of node {self._node_id} is away: {error}") from None

    async def tell(self, method: str, *args: Any) -> None:
        """What it does not hear, the end of the lease tells it."""
        try:
            await self.ask(method, *args, timeout_s=deadlines.ANSWER_S)
        except ReplicaError as error:
            logger.warning("%s", error)
