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
    height = max(place["y"] + place["h"] for place in places)
    figure = pyplot.figure(figsize=(16, height * 0.45), facecolor="#f4f5f5")
    figure.suptitle(board.title, x=0.02, ha="left", fontsize=13)
    filled = 0
    for panel, place in zip(board.panels, places, strict=True):
        box = (
            place["x"] / WIDTH + 0.03,
            0.93 - 0.93 * (place["y"] + place["h"]) / height + 0.025,
            place["w"] / WIDTH - 0.045,
            0.93 * place["h"] / height - 0.065,
        )
        axes = figure.add_axes(box)
        found = [(q, s) for q in panel.queries for s in evaluate(prometheus, q, start, end, window)]
        filled += bool(found)
        _panel(axes, panel, found, start)
    figure.savefig(to, dpi=80)
    pyplot.close(figure)
    return filled


def _panel(axes: Any, panel: Panel, found: list[tuple[Query, dict[str, Any]]], start: float) -> None:
    axes.set_title(f"{panel.title} [{panel.unit}]", fontsize=8, loc="left")
    if panel.kind == "stat":
        axes.axis("off")
        values = [float(series["values"][-1][1]) for _, series in found]
        red = panel.red is not None and any(value >= panel.red for value in values)
        text = "  ".join(f"{value:.3g}" for value in values) or "0"
        axes.text(0.5, 0.4, text, fontsize=20, ha="center", va="center", color="firebrick" if red else "green")
        return
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)
    for query, series in found:
        times = [float(at) - start for at, _ in series["values"]]
        axes.plot(times, [float(value) for _, value in series["values"]], lw=1, label=legend(query, series["metric"]))
    if found:
        axes.legend(fontsize=5, loc="upper left", ncols=2)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, fontsize=8, color="gray")
    axes.set_ylim(bottom=0)


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
