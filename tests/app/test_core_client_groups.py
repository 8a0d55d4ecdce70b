"""n > 1 through the engine core client, with every wire in the hands of the test."""

from __future__ import annotations

import asyncio

import pytest
from fake_cluster import FakeCluster, cancel, request, settled, until
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import FinishReason

from actors.messages import Outcome, Overloaded
from app.request.core_client import FerryCoreClient
from app.request.group import SequenceGroup

STOP = FinishReason.STOP


class TestSequenceGroup:
    """n > 1: one ticket, one hand-over; siblings ride decode's prefix cache behind the carrier."""

    async def add(self, client: FerryCoreClient, count: int) -> SequenceGroup:
        group = client.begin_group("r", count)
        try:
            for index in range(count):
                await client.add_request_async(request(f"{index}_r"))
        finally:
            client.end_group("r")
        return group

    async def test_one_hand_over_serves_all(self) -> None:
        far = FakeCluster()
        client = far.client()
        await self.add(client, 3)
        d1 = far.decodes["d1"]
        await until(lambda: "0_r" in d1.submitted)
        await asyncio.sleep(0.02)
        assert list(d1.submitted) == ["0_r"], "the others wait until the prompt is on decode"
        assert far.admits[0].num_sequences == 3 and len(far.admits) == 1
        d1.emit("0_r", 50)
        await until(lambda: len(d1.submitted) == 3)
        assert len(far.prefill_calls) == 1
        assert [d1.hand_overs[f"{i}_r"] is not None for i in range(3)] == [True, False, False]
        for index in range(3):
            d1.emit(f"{index}_r", 60 + index, finish=STOP)
        await settled(client, far, {"0_r", "1_r", "2_r"})
        assert far.ends == [(1, Outcome.DONE, 4)]

    async def test_siblings_go_on_when_the_carrier_is_cancelled(self) -> None:
        far = FakeCluster()
        far.prefill_gate.clear()
        client = far.client()
        await self.add(client, 2)
        await until(lambda: far.prefill_calls)
        await cancel(client, "0_r")
        d1 = far.decodes["d1"]
        await until(lambda: "1_r" in d1.submitted)
        d1.emit("1_r", 50, finish=STOP)
        await settled(client, far, {"1_r"})
        assert far.ends == [(1, Outcome.CANCELLED, 1)]

    async def test_a_lost_decode_moves_the_family_once(self) -> None:
        far = FakeCluster()
        far.lost_answers = [far.ticket(1, 2, prefill="p1", decode="d2")]
        client = far.client()
        await self.add(client, 2)
        d1, d2 = far.decodes["d1"], far.decodes["d2"]
        await until(lambda: "0_r" in d1.submitted)
        d1.emit("0_r", 50)
        await until(lambda: "1_r" in d1.submitted)
        d1.emit("1_r", 60)
        await until(lambda: all(run.tokens for run in client.runs.values()))
        d1.die()
        await until(lambda: d2.submitted)
        assert len(far.losses) == 1 and far.losses[0][3] == 2
        [leader] = d2.submitted
        d2.emit(leader, 70)
        await until(lambda: len(d2.submitted) == 2)
        for engine_id in list(d2.submitted):
            d2.emit(engine_id, 80, finish=STOP)
        await settled(client, far, set(d2.submitted))
        assert far.ends == [(1, Outcome.DONE, 5)]

    async def test_a_family_that_is_refused_leaves_nothing(self) -> None:
        far = FakeCluster()
        far.admit_answer = Overloaded(reason="full", retry_after_s=1.0)
        client = far.client()
        with pytest.raises(GracefulHTTPError):
            await self.add(client, 3)
        await settled(client, far)
