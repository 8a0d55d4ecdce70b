"""The alert rules: each fires for its reason and clears after it (promtool), names existing metrics, has its page."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.metrics import BY_NAME

ROOT = Path(__file__).parents[2]
RULES = ROOT / "ops" / "prometheus" / "rules.yaml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS: dict[str, dict[str, Any]] = {r["alert"]: r for g in GROUPS for r in g["rules"] if "alert" in r}
RECORDED = {r["record"] for g in GROUPS for r in g["rules"] if "record" in r}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)"
)


@dataclass(frozen=True)
class Case:
    """Series of a sample each 5 s; the alert has `labels` at `fires` and is silent at 30 s and at `clears`."""

    alert: str
    labels: dict[str, str]
    fires: str
    clears: str
    series: dict[str, str]  # metric with its labels but for application="a", values in promtool's notation


REPLICA = {"pool": "decode", "replica": "d"}
OF_REPLICA = 'pool="decode", replica="d"'
CASES = [
    Case("PageferryPageMixUp", {}, "2m", "8m", {"tag_mismatches_total{}": "0x12 1x120"}),
    Case(
        "PageferryPageNotVerified",
        {"verdict": "mismatch"},
        "2m",
        "8m",
        {
            'pages_opened_total{verdict="mismatch"}': "0x12 1x120",
            'pages_opened_total{verdict="ok"}': "0+9x132",
            'pages_opened_total{verdict="missing"}': "0x12 1x120",
        },
    ),
    Case(
        "PageferryPagesMissing",
        {"verdict": "missing"},
        "8m",
        "16m",
        {'pages_opened_total{verdict="missing"}': "0x12 0+1x96 96x160"},
    ),
    Case(
        "PageferryLedgerBroken", REPLICA, "2m", "8m", {f"engine_integrity_breaches_total{{{OF_REPLICA}}}": "0x12 2x120"}
    ),
    Case(
        "PageferryCheckStopped",
        REPLICA,
        "1m50s",
        "3m",
        {f"engine_integrity_unproven_s{{{OF_REPLICA}}}": "0x12 0+5x12 0x60"},
    ),
    Case(
        "PageferryStepsUnproven",
        REPLICA,
        "2m",
        "8m",
        {f"engine_integrity_steps_unproven_total{{{OF_REPLICA}}}": "0x12 3x120"},
    ),
    Case(
        "PageferryQuarantineFills",
        REPLICA,
        "1m30s",
        "3m",
        {f"engine_integrity_quarantined_share{{{OF_REPLICA}}}": "0x12 0.06x12 0.04x60"},
    ),
    Case("PageferryNoController", {}, "3m", "5m", {"queue_requests{}": "0x6 stale _x46 0x60"}),
    Case(
        "PageferryNoDecode",
        {},
        "2m30s",
        "4m",
        {
            'replicas{pool="decode"}': "1x12 0x24 1x60",
            'replicas{pool="prefill"}': "1x96",
            "queue_requests{}": "0x12 4x24 0x60",
        },
    ),
    Case(
        "PageferryNoRoomForReplicas",
        {"pool": "decode"},
        "4m",
        "6m",
        {'replicas_unplaced{pool="decode"}': "0x12 2x40 0x60", 'replicas_unplaced{pool="prefill"}': "0x112"},
    ),
    Case(
        "PageferryRequestsFail",
        {},
        "5m",
        "14m",
        {'requests_total{outcome="failed"}': "0x12 0+1x60 60x120", 'requests_total{outcome="done"}': "0+20x192"},
    ),
    Case(
        "PageferryRefusing",
        {},
        "9m",
        "18m",
        {
            "busy_total{}": "0x12 0+2x120 240x120",
            'requests_total{outcome="failed"}': "0x12 0+2x120 240x120",
            'requests_total{outcome="done"}': "0+5x252",
        },
    ),
    Case(
        "PageferryDecodeFull",
        {"pool": "decode"},
        "12m",
        "17m",
        {
            f'kv_blocks{{{OF_REPLICA}, state="held"}}': "98x180 40x60",
            f'kv_blocks{{{OF_REPLICA}, state="free"}}': "2x180 60x60",
            f'kv_blocks{{{OF_REPLICA}, state="quarantined"}}': "0x240",
        },
    ),
    Case(
        "PageferryEngineHung",
        {"pool": "decode", "cause": "hung"},
        "2m",
        "8m",
        {
            'engines_lost_total{pool="decode", cause="hung"}': "0x12 1x120",
            'engines_lost_total{pool="decode", cause="died"}': "0x12 1x120",
        },
    ),
    Case(
        "PageferryReplicasLost",
        {"role": "decode"},
        "3m",
        "14m",
        {
            'replicas_lost_total{role="decode"}': "0x12 0+1x6 6x240",
            'replicas_lost_total{role="prefill"}': "0x12 1x240",
        },
    ),
    Case(
        "PageferryDecodeRecomputes",
        {},
        "15m",
        "30m",
        {"tokens_recomputed_total{}": "0+10x240 2400x160", "tokens_moved_total{}": "0+20x400"},
    ),
    Case(
        "PageferryStagingFull",
        {"node": "n"},
        "3m",
        "5m",
        {'staging_bytes{node="n"}': "95x48 10x24", 'staging_bytes_max{node="n"}': "100x72"},
    ),
    Case(
        "PageferryPreemptions",
        REPLICA,
        "3m",
        "14m",
        {f"engine_preemptions_total{{{OF_REPLICA}}}": "0x12 0+2x12 24x240"},
    ),
    Case(
        "PageferryFirstTokenSlow",
        {},
        "8m",
        "20m",
        {
            'ttft_seconds_bucket{le="10"}': "0x12 0+1x96 96+5x200",
            'ttft_seconds_bucket{le="30"}': "0x12 0+4x96 384+5x200",
            'ttft_seconds_bucket{le="+Inf"}': "0x12 0+4x96 384+5x200",
        },
    ),
]


def _series(name: str) -> str:
    head, _, labels = name.partition("{")
    return f'ray_pageferry_{head}{{application="a"{", " if labels != "}" else ""}{labels}'


def _annotations(rule: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    fill = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
    return {name: fill.sub(lambda found: labels[found[1]], text) for name, text in rule["annotations"].items()}


def _promtool_test(case: Case) -> dict[str, Any]:
    rule = ALERTS[case.alert]
    labels = {} if case.alert == "PageferryNoController" else {"application": "a", **case.labels}
    fired = {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": _annotations(rule, labels)}
    return {
        "interval": "5s",
        "input_series": [{"series": _series(name), "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": "30s", "alertname": case.alert, "exp_alerts": []},
            {"eval_time": case.fires, "alertname": case.alert, "exp_alerts": [fired]},
            {"eval_time": case.clears, "alertname": case.alert, "exp_alerts": []},
        ],
    }


@needs_promtool
def test_each_alert_fires_for_its_reason_and_clears(tmp_path: Path) -> None:
    tree = {"rule_files": [str(RULES)], "evaluation_interval": "5s", "tests": [_promtool_test(c) for c in CASES]}
    file = tmp_path / "rules_test.yaml"
    file.write_text(yaml.safe_dump(tree))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_rules_and_scrape_configuration() -> None:
    for what, file in (("rules", "rules.yaml"), ("config", "prometheus.yaml")):
        command = ["promtool", "check", what, str(RULES.with_name(file))]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    assert [case.alert for case in CASES] == list(dict.fromkeys(case.alert for case in CASES))
    assert {case.alert for case in CASES} == set(ALERTS)


def test_rules_name_metrics_and_labels_of_the_table() -> None:
    for rule in (rule for group in GROUPS for rule in group["rules"]):
        for name, selector in re.findall(r"\bray_(pageferry_\w+)(\{[^}]*\})?", rule["expr"]):
            metric = BY_NAME.get(re.sub(r"_seconds_(bucket|count|sum)$", "_seconds", name))
            assert metric is not None, f"{rule}: no metric {name}"
            assert set(re.findall(r"(\w+)=", selector)) <= {*metric.labels, "application"}, rule
        assert set(re.findall(r"\bpageferry:[\w:]+", rule["expr"])) <= RECORDED


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_its_page(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("critical", "warning") and len(rule["annotations"]["summary"]) > 20
    page = (ROOT / rule["annotations"]["runbook"]).read_text()
    assert page.startswith(f"# {alert}\n")
    assert re.findall(r"^## (.*)$", page, re.M) == ["What it means", "What to look at", "What to do"]


def test_every_page_has_its_alert() -> None:
    named = {rule["annotations"]["runbook"] for rule in ALERTS.values()}
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "ops" / "runbook").glob("*.md")}
    assert pages - {"ops/runbook/README.md"} == named
