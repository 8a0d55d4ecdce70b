"""Plans as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.plan.calibrate import Calibration
from cluster.plan.compare import Row
from cluster.plan.facts import GIB
from cluster.plan.fits import Alternative
from cluster.plan.memory import PoolPlan
from cluster.plan.published import CLOSE, Ordering, Published

_PARTS = (
    ("weights", "cyan"),
    ("forward pass", "yellow"),
    ("runtime", "magenta"),
    ("KV pages", "green"),
    ("unused", "dim"),
)
_BAR = 48


def memory_parts(plan: PoolPlan) -> dict[str, float]:
    """GiB of one GPU by use, of the stage whose pages run out first; sums to its HBM when the plan fits. A CPU pool
    has no HBM."""
    parts = {
        "weights": plan.tightest.held.total / GIB,
        "forward pass": plan.activation_bytes / GIB,
        "runtime": plan.runtime_bytes / GIB,
        "KV pages": max(0, plan.blocks * plan.tightest.page_bytes) / GIB,
    }
    parts["unused"] = max(0.0, plan.settings.gpu.hbm_gib - sum(parts.values())) if plan.hbm_bytes else 0.0
    return parts


def pools_table(plans: dict[str, PoolPlan]) -> Table:
    """Memory of each pool, one column a pool."""
    table = Table(title=next(iter(plans.values())).arch.name, title_justify="left")
    table.add_column("")
    for name, plan in plans.items():
        s = plan.settings
        table.add_column(f"{name}\n{plan.gpus} x {s.gpu.name}, {s.parallel.describe()}", justify="right")

    def row(label: str, values: Iterable[str]) -> None:
        table.add_row(label, *values)

    every = list(plans.values())
    row("model", [p.arch.family for p in every])
    row("weights, KV", [f"{p.settings.weights.name}, {p.settings.kv}" for p in every])
    row("weights in all (GiB)", [f"{p.checkpoint_bytes / GIB:,.2f}" for p in every])
    row("  even share of a GPU (GiB)", [f"{p.even_share_bytes / GIB:,.2f}" for p in every])
    row("  on the fullest GPU (GiB)", [f"{p.resident_bytes / GIB:,.2f}" for p in every])
    row("forward pass + runtime (GiB)", [f"{(p.activation_bytes + p.runtime_bytes) / GIB:.2f}" for p in every])
    row("KV pages on a GPU (GiB)", [f"{max(0, p.kv_bytes_gpu) / GIB:,.2f}" for p in every])
    row("KV bytes a token", [f"{p.kv_bytes_per_token:,}" for p in every])
    row("KV tokens", [f"{p.kv_tokens:,}" for p in every])
    row("requests", [f"{p.max_requests:,} of {p.settings.context:,}" for p in every])
    row("longest request (tokens)", [f"{p.longest_context:,}" for p in every])
    row("fits", ["[green]yes[/]" if p.fits else "[red]no[/]" for p in every])
    return table


def bar_lines(plans: dict[str, PoolPlan]) -> list[str]:
    """One coloured bar a pool: how a GPU's memory is used."""
    lines = ["GiB of one GPU"]
    for name, plan in plans.items():
        parts = memory_parts(plan)
        whole = plan.settings.gpu.hbm_gib or sum(parts.values())
        bar = "".join(f"[{style}]{'█' * round(_BAR * parts[part] / whole)}[/]" for part, style in _PARTS)
        legend = "  ".join(f"[{style}]{part} {parts[part]:.1f}[/]" for part, style in _PARTS if parts[part])
        lines.append(f"{name:8} {bar}\n{'':8} {legend}")
    return lines


def service_tables(report: dict[str, Any]) -> list[Table]:
    """Rates at growing batches, then what one workload needs and costs."""
    roof, work = report["roofline"], report["workload"]
    curve = Table(title="decode, one replica", title_justify="left")
    for column in ("requests", "ms a step", "tok/s", "tok/s a request", "bound by"):
        curve.add_column(column, justify="right")
    for entry in roof["decode"]:
        curve.add_row(
            f"{entry['batch']}",
            f"{entry['step_ms']:.2f}",
            f"{entry['tok_s']:,.0f}",
            f"{entry['tok_s_request']:,.1f}",
            entry["bound"],
        )
    needs = Table(
        title=f"{work['input_tokens']:,} tokens in, {work['output_tokens']:,} out",
        title_justify="left",
        show_header=False,
    )
    needs.add_row("time to first token, empty queues", f"{roof['ttft_ms']:,.0f} ms")
    needs.add_row("prefill, one replica", f"{roof['prefill_tok_s']:,.0f} tok/s, {roof['prefill_bound']} bound")
    needs.add_row(
        "decode, one replica full",
        f"{roof['decode_tok_s']:,.0f} tok/s, {roof['tpot_ms']:.1f} ms a token at {roof['decode_batch']} requests, "
        f"short of {roof['decode_short_of']}",
    )
    transfer, cost = report["transfer"], report["cost"]
    needs.add_row(
        "hand-over of one request",
        f"{_size(transfer['bytes_per_request'])}, to all ranks {_size(transfer['bytes_per_request_all_ranks'])}, "
        f"{transfer['seconds_per_request'] * 1e3:.1f} ms",
    )
    if cost:
        needs.add_row(
            "cost of busy pools",
            f"{cost['per_million_input_tokens']:.2f} a million prompt tokens, "
            f"{cost['per_million_output_tokens']:.2f} a million output tokens",
        )
    return [curve, needs]


def _size(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"


def alternatives_lines(nearest: list[Alternative]) -> list[str]:
    return [f"  {number}. {entry.describe()}" for number, entry in enumerate(nearest, 1)]


def published_table(rows: list[Published]) -> Table:
    table = Table(title="planned against published", title_justify="left")
    for column, justify in (("figure", "left"), ("published", "right"), ("planned", "right"), ("off", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("why", overflow="fold")
    for row in rows:
        style = "green" if abs(row.off) <= CLOSE else "yellow"
        table.add_row(
            row.what,
            f"{row.published:,} {row.unit}",
            f"{row.planned:,.1f}" if row.planned < 1e4 else f"{row.planned:,.0f}",
            f"[{style}]{row.off:+.2%}[/]",
            row.why,
        )
    return table


def orderings_table(title: str, rows: list[Ordering]) -> Table:
    table = Table("", "published", "planned", "off", "constants", title=title, title_justify="left")
    for row in rows:
        off = row.planned / row.published - 1
        table.add_row(row.what, f"{row.published:.3f}", f"{row.planned:.3f}", f"{off:+.1%}", row.predicted)
    return table


def calibration_table(made: Calibration) -> Table:
    table = Table("", "measured ms", "modelled ms", "off", "", title="roofline against benchmark", title_justify="left")
    for point, modelled in made.points:
        off, kind = f"{modelled / point.seconds - 1:+.1%}", "fitted" if point.fitted else "predicted"
        table.add_row(point.name, f"{point.seconds * 1e3:.2f}", f"{modelled * 1e3:.2f}", off, kind)
    return table


def check_table(rows: list[Row]) -> Table:
    table = Table(title="running service against plan", title_justify="left")
    for column in ("replica", "what", "planned", "real", "off", ""):
        name = column in ("replica", "what")
        table.add_column(column, justify="left" if name else "right", no_wrap=not name)  # a cut number says nothing
    for row in rows:
        mark = "[green]ok[/]" if row.ok else f"[red]more than {row.tolerance:.0%}[/]"
        table.add_row(row.where, row.what, f"{row.planned:,.0f}", f"{row.real:,.0f}", f"{row.off:+.2%}", mark)
    return table


def console() -> Console:
    return Console(highlight=False)
