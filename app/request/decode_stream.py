"""One decode replica's output stream: one message an engine step with all of this frontend's requests in it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder

from actors.messages import ReplicaId
from app.request.context import detached
from app.rpc.ports import DecodePort, ReplicaGone

logger = logging.getLogger("pageferry.frontend")

LEAVING_REMEMBERED = 256


class Receiver(Protocol):
    def accept(self, output: EngineCoreOutput, step_s: float) -> EngineCoreOutput | None:
        """The output as vLLM's output processor should see it; None swallows it. `step_s`: on the engine's clock."""
        ...

    def decode_lost(self, replica_id: ReplicaId, reason: str, died: bool = False) -> None: ...


class DecodeStream:
    """Reads the stream for as long as the replica lives and tells every receiver when it ends."""

    def __init__(
        self,
        replica_id: ReplicaId,
        engine_index: int,
        stream: AsyncIterator[list[bytes]],
        emit: Callable[[EngineCoreOutputs], None],
        on_closed: Callable[[DecodeStream], None],
        expected: Callable[[], bool] = lambda: False,
    ) -> None:
        self.replica_id = replica_id
        self.engine_index = engine_index
        self.closed = False
        self._open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receivers: dict[str, Receiver] = {}  # by the request's id in that engine
        self._stream = stream
        self._emit = emit
        self._on_closed = on_closed
        self._expected = expected
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self.leaving = False  # close with the last receiver
        self._reason = ""
        self._pump_task = detached(self._pump())

    async def standing(self) -> None:
        """Returns once the replica has taken the stream: only then do outputs go anywhere. Raises when it is gone."""
        await asyncio.shield(self._open)

    def register(self, engine_id: str, receiver: Receiver) -> None:
        self._receivers[engine_id] = receiver

    def forget(self, engine_id: str) -> None:
        """Later outputs of this id are dropped: no token of a given-up attempt gets through."""
        self._receivers.pop(engine_id, None)
        self.settle()

    def close_when_empty(self) -> None:
        self.leaving = True
        self.settle()

    def settle(self) -> None:
        """The open stream keeps a leaving replica: it ends when nothing of this frontend is or will be there."""
        if self.leaving and not self._receivers and not self._expected():
            self.close("the replica is leaving and this frontend has nothing there")

    def close(self, reason: str) -> None:
        if not self.closed:
            self._reason = reason
            self._pump_task.cancel()

    async def _pump(self) -> None:
        reason, died = "its output stream ended", True
        try:
            async for frames in self._stream:
                if not self._open.done():
                    self._open.set_result(None)
                if frames:
                    self.deliver(frames)
        except asyncio.CancelledError:
            reason, died = self._reason or "the link was closed", False
        except ReplicaGone as error:
            reason, died = str(error), error.died
        except Exception as error:
            logger.warning("output stream of %s: %r", self.replica_id, error)
            reason = f"its output stream failed with {type(error).__name__}"
        finally:
            self.closed = True
            died = died and self._open.done()  # a replica that never took the stream had no request of ours
            if not self._open.done():
                self._open.set_exception(ReplicaGone(self.replica_id, reason))
                self._open.exception()  # nothing may be waiting for it
            self._on_closed(self)
            receivers, self._receivers = list(self._receivers.values()), {}
            for receiver in receivers:
                receiver.decode_lost(self.replica_id, reason, died)
            if (close := getattr(self._stream, "aclose", None)) is not None:
                await close()

    def deliver(self, frames: list[bytes], to: Receiver | None = None) -> None:
        """Passes on what an engine has put out. `to`: whose all of it is; None: the ids say it."""
        outputs = self._decoder.decode(frames)
        # The engine's clock is another machine's; shifting keeps its intervals and makes them comparable here.
        now = time.monotonic()
        step_s = outputs.timestamp
        shift = now - step_s
        kept = []
        for output in outputs.outputs:
            receiver = to or self._receivers.get(output.request_id)
            if receiver is None:
                continue
            accepted = receiver.accept(output, step_s)
            if accepted is None:
                continue
            for event in accepted.events or ():
                event.timestamp += shift
            kept.append(accepted)
        if not kept and outputs.scheduler_stats is None:
            return
        outputs.outputs = kept
        outputs.timestamp = now
        outputs.engine_index = self.engine_index
        outputs.finished_requests = None
        outputs.utility_output = None
        self._emit(outputs)


class DecodeStreams:
    """The open stream of every decode replica that has, or is about to have, a request of this frontend.

    `num_engines`: how many replicas there can be at once; each has an engine index in vLLM's own metrics.
    `expected(replica_id)`: whether a ticket names it whose request is not there yet.
    """

    def __init__(
        self,
        decode: DecodePort,
        emit: Callable[[EngineCoreOutputs], None],
        expected: Callable[[ReplicaId], bool],
        num_engines: int,
    ) -> None:
        self._decode = decode
        self._emit = emit
        self._expected = expected
        self._streams: dict[ReplicaId, DecodeStream] = {}
        self._leaving: dict[ReplicaId, None] = {}
        self._free_indices = list(reversed(range(num_engines)))

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(self._streams)

    def to(self, replica_id: ReplicaId) -> DecodeStream:
        """The stream of a replica, opened when it is not."""
        stream = self._streams.get(replica_id)
        if stream is None or stream.closed:
            index = self._free_indices.pop() if self._free_indices else 0
            stream = DecodeStream(
                replica_id,
                index,
                self._decode.outputs(replica_id),
                self._emit,
                self._closed,
                lambda: self._expected(replica_id),
            )
            stream.leaving = replica_id in self._leaving
            self._streams[replica_id] = stream
        return stream

    def replica_leaving(self, replica_id: ReplicaId) -> None:
        """No new tickets will name it: its stream ends with its last request, so that it can leave."""
        self._leaving[replica_id] = None
        while len(self._leaving) > LEAVING_REMEMBERED:
            del self._leaving[next(iter(self._leaving))]
        if stream := self._streams.get(replica_id):
            stream.close_when_empty()

    def settle(self) -> None:
        """Tickets have moved or ended: closes what only they kept open."""
        for stream in list(self._streams.values()):
            stream.settle()

    def close(self, reason: str) -> None:
        for stream in list(self._streams.values()):
            stream.close(reason)

    def _closed(self, stream: DecodeStream) -> None:
        if self._streams.get(stream.replica_id) is stream:
            del self._streams[stream.replica_id]
        if stream.engine_index not in self._free_indices:
            self._free_indices.append(stream.engine_index)
