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
from ops.chaos.alerts.watch import Watch

SENTENCE = "The old lighthouse keeper climbed the winding stairs each evening to light the lamp. "
# Continued elsewhere it would not be the same answer, so a mix-up ends it under policy `retry` too.
NOT_CONTINUED = {"presence_penalty": 0.5, "temperature": 1.0}
STAGED = (
    PageFault.TABLE_FREE_PAGE,
    PageFault.BIT_FLIP,
    PageFault.PAGE_FREED_EARLY,
    PageFault.PROOF_LOST,
    PageFault.STAGING_REVOKED,
    PageFault.LATE_LANDING,
)


@dataclass(frozen=True, slots=True)
class Stage:
    """`alerts`: those that have to fire in it; none where it only moves metrics."""

    name: str
    alerts: tuple[str, ...]
    what: str
    act: Callable[[Staging], None]
    wait_s: float = 60.0


class Staging:
    """A running service and what the stages do to it. `keys`: by tenant."""

    def __init__(self, service: Service, watch: Watch, keys: dict[str, str]) -> None:
        self.service = service
        self.watch = watch
        self.keys = keys
        self.answers: list[int] = []
        self._number = 0

    def complete(
        self, sentences: int, tokens: int, name: str = "", tenant: str = "acme", prompt: str = "", **more: Any
    ) -> int:
        """The status of one request; 0 when the connection broke."""
        self._number += 1
        text = prompt or f"{self._number}. " + SENTENCE * sentences
        body = {"model": "smollm2", "prompt": text, "max_tokens": tokens, **more}
        body.setdefault("ignore_eos", True)
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"} | ({"X-Request-Id": name} if name else {})
        try:
            answer = requests.post(f"{self.service.url}/v1/completions", json=body, headers=headers, timeout=300)
            self.answers.append(answer.status_code)
            return answer.status_code
        except requests.RequestException:
            self.answers.append(0)
            return 0

    def several(self, number: int, sentences: int, tokens: int, name: str = "", **more: Any) -> ThreadPoolExecutor:
        """In the background; leaving the pool waits for the answers. With a `name` they are name-0-, name-1-, ..."""
        pool = ThreadPoolExecutor(number)
        for each in range(number):
            pool.submit(self.complete, sentences, tokens, f"{name}-{each}-" if name else "", **more)
        return pool

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = requests.get(f"{self.service.url}/status", timeout=30).json()
        return found

    def ready(self, seconds: float) -> None:
        """Waits until the service is healthy again: an earlier stage may have ended its replicas."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.service.url}/health", timeout=10).ok:
                    return
            time.sleep(1.0)

    def plant(self, kind: str, victim: str, more: float = 0.0, seconds: float = 30.0) -> None:
        """Tries until the victim is where the fault can happen. Raises when it never is."""
        until = time.monotonic() + seconds
        answered = ""
        while time.monotonic() < until:
            body = {"kind": kind, "victim": victim, "more": more}
            answer = requests.post(f"{self.service.url}/faults", json=body, timeout=20)
            answered = answer.text
            if answer.status_code == 200 and (answer.json().get("fired") or "armed" in answer.json()):
                return
            time.sleep(0.05)
        raise RuntimeError(f"{kind} was not planted in {seconds:g} s: {answered[:300]}")

    def hurt(self, kind: str, sentences: int, tokens: int, more: float = 0.0, **body: Any) -> None:
        """One request with that fault in it."""
        name = f"victim-{kind}-{self._number}"
        victim = threading.Thread(target=self.complete, args=(sentences, tokens, name), kwargs=body)
        victim.start()
        self.plant(kind, name, more)
        victim.join()


# -- stages


def page_mix_up(staging: Staging) -> None:
    staging.hurt(PageFault.TABLE_FREE_PAGE, 12, 200, **NOT_CONTINUED)


def run_again(staging: Staging) -> None:
    staging.hurt(PageFault.TABLE_FREE_PAGE, 12, 200)


def bad_bytes(staging: Staging) -> None:
    for _ in range(3):
        staging.hurt(PageFault.BIT_FLIP, 60, 4)


def bytes_gone(staging: Staging) -> None:
    for _ in range(3):
        staging.hurt(PageFault.STAGING_REVOKED, 60, 4)


def freed_early(staging: Staging) -> None:
    staging.hurt(PageFault.PAGE_FREED_EARLY, 30, 250)


def no_proofs(staging: Staging) -> None:
    """While proofs are lost a request runs, and one after that is proven again."""
    staging.hurt(PageFault.PROOF_LOST, 12, 300, more=20.0)
    staging.watch.wait(lambda firing: "PageferryCheckStopped" in firing, 40)
    _serve_until_clear(staging, "PageferryCheckStopped", 8)


def _serve_until_clear(staging: Staging, alert: str, tokens: int) -> None:
    for _ in range(10):
        if staging.watch.wait(lambda firing: alert not in firing, 4.0):
            break
        staging.complete(2, tokens)


def fill_quarantine(staging: Staging) -> None:
    """Sixteen at once, so that the engine stands still before it gives the first pages back."""
    for turn in range(3):
        with staging.several(16, 2, 250, f"mixed-{turn}", **NOT_CONTINUED), ThreadPoolExecutor(16) as planting:
            time.sleep(1.0)
            for each in range(16):
                planting.submit(staging.plant, PageFault.TABLE_FREE_PAGE, f"mixed-{turn}-{each}-")
        if staging.watch.wait(lambda firing: "PageferryQuarantineFills" in firing, 10):
            break
    _serve_until_clear(staging, "PageferryQuarantineFills", 60)  # in its steps the oldest pages are given back


def landings_held(staging: Staging) -> None:
    """Decode holds six landings for five seconds each, one after the other; four fit into staging."""
    with staging.several(6, 20, 2, "landing"):
        for each in range(6):
            with contextlib.suppress(RuntimeError):  # it has landed already
                staging.plant(PageFault.LATE_LANDING, f"landing-{each}-", seconds=3.0)


def clients(staging: Staging) -> None:
    """One tenant asks more often than it may, and another sends the same prompt twice."""
    for _ in range(8):
        staging.complete(1, 2, tenant="small")
    for _ in range(2):
        staging.complete(0, 4, prompt=SENTENCE * 40)


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
    with staging.several(16, 12, 500):
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
        "a page mix-up",
        ("PageferryPageMixUp", "PageferryRequestsFail"),
        "one entry of a block table names a free page; the request, which cannot be continued elsewhere, fails",
        page_mix_up,
    ),
    Stage("a mix-up that is run again", (), "the same, and the request is run again", run_again, wait_s=0),
    Stage(
        "pages with a flipped bit",
        ("PageferryPageNotVerified", "PageferryDecodeRecomputes"),
        "three requests' pages have one bit turned over in staging; decode computes them again",
        bad_bytes,
    ),
    Stage(
        "no proofs",
        ("PageferryCheckStopped", "PageferryStepsUnproven"),
        "the worker's answers hold no proof for 20 s while a request runs",
        no_proofs,
    ),
    Stage(
        "pages gone from staging",
        ("PageferryPagesMissing",),
        "three requests' staging bytes are gone before decode reads them",
        bytes_gone,
    ),
    Stage(
        "sixteen page mix-ups at once",
        ("PageferryQuarantineFills",),
        "a block table entry of each of 16 requests names a free page",
        fill_quarantine,
    ),
    Stage(
        "landings are held",
        ("PageferryStagingFull",),
        "decode holds six landings for 5 s each, one after the other; four fit into staging",
        landings_held,
    ),
    Stage(
        "decode is killed",
        ("PageferryReplicasLost", "PageferryNoDecode"),
        "SIGKILL of the only decode replica and its engine under six streams",
        kill_decode,
        wait_s=90,
    ),
    Stage(
        "a prefill engine hangs",
        ("PageferryEngineHung",),
        "SIGSTOP of the engine's process",
        hang_prefill,
    ),
    Stage("a page freed early", ("PageferryLedgerBroken",), "it goes back to the pool while it is read", freed_early),
    Stage(
        "clients at their limits", (), "more requests a minute than allowed; the same prompt twice", clients, wait_s=0
    ),
    Stage(
        "no room for a replica",
        ("PageferryNoRoomForReplicas",),
        "Ray's CPUs are taken and a second decode replica is asked for",
        no_room,
    ),
    Stage(
        "a flood of long prompts",
        ("PageferryRefusing", "PageferryFirstTokenSlow"),
        "24 clients with prompts of 1,200 tokens; the queue holds eight, staging one",
        flood,
    ),
    Stage(
        "short answers become long",
        ("PageferryPreemptions", "PageferryDecodeFull"),
        "ten short answers, then sixteen of 500 tokens on 160 pages",
        overcommit,
    ),
)
