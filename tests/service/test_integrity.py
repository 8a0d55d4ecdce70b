"""Wrong pages planted into a running service with the check on and policy `retry`: what clients see, and what is left.

A service of its own (two decode replicas, no prefill), since faults are planted by its configuration alone. A request
that can be continued exactly is run again elsewhere; one that cannot (random sampling with a penalty and no seed) ends
with the error. It is started as a person starts it, says what it waits for, and leaves nothing behind.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_service import fetch
from serve_command import serving

from actors.engine import engine_shm
from app.cli import main
from app.client import Client, PageIntegrityError
from app.processes import MARK

KIND = "table_free_page"
SETTINGS = {
    "pools.prefill.replicas": 0,
    "pools.decode.replicas": 2,
    "pools.decode.engine_args.num_gpu_blocks_override": 320,
    "model.max_model_len": 2048,
    "integrity.mode": "check",
    "integrity.policy": "retry",
    "faults.kinds": f"[{KIND}]",
    "faults.seed": 5,
}
# Continued with confidence (2 and 5 nats ahead), so that the tokens do not depend on what else is in the batch.
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday\n" * 16
SEASONS = "spring, summer, autumn, winter\n" * 30
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
# Neither resumed nor replayed: what the engine remembers of its own random output is in the engine alone.
UNIQUE = {"temperature": 1.0, "presence_penalty": 0.5, "ignore_eos": True}

pytestmark = pytest.mark.timeout(300)


@dataclass
class Running:
    url: str
    folder: Path  # Ray's
    process: subprocess.Popen[str]
    shown: str  # what it has said up to "Ctrl-C ends it"
    mark: str  # in the environment of all its processes

    def plant(self, victim: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """As soon as the victim has a page that is read; fails when that does not come."""
        until = time.monotonic() + timeout_s
        while True:
            status, done = post(f"{self.url}/faults", {"kind": KIND, "victim": victim})
            if status == 200 and done["fired"]:
                return done
            assert status in (200, 404) and time.monotonic() < until, (status, done)
            time.sleep(0.05)

    def metric(self, name: str) -> dict[str, float]:
        """By labels, from every exporter, as Prometheus would read them."""
        found: dict[str, float] = {}
        for line in self.exported():
            if match := re.fullmatch(rf"ray_{name}(\{{.*\}})? ([0-9.e+-]+)", line):
                found[match[1] or ""] = float(match[2])
        return found

    def exported(self) -> list[str]:
        """Our lines of every exporter that Ray names to Prometheus."""
        targets = json.loads((self.folder / "prom_metrics_service_discovery.json").read_text())
        lines: list[str] = []
        for address in {target for group in targets for target in group["targets"]}:
            try:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                    lines += [x for x in answer.read().decode().splitlines() if x.startswith("ray_pageferry_")]
            except OSError:  # an exporter whose process starts or ends; Prometheus asks again too
                continue
        return lines


def post(url: str, body: dict[str, Any], name: str = "") -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    with serving(settings, RAY_metrics_report_interval_ms="3000") as (process, url, shown):
        mark = next(mark for mark, pids in marks().items() if any(parent(pid) == process.pid for pid in pids))
        yield Running(url, folder_of(process.pid), process, shown, mark)


def marks() -> dict[str, list[int]]:
    """Process ids by the mark of the service that they belong to."""
    pids: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        for item in environ:
            if item.startswith(f"{MARK}=".encode()):
                pids.setdefault(item.decode().partition("=")[2], []).append(int(entry.name))
    return pids


def parent(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # it has ended
    return int(status.partition("\nPPid:\t")[2].split()[0])


def folder_of(pid: int) -> Path:
    """Where the Ray that this process has started keeps its files, from the command lines of its children."""
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or parent(int(entry.name)) != pid:
                continue
            if found := re.search(r"/tmp/pf-\w+", (entry / "cmdline").read_text()):
                return Path(found[0])
        except OSError:
            continue
    raise AssertionError(f"process {pid} has started no Ray")


def settled(running: Running) -> dict[str, Any]:
    """Once nothing runs: every law holds, and no page is held. Returns the audit."""
    until = time.monotonic() + 15
    while True:
        status = fetch(running.url, "/status?audit=1")
        replicas = status["pools"]["decode"]["replicas"]
        audit: dict[str, Any] = status["audit"]
        left = [*audit["breaches"], *(f"silent: {name}: {why}" for name, why in audit["silent"].items())]
        left += [f"{r['replica_id']} holds {r['blocks_held']} blocks" for r in replicas if r["blocks_held"]]
        left += [
            f"{name}: {r['page_owners_known']} owners" for name, r in audit["replicas"].items() if r["pages_known"]
        ]
        if status["tickets"]["in_flight"] == 0 and not left:
            break
        assert time.monotonic() < until, (status["tickets"], left)
        time.sleep(0.2)
    for each in replicas:
        assert each["blocks_free"] + each["blocks_held"] + each["blocks_quarantined"] == each["blocks_total"]
    return audit


# A greedy token that leads by less than this many nats may fall the other way beside another request in the batch.
LEAD = 1.0


@dataclass
class Alone:
    """What a greedy request yields when nothing else runs; its first `sure` tokens do not depend on company."""

    ids: list[int]
    sure: int

    def agrees(self, ids: list[int], count: int | None = None) -> bool:
        upto = min(self.sure, len(self.ids) if count is None else count)
        return ids[:upto] == self.ids[:upto]


class Neighbour(threading.Thread):
    """Decodes while others are hit."""

    def __init__(self, running: Running, max_tokens: int) -> None:
        super().__init__()
        self.url, self.max_tokens = running.url, max_tokens
        self.ids: list[int] = []

    def run(self) -> None:
        with Client(self.url, model="smollm2") as client:
            answer = client.complete(SEASONS, max_tokens=self.max_tokens, **GREEDY)
        self.ids = answer.raw["choices"][0]["token_ids"]


def alone(running: Running, prompt: str, max_tokens: int) -> Alone:
    with Client(running.url, model="smollm2") as client:
        answer = client.complete(prompt, max_tokens=max_tokens, logprobs=2, **GREEDY).raw["choices"][0]
    tops = [sorted(top.values(), reverse=True) for top in answer["logprobs"]["top_logprobs"]]
    close = (at for at, top in enumerate(tops) if len(top) > 1 and top[0] - top[1] < LEAD)
    found = Alone(answer["token_ids"], next(close, max_tokens))
    assert len(found.ids) == len(tops) == max_tokens and found.sure >= 50, found
    return found


def test_serve_says_what_it_waits_for_and_answers(running: Running) -> None:
    assert "waiting for Decode 0/2 (engine start-up)" in running.shown
    assert f"curl {running.url}/v1/chat/completions" in running.shown
    assert "Ray dashboard: http://127.0.0.1:" in running.shown
    with Client(running.url) as client:
        assert client.healthy()
        assert client.chat("Name a colour.", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_a_request_that_can_is_run_again_elsewhere_and_no_client_notices(running: Running) -> None:
    right, neighbours = alone(running, DAYS, 90), alone(running, SEASONS, 120)
    settled(running)
    neighbour = Neighbour(running, 120)
    ids: list[int] = []
    finish, planted = None, 0
    with (
        Client(running.url, model="smollm2") as client,
        client.stream_complete(DAYS, max_tokens=90, stream_options={"include_usage": True}, **GREEDY) as stream,
    ):
        for delta in stream:
            if delta.index >= 0:
                ids += delta.raw["choices"][0].get("token_ids") or []
                finish = delta.finish_reason or finish
            if len(ids) >= 10 and not neighbour.ident:
                neighbour.start()
                wait_for_owners(running, 2)  # the controller knows the pages of both
                planted = len(ids)
                assert running.plant(delta.raw["id"])["fired"]
            usage = delta.usage
    neighbour.join(60)
    # The tokens so far are computed again as a prompt, which rounds differently: the text may fork there, not before.
    assert planted >= 10 and right.agrees(ids, planted)
    assert len(ids) == 90 and finish == "length"
    assert usage is not None and usage.completion_tokens == 90, "counted once"
    assert neighbours.agrees(neighbour.ids) and len(neighbour.ids) == 120
    audit = settled(running)
    [mismatch] = audit["tag_mismatches"]
    counters = fetch(running.url, "/status")["counters"]
    assert counters["tag_mismatch_events"] == 1 and counters["page_integrity_retries"] == 1
    first = audit["engines"][mismatch["replica_id"]]
    [verdict] = first["integrity"]["verdicts"]
    # The registry heard of the page by another path, and says the same.
    assert mismatch["page_known"] == verdict["page_expected"]
    others = [engine for name, engine in audit["engines"].items() if name != mismatch["replica_id"]]
    assert [engine["scheduler"]["counters"]["integrity_requests_ended"] for engine in others] == [0]
    assert first["scheduler"]["blocks_quarantined"] == 1


def wait_for_owners(running: Running, count: int) -> None:
    until = time.monotonic() + 10
    while sum(r["page_owners_known"] for r in fetch(running.url, "/status/audit")["replicas"].values()) < count:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_request_that_cannot_ends_with_the_error_and_its_neighbour_goes_on(running: Running) -> None:
    neighbours = alone(running, SEASONS, 80)
    neighbour = Neighbour(running, 80)
    neighbour.start()
    answers: list[tuple[int, Any]] = []
    body = {"model": "smollm2", "prompt": DAYS, "max_tokens": 400, **UNIQUE}
    asking = threading.Thread(target=lambda: answers.append(post(f"{running.url}/v1/completions", body, "victim-1")))
    asking.start()
    # A page that is read although no token is out yet could be had again: wait until there is one.
    wait_for_tokens(running, 2)
    running.plant("victim-1")
    asking.join(60)
    [(status, answer)] = answers
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (500, "page_integrity_error", 500)
    assert "cmpl-victim-1" in answer["error"]["message"] and "send it again" in answer["error"]["message"]
    texts = []
    with (
        Client(running.url, model="smollm2") as client,
        client.stream_chat(DAYS, max_tokens=400, **UNIQUE) as stream,
        pytest.raises(PageIntegrityError) as caught,
    ):
        for delta in stream:
            texts.append(delta.text)
            if len(texts) == 5:
                running.plant(delta.raw["id"])
    assert caught.value.status == 500 and len(texts) >= 5
    neighbour.join(60)
    assert neighbours.agrees(neighbour.ids) and len(neighbour.ids) == 80
    settled(running)


def wait_for_tokens(running: Running, running_requests: int) -> None:
    until = time.monotonic() + 20
    while sum(r["running"] for r in fetch(running.url, "/status")["pools"]["decode"]["replicas"]) < running_requests:
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(1.0)


def test_status_audit_shows_laws_and_histories(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    settled(running)
    assert main(["status", "--url", running.url, "--audit"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split()[3:6] for line in shown.splitlines() if line.split()[:1] == ["decode"]]
    assert "all laws hold" in shown and rows == [["check", "ok", "ok"]] * 2
    assert shown.count("tag mismatch: ") == 3 and " in the place of page " in shown and "    step " in shown
    assert main(["status", "--url", running.url, "--audit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["clean"] and len(found["tag_mismatches"]) == 3 and len(found["engines"]) == 2
    assert all(engine["integrity"]["laws_broken"] == [] for engine in found["engines"].values())


def test_what_alerts_need_is_exported(running: Running) -> None:
    """The names that the README gives for alerts, read as Prometheus reads them."""
    counts = {
        "pageferry_page_integrity_retries_total": 1,
        "pageferry_page_integrity_errors_total": 2,
        "pageferry_tag_mismatches_total": 3,
        "pageferry_engine_integrity_requests_ended_total": 3,
    }
    until = time.monotonic() + 120  # frontend, controller and replicas export each at its own time
    while (found := {name: sum(running.metric(name).values()) for name in counts}) != counts:
        assert time.monotonic() < until, found
        time.sleep(0.5)
    for name in ("steps", "checks", "rows_checked", "pages_checked", "pages_doubted"):
        assert sum(running.metric(f"pageferry_engine_integrity_{name}_total").values()) > 0, name
    unproven = running.metric("pageferry_engine_integrity_unproven_s")
    assert len(unproven) == 2 and all(value < 10 for value in unproven.values())
    shares = running.metric("pageferry_engine_integrity_quarantined_share")
    assert len(shares) == 2 and 0 < sum(shares.values()) < 0.1


def test_it_ends_with_everything_it_started(running: Running) -> None:
    """Last in this module: it ends the service."""
    shared = engine_shm.mapped_by(marks()[running.mark])
    assert shared, "an engine core and its worker talk through shared memory"
    began = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    assert running.process.stdout is not None
    rest = running.process.stdout.read()
    assert running.process.wait(60) == 0, rest
    assert rest.strip() == "pageferry: SIGINT: ending what was started"
    assert time.monotonic() - began < 40  # 10 to 14 s where nothing else runs
    until = time.monotonic() + 5
    while running.mark in marks() and time.monotonic() < until:
        time.sleep(0.1)
    assert running.mark not in marks()
    assert not shared & {path.name for path in Path("/dev/shm").iterdir()}
