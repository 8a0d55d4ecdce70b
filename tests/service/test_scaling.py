"""Real pools under `serve run` move with real load: decode 0 -> 1 -> 2 -> 0, prefill 0 -> 1 -> 0, with the reason.

The reason is the same wherever one looks: /status, `pageferry status`, the log, the metrics, Serve's own status.
A start of its own: the last part takes all CPUs of the cluster away.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serve_run_command import URL, ServeRun, serve_run

from app.client import Client

PAGES = 192  # of each decode replica: half of the shipped file's, so that half the answers fill them
REQUESTS = 24
ANSWER = 400  # tokens; 24 answers need about twice the pages that one replica has
WIDE = {"max_tokens": ANSWER, "ignore_eos": True, "temperature": 0.0}


def pageferry(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "app.cli", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flood(answers: list[int], errors: list[str]) -> list[threading.Thread]:
    def ask(number: int) -> None:
        try:
            with Client(URL, timeout_s=1_200) as client:
                done = client.complete(f"Request {number}: " + "a long story about the sea, " * 12, **WIDE)
                answers.append(done.usage.completion_tokens)
        except Exception as error:
            errors.append(f"{number}: {error}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(REQUESTS)]
    for thread in threads:
        thread.start()
    return threads


class Watch:
    """What /status says, twice a second, while something goes on."""

    def __init__(self, run: ServeRun) -> None:
        self.run = run
        self.targets: dict[str, list[int]] = {"decode": [], "prefill": []}
        self.ready: dict[str, int] = {"decode": 0, "prefill": 0}
        self.status: dict[str, Any] = {}

    def look(self) -> None:
        self.status = self.run.get("/status")
        for pool, found in self.status["pools"].items():
            seen = self.targets[pool]
            if found["target"] is not None and (not seen or seen[-1] != found["target"]):
                seen.append(found["target"])
            self.ready[pool] = max(self.ready[pool], sum(r["state"] == "ready" for r in found["replicas"]))

    def until(self, what: str, timeout_s: float) -> None:
        """`what`: an expression over this object, so that a failure shows it."""
        until = time.monotonic() + timeout_s
        while not eval(what, {"watch": self, "all": all, "any": any, "len": len}):
            assert time.monotonic() < until, f"not within {timeout_s:g} s: {what}; {self.targets} {self.status}"
            time.sleep(0.5)
            self.look()


TAKE_ALL_CPUS = """
import sys, time, ray
ray.init(address="auto", log_to_driver=False)
nothing_free_s = 0
while nothing_free_s < 5:  # what is on its way out gives its CPUs back a little later
    if free := ray.available_resources().get("CPU"):
        ray.util.placement_group([{"CPU": free}]).wait(10)
    nothing_free_s = 0 if free else nothing_free_s + 1
    time.sleep(1)
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def no_cpu_left(run: ServeRun) -> Iterator[None]:
    environ = {**os.environ, "RAY_TMPDIR": str(run.folder), "RAY_AUTH_MODE": "disabled"}
    command, pipe = [sys.executable, "-c", TAKE_ALL_CPUS], subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield
        process.communicate()


@pytest.mark.timeout(2_400)
def test_pools_wake_grow_and_leave_and_say_why() -> None:
    settings = (
        "pools.decode.replicas=0",
        "pools.decode.min_replicas=0",
        f"pools.decode.engine_args.num_gpu_blocks_override={PAGES}",
        "admission.queue_wait_s=1200",  # a slow machine's answers take their time, and it says so beforehand
    )
    with serve_run("app.main:build", "config=cluster/topologies/local-scale.yaml", *settings) as run:
        run.wait_healthy()
        watch = Watch(run)
        watch.until("watch.targets == {'decode': [0], 'prefill': [0]}", 30)
        wake(watch)
        grow(run, watch)
        leave(run, watch)
        with no_cpu_left(run):
            find_no_room(run, watch)
        assert watch.status["tickets"]["in_flight"] == 0 and run.get("/status/audit")["breaches"] == []


def wake(watch: Watch) -> None:
    """The first request brings the pool from zero."""
    with Client(URL, timeout_s=400) as client:
        assert client.complete("The sea is", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    watch.look()
    assert watch.targets["decode"] == [0, 1] and watch.status["pools"]["decode"]["start_up_s"] > 1


def grow(run: ServeRun, watch: Watch) -> None:
    """A flood of long answers."""
    answers: list[int] = []
    errors: list[str] = []
    threads = flood(answers, errors)
    watch.until("watch.targets['decode'] == [0, 1, 2]", 30)
    assert "KV blocks needed" in watch.status["pools"]["decode"]["scaling"]
    assert re.search(r"decode +1 of 2 replicas.* KV blocks needed", pageferry("status", "--url", URL))
    assert run.serve_status("Decode")["target_num_replicas"] == 2
    watch.until("watch.ready['decode'] == 2", 600)
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
            watch.look()
    assert errors == [] and answers == [ANSWER] * REQUESTS
    assert watch.targets["prefill"][:2] == [0, 1], "what waited had prompts to compute"


def leave(run: ServeRun, watch: Watch) -> None:
    """Back to nothing, and all of it can be read afterwards."""
    # A pool becomes smaller when it was idle for as long as a replica takes to start.
    seconds = 240 + 3 * max(pool["start_up_s"] for pool in watch.status["pools"].values())
    watch.until("watch.targets['decode'][-1] == 0", seconds)
    watch.until("len(watch.status['pools']['decode']['replicas']) == 0", 120)
    watch.until("watch.targets['prefill'] == [0, 1, 0]", seconds)
    watch.until("watch.run.serve_status('Decode')['replicas'] == []", 120)
    assert watch.targets["decode"] in ([0, 1, 2, 0], [0, 1, 2, 1, 0]), "no move for nothing"
    decisions = watch.status["scaling"]["decisions"]
    made = [(each["pool"], each["current"], each["target"]) for each in decisions]
    assert {("decode", 0, 1), ("decode", 1, 2), ("prefill", 0, 1), ("prefill", 1, 0)} <= set(made)
    assert all(each["reason"] for each in decisions)
    assert run.serve_status("Decode")["target_num_replicas"] == 0
    metrics = run.metrics()
    for direction in ("up", "down"):
        series = rf'ray_pageferry_scale_decisions_total\{{[^}}]*application="default"[^}}]*direction="{direction}"'
        assert re.search(series, metrics), direction
    logs = "\n".join(file.read_text(errors="replace") for file in run.folder.rglob("*.log"))
    logs += "\n".join(file.read_text(errors="replace") for file in run.folder.rglob("worker-*.err"))
    assert all(f"scale {pool} {before} -> {after}" in logs for pool, before, after in made)


def find_no_room(run: ServeRun, watch: Watch) -> None:
    """A target that no node has CPUs for is seen as such within ten seconds, and one out of bounds is refused."""
    pageferry("scale", "decode", "1", "--url", URL)
    began = time.monotonic()
    watch.until("watch.status['pools']['decode']['unplaced'] == 1", 20)
    assert time.monotonic() - began < 12, "ten seconds, and one look every half second on a busy machine"
    assert "1 of 1 replicas found no room" in watch.status["pools"]["decode"]["scaling"]
    assert re.search(r"decode +0 of 1 replicas, 1 without room", pageferry("status", "--url", URL))
    serve = run.serve_status("Decode")
    assert serve["target_num_replicas"] == 1 and serve["status"] == "UPSCALING"
    pageferry("scale", "decode", "0", "--url", URL)
    watch.until("watch.status['pools']['decode']['unplaced'] == 0", 20)
    assert watch.targets["decode"][-2:] == [1, 0]
    command = [sys.executable, "-m", "app.cli", "scale", "decode", "3", "--url", URL]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "outside pools.decode.min_replicas 0 .. max_replicas 2" in refused.stderr
