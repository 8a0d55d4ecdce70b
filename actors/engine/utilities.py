"""What a replica asks of its engine's processes: utilities of EngineCore, and methods of vLLM's workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from actors.engine import vllm_patches
from actors.engine.integrity.tracker import CheckTracker

if TYPE_CHECKING:
    from actors.engine.connector import FerryConnector
    from actors.engine.scheduler_half import FerryConnectorScheduler


# A worker imports this module for its extension, before it loads its model; the connector comes after that.
vllm_patches.count_loaded_weights()


def utilities_of(scheduler: FerryConnectorScheduler) -> dict[str, Callable[..., Any]]:
    """For `vllm_patches.add_utilities`; they run in EngineCore's own thread, between steps."""

    def pageferry_scheduler(core: Any) -> dict[str, Any]:
        pool = core.scheduler.kv_cache_manager.block_pool
        total = pool.num_gpu_blocks - 1  # block 0 is vLLM's null block
        free = pool.get_num_free_blocks()
        report, counters = scheduler.tracker.report(), scheduler.counters
        quarantined = report["blocks_quarantined"]
        return {
            "blocks_total": total,
            "blocks_free": free,
            "blocks_held": total - free - quarantined,
            "blocks_quarantined": quarantined,
            "running": len(core.scheduler.running),
            "waiting": len(core.scheduler.waiting),
            "requests": len(core.scheduler.requests),
            "paused": core.scheduler.pause_state.name != "UNPAUSED",  # by an admin call: it makes no steps
            "idle": scheduler.idle(),
            "counters": {name: getattr(counters, name) for name in counters.__slots__} | report["counters"],
        }

    def pageferry_audit(core: Any, forget: bool = False) -> dict[str, Any]:
        """Every ledger law, now; the latest breaches and verdicts with the pages' histories, which `forget` clears."""
        return scheduler.tracker.audit(not core.scheduler.requests and scheduler.idle(), forget)

    def pageferry_beat(core: Any, pages_max: int, whole: bool) -> dict[str, Any]:
        """`pageferry_scheduler`, and for a heartbeat of the same moment: page deltas and verdicts since the last one.

        `pages`: (request, released, [page, ...], [tag, ...]) as plain values. See `Tracker.take_page_deltas`.
        """
        answer = pageferry_scheduler(core)
        tracker = scheduler.tracker
        report = tracker.take_page_deltas(pages_max, whole)
        answer["pages_whole"] = report.whole
        answer["pages"] = [(d.request_id, d.released, list(d.added), list(d.added.values())) for d in report.deltas]
        if isinstance(tracker, CheckTracker):
            answer["verdicts"] = tracker.take_verdicts()
        return answer

    def pageferry_lift_quarantine(core: Any) -> int:
        """Gives quarantined pages back when no request is alive; returns how many."""
        tracker = scheduler.tracker
        return tracker.lift_quarantine() if isinstance(tracker, CheckTracker) and not core.scheduler.requests else 0

    return {
        utility.__name__: utility
        for utility in (pageferry_scheduler, pageferry_audit, pageferry_beat, pageferry_lift_quarantine)
    }


def connector_of_this_worker() -> FerryConnector:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: FerryConnector = get_kv_transfer_group()
    return connector


class FerryWorkerExtension:
    """Methods that vLLM mixes into its worker (`worker_extension_cls`), for `collective_rpc`."""

    model_runner: Any
    vllm_config: Any

    def pageferry_describe(self) -> dict[str, Any]:
        connector = connector_of_this_worker()
        connector.take_runner(self.model_runner)
        worker, model = connector.worker, self.model_runner.model
        assert worker is not None and worker.layout is not None and connector.view is not None
        weights = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
        return {
            "layout": worker.layout.to_dict(),
            "kv_cache_bytes": sum(cache.numel() * cache.element_size() for cache in worker._caches),
            "weights_bytes": sum(weights.values()),
            "weights_loaded_bytes": vllm_patches.loaded_weight_bytes(),
            "pid": os.getpid(),
            "model_runner": connector.view.version,
            "attention_backend": worker.backend,
            "kv_cache_layout": self.vllm_config.cache_config.kv_cache_layout,
            "cuda_graphs": self.vllm_config.compilation_config.cudagraph_mode.name,
            "device": torch.cuda.get_device_name() if worker._caches[0].is_cuda else worker._caches[0].device.type,
        }

    def pageferry_worker(self) -> dict[str, Any]:
        worker = connector_of_this_worker().worker
        assert worker is not None
        return {
            "bytes_sealed": worker.bytes_sealed,
            "seal_ns": worker.seal_ns,
            "open_ns": worker.open_ns,
            "messages_dropped": worker._link.dropped,
            "pages_verified": worker.pages_verified,
            "pages_unverified": worker.pages_unverified,
            "checks": getattr(worker.check, "checks", 0),
            "check_ns": getattr(worker.check, "check_ns", 0),
        }
