"""`python -m ops.grafana.draw`: asks a Prometheus what the dashboards ask, and draws the answers, without a Grafana.

One picture a dashboard, laid out as Grafana would. It exits with 1 when a query fails.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import requests

from ops.grafana.dashboards import DASHBOARDS
from ops.grafana.panels import WIDTH, Dashboard, Panel, Query

POINTS = 200
TIMEOUT_S = 30.0
CELL_IN, TITLE_IN = (0.72, 0.37), 0.6  # one cell of the grid, and the line above it, in inches
LEGEND_MAX = 9


def evaluate(prometheus: str, query: Query, start: float, end: float, window: str) -> list[dict[str, Any]]:
    """The series of a query over a time range. Raises RuntimeError with what Prometheus says."""
    expr = query.promql.replace("$__rate_interval", window).replace("$application", ".*")
    step = max(1.0, (end - start) / POINTS)
    form = {"query": expr, "start": f"{start}", "end": f"{end}", "step": f"{step}"}
    answer = requests.post(f"{prometheus}/api/v1/query_range", data=form, timeout=TIMEOUT_S).json()
    if answer.get("status") != "success":
        raise RuntimeError(f"{expr}: {answer.get('error')}")
    series: list[dict[str, Any]] = answer["data"]["result"]
    return series


def legend(query: Query, labels: dict[str, str]) -> str:
    if not query.legend:
        return ", ".join(f"{k}={v}" for k, v in labels.items() if k != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), query.legend)


def draw(board: Dashboard, prometheus: str, start: float, end: float, window: str, to: Path) -> int:
    """Writes the picture; returns how many panels have data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = [panel["gridPos"] for panel in board.to_json()["panels"]]
    rows = max(place["y"] + place["h"] for place in places)
    width_in, height_in = WIDTH * CELL_IN[0], rows * CELL_IN[1] + TITLE_IN
    figure = pyplot.figure(figsize=(width_in, height_in), facecolor="#f4f5f5")
    figure.text(0.2 / width_in, 1 - 0.32 / height_in, board.title, fontsize=14, va="center")
    filled = 0
    for panel, place in zip(board.panels, places, strict=True):
        card = (place["x"] * CELL_IN[0], height_in - TITLE_IN - (place["y"] + place["h"]) * CELL_IN[1])
        size = (place["w"] * CELL_IN[0], place["h"] * CELL_IN[1])
        found = [(q, s) for q in panel.queries for s in evaluate(prometheus, q, start, end, window)]
        filled += bool(found)
        _card(figure, card, size, panel.title, (width_in, height_in))
        inside = (card[0] + 0.75, card[1] + 0.32, size[0] - 0.95, size[1] - 0.78)
        axes = figure.add_axes(tuple(value / (width_in, height_in)[n % 2] for n, value in enumerate(inside)))
        _panel(axes, panel, found, start, end)
    figure.savefig(to, dpi=80)
    pyplot.close(figure)
    return filled


def _card(figure: Any, at: tuple[float, float], size: tuple[float, float], title: str, whole: Any) -> None:
    """A white box with the panel's title; inches."""
    from matplotlib.patches import Rectangle

    x, y, w, h = (
        value / whole[n % 2] for n, value in enumerate((at[0] + 0.06, at[1] + 0.06, size[0] - 0.12, size[1] - 0.12))
    )
    figure.add_artist(
        Rectangle((x, y), w, h, facecolor="white", edgecolor="#d8d9da", transform=figure.transFigure, zorder=-1)
    )
    figure.text(x + 0.12 / whole[0], y + h - 0.18 / whole[1], title, fontsize=10, va="center", weight="bold")


def said(value: float, unit: str) -> str:
    """With its unit, as Grafana would write it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if abs(value) >= 1 or value == 0 else f"{1000 * value:.3g} ms"
    if unit in ("bytes", "Bps"):
        for name in ("B", "KiB", "MiB", "GiB", "TiB"):
            if abs(value) < 1024 or name == "TiB":
                return f"{value:.3g} {name}" + ("/s" if unit == "Bps" else "")
            value /= 1024
    rate = "/s" if unit.endswith("ps") else ""
    for limit, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / size:.3g}{letter}{rate}"
    return f"{value:.3g}{rate}"


def _panel(axes: Any, panel: Panel, found: list[tuple[Query, dict[str, Any]]], start: float, end: float) -> None:
    if panel.kind == "stat":
        axes.axis("off")
        values = [float(series["values"][-1][1]) for _, series in found]
        red = panel.red is not None and any(value >= panel.red for value in values)
        text = "  ".join(said(value, panel.unit) for value in values) or "0"
        axes.text(0.5, 0.5, text, fontsize=22, ha="center", va="center", color="firebrick" if red else "seagreen")
        return
    axes.tick_params(labelsize=8, length=0)
    axes.grid(alpha=0.3)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlim(0, end - start)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 60:.0f} min" if end - start > 180 else f"{value:.0f} s")
    axes.xaxis.set_major_locator(_minutes(end - start))
    axes.yaxis.set_major_formatter(lambda value, _: said(value, panel.unit))
    highest = 0.0
    for query, series in found:
        times = [float(at) - start for at, _ in series["values"]]
        values = [float(value) for _, value in series["values"]]
        highest = max([highest, *(value for value in values if value == value and abs(value) != float("inf"))])
        axes.plot(times, values, lw=1.4, label=legend(query, series["metric"]))
    axes.set_ylim(0, 1.3 * highest or 1.0)  # room for the legend
    if found:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[:LEGEND_MAX], labels[:LEGEND_MAX], fontsize=7.5, loc="upper left", ncols=3, frameon=False)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, fontsize=10, color="gray")


def _minutes(seconds: float) -> Any:
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    step = next((each for each in (1, 2, 5, 10, 30, 60) if seconds / 60 / each <= 6), 120)
    return MultipleLocator(60 * step) if seconds > 180 else MaxNLocator(5)


def main(argv: list[str]) -> int:
    make = argparse.ArgumentParser(prog="python -m ops.grafana.draw", description=(__doc__ or "").split("\n")[0])
    make.add_argument("--prometheus", default="http://localhost:9090", metavar="URL")
    make.add_argument("--minutes", type=float, default=30.0, help="back from --end")
    make.add_argument("--end", type=float, default=0.0, metavar="UNIX_TIME", help="default: now")
    make.add_argument("--window", default="1m", help="in the place of $__rate_interval")
    make.add_argument("--out", type=Path, default=Path("."))
    args = make.parse_args(argv)
    end = args.end or time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    for board in DASHBOARDS:
        file = args.out / f"{board.uid}.png"
        try:
            filled = draw(board, args.prometheus, end - 60 * args.minutes, end, args.window, file)
        except (RuntimeError, requests.RequestException) as error:
            print(f"{board.uid}: {error}", file=sys.stderr)
            return 1
        print(f"{file}: {filled} of {len(board.panels)} panels have data")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
