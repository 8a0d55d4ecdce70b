"""Parts of the running service are killed in the middle of a wave of requests; `make soak` takes every kind.

Every request ends exactly once and whole (or with the one clear error it may have), nothing is held afterwards.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from app.commands.serve import Service
from cluster.fault_kinds import ProcessFault, process_fault
from ops.chaos.processes.campaign import Campaign
from ops.chaos.processes.load import open_session

IN_EVERY_RUN = ("transfer-kill", "controller-kill", "frontend-kill", "decode-core-kill")
OTHERS = [str(kind) for kind in ProcessFault if kind not in IN_EVERY_RUN]
CASES = [*IN_EVERY_RUN, *(pytest.param(kind, marks=pytest.mark.soak) for kind in OTHERS)]
SEED = int(os.environ.get("PAGEFERRY_SEED", "3"))


@pytest.fixture(autouse=True)
def _(quiet: Any) -> None:
    """Every test of this module leaves nothing behind."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
async def test_a_wave_of_requests_survives(service: Service, name: str) -> None:
    kind = process_fault(name)
    async with open_session(timeout_s=500) as session:  # a slow machine's answers take their time
        campaign = Campaign(service, session, print)
        assert await campaign.ready_for(kind)
        result = await campaign.run(kind, SEED)
        assert result.good, (result.findings.problems, result.leaked, result.phase)
        assert result.findings.complete + result.findings.clear_errors + result.findings.broken == 13
        await campaign.whole()
