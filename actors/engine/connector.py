"""The vLLM connector: forwards to a scheduler half and a worker half, which meet only through the metadata value.

Loaded by vLLM through `kv_connector="FerryConnector"`, `kv_connector_module_path="actors.engine.connector"`.
`kv_connector_extra_config` comes from the replica: see `actors.engine.config.engine_kwargs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

from actors import logs
from actors.engine import vllm_patches
from actors.engine.integrity.ledger import tag_epoch
from actors.engine.integrity.tag_check import TagCheck, self_test
from actors.engine.integrity.tracker import CheckTracker, NoTracker, Proof
from actors.engine.layouts import refuse_unlike
from actors.engine.metadata import FerryMetadata
from actors.engine.runner_view import RunnerView, V1View, view_of
from actors.engine.scheduler_half import FerryConnectorScheduler
from actors.engine.seeds import SeedGuard
from actors.engine.utilities import utilities_of
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


class FerryConnector(KVConnectorBase_V1):
    worker_class = FerryConnectorWorker

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
        self.view: RunnerView | None = None
        self._seeds: SeedGuard | None = None
        if self._checking:
            _refuse_unchecked(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            epoch = tag_epoch(config("replica_id", ""), config("incarnation", 0))
            tracker = CheckTracker(epoch) if self._checking else NoTracker()
            self.scheduler = FerryConnectorScheduler(vllm_config.cache_config.block_size, self._block_ids_of, tracker)
            beat(config("life", ""), CORE)
            vllm_patches.add_utilities(self.utilities())
        else:
            parallel = vllm_config.parallel_config
            beat(config("life", ""), CORE + 1 + parallel.rank)
            self.worker = self.worker_class(
                replica_id=config("replica_id", ""),
                role=Role(config("role", Role.DECODE)),
                rank=parallel.rank,
                world=parallel.world_size,
                socket_path=config("socket", ""),
                seals=integrity.get("seals", "full"),
                sample_rate=integrity.get("sample_rate", 1.0),
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

    def utilities(self) -> dict[str, Callable[..., Any]]:
        assert self.scheduler is not None
        return utilities_of(self.scheduler)

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


def _has_window(spec: Any) -> bool:
    return getattr(spec, "sliding_window", None) is not None


def _refuse_unchecked(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises for engines whose block tables the check does not understand: better none than one that sees nothing."""
    specs = iter_layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    parallel = vllm_config.parallel_config
    problem = ""
    kinds = {type(s).__name__ for s in specs if not isinstance(s, FullAttentionSpec) or _has_window(s)}
    if kinds:
        problem = f"attention of kind {', '.join(kinds)} gives pages up while a request still has them in its table"
    elif parallel.decode_context_parallel_size > 1:
        problem = f"decode_context_parallel_size {parallel.decode_context_parallel_size} spreads a page over ranks"
    elif parallel.enable_dbo:
        problem = "enable_dbo splits a step into micro-batches"
    if problem:
        raise ValueError(f"integrity.mode check: {problem}; set integrity.mode: off")
