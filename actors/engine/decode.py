"""What a decode replica does with a request: opens its pages, decodes, and sends tokens to their frontends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from actors import deadlines
from actors.engine.in_flight import InFlight, ReplicaError
from actors.engine.orders import OpenParams, to_params
from actors.engine.server import EngineServer
from actors.messages import HandOver, Lease, ReplicaEventKind, Role, Ticket, Verdict

logger = logging.getLogger("pageferry.replica")


class DecodeServer(EngineServer):
    role = Role.DECODE

    async def submit(self, frontend_id: str, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None) -> None:
        """Adds a request to the engine; its tokens come out of `outputs(frontend_id)`."""
        await self.start()
        request = self._decoder.decode(frames)
        live = InFlight(ticket, frontend_id)
        self._live[request.request_id] = live
        try:
            if hand_over is not None:
                lease = await self._begin_read(hand_over, ticket.trace)
                if isinstance(lease, Verdict):
                    # The bytes are not to be had; decode computes the prompt itself.
                    tokens = len(request.prompt_token_ids or ())
                    self._event(
                        ReplicaEventKind.RECOMPUTED, live, ticket.request_id, num_tokens=tokens, detail=str(lease)
                    )
                elif live.aborted:
                    await self._transfer.drop_reader(ticket.ticket_id, ticket.attempt, self.engines)
                elif request.sampling_params is not None:
                    extra = dict(request.sampling_params.extra_args or {})
                    local = msgspec.structs.replace(hand_over, lease=lease)
                    extra["kv_transfer_params"] = to_params(OpenParams(hand_over=local))
                    request.sampling_params.extra_args = extra
            if live.aborted:
                self._live.pop(request.request_id, None)
                return
            await self.core.add_request_async(request)
            live.in_engine = True
        except BaseException:
            self._live.pop(request.request_id, None)
            if hand_over is not None:
                key = (ticket.ticket_id, ticket.attempt)
                self._background(self._transfer.drop_reader(*key, self.engines))
            raise
        if self._was_aborted(live):  # while the request was on its way into the engine
            await self._abort([request.request_id])

    async def _begin_read(self, hand_over: HandOver, trace: str) -> Lease | Verdict:
        lease = hand_over.lease
        wait_s = deadlines.read_s(lease.num_bytes, lease.node_id == self.node_id, hand_over.deadline_s)
        try:
            return await self._transfer.begin_read(hand_over, self.engines, wait_s, trace)
        except ReplicaError as error:
            logger.warning("ticket %d: %s", hand_over.ticket_id, error)
            key = (hand_over.ticket_id, hand_over.attempt)
            self._background(self._transfer.drop_reader(*key, self.engines))  # it may still come to it
            return Verdict.MISSING

    @staticmethod
    def _was_aborted(live: InFlight) -> bool:
        return live.aborted

    async def abort(self, frontend_id: str, request_ids: list[str]) -> None:
        await self._abort(request_ids)

    async def outputs(self, frontend_id: str) -> AsyncGenerator[list[bytes], None]:
        """Every engine step's `EngineCoreOutputs` for this frontend, as MessagePack frames.

        When the stream is closed, whatever that frontend still has here is aborted.
        """
        await self.start()
        queue: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self._streams[frontend_id] = queue
        try:
            yield []  # the stream stands
            while (frames := await queue.get()) is not None:
                yield frames
            raise ReplicaError(self._failure or f"{self.replica_id} has ended the stream")
        finally:
            if self._streams.get(frontend_id) is queue:
                del self._streams[frontend_id]
                await asyncio.shield(
                    self._abort([r for r, live in self._live.items() if live.frontend_id == frontend_id])
                )

    def _on_outputs(self, outputs: Any) -> None:
        mine: dict[str, list[Any]] = {}
        for output in outputs.outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            mine.setdefault(live.frontend_id, []).append(output)
            self._token_rate.tokens += len(output.new_token_ids)
            if not live.started and output.new_token_ids:
                live.started = True
                self._event(ReplicaEventKind.DECODE_STARTED, live, live.ticket.request_id)
                self._tracer.span("decode.first_token", live.ticket.trace, live.seconds)
                if output.prefill_stats is not None and live.ticket.prefill is None:
                    cached = output.prefill_stats.num_cached_tokens
                    self._event(ReplicaEventKind.PROMPT_COMPUTED, live, live.ticket.request_id, num_tokens=cached)
            self._report.note_mismatch(output, live)
            if output.finish_reason is not None:
                del self._live[output.request_id]
                self._tracer.span("decode.engine", live.ticket.trace, live.seconds, end=str(output.finish_reason))
                self._event(ReplicaEventKind.RELEASED, live, live.ticket.request_id)
        # Not the scheduler's statistics: they are this replica's, not a frontend's; the heartbeat has their totals.
        for frontend_id, queue in self._streams.items():
            if share := mine.get(frontend_id):
                queue.put_nowait(self._encode(outputs, share))

    def _report_dropped(self, dropped: dict[str, InFlight]) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        for request_id, live in dropped.items():
            if (queue := self._streams.get(live.frontend_id)) is not None:
                output = EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ABORT)
                queue.put_nowait(self._encode(EngineCoreOutputs(timestamp=time.monotonic()), [output]))
