"""Runs the parts of `make test` side by side, so that one starts engines while another computes.

    python tests/lanes.py

Each lane is a list of steps, one after the other; a step's output goes to a file under `build/test-logs` and is shown
when it fails. A failed step does not end the others. Exit status 1 when any failed. `PARTS` chooses lanes by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "test-logs"
BIN = Path(sys.executable).parent
SHOWN_LINES = 150


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]


def tests(name: str, marker: str) -> Step:
    options = ("-q", "-o", "console_output_style=count", "--durations=15", "--durations-min=2")
    return Step(name, (sys.executable, "-m", "pytest", "-m", f"({marker}) and not soak", *options))


# Niceness: a service's tests bound how long something takes, so its processes go before those of the others.
LANES: dict[str, tuple[int, tuple[Step, ...]]] = {
    "service": (0, (tests("service", "service"),)),
    "engine": (5, (tests("engine", "engine"),)),
    "quick": (
        10,
        (
            Step("check", ("make", "check")),
            tests("unit", "pure and not compiles"),
            tests("simulator", "sim or gpu"),
            tests("compiles", "pure and compiles"),
            Step("aot", (str(BIN / "pageferry"), "kernels", "--aot")),
        ),
    ),
}


@dataclass
class Result:
    step: Step
    status: int
    seconds: float

    @property
    def log(self) -> Path:
        return LOGS / f"{self.step.name}.log"

    def summary(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip(" =") if lines else "it said nothing"
        return f"{self.step.name:<10} {self.seconds:6.0f} s  {'ok' if self.status == 0 else 'FAILED'}   {last}"


def run_lane(niceness: int, steps: tuple[Step, ...], results: list[Result]) -> None:
    for step in steps:
        began = time.monotonic()
        with (LOGS / f"{step.name}.log").open("wb") as log:
            command = ["nice", "-n", str(niceness), *step.command]
            status = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        results.append(Result(step, status, time.monotonic() - began))
        print(results[-1].summary(), flush=True)


def main() -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    lanes = {name: LANES[name] for name in os.environ.get("PARTS", " ".join(LANES)).split()}
    print(f"lanes: {', '.join(lanes)}; each step's output is in {LOGS.relative_to(ROOT)}/", flush=True)
    began = time.monotonic()
    results: list[Result] = []
    threads = [threading.Thread(target=run_lane, args=(*lane, results)) for lane in lanes.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [result for result in results if result.status]
    for result in failed:
        print(f"\n===== {result.step.name} (status {result.status}), end of {result.log.relative_to(ROOT)}\n")
        print("\n".join(result.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]))
    steps = sum(len(steps) for _, steps in lanes.values())
    print(f"\n{steps - len(failed)} of {steps} parts passed in {time.monotonic() - began:.0f} s")
    return 1 if failed or len(results) != steps else 0


if __name__ == "__main__":
    sys.exit(main())
