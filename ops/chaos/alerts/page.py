"""The results page of an alerts' campaign, out of its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ops.bench import facts


def page(record: dict[str, Any], folder: str, pictures: Sequence[str] = ()) -> str:
    """Markdown. `folder`: where raw data and `pictures` lie, as seen from the page."""
    shown = [row for row in record["table"] if row["fired_after_s"] is not None and row["cleared_after_s"] is not None]
    lines = [
        "# Every alert, fired and cleared in a running service",
        "",
        f"`{record['command']}`: {facts.one_line(record)}.",
        "",
        f"One service of the demo model, one Prometheus that scrapes every {record['scrape']}. Windows of minutes in "
        f"the rules are {record['window']}, holds {record['hold']}; nothing else of the rules is changed: with theirs "
        "an alert comes and goes later. Seconds to fire are from the stage's start, seconds to clear from its end. "
        f"{len(shown)} of {len(record['table'])} were shown. Raw data: `{folder}/alerts.json`.",
        "",
        "| alert | staged fault | fires after | clears after |",
        "|---|---|---|---|",
    ]
    for row in record["table"]:
        fired, cleared = (_seconds(row[name]) for name in ("fired_after_s", "cleared_after_s"))
        lines.append(f"| `{row['alert']}` | {row['what']} | {fired} | {cleared} |")
    if record["not_shown"]:
        lines += ["", f"Not shown in this run: {', '.join(record['not_shown'])}."]
    lines += ["", _unexpected(record)]
    if (still := record.get("series_that_never_moved")) is not None:
        lines += ["", f"Metrics of the table that stayed at 0 all the time: {', '.join(still) or 'none'}."]
    if pictures:
        lines += [
            "",
            "The dashboards, drawn from the same Prometheus by `ops.grafana.draw`, and the page `/pageferry`:",
            "",
        ]
        lines += [f"![{name.removesuffix('.png')}]({folder}/{name})" for name in pictures]
    return "\n".join(lines) + "\n"


def _seconds(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.1f} s"


def _unexpected(record: dict[str, Any]) -> str:
    """Alerts that fired in a stage that is not about them: side effects of its fault, to be read by people."""
    of = {(row["stage"], row["alert"]) for row in record["table"]}
    found = []
    for stage in record["stages"]:
        until = next((s["began"] for s in record["stages"] if s["began"] > stage["began"]), float("inf"))
        names = {name for at, name, fires in record["changes"] if fires and stage["began"] <= at < until}
        found += [f"{name} during *{stage['stage']}*" for name in sorted(names) if (stage["stage"], name) not in of]
    return f"Others that fired meanwhile: {'; '.join(found)}." if found else "No other alert fired meanwhile."
