"""What a model needs and what it will do on given GPUs, before anybody has bought them.

    name, config, folder = model_config("glm-5.2")          # or a folder or config.json of a Hugging Face checkpoint
    arch = architecture(config, name)
    settings = PoolSettings(gpu("H200"), weight_format("int4", arch), kv_format("fp8", arch), Parallel(tp=8))
    plan = plan_pool(arch, settings)                         # plan.kv_tokens, plan.max_requests, plan.problems
    check_fit(plan, "decode pool")                           # DoesNotFit, with three settings that would
    roofline = Roofline.of(arch, settings)                   # roofline.decode_step_seconds(batch, context_tokens_total)

Pure arithmetic over facts in `cluster/models.json`: no clock, no network, no GPU.
"""

from __future__ import annotations

from cluster.planning.architecture import Architecture, architecture
from cluster.planning.compare import Row, compare_status
from cluster.planning.facts import GIB, Gpu, PlanError, gpu, known_gpus, known_models, model_config
from cluster.planning.fits import Alternative, DoesNotFit, check_fit, nearest_that_fits
from cluster.planning.formats import WeightFormat, kv_format, weight_format
from cluster.planning.from_spec import plan_spec
from cluster.planning.memory import PoolPlan, PoolSettings, implied_reserve, plan_pool
from cluster.planning.pages import check_pair, page_layout
from cluster.planning.roofline import Constants, Roofline, StepCost, constants_for
from cluster.planning.service import ServicePlan, Split, Workload
from cluster.planning.sharding import Parallel
from cluster.planning.tensors import active_parameters, parameters, tensors

__all__ = [
    "GIB",
    "Alternative",
    "Architecture",
    "Constants",
    "DoesNotFit",
    "Gpu",
    "Parallel",
    "PlanError",
    "PoolPlan",
    "PoolSettings",
    "Roofline",
    "Row",
    "ServicePlan",
    "Split",
    "StepCost",
    "WeightFormat",
    "Workload",
    "active_parameters",
    "architecture",
    "check_fit",
    "check_pair",
    "compare_status",
    "constants_for",
    "gpu",
    "implied_reserve",
    "known_gpus",
    "known_models",
    "kv_format",
    "model_config",
    "nearest_that_fits",
    "page_layout",
    "parameters",
    "plan_pool",
    "plan_spec",
    "tensors",
    "weight_format",
]
