"""The arithmetic of `ops.capacity` is that of its inputs."""

from __future__ import annotations

import pytest

from cluster.spec import ClusterSpec
from ops.capacity import CALL_S, TOPOLOGIES, Unit, hand_over_s


@pytest.mark.parametrize(("name", "model", "nodes"), TOPOLOGIES)
def test_a_controller_is_full_where_its_shares_make_one_core(name: str, model: str, nodes: int) -> None:
    unit = Unit.of(name, model, nodes, 1000, "H200")
    busy, standing = unit.cores(nodes)
    assert busy == pytest.approx(unit.requests_per_s * hand_over_s())
    spec = ClusterSpec.load(name)
    replicas = spec.pools.prefill.replicas + spec.pools.decode.replicas
    assert standing == pytest.approx((2 * replicas + 2 * nodes + spec.frontend.replicas) * CALL_S)
    full = 1 / sum(unit.cores(1))
    assert sum(unit.cores(full)) == pytest.approx(1.0) and f"full at {full:,.0f} nodes" in unit.page(1000)


def test_longer_prompts_mean_fewer_requests_and_more_bytes_and_on_one_node_none_leave_it() -> None:
    short, long = (Unit.of("two-node", "kimi-k2.6", 2, tokens, "H200") for tokens in (1000, 4000))
    assert short.requests_per_s > long.requests_per_s and short.bytes_per_request < long.bytes_per_request
    assert "GB/s out of a prefill node" in short.moves
    assert Unit.of("one-node", "glm-4.5-air", 1, 1000, "H200").moves == "none of it leaves the node"
