"""The vLLM connector: forwards to a scheduler half and a worker half, which meet only through the metadata value.

Loaded by vLLM through `kv_connector="FerryConnector"`, `kv_connector_module_path="actors.engine.connector"`.
`kv_connector_extra_config` comes from the replica: `replica_id`, `role`, `socket`, `kv_scales`, `integrity`, `faults`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from actors import logs
from actors.engine import vllm_patches, weights
from actors.engine.fault_injection import FaultError, Faults
from actors.engine.integrity.ledger import tag_epoch
from actors.engine.integrity.tag_check import TagCheck, self_test
from actors.engine.integrity.tracker import CheckTracker, NoTracker, Proof
from actors.engine.layouts import refuse_unlike
from actors.engine.metadata import FerryMetadata
from actors.engine.runner_view import RunnerView, V1View, view_of
from actors.engine.scheduler_half import FerryConnectorScheduler
from actors.engine.seeds import SeedGuard
from actors.engine.watch import CORE, beat
from actors.engine.worker_half import FerryConnectorWorker
from actors.messages import Role

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


# A worker imports this module before it loads its model and before it opens its queue.
weights.count_at_load()
vllm_patches.shorten_busy_loop()


class FerryConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        logs.to_stderr()
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"this model has {len(kv_cache_config.kv_cache_groups)} KV cache groups; pages of hybrid models "
                "(sliding window, Mamba) have no codec, so it cannot be served in two pools"
            )
        self.scheduler: FerryConnectorScheduler | None = None
        self.worker: FerryConnectorWorker | None = None
        config = self._kv_transfer_config.get_from_extra_config
        self._empty_step = False
        integrity = config("integrity", {})
        self._checking = integrity.get("mode", "off") == "check"
        self.faults = Faults.of(config("faults", {}))
        self.view: RunnerView | None = None
        self._seeds: SeedGuard | None = None
        if self._checking:
            _refuse_unchecked(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            epoch = tag_epoch(config("replica_id", ""), time.time_ns())
            tracker = CheckTracker(epoch) if self._checking else NoTracker()
            self.scheduler = FerryConnectorScheduler(vllm_config.cache_config.block_size, self._block_ids_of, tracker)
            beat(config("life", ""), CORE)
            _add_utilities(self)
        else:
            parallel = vllm_config.parallel_config
            beat(config("life", ""), CORE + 1 + parallel.rank)
            self.worker = FerryConnectorWorker(
                replica_id=config("replica_id", ""),
                role=Role(config("role", Role.DECODE)),
                rank=parallel.rank,
                world=parallel.world_size,
                socket_path=config("socket", ""),
                seals=integrity.get("seals", "full"),
                sample_rate=integrity.get("sample_rate", 1.0),
                faults=self.faults,
            )
        self._kv_scales: tuple[float, float] = tuple(config("kv_scales", (1.0, 1.0)))
        self._kv_dtype: str = config("kv_dtype", "bfloat16")

    @property
    def requires_kv_delivery(self) -> bool:
        # Sealing needs no page after its step, so a preempted prefill has nothing left to deliver.
        return False

    # -- scheduler side

    def _block_ids_of(self, request_id: str) -> list[int]:
        assert self._kv_cache_manager is not None
        block_ids: list[int] = self._kv_cache_manager.get_block_ids(request_id)[0]
        return block_ids

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self.scheduler is not None
        self.scheduler.tracker.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        assert self.scheduler is not None
        self.scheduler.on_new_request(request.request_id, request.kv_transfer_params)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        external = self.scheduler.num_external_tokens(request.request_id, num_computed_tokens)
        return external, external > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.on_allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self.scheduler is not None
        metadata = self.scheduler.build(scheduler_output)
        # vLLM then calls `start_load_kv` before the forward: the check can stop a row from reading, and pages are
        # opened while the forward of those that run is under way; else they would land a whole step later.
        if self._checking or metadata.opens:
            scheduler_output.has_sync_kv_loads = True
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self.scheduler is not None
        self.scheduler.on_loaded(
            set(connector_output.finished_recving or ()), set(connector_output.failed_recving or ())
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        self.scheduler.on_finished(request.request_id)
        return False, None

    # -- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self.worker is not None
        layers = self._vllm_config.compilation_config.static_forward_context
        cache = self._vllm_config.cache_config
        self.worker.register(kv_caches, layers, cache.cache_dtype, self._kv_scales)
        assert self.worker.layout is not None
        refuse_unlike(self.worker.layout, cache.block_size, self._kv_dtype)
        if self._checking:
            device = next(iter(kv_caches.values())).device
            # A check that does not see a planted fault must not be taken for one that sees none.
            self_test(device)
            config = self._vllm_config
            page_tokens = config.cache_config.block_size
            self.worker.check = TagCheck(
                num_pages=self._kv_cache_config.num_blocks,
                page_tokens=page_tokens,
                max_rows=config.scheduler_config.max_num_seqs,
                max_pages=-(-config.model_config.max_model_len // page_tokens) + 1,
                device=device,
            )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # vLLM calls it first of all in a step, before requests move within the batch.
        if self._seeds is not None:
            self._seeds.put_back()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self.worker is not None
        self._empty_step = not (forward_context.attn_metadata or kwargs.get("request_ids"))
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FerryMetadata)
        if self._checking and self.view is not None:
            self.worker.check.step(metadata.integrity, self.view.step(forward_context, kwargs))
        if self._seeds is not None:
            self._seeds.set_aside()
        self.worker.start_opening(metadata)

    def take_runner(self, runner: Any) -> None:
        """Worker side, before the first request: vLLM's model runner, which connectors are not given.

        Raises `RunnerError` for one that is not known.
        """
        self.view = view_of(runner)
        self._seeds = SeedGuard(self.view) if isinstance(self.view, V1View) and runner.device.type == "cpu" else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        assert self.worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FerryMetadata)
        self.worker.seal(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.worker is not None
        finished, failed = self.worker.landed(self._empty_step)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> Proof | None:
        assert self.worker is not None
        return self.worker.check.proof()

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()


def _refuse_unchecked(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises for engines whose block tables the check does not understand: better none than one that sees nothing."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    parallel = vllm_config.parallel_config
    problem = ""
    if not isinstance(spec, FullAttentionSpec) or getattr(spec, "sliding_window", None) is not None:
        problem = f"attention of kind {type(spec).__name__} gives pages up while a request still has them in its table"
    elif parallel.decode_context_parallel_size > 1:
        problem = f"decode_context_parallel_size {parallel.decode_context_parallel_size} spreads a page over ranks"
    elif parallel.enable_dbo:
        problem = "enable_dbo splits a step into micro-batches"
    if problem:
        raise ValueError(f"integrity.mode check: {problem}; set integrity.mode: off")


def _add_utilities(connector: FerryConnector) -> None:
    """Gives the engine core more utility methods, so that the replica can ask the scheduler half in its own thread.

    vLLM looks utilities up by name on the engine core (`EngineCoreClient.call_utility_async`); it has no registry.
    """
    from vllm.v1.engine.core import EngineCore

    half = connector.scheduler
    assert half is not None

    def pageferry_scheduler(self: Any) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        total = pool.num_gpu_blocks - 1  # block 0 is vLLM's null block
        free = pool.get_num_free_blocks()
        report = half.tracker.report()
        quarantined = report["blocks_quarantined"]
        return {
            "blocks_total": total,
            "blocks_free": free,
            "blocks_held": total - free - quarantined,
            "blocks_quarantined": quarantined,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "requests": len(self.scheduler.requests),
            "paused": self.scheduler.pause_state.name != "UNPAUSED",  # by an admin call: it makes no steps
            "idle": half.idle(),
            "counters": {name: getattr(half.counters, name) for name in half.counters.__slots__} | report["counters"],
        }

    def pageferry_audit(self: Any, forget: bool = False) -> dict[str, Any]:
        """Every ledger law, now; the latest breaches and verdicts with the pages' histories, which `forget` clears."""
        return half.tracker.audit(not self.scheduler.requests and half.idle(), forget)

    def pageferry_beat(self: Any, pages_max: int, whole: bool) -> dict[str, Any]:
        """`pageferry_scheduler`, and for a heartbeat of the same moment: page deltas and verdicts since the last one.

        `pages`: (request, released, [page, ...], [tag, ...]) as plain values. See `CheckTracker.take_page_deltas`.
        """
        found = pageferry_scheduler(self)
        tracker = half.tracker
        if isinstance(tracker, CheckTracker):
            report = tracker.take_page_deltas(pages_max, whole)
            found["pages_whole"] = report.whole
            found["pages"] = [(d.request_id, d.released, list(d.added), list(d.added.values())) for d in report.deltas]
            found["verdicts"] = tracker.take_verdicts()
        return found

    def pageferry_lift_quarantine(self: Any) -> int:
        """Gives quarantined pages back when no request is alive; returns how many."""
        tracker = half.tracker
        return tracker.lift_quarantine() if isinstance(tracker, CheckTracker) and not self.scheduler.requests else 0

    def pageferry_fault(self: Any, kind: str, trial: int, victim: str) -> dict[str, Any]:
        """Only where `faults.kinds` allows it: spoils the pool's account of a page of `victim`."""
        if connector.faults is None:
            raise FaultError("faults are off: faults.kinds is empty")
        guard = getattr(half.tracker, "guard", None)
        return connector.faults.on_pool(kind, trial, victim, self.scheduler.kv_cache_manager, guard)

    parked: list[CheckTracker] = []

    def pageferry_integrity_switch(self: Any, on: bool) -> bool:
        """For measuring, with `integrity.mode: check` and no request alive: everything off and on again in one engine.

        The worker has a method of the same name; call both. Returns whether it was possible.
        """
        if on == connector._checking:
            return True
        if self.scheduler.requests:
            return False
        if on and parked:
            half.tracker = parked.pop()
            half.tracker.resume()
        elif isinstance(half.tracker, CheckTracker):
            parked.append(half.tracker)
            half.tracker.pause()
            half.tracker = NoTracker()
        else:
            return False
        connector._checking = on
        return True

    methods = (
        pageferry_scheduler,
        pageferry_audit,
        pageferry_beat,
        pageferry_lift_quarantine,
        pageferry_fault,
        pageferry_integrity_switch,
    )
    for method in methods:
        setattr(EngineCore, method.__name__, method)


class FerryWorkerExtension:
    """Methods that vLLM mixes into its worker (`worker_extension_cls`), for `collective_rpc`."""

    def pageferry_describe(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        connector.take_runner(self.model_runner)  # type: ignore[attr-defined]
        half = connector.worker
        caches = half._caches
        model = self.model_runner.model  # type: ignore[attr-defined]
        return {
            "layout": half.layout.to_dict(),
            "kv_cache_bytes": sum(cache.numel() * cache.element_size() for cache in caches),
            "weights_bytes": weights.tensor_bytes(model),
            "weights_loaded_bytes": weights.loaded_bytes(),
            "pid": os.getpid(),
        }

    def pageferry_worker(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        half = get_kv_transfer_group().worker
        return {
            "bytes_sealed": half.bytes_sealed,
            "seal_ns": half.seal_ns,
            "open_ns": half.open_ns,
            "messages_dropped": half._link.dropped,
            "pages_verified": half.pages_verified,
            "pages_unverified": half.pages_unverified,
            "checks": getattr(half.check, "checks", 0),
            "check_ns": getattr(half.check, "check_ns", 0),
        }

    def pageferry_fault(self, kind: str, trial: int, target: str | int, more: float = 0) -> dict[str, Any]:
        """Only where `faults.kinds` allows it. `target`: the victim's request id (block tables, tags; `more` is the
        first position to spoil), or a ticket id (the road; `more` is a late proof's delay in seconds)."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        faults: Faults | None = connector.faults
        if faults is None:
            raise FaultError("faults are off: faults.kinds is empty")
        if isinstance(target, str):
            return faults.on_tables(kind, trial, target, connector.view, connector.worker.check, int(more))
        return faults.arm(kind, trial, target, more)

    def pageferry_land_late(self, ticket_id: int) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        half: FerryConnectorWorker = get_kv_transfer_group().worker
        return half.land_late(ticket_id)

    def pageferry_integrity_switch(self, on: bool, seals: str) -> None:
        """The worker's part of the switch for measuring; `seals` as in the configuration."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        connector._checking = on and connector.worker.check.enabled
        connector.worker.set_seals(seals)

    def pageferry_fault_log(self) -> list[dict[str, Any]]:
        """What faults did in this worker since the last call."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        faults: Faults = get_kv_transfer_group().faults
        log, faults.log = faults.log, []
        return log
