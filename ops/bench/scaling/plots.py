"""Pictures of simulated runs. matplotlib is imported here and nowhere else, so only who wants a picture needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.simulate.world import SECOND

if TYPE_CHECKING:
    from ops.bench.scaling.autoscale import Summary
    from ops.bench.scaling.published import Point
    from ops.simulate.cluster import ClusterSim


def _figure(rows: int, columns: int = 1, width: float = 10.0, height: float = 2.2) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width, height * rows), sharex="col", squeeze=False, layout="constrained"
    )
    return pyplot, figure, axes


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _panels(axes: Iterable[Any], cluster: ClusterSim, label: str = "", colour: str = "C0") -> None:
    """Occupancy, replicas, queue, TTFT over time."""
    occupancy, replicas, queue, ttft = axes
    samples = cluster.findings.samples
    seconds = [sample.at_s for sample in samples]
    occupancy.plot(seconds, [sample.occupancy for sample in samples], label=label, color=colour, lw=0.9)
    replicas.step(seconds, [s.decode_replicas for s in samples], where="post", color=colour, lw=1.1, label=label)
    replicas.step(seconds, [s.decode_target for s in samples], where="post", color=colour, lw=0.7, ls=":")
    queue.plot(seconds, [sample.queue for sample in samples], color=colour, lw=0.9)
    answered = [record for record in cluster.records if record.first_token_ns]
    ttft.scatter(
        [record.arrival_ns / SECOND for record in answered],
        [(record.first_token_ns - record.arrival_ns) / SECOND for record in answered],
        s=2,
        color=colour,
        alpha=0.5,
    )
    occupancy.set_ylabel("decode KV occupancy")
    occupancy.set_ylim(0, 1)
    replicas.set_ylabel("decode replicas\n(dotted: target)")
    queue.set_ylabel("waiting requests")
    ttft.set_ylabel("TTFT, s")
    ttft.set_xlabel("virtual time, s")


def plot_run(cluster: ClusterSim, path: Path) -> Path:
    """One run; faults are marked."""
    pyplot, figure, axes = _figure(4)
    _panels(axes[:, 0], cluster)
    for fault in cluster.scenario.faults:
        for axis in axes[:, 0]:
            axis.axvline(1.5 + fault.at_ns / SECOND, color="C3", lw=0.7, ls="--")
        axes[0, 0].text(1.5 + fault.at_ns / SECOND, 1.01, fault.kind, rotation=30, fontsize=6, color="C3")
    return _save(pyplot, figure, path)


def plot_scaling(clusters: Mapping[str, ClusterSim], path: Path) -> Path:
    """One column a trace; `clusters` is named `trace: policy`."""
    traces = list(dict.fromkeys(name.split(": ")[0] for name in clusters))
    pyplot, figure, axes = _figure(4, len(traces), width=7.0 * len(traces))
    for column, trace in enumerate(traces):
        mine = {name.split(": ")[1]: cluster for name, cluster in clusters.items() if name.startswith(trace + ":")}
        for number, (policy, cluster) in enumerate(mine.items()):
            _panels(axes[:, column], cluster, policy, f"C{number}")
        axes[0, column].set_title(trace)
        axes[1, column].legend(fontsize=7)
    return _save(pyplot, figure, path)


def plot_front(summaries: Iterable[Summary], path: Path) -> Path:
    """SLO attainment against GPU-hours; the size of a mark says how often the policy flapped."""
    pyplot, figure, axes = _figure(1, width=9.0, height=6.0)
    axis = axes[0, 0]
    for found in summaries:
        colour, mark = ("C0", "o") if found.ours else ("C1", "s")
        x, y = found.gpu_hours.value, 100 * found.slo.value
        spread = {"xerr": found.gpu_hours.half, "yerr": 100 * found.slo.half}
        axis.errorbar(x, y, **spread, fmt="none", ecolor=colour, alpha=0.3)
        axis.scatter(x, y, s=30 + 8 * found.flaps.value, color=colour, marker=mark, alpha=0.7)
        axis.annotate(
            found.policy.removeprefix("Serve "), (x, y), fontsize=6, xytext=(4, 3), textcoords="offset points"
        )
    axis.set_ylim(top=102)
    axis.set_xlabel("GPU-hours in an hour (lower is better)")
    axis.set_ylabel("requests within the SLO, %")
    axis.set_title("circles: occupancy; squares: Serve, by target and delays; larger: more flaps", fontsize=9)
    return _save(pyplot, figure, path)


def plot_curve(points: Iterable[Point], path: Path) -> Path:
    """Decode tokens a second by concurrent requests, and the published figures."""
    pyplot, figure, axes = _figure(1, width=7.0, height=4.5)
    axis = axes[0, 0]
    for number, kv in enumerate(("bf16", "fp8")):
        mine = sorted((p for p in points if p.kv == kv), key=lambda point: point.admitted)
        axis.plot(
            [p.admitted for p in mine], [p.tokens_per_s for p in mine], "o-", color=f"C{number}", label=f"{kv} KV"
        )
        known = [p for p in mine if p.published]
        axis.plot(
            [p.admitted for p in known],
            [p.published for p in known],
            "x",
            ms=9,
            color=f"C{number}",
            label=f"{kv} KV, published",
        )
        axis.axvline(max(p.admitted for p in mine), color=f"C{number}", lw=0.8, ls=":")
    axis.set_xlabel("concurrent requests of 21,400 tokens (dotted: the pool is full)")
    axis.set_ylabel("decode tokens/s")
    axis.legend()
    return _save(pyplot, figure, path)


def plot_decisions(runs: Iterable[Mapping[str, Any]], path: Path) -> Path:
    """CPU time a step by the number of replicas: p50 as a line, p99 dotted; a panel for each load."""
    runs = list(runs)
    loads = list(dict.fromkeys(run["load"] for run in runs))
    pyplot, figure, axes = _figure(1, len(loads), width=5.0 * len(loads), height=4.0)
    for axis, load in zip(axes[0], loads):
        mine = [run for run in runs if run["load"] == load]
        kinds = dict.fromkeys(row["kind"] for run in mine for row in run["steps"])
        for number, kind in enumerate(kinds):
            rows = [(run["replicas"], row) for run in mine for row in run["steps"] if row["kind"] == kind]
            sizes = [size for size, _ in rows]
            axis.plot(sizes, [row["p50"] for _, row in rows], color=f"C{number}", marker="o", ms=3, label=kind)
            axis.plot(sizes, [row["p99"] for _, row in rows], color=f"C{number}", ls=":", lw=1)
        axis.axhline(1_000, color="grey", lw=0.6)
        axis.set(xscale="log", yscale="log", xlabel="decode replicas", ylabel="CPU us a step", title=load)
    axes[0][0].legend(fontsize=7)
    return _save(pyplot, figure, path)
