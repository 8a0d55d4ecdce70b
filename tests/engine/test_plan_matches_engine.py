"""The plan against real engines: pages and weights of vLLM's CPU build, within 2 % (in fact to the byte).

One process starts the engines one after the other and prints what each of them allocated; the plan is made from the
same folders. Weights are counted when vLLM has loaded them and before its CPU build packs linear layers into copies
that no tensor shows; MLA's absorbed copies come after that too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.plan.architecture import architecture
from cluster.plan.compare import compare_status
from cluster.plan.facts import GIB, gpu, model_config
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.from_spec import plan_spec
from cluster.plan.memory import PoolPlan, PoolSettings, plan_pool
from cluster.plan.tensors import Cut, Kind, Tensor
from ops.engine_pair import EnginePair

ROOT = Path(__file__).parents[2]
DEMO = ROOT / ".models" / "smollm2-135m-instruct"
TOLERANCE = 0.02
# (folder, KV). MLA has no FP8 cache on a CPU, sparse attention does not run there at all.
ENGINES = [
    ("smollm2", "bf16"),
    ("smollm2", "fp8"),
    ("deepseek-v3", "bf16"),
    ("glm4-moe", "fp8"),
    ("glm4-moe-lite", "bf16"),
    ("qwen3-moe", "bf16"),
]

# Runs in its own process: vLLM reads its environment at import.
RUNNER = """
import gc, json, sys
import actors.engine.vllm_patches  # FP8 pages on a CPU without AVX-512
from vllm import LLM
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader import base_loader

loaded = []
pack = base_loader.process_weights_after_loading

def count_then_pack(model, *args, **kwargs):
    loaded.append(sum({p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}.values()))
    return pack(model, *args, **kwargs)

base_loader.process_weights_after_loading = count_then_pack
for number, (folder, kv) in enumerate(json.loads(sys.argv[1])):
    llm = LLM(folder, kv_cache_dtype="auto" if kv == "bf16" else kv, enforce_eager=True, max_model_len=1024,
              distributed_executor_backend="uni")
    cache = llm.llm_engine.vllm_config.cache_config
    core = llm.llm_engine.engine_core.engine_core
    tokens = llm.generate(["The history of"], use_tqdm=False)[0].outputs[0].token_ids
    print("ENGINE " + json.dumps({
        "blocks": cache.num_gpu_blocks,
        "block_tokens": cache.block_size,
        "kv_bytes": sum(tensor.size for tensor in core.scheduler.kv_cache_config.kv_cache_tensors),
        "weights_bytes": loaded[number],
        "generated": len(tokens),
    }), flush=True)
    del llm, core
    gc.collect()
    cleanup_dist_env_and_memory()
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not (DEMO / "model.safetensors").is_file():
        pytest.skip(f"no demo model at {DEMO}: make model")
    out = tmp_path_factory.mktemp("tiny")
    families = sorted({name for name, _ in ENGINES} - {"smollm2"})
    command = [sys.executable, "-m", "ops.tiny_models.build", str(out), *families, "--tokenizer", str(DEMO)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return {"smollm2": DEMO, **{family: out / family for family in families}}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[tuple[str, str], dict[str, Any]]:
    runs = json.dumps([(str(folders[name]), kv) for name, kv in ENGINES])
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, runs],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=480,
    )
    seen = [json.loads(line.removeprefix("ENGINE ")) for line in done.stdout.splitlines() if line.startswith("ENGINE ")]
    assert len(seen) == len(ENGINES), f"engines stopped after {len(seen)}:\n{done.stderr[-4000:]}"
    return dict(zip(ENGINES, seen))


def planned(folder: Path, kv: str, block_tokens: int) -> PoolPlan:
    name, config, _ = model_config(str(folder))
    arch = architecture(config, name)
    settings = PoolSettings(
        gpu("CPU"),
        weight_format("auto", arch, config),
        kv_format(kv, arch),
        block_tokens=block_tokens,
        context=1024,
        kv_space_gib=1.0,
    )
    plan = plan_pool(arch, settings)
    assert plan.fits
    return plan


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: "-".join(engine))
def test_plan_is_what_the_engine_allocates(engine: tuple[str, str], engines: Any, folders: dict[str, Path]) -> None:
    real = engines[engine]
    plan = planned(folders[engine[0]], engine[1], real["block_tokens"])
    assert real["generated"] > 0
    assert plan.blocks == real["blocks"]
    assert plan.blocks * plan.page_bytes == real["kv_bytes"] <= GIB
    assert plan.kv_tokens == pytest.approx(real["blocks"] * real["block_tokens"], rel=TOLERANCE)
    held = plan.tightest.held
    assert held.total - held.absorbed == pytest.approx(real["weights_bytes"], rel=TOLERANCE)
    # Only the scales of the caches, a few floats a layer, are not weights.
    assert abs(held.total - held.absorbed - real["weights_bytes"]) < 64 * plan.arch.layers


@pytest.mark.asyncio(loop_scope="session")
async def test_a_running_pair_agrees_with_the_plan_of_its_topology(pair: EnginePair) -> None:
    """What `pageferry plan --check` does at a service: replicas' own announcements against the topology's plan."""
    pools: dict[str, Any] = {}
    for announced in pair.controller.joined.values():
        pools.setdefault(str(announced.role), {"replicas": []})["replicas"].append(msgspec.to_builtins(announced))
    assert set(pools) == {"prefill", "decode"}
    rows = compare_status({"pools": pools}, plan_spec(pair.spec), TOLERANCE)
    assert {"KV tokens", "KV cache bytes", "layers", "KV heads a rank", "row values a head"} <= {r.what for r in rows}
    assert [row for row in rows if not row.ok] == []
    assert len(rows) >= 10


def test_what_the_cpu_build_refuses_is_a_problem_of_the_plan(folders: dict[str, Path]) -> None:
    name, config, _ = model_config(str(folders["deepseek-v3"]))
    arch = architecture(config, name)
    plan = plan_pool(
        arch,
        PoolSettings(gpu("CPU"), weight_format("auto", arch), kv_format("fp8", arch), context=1024, kv_space_gib=1.0),
    )
    assert "BF16 latent cache" in plan.problems[0]


def test_int4_bytes_are_those_of_the_library_that_packs_them() -> None:
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    out, into, group = 96, 192, 32
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    groups = -(-into // group)
    state = {
        "weight": torch.randn(out, into, dtype=torch.bfloat16),
        "weight_scale": torch.ones(out, groups, dtype=torch.bfloat16),
        "weight_zero_point": torch.zeros(out, groups, dtype=torch.int8),
    }
    packed = PackedQuantizationCompressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    size = sum(tensor.numel() * tensor.element_size() for tensor in packed.values())
    tensor = Tensor("x.weight", (out, into), Kind.EXPERT, Cut.OUT)
    name, config, _ = model_config("kimi-k2.6")
    assert weight_format("int4", architecture(config, name)).tensor_bytes(tensor) == size
