"""What a node's transfer machine decides, one situation a test. `test_transfer_laws.py` tries them all together."""

from __future__ import annotations

from actors.messages import HandOver, Lease, LeaseLost, Opened, OpenedAt, Seal, Sealed, Verdict
from actors.transfer import events as ev
from actors.transfer.channel import PagesOpened, PagesSealed, StagingMapped, WriterDone
from actors.transfer.machine import TransferMachine
from actors.transfer.staging import Key

MIB = 1 << 20
SECOND = 1_000_000_000
LEASE_NS = 60 * SECOND


class Node:
    """A machine with a clock, whose answers and reports are kept."""

    def __init__(self, num_bytes: int = 16 * MIB, *engines: str, name: str = "here") -> None:
        self.machine = TransferMachine(name, 1, f"{name}-1", num_bytes, LEASE_NS)
        self.now_ns = 0
        self.answers: dict[int, object] = {}
        self.effects: list[ev.Effect] = []
        self.told: list[object] = []
        self._calls = 0
        self._links = 0
        for engine in engines or ("p#0", "d#0"):
            self.connect(engine)

    def step(self, event: ev.Event) -> list[ev.Effect]:
        effects = self.machine.step(event, self.now_ns)
        for effect in effects:
            if isinstance(effect, (ev.Answer, ev.Refuse)):
                assert effect.call_id not in self.answers, "a call is answered once"
                self.answers[effect.call_id] = effect.value if isinstance(effect, ev.Answer) else effect
            if isinstance(effect, ev.Report):
                self.told += effect.events
        assert self.machine.violations() == []
        self.effects += effects
        if any(isinstance(effect, ev.Report) for effect in effects):
            self.step(ev.ReportAnswered(()))
        return effects

    def connect(self, engine: str, maps: bool = True) -> list[ev.Effect]:
        self._links += 1
        effects = self.step(ev.EngineConnected(engine, self._links))
        if maps:
            self.mapped(engine)
        return effects

    def mapped(self, engine: str, *dropped: Key) -> None:
        segment = self.machine.segment
        self.step(ev.FromEngine(engine, StagingMapped(segment=segment, dropped=list(dropped))))

    def at(self, seconds: float) -> None:
        self.now_ns = int(seconds * SECOND)
        self.step(ev.Tick())

    def ask(self, ticket_id: int, num_bytes: int = MIB, *engines: str, wait_s: float = 15) -> int:
        self._calls += 1
        wait_ns = int(wait_s * SECOND)
        self.step(ev.LeaseAsked(self._calls, (ticket_id, 1), num_bytes, engines or ("p#0",), wait_ns))
        return self._calls

    def lease(self, ticket_id: int, num_bytes: int = MIB, *engines: str) -> Lease:
        lease = self.answers[self.ask(ticket_id, num_bytes, *engines)]
        assert isinstance(lease, Lease)
        return lease

    def read(self, over: HandOver, *engines: str, wait_s: float = 6) -> int:
        self._calls += 1
        self.step(ev.ReadAsked(self._calls, over, engines or ("d#0",), int(wait_s * SECOND)))
        return self._calls

    def seal(self, ticket_id: int, engine: str = "p#0", shard: int = 0, num_shards: int = 1) -> None:
        self.step(ev.FromEngine(engine, sealed(ticket_id, shard=shard, num_shards=num_shards)))

    def lost(self) -> dict[Key, str]:
        return {(each.ticket_id, each.attempt): each.reason for each in self.told if isinstance(each, LeaseLost)}


def sealed(ticket_id: int, first_page: int = 0, last: bool = True, shard: int = 0, num_shards: int = 1) -> PagesSealed:
    return PagesSealed(
        ticket_id=ticket_id,
        attempt=1,
        shard=shard,
        num_shards=num_shards,
        first_page=first_page,
        digests=[1, 2],
        layout_fingerprint="l",
        num_tokens=64,
        last=last,
    )


def opened(ticket_id: int, shard: int = 0, num_shards: int = 1) -> PagesOpened:
    part = Opened(
        ticket_id=ticket_id,
        attempt=1,
        replica_id="d",
        num_pages=2,
        num_bytes=100,
        num_tokens=64,
        verdicts={Verdict.OK: 2},
        seconds=0.1,
    )
    return PagesOpened(opened=part, shard=shard, num_shards=num_shards)


def hand_over(lease: Lease) -> HandOver:
    seal = Seal(ticket_id=lease.ticket_id, attempt=1, layout_fingerprint="l", num_tokens=64, digests=((1, 2),))
    return HandOver(ticket_id=lease.ticket_id, attempt=1, seal=seal, lease=lease, deadline_s=30.0)


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


def test_who_waits_too_long_gets_nothing_and_holds_up_nobody() -> None:
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
    assert isinstance(node.answers[small], Lease), "it holds up nobody"
    node.connect("late#0")
    assert isinstance(node.answers[early], Lease)
    node.step(ev.EngineGone("late#0", 3))
    assert node.answers[node.ask(3, MIB, "late#0")] is None


# -- seals


def test_a_writer_that_is_done_without_a_complete_seal_is_told_at_once() -> None:
    node = Node()
    node.lease(1)
    node.step(ev.FromEngine("p#0", WriterDone(ticket_id=1, attempt=1)))
    assert node.lost() == {(1, 1): "engine p#0 is done without a complete seal"}
    assert node.machine.staging.bytes_held == 0


def test_a_seal_that_contradicts_itself_is_told_at_once() -> None:
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
    assert not [each for each in node.told if isinstance(each, OpenedAt)], "the other shard has not opened yet"
    node.step(ev.FromEngine("d#1", opened(1, 1, 2)))
    node.step(ev.FromEngine("d#1", opened(1, 1, 2)))
    [whole] = [each.opened for each in node.told if isinstance(each, OpenedAt)]
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


# -- from another node


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
    node.step(ev.FetchEnded(fetch.fetch_id, complete=True))
    lease = node.answers[calls[0]]
    assert isinstance(lease, Lease) and lease.node_id == "here" and lease.offset == fetch.offset
    assert node.answers[calls[1]] == lease
    node.step(ev.FromEngine("d#0", opened(1)))
    assert node.machine.staging.bytes_held == 0


def test_fetched_bytes_whose_readers_are_gone_are_given_back() -> None:
    node = Node()
    node.read(far(1))
    node.step(ev.FetchEnded(fetch_of(node).fetch_id, complete=True))
    node.step(ev.EngineGone("d#0", 2))
    assert node.machine.staging.bytes_held == 0


def test_fetched_bytes_that_one_of_two_readers_opened_are_given_back_when_the_other_lost_its_link() -> None:
    node = Node(16 * MIB, "d#0", "d#1")
    node.read(far(1), "d#0", "d#1")
    node.step(ev.FetchEnded(fetch_of(node).fetch_id, True))
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
    node.step(ev.FetchEnded(fetch_of(node).fetch_id, True))
    assert isinstance(node.answers[node.ask(1)], ev.Refuse), "while decode reads"


def test_bytes_that_a_fetch_still_writes_are_lent_to_nobody() -> None:
    node = Node()
    call = node.read(far(1, 16 * MIB))
    fetch = fetch_of(node)
    node.step(ev.ReaderDropped((1, 1), ("d#0",)))  # the client has left
    assert node.answers[call] is Verdict.STALE and ev.StopFetch(fetch.fetch_id) in node.effects
    other = node.ask(2)
    assert other not in node.answers
    node.step(ev.FetchEnded(fetch.fetch_id, complete=True))
    assert isinstance(node.answers[other], Lease)


def test_a_fetch_that_fails_or_comes_too_late_is_missing() -> None:
    node = Node()
    call = node.read(far(1))
    node.step(ev.FetchEnded(fetch_of(node).fetch_id, complete=False))
    assert node.answers[call] is Verdict.MISSING and node.machine.staging.bytes_held == 0
    call = node.read(far(2))
    node.at(6)
    assert node.answers[call] is Verdict.MISSING and node.machine.staging.bytes_held > 0
    node.step(ev.FetchEnded(fetch_of(node).fetch_id, complete=True))
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
    node.step(ev.Released(((1, 1),)))
    assert node.machine.staging.bytes_held > 0
    node.step(ev.CopiedOut(101))
    assert node.machine.staging.bytes_held == 0


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
    node.told.clear()
    node.machine.step(ev.ReportFailed(), node.now_ns)
    assert node.told == []
    node.at(1)
    assert sorted(each.seal.ticket_id for each in node.told if isinstance(each, Sealed)) == [1, 3]


def test_leases_that_the_controller_does_not_know_are_given_back() -> None:
    node = Node()
    node.lease(1)
    node.seal(1)
    assert node.machine.status().held == ((1, 1),)
    node.step(ev.ReportAnswered(((1, 1),)))
    assert node.machine.staging.bytes_held == 0
