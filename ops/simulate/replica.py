"""What simulated prefill and decode replicas share: joining, heartbeats, the controller's cancels, their node.

A replica is an engine server and its engine as a cost model: what it says and holds is real, what it computes is time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from actors.messages import (
    Announcement,
    HeartbeatReply,
    Join,
    Lease,
    Occupancy,
    ReplicaEvent,
    ReplicaHeartbeat,
    Role,
)
from actors.transfer.staging import Key
from ops.simulate.announce import announcement
from ops.simulate.model import Model
from ops.simulate.network import Net
from ops.simulate.world import MS, SECOND, Process, World

if TYPE_CHECKING:
    from ops.simulate.controller import ControllerSim
    from ops.simulate.node import NodeSim

HEARTBEAT_NS = SECOND // 2
PAGE_BYTES = 4096  # of a page's wire form in the model; only proportions matter
_decoder = MsgpackDecoder(EngineCoreRequest)
_encoder = MsgpackEncoder()


class Costs(Protocol):
    """What engine work takes, nanoseconds."""

    def prefill_ns(self, tokens: int) -> int: ...

    def step_ns(self, batch: int, context_tokens: int) -> int: ...


def decode_request(frames: list[bytes]) -> EngineCoreRequest:
    request: EngineCoreRequest = _decoder.decode(frames)
    return request


def encode_outputs(outputs: list[EngineCoreOutput], now_ns: int) -> list[bytes]:
    message = EngineCoreOutputs(outputs=outputs, timestamp=now_ns / SECOND)
    return [bytes(frame) for frame in _encoder.encode(message)]


class StagingMap:
    """What `actors.transfer.link.StagingMap` is to an engine: the memory it has mapped, and what it may not touch."""

    def __init__(self) -> None:
        self._segment = ""
        self._mapped = False
        self._revoked: set[Key] = set()

    def may_touch(self, lease: Lease) -> bool:
        key = (lease.ticket_id, lease.attempt)
        return self._mapped and lease.segment == self._segment and key not in self._revoked

    def replace(self, segment: str, revoked: tuple[Key, ...]) -> None:
        if segment != self._segment:
            self._revoked.clear()
        self._segment, self._mapped = segment, True
        self.revoke(revoked)

    def revoke(self, keys: tuple[Key, ...]) -> None:
        self._revoked.update(keys)

    def drop(self) -> None:
        """The link has ended."""
        self._mapped = False


class ReplicaSim(Process):
    """`facts`: blocks_total, block_tokens, max_seqs, generation. `engine` is the name of its one engine process."""

    role: Role

    def __init__(
        self, world: World, net: Net, name: str, node: NodeSim, model: Model, costs: Costs, facts: dict[str, Any]
    ) -> None:
        super().__init__(world, name)
        self.net = net
        self.node = node
        self.model = model
        self.costs = costs
        self.engine = f"{name}#0"
        self.staging = StagingMap()
        self.blocks_total: int = facts["blocks_total"]
        self.block_tokens: int = facts["block_tokens"]
        self.max_seqs: int = facts["max_seqs"]
        self.generation: str = facts.get("generation", "")
        self.events: list[ReplicaEvent] = []
        self.leaving = False
        self.controller: ControllerSim | None = None
        self.on_fenced: Callable[[ReplicaSim], None] = lambda replica: None
        self.tokens_generated = 0

    def start(self, controller: ControllerSim) -> None:
        self.controller = controller
        self.node.attach(self)
        self._join()
        self.later(HEARTBEAT_NS, self._beat)

    def die(self) -> None:
        super().die()
        self.events = []
        self.node.engine_died(self.engine)

    def live_tickets(self) -> tuple[int, ...]:
        raise NotImplementedError

    def occupancy(self) -> Occupancy:
        raise NotImplementedError

    def cancel(self, ticket_id: int, attempt: int) -> None:
        """By the controller's wish: drops that and earlier attempts; idempotent."""
        raise NotImplementedError

    @property
    def empty(self) -> bool:
        """Whether the platform may stop it: no call of it runs."""
        return not self.live_tickets() and not self.calls

    def announcement(self) -> Announcement:
        return announcement(
            self.name,
            self.role,
            self.node.name,
            self.blocks_total,
            incarnation=self.life,
            block_tokens=self.block_tokens,
            generation=self.generation,
            tickets=self.live_tickets(),
            max_seqs=self.max_seqs,
        )

    def _join(self) -> None:
        assert self.controller is not None
        self.controller.call(self, Join(self.announcement()), self._obey, lambda _: self.later(200 * MS, self._join))

    def _beat(self) -> None:
        assert self.controller is not None
        events, self.events = tuple(self.events), []
        heartbeat = ReplicaHeartbeat(
            replica_id=self.name, incarnation=self.life, occupancy=self.occupancy(), events=events
        )

        def failed(_: str) -> None:
            self.events = [*events, *self.events]

        self.controller.call(self, heartbeat, self._obey, failed)
        self.later(HEARTBEAT_NS, self._beat)

    def _obey(self, reply: HeartbeatReply | Exception) -> None:
        if isinstance(reply, Exception):
            raise reply
        if not reply.known:
            self._join()
        for ticket_id, attempt in reply.cancel:
            self.cancel(ticket_id, attempt)
        if reply.fenced:
            self.on_fenced(self)
