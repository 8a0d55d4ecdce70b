"""A plan as one tree of plain values with stable keys."""

from __future__ import annotations

from typing import Any

from cluster.plan.calibrate import DECODE, PREFILL, Calibration
from cluster.plan.facts import GIB
from cluster.plan.fits import nearest_that_fits
from cluster.plan.memory import PoolPlan
from cluster.plan.roofline import Roofline
from cluster.plan.service import ServicePlan
from cluster.plan.tensors import active_parameters, parameters

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def pool_report(plan: PoolPlan) -> dict[str, Any]:
    """One pool. Keys ending in `_gib` are GiB; `weights_gib_per_gpu` is the even share of the checkpoint, as such
    figures are published, `weights_gib_per_gpu_resident` what the fullest GPU really holds."""
    s, arch = plan.settings, plan.arch
    by_kind = {str(kind): round(size / GIB, 4) for kind, size in plan.checkpoint_by_kind.items()}
    return {
        "model": arch.name,
        "family": arch.family,
        "gpu": s.gpu.name,
        "gpus": plan.gpus,
        "gpus_per_replica": s.parallel.gpus,
        "replicas": s.replicas,
        "tp": s.parallel.tp,
        "pp": s.parallel.pp,
        "dp_attention": s.parallel.dp,
        "ep": s.parallel.ep,
        "weights": s.weights.name,
        "weights_format": s.weights.describe(),
        "kv": s.kv,
        "context": s.context,
        "concurrency": s.concurrency,
        "parameters": parameters(arch),
        "parameters_with_mtp": parameters(arch, mtp=True),
        "parameters_active": active_parameters(arch),
        "weights_gib_total": round(plan.checkpoint_bytes / GIB, 4),
        "weights_gib_per_gpu": round(plan.even_share_bytes / GIB, 4),
        "weights_gib_per_gpu_resident": round(plan.resident_bytes / GIB, 4),
        "weights_gib_replicated": round(plan.tightest.held.replicated / GIB, 4),
        "weights_gib_absorbed": round(plan.tightest.held.absorbed / GIB, 4),
        "weights_gib_by_kind": by_kind,
        "hbm_gib": s.gpu.hbm_gib,
        "utilization": s.utilization,
        "activation_gib": round(plan.activation_bytes / GIB, 4),
        "runtime_gib": round(plan.runtime_bytes / GIB, 4),
        "kv_gib_per_gpu": round(max(0, plan.kv_bytes_gpu) / GIB, 4),
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_token_per_gpu": plan.kv_bytes_per_token_gpu,
        "block_tokens": s.block_tokens,
        "page_bytes": plan.page_bytes,
        "blocks": plan.blocks,
        "kv_tokens_per_replica": plan.kv_tokens_replica,
        "kv_tokens": plan.kv_tokens,
        "max_requests": plan.max_requests,
        "longest_context": plan.longest_context,
        "fits": plan.fits,
        "problems": list(plan.problems),
    }


def fits_report(plan: PoolPlan) -> list[dict[str, Any]]:
    """The three nearest settings that fit; empty when the plan fits as it is."""
    if plan.fits:
        return []
    return [
        {
            "changes": entry.changes,
            "gpus": entry.plan.gpus,
            "kv_tokens": entry.plan.kv_tokens,
            "max_requests": entry.plan.max_requests,
            "context": entry.plan.settings.context,
        }
        for entry in nearest_that_fits(plan)
    ]


def decode_curve(line: Roofline, plan: PoolPlan, context: int) -> list[dict[str, Any]]:
    """Decode of one replica at growing batches of `context` tokens each, up to what its cache holds."""
    most = plan.requests_of(context) // plan.settings.replicas
    batches = [b for b in BATCHES if b <= most]
    if most and most not in batches:
        batches.append(most)
    rows = []
    for batch in sorted(batches):
        step = line.decode_step(batch, batch * context)
        rows.append(
            {
                "batch": batch,
                "step_ms": round(step.seconds * 1e3, 3),
                "tok_s": round(batch / step.seconds, 2),
                "tok_s_request": round(1 / step.seconds, 2),
                "bound": step.bound,
            }
        )
    return rows


def service_report(service: ServicePlan) -> dict[str, Any]:
    """Rates, transfer and cost; cost is None without a GPU price."""
    work, batch = service.work, service.decode_batch
    prefill, cost = service.prefill_cost, service.cost_per_million
    step = service.decode_line.decode_step(batch, batch * service.mean_context)
    return {
        "workload": {
            "input_tokens": work.input_tokens,
            "output_tokens": work.output_tokens,
            "prefix_hit": work.prefix_hit,
            "failed": work.failed,
            "retried": work.retried,
            "tpot_ms": work.tpot_ms,
            "gpu_price": work.gpu_price,
        },
        "roofline": {
            "prefill_tok_s": round(service.prefill_requests_s * work.input_tokens, 1),
            "prefill_ms": round(prefill.seconds * 1e3, 2),
            "prefill_bound": prefill.bound,
            "ttft_ms": round(service.ttft_seconds * 1e3, 2),
            "decode_batch": batch,
            "decode_short_of": service.decode_short_of,
            "decode_tok_s": round(service.decode_tokens_s, 1),
            "tpot_ms": round(service.tpot_ms, 3),
            "decode_bound": step.bound,
            "decode": decode_curve(service.decode_line, service.decode, service.mean_context),
        },
        "transfer": {
            "bytes_per_token": service.wire_bytes_token,
            "bytes_per_request": service.wire_bytes_request,
            "bytes_per_request_all_ranks": service.wire_bytes_request_ranks,
            "seconds_per_request": round(service.transfer_seconds, 6),
        },
        "cost": None
        if cost is None
        else {"per_million_input_tokens": round(cost[0], 4), "per_million_output_tokens": round(cost[1], 4)},
    }


def calibration_report(made: Calibration) -> dict[str, Any]:
    """Measured and modelled times, and the constants as keys of `--set`. `worst_predicted` is None when every point
    was fitted."""
    pools = {"decode": (made.decode, DECODE), "prefill": (made.prefill, PREFILL)}
    return {
        "points": [
            {
                "what": point.name,
                "measured_s": point.seconds,
                "modelled_s": modelled,
                "off": modelled / point.seconds - 1,
                "fitted": point.fitted,
            }
            for point, modelled in made.points
        ],
        "worst_predicted": made.worst_predicted,
        "settings": {
            pool: {name: float(f"{getattr(constants, name):.4g}") for name in names}
            for pool, (constants, names) in pools.items()
        },
    }
