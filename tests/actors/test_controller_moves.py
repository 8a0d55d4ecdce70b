"""Pages that would have to cross between nodes: where, and whether, by what the link was seen to carry."""

from __future__ import annotations

from controller_driver import SECOND, ControllerDriver
from hypothesis import given
from hypothesis import strategies as st

from actors.controller.moves import UNMEASURED_BYTES_PER_S, Staging
from actors.controller.registry import Node, Registry
from actors.messages import LinkStatus, StagingStatus


def link(node: str = "far", bytes_per_s: int = 1_000_000, queued_bytes: int = 0) -> LinkStatus:
    return LinkStatus(
        node_id=node, way="direct", bytes_per_s=bytes_per_s, round_trip_s=0.001, queued_bytes=queued_bytes
    )


def two_nodes(*links: LinkStatus) -> ControllerDriver:
    rig = ControllerDriver()
    rig.decode("d", node_id="near")
    rig.prefill("p-far", node_id="far")
    rig.report(node="far")
    rig.report(node="near", links=links)
    return rig


def test_a_slow_link_makes_decode_compute_the_prompt_and_the_ticket_says_why() -> None:
    ticket = two_nodes(link(bytes_per_s=100_000)).admit("r", prompt=320)
    assert ticket.prefill is None
    assert "decode computes the prompt" in ticket.reason and "MB between nodes in" in ticket.reason


def test_a_fast_link_is_used_and_the_ticket_says_what_it_carries() -> None:
    ticket = two_nodes(link(bytes_per_s=10_000_000_000)).admit("r", prompt=320)
    assert ticket.prefill == "p-far" and "10,000 MB/s" in ticket.reason


def test_what_waits_for_the_link_counts() -> None:
    rig = two_nodes(link(bytes_per_s=10_000_000_000, queued_bytes=100_000_000_000))
    assert rig.admit("r", prompt=320).prefill is None
    rig.report(node="near", links=(link(bytes_per_s=10_000_000_000),))
    assert rig.admit("s", prompt=320).prefill == "p-far"


def test_the_same_node_is_preferred_until_its_queue_is_longer_than_the_move() -> None:
    rig = two_nodes(link(bytes_per_s=10_000_000))
    rig.prefill("p-near", node_id="near")
    first = rig.admit("r", prompt=320)
    assert first.prefill == "p-near" and "same node" in first.reason
    places = [rig.admit(f"r{n}", prompt=320, frontend=f"f{n}").prefill for n in range(4)]
    assert "p-far" in places


@given(
    num_bytes=st.integers(1, 1 << 40),
    more=st.integers(0, 1 << 40),
    rate=st.integers(0, 1 << 40),
    faster=st.integers(1, 1 << 40),
    queued=st.integers(0, 1 << 40),
)
def test_more_bytes_or_a_longer_queue_never_take_less_and_a_faster_link_never_more(
    num_bytes: int, more: int, rate: int, faster: int, queued: int
) -> None:
    def took(size: int, speed: int, waiting: int) -> int:
        status = StagingStatus(
            node_id="near",
            incarnation=1,
            bytes_held=0,
            bytes_max=1,
            leases=0,
            links=(link(bytes_per_s=speed, queued_bytes=waiting),),
        )
        registry = Registry()
        registry.nodes["near"] = Node(status, 0)
        return Staging(registry, 1).move(size, "far", "near").took_ns

    base = took(num_bytes, rate, queued)
    assert base >= num_bytes * SECOND // max(rate or UNMEASURED_BYTES_PER_S, 1)
    assert took(num_bytes + more, rate, queued) >= base
    assert took(num_bytes, rate, queued + more) >= base
    assert took(num_bytes, (rate or UNMEASURED_BYTES_PER_S) + faster, queued) <= base


def test_on_one_node_nothing_moves_and_an_unknown_link_is_taken_at_a_usual_rate() -> None:
    staging = Staging(Registry(), 1)
    assert staging.move(1 << 30, "near", "near").took_ns == 0
    assert staging.move(UNMEASURED_BYTES_PER_S, "far", "near").took_ns == SECOND
    assert "not measured" in str(staging.move(1, "far", "near"))
