"""The figures as PNG pictures."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench import facts, figures

COLOURS = ("#4c72b0", "#8c8c8c", "#dd8452", "#55a868", "#c44e52")


def ferry(report: dict[str, Any], caption: str, path: Path) -> None:
    """Share of copy bandwidth by page count, one line a layout and road."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.6))
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["threads"] == 1:
            series.setdefault((row["layout"], row["road"]), []).append(row)
    colours = dict(zip(dict.fromkeys(layout for layout, _ in series), COLOURS))
    for (layout, road), rows in series.items():
        pages = [row["pages"] for row in rows]
        share = [row["share"].value for row in rows]
        spread = [
            [row["share"].value - row["share"].low for row in rows],
            [row["share"].high - row["share"].value for row in rows],
        ]
        style = "-" if road == "kernels" else "--"
        axis.errorbar(
            pages, share, spread, marker="o", ms=3, ls=style, color=colours[layout], label=f"{layout}, {road}"
        )
    axis.axhline(0.8, color="black", lw=0.8, ls=":")
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("pages a hand-over")
    axis.set_ylabel("share of one thread's copy bandwidth")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    _finish(figure, caption, path)


def phases(rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], caption: str, path: Path) -> None:
    """Where a request's time goes: each phase begins where the one above it ended; ms, means over requests.

    `before`: of an earlier run, in the same order, without names of its own.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 0.5 * len(rows) + 1.8))
    for number, (label, run) in enumerate((("now", rows), ("before", before))):
        at, high = 0.0, 0.4
        for index, row in enumerate(run):
            width = max(0.0, row["mean_s"] * 1e3)
            where = index + number * high
            axis.barh(where, width, high, left=at, color=COLOURS[number], label=label if index == 0 else None)
            axis.text(at + width, where, f" {width:.1f}", va="center", fontsize=7)
            at += width
        if run:
            axis.axvline(at, color=COLOURS[number], lw=0.8, ls=":")
    axis.set_yticks([index + 0.2 for index in range(len(rows))], [row["phase"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms since the request was sent")
    axis.margins(x=0.08)
    axis.grid(axis="x", alpha=0.3)
    if before:
        axis.legend(fontsize=8)
    _finish(figure, caption, path)


def growth(
    panels: Mapping[str, tuple[Sequence[int], Mapping[str, Sequence[float]]]], title: str, caption: str, path: Path
) -> None:
    """By panel a stack over concurrency: the six largest of what is stacked, and the rest as one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.2), squeeze=False, sharey=True)
    for axis, (name, (loads, found)) in zip(axes[0], panels.items()):
        top = dict(list(found.items())[:6])
        top["others"] = [sum(values[i] for values in found.values()) for i in range(len(loads))]
        top["others"] = [
            rest - sum(v[i] for n, v in top.items() if n != "others") for i, rest in enumerate(top["others"])
        ]
        axis.stackplot(range(len(loads)), list(top.values()), labels=list(top), alpha=0.8)
        axis.set_xticks(range(len(loads)), [str(each) for each in loads])
        axis.set_xlabel("requests at once")
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(title)
    axes[0][0].legend(fontsize=7)
    _finish(drawn, caption, path)


def plan(raw: Mapping[str, Any], path: Path) -> None:
    """The panels of a plan's results: the median over rounds by arm and load, and each round as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels, arms = raw["plan"]["picture"], list(raw["arms"])
    drawn, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.2), squeeze=False)
    for axis, panel in zip(axes[0], panels):
        shown = next(figure for figure in figures.FIGURES if figure.key == panel["figure"])
        loads, width = panel["loads"] or list(raw["loads"]), 0.8 / len(arms)
        for number, arm in enumerate(arms):
            for at, load in enumerate(loads):
                values = [x * shown.scale for x in figures.rounds_of(raw, arm, load, shown) if x is not None]
                if values:
                    where, colour = at + (number + 0.5) * width - 0.4, COLOURS[number % len(COLOURS)]
                    label = arm if at == 0 else None
                    axis.bar(where, statistics.median(values), width, color=colour, alpha=0.6, label=label)
                    axis.plot([where] * len(values), values, ".", color="black", ms=3)
        axis.set_xticks(range(len(loads)), [textwrap.fill(load, 16) for load in loads], fontsize=7)
        axis.set_title(f"{shown.title} {shown.unit}".strip(), fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].legend(fontsize=7)
    _finish(drawn, f"{raw['facts']['command']}\n{facts.one_line(raw['facts'])}", path)


def _finish(figure: Any, caption: str, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.text(0.01, 0.01, caption, fontsize=6, color="#444444", wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
