"""Creates or updates folder, data source and dashboards in a Grafana, through `grafana-api`; writes what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from grafana_api.grafana_api import GrafanaClientError
from grafana_api.grafana_face import GrafanaFace

from ops.grafana.panels import DATASOURCE_UID, FOLDER_UID, Dashboard

FOLDER_TITLE = "pageferry"
DATASOURCE_NAME = "pageferry-prometheus"
TIMEOUT_S = 15.0

Change = Literal["created", "updated", "unchanged"]


def connect(url: str, token: str, verify: bool = True) -> GrafanaFace:
    """Raises ValueError for an address that is none. The token is a service account's, role Editor or Admin."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--url {url!r} is no address; write http://HOST:PORT or https://HOST/PREFIX")
    prefix = parts.path.strip("/")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return GrafanaFace(
        auth=token,
        host=host,
        port=parts.port,
        url_path_prefix=f"{prefix}/" if prefix else "",
        protocol=parts.scheme,
        verify=verify,
        timeout=TIMEOUT_S,
    )


def datasource(prometheus_url: str) -> dict[str, Any]:
    return {
        "uid": DATASOURCE_UID,
        "name": DATASOURCE_NAME,
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": False,
        "jsonData": {"httpMethod": "POST", "timeInterval": "5s"},
    }


def publish(
    grafana: GrafanaFace, dashboards: Sequence[Dashboard], prometheus_url: str, dry_run: bool = False
) -> list[tuple[str, Change]]:
    """What was done, or with `dry_run` would be, in order. Raises grafana-api's `GrafanaException`, `OSError`."""
    done = [
        (f"folder {FOLDER_TITLE}", _folder(grafana, dry_run)),
        (f"data source {DATASOURCE_NAME}", _datasource(grafana, datasource(prometheus_url), dry_run)),
    ]
    return done + [(f"dashboard {each.title}", _dashboard(grafana, each.to_json(), dry_run)) for each in dashboards]


def _found(ask: Callable[[str], Any], name: str) -> dict[str, Any] | None:
    """None when Grafana says 404."""
    try:
        answer: dict[str, Any] = ask(name)
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise
    return answer


def _same(wanted: dict[str, Any], there: dict[str, Any]) -> bool:
    """What Grafana adds (ids, versions, defaults) does not count; what is wanted has to be there as it is."""
    return all(name in there and there[name] == value for name, value in wanted.items())


def _folder(grafana: GrafanaFace, dry_run: bool) -> Change:
    there = _found(grafana.folder.get_folder, FOLDER_UID)
    if there is None:
        if not dry_run:
            grafana.folder.create_folder(FOLDER_TITLE, uid=FOLDER_UID)
        return "created"
    if there["title"] == FOLDER_TITLE:
        return "unchanged"
    if not dry_run:
        grafana.folder.update_folder(FOLDER_UID, FOLDER_TITLE, overwrite=True)
    return "updated"


def _datasource(grafana: GrafanaFace, wanted: dict[str, Any], dry_run: bool) -> Change:
    there = _found(grafana.datasource.find_datasource, DATASOURCE_NAME)
    if there is None:
        if not dry_run:
            grafana.datasource.create_datasource(wanted)
        return "created"
    if _same(wanted, there):
        return "unchanged"
    if not dry_run:
        # By uid: newer Grafana has no calls with numeric ids, and this is what the library makes its path of.
        grafana.datasource.update_datasource(f"uid/{there['uid']}", wanted | {"uid": there["uid"]})
    return "updated"


def _dashboard(grafana: GrafanaFace, wanted: dict[str, Any], dry_run: bool) -> Change:
    there = _found(grafana.dashboard.get_dashboard, wanted["uid"])
    in_folder = there is not None and there.get("meta", {}).get("folderUid") == FOLDER_UID
    if there is not None and in_folder and _same(wanted, there["dashboard"]):
        return "unchanged"
    if not dry_run:
        message = "pageferry dashboards"
        body = {"dashboard": wanted, "folderUid": FOLDER_UID, "overwrite": True, "message": message}
        grafana.dashboard.update_dashboard(body)
    return "created" if there is None else "updated"
