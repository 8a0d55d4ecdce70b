"""A fetch between two simulated nodes: the shipped `ChunkFetch` over the network that can be made to misbehave.

A chunk lands in two halves some time apart, and only what lands is written. What the network drops is, by the dice, a
connection that breaks or silence, which only the fetch's own deadline ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.transfer import chunks
from actors.transfer import events as ev
from ops.simulate.network import Cancel
from ops.simulate.replica import PAGE_BYTES
from ops.simulate.world import MS, SECOND, Done

if TYPE_CHECKING:
    from ops.simulate.node import Content, NodeSim

CHUNK_BYTES = 4 * PAGE_BYTES
WINDOW_BYTES = 3 * CHUNK_BYTES
QUIET_NS = 2 * SECOND
TICK_NS = 100 * MS
LAND_NS = MS


class FetchSim:
    """`peer` None: there is no such node."""

    def __init__(self, node: NodeSim, effect: ev.StartFetch, peer: NodeSim | None) -> None:
        self._node, self._effect, self._peer = node, effect, peer
        self.plan = chunks.ChunkFetch(effect.source.num_bytes, 2, CHUNK_BYTES, WINDOW_BYTES, QUIET_NS)
        self._landing = 0
        self._ended: chunks.Ended | None = None
        self._began_ns = node.world.now_ns
        node.later(TICK_NS, self._tick)
        self._perform(self.plan.begin(node.world.now_ns))

    def _step(self, event: chunks.Event) -> None:
        self._perform(self.plan.step(event, self._node.world.now_ns))

    def _tick(self) -> None:
        if self._ended is None:
            self._node.later(TICK_NS, self._tick)
            self._step(chunks.Stopped() if self._effect.fetch_id in self._node.stopped else chunks.Tick())

    def _perform(self, effects: list[chunks.Effect]) -> None:
        for effect in effects:
            match effect:
                case chunks.Open(stream):
                    there = self._peer is not None and self._peer.alive
                    opened = chunks.Opened(stream) if there else chunks.Broke(stream, "there is no such node")
                    self._node.later(MS, self._step, opened)
                case chunks.Ask():
                    self._ask(effect)
                case chunks.Ended():
                    self._ended = effect
                    self._end()

    def _ask(self, ask: chunks.Ask) -> None:
        node, peer, source = self._node, self._peer, self._effect.source
        assert peer is not None, "no stream was opened"

        def handler(answer: Done) -> Cancel | None:
            peer.step(ev.PieceAsked(peer.next_call(answer), source, ask.first, ask.num_bytes))
            return None

        def failed(reason: str) -> None:
            if node.world.random.random() < 0.5:
                self._step(chunks.Broke(ask.stream, reason))

        node.net.call(node, peer, "fetch", handler, lambda pages: self._came(ask, pages), failed)

    def _came(self, ask: chunks.Ask, pages: list[Content | None] | None) -> None:
        if self._ended is not None or ask.stream != self.plan.stream:
            return  # of a connection that is closed: nothing of it is written
        if pages is None:
            self._step(chunks.Gone(ask.stream))
            return
        half = len(pages) // 2
        self._landing += 1
        self._write(ask.first // PAGE_BYTES, pages[:half])

        def rest() -> None:
            self._landing -= 1
            self._write(ask.first // PAGE_BYTES + half, pages[half:])
            self._step(chunks.Came(ask.stream, ask.index, True))
            self._end()

        self._node.later(LAND_NS, rest)

    def _write(self, first_page: int, pages: list[Content | None]) -> None:
        effect = self._effect
        self._node.land(effect.source, effect.offset, first_page, pages)

    def _end(self) -> None:
        """Once nothing is written any more."""
        if self._ended is None or self._landing:
            return
        plan, node = self.plan, self._node
        moved = sum(plan.size(index) for index in plan.there)
        busy_ns, again = node.world.now_ns - self._began_ns, plan.asked_again
        ended = self._ended
        measured = ev.Measured(
            self._effect.source.node_id, "direct", ended.complete, moved, busy_ns, again, ended.reason
        )
        node.stopped.discard(self._effect.fetch_id)
        node.step(ev.FetchEnded(self._effect.fetch_id, measured))
