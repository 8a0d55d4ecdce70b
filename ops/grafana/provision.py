"""Files for Grafana's provisioning: data source, dashboards, alert rules and a contact point.

The alert rules are those of `ops/prometheus/rules.yaml`, whose expressions give a series for each thing that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ops.grafana.panels import DATASOURCE_UID, FOLDER_UID, Dashboard
from ops.grafana.publish import FOLDER_TITLE, datasource

RULES = Path(__file__).parents[1] / "prometheus" / "rules.yaml"
CONTACT_POINT = "pageferry"
LOOK_BACK_S = 600


def export(
    folder: Path, dashboards: Sequence[Dashboard], prometheus_url: str, webhook: str, runbooks: str
) -> list[Path]:
    """Writes the files; returns them. `folder` is what Grafana's `paths.provisioning` names, or is copied there."""
    at = folder.resolve() / "dashboards" / "pageferry"
    files: dict[Path, str] = {
        at / f"{each.uid}.json": json.dumps(each.to_json(), indent=1) + "\n" for each in dashboards
    }
    trees = {
        "datasources/pageferry.yaml": {"apiVersion": 1, "datasources": [datasource(prometheus_url)]},
        "dashboards/pageferry.yaml": {"apiVersion": 1, "providers": [_provider(at)]},
        "alerting/pageferry-rules.yaml": {"apiVersion": 1, "groups": alert_groups(runbooks)},
        "alerting/pageferry-contact-point.yaml": {"apiVersion": 1, "contactPoints": [_contact_point(webhook)]},
    }
    files |= {folder / name: yaml.safe_dump(tree, sort_keys=False) for name, tree in trees.items()}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sorted(files)


def _provider(path: Path) -> dict[str, Any]:
    return {
        "name": "pageferry",
        "folder": FOLDER_TITLE,
        "folderUid": FOLDER_UID,
        "type": "file",
        "allowUiUpdates": False,
        "options": {"path": str(path)},
    }


def _contact_point(webhook: str) -> dict[str, Any]:
    receiver = {"uid": "pageferry-webhook", "type": "webhook", "settings": {"url": webhook, "httpMethod": "POST"}}
    return {"orgId": 1, "name": CONTACT_POINT, "receivers": [receiver]}


def alert_groups(runbooks: str) -> list[dict[str, Any]]:
    """Each Prometheus alert as a rule of Grafana. `runbooks`: what stands before a page's path in the link."""
    groups = []
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        rules = [_rule(rule, runbooks) for rule in group["rules"] if "alert" in rule]
        if rules:
            groups.append(
                {"orgId": 1, "name": group["name"], "folder": FOLDER_TITLE, "interval": "10s", "rules": rules}
            )
    return groups


def _window() -> dict[str, int]:
    return {"from": LOOK_BACK_S, "to": 0}


def _rule(rule: dict[str, Any], runbooks: str) -> dict[str, Any]:
    # A firing expression has a series whose value may be anything, 0 too; a silent one has none.
    expr = f"(({rule['expr'].strip()}) * 0) + 1"
    query = {"refId": "A", "expr": expr, "instant": True, "range": False}
    threshold = {
        "refId": "B",
        "type": "threshold",
        "expression": "A",
        "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
    }
    annotations = rule["annotations"]
    page = annotations["runbook"]
    return {
        "uid": rule["alert"].lower()[:40],
        "title": rule["alert"],
        "condition": "B",
        "data": [
            {"refId": "A", "relativeTimeRange": _window(), "datasourceUid": DATASOURCE_UID, "model": query},
            {"refId": "B", "relativeTimeRange": _window(), "datasourceUid": "__expr__", "model": threshold},
        ],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": rule.get("for", "0s"),
        "labels": rule["labels"],
        "annotations": {
            "summary": annotations["summary"].replace("$", "$$"),  # "$" alone names an environment variable
            "runbook_url": f"{runbooks.rstrip('/')}/{page}" if runbooks else page,
        },
        "notification_settings": {"receiver": CONTACT_POINT},
    }
