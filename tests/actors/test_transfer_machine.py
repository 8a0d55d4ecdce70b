"""What a node's transfer machine decides, one situation a test. `test_transfer_laws.py` tries them all together."""

from __future__ import annotations

from transfer_node import LEASE_NS, MIB, SECOND, Node, hand_over, opened, sealed

from actors.messages import Lease, OpenedAt, Sealed, Verdict
from actors.transfer import events as ev
from actors.transfer.channel import WriterDone

# -- fair order


def test_a_large_lease_gets_its_turn_among_small_ones() -> None:
    """16 MiB, 24 users of 1 MiB that come again at once: half of the memory is had by who asks for it in one piece."""
    node = Node()
    waiting = {node.ask(ticket_id): ticket_id for ticket_id in range(24)}
    large = node.ask(1000, 8 * MIB)
    tickets = iter(range(100, 100_000))
    small_before = 0
    for tenth in range(1, 150):
        node.at(tenth / 10)
        for call, ticket_id in [(c, t) for c, t in waiting.items() if isinstance(node.answers.get(c), Lease)][:8]:
            del waiting[call]
            node.step(ev.FromEngine("p#0", sealed(ticket_id)))
            node.step(ev.Released(((ticket_id, 1),)))
            again = next(tickets)
            waiting[node.ask(again)] = again
            small_before += large not in node.answers
    assert isinstance(node.answers.get(large), Lease)
    assert small_before < 40, "and it does not wait for all the others"


def test_what_the_front_cannot_use_is_lent_to_those_behind_it() -> None:
    node = Node()
    first = [node.lease(ticket_id, 4 * MIB) for ticket_id in range(3)]
    large = node.ask(10, 8 * MIB)
    behind = node.ask(11, 4 * MIB)  # 4 MiB are free, and one of the halves is kept whole
    assert large not in node.answers
    kept = node.machine.queue.kept
    assert kept is not None and kept[0] == (10, 1) and kept[2] == 8 * MIB
    for lease in first:
        if kept[1] <= lease.offset < kept[1] + kept[2]:
            node.step(ev.WriterDropped((lease.ticket_id, 1), ("p#0",)))
    assert isinstance(node.answers[large], Lease)
    others = [lease for lease in first if not kept[1] <= lease.offset < kept[1] + kept[2]]
    node.step(ev.WriterDropped((others[0].ticket_id, 1), ("p#0",)))
    assert isinstance(node.answers[behind], Lease)


def test_who_waits_too_long_gets_nothing_and_delays_no_other() -> None:
    node = Node()
    node.lease(1, 12 * MIB)
    large, small = node.ask(2, 16 * MIB, wait_s=3), node.ask(3, 4 * MIB, wait_s=10)
    assert not {large, small} & node.answers.keys()
    node.at(3)
    assert node.answers[large] is None and isinstance(node.answers[small], Lease)


def test_what_can_never_be_had_is_refused_at_once() -> None:
    node = Node()
    for num_bytes, words in ((16 * MIB + 1, "transfer.staging_bytes_max is 16777216: raise it"), (0, "lease of 0")):
        answer = node.answers[node.ask(1, num_bytes)]
        assert isinstance(answer, ev.Refuse) and words in answer.message


# -- who gets bytes


def test_a_call_that_is_repeated_gets_the_same_bytes() -> None:
    node = Node()
    assert node.lease(1) == node.lease(1)
    node.step(ev.FromEngine("p#0", sealed(1)))
    assert node.machine.staging.get((1, 1)) is not None
    node.lease(1)  # an old repetition: the engine has written and is no writer again
    node.step(ev.Released(((1, 1),)))
    assert node.machine.staging.bytes_held == 0
    assert node.answers[node.ask(1)] is None, "after its end a key gets nothing"


def test_two_calls_for_one_lease_that_waits_are_both_answered() -> None:
    node = Node()
    node.lease(1, 16 * MIB)
    calls = node.ask(2), node.ask(2)
    node.step(ev.WriterDropped((1, 1), ("p#0",)))
    assert node.answers[calls[0]] == node.answers[calls[1]] != None  # noqa: E711


def test_a_lease_taken_back_before_it_was_asked_for_is_not_granted() -> None:
    node = Node()
    node.step(ev.WriterDropped((1, 1), ("p#0",)))
    assert node.answers[node.ask(1)] is None
    assert node.machine.staging.bytes_held == 0


def test_an_engine_that_is_gone_gets_no_bytes_and_one_that_is_not_there_yet_waits() -> None:
    node = Node()
    early = node.ask(1, MIB, "late#0")
    assert early not in node.answers
    small = node.ask(2)
    assert isinstance(node.answers[small], Lease), "it delays no other"
    node.connect("late#0")
    assert isinstance(node.answers[early], Lease)
    node.step(ev.EngineGone("late#0", 3))
    assert node.answers[node.ask(3, MIB, "late#0")] is None


# -- seals


def test_a_writer_that_is_done_without_a_complete_seal_is_reported_at_once() -> None:
    node = Node()
    node.lease(1)
    node.step(ev.FromEngine("p#0", WriterDone(ticket_id=1, attempt=1)))
    assert node.lost() == {(1, 1): "engine p#0 is done without a complete seal"}
    assert node.machine.staging.bytes_held == 0


def test_a_seal_that_contradicts_itself_is_reported_at_once() -> None:
    node = Node()
    node.lease(1)
    node.step(ev.FromEngine("p#0", sealed(1, last=False)))
    node.step(ev.FromEngine("p#0", sealed(1, first_page=7, last=False)))
    assert "contradict" in node.lost()[(1, 1)]
    assert node.machine.staging.bytes_held > 0, "it may write on until it says that it is done"
    node.step(ev.FromEngine("p#0", sealed(1, first_page=9)))
    assert node.machine.staging.bytes_held == 0 and len(node.machine.seals) == 0


def test_one_shard_that_cannot_seal_ends_the_hand_over_of_all() -> None:
    node = Node(16 * MIB, "p#0", "p#1")
    node.lease(1, MIB, "p#0", "p#1")
    node.seal(1, "p#0", 0, 2)
    node.step(ev.FromEngine("p#1", WriterDone(ticket_id=1, attempt=1)))
    assert node.lost() == {(1, 1): "engine p#1 is done without a complete seal"}
    assert node.machine.staging.bytes_held == 0


def test_a_writer_that_is_done_after_its_ticket_ended_is_no_loss() -> None:
    node = Node()
    node.lease(1)
    node.step(ev.Released(((1, 1),)))
    assert node.machine.staging.bytes_held > 0
    node.step(ev.FromEngine("p#0", WriterDone(ticket_id=1, attempt=1)))
    assert node.lost() == {} and node.machine.staging.bytes_held == 0


# -- opening


def test_an_opening_is_reported_once_however_often_a_shard_says_it() -> None:
    node = Node(16 * MIB, "p#0", "d#0", "d#1")
    lease = node.lease(1)
    node.seal(1)
    node.read(hand_over(lease), "d#0", "d#1")
    node.step(ev.FromEngine("d#0", opened(1, 0, 2)))
    node.step(ev.FromEngine("d#0", opened(1, 0, 2)))
    assert not [each for each in node.reported if isinstance(each, OpenedAt)], "the other shard has not opened yet"
    node.step(ev.FromEngine("d#1", opened(1, 1, 2)))
    node.step(ev.FromEngine("d#1", opened(1, 1, 2)))
    [whole] = [each.opened for each in node.reported if isinstance(each, OpenedAt)]
    assert whole.verdicts == {Verdict.OK: 4} and whole.num_bytes == 200
    assert node.machine.staging.bytes_held == 0


def test_half_an_opening_goes_with_its_bytes() -> None:
    """A release between the reports of two ranks left an entry for ever."""
    node = Node(16 * MIB, "p#0", "d#0", "d#1")
    for ticket_id in range(1, 1001):
        lease = node.lease(ticket_id)
        node.seal(ticket_id)
        node.read(hand_over(lease), "d#0", "d#1")
        node.step(ev.FromEngine("d#0", opened(ticket_id, 0, 2)))
        node.step(ev.Released(((ticket_id, 1),)))
        node.step(ev.FromEngine("d#1", opened(ticket_id, 1, 2)))
    assert not list(node.machine.opening) and node.machine.staging.bytes_held == 0
    lease = node.lease(2000)
    node.seal(2000)
    node.read(hand_over(lease), "d#0", "d#1")
    node.step(ev.FromEngine("d#0", opened(2000, 0, 2)))
    node.step(ev.EngineGone("d#1", 3))  # its report never comes
    node.step(ev.Released(((2000, 1),)))
    assert not list(node.machine.opening) and node.machine.staging.bytes_held == 0


def test_an_ended_or_older_hand_over_is_not_read() -> None:
    node = Node()
    lease = node.lease(1)
    node.seal(1)
    older = Lease(ticket_id=1, attempt=1, node_id="here", segment="here-0", offset=0, num_bytes=MIB)
    assert node.answers[node.read(hand_over(older))] is Verdict.MISSING
    early, late = node.read(hand_over(lease), "d#1"), node.read(hand_over(lease), "d#2", wait_s=1)
    assert early not in node.answers, "it has no link yet"
    node.connect("d#1")
    assert node.answers[early] == lease
    node.at(1)
    assert node.answers[late] is Verdict.MISSING
    node.step(ev.Released(((1, 1),)))
    assert node.answers[node.read(hand_over(lease))] is Verdict.STALE


# -- engines that go


def test_bytes_of_an_engine_that_lost_its_link_stay_its_own_until_it_lets_go() -> None:
    """Its process lives: it may be in the middle of a copy."""
    node = Node()
    node.lease(1)
    node.step(ev.EngineDetached("p#0", 1))
    assert node.lost() == {(1, 1): "engine p#0 has lost its link"}
    assert node.machine.staging.bytes_held > 0
    later = node.ask(2)
    assert later not in node.answers, "it has to connect first"
    effects = node.connect("p#0", maps=False)
    assert ev.Welcome("p#0", 3, ((1, 1),)) in effects and later not in node.answers
    node.mapped("p#0", (1, 1))
    assert isinstance(node.answers[later], Lease)
    assert node.machine.staging.get((1, 1)) is None and node.machine.staging.get((2, 1)) is not None
    node.step(ev.EngineGone("p#0", 1))
    assert node.machine.staging.get((2, 1)) is not None, "that was an earlier link"
    node.step(ev.EngineGone("p#0", 3))
    assert node.machine.staging.bytes_held == 0


def test_a_reader_that_dies_gives_its_bytes_back_with_their_ticket() -> None:
    node = Node()
    lease = node.lease(1)
    node.seal(1)
    node.read(hand_over(lease))
    node.step(ev.EngineGone("d#0", 2))
    assert node.machine.staging.bytes_held > 0, "the ticket may go on elsewhere"
    node.at(60)
    assert node.lost() == {(1, 1): "the staging lease ran out"} and node.machine.staging.bytes_held == 0


def test_a_lease_lives_while_pages_are_sealed() -> None:
    node = Node()
    node.step(ev.LeaseAsked(100, (1, 1), MIB, ("p#0",), SECOND, keep_ns=5 * SECOND))
    for second in (4, 8, 12):
        node.at(second)
        node.step(ev.FromEngine("p#0", sealed(1, last=False)))
    node.at(16)
    assert node.lost() == {}
    node.at(17)
    assert node.lost() == {(1, 1): "the staging lease ran out"}


# -- settings


def test_another_size_takes_effect_when_no_lease_is_left() -> None:
    node = Node()
    node.lease(1)
    node.step(ev.Configured(64 * MIB, 5 * SECOND))
    large = node.ask(2, 40 * MIB)
    assert large not in node.answers and node.machine.status().bytes_max == 16 * MIB
    assert node.step(ev.WriterDropped((1, 1), ("p#0",))) == [ev.MakeStaging(64 * MIB)]
    effects = node.step(ev.StagingMade("here-2", 64 * MIB))
    assert ev.Welcome("p#0", 1, ()) in effects and ev.Welcome("d#0", 2, ()) in effects
    assert large not in node.answers, "the engine has not mapped it yet"
    node.mapped("p#0")
    lease = node.answers[large]
    assert isinstance(lease, Lease) and lease.segment == "here-2" and node.machine.status().bytes_max == 64 * MIB
    node.at(5)
    assert (2, 1) in node.lost(), "the new lease time is in force"


def test_a_size_that_the_machine_has_not_leaves_the_old_one() -> None:
    node = Node()
    assert node.step(ev.Configured(64 * MIB, LEASE_NS)) == [ev.MakeStaging(64 * MIB)]
    large, small = node.ask(1, 40 * MIB), node.ask(2)
    node.step(ev.StagingRefused("no memory"))
    assert isinstance(node.answers[large], ev.Refuse) and isinstance(node.answers[small], Lease)
    assert node.machine.status().bytes_max == 16 * MIB


# -- the controller


def test_a_controller_that_was_away_hears_again_of_every_seal_that_waits_for_its_reader() -> None:
    node = Node()
    for ticket_id in (1, 2, 3):
        node.lease(ticket_id)
        node.seal(ticket_id)
    node.step(ev.Released(((2, 1),)))
    node.reported.clear()
    node.machine.step(ev.ReportFailed(), node.now_ns)
    assert node.reported == []
    node.at(1)
    assert sorted(each.seal.ticket_id for each in node.reported if isinstance(each, Sealed)) == [1, 3]


def test_leases_that_the_controller_does_not_know_are_given_back() -> None:
    node = Node()
    node.lease(1)
    node.seal(1)
    assert node.machine.status().held == ((1, 1),)
    node.step(ev.ReportAnswered(((1, 1),)))
    assert node.machine.staging.bytes_held == 0
