"""A plan as one tree of plain values with stable keys, and as the formulas behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.planning.facts import GIB
from cluster.planning.fits import nearest_that_fits
from cluster.planning.formats import FP8_BLOCK, index_row_bytes, kv_row_bytes
from cluster.planning.memory import PoolPlan
from cluster.planning.roofline import Roofline
from cluster.planning.service import ServicePlan, Split
from cluster.planning.tensors import active_parameters, parameters

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


def service_report(service: ServicePlan, split: Split | None) -> dict[str, Any]:
    """Rates, transfer, split and cost. Split, cost and rate-dependent needs are None where nothing fits."""
    work = service.work
    rate = work.rate or (split.requests_s if split else None)
    prefill = service.prefill_cost
    cost = service.cost_per_million(split) if split else None
    curve = decode_curve(service.decode_line, service.decode, service.mean_context)
    return {
        "workload": {
            "input_tokens": work.input_tokens,
            "output_tokens": work.output_tokens,
            "prefix_hit": work.prefix_hit,
            "rate": work.rate,
            "tpot_ms": work.tpot_ms,
            "gpu_price": work.gpu_price,
        },
        "roofline": {
            "prefill_tok_s": round(service.prefill_requests_s * work.input_tokens, 1),
            "prefill_ms": round(prefill.seconds * 1e3, 2),
            "prefill_bound": prefill.bound,
            "ttft_ms": round(service.ttft_seconds * 1e3, 2),
            "decode_batch": service.decode_batch,
            "decode_tok_s": round(service.decode_tokens_s, 1),
            "tpot_ms": round(service.tpot_ms, 3),
            "decode_bound": _bound(service),
            "decode": curve,
        },
        "transfer": {
            "bytes_per_token": service.wire_bytes_token,
            "bytes_per_request": service.wire_bytes_request,
            "bytes_per_request_all_ranks": service.wire_bytes_request_ranks,
            "seconds_per_request": round(service.transfer_seconds, 6),
            "rate": rate,
            "network_gbit_s": round(service.network_gbit_s(rate), 2) if rate else None,
            "staging_bytes": service.staging_bytes(rate) if rate else None,
            "staging_bytes_worst": service.staging_bytes_worst(rate) if rate else None,
        },
        "split": None
        if split is None
        else {
            "prefill": split.prefill,
            "decode": split.decode,
            "gpus": split.gpus,
            "requests_s": round(split.requests_s, 4),
            "output_tok_s": round(split.requests_s * work.output_tokens, 1),
            "prefill_busy": round(split.busy_prefill, 4),
            "decode_busy": round(split.busy_decode, 4),
            "reason": split.reason,
        },
        "cost": None
        if cost is None
        else {"per_million_output_tokens": round(cost[0], 4), "per_million_tokens": round(cost[1], 4)},
    }


def _bound(service: ServicePlan) -> str | None:
    batch = service.decode_batch
    return service.decode_line.decode_step(batch, batch * service.mean_context).bound if batch else None


@dataclass(frozen=True)
class Formula:
    name: str
    numbers: str
    result: str


def explain_pool(plan: PoolPlan) -> list[Formula]:
    """Every memory figure of a pool with its numbers put in, in the order they follow from each other."""
    s, arch, held = plan.settings, plan.arch, plan.tightest.held
    kinds = sorted(plan.checkpoint_by_kind.items(), key=lambda item: -item[1])
    rows = [
        Formula(
            "checkpoint",
            " + ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds if size >= 0.005 * GIB or len(kinds) < 6),
            f"{plan.checkpoint_bytes / GIB:.2f} GiB in {s.weights.describe()}",
        ),
        Formula(
            "even share",
            f"{plan.checkpoint_bytes / GIB:.2f} GiB / {s.parallel.gpus} GPUs",
            f"{plan.even_share_bytes / GIB:.2f} GiB",
        ),
        Formula(
            "weights on a GPU",
            f"cut {(held.total - held.replicated - held.absorbed) / GIB:.2f} + replicated {held.replicated / GIB:.2f} "
            f"+ absorbed MLA copies {held.absorbed / GIB:.2f} + extra {s.extra_weights_gib:g}"
            + (", prediction layers not loaded" if arch.mtp_layers and not s.mtp else ""),
            f"{plan.resident_bytes / GIB:.2f} GiB",
        ),
        _row_formula(plan),
    ]
    if s.kv_space_gib is not None:
        rows.append(Formula("KV space", "given", f"{s.kv_space_gib:g} GiB"))
    else:
        rows.append(
            Formula(
                "KV space on a GPU",
                f"{s.gpu.hbm_gib:g} x {s.utilization:g} - weights {plan.resident_bytes / GIB:.2f} - forward pass "
                f"{plan.activation_bytes / GIB:.2f} - runtime {plan.runtime_bytes / GIB:.2f}",
                f"{plan.kv_bytes_gpu / GIB:.2f} GiB",
            )
        )
    pages = -(-s.context // s.block_tokens)
    rows += [
        Formula(
            "pages",
            f"{max(0, plan.kv_bytes_gpu):,} B / ({plan.kv_bytes_per_token_gpu:,.0f} B x {s.block_tokens} tokens)",
            f"{plan.blocks:,} a rank",
        ),
        Formula(
            "KV tokens",
            f"{plan.blocks:,} pages x {s.block_tokens} x {s.parallel.dp} attention ranks x {s.replicas} replicas",
            f"{plan.kv_tokens:,}",
        ),
        Formula(
            "requests",
            f"floor(({plan.blocks:,} - 1) / {pages:,} pages of {s.context:,} tokens) x {s.parallel.dp} x {s.replicas}",
            f"{plan.max_requests:,}",
        ),
    ]
    return rows


def _row_formula(plan: PoolPlan) -> Formula:
    s, arch = plan.settings, plan.arch
    row = kv_row_bytes(arch, s.kv)
    if arch.mla is None:
        size = 2 if s.kv == "bf16" else 1
        shape = f"2 (K, V) x {arch.kv_heads} heads x {arch.head_dim} x {size} B"
    elif s.kv == "fp8_ds_mla":
        latent, rope = arch.mla.kv_lora_rank, arch.mla.qk_rope_head_dim
        shape = f"{latent} e4m3 + {latent // FP8_BLOCK} x 4 B scales + {rope} x 2 B rope"
    else:
        size = 2 if s.kv == "bf16" else 1
        shape = f"({arch.mla.kv_lora_rank} latent + {arch.mla.qk_rope_head_dim} rope) x {size} B"
    layers = arch.layers + (arch.mtp_layers if s.mtp else 0)
    numbers = f"{layers} layers x {row} B [{shape}]"
    if arch.dsa:
        owners = len(arch.dsa.layers) + (arch.mtp_layers if s.mtp else 0)
        numbers += f" + {owners} indexers x {index_row_bytes(arch)} B"
    copies = "the same on every TP rank" if arch.mla else f"{plan.kv_bytes_per_token_gpu:,.0f} B on one GPU"
    return Formula("KV bytes a token", numbers, f"{plan.kv_bytes_per_token:,} B, {copies}")


def explain_service(service: ServicePlan, split: Split | None) -> list[Formula]:
    """The times and what follows from them, numbers put in."""
    work, line = service.work, service.decode_line
    batch = service.decode_batch
    rows = []
    if batch:
        step = line.decode_step(batch, batch * service.mean_context)
        touched = (
            f" + {line.experts_touched(batch):.0f} experts x {line.expert_bytes / 1e9:.4g} GB" if line.experts else ""
        )
        rows.append(
            Formula(
                "decode step",
                f"{line.layers} layers x {line.constants.layer_overhead_us:g} us + max(({line.dense_bytes / 1e9:.2f} GB"
                f"{touched}) / {line.gpu.hbm_tb_s:g} TB/s x {line.constants.memory_efficiency:g} "
                f"[{step.weights_s * 1e3:.2f} ms] + KV [{step.kv_s * 1e3:.2f} ms], "
                f"compute [{step.compute_s * 1e3:.2f} ms])",
                f"{step.seconds * 1e3:.2f} ms at {batch} x {service.mean_context:,} tokens, {step.bound} bound",
            )
        )
    cost = service.prefill_cost
    first = service.prefill_line
    rows.append(
        Formula(
            "prefill",
            f"{work.computed_tokens:,} tokens x {first.flops_per_token / 1e9:.1f} GFLOP and attention / "
            f"({first.parallel.tp * first.parallel.dp} GPUs x {first.gpu.bf16_tflops:g} TFLOP/s x "
            f"{first.constants.prefill_efficiency:g}) + overhead {cost.overhead_s * 1e3:.1f} ms",
            f"{cost.seconds * 1e3:.0f} ms, {cost.bound} bound",
        )
    )
    rows.append(
        Formula(
            "transfer",
            f"{work.input_tokens:,} tokens x {service.wire_bytes_token:,} B x "
            f"{service.wire_bytes_request_ranks // service.wire_bytes_request} copies / "
            f"({service.decode.settings.parallel.tp} x {work.link_gb_s:g} GB/s)",
            f"{service.transfer_seconds * 1e3:.1f} ms",
        )
    )
    rows.append(
        Formula(
            "constants",
            f"overhead {line.constants.layer_overhead_us:g} us a layer and prefill efficiency "
            f"{first.constants.prefill_efficiency:g}: fitted to published rates of Kimi K2.6 and GLM 5.2 on H200 (see "
            f"--published), on a CPU to one small machine; bandwidth efficiency {line.constants.memory_efficiency:g}: "
            "assumed",
            "the right order of formats and batches, not the last third of a rate",
        )
    )
    if split:
        rows.append(Formula("split", split.reason, f"{split.prefill}:{split.decode}"))
        cost_m = service.cost_per_million(split)
        if cost_m and work.gpu_price:
            rows.append(
                Formula(
                    "cost",
                    f"{split.gpus} GPUs x {work.gpu_price:g} an hour / ({split.requests_s:.3f} requests/s x "
                    f"{work.output_tokens:,} tokens x 3,600)",
                    f"{cost_m[0]:.2f} a million output tokens",
                )
            )
    return rows
