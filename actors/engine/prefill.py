"""What a prefill replica does with a request: leases staging, computes the prompt, seals its pages."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from actors.engine.in_flight import InFlight, PrefillRefused
from actors.engine.orders import SealParams, to_params
from actors.engine.server import EngineServer
from actors.messages import PrefillDone, ReplicaEventKind, Role, Ticket
from kernels.layout import PageLayout


class PrefillServer(EngineServer):
    role = Role.PREFILL

    async def prefill(self, ticket: Ticket, frames: list[bytes]) -> PrefillDone:
        """Computes the ticket's prompt and seals its pages into staging. Cancelling the call aborts both."""
        await self.start()
        began = time.monotonic()
        request = self._decoder.decode(frames)
        num_tokens = len(request.prompt_token_ids)
        wire = PageLayout.from_dict(ticket.wire_layout)
        num_bytes = len(self.engines) * -(-num_tokens // wire.page_tokens) * wire.page_bytes
        wait_s, keep_s = ticket.deadline_s / 2 or 5.0, max(self.spec.transfer.lease_s, ticket.deadline_s)
        key = (ticket.ticket_id, ticket.attempt)
        lease = None
        try:
            lease = await self._transfer.lease(*key, num_bytes, self.engines, wait_s, keep_s, ticket.trace)
        finally:
            if lease is None:  # it may still be granted, or was at first, with an answer that got lost
                self._background(self._transfer.drop_writer(*key, self.engines))
        if lease is None:
            raise PrefillRefused(f"no staging room for {num_bytes} bytes on node {self.node_id}")
        self._tracer.span("prefill.lease", ticket.trace, time.monotonic() - began, bytes=num_bytes)
        order = SealParams(
            ticket_id=ticket.ticket_id,
            attempt=ticket.attempt,
            num_tokens=num_tokens,
            wire_layout=ticket.wire_layout,
            lease=lease,
        )
        request.request_id = f"{ticket.request_id}.{ticket.attempt}"
        assert request.sampling_params.max_tokens == 1, "prefill computes the prompt and one token"
        request.sampling_params.extra_args = {"kv_transfer_params": to_params(order)}
        live = InFlight(ticket, ticket.frontend_id, done=asyncio.get_running_loop().create_future())
        self._live[request.request_id] = live
        assert live.done is not None
        try:
            await self.core.add_request_async(request)
            live.in_engine = True
            self._event(ReplicaEventKind.PREFILL_STARTED, live, ticket.request_id)
            output, outputs = await live.done
        except asyncio.CancelledError:
            if live.in_engine:
                await asyncio.shield(self._abort([request.request_id]))
                # The worker half reports WriterDone once the engine has let go; then the bytes are given back.
                await asyncio.shield(self._transfer.release(*key))
            else:
                await asyncio.shield(self._transfer.drop_writer(*key, self.engines))
            raise
        except Exception:  # the engine is gone or hangs: the bytes are free when it cannot touch them any more
            await self._transfer.release(*key)
            raise
        finally:
            self._live.pop(request.request_id, None)
            self._event(ReplicaEventKind.RELEASED, live, ticket.request_id)
        if str(output.finish_reason) not in ("length", "stop"):
            await self._transfer.release(*key)
            raise PrefillRefused(f"prefill of ticket {ticket.ticket_id} ended as {output.finish_reason}")
        stats = output.prefill_stats
        cached = stats.num_cached_tokens if stats else 0
        self._tracer.span("prefill.engine", ticket.trace, live.seconds, tokens=num_tokens, cached_tokens=cached)
        if stats is not None:
            self._event(ReplicaEventKind.PROMPT_COMPUTED, live, ticket.request_id, num_tokens=cached)
        if str(output.finish_reason) == "length" and num_tokens + 1 < self.config.model_config.max_model_len:
            output.finish_reason = None  # this engine was asked for one token; for its client the request goes on
        return PrefillDone(
            ticket_id=ticket.ticket_id,
            attempt=ticket.attempt,
            num_tokens=num_tokens,
            num_cached_tokens=cached,
            seconds=time.monotonic() - began,
            output=self._encode(outputs, [output]),
        )

    async def abort(self, ticket_ids: list[int]) -> None:
        gone = set(ticket_ids)
        await self._abort([r for r, live in self._live.items() if live.ticket.ticket_id in gone])

    def _on_outputs(self, outputs: Any) -> None:
        for output in outputs.outputs:
            live = self._live.get(output.request_id)
            if live is None or live.done is None:
                continue
            live.started = True
            self._report.note_mismatch(output, live)
            if output.finish_reason is not None and not live.done.done():
                live.done.set_result((output, outputs))
