"""Every reach of this package into the internals of vLLM and Ray: what it is, why, and where it is done.

`TARGETS` lists them with the parameters they had in vLLM 0.32 and Ray 2.60; a test holds the list against what is
installed. A change of something of theirs is made by a function of this module and nowhere else. Attributes of vLLM's
model runners are read in `runner_view` alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.executor import multiproc_executor

from actors.engine.config import QUEUE_BUSY_LOOP

WORKER_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # vLLM reads it whenever it starts a process


class Target(NamedTuple):
    where: str  # module:name
    parameters: tuple[str, ...] | None  # None: no function
    reason: str


TARGETS = (
    Target(
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.__init__",
        ("self", "is_reader", "context", "notify_address", "busy_loop_s"),
        "the default of busy_loop_s (1 s): on CPU vLLM joins EngineCore and Worker by a queue whose reader yields in a "
        "loop for this long after each read, so EngineCore takes a core while Worker computes (shorten_busy_loop)",
    ),
    Target(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor._init_executor",
        ("self",),
        "EngineCore makes its queues there, before it loads a connector, and starts its worker (MultiprocExecutor)",
    ),
    Target(
        "vllm.v1.engine.core:EngineCoreProc._invoke_utility_method",
        ("name", "get_result", "output", "enqueue_output"),
        "utilities are looked up by name on EngineCore; there is no registry (add_utilities)",
    ),
    Target(
        "vllm.v1.engine.async_llm:EngineCoreClient.make_async_mp_client",
        ("vllm_config", "executor_class", "log_stats", "client_addresses", "client_count", "client_index", "renderer"),
        "AsyncLLM has no argument for its engine core client (core_client)",
    ),
    Target(
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks",
        ("self", "num_blocks"),
        "the pool has no event before it hands pages out (integrity.block_pool_hooks)",
    ),
    Target(
        "vllm.v1.core.block_pool:BlockPool.free_blocks",
        ("self", "ordered_blocks"),
        "the pool has no event for pages that come back (integrity.block_pool_hooks)",
    ),
    Target(
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
        (
            "self", "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id",
            "block_mask",
        ),
        "a lost page must not be offered under its former hash (integrity.block_pool_hooks)",
    ),
    Target(
        "vllm.v1.core.block_pool:BlockPool.evict_blocks",
        ("self", "block_ids"),
        "a page in doubt leaves the prefix cache (integrity.block_pool_hooks)",
    ),
    Target(
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove",
        ("self", "block"),
        "a page in doubt leaves the free list (integrity.block_pool_hooks)",
    ),
    Target(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.free",
        ("self", "request"),
        "the end of a request's hold on its pages (integrity.block_pool_hooks)",
    ),
    Target(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.pop_blocks_for_free",
        ("self", "request"),
        "the same, where the free is deferred (integrity.block_pool_hooks)",
    ),
    Target(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        "who a step's check names must end before the step's outputs are made (integrity.scheduler)",
    ),
    Target(
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
        ("self", "request_ids", "finished_status"),
        "ends them (integrity.scheduler)",
    ),
    Target(
        "vllm.v1.engine.utils:get_mp_context",
        (),
        "how EngineCore processes are started (engine_cores_from)",
    ),
    Target(
        "vllm.v1.core.sched.scheduler:Scheduler.pause_state",
        None,
        "a paused engine makes no steps and has not hung (utilities)",
    ),
    Target(
        "vllm.v1.worker.block_table:BlockTable.get_device_tensor",
        ("self", "num_reqs"),
        "the block table that a step of model runner V1 reads (runner_view)",
    ),
    Target(
        "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector._build_load_kwargs",
        ("scheduler_output", "input_batch", "attn_metadata"),
        "who is in a step of model runner V2 (runner_view)",
    ),
    Target(
        "vllm.model_executor.model_loader.base_loader:process_weights_after_loading",
        ("model", "model_config", "target_device"),
        "CPU builds pack linear layers and drop the loaded tensors: a running model's parameters miss most of what was "
        "loaded, so it is counted there (count_loaded_weights)",
    ),
    Target(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        ("dtype", "block_size", "head_size", "kv_cache_dtype"),
        "refuses an FP8 cache on a CPU without AVX-512 (allow_fp8_pages)",
    ),
    Target(
        "vllm._custom_ops:cpu_attn_reshape_and_cache",
        (
            "key", "value", "key_cache", "value_cache", "slot_mapping", "isa", "k_scale", "v_scale", "kv_cache_dtype",
        ),
        "has no kernel for FP8 without AVX-512 (cpu_fp8)",
    ),
    Target(
        "vllm._custom_ops:cpu_attention_with_kv_cache",
        (
            "query", "key_cache", "value_cache", "output", "query_start_loc", "seq_lens", "scale", "causal",
            "alibi_slopes", "sliding_window", "block_table", "softcap", "scheduler_metadata", "s_aux",
            "dynamic_causal", "k_scale", "v_scale", "kv_cache_dtype",
        ),
        "the same (cpu_fp8)",
    ),
    Target(
        "vllm._custom_ops:cpu_attn_get_scheduler_metadata",
        (
            "num_reqs", "num_heads", "num_kv_heads", "head_dim", "seq_lens", "dtype", "query_start_loc", "causal",
            "sliding_window_size", "isa", "enable_kv_split", "dynamic_causal", "kv_cache_dtype",
        ),
        "the same (cpu_fp8)",
    ),
    Target(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
        "BF16 layers without AVX-512 fall back to a loop of dot products, a seventh of FP32's speed (multiply_in_fp32)",
    ),
    Target(
        "ray._private.authentication.http_token_authentication:get_auth_headers_if_auth_enabled",
        ("user_headers",),
        "calls to the dashboard of a cluster with authentication (controller.actor)",
    ),
)  # fmt: skip


def shorten_busy_loop() -> None:
    """Readers that this process makes from now on sleep after `$PAGEFERRY_QUEUE_BUSY_LOOP_S` seconds; unset: vLLM's."""
    if value := os.environ.get(QUEUE_BUSY_LOOP):
        shm_broadcast.SpinCondition.__init__.__defaults__ = (float(value),)


class MultiprocExecutor(multiproc_executor.MultiprocExecutor):
    """The `distributed_executor_backend` of CPU engines: vLLM imports it in EngineCore before that makes its queues."""

    def _init_executor(self) -> None:
        shorten_busy_loop()
        # The worker is forked from EngineCore, which has imported all that it needs and has computed nothing yet:
        # half of a small engine's start is the import. vLLM forks workers on other platforms; for CPUs it says "spawn".
        method = os.environ.get(WORKER_METHOD, "spawn")
        os.environ[WORKER_METHOD] = "fork"
        try:
            super()._init_executor()
        finally:
            os.environ[WORKER_METHOD] = method


class ShortBusyLoop:
    """A `worker_extension_cls` without methods, for engines that have none of ours: a worker imports it before it
    opens its queue."""


def add_utilities(utilities: Mapping[str, Callable[..., Any]]) -> None:
    """Functions of (engine core, arguments...) that `EngineCoreClient.call_utility_async(name, ...)` finds."""
    from vllm.v1.engine.core import EngineCore

    for name, utility in utilities.items():
        setattr(EngineCore, name, utility)


def replace(owner: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Puts `method` in the place of one of an object's own, which is returned. Only what `TARGETS` names."""
    known = {target.where for target in TARGETS}
    assert any(f"{kind.__module__}:{kind.__qualname__}.{name}" in known for kind in type(owner).__mro__), name
    before: Callable[..., Any] = getattr(owner, name)
    setattr(owner, name, method)
    return before


@contextmanager
def core_client(client: Any) -> Iterator[None]:
    """An `AsyncLLM` that is made inside uses `client` in the place of an engine core client of vLLM's making."""
    from vllm.v1.engine import async_llm

    class Factory:
        @staticmethod
        def make_async_mp_client(*_: Any, **__: Any) -> Any:
            return client

    kept = async_llm.EngineCoreClient
    async_llm.EngineCoreClient = Factory
    try:
        yield
    finally:
        async_llm.EngineCoreClient = kept


@contextmanager
def engine_cores_from(context: Any) -> Iterator[None]:
    """EngineCore processes that are made inside are those of `context`, a `multiprocessing` context."""
    from vllm.v1.engine import utils

    kept = utils.get_mp_context
    utils.get_mp_context = lambda: context
    try:
        yield
    finally:
        utils.get_mp_context = kept


_loaded_weight_bytes = 0


def loaded_weight_bytes() -> int:
    """Bytes of parameters as loaded in this process, before any packing; 0 before a model was loaded here."""
    return _loaded_weight_bytes


def count_loaded_weights() -> None:
    """Wraps the loader's last step in this process. Idempotent."""
    from vllm.model_executor.model_loader import base_loader

    pack = base_loader.process_weights_after_loading
    if getattr(pack, "counts_for_pageferry", False):
        return

    @functools.wraps(pack)
    def count_then_pack(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        global _loaded_weight_bytes
        sizes = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
        _loaded_weight_bytes = sum(sizes.values())
        return pack(model, *args, **kwargs)

    count_then_pack.counts_for_pageferry = True  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = count_then_pack


def allow_fp8_pages() -> None:
    """FP8 caches for vLLM's CPU attention in this process, where the CPU has no AVX-512. Idempotent."""
    from actors.engine.cpu_fp8 import Fp8Operators, is_fp8, is_needed

    if not is_needed():
        return
    from vllm.v1.attention.backends import cpu_attn

    if isinstance(cpu_attn.ops, Fp8Operators):
        return
    choose = cpu_attn._get_attn_isa

    def choose_for_bf16(
        dtype: torch.dtype, block_size: int, head_size: int | None = None, kv_cache_dtype: str | None = None
    ) -> str:
        isa: str = choose(dtype, block_size, head_size, None if is_fp8(kv_cache_dtype) else kv_cache_dtype)
        if is_fp8(kv_cache_dtype) and isa != "vec":
            raise NotImplementedError(
                f"FP8 KV cache on a CPU without AVX-512 needs pages of a multiple of 32 tokens and heads of a multiple "
                f"of 32, not block_size {block_size} and head_size {head_size}"
            )
        return isa

    cpu_attn._get_attn_isa = choose_for_bf16
    cpu_attn.ops = Fp8Operators(cpu_attn.ops)


def multiply_in_fp32() -> None:
    """BF16 linear layers of this process compute in FP32 where the CPU has no BF16 kernel. Idempotent."""
    from actors.engine.cpu_fp8 import is_needed, multiply_widened

    if not is_needed():
        return
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    if getattr(dispatch, "multiplies_in_fp32", False):
        return

    @functools.wraps(dispatch)
    def widen_or_dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.dtype == torch.bfloat16 and layer.weight.ndim == 2 and not layer.weight.is_meta:
            multiply_widened(layer, remove_weight)
        else:
            dispatch(layer, remove_weight)

    widen_or_dispatch.multiplies_in_fp32 = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = widen_or_dispatch


CACHED_SCALES = {
    "vllm.v1.attention.backends.flashinfer": ("bmm1_scale", "bmm2_scale"),
    "vllm.v1.attention.backends.mla.flashinfer_mla": ("bmm1_scale", "bmm2_scale"),
    "vllm.v1.attention.backends.mla.flashinfer_mla_sparse": ("bmm1_scale", "bmm2_scale"),
    "vllm.v1.attention.backends.mla.tokenspeed_mla": ("softmax_scale",),
}
"""What these backends make of a layer's scales at their first call, where it is None. With CUDA graphs that call comes
before connectors see the caches, and the writer would then scale by other numbers than the reader."""


def set_kv_scales(layer: Any, k_scale: float, v_scale: float) -> None:
    """Of an attention layer: vLLM sets them from a checkpoint or to 1, and has no setting."""
    cached = CACHED_SCALES.get(type(getattr(layer, "impl", None)).__module__, ())
    for name in cached:
        setattr(layer.impl, name, None)
    if cached and getattr(layer, "_o_scale_float", None) is not None:
        layer._o_scale_float = None  # it is part of what was cached, and is taken again with it
    layer._k_scale.fill_(k_scale)
    layer._v_scale.fill_(v_scale)
    layer._k_scale_float = k_scale
    layer._v_scale_float = v_scale


shorten_busy_loop()
allow_fp8_pages()
multiply_in_fp32()
