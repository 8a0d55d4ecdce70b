"""A running service watched as in production: Prometheus scrapes it, the shipped rules alert, its logs say what was.

One service with the check on, policy `fail`, JSON logs, and a real Prometheus beside it.
1. Before the first event every counter is there at 0 and no alert fires.
2. A page mix-up makes `PageferryPageMixUp` fire, and it clears by itself.
3. Each panel of each dashboard has data; what a request must move has moved.
4. The logs are JSON; the request and the fault have their lines, and no text of the prompt is in any of them.

The rules' windows of five minutes are shortened for the test; nothing else of them is changed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from live_service import free_port
from serve_command import serving

from ops.grafana.dashboards import DASHBOARDS
from ops.grafana.draw import draw

ROOT = Path(__file__).parents[2]
KIND = "table_free_page"
SETTINGS = {
    "pools.prefill.replicas": 1,
    "pools.decode.replicas": 1,
    "pools.prefill.engine_args.num_gpu_blocks_override": 160,
    "pools.decode.engine_args.num_gpu_blocks_override": 160,
    "model.max_model_len": 2048,
    "integrity.mode": "check",
    "integrity.policy": "fail",
    "faults.kinds": f"[{KIND}]",
    "faults.seed": 5,
    "admission.local_prefill_max_tokens": 0,
    "transfer.staging_bytes_max": 64 << 20,
    "frontend.tenants": "{key-of-acme: acme, key-of-zeta: zeta}",
}
PROMPT = "The quick brown heron crosses the estuary at dusk. " * 12
WINDOW = "45s"
AUTH = {"Content-Type": "application/json", "Authorization": "Bearer key-of-acme"}

pytestmark = [
    pytest.mark.timeout(560),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian package prometheus)"
    ),
]


@dataclass
class Watched:
    url: str
    prometheus: str
    logs: Path
    began: float

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = requests.get(f"{self.prometheus}/api/v1/query", params={"query": expr}, timeout=20).json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def value(self, expr: str) -> float | None:
        found = self.query(expr)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        alerts = requests.get(f"{self.prometheus}/api/v1/alerts", timeout=20).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def wait(self, what: str, until: Callable[[], bool], seconds: float) -> float:
        began = time.monotonic()
        while not until():
            assert time.monotonic() - began < seconds, f"{what}: not within {seconds:g} s"
            time.sleep(0.5)
        return time.monotonic() - began

    def complete(self, name: str, max_tokens: int) -> int:
        body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), AUTH | {"X-Request-Id": name}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def plant(self, victim: str) -> bool:
        body = json.dumps({"kind": KIND, "victim": victim}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self.url}/faults", body, AUTH), timeout=20) as answer:
                return bool(json.load(answer)["fired"])
        except urllib.error.HTTPError as error:
            assert error.code == 404, error.read()
            return False


def configuration(folder: Path, targets: Path) -> Path:
    """The shipped scrape configuration and rules, with this service's targets and shorter windows."""
    shipped = ROOT / "ops" / "prometheus"
    rules = (shipped / "rules.yaml").read_text().replace("[5m]", f"[{WINDOW}]")
    (folder / "rules.yaml").write_text(rules)
    text = (shipped / "prometheus.yaml").read_text()
    file = folder / "prometheus.yaml"
    file.write_text(text.replace("/tmp/ray/prom_metrics_service_discovery.json", str(targets)))
    return file


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]
    with serving([*settings, "--log-format", "json"], RAY_metrics_report_interval_ms="2000") as (_, url, shown):
        targets = Path(next(line.split()[-1] for line in shown.splitlines() if "Prometheus targets" in line))
        address = f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={configuration(folder, targets)}", f"--web.listen-address={address}"]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(
                [*command, f"--storage.tsdb.path={folder / 'tsdb'}"], stdout=log, stderr=subprocess.STDOUT
            ) as prometheus,
        ):
            try:
                logs = targets.parent / "session_latest" / "logs" / "serve"
                made = Watched(url, f"http://{address}", logs, time.time())
                made.wait("scraped", lambda: _ready(made), 60)
                yield made
            finally:
                prometheus.terminate()


def _ready(made: Watched) -> bool:
    try:
        return made.value("ray_pageferry_tag_mismatches_total") is not None
    except requests.ConnectionError:
        return False


def test_counters_stand_at_0_before_the_first_event(watched: Watched) -> None:
    for name, labels in (
        ("requests_total", 'outcome="failed"'),
        ("tag_mismatches_total", ""),
        ("pages_opened_total", 'verdict="mismatch"'),
        ("scale_decisions_total", 'pool="decode", direction="up"'),
        ("tenant_output_tokens_total", 'tenant="zeta"'),
        ("engine_integrity_breaches_total", 'pool="prefill"'),
        ("engine_preemptions_total", 'pool="decode"'),
    ):
        assert watched.value(f'ray_pageferry_{name}{{application="pageferry", {labels}}}') == 0, name
    assert not watched.firing()


def test_a_request_moves_what_it_should(watched: Watched) -> None:
    assert watched.complete("plain", 12) == 200
    moved = (
        'requests_total{outcome="done"}',
        "output_tokens_total",
        "bytes_moved_total",
        "tokens_moved_total",
        'pages_opened_total{verdict="ok"}',
        'engine_pages_sealed_total{pool="prefill"}',
        'engine_tokens_opened_total{pool="decode"}',
        'engine_tokens_generated_total{pool="decode"}',
        'engine_prompt_tokens_total{pool="prefill"}',
        'engine_steps_total{pool="prefill"}',
        'engine_prefix_queries_total{pool="decode"}',
        'engine_integrity_checks_total{pool="decode"}',
        'tenant_prompt_tokens_total{tenant="acme"}',
        "ttft_seconds_count",
        "tpot_seconds_count",
        *(f'phase_seconds_total{{phase="{phase}"}}' for phase in ("admit", "prefill", "submit", "first_token")),
    )
    for name in moved:
        watched.wait(name, lambda name=name: (watched.value(f"sum(ray_pageferry_{name})") or 0) > 0, 40)  # type: ignore[misc]
    assert watched.value("sum(ray_pageferry_engine_preemptions_total)") == 0


def test_a_page_mix_up_fires_its_alert_and_it_clears(watched: Watched) -> None:
    codes: list[int] = []
    victim = threading.Thread(target=lambda: codes.append(watched.complete("victim", 300)))
    victim.start()
    watched.wait("planted", lambda: watched.plant("victim"), 60)
    victim.join()
    assert codes == [500]
    fired = watched.wait("fires", lambda: "PageferryPageMixUp" in watched.firing(), 60)
    cleared = watched.wait("clears", lambda: "PageferryPageMixUp" not in watched.firing(), 120)
    print(f"PageferryPageMixUp fired after {fired:.1f} s and cleared {cleared:.1f} s later (window {WINDOW})")


def test_every_panel_of_every_dashboard_has_data(watched: Watched, tmp_path: Path) -> None:
    for board in DASHBOARDS:
        picture = tmp_path / f"{board.uid}.png"
        filled = draw(board, watched.prometheus, watched.began, time.time(), "20s", picture)
        assert filled == len(board.panels), board.uid
        assert picture.stat().st_size > 10_000


def lines(watched: Watched, pattern: str) -> list[dict[str, Any]]:
    files = sorted(watched.logs.glob(pattern))
    assert files, sorted(file.name for file in watched.logs.iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_logs_are_json_and_hold_the_request_and_no_prompt(watched: Watched) -> None:
    frontend = lines(watched, "replica_pageferry_Frontend_*.log")
    ended = {each["pageferry"]["request"]: each["pageferry"] for each in frontend if "pageferry" in each}
    plain = next(fields for name, fields in ended.items() if "plain" in name)
    assert plain["outcome"] == "done" and plain["output_tokens"] == 12 and plain["tenant"] == "acme"
    assert {"admit", "prefill", "submit", "first_token"} <= plain["phases"].keys() and len(plain["replicas"]) == 2
    victim = next(fields for name, fields in ended.items() if "victim" in name)
    assert victim["outcome"] == "failed" and victim["status"] == 500
    assert any("joined" in each["message"] for each in lines(watched, "pageferry_controller_*.log"))
    lines(watched, "pageferry_transfer_*.log")  # is there; the actor has nothing to say while all is well
    assert any("engine" in each["message"] for each in lines(watched, "replica_pageferry_Decode_*.log"))
    for file in watched.logs.iterdir():
        if file.is_file():
            assert "brown heron" not in file.read_text(errors="replace"), file
