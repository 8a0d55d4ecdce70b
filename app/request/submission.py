"""The request in a decode engine: its id there, its output stream, and whether it has answered or ended there."""

from __future__ import annotations

import asyncio
import logging

from actors.messages import HandOver, ReplicaId, Ticket
from app.request.context import fetch_exception
from app.request.decode_stream import DecodeStream, DecodeStreams, Receiver
from app.request.events import DecodeLost
from app.rpc.ports import DecodePort, ReplicaGone

logger = logging.getLogger("pageferry.frontend")

CONTROL_S = 10.0  # a call that only passes something on (submit, abort) takes milliseconds; this is the time-out
LINK_S = 30.0  # opening the output stream of a replica that is just starting


class Submission:
    """The current one of a request; each has an engine id of its own. `silent`: it has sent nothing yet."""

    def __init__(self, request_id: str, decode: DecodePort, streams: DecodeStreams) -> None:
        self.engine_id = ""  # before the first one
        self.silent = True
        self.finished = False
        self.count = 0
        self._request_id = request_id
        self._decode = decode
        self._streams = streams
        self._stream: DecodeStream | None = None

    @property
    def replica_id(self) -> ReplicaId:
        """The replica whose output is listened to; "" when none is."""
        return self._stream.replica_id if self._stream is not None else ""

    def begin(self, replica: ReplicaId, receiver: Receiver) -> None:
        self.stop_listening()
        self.silent, self.finished = True, False
        self.count += 1
        self.engine_id = self._request_id if self.count == 1 else f"{self._request_id}~{self.count}"
        self._stream = self._streams.to(replica)
        self._stream.register(self.engine_id, receiver)

    async def send(self, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None) -> DecodeLost | None:
        """None: decode has it. A loss has no number of tokens yet. Cancelled, it returns once the call has ended, so
        that an abort comes after it."""
        assert self._stream is not None
        replica = ticket.decode
        call: asyncio.Future[None] | None = None
        try:
            await asyncio.wait_for(self._stream.standing(), LINK_S)
            call = asyncio.ensure_future(self._decode.submit(replica, frames, ticket, hand_over))
            call.add_done_callback(fetch_exception)
            await asyncio.wait_for(asyncio.shield(call), CONTROL_S)
        except asyncio.CancelledError:
            if call is not None:
                await asyncio.wait((call,), timeout=CONTROL_S)
            raise
        except (ReplicaGone, TimeoutError) as error:
            if call is not None:
                call.cancel()
            reason = str(error) or f"no answer within {CONTROL_S:g} s"
            died = call is not None and isinstance(error, ReplicaGone) and error.died
            return DecodeLost(replica, reason, 0, died)
        except Exception as error:
            logger.warning("decode %s refused request %s: %r", replica, self._request_id, error)
            return DecodeLost(replica, f"it refused with {type(error).__name__}", 0)
        return None

    def stop_listening(self) -> None:
        if self._stream is not None:
            self._stream.forget(self.engine_id)
            self._stream = None

    async def abort(self, ticket: Ticket | None) -> None:
        """Unless it has ended there, or never came there."""
        try:
            if self.engine_id and not self.finished and ticket is not None:
                await asyncio.wait_for(self._decode.abort(ticket.decode, [self.engine_id]), CONTROL_S)
        except (ReplicaGone, TimeoutError):
            pass  # a replica that is gone has aborted everything; a silent one is fenced by the controller
        except Exception:
            logger.exception("aborting %s on %s", self.engine_id, ticket and ticket.decode)
