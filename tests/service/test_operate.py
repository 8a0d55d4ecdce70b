"""One running service, seen by those who run it: metrics, an alert, traces, keys, limits by tenant, doors and logs.

It has two frontends, keys in a file, JSON logs, the check on with policy `fail`, a real Prometheus with the shipped
rules, and a collector of spans. The rules' windows and holds are shortened; nothing else of them is changed.
"""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from otlp_receiver import Receiver, Seen, receiving
from watched_service import Watched, watched_service

from app.api.keys import new_key, read_file, write_file
from app.processes import MARK, marked
from ops.grafana.dashboards import DASHBOARDS
from ops.grafana.draw import draw
from ops.prometheus.local import INSTALLED

KIND = "table_free_page"
SETTINGS = {
    "frontend.replicas": 2,
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
    "frontend.tenants": "{small: {requests_per_minute: 5}, narrow: {kv_tokens: 400}}",
    "tracing.sample_ratio": 0.0,
}
TENANTS = ("acme", "zeta", "small", "narrow")
PROMPT = "The quick brown heron crosses the estuary at dusk. " * 12
WINDOW = "45s"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"

pytestmark = [
    pytest.mark.timeout(560),
    pytest.mark.skipif(not INSTALLED, reason="prometheus is not installed (Debian package prometheus)"),
]
KEYS: dict[str, str] = {}


def add_key(file: Path, tenant: str, admin: bool = False) -> tuple[str, str]:
    key, entry = new_key(tenant, admin, time.time())
    write_file(file, (read_file(file) if file.exists() else {}) | {entry.id: entry})
    return key, entry.id


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    KEYS.update({tenant: add_key(file, tenant)[0] for tenant in TENANTS})
    KEYS["admin"] = add_key(file, "root", admin=True)[0]
    return file


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, collector: Receiver, keys_file: Path) -> Iterator[Watched]:
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]
    settings += [f"frontend.keys_file={keys_file}", f"tracing.endpoint={collector.url}", "--log-format", "json"]
    with watched_service(tmp_path_factory.mktemp("prometheus"), settings, WINDOW) as made:
        yield made


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


def complete(watched: Watched, tenant: str, prompt: str = PROMPT, tokens: int = 4, **headers: str) -> requests.Response:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return requests.post(f"{watched.url}/v1/completions", json=body, headers=bearer(tenant) | headers, timeout=120)


def test_counters_stand_at_0_before_the_first_event(watched: Watched) -> None:
    for name, labels in (
        ("requests_total", 'outcome="failed"'),
        ("tag_mismatches_total", ""),
        ("pages_opened_total", 'verdict="mismatch"'),
        ("scale_decisions_total", 'pool="decode", direction="up", cause="pressure"'),
        ("tenant_output_tokens_total", 'tenant="zeta"'),
        ("tenant_limited_total", 'tenant="small", limit="requests"'),
        ("engine_integrity_breaches_total", 'pool="prefill"'),
        ("engine_preemptions_total", 'pool="decode"'),
    ):
        assert watched.value(f'ray_pageferry_{name}{{application="pageferry", {labels}}}') == 0, name
    assert not watched.prometheus.firing()


def test_a_request_moves_what_it_should(watched: Watched) -> None:
    assert complete(watched, "acme", tokens=12, **{"X-Request-Id": "plain"}).status_code == 200
    moved = (
        'requests_total{outcome="done"}',
        "output_tokens_total",
        "bytes_moved_total",
        "bytes_saved_total",
        "tokens_moved_total",
        'tickets_ended_total{outcome="done"}',
        'pages_opened_total{verdict="ok"}',
        'engine_pages_sealed_total{pool="prefill"}',
        'engine_tokens_opened_total{pool="decode"}',
        *(f'engine_tokens_generated_total{{pool="{pool}"}}' for pool in ("decode",)),
        'engine_prompt_tokens_total{pool="prefill"}',
        *(f'engine_steps_total{{pool="{pool}"}}' for pool in ("prefill", "decode")),
        *(f'engine_prefix_queries_total{{pool="{pool}"}}' for pool in ("prefill", "decode")),
        *(f'engine_integrity_{name}_total{{pool="decode"}}' for name in ("steps", "checks", "rows_checked")),
        'engine_integrity_pages_checked_total{pool="decode"}',
        'tenant_requests_total{tenant="acme",outcome="done"}',
        'tenant_prompt_tokens_total{tenant="acme"}',
        'tenant_output_tokens_total{tenant="acme"}',
        "ttft_seconds_count",
        "tpot_seconds_count",
        "hand_over_seconds_count",
        "staging_bytes_max",
        'kv_blocks{state="free"}',
        'replicas{pool="prefill"}',
        'pool_target{pool="decode"}',
        *(f'phase_seconds_total{{phase="{phase}"}}' for phase in ("admit", "prefill", "submit", "first_token")),
    )
    for name in moved:
        watched.wait(name, lambda name=name: (watched.value(f"sum(ray_pageferry_{name})") or 0) > 0, 40)  # type: ignore[misc]
    assert watched.value("sum(ray_pageferry_engine_preemptions_total)") == 0


# -- traces


def test_one_trace_goes_through_every_process_and_its_phases_add_up(watched: Watched, collector: Receiver) -> None:
    sent = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    assert complete(watched, "zeta", PROMPT * 3, 24, **sent).status_code == 200
    watched.wait("spans", lambda: {"decode.engine", "transfer.opened"} <= {s.name for s in collector.of(TRACE)}, 30)
    watched.wait("root", lambda: any(span.parent == "00f067aa0ba902b7" for span in collector.of(TRACE)), 30)
    spans = collector.of(TRACE)
    (root,) = (span for span in spans if span.parent == "00f067aa0ba902b7")
    children = [span for span in spans if span is not root]
    assert {span.parent for span in children} == {root.id}
    assert {span.service.removeprefix("pageferry-") for span in spans} == {
        "frontend",
        "controller",
        "prefill",
        "transfer",
        "decode",
    }
    phases = [span for span in children if span.name.startswith("frontend.")]
    assert [span.name.partition(".")[2] for span in phases] == [
        "prepare",
        "admit",
        "prefill",
        "hand_over",
        "submit",
        "stream",
    ]
    assert abs(sum(span.seconds for span in phases) - root.seconds) < 0.05 + 0.05 * root.seconds
    inside: dict[str, Seen] = {span.name: span for span in children}
    for outer, inner in (
        ("frontend.admit", "controller.admit"),
        ("frontend.prefill", "prefill.engine"),
        ("frontend.prefill", "prefill.lease"),
    ):
        assert inside[inner].seconds <= inside[outer].seconds + 0.01, (outer, inner)
    assert inside["prefill.engine"].attributes["tokens"] > 300 and inside["decode.engine"].attributes["end"] == "length"
    assert all(root.began - 0.01 <= span.began and span.seconds <= root.seconds + 0.1 for span in children)
    assert {span.trace for span in collector.spans} == {TRACE}, "nothing else was sampled"


# -- keys, tenants and limits


def test_a_key_is_needed_and_changes_without_a_restart(watched: Watched, keys_file: Path) -> None:
    refused = requests.get(f"{watched.url}/v1/models", headers={"Authorization": "Bearer pf-wrong"}, timeout=20)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert requests.get(f"{watched.url}/status", headers=bearer("acme"), timeout=20).status_code == 401
    key, name = add_key(keys_file, "acme")

    def answers(code: int) -> bool:
        """Both frontends, each of which looks at the file for itself."""
        sent = [{"x-api-key": key}] * 6
        return {requests.get(f"{watched.url}/v1/models", headers=each, timeout=20).status_code for each in sent} == {
            code
        }

    watched.wait("the new key", lambda: answers(200), 30)
    write_file(keys_file, {each: entry for each, entry in read_file(keys_file).items() if each != name})
    watched.wait("revoked", lambda: answers(401), 30)


def test_requests_a_minute_are_exact_over_two_frontends(watched: Watched) -> None:
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: complete(watched, "small", "hello", 1), range(12)))
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) == 5 and codes.count(429) == 7, codes
    left = sorted(int(a.headers["x-ratelimit-remaining-requests"]) for a in answers if a.status_code == 200)
    assert left == [0, 1, 2, 3, 4]
    for answer in (each for each in answers if each.status_code == 429):
        assert answer.json()["error"]["type"] == "requests" and 1 <= int(answer.headers["retry-after"]) <= 12
        assert answer.headers["x-ratelimit-limit-requests"] == "5"
    assert complete(watched, "acme", "hello", 1).status_code == 200
    assert "x-ratelimit-limit-requests" not in complete(watched, "acme", "hello", 1).headers
    limited = 'sum(ray_pageferry_tenant_limited_total{tenant="small",limit="requests"})'
    watched.wait("counted", lambda: watched.value(limited) == 7, 40)


def test_kv_tokens_at_one_time_are_bounded(watched: Watched) -> None:
    refused = complete(watched, "narrow", "hello", 500)
    assert refused.status_code == 429 and "400 KV tokens" in refused.json()["error"]["message"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        codes = [a.status_code for a in pool.map(lambda _: complete(watched, "narrow", "hello", 180), range(4))]
    assert codes.count(200) == 2 and codes.count(429) == 2, codes
    assert complete(watched, "narrow", "hello", 180).status_code == 200, "they have ended"


def test_no_prompt_finds_another_tenants_pages(watched: Watched) -> None:
    """By the engines' counters, and by the time to the first token."""
    admin, seconds = bearer("admin"), {"cold": 0.0, "again": 0.0, "other tenant": 0.0}
    for number in range(3):
        prompt = f"Log {number}. " + f"Ship {number} left the harbour before dawn with salt and rope. " * 80
        hits = {}
        for what, tenant in (("cold", "acme"), ("again", "acme"), ("other tenant", "zeta")):
            before = {pool: watched.counters(pool, "prefix_hits", admin) for pool in ("prefill", "decode")}
            began = time.monotonic()
            assert complete(watched, tenant, prompt, 1).status_code == 200
            seconds[what] += time.monotonic() - began
            time.sleep(3.0)  # heartbeats bring the counters
            hits[what] = sum(watched.counters(pool, "prefix_hits", admin) - before[pool] for pool in before)
        assert hits["cold"] == 0 and hits["other tenant"] == 0 and hits["again"] > 900, hits
    print(f"seconds to one token after a prompt of 1,100, three prompts: {seconds}")
    assert seconds["other tenant"] > 1.5 * seconds["again"], seconds


# -- doors


def test_what_speaks_http_is_bound_to_loopback(watched: Watched) -> None:
    """HAProxy with its statistics, the frontends and the dashboard. Ray's own ports are Ray's, and need its token."""
    children = psutil.Process(watched.process.pid).children(recursive=True)
    mark = next(found for child in children if (found := child.environ().get(MARK)))
    listening = []
    for pid in marked(mark):
        try:
            process = psutil.Process(pid)
            name = Path(process.cmdline()[0]).name if process.cmdline() else ""
            found = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            listening += [(name, each.ip, each.port) for each in found]
        except psutil.NoSuchProcess:
            continue
    port = int(watched.url.rsplit(":", 1)[1])
    haproxy = {(ip, number) for name, ip, number in listening if name == "haproxy"}
    assert len(haproxy) >= 3 and {ip for ip, _ in haproxy} == {"127.0.0.1"} and port in {each for _, each in haproxy}
    frontends = {ip for _, ip, number in listening if 30_000 <= number < 31_000}  # Serve's ports for direct ingress
    assert "127.0.0.1" in frontends and "0.0.0.0" not in frontends and "::" not in frontends


# -- an alert, the dashboards, the logs


def plant(watched: Watched, victim: str) -> bool:
    """Asks several times at once: HAProxy sends one alone to the frontend that has not got the victim's connection."""
    body = {"kind": KIND, "victim": victim}

    def ask(_: int) -> bool:
        answer = requests.post(f"{watched.url}/faults", json=body, headers=bearer("admin"), timeout=20)
        assert answer.status_code in (200, 404), answer.text
        return answer.status_code == 200 and bool(answer.json()["fired"])

    with ThreadPoolExecutor(4) as pool:
        return any(list(pool.map(ask, range(4))))


def test_a_page_mix_up_fires_its_alert_and_it_clears(watched: Watched) -> None:
    codes: list[int] = []
    send = {"X-Request-Id": "victim"}
    victim = threading.Thread(target=lambda: codes.append(complete(watched, "acme", tokens=300, **send).status_code))
    victim.start()
    watched.wait("planted", lambda: plant(watched, "victim"), 60)
    victim.join()
    assert codes == [500]
    fired = watched.wait("fires", lambda: "PageferryPageMixUp" in watched.prometheus.firing(), 60)
    cleared = watched.wait("clears", lambda: "PageferryPageMixUp" not in watched.prometheus.firing(), 120)
    print(f"PageferryPageMixUp fired after {fired:.1f} s and cleared {cleared:.1f} s later (window {WINDOW})")


def test_every_panel_of_every_dashboard_has_data(watched: Watched, tmp_path: Path) -> None:
    for board in DASHBOARDS:
        picture = tmp_path / f"{board.uid}.png"
        filled = draw(board, watched.prometheus.url, watched.began, time.time(), "20s", picture)
        assert filled == len(board.panels), board.uid
        assert picture.stat().st_size > 10_000


def lines(watched: Watched, pattern: str) -> list[dict[str, Any]]:
    files = sorted(watched.logs.glob(pattern))
    assert files, sorted(file.name for file in watched.logs.iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_logs_are_json_and_hold_the_request_and_neither_prompt_nor_key(watched: Watched) -> None:
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
    status = requests.get(f"{watched.url}/status", headers=bearer("admin"), timeout=20).text
    secret = ["brown heron", *(key.split("-", 2)[2] for key in KEYS.values())]
    written = {file: file.read_text(errors="replace") for file in watched.logs.parent.rglob("*") if file.is_file()}
    for text in secret:
        assert text not in status + watched.shown
        assert [str(file) for file, content in written.items() if text in content] == [], text
