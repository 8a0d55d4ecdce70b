"""Every decision of a node's transfer actor: `step(event, now_ns) -> effects`. Pure.

It leases staging memory in the order asked, says which engine may write and read which bytes, collects seals, fetches
from other nodes, and reports to the controller. A key (ticket_id, attempt) gets bytes once, and none after its end.
`actors.transfer.events` has its inputs and effects, `actors.transfer.laws` what always holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from actors.messages import Lease, LeaseLost, OpenedAt, Sealed, StagingStatus, Verdict
from actors.transfer import events as ev
from actors.transfer.channel import PagesOpened, PagesSealed, StagingMapped, WriterDone
from actors.transfer.laws import status, violations
from actors.transfer.lease_queue import Call, LeaseQueue, Waiting
from actors.transfer.outbox import Outbox
from actors.transfer.peers import Engines, Fetch, Fetches, copy_name, fetch_name, remember
from actors.transfer.rates import LinkRates
from actors.transfer.seals import OpenedParts, SealCollector
from actors.transfer.staging import Key, Region, Staging, aligned

ENDED_REMEMBERED = 10_000


class TransferMachine:
    """`segment`: name of the staging memory of `staging_bytes_max` bytes that stands already."""

    def __init__(self, node_id: str, incarnation: int, segment: str, staging_bytes_max: int, lease_ns: int) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.segment = segment
        self.lease_ns = lease_ns
        self.staging = Staging(staging_bytes_max)
        self.seals = SealCollector()
        self.bytes_moved = self.tokens_moved = 0
        self.late_reports = 0  # of engines that were not reading these bytes
        self.queue, self.engines, self.fetches = LeaseQueue(), Engines(), Fetches()
        self.copies: dict[int, Key] = {}  # to other nodes, by call
        self.links = LinkRates()
        self.outbox = Outbox()
        self.opening = OpenedParts()
        self.ended: dict[Key, None] = {}
        self._wanted_bytes = self.staging.bytes_max
        self._early_reads: list[tuple[int, ev.ReadAsked]] = []  # until when, of engines that are not ready
        self._making = False  # new staging memory
        self._effects: list[ev.Effect] = []
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            ev.LeaseAsked: self._lease_asked,
            ev.WriterDropped: self._dropped,
            ev.ReadAsked: self._read_asked,
            ev.ReaderDropped: self._dropped,
            ev.Released: self._released,
            ev.PieceAsked: self._piece_asked,
            ev.Configured: self._configured,
            ev.EngineConnected: self._engine_connected,
            ev.EngineDetached: self._engine_detached,
            ev.EngineGone: self._engine_gone,
            ev.FromEngine: self._from_engine,
            ev.CopiedOut: self._copied_out,
            ev.FetchEnded: self._fetch_ended,
            ev.LinkProbed: lambda event, now_ns: self.links.probed(event),
            ev.StagingMade: self._staging_made,
            ev.StagingRefused: self._staging_refused,
            ev.ReportAnswered: self._report_answered,
            ev.ReportFailed: lambda event, now_ns: self.outbox.failed(now_ns),
            ev.Tick: self._tick,
        }

    def step(self, event: ev.Event, now_ns: int) -> list[ev.Effect]:
        """Takes the event and returns what is to be done about it, in order."""
        self._handlers[type(event)](event, now_ns)
        self._end_unread()
        if not self._making:
            self._lend(now_ns)
        self.opening.keep(lambda key: self.staging.get(key) is not None)
        if (events := self.outbox.take(now_ns)) is not None:
            self._effects.append(ev.Report(self.status(), events))
        effects, self._effects = self._effects, []
        return effects

    def _lend(self, now_ns: int) -> None:
        if self._wanted_bytes == self.staging.bytes_max:
            for waiting, region in self.queue.serve(self.staging, now_ns, self.engines.ready):
                self._granted(waiting, region)
        elif not len(self.staging):  # until then no new lease: it would never be empty
            self._making = True
            self._effects.append(ev.MakeStaging(self._wanted_bytes))

    def _answer(self, call_id: int, value: Lease | Verdict | None) -> None:
        self._effects.append(ev.Answer(call_id, value))

    # -- leases

    def _lease_asked(self, event: ev.LeaseAsked, now_ns: int) -> None:
        key, region, waiting = event.key, self.staging.get(event.key), self.queue.get(event.key)
        if key in self.ended or self.engines.any_gone(event.engines):
            self._answer(event.call_id, None)
        elif (region is not None and region.is_copy) or (waiting is not None and waiting.is_fetch):
            self._effects.append(
                ev.Refuse(event.call_id, f"ticket {key[0]} attempt {key[1]} is sealed on another node")
            )
        elif region is not None and region.num_bytes == event.num_bytes:
            self._answer(event.call_id, self._lease(region))  # Ray repeats a call whose answer got lost
        elif region is not None:
            held = f"ticket {key[0]} attempt {key[1]} already holds a lease of {region.num_bytes} bytes"
            self._effects.append(ev.Refuse(event.call_id, f"{held} and asks for {event.num_bytes}"))
        elif problem := self._never(event.key, event.num_bytes):
            self._effects.append(ev.Refuse(event.call_id, problem))
        else:
            if waiting is None:
                waiting = Waiting(key, event.num_bytes, event.engines, keep_ns=event.keep_ns or self.lease_ns)
                self.queue.join(waiting)
            waiting.calls.append(Call(event.call_id, event.engines, now_ns + event.wait_ns))

    def _never(self, key: Key, num_bytes: int) -> str:
        """Why that many bytes can never be had here; empty when they can."""
        most = self._wanted_bytes
        if num_bytes <= 0:
            return f"lease of {num_bytes} bytes for ticket {key}"
        if aligned(num_bytes) > most:
            return f"ticket {key[0]} needs {num_bytes} staging bytes; transfer.staging_bytes_max is {most}: raise it"
        return ""

    def _granted(self, waiting: Waiting, region: Region) -> None:
        region.is_copy = waiting.is_fetch
        for engine in waiting.engines:
            self.staging.open_writer(waiting.key, engine)
        for call in waiting.calls:
            self._answer(call.call_id, self._lease(region))
        if waiting.is_fetch:
            fetch = self.fetches.start(waiting.key)
            # A copy that runs can still write when its ticket is gone: the bytes are its own until it has ended.
            self.staging.open_writer(waiting.key, fetch_name(fetch.fetch_id))
            self._effects.append(ev.StartFetch(fetch.fetch_id, fetch.source, region.offset))

    def _lease(self, region: Region) -> Lease:
        return Lease(
            ticket_id=region.key[0],
            attempt=region.key[1],
            node_id=self.node_id,
            segment=self.segment,
            offset=region.offset,
            num_bytes=region.num_bytes,
        )

    def _dropped(self, event: ev.WriterDropped | ev.ReaderDropped, now_ns: int) -> None:
        done = self.staging.writer_done if isinstance(event, ev.WriterDropped) else self.staging.reader_done
        for engine in event.engines:
            done(event.key, engine)
        self._end(event.key)

    def _released(self, event: ev.Released, now_ns: int) -> None:
        for key in event.keys:
            self._end(key)

    def _end(self, key: Key) -> None:
        """The ticket needs no bytes any more: those it has are given back once nothing can touch them."""
        remember(self.ended, key, ENDED_REMEMBERED)
        self.staging.release(key)
        self.seals.forget(key)
        self.outbox.standing.pop(key, None)
        if (waiting := self.queue.get(key)) is not None:
            self.queue.leave(waiting)
            for call in waiting.calls:
                self._answer(call.call_id, None)
        if (fetch := self.fetches.wanted.pop(key, None)) is not None:
            for call in fetch.calls:
                self._answer(call.call_id, Verdict.STALE)
            if fetch.fetch_id:
                self._effects.append(ev.StopFetch(fetch.fetch_id))
        self._effects.extend(ev.StopCopy(call_id) for call_id, of in self.copies.items() if of == key)

    def _lose(self, key: Key, reason: str) -> None:
        """The ticket's bytes will not get a reader: the controller hears of it now."""
        self.outbox.add(LeaseLost(ticket_id=key[0], attempt=key[1], reason=reason))
        self._end(key)

    # -- reading, on this node and from another one

    def _read_asked(self, event: ev.ReadAsked, now_ns: int) -> None:
        over = event.hand_over
        key, engines, call_id = (over.ticket_id, over.attempt), event.engines, event.call_id
        if key in self.ended or self.engines.any_gone(engines):
            self._answer(call_id, Verdict.STALE)
        elif over.lease.node_id == self.node_id and over.lease.segment != self.segment:
            self._answer(call_id, Verdict.MISSING)  # of an earlier life of this actor
        elif not self.engines.ready(engines):
            self._early_reads.append((now_ns + event.wait_ns, event))
        elif (fetch := self.fetches.wanted.get(key)) is not None:
            fetch.calls.append(Call(call_id, engines, now_ns + event.wait_ns))
        elif (region := self.staging.get(key)) is not None and (key in self.outbox.standing or region.readers):
            self._open(region, call_id, engines)
        elif region is not None or over.lease.node_id == self.node_id:
            self._answer(call_id, Verdict.STALE)
        elif self._never(key, over.lease.num_bytes):
            self._answer(call_id, Verdict.MISSING)
        else:
            self.fetches.wanted[key] = Fetch(over.lease, [Call(call_id, engines, now_ns + event.wait_ns)])
            self.queue.join(Waiting(key, over.lease.num_bytes, is_fetch=True, keep_ns=self.lease_ns))

    def _open(self, region: Region, call_id: int, engines: tuple[str, ...]) -> None:
        for engine in engines:
            self.staging.open_reader(region.key, engine)
        self._answer(call_id, self._lease(region))

    def _fetch_ended(self, event: ev.FetchEnded, now_ns: int) -> None:
        key = self.fetches.running.pop(event.fetch_id, None)
        region = None if key is None else self.staging.get(key)
        if key is None or region is None:
            return  # sent twice
        self.links.moved(event.measured)
        fetch = self.fetches.wanted.pop(key, None)
        for call in fetch.calls if fetch is not None else ():
            if not event.measured.complete:
                self._answer(call.call_id, Verdict.MISSING)
            elif self.engines.ready(call.engines):
                self._open(region, call.call_id, call.engines)
            else:
                self._answer(call.call_id, Verdict.STALE)
        self.staging.writer_done(key, fetch_name(event.fetch_id))
        if not region.readers:
            self._end(key)

    def _piece_asked(self, event: ev.PieceAsked, now_ns: int) -> None:
        lease, first, num_bytes = event.lease, event.first, event.num_bytes
        key = (lease.ticket_id, lease.attempt)
        region = self.staging.get(key)
        if (
            region is None
            or key not in self.outbox.standing
            or lease.segment != self.segment
            or not 0 <= first < first + num_bytes <= region.num_bytes
        ):
            self._answer(event.call_id, None)
            return
        self.copies[event.call_id] = key
        self.staging.open_reader(key, copy_name(event.call_id))
        self._effects.append(ev.CopyOut(event.call_id, region.offset + first, num_bytes))

    def _copied_out(self, event: ev.CopiedOut, now_ns: int) -> None:
        if (key := self.copies.pop(event.call_id, None)) is not None:
            self.staging.reader_done(key, copy_name(event.call_id))

    # -- engines

    def _engine_connected(self, event: ev.EngineConnected, now_ns: int) -> None:
        engine = event.engine  # what it said last on an earlier link may be lost: it must let go of all of before
        self._forsake(engine, f"engine {engine} has connected again")
        self.engines.connect(engine, event.link)
        held = tuple(region.key for region in self.staging if engine in region.writers or engine in region.readers)
        self._effects.append(ev.Welcome(engine, event.link, held))

    def _engine_detached(self, event: ev.EngineDetached, now_ns: int) -> None:
        if self.engines.detach(event.engine, event.link):
            self._forsake(event.engine, f"engine {event.engine} has lost its link")
            self.queue.changed()

    def _engine_gone(self, event: ev.EngineGone, now_ns: int) -> None:
        engine = event.engine
        if self.engines.remove(engine, event.link):
            self._forsake(engine, f"engine {engine} is gone")
            self.staging.peer_gone(engine)
            for waiting in [w for w in self.queue if engine in w.engines]:
                self._end(waiting.key)

    def _forsake(self, engine: str, reason: str) -> None:
        """Gives up what the engine was writing; the bytes stay its own while it may touch them."""
        for region in [r for r in self.staging if engine in r.writers and not r.released]:
            self._lose(region.key, reason)

    def _end_unread(self) -> None:
        """Bytes of another node whose readers are gone: none will come again under this key."""
        for region in [r for r in self.staging if not (r.released or r.in_use or r.key in self.outbox.standing)]:
            self._end(region.key)

    def _from_engine(self, event: ev.FromEngine, now_ns: int) -> None:
        engine, message = event.engine, event.message
        match message:
            case PagesSealed():
                self.staging.renew((message.ticket_id, message.attempt), now_ns)
                self._pages_sealed(engine, message)
            case WriterDone():
                self._writer_done(engine, (message.ticket_id, message.attempt))
            case PagesOpened():
                self._pages_opened(engine, message)
            case StagingMapped():
                for ticket_id, attempt in message.dropped:
                    self.staging.writer_done((ticket_id, attempt), engine)
                    self.staging.reader_done((ticket_id, attempt), engine)
                if message.segment == self.segment and self.engines.set_ready(engine):
                    self.queue.changed()
                    early, self._early_reads = self._early_reads, []
                    for until_ns, read in early:
                        self._read_asked(replace(read, wait_ns=until_ns - now_ns), now_ns)

    def _pages_sealed(self, engine: str, message: PagesSealed) -> None:
        key = (message.ticket_id, message.attempt)
        region = self.staging.get(key)
        if region is None or region.released or (engine not in region.writers and key not in self.outbox.standing):
            self.seals.late += 1  # it is not waited for any more
        elif (seal := self.seals.add(message)) is not None:
            self.outbox.standing[key] = Sealed(seal=seal, lease=self._lease(region))
            self.outbox.add(self.outbox.standing[key])
        elif self.seals.is_void(key):
            self._lose(key, f"engine {engine} has sealed pages that contradict each other")
        if message.last:
            self.staging.writer_done(key, engine)

    def _writer_done(self, engine: str, key: Key) -> None:
        region = self.staging.get(key)
        if region is not None and engine in region.writers and not region.released:
            self._lose(key, f"engine {engine} is done without a complete seal")
        self.staging.writer_done(key, engine)

    def _pages_opened(self, engine: str, message: PagesOpened) -> None:
        opened = message.opened
        key = (opened.ticket_id, opened.attempt)
        region = self.staging.get(key)
        if region is None or engine not in region.readers:
            self.late_reports += 1
            return
        self.staging.reader_done(key, engine)
        if (whole := self.opening.add(message)) is not None:
            self.bytes_moved += whole.num_bytes
            self.tokens_moved += whole.num_tokens if whole.ok else 0
            self.outbox.add(OpenedAt(opened=whole))
            self._end(key)

    # -- size and time

    def _configured(self, event: ev.Configured, now_ns: int) -> None:
        wanted = Staging(event.staging_bytes_max).bytes_max
        self.lease_ns = event.lease_ns
        if wanted != self._wanted_bytes:
            self._wanted_bytes = wanted
            self.queue.hold()
            self._refuse_unfit()

    def _staging_made(self, event: ev.StagingMade, now_ns: int) -> None:
        self.segment, self.staging = event.segment, Staging(event.bytes_max)
        self._making = False
        self.queue.changed()
        self._effects.extend(ev.Welcome(engine, link, ()) for engine, link in self.engines.map_again())

    def _staging_refused(self, event: ev.StagingRefused, now_ns: int) -> None:
        self._wanted_bytes, self._making = self.staging.bytes_max, False
        self.queue.changed()
        self._refuse_unfit()

    def _refuse_unfit(self) -> None:
        for waiting in self.queue:
            if problem := self._never(waiting.key, waiting.num_bytes):
                self._effects.extend(ev.Refuse(call.call_id, problem) for call in waiting.calls)
                waiting.calls = []
                self._end(waiting.key)

    def _tick(self, event: ev.Tick, now_ns: int) -> None:
        for key in self.staging.expire(now_ns):
            self._lose(key, "the staging lease ran out")
        for waiting in [w for w in self.queue if not w.is_fetch]:
            waiting.calls = self._in_time(waiting.calls, None, now_ns)
            if not waiting.calls:
                self.queue.leave(waiting)
        for _, read in [early for early in self._early_reads if now_ns >= early[0]]:
            self._answer(read.call_id, Verdict.MISSING)
        self._early_reads = [early for early in self._early_reads if now_ns < early[0]]
        for key, fetch in list(self.fetches.wanted.items()):
            fetch.calls = self._in_time(fetch.calls, Verdict.MISSING, now_ns)
            if not fetch.calls:
                self._end(key)

    def _in_time(self, calls: list[Call], late: Verdict | None, now_ns: int) -> list[Call]:
        for call in calls:
            if now_ns >= call.until_ns:
                self._answer(call.call_id, late)
        return [call for call in calls if now_ns < call.until_ns]

    # -- controller

    def _report_answered(self, event: ev.ReportAnswered, now_ns: int) -> None:
        self.outbox.answered(now_ns)
        for key in event.dead:
            self._end(key)

    # -- laws

    def status(self) -> StagingStatus:
        return status(self)

    def violations(self) -> list[str]:
        """Broken laws in plain words; empty when all hold."""
        return violations(self)
