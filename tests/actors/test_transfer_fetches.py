"""Bytes of another node: fetched once, read here, given back; nothing else is lent meanwhile."""

from __future__ import annotations

from transfer_node import MIB, Node, fetched, hand_over, opened

from actors.messages import HandOver, Lease, Verdict
from actors.transfer import events as ev
from actors.transfer.channel import WriterDone


def far(ticket_id: int, num_bytes: int = MIB) -> HandOver:
    return hand_over(
        Lease(ticket_id=ticket_id, attempt=1, node_id="far", segment="far-1", offset=0, num_bytes=num_bytes)
    )


def fetch_of(node: Node) -> ev.StartFetch:
    return [each for each in node.effects if isinstance(each, ev.StartFetch)][-1]


def test_bytes_of_another_node_are_fetched_once_and_read_here() -> None:
    node = Node()
    calls = node.read(far(1)), node.read(far(1))
    fetch = fetch_of(node)
    assert len([each for each in node.effects if isinstance(each, ev.StartFetch)]) == 1
    assert not set(calls) & node.answers.keys()
    node.step(fetched(fetch.fetch_id))
    lease = node.answers[calls[0]]
    assert isinstance(lease, Lease) and lease.node_id == "here" and lease.offset == fetch.offset
    assert node.answers[calls[1]] == lease
    node.step(ev.FromEngine("d#0", opened(1)))
    assert node.machine.staging.bytes_held == 0


def test_fetched_bytes_whose_readers_are_gone_are_given_back() -> None:
    node = Node()
    node.read(far(1))
    node.step(fetched(fetch_of(node).fetch_id))
    node.step(ev.EngineGone("d#0", 2))
    assert node.machine.staging.bytes_held == 0


def test_fetched_bytes_that_one_of_two_readers_opened_are_given_back_when_the_other_lost_its_link() -> None:
    node = Node(16 * MIB, "d#0", "d#1")
    node.read(far(1), "d#0", "d#1")
    node.step(fetched(fetch_of(node).fetch_id))
    node.connect("d#1", maps=False)
    node.mapped("d#1", (1, 1))
    assert node.machine.staging.bytes_held == MIB
    node.step(ev.FromEngine("d#0", opened(1, num_shards=2)))
    assert node.machine.staging.bytes_held == 0


def test_who_is_at_the_front_and_loses_its_link_lets_the_next_in() -> None:
    node = Node(16 * MIB, "p#0", "p#1")
    node.lease(1, 9 * MIB, "p#0")
    node.ask(2, 8 * MIB, "p#1")
    behind = node.ask(3, 7 * MIB, "p#0")
    assert behind not in node.answers
    node.step(ev.EngineDetached("p#1", 2))
    assert isinstance(node.answers[behind], Lease)


def test_a_ticket_whose_bytes_come_from_another_node_gets_no_lease_to_write() -> None:
    node = Node()
    node.lease(2, 16 * MIB)
    node.read(far(1))
    assert isinstance(node.answers[node.ask(1)], ev.Refuse), "while the fetch waits for room"
    node.step(ev.Released(((2, 1),)))
    node.step(ev.FromEngine("p#0", WriterDone(ticket_id=2, attempt=1)))
    assert isinstance(node.answers[node.ask(1)], ev.Refuse), "while it runs"
    node.step(fetched(fetch_of(node).fetch_id))
    assert isinstance(node.answers[node.ask(1)], ev.Refuse), "while decode reads"


def test_bytes_that_a_fetch_still_writes_are_not_lent() -> None:
    node = Node()
    call = node.read(far(1, 16 * MIB))
    fetch = fetch_of(node)
    node.step(ev.ReaderDropped((1, 1), ("d#0",)))  # the client has left
    assert node.answers[call] is Verdict.STALE and ev.StopFetch(fetch.fetch_id) in node.effects
    other = node.ask(2)
    assert other not in node.answers
    node.step(fetched(fetch.fetch_id))
    assert isinstance(node.answers[other], Lease)


def test_a_fetch_that_fails_or_comes_too_late_is_missing() -> None:
    node = Node()
    call = node.read(far(1))
    node.step(fetched(fetch_of(node).fetch_id, False))
    assert node.answers[call] is Verdict.MISSING and node.machine.staging.bytes_held == 0
    call = node.read(far(2))
    node.at(6)
    assert node.answers[call] is Verdict.MISSING and node.machine.staging.bytes_held > 0
    node.step(fetched(fetch_of(node).fetch_id))
    assert node.machine.staging.bytes_held == 0
    assert node.answers[node.read(far(3, 17 * MIB))] is Verdict.MISSING, "it can never fit"


def test_a_piece_is_copied_for_another_node_and_the_bytes_stay_until_the_copy_has_ended() -> None:
    node = Node()
    lease = node.lease(1)
    node.step(ev.PieceAsked(100, lease, 0, 10))
    assert node.answers[100] is None, "it is not sealed"
    node.seal(1)
    assert node.step(ev.PieceAsked(101, lease, 5, 10)) == [ev.CopyOut(101, lease.offset + 5, 10)]
    for first, num_bytes in ((-1, 10), (MIB, 1), (MIB - 1, 2), (0, 0)):
        node.step(ev.PieceAsked(102, lease, first, num_bytes))
        assert node.answers.pop(102) is None
    assert ev.StopCopy(101) in node.step(ev.Released(((1, 1),)))
    assert node.machine.staging.bytes_held > 0
    node.step(ev.CopiedOut(101))
    assert node.machine.staging.bytes_held == 0


def test_what_a_link_carried_is_in_the_report_and_what_waits_for_it() -> None:
    node = Node()
    node.step(ev.LinkProbed("far", "direct", 200_000, MIB, 2_000_000))
    node.read(far(1))
    node.read(far(2, 3 * MIB))
    [link] = node.machine.status().links
    assert (link.way, link.bytes_per_s, link.queued_bytes) == ("direct", MIB * 500, 4 * MIB)
    node.step(fetched(1))
    node.step(ev.FetchEnded(2, ev.Measured("far", "objects", False, MIB, 10, 3, "objects: it is away")))
    [link] = node.machine.status().links
    assert 500 * MIB < link.bytes_per_s < 1000 * MIB and link.queued_bytes == 0
    assert (link.way, link.fetches, link.failed, link.chunks_again) == ("direct", 2, 1, 3)
    assert link.reason == "objects: it is away"


def test_a_small_fetch_says_nothing_of_the_rate() -> None:
    node = Node()
    node.read(far(1, 1000))
    node.step(fetched(fetch_of(node).fetch_id, num_bytes=1000))
    [link] = node.machine.status().links
    assert link.bytes_per_s == 0 and link.fetches == 1
