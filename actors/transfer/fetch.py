"""Bringing a lease's bytes from another node, in pieces, off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("pageferry.transfer")

Bytes = npt.NDArray[np.uint8]
Read = Callable[[int, int], Awaitable[Bytes | None]]  # of (first, num_bytes)

PIECE_BYTES = 16 << 20
PIECES_AT_ONCE = 4
PIECE_S = 10.0  # one piece may take this long; a fetch of any size goes on while pieces come


async def fetch(
    read: Callable[[int, int], Awaitable[Bytes | None]], target: Bytes, stopped: Callable[[], bool]
) -> bool:
    """Fills `target` piece by piece. False: it failed or was stopped.

    When this returns, nothing writes to `target` any more.
    """
    starts = iter(range(0, target.nbytes, PIECE_BYTES))
    failed = False

    async def take_pieces() -> None:
        nonlocal failed
        for first in starts:
            if failed or stopped():
                failed = True
                return
            into = target[first : first + PIECE_BYTES]
            try:
                piece = await asyncio.wait_for(read(first, into.nbytes), PIECE_S)
                if piece is None or piece.nbytes != into.nbytes:
                    failed = True  # the other node has given the bytes up
                    return
                await asyncio.to_thread(np.copyto, into, piece)
            except Exception as error:  # Ray's many ways to say that an actor is away
                logger.warning("a piece of %d bytes did not come: %s", into.nbytes, error or type(error).__name__)
                failed = True

    await asyncio.gather(*(take_pieces() for _ in range(PIECES_AT_ONCE)))
    return not failed
