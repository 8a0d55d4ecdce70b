"""When an engine is replaced.

1. A step of any length below the limit ends nothing, however long `silent_ns` is passed by it.
2. No step for longer than the limit is a hang, whether the engine answers meanwhile or not; without requests none.
3. The limit is twenty times the longest step seen, within a fifth and the whole of what is configured.
4. A process that shows no life is found after `silent_ns`, also one that never answered.
5. Proofs of life come from other processes through the file, and cost its reader nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.watch import EngineWatch, LifeFile, Progress

S = 1_000_000_000
SILENT, HUNG = 15 * S, 300 * S


def watch_after(longest_s: float, now: int = 1000 * S) -> EngineWatch:
    watch = EngineWatch(SILENT, HUNG)
    watch.answered(Progress(asked_ns=now - int(longest_s * S), steps=7, running=2), now)
    return watch


def test_a_step_longer_than_the_silence_bound_ends_nothing() -> None:
    watch = watch_after(0.1)
    now = 1000 * S
    assert watch.verdict(unanswered_since_ns=now, alive_ns=now + 40 * S, now_ns=now + 40 * S) == ""  # 1


def test_an_engine_that_does_not_answer_has_hung_after_the_limit() -> None:
    watch = watch_after(0.1)
    now = 1000 * S
    reason = watch.verdict(unanswered_since_ns=now, alive_ns=now + 61 * S, now_ns=now + 61 * S)
    assert "has not answered for 61.0 s" in reason and "longest step took 0.10 s" in reason  # 2


def test_an_engine_that_answers_and_makes_no_step_has_hung() -> None:
    watch = watch_after(0.1)
    for second in range(1, 61):
        now = (1000 + second) * S
        watch.answered(Progress(now - S // 10, steps=7, running=2), now)
        assert watch.verdict(0, now, now) == ""
    assert "runs requests and has made no step for 61.0 s" in watch.verdict(0, 1061 * S, 1061 * S)  # 2
    watch.answered(Progress(1061 * S, steps=7, running=0), 1061 * S)  # nothing runs: nothing to do
    assert watch.verdict(0, 1120 * S, 1120 * S) == ""
    watch.answered(Progress(1120 * S, steps=8, running=1), 1120 * S)
    assert watch.verdict(0, 1179 * S, 1179 * S) == ""


@given(longest_s=st.floats(0, 1000))
def test_the_limit_follows_the_longest_step(longest_s: float) -> None:
    limit = watch_after(longest_s).limit_ns
    assert HUNG // 5 <= limit <= HUNG  # 3
    assert abs(limit - min(max(20 * longest_s * S, HUNG / 5), HUNG)) <= 20


def test_a_process_without_life_is_found_although_the_engine_never_answered() -> None:
    watch = EngineWatch(SILENT, HUNG)
    assert watch.verdict(0, 0, 5000 * S) == ""  # no process has written yet: it starts
    assert watch.verdict(100 * S, 100 * S, 100 * S + SILENT) == ""
    assert "no life for 15.0 s" in watch.verdict(100 * S, 100 * S, 100 * S + SILENT + 1)  # 4


def test_another_process_proves_its_life_through_the_file() -> None:
    life = LifeFile(2)
    script = (
        "import sys,time; from actors.engine.watch import beat; [beat(sys.argv[1], p) for p in (0, 1)]; time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, life.path])
    try:
        assert life.oldest_ns() == 0
        deadline = time.monotonic() + 60
        while not life.oldest_ns() and time.monotonic() < deadline:
            time.sleep(0.05)
        life.close()  # the path is not needed any more
        first = life.oldest_ns()
        assert 0 <= time.monotonic_ns() - first < 60 * S  # 5
        while life.oldest_ns() == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert life.oldest_ns() > first
    finally:
        process.kill()
        process.wait()
    last = life.oldest_ns()
    time.sleep(1.2)
    assert life.oldest_ns() == last
