"""FerryCoreClient: stands where AsyncLLM expects its engine core, and serves each request from two pools.

It only carries: what to do next is `app.request.state`, which request form goes where is `app.request.eligibility`.
One `RequestDriver` a request performs the state machine's actions and has one `finally` that gives everything back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from actors.messages import AdmitRequest, Claim, FrontendCommand, ReplicaId, Role
from app.api.errors import to_exception
from app.metrics import Discard, FrontendMetrics
from app.request import context, eligibility
from app.request.decode_stream import DecodeStreams
from app.request.driver import Collaborators, RequestDriver
from app.request.events import Broken, Cancelled, Event, Finished, PrefillLost, RequestError
from app.request.group import SequenceGroup
from app.request.many_engines import shared_lora
from app.rpc.ports import ControllerPort, DecodePort, PrefillPort

logger = logging.getLogger("pageferry.frontend")


class FerryCoreClient:
    """The part of vLLM's `EngineCoreClient` that AsyncLLM and the OpenAI server use.

    `num_engines` is how many decode replicas there can be at once: each has an engine index in vLLM's own metrics.
    `retries_mismatch`: a request whose block table named a page that is not its own is run again elsewhere, once.
    `on_fault(request_id, fault)` is called when a request fails after it was added.
    """

    def __init__(
        self,
        frontend_id: str,
        controller: ControllerPort,
        prefill: PrefillPort,
        decode: DecodePort,
        *,
        block_tokens: int,
        caches_prefixes: bool = True,
        num_engines: int = 1,
        tokenizer: str = "",
        retries_mismatch: bool = False,
        metrics: FrontendMetrics | None = None,
    ) -> None:
        self.frontend_id = frontend_id
        self.controller = controller
        self.prefill = prefill
        self.decode = decode
        self.block_tokens = block_tokens
        self.tokenizer = tokenizer
        self.caches_prefixes = caches_prefixes
        self.retries_mismatch = retries_mismatch
        self.on_fault: Callable[[str, RequestError], None] = lambda request_id, fault: None
        self.runs: dict[str, RequestDriver] = {}
        self.groups: dict[int, SequenceGroup] = {}  # by ticket id, live ones
        self._open_groups: dict[str, SequenceGroup] = {}  # n > 1, being added; by vLLM's id of the whole
        self._releasing: set[asyncio.Task[None]] = set()
        # vLLM's surface
        self.engine_ranks_managed = list(range(num_engines))
        self.resources = SimpleNamespace(engine_dead=False)
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.supported_tasks: tuple[Any, ...] | None = None  # None: an engine has to be asked
        self._lora_numbers: dict[int, int] = {}  # this frontend's own -> the one that engines know
        self.streams = DecodeStreams(decode, self._outputs.put_nowait, self._expected, num_engines)
        self.metrics = metrics = metrics or FrontendMetrics(Discard)
        self._collaborators = Collaborators(controller, prefill, decode, self.streams, metrics, self._ended)

    # -- requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Returns once the request is admitted. Raises what the client should see when it is not."""
        group = self._group_of(request.request_id)
        if group.fault is not None:  # one of its sequences has failed while others were being added
            raise to_exception(group.fault)
        if self.resources.engine_dead:
            raise EngineDeadError()
        if request.resumable:
            raise VLLMValidationError("streaming input is not supported by this service")
        params = request.sampling_params
        for name in eligibility.INTERNAL_ARGS:
            if params is not None and name in (params.extra_args or {}):
                raise VLLMValidationError(f"{name} is an internal field and not accepted", parameter=name)
        if request.lora_request is not None:
            request = msgspec.structs.replace(request, lora_request=shared_lora(request.lora_request))
        eligibility.check_encodable(request)
        caller = context.current()
        if caller.tenant:
            request = msgspec.structs.replace(request, cache_salt=context.cache_salt(caller.tenant))
        if caller.span.context:
            request = msgspec.structs.replace(request, trace_headers={"traceparent": caller.span.context})
        run = RequestDriver(
            request,
            group.request or self._admission(request, group.num_sequences, caller),
            group,
            caller,
            self._collaborators,
            page_tokens=self.block_tokens if self.caches_prefixes else None,
            retries_mismatch=self.retries_mismatch,
        )
        self.runs[request.request_id] = run
        group.join(run)
        run.start()
        try:
            await run.admitted
        except asyncio.CancelledError:
            run.tell(Cancelled())
            raise

    def limited(self, tenant: str, limit: str) -> None:
        """A request was refused before it came here: its tenant has used a limit up."""
        self._collaborators.metrics.limited(tenant, limit)

    def begin_group(self, name: str, num_sequences: int) -> SequenceGroup:
        """The next requests, `0_NAME`, `1_NAME` and so on, are the n sequences of one prompt."""
        group = self._open_groups[name] = self._new_group(num_sequences)
        return group

    def end_group(self, name: str) -> None:
        """No more of them will come. Idempotent."""
        group = self._open_groups.pop(name, None)
        if group is None:
            return
        group.closed = True
        if group.idle:
            task = context.detached(group.release_if_idle())
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    def _group_of(self, request_id: str) -> SequenceGroup:
        if (group := self._open_groups.get(request_id.partition("_")[2])) is None:
            group = self._new_group(1)
            group.closed = True
        return group

    def _new_group(self, num_sequences: int) -> SequenceGroup:
        return SequenceGroup(num_sequences, self.controller, self._hold, self._released)

    def _admission(self, request: EngineCoreRequest, num_sequences: int, caller: context.Caller) -> AdmitRequest:
        params, prompt = request.sampling_params, request.prompt_token_ids or ()
        num_prompt = len(prompt) or (0 if request.prompt_embeds is None else len(request.prompt_embeds))
        return AdmitRequest(
            request_id=request.request_id,
            frontend_id=self.frontend_id,
            num_prompt_tokens=num_prompt,
            max_tokens=(params.max_tokens or 1) if params is not None else 1,
            num_sequences=num_sequences,
            disaggregate=eligibility.disaggregates(request),
            prefix_hashes=eligibility.prefix_hashes(prompt, self.block_tokens, request.cache_salt),
            session=request.session_id or caller.session,
            tenant=caller.tenant,
            patience_s=caller.patience_s,
            priority=-request.priority,  # vLLM's API: lower comes earlier
            tokenizer=self.tokenizer,
            trace=caller.span.context,
        )

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """vLLM has found the end of these requests, a stop string. Acts at once, as `cancel` does."""
        self._tell(request_ids, Finished())

    def cancel(self, request_ids: list[str]) -> None:
        """The client is gone. Every phase hears of it before this returns; what is left to do runs on by itself."""
        self._tell(request_ids, Cancelled())

    def _tell(self, request_ids: list[str], event: Event) -> None:
        for request_id in request_ids:
            if run := self.runs.get(request_id):
                run.tell(event)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    # -- tickets

    def _hold(self, group: SequenceGroup) -> None:
        """From now on the ticket is ours to end. Its stream is opened at once: a replica with one does not leave."""
        assert group.ticket is not None
        self.groups[group.ticket.ticket_id] = group
        self.streams.to(group.ticket.decode)
        self.streams.settle()  # it may have been somewhere else before

    def _released(self, group: SequenceGroup) -> None:
        if group.ticket is not None:
            self.groups.pop(group.ticket.ticket_id, None)
            self.streams.settle()

    def _expected(self, replica_id: ReplicaId) -> bool:
        return any(g.ticket is not None and g.ticket.decode == replica_id for g in self.groups.values())

    def replica_leaving(self, replica_id: ReplicaId) -> None:
        self.streams.replica_leaving(replica_id)

    def live_tickets(self) -> tuple[int, ...]:
        return tuple(self.groups)

    def claims(self) -> tuple[Claim, ...]:
        return tuple(claim for group in self.groups.values() if (claim := group.claim()) is not None)

    def obey(self, order: FrontendCommand) -> None:
        """The controller has seen what concerns one of our tickets. What concerns an older attempt is absorbed."""
        group = self.groups.get(order.ticket_id)
        if group is None or group.ticket is None:
            return
        if order.kind == "cancelled":
            if order.attempt >= group.ticket.attempt:
                group.tell(Broken(f"the controller gave this request up: {order.reason}", 503))
        elif order.attempt != group.ticket.attempt:
            return
        elif order.role is Role.PREFILL:
            group.tell(PrefillLost(order.reason, order.died))
        else:
            for run in list(group.members.values()):
                if order.kind == "lost" or run.movable:
                    run.decode_lost(order.replica_id, order.reason, order.died)

    def _ended(self, run: RequestDriver, fault: RequestError | None) -> None:
        self.runs.pop(run.request_id, None)
        if fault is not None:
            run.group.fault = fault
            self.on_fault(run.request_id, fault)

    # -- the rest of vLLM's surface

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        if self.supported_tasks is None:
            results = await self.decode.utility("get_supported_tasks", [])
            self.supported_tasks = tuple(results[0])
        return self.supported_tasks

    async def _everywhere(self, method: str, *args: Any) -> list[Any]:
        return await self.decode.utility(method, list(args))

    async def _in_both_pools(self, method: str, *args: Any) -> list[Any]:
        answers = await asyncio.gather(self.decode.utility(method, [*args]), self.prefill.utility(method, [*args]))
        return [answer for pool in answers for answer in pool]

    async def reset_prefix_cache_async(self, reset_running: bool = False, reset_connector: bool = False) -> bool:
        return all(await self._in_both_pools("reset_prefix_cache", reset_running, reset_connector))

    async def reset_mm_cache_async(self) -> None:
        await self._everywhere("reset_mm_cache")

    async def reset_encoder_cache_async(self) -> None:
        await self._everywhere("reset_encoder_cache")

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        shared = shared_lora(lora_request)
        self._lora_numbers[lora_request.lora_int_id] = shared.lora_int_id
        return all(await self._everywhere("add_lora", shared))

    async def remove_lora_async(self, lora_id: int) -> bool:
        return all(await self._everywhere("remove_lora", self._lora_numbers.pop(lora_id, lora_id)))

    async def list_loras_async(self) -> set[int]:
        return set[int]().union(*await self._everywhere("list_loras"))

    async def pin_lora_async(self, lora_id: int) -> bool:
        return all(await self._everywhere("pin_lora", self._lora_numbers.get(lora_id, lora_id)))

    async def is_sleeping_async(self) -> bool:
        return any(await self._everywhere("is_sleeping"))

    async def is_scheduler_paused_async(self) -> bool:
        return any(await self._everywhere("is_scheduler_paused"))

    async def get_weight_version_async(self) -> str:
        return str((await self._everywhere("get_weight_version"))[0])

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}

    def dp_engines_running(self) -> bool:
        return bool(self.runs)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_async"):
            raise NotImplementedError(f"{name.removesuffix('_async')} is not offered by a service of many engines")
        raise AttributeError(name)

    def shutdown(self, timeout: float | None = None) -> None:
        self.resources.engine_dead = True
        for run in list(self.runs.values()):
            run.tell(Cancelled())
        self.streams.close("the frontend is shutting down")

    async def drained(self, timeout_s: float) -> None:
        """Waits until every request has given back what it held."""
        until = time.monotonic() + timeout_s
        while (self.runs or self.groups or self._releasing) and time.monotonic() < until:
            await asyncio.sleep(0.05)
