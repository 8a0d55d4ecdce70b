"""From the raw requests of a results file to figures: per arm, and as ratios of paired rounds with intervals. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.bench import stats
from ops.bench.plan import AGAIN, BASELINE
from ops.bench.stats import Interval, NotPositive

Raw = Mapping[str, Any]  # a results file
Row = Mapping[str, Any]  # one load of one visit


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of one load in one round; None where the system does not tell it."""

    key: str
    title: str
    unit: str
    scale: float
    higher_is_better: bool | None  # None: a count, which is shown and not compared
    of: Callable[[Row], float | None]


def _good(row: Row) -> list[Raw]:
    return [request for request in row["requests"] if not request["error"]]


def _quantile(key: str, q: float) -> Callable[[Row], float | None]:
    def of(row: Row) -> float | None:
        values = [request[key] for request in _good(row)]
        return stats.quantile(values, q) if values else None

    return of


def _gap(q: float) -> Callable[[Row], float | None]:
    def of(row: Row) -> float | None:
        gaps = [gap / 1e3 for request in _good(row) for gap in request["gaps_ms"]]
        return stats.quantile(gaps, q) if gaps else None

    return of


def _events_a_read(row: Row) -> float | None:
    reads = sum(request["reads"] for request in _good(row))
    return sum(request["events"] for request in _good(row)) / reads if reads else None


def _per_second(weight: Callable[[Raw], float]) -> Callable[[Row], float | None]:
    return lambda row: sum(weight(request) for request in _good(row)) / row["seconds"]


def _reported(key: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(key)


def _quantiles(key: str, title: str, of: Callable[[float], Callable[[Row], float | None]]) -> list[Figure]:
    return [Figure(f"{key}_p{q}", f"{title} p{q}", "ms", 1e3, False, of(q / 100)) for q in (50, 95, 99)]


FIGURES = (
    Figure("requests_per_s", "requests", "/s", 1.0, True, _per_second(lambda request: 1.0)),
    Figure("tokens_per_s", "output", "tok/s", 1.0, True, _per_second(lambda request: request["output_tokens"])),
    *_quantiles("ttft", "TTFT", lambda q: _quantile("ttft_s", q)),
    *_quantiles("tpot", "TPOT", lambda q: _quantile("tpot_s", q)),
    *_quantiles("gap", "gap", _gap),
    Figure("gap_max", "gap max", "ms", 1e3, False, _gap(1.0)),
    Figure("events_a_read", "events a read", "", 1.0, False, _events_a_read),
    *_quantiles("e2e", "end to end", lambda q: _quantile("seconds", q)),
    Figure("goodput", "goodput", "/s", 1.0, True, _reported("goodput")),
    Figure("largest", "largest load", "", 1.0, None, _reported("largest")),
    Figure("errors", "errors", "", 1.0, None, lambda row: float(len(row["requests"]) - len(_good(row)))),
    Figure("retries", "retries", "", 1.0, None, lambda row: float(sum(r["retries"] for r in row["requests"]))),
    Figure("memory_gib", "memory of the system", "GiB", 1.0, None, _reported("memory_gib")),
    Figure("host_gib", "memory of the host", "GiB", 1.0, None, _reported("host_gib")),
    Figure("held", "requests in decode at once, most", "", 1.0, None, _reported("held")),
    Figure("kv_occupancy", "KV occupancy, peak", "%", 100.0, None, _reported("kv_occupancy")),
    Figure("preemptions", "preemptions", "", 1.0, None, _reported("preemptions")),
    Figure("tokens_moved", "prompt tokens handed over", "", 1.0, None, _reported("tokens_moved")),
    Figure("tokens_recomputed", "tokens recomputed", "", 1.0, None, _reported("tokens_recomputed")),
)
COMPARED = tuple(figure for figure in FIGURES if figure.higher_is_better is not None)
HEADLINE = (
    *("tokens_per_s", "ttft_p50", "ttft_p95", "ttft_p99", "tpot_p50", "gap_p50", "gap_p99", "gap_max"),
    *("events_a_read", "e2e_p50", "e2e_p95", "goodput"),
)


def rounds_of(raw: Raw, arm: str, load: str, figure: Figure) -> list[float | None]:
    """The figure in each round, in order."""
    mine = sorted((visit for visit in raw["visits"] if visit["arm"] == arm), key=lambda visit: int(visit["round"]))
    return [figure.of(visit["loads"][load]) for visit in mine]


def ratio(raw: Raw, arm: str, against: str, load: str, figure: Figure) -> Interval | None:
    """arm / against, paired by round; None where either does not tell the figure or it is zero."""
    pairs = list(zip(rounds_of(raw, arm, load, figure), rounds_of(raw, against, load, figure)))
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known or len(known) < len(pairs):
        return None
    try:
        return stats.rounds_ratio([[a] for a, _ in known], [[b] for _, b in known], stats.p50)
    except NotPositive:
        return None


def log_ratios(raw: Raw, arm: str, against: str, load: str, figure: Figure) -> list[float]:
    pairs = zip(rounds_of(raw, arm, load, figure), rounds_of(raw, against, load, figure))
    return [math.log(a / b) for a, b in pairs if a and b]


def words_for(interval: Interval, figure: Figure, margin: float) -> str:
    """What an interval shows: `better`, `worse`, `equal` within the margin, or `not shown`."""
    if interval.low > 1.0 or interval.high < 1.0:
        return "better" if (interval.low > 1.0) == figure.higher_is_better else "worse"
    if interval.low >= 1.0 - margin and interval.high <= 1.0 + margin:
        return f"equal within {margin:.0%}"
    return "not shown"


def same_answers(raw: Raw, arm: str, against: str) -> float:
    """Share of requests to which two arms gave the same greedy text. Formats differ, so it is information, no gate."""
    found = []
    for a, b in zip(_texts(raw, arm), _texts(raw, against)):
        found += [x == y for x, y in zip(a, b)]
    return statistics.fmean(found) if found else math.nan


def _texts(raw: Raw, arm: str) -> list[list[str]]:
    mine = sorted((visit for visit in raw["visits"] if visit["arm"] == arm), key=lambda visit: int(visit["round"]))
    return [[request["text"] for request in row["requests"]] for visit in mine for row in visit["loads"].values()]


def cost_per_million(raw: Raw, arm: str, load: str) -> float | None:
    """Price of a million delivered output tokens: all the time of all rounds, over the tokens of good answers only."""
    price = raw["plan"].get("machine_price")
    rows = [visit["loads"][load] for visit in raw["visits"] if visit["arm"] == arm]
    tokens = sum(request["output_tokens"] for row in rows for request in _good(row))
    return price * sum(row["seconds"] for row in rows) / 3600 / tokens * 1e6 if price and tokens else None


def spread_arm(raw: Raw) -> str:
    """The arm whose paired log ratios say how far equal rounds are apart: the A/A arm, or else the first other one, as
    a difference that is the same in each round does not widen them. "" where there is the baseline alone."""
    return next((arm for arm in sorted(raw["arms"], key=lambda arm: arm != AGAIN) if arm != BASELINE), "")


def detectable(raw: Raw, load: str, figure: Figure) -> float | None:
    """The smallest relative difference that this many rounds find in 80 % of runs."""
    arm = spread_arm(raw)
    logs = log_ratios(raw, arm, BASELINE, load, figure) if arm else []
    return stats.detectable(statistics.stdev(logs), len(logs)) if len(logs) > 1 else None


def build(raw: Raw) -> dict[str, Any]:
    """Everything a report shows, JSON-ready."""
    arms, loads = list(raw["arms"]), list(raw["loads"])
    return {
        "arms": {
            arm: {
                load: {
                    figure.key: statistics.median(known) if known else None
                    for figure in FIGURES
                    for known in [[x for x in rounds_of(raw, arm, load, figure) if x is not None]]
                }
                | {"cost_per_million_output": cost_per_million(raw, arm, load)}
                for load in loads
            }
            for arm in arms
        },
        "ratios": [
            {"arm": arm, "load": load, "figure": figure.key, **asdict(found)}
            | {"says": words_for(found, figure, raw["plan"]["margin"])}
            for arm in arms
            if arm != BASELINE
            for load in loads
            for figure in COMPARED
            if (found := ratio(raw, arm, BASELINE, load, figure)) is not None
        ],
        "detectable": {load: {figure.key: detectable(raw, load, figure) for figure in COMPARED} for load in loads},
        "same_answers": {arm: same_answers(raw, arm, BASELINE) for arm in arms if arm != BASELINE},
    }


def calibration(raw: Raw) -> list[dict[str, Any]]:
    """Points for `pageferry plan --calibrate`: the step time of each closed load, and first tokens of single requests.

    A step of `batch` requests holds their prompts and half their answers. Loads with errors give none.
    """
    points = []
    for arm in raw["arms"]:
        for load in raw["plan"]["loads"]:
            if load["kind"] != "closed":
                continue
            name = next(n for n, spec in raw["loads"].items() if spec == load)
            rows = [visit["loads"][name] for visit in raw["visits"] if visit["arm"] == arm]
            requests = [request for row in rows for request in row["requests"]]
            if not requests or any(request["error"] for request in requests):
                continue
            held = statistics.fmean(r["prompt_tokens"] + r["output_tokens"] / 2 for r in requests)
            batch = load["concurrency"]
            step = statistics.median(r["tpot_s"] for r in requests)
            if step > 0:
                points.append({"arm": arm, "batch": batch, "tokens": round(batch * held), "seconds": step})
            if batch == 1:
                tokens = round(statistics.fmean(r["prompt_tokens"] for r in requests))
                first = statistics.median(r["ttft_s"] for r in requests)
                points.append({"arm": arm, "batch": 0, "tokens": tokens, "seconds": first})
    return points


def table(raw: Raw, made: Raw, keys: Sequence[str] = HEADLINE) -> list[str]:
    """Markdown: medians over rounds, then ratios with their intervals and what they show."""
    shown = [
        f for f in FIGURES if f.key in keys and any(_cell(made, a, ld, f) for a in raw["arms"] for ld in raw["loads"])
    ]
    heads = [f"{f.title}{f' {f.unit}' if f.unit else ''}" for f in shown]
    lines = [f"| load | arm | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads)]
    for load in raw["loads"]:
        for arm in raw["arms"]:
            lines += [f"| {load} | {arm} | {' | '.join(_cell(made, arm, load, f) for f in shown)} |"]
    return lines


def _cell(made: Raw, arm: str, load: str, figure: Figure) -> str:
    value = made["arms"][arm][load][figure.key]
    return "" if value is None else f"{value * figure.scale:,.4g}"


def ratio_table(made: Raw, keys: Sequence[str] = HEADLINE) -> list[str]:
    titles = {figure.key: figure.title for figure in FIGURES}
    lines = ["| load | arm / baseline | figure | ratio, 95 % interval | shows |", "|---|---|---|---:|---|"]
    for row in made["ratios"]:
        if row["figure"] in keys:
            interval = Interval(row["value"], row["low"], row["high"], row["num"])
            cells = (row["load"], row["arm"], titles[row["figure"]], interval.text(3), row["says"])
            lines.append(f"| {' | '.join(cells)} |")
    return lines
