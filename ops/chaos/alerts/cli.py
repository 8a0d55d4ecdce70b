"""`python -m ops.chaos.alerts.cli --out DIR`: every alert of ops/prometheus/rules.yaml, fired and cleared.

In one service: one prefill and one decode engine of the demo model, the page check on, a real Prometheus. The windows
of minutes in the rules are shortened, and nothing else of them. Writes alerts.json (what was done, every change seen,
the table), a page of results beside the folder, and pictures of the dashboards and of `/pageferry` of the same run.
Needs Debian's prometheus, and chromium for the last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from app.api.keys import API_KEYS
from app.commands.serve import Service
from cluster.metrics import TABLE
from cluster.spec import ClusterSpec
from ops.bench import facts
from ops.browser import CHROMIUM, TEXT, Browser
from ops.chaos.alerts.page import page
from ops.chaos.alerts.stages import STAGED, STAGES, Stage, Staging
from ops.chaos.alerts.watch import Watch
from ops.grafana.dashboards import DASHBOARDS
from ops.grafana.draw import draw
from ops.prometheus.local import INSTALLED, SHIPPED, Prometheus, prometheus

WINDOW, HOLD, EVERY = "40s", "4s", "4s"
READY_S = 240.0
NO_CONTROLLER = "PageferryNoController"
SETTINGS: dict[str, Any] = {
    "pools.decode.max_replicas": 2,
    "pools.prefill.engine_args.num_gpu_blocks_override": 160,
    "pools.decode.engine_args.num_gpu_blocks_override": 160,
    "pools.prefill.max_num_batched_tokens": 256,
    "model.max_model_len": 2048,
    "integrity.mode": "check",
    "integrity.policy": "retry",
    "faults.kinds": [str(fault) for fault in STAGED],
    "faults.seed": 5,
    "admission.occupancy_limit": 1.0,
    "admission.queue_max": 8,
    "admission.local_prefill_max_tokens": 0,
    "transfer.staging_bytes_max": 14_942_208,  # four prompts of 300 tokens, or one of 1,200
    "frontend.tenants": {"small": {"requests_per_minute": 5}},
}
TENANTS = ("acme", "small")
PAGES = (("page", 1280, "light"), ("page-dark", 1280, "dark"), ("page-phone", 390, "dark"))


def _shown(watch: Watch, stage: Stage, since: float, firing: set[str]) -> bool:
    return watch.all_fired(stage.alerts, since)


def run(staging: Staging, stages: tuple[Stage, ...], record: dict[str, Any], seconds: float, out: Path) -> None:
    watch = staging.watch
    rows: list[dict[str, Any]] = []
    for stage in stages:
        staging.ready(READY_S)
        began = watch.now
        if began > seconds:
            say(f"{began:6.1f} s  no time left for: {stage.name}")
            continue
        say(f"{began:6.1f} s  stage: {stage.name}")
        error = ""
        try:
            stage.act(staging)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
            say(f"  {error}")
        ended = watch.now
        watch.wait(partial(_shown, watch, stage, began), stage.wait_s)
        rows.append({"stage": stage, "began": round(began, 1), "ended": round(ended, 1), "error": error})
        write(record, watch, rows, out)
    watch.wait(lambda firing: not firing, 90)
    write(record, watch, rows, out)


def write(record: dict[str, Any], watch: Watch, rows: list[dict[str, Any]], out: Path) -> None:
    """What is known so far: after each stage, so that a campaign that is cut short leaves its data."""
    what = "Ray is up and no controller has exported anything"
    first = Stage("the service is not there yet", (NO_CONTROLLER,), what, lambda staging: None)
    found = [row(watch, NO_CONTROLLER, first, 0.0, 0.0)]
    found += [row(watch, alert, r["stage"], r["began"], r["ended"]) for r in rows for alert in r["stage"].alerts]
    shown = {r["alert"] for r in found if r["fired_after_s"] is not None and r["cleared_after_s"] is not None}
    alerts = re.findall(r"alert: (\w+)", (SHIPPED / "rules.yaml").read_text())
    record |= {"window": WINDOW, "hold": HOLD, "scrape": EVERY, "table": found}
    record["not_shown"] = [alert for alert in alerts if alert not in shown]
    record |= {"changes": watch.changes, "stages": [{**r, "stage": r["stage"].name} for r in rows]}
    (out / "alerts.json").write_text(json.dumps(record, indent=1) + "\n")


def row(watch: Watch, alert: str, stage: Stage, began: float, ended: float) -> dict[str, Any]:
    """Seconds from the start of the stage to the alert, and from its end until it was clear again."""
    fired = watch.after(alert, began, True)
    return {
        "alert": alert,
        "stage": stage.name,
        "what": stage.what,
        "fired_after_s": fired,
        "cleared_after_s": None if fired is None else watch.clear_after(alert, began + fired, ended),
    }


def never_moved(watching: Prometheus, seconds: float) -> list[str]:
    """Metrics of the table that were 0 or absent all the time."""
    found = []
    for metric in TABLE:
        name = f"ray_{metric.name}_count" if metric.kind == "histogram" else f"ray_{metric.name}"
        if not watching.value(f"max(max_over_time({name}[{seconds:.0f}s]))"):
            found.append(metric.name)
    return found


def pictures(staging: Staging, watching: Prometheus, began: float, out: Path) -> None:
    for board in DASHBOARDS:
        filled = draw(board, watching.url, began, time.time(), "40s", out / f"{board.uid}.png")
        say(f"{board.uid}: {filled} of {len(board.panels)} panels have data")
    if CHROMIUM is None:
        return
    with (
        staging.several(6, 12, 400),
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Browser(Path(folder))) as browser,
    ):
        for name, width, scheme in PAGES:
            browser.width(width, 1000)
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.call("Page.navigate", url=f"{staging.service.url}/pageferry")
            browser.wait(f"{TEXT}.includes('up to date')", 60)
            browser.picture(out / f"{name}.png")
            browser.value("localStorage.clear()")


def main(argv: list[str]) -> int:
    make = argparse.ArgumentParser(prog="python -m ops.chaos.alerts.cli", description=(__doc__ or "").split("\n")[0])
    make.add_argument("--out", type=Path, required=True, help="folder for alerts.json and the pictures")
    make.add_argument(
        "--seconds", type=float, default=900.0, help="no stage begins after this; a run takes minutes more"
    )
    names = "; ".join(stage.name for stage in STAGES)
    make.add_argument("--stages", nargs="+", metavar="NAME", help=f"only those whose name has this in it: {names}")
    make.add_argument("--port", type=int, default=8011)
    args = make.parse_args(argv)
    if not INSTALLED:
        print("no prometheus on this machine: apt-get install prometheus", file=sys.stderr)
        return 2
    stages = tuple(s for s in STAGES if not args.stages or any(name in s.name for name in args.stages))
    args.out.mkdir(parents=True, exist_ok=True)
    keys = {tenant: f"pf-{secrets.token_urlsafe(24)}" for tenant in TENANTS}
    os.environ[API_KEYS] = ",".join(f"{tenant}={key}" for tenant, key in keys.items())
    os.environ["RAY_metrics_report_interval_ms"] = "2000"  # noqa: SIM112 - Ray's own spelling
    spec = ClusterSpec.load("local-cpu", SETTINGS | {"frontend.port": args.port})
    service = Service(spec, None)
    began, record = time.time(), facts.gather(argv) | {"command": " ".join(["python -m ops.chaos.alerts.cli", *argv])}
    with tempfile.TemporaryDirectory() as folder:
        try:
            service.start()
            assert service.folder is not None
            targets = service.folder / "prom_metrics_service_discovery.json"
            with prometheus(Path(folder), targets, WINDOW, HOLD, EVERY) as watching:
                watch = Watch(watching, say)
                watch.start()
                service.wait_healthy(600)
                watch.wait(lambda firing: watch.after(NO_CONTROLLER, 0.0, False) is not None, 60)
                staging = Staging(service, watch, keys)
                run(staging, stages, record, args.seconds, args.out)
                record["series_that_never_moved"] = never_moved(watching, time.time() - began)
                watch.stop()
                (args.out / "alerts.json").write_text(json.dumps(record, indent=1) + "\n")
                pictures(staging, watching, began, args.out)
                shown = sorted(file.name for file in args.out.glob("*.png"))
                args.out.with_suffix(".md").write_text(page(record, args.out.name, shown))
        finally:
            service.stop()
    for each in record["table"]:
        say(f"{each['alert']:28} {each['fired_after_s']!s:>7} {each['cleared_after_s']!s:>7}  {each['stage']}")
    say(f"not shown: {record['not_shown'] or 'none'}")
    return 1 if record["not_shown"] else 0


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
