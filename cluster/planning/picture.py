"""A plan as a picture: a GPU's memory by use for each pool, and decode rate against concurrency."""

from __future__ import annotations

from pathlib import Path

from cluster.planning.memory import PoolPlan
from cluster.planning.render import memory_parts
from cluster.planning.service import ServicePlan

_COLOURS = {
    "weights": "#4477aa",
    "forward pass": "#ccbb44",
    "runtime": "#aa3377",
    "KV pages": "#228833",
    "unused": "#dddddd",
}


def draw(path: Path, plans: dict[str, PoolPlan], service: ServicePlan | None) -> None:
    """Writes a PNG (or what the suffix says). Needs matplotlib (the `dev` extra)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2 if service else 1, figsize=(13 if service else 6.5, 5), squeeze=False)
    _memory(axes[0][0], plans)
    if service:
        _rates(axes[0][1], service)
    arch = next(iter(plans.values())).arch
    figure.suptitle(f"{arch.name} ({arch.family})")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _memory(axis: object, plans: dict[str, PoolPlan]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    labels = [
        f"{name}\n{p.settings.weights.name} weights, {p.settings.kv} KV\n{p.gpus} x {p.settings.gpu.name}, "
        f"{p.settings.parallel.describe()}"
        for name, p in plans.items()
    ]
    bottoms = [0.0] * len(plans)
    for part, colour in _COLOURS.items():
        sizes = [memory_parts(p)[part] for p in plans.values()]
        if not any(sizes):
            continue
        bars = axis.bar(labels, sizes, bottom=bottoms, color=colour, label=part, width=0.55, edgecolor="white")
        tallest = max(sum(memory_parts(p).values()) for p in plans.values())
        texts = [f"{part}\n{size:.1f} GiB" if size > 0.045 * tallest else "" for size in sizes]
        axis.bar_label(bars, labels=texts, label_type="center", fontsize=8)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes)]
    for position, plan in enumerate(plans.values()):
        # The line is what the engine may use; above it nothing of ours is ever put.
        if plan.hbm_bytes:
            limit = plan.settings.gpu.hbm_gib * plan.settings.utilization
            axis.hlines(limit, position - 0.33, position + 0.33, colors="black", linestyles="--", linewidth=1)
        axis.annotate(
            f"{plan.kv_tokens:,} KV tokens\n{plan.max_requests:,} x {plan.settings.context:,}",
            (position, bottoms[position]),
            ha="center",
            va="bottom",
            fontsize=9,
        )
    axis.set_ylim(0, max(bottoms) * 1.14)
    axis.set_ylabel("GiB on one GPU" if any(p.hbm_bytes for p in plans.values()) else "GiB")
    axis.set_title("memory (dashed: what the engine may use)", fontsize=10)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _rates(axis: object, service: ServicePlan) -> None:
    from matplotlib.axes import Axes
    from matplotlib.ticker import FuncFormatter

    assert isinstance(axis, Axes)
    line, plan = service.decode_line, service.decode
    replicas = plan.settings.replicas
    shades = ("#88ccee", "#4477aa", "#223366")
    for shade, context in zip(shades, _contexts(service)):
        most = plan.requests_of(context) // replicas
        if most < 1:
            continue
        batches = sorted({max(1, round(most ** (i / 40))) for i in range(41)})
        rates = [line.decode_tokens_per_second(b, b * context) for b in batches]
        axis.plot(batches, rates, color=shade, label=f"{context:,} tokens each")
        axis.plot(batches[-1], rates[-1], "o", color=shade)
        axis.annotate(f" full: {most}", (batches[-1], rates[-1]), fontsize=8, va="bottom")
    if line.experts or line.dense_bytes:
        batches = sorted({round(2 ** (i / 4)) for i in range(41)})
        floor = line.layers * line.constants.layer_overhead_us * 1e-6
        if floor:
            axis.plot(batches, [b / floor for b in batches], ":", color="#999999", label="only overhead a layer")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_yscale("log")
    axis.set_ylim(top=axis.get_lines()[0].get_ydata().max() * 3 if axis.get_lines() else None)  # type: ignore[union-attr]
    axis.set_xlabel("requests decoding at once on one replica")
    axis.set_ylabel("output tokens a second")
    axis.set_title("decode roofline (dot: the cache is full)", fontsize=10)
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8)


def _contexts(service: ServicePlan) -> list[int]:
    """A quarter of the workload's length, the length, and four times it where the model goes that far."""
    length = service.mean_context
    return sorted({max(1, length // 4), length, min(4 * length, service.decode.arch.context)})
