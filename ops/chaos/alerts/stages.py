"""The faults that make alerts fire, each on the one running service of the campaign."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import ray
import requests

from app.commands.serve import Service
from cluster.fault_kinds import PageFault
from cluster.metrics import BY_NAME, Emitter
from ops.chaos.alerts.watch import Watch

STORY = "The old lighthouse keeper climbed the winding stairs each evening to light the lamp. "
STAGED = {"pool": "decode", "replica": "staged"}


@dataclass(frozen=True, slots=True)
class Stage:
    """`how`: service (a real fault in it) or metrics (the shipped metrics code counts what is not staged here)."""

    name: str
    alerts: tuple[str, ...]
    what: str
    act: Callable[[Staging], None]
    how: str = "service"
    wait_s: float = 60.0


class Staging:
    """A running service and what the stages do to it."""

    def __init__(self, service: Service, watch: Watch) -> None:
        self.service = service
        self.watch = watch
        self.answers: list[int] = []
        self._number = 0

    def complete(self, words: int, tokens: int, name: str = "", **more: Any) -> int:
        """The status of one request; 0 when the connection broke."""
        self._number += 1
        body = {"model": "smollm2", "prompt": f"{self._number}. " + STORY * words, "max_tokens": tokens, **more}
        body.setdefault("ignore_eos", True)
        try:
            answer = requests.post(
                f"{self.service.url}/v1/completions",
                json=body,
                headers={"X-Request-Id": name} if name else {},
                timeout=300,
            )
            self.answers.append(answer.status_code)
            return answer.status_code
        except requests.RequestException:
            self.answers.append(0)
            return 0

    def several(self, number: int, words: int, tokens: int, **more: Any) -> ThreadPoolExecutor:
        """In the background; leaving the pool waits for the answers."""
        pool = ThreadPoolExecutor(number)
        for _ in range(number):
            pool.submit(self.complete, words, tokens, **more)
        return pool

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = requests.get(f"{self.service.url}/status", timeout=30).json()
        return found

    def plant(self, kind: str, victim: str, seconds: float = 30.0) -> None:
        """Tries until the victim is where the fault can happen. Raises when it never is."""
        until = time.monotonic() + seconds
        answered = ""
        while time.monotonic() < until:
            answer = requests.post(f"{self.service.url}/faults", json={"kind": kind, "victim": victim}, timeout=20)
            answered = answer.text
            if answer.status_code == 200 and (answer.json().get("fired") or "armed" in answer.json()):
                return
            time.sleep(0.05)
        raise RuntimeError(f"{kind} was not planted in {seconds:g} s: {answered[:300]}")

    def hurt(self, kind: str, words: int, tokens: int) -> None:
        """One request with that fault in it."""
        name = f"victim-{kind}-{self._number}"
        victim = threading.Thread(target=self.complete, args=(words, tokens, name))
        victim.start()
        self.plant(kind, name)
        victim.join()


# -- stages


def page_mix_up(staging: Staging) -> None:
    staging.hurt(PageFault.TABLE_FREE_PAGE, 12, 200)


def bad_bytes(staging: Staging) -> None:
    for _ in range(3):
        staging.hurt(PageFault.BIT_FLIP, 60, 4)


def freed_early(staging: Staging) -> None:
    staging.hurt(PageFault.PAGE_FREED_EARLY, 30, 250)


def staged_counters(staging: Staging) -> None:
    emitter = Emitter(ray.util.metrics, application=staging.service.application)
    counters = {
        "pageferry_engine_integrity_steps_unproven_total": STAGED,
        "pageferry_pages_opened_total": {"verdict": "missing"},
    }
    for name, labels in counters.items():
        emitter.zero([BY_NAME[name]], **labels)
    emitter.set("pageferry_engine_integrity_unproven_s", 0.0, **STAGED)
    emitter.set("pageferry_engine_integrity_quarantined_share", 0.0, **STAGED)
    time.sleep(8)  # the zeros have to be seen
    emitter.set("pageferry_engine_integrity_unproven_s", 12.0, **STAGED)
    emitter.set("pageferry_engine_integrity_quarantined_share", 0.07, **STAGED)
    wanted = ("PageferryCheckStopped", "PageferryStepsUnproven", "PageferryPagesMissing", "PageferryQuarantineFills")
    began = staging.watch.now
    for _ in range(20):
        for name, labels in counters.items():
            emitter.count(name, 1.0, **labels)
        if staging.watch.wait(lambda _: staging.watch.all_fired(wanted, began), 2.0):
            break
    emitter.set("pageferry_engine_integrity_unproven_s", 0.0, **STAGED)
    emitter.set("pageferry_engine_integrity_quarantined_share", 0.0, **STAGED)


def no_room(staging: Staging) -> None:
    """Every CPU that Ray has left is taken, and a second decode replica is asked for."""

    class Taker:
        def ready(self) -> int:
            return os.getpid()

    remote: Any = ray.remote(Taker)
    taken = []
    while ray.available_resources().get("CPU", 0.0) >= 0.25:
        taker = remote.options(num_cpus=min(1.0, ray.available_resources()["CPU"] // 0.25 * 0.25)).remote()
        ray.get(taker.ready.remote(), timeout=60)
        taken.append(taker)
        time.sleep(0.5)
    try:
        _scale(staging, 2)
        staging.watch.wait(lambda firing: "PageferryNoRoomForReplicas" in firing, 60)
    finally:
        _scale(staging, 1)
        time.sleep(2)
        for taker in taken:
            ray.kill(taker)


def _scale(staging: Staging, replicas: int) -> None:
    body = {"pool": "decode", "replicas": replicas, "hold_s": 600}
    requests.post(f"{staging.service.url}/admin/scale", json=body, timeout=30).raise_for_status()


def overcommit(staging: Staging) -> None:
    """Answers that were always short are suddenly long: decode has promised more pages than it has."""
    for _ in range(10):
        staging.complete(2, 800, stop=[" ", "e", "a"], ignore_eos=False)
    with staging.several(14, 12, 800):
        pass


def flood(staging: Staging) -> None:
    """Long prompts, more than there is room for in the queue."""
    until = time.monotonic() + 50
    with ThreadPoolExecutor(24) as pool:
        waves = [pool.submit(_repeat, staging, until) for _ in range(24)]
        for wave in as_completed(waves):
            wave.result()


def _repeat(staging: Staging, until: float) -> None:
    while time.monotonic() < until:
        if staging.complete(80, 2) != 200:
            time.sleep(1.0)


def hang_prefill(staging: Staging) -> None:
    """The prefill engine's process is stopped; its replica gives it up and Serve makes another."""
    (replica,) = (r for r in staging.status()["pools"]["prefill"]["replicas"] if r["state"] == "ready")
    pid = int(replica["engine"]["worker_pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        staging.complete(40, 4)
        staging.watch.wait(lambda firing: "PageferryEngineHung" in firing, 60)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has been ended
            os.kill(pid, signal.SIGCONT)


def kill_decode(staging: Staging) -> None:
    """The only decode replica dies under six streams, and requests wait until Serve has made another."""
    with staging.several(6, 6, 300):
        time.sleep(6)
        (replica,) = (r for r in staging.status()["pools"]["decode"]["replicas"] if r["state"] == "ready")
        engine = replica["engine"]
        for pid in (engine["replica_pid"], engine["worker_pid"]):
            os.kill(int(pid), signal.SIGKILL)


STAGES = (
    Stage(
        "a page mix-up under policy fail",
        ("PageferryPageMixUp", "PageferryRequestsFail"),
        "one entry of a block table names a free page; the request fails",
        page_mix_up,
    ),
    Stage(
        "pages with a flipped bit",
        ("PageferryPageNotVerified", "PageferryDecodeRecomputes"),
        "three requests' pages have one bit turned over in staging; decode computes them again",
        bad_bytes,
    ),
    Stage("a page freed early", ("PageferryLedgerBroken",), "it goes back to the pool while it is read", freed_early),
    Stage(
        "counters of what is not staged here",
        ("PageferryCheckStopped", "PageferryStepsUnproven", "PageferryPagesMissing", "PageferryQuarantineFills"),
        "the shipped metrics code counts it, in the service's Ray",
        staged_counters,
        "metrics",
    ),
    Stage(
        "no room for a replica",
        ("PageferryNoRoomForReplicas",),
        "Ray's CPUs are taken and a second decode replica is asked for",
        no_room,
    ),
    Stage(
        "short answers become long",
        ("PageferryPreemptions", "PageferryDecodeFull"),
        "ten short answers, then fourteen of 800 tokens on 160 pages",
        overcommit,
    ),
    Stage(
        "a flood of long prompts",
        ("PageferryRefusing", "PageferryFirstTokenSlow", "PageferryStagingFull"),
        "24 clients with prompts of 1,200 tokens; the queue holds eight, staging one",
        flood,
    ),
    Stage(
        "a prefill engine hangs",
        ("PageferryEngineHung",),
        "SIGSTOP of the engine's process",
        hang_prefill,
    ),
    Stage(
        "decode is killed",
        ("PageferryReplicasLost", "PageferryNoDecode"),
        "SIGKILL of the only decode replica and its engine under six streams",
        kill_decode,
        wait_s=90,
    ),
)
