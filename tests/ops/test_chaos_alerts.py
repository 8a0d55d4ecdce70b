"""The alerts' campaign: it stages every alert that is shipped, and its page says what was seen."""

from __future__ import annotations

import re
from typing import Any

from ops.bench import facts
from ops.chaos.alerts.cli import NO_CONTROLLER, row
from ops.chaos.alerts.page import page
from ops.chaos.alerts.stages import STAGES
from ops.chaos.alerts.watch import Watch
from ops.prometheus.local import SHIPPED, Prometheus


def test_every_shipped_alert_is_staged_once() -> None:
    shipped = re.findall(r"alert: (\w+)", (SHIPPED / "rules.yaml").read_text())
    staged = [NO_CONTROLLER, *(alert for stage in STAGES for alert in stage.alerts)]
    assert sorted(staged) == sorted(shipped)


def watched(*changes: tuple[float, str, bool]) -> Watch:
    made = Watch(Prometheus("http://127.0.0.1:9"), lambda text: None)
    made.changes += changes
    return made


def test_an_alert_counts_from_its_stage_on_and_clears_after_its_end() -> None:
    stage = STAGES[0]
    watch = watched(
        (5.0, "PageferryPageMixUp", True),  # of an earlier stage
        (8.0, "PageferryPageMixUp", False),
        (14.0, "PageferryPageMixUp", True),
        (20.0, "PageferryPageMixUp", False),
        (22.0, "PageferryPageMixUp", True),
        (31.0, "PageferryPageMixUp", False),
    )
    found = row(watch, "PageferryPageMixUp", stage, 10.0, 18.0)
    assert (found["fired_after_s"], found["cleared_after_s"]) == (4.0, 2.0)
    assert row(watch, "PageferryPageMixUp", stage, 10.0, 40.0)["cleared_after_s"] == 0.0
    assert row(watch, "PageferryRefusing", stage, 10.0, 18.0)["fired_after_s"] is None
    assert watch.all_fired(("PageferryPageMixUp",), 10.0) and not watch.all_fired(("PageferryPageMixUp",), 23.0)


def test_the_page_says_what_was_and_what_was_not_seen() -> None:
    stage = STAGES[0]
    watch = watched(
        (14.0, "PageferryPageMixUp", True), (15.0, "PageferryRefusing", True), (31.0, "PageferryPageMixUp", False)
    )
    table = [row(watch, alert, stage, 10.0, 18.0) for alert in stage.alerts]
    record: dict[str, Any] = facts.gather([]) | {
        "command": "python -m x",
        "window": "30s",
        "hold": "4s",
        "scrape": "2s",
        "table": table,
        "not_shown": ["PageferryRequestsFail"],
        "changes": watch.changes,
        "stages": [{"stage": stage.name, "began": 10.0, "ended": 18.0, "error": ""}],
        "series_that_never_moved": ["pageferry_resumed_total"],
    }
    text = page(record, "alerts", ["page.png"])
    assert f"| `PageferryPageMixUp` | {stage.what} | 4.0 s | 13.0 s |" in text and "](alerts/page.png)" in text
    assert "not seen | not seen" in text and "1 of 2 were shown" in text and "pageferry_resumed_total" in text
    assert f"PageferryRefusing during *{stage.name}*" in text
