"""The plan, made from headers alone: what is packed, what cannot be, and what the error says then."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic_checkpoint import Geometry, make_checkpoint

from ops.compress.families import choose, family_of
from ops.compress.plan import Action, Options, Plan, make_plan
from ops.compress.source import Checkpoint, open_checkpoint

pytestmark = pytest.mark.compiles  # whole checkpoints

SMALL = Geometry(layers=2, experts=2, vocab=256)


def plan_of(path: Path, options: Options | None = None, **kinds: list[str]) -> tuple[Checkpoint, Plan]:
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.model_type)
    choice = choose(family, kinds.get("pack", []), kinds.get("keep", []), kinds.get("keep_match", []))
    return checkpoint, make_plan(checkpoint, choice, options or Options(shard_bytes=1 << 20))


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "bf16"
    make_checkpoint(path, SMALL, fp8=False, shard_bytes=4 << 20)
    return path


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "fp8"
    make_checkpoint(path, SMALL, fp8=True, shard_bytes=4 << 20)
    return path


def test_every_source_tensor_has_one_fate(fp8: Path) -> None:
    checkpoint, plan = plan_of(fp8)
    sources = [task.source.name for task in plan.tasks]
    scales = [task.scale.name for task in plan.tasks if task.scale]
    assert sorted(sources + scales) == sorted(checkpoint.tensors)
    assert plan.bytes_in == checkpoint.nbytes
    fates = {task.kind: task.action for task in plan.tasks if task.source.name.endswith("weight")}
    assert fates["routed_experts"] is fates["attention"] is Action.PACK
    assert fates["attention_latent"] is fates["shared_experts"] is fates["mlp"] is Action.DEQUANT
    assert fates["router"] is fates["embedding"] is fates["lm_head"] is fates["norm"] is Action.COPY
    assert len({output.name for task in plan.tasks for output in task.outputs}) == sum(
        len(task.outputs) for task in plan.tasks
    )
    assert not any(output.dtype.startswith("F8") for task in plan.tasks for output in task.outputs)


def test_files_are_cut_by_size_and_numbered(bf16: Path) -> None:
    _, plan = plan_of(bf16)
    for shard in plan.shards:
        assert sum(task.bytes_out for task in shard.tasks) <= 1 << 20 or len(shard.tasks) == 1
    assert [shard.file for shard in plan.shards][
        -1
    ] == f"model-{len(plan.shards):05d}-of-{len(plan.shards):05d}.safetensors"
    _, single = plan_of(bf16, Options())
    assert [shard.file for shard in single.shards] == ["model.safetensors"]


def test_group_size_error_names_the_tensor_and_what_divides(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", replace(SMALL, moe_intermediate=96), fp8=False)
    with pytest.raises(ValueError, match=r"experts.0.down_proj.weight has 96 input columns.*--group-size 32 divides"):
        plan_of(tmp_path / "m")
    _, plan = plan_of(tmp_path / "m", Options(group_size=32))
    assert any(task.action is Action.PACK for task in plan.tasks)
    _, kept = plan_of(tmp_path / "m", keep=["routed_experts"])
    assert not any(task.action is Action.PACK and task.kind == "routed_experts" for task in kept.tasks)


def test_tensor_parallel_groups_are_checked(bf16: Path) -> None:
    plan_of(bf16, Options(tensor_parallel=2))
    with pytest.raises(ValueError, match=r"over --tp 4 that is 64 a GPU.*group sizes that do: \[32, 64\]"):
        plan_of(bf16, Options(tensor_parallel=4))
    plan_of(bf16, Options(tensor_parallel=4, group_size=64))


def test_asymmetric_needs_whole_words_of_zero_points(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", replace(SMALL, moe_intermediate=132), fp8=False)
    with pytest.raises(ValueError, match="has 132 rows; asymmetric"):
        plan_of(tmp_path / "m", Options(symmetric=False), keep_match=[r"down_proj"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(group_size=48), "--group-size 48: one of 32, 64, 128"),
        (Options(clip_grid=()), "clip ratios"),
        (Options(clip_grid=(1.2,)), "clip ratios"),
        (Options(tensor_parallel=0), "must be positive"),
    ],
)
def test_bad_options_are_named(bf16: Path, options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_of(bf16, options)


def _edit(path: Path, change: dict[str, object]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))


def test_sources_that_cannot_be_packed(tmp_path: Path) -> None:
    path = tmp_path / "m"
    make_checkpoint(path, SMALL, fp8=True)
    _edit(path, {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ValueError, match=r"already quantised \(awq\)"):
        plan_of(path)
    _edit(path, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}})
    with pytest.raises(ValueError, match="only 128 x 128"):
        plan_of(path)
    _edit(path, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    scale = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
    lost = tensors.pop(scale)
    save_file(tensors, file)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    with pytest.raises(ValueError, match="names 1 tensors that no file holds"):
        open_checkpoint(path)
    del index["weight_map"][scale]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"up_proj.weight is FP8 but .*weight_scale_inv is not in"):
        plan_of(path)
    save_file({**tensors, scale: lost[:1, :1].contiguous()}, file)
    index["weight_map"][scale] = file.name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"needs F32 or BF16 \[2, 4\]"):
        plan_of(path)


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m"
    make_checkpoint(path, SMALL, fp8=False)
    (file,) = path.glob("*.safetensors")
    (path / "model.safetensors.index.json").unlink()
    save_file({**load_file(file), "model.layers.1.mlp.experts.gate_up_proj": torch.zeros(2, 8, 8)}, file)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj holds all experts in one tensor \[2, 8, 8\]"):
        plan_of(path)
    plan_of(path, keep_match=["experts.gate_up_proj"])


def test_identity_tells_what_changed(bf16: Path) -> None:
    _, plan = plan_of(bf16)
    _, same = plan_of(bf16)
    _, other = plan_of(bf16, Options(shard_bytes=1 << 20, group_size=64))
    assert plan.identity() == same.identity()
    changed = [key for key, value in plan.identity().items() if other.identity()[key] != value]
    assert changed == ["options", "outputs"]
