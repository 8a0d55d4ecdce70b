"""The figures as PNG pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    axis.axhline(0.5, color="black", lw=0.8, ls=":")
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


def _finish(figure: Any, caption: str, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.text(0.01, 0.01, caption, fontsize=6, color="#444444", wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
