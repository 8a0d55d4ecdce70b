"""Every kind of fault, put into a real engine pair with the check on: two trials a kind, fifty in `make soak`.

1. It is noticed, by what `PageFault` says has to notice it.
2. Exactly the victim ends (or none, where the pages can be had again); the neighbours' tokens are what they were.
3. No wrong token leaves the engine.
4. The engine lives on and its ledger is clean.
5. Faults that the configuration does not allow are refused.
6. Without a fault the same requests raise no alarm, and every step is proven.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from actors.engine.fault_injection import Faults
from cluster.fault_kinds import FaultError, Guard, PageFault
from ops.chaos.cli import passed, summary
from ops.chaos.pages.harness import Harness, spec_for
from ops.chaos.pages.trials import run_trial

MODEL = ".models/smollm2-135m-instruct"
SEED = 7
SEEN_BY = {  # how the name of what noticed a fault begins
    Guard.TAGS: ("tag check",),
    Guard.LIVES: ("page lives",),
    Guard.SEALS: ("seal verdict",),
    Guard.HAND_OVER: ("deadline: missing", "absorbed as a duplicate"),
    Guard.LEDGER: ("ledger law",),
    Guard.PROOFS: ("steps counted as unproven",),
}
TRIALS = [2, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Harness]:
    made = await Harness.start(spec_for(MODEL, tuple(map(str, PageFault)), SEED, checked=True), SEED)
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize("count", TRIALS)
@pytest.mark.parametrize("kind", PageFault)
async def test_every_fault_is_harmless(harness: Harness, kind: PageFault, count: int) -> None:
    trials = [await run_trial(harness, kind, number) for number in range(count)]
    row = summary(kind, trials, failed=0)
    assert passed(row, checked=True), [*trials, row]
    by = SEEN_BY[kind.guard]
    if kind is PageFault.PAGE_FREED_AND_TAKEN:  # or the ledger saw the page before it was handed out
        by += SEEN_BY[Guard.LEDGER]
    assert all(name.startswith(by) for name in row["by"])


async def test_without_a_fault_there_is_no_alarm(harness: Harness) -> None:
    async def counters() -> dict[str, Any]:
        found: dict[str, Any] = (await harness.pair.decode.audit())["scheduler"]["counters"]
        return found

    controller = harness.pair.controller
    before, reported, problems = await counters(), controller.pages_reported, len(controller.page_problems)
    runs = [await harness.start_request(p, salt=harness.salt()) for p in harness.prompts]
    over = await harness.seal(harness.prompts[0])
    runs.append(await harness.start_request(harness.prompts[0], salt=harness.salt(), over=over))
    await asyncio.gather(*(run.ended() for run in runs))
    assert all(run.whole for run in runs)
    after = await counters()
    grown = {name: after[name] - before[name] for name in after if name.startswith("integrity_")}
    assert grown["integrity_steps"] > 0 and grown["integrity_checks"] == grown["integrity_steps"]
    assert grown["integrity_rows_checked"] >= len(runs) and grown["integrity_pages_checked"] > 0
    assert not grown["integrity_requests_ended"] and not grown["integrity_breaches"]
    assert after["integrity_steps_unproven"] == before["integrity_steps_unproven"]
    await asyncio.sleep(2.0)  # heartbeats
    assert controller.pages_reported > reported, "with tags of this life of the replica, and none taken twice"
    assert controller.page_problems[problems:] == []


def test_only_what_is_configured_is_allowed() -> None:
    assert Faults.of({}) is None and Faults.of({"kinds": [], "seed": 1}) is None
    with pytest.raises(FaultError, match="known: table_other_request"):
        Faults.of({"kinds": ["nonsense"]})
    faults = Faults.of({"kinds": ["bit_flip"], "seed": 3})
    assert faults is not None
    with pytest.raises(FaultError, match="allows bit_flip"):
        faults.arm("stale_tag", 0, 1)
    assert faults.rng("bit_flip", 4).random() == faults.rng("bit_flip", 4).random()
    assert faults.rng("bit_flip", 4).random() != faults.rng("bit_flip", 5).random()


async def test_json_is_all_that_stands_on_standard_output() -> None:
    """vLLM and the C library write from both processes of an engine; the whole of stdout is parsed."""
    command = [sys.executable, "-m", "app.cli", "chaos", "table_other_request", "--trials", "1", "--json"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] and [row["kind"] for row in report["kinds"]] == ["table_other_request"]
