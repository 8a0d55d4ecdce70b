"""The way of a fault from `POST /faults` to the engine that has the victim."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cluster import FakeCluster, request, until

from app.api.fault_injection import NoVictim, plant
from cluster.fault_kinds import FaultError


async def test_a_victim_is_found_by_a_part_of_its_name_and_its_engine_is_called() -> None:
    far = FakeCluster()
    client, sent = far.client(), []

    async def send(*what: Any) -> dict[str, Any]:
        sent.append(what)
        return {"fired": True}

    await client.add_request_async(request("cmpl-one-0-abcd"))
    await until(lambda: far.decodes["d1"].submitted)
    assert await plant(client, send, "table_free_page", "one", 3, 1.0) == {"fired": True}
    await plant(client, send, "bit_flip", "one", 4, 0.0)
    await plant(client, send, "seal_late", "one", 5, 2.5)
    assert sent == [
        (False, "d1", "table_free_page", 3, "cmpl-one-0-abcd", 1.0),
        (False, "d1", "bit_flip", 4, 1, 0.0),
        (True, "p1", "seal_late", 5, 1, 2.5),
    ]
    with pytest.raises(NoVictim, match="'two'"):
        await plant(client, send, "table_free_page", "two", 3, 0.0)
    with pytest.raises(FaultError, match="known: table_other_request"):
        await plant(client, send, "nonsense", "one", 3, 0.0)
    client.shutdown()
    await until(lambda: not client.runs)
