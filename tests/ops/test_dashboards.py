"""Dashboards: what they ask of Prometheus exists and parses, and Grafana's own types accept them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.metrics import BY_NAME
from ops.grafana import provision
from ops.grafana.dashboards import DASHBOARDS
from ops.grafana.panels import DATASOURCE_UID, SELECTOR, WIDTH

ROOT = Path(__file__).parents[2]
GROUPS = yaml.safe_load((ROOT / "ops" / "prometheus" / "rules.yaml").read_text())["groups"]
RECORDED = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
EXPRESSIONS = [
    (f"{board.uid}: {panel.title}", query.promql)
    for board in DASHBOARDS
    for panel in board.panels
    for query in panel.queries
]
# Versions that were tried together.
NODE_PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
TYPES = "./node_modules/@grafana/schema/dist/types/raw"
CHECK = f"""
import type {{ Dashboard, Panel }} from '{TYPES}/dashboard/x/types.gen';
import type * as timeseries from '{TYPES}/composable/timeseries/panelcfg/x/types.gen';
import type * as stat from '{TYPES}/composable/stat/panelcfg/x/types.gen';
// JSON has an enum's values, not its members.
type Plain<T> = T extends string ? `${{T}}` : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Array<Plain<U>> : T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
type Typed<N, O, F> = Omit<Plain<Panel>, 'type' | 'options' | 'fieldConfig'> & {{ type: N; options: Plain<O>;
  fieldConfig: {{
    defaults: Omit<NonNullable<Plain<Panel>['fieldConfig']>['defaults'], 'custom'> & {{ custom?: Plain<F> }};
                 overrides: never[] }} }};
type Board = Omit<Plain<Dashboard>, 'panels'> & {{ panels: Array<
  Typed<'timeseries', timeseries.Options, timeseries.FieldConfig> | Typed<'stat', stat.Options, never>> }};
"""


@pytest.mark.parametrize(("where", "expr"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_metric_and_label_is_in_the_table(where: str, expr: str) -> None:
    names = re.findall(r"\bray_(pageferry_\w+)\{([^}]*)\}", expr)
    recorded = re.findall(r"(pageferry:[\w:]+)\{", expr)
    assert (names or recorded) and set(recorded) <= RECORDED
    by = {label for labels in re.findall(r"by \(([^)]*)\)", expr) for label in re.findall(r"\w+", labels)}
    known = {"application", "le"}
    for name, selector in names:
        metric = BY_NAME.get(re.sub(r"_seconds_bucket$", "_seconds", name))
        assert metric is not None, f"{where}: no metric {name}"
        assert selector.startswith(SELECTOR)
        assert set(re.findall(r"(\w+)[!=]~?=?\"", selector)) <= {*metric.labels, "application"}, where
        known |= set(metric.labels)
    assert by <= ({"pool"} if recorded else known), where


def test_legends_name_labels_that_the_query_keeps() -> None:
    for board in DASHBOARDS:
        for panel in board.panels:
            assert len({query.legend for query in panel.queries}) == len(panel.queries), panel.title
            for query in panel.queries:
                kept = (
                    {"pool"}
                    if query.expr.startswith("pageferry:")
                    else set(re.findall(r"\w+", "".join(re.findall(r"by \(([^)]*)\)", query.expr))))
                )
                assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= kept, panel.title


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_every_expression_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "1m").replace("$application", ".*")}
        for number, (_, expr) in enumerate(EXPRESSIONS)
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_lie_side_by_side_and_never_on_each_other() -> None:
    for board in DASHBOARDS:
        taken: set[tuple[int, int]] = set()
        for panel in board.to_json()["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert place["x"] + place["w"] <= WIDTH and not cells & taken, panel["title"]
            taken |= cells
    uids = [board.uid for board in DASHBOARDS]
    assert len(set(uids)) == len(uids) and all(re.fullmatch(r"[a-z-]{1,40}", uid) for uid in uids)


@pytest.fixture(scope="session")
def grafana_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Grafana's types and TypeScript."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: dashboards are not checked against @grafana/schema")
    folder = tmp_path_factory.mktemp("grafana-types")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", *NODE_PACKAGES]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not bring @grafana/schema within 120 s")
    if done.returncode:
        pytest.skip(f"npm cannot bring @grafana/schema: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def type_errors(folder: Path, boards: list[dict[str, Any]]) -> str:
    lines = [f"const board{number}: Board = {json.dumps(board)};" for number, board in enumerate(boards)]
    (folder / "check.ts").write_text(CHECK + "\n".join(lines))
    command = [
        "npx",
        "tsc",
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--module",
        "nodenext",
        "--target",
        "es2022",
        "check.ts",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.stdout


@pytest.mark.compiles  # TypeScript
def test_grafanas_types_accept_every_dashboard(grafana_types: Path) -> None:
    boards = [board.to_json() for board in DASHBOARDS]
    assert type_errors(grafana_types, boards) == ""
    wrong_value, wrong_field = (json.loads(json.dumps(boards[0])) for _ in range(2))
    wrong_value["panels"][-1]["fieldConfig"]["defaults"]["custom"]["drawStyle"] = "lines"
    wrong_field["refersh"] = "5s"
    assert "lines" in type_errors(grafana_types, [wrong_value]), "the check sees a value that Grafana does not know"
    assert "refersh" in type_errors(grafana_types, [wrong_field]), "the check sees a field that Grafana does not have"


def test_exported_files_are_what_grafana_reads(tmp_path: Path) -> None:
    files = provision.export(tmp_path, DASHBOARDS, "http://prometheus:9090", "https://hook", "https://example.org/r")
    names = {str(file.relative_to(tmp_path)) for file in files if file.is_relative_to(tmp_path)}
    assert {f"dashboards/pageferry/{board.uid}.json" for board in DASHBOARDS} < names
    source = yaml.safe_load((tmp_path / "datasources" / "pageferry.yaml").read_text())["datasources"][0]
    assert source["uid"] == DATASOURCE_UID and source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((tmp_path / "dashboards" / "pageferry.yaml").read_text())["providers"][0]
    assert {path.stem for path in Path(provider["options"]["path"]).glob("*.json")} == {b.uid for b in DASHBOARDS}
    rules = [
        r
        for g in yaml.safe_load((tmp_path / "alerting/pageferry-rules.yaml").read_text())["groups"]
        for r in g["rules"]
    ]
    assert {rule["title"] for rule in rules} == {r["alert"] for g in GROUPS for r in g["rules"] if "alert" in r}
    assert len({rule["uid"] for rule in rules}) == len(rules)
    contact = yaml.safe_load((tmp_path / "alerting/pageferry-contact-point.yaml").read_text())["contactPoints"][0]
    assert {rule["notification_settings"]["receiver"] for rule in rules} == {contact["name"]}
    for rule in rules:
        assert not re.search(r"(?<!\$)\$(?!\$)", json.dumps(rule)), "Grafana takes a single $ for a variable"
        assert rule["annotations"]["runbook_url"].startswith("https://example.org/r/ops/runbook/")
