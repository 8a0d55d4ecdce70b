"""Grafana's dashboard model as far as it is used here, as typed values that become JSON.

Every expression is limited to the applications that the dashboard's variable names: `$A` stands for that selector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

DATASOURCE_UID = "pageferry-prometheus"
FOLDER_UID = "pageferry"
DATASOURCE = {"type": "prometheus", "uid": DATASOURCE_UID}
SCHEMA_VERSION = 41
WIDTH = 24
SELECTOR = 'application=~"$application"'

Kind = Literal["timeseries", "stat"]


@dataclass(frozen=True)
class Query:
    """`expr`: PromQL with `$A` for the selector of the application. `legend`: Grafana's template over labels."""

    expr: str
    legend: str = ""

    @property
    def promql(self) -> str:
        return self.expr.replace("$A", SELECTOR)


@dataclass(frozen=True)
class Panel:
    """`unit`: one of Grafana's unit names. `red`: the value from which a stat turns red."""

    title: str
    queries: Sequence[Query]
    description: str
    unit: str = "short"
    kind: Kind = "timeseries"
    stacked: bool = False
    red: float | None = None
    width: int = 8

    @property
    def height(self) -> int:
        return 4 if self.kind == "stat" else 8


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    description: str
    panels: Sequence[Panel]

    def to_json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["pageferry"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "templating": {"list": [_application_variable()]},
            "links": [_links()],
            "panels": _placed(self.panels),
        }


def _application_variable() -> dict[str, Any]:
    query = "label_values(ray_pageferry_replicas, application)"
    return {
        "type": "query",
        "name": "application",
        "label": "Application",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "application"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _links() -> dict[str, Any]:
    return {
        "title": "pageferry",
        "type": "dashboards",
        "tags": ["pageferry"],
        "asDropdown": False,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """From left to right; a row is as high as its highest panel."""
    found, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > WIDTH:
            x, y, row_height = 0, y + row_height, 0
        found.append(_panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height}))
        x, row_height = x + panel.width, max(row_height, panel.height)
    return found


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [_target(query, "ABCDEFGH"[at], panel) for at, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _stat_options() if panel.kind == "stat" else _series_options(),
    }


def _target(query: Query, ref: str, panel: Panel) -> dict[str, Any]:
    return {
        "refId": ref,
        "datasource": DATASOURCE,
        "expr": query.promql,
        "legendFormat": query.legend or "__auto",
        "range": True,
        "instant": False,
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "noValue": "0"}
    if panel.kind == "stat":
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if panel.red is not None:
            steps.append({"color": "red", "value": panel.red})
        return defaults | {
            "color": {"mode": "thresholds"},
            "thresholds": {"mode": "absolute", "steps": steps},
        }
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 20 if panel.stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": stacking,
    }
    return defaults | {"color": {"mode": "palette-classic"}, "custom": custom}


def _series_options() -> dict[str, Any]:
    legend = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _stat_options() -> dict[str, Any]:
    return {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
