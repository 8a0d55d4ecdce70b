"""The small files that make the tensors a checkpoint which vLLM and transformers load as is."""

from __future__ import annotations

import json
from typing import Any

from ops.compress.plan import Plan
from ops.compress.source import Checkpoint
from ops.compress.workfolder import as_json


def quantization_config(plan: Plan) -> dict[str, Any]:
    """The compressed-tensors `pack-quantized` description: weights INT4 by group, activations as they come."""
    options = plan.options
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": options.symmetric,
        "strategy": "group",
        "group_size": options.group_size,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(plan.ignore),
        "kv_cache_scheme": None,
    }


def config_json(checkpoint: Checkpoint, plan: Plan) -> bytes:
    """The source's config with its FP8 description, wherever it stood, replaced by ours."""
    config: dict[str, Any] = json.loads(json.dumps(checkpoint.config))
    nested = config.get("text_config")
    if isinstance(nested, dict):
        nested.pop("quantization_config", None)
    config["quantization_config"] = quantization_config(plan)
    return as_json(config)


def index_json(plan: Plan) -> bytes:
    """`model.safetensors.index.json`: total bytes and the file of every tensor."""
    weight_map = {output.name: shard.file for shard in plan.shards for task in shard.tasks for output in task.outputs}
    return as_json({"metadata": {"total_size": plan.bytes_out}, "weight_map": weight_map})
