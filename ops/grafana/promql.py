"""Queries to Prometheus for the metrics of a service; `$A` stands for the labels that choose the application."""

from __future__ import annotations

R = "$__rate_interval"


def rate(metric: str, by: str = "", labels: str = "") -> str:
    return f"sum {_by(by)}(rate(ray_pageferry_{metric}{{$A{labels}}}[{R}]))"


def now(metric: str, by: str = "", labels: str = "", how: str = "sum") -> str:
    return f"{how} {_by(by)}(ray_pageferry_{metric}{{$A{labels}}})"


def grown(metric: str, window: str, by: str = "", labels: str = "") -> str:
    """Events in `window`: whole ones, though Prometheus extrapolates to its edges."""
    return f"round(sum {_by(by)}(increase(ray_pageferry_{metric}{{$A{labels}}}[{window}])))"


def quantile(share: float, metric: str, by: str = "") -> str:
    """Nothing instead of NaN while nothing was observed."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate(ray_pageferry_{metric}_bucket{{$A}}[{R}]))) >= 0"


def gap(share: float, at: str) -> str:
    """The counters of gaps have a histogram's `le`."""
    return f'histogram_quantile({share}, sum by (le) (rate(ray_pageferry_token_gaps_total{{$A, at="{at}"}}[{R}]))) >= 0'


def ratio(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _by(labels: str) -> str:
    return f"by ({labels}) " if labels else ""
