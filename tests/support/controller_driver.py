"""Drives the controller's machine by hand: replicas, frontends and transfer actors as plain calls, time as a number."""

from __future__ import annotations

from typing import Any

from actors.controller.events import Effect, Event, Log, Reply, Tick, ToFrontend, Withdraw
from actors.controller.machine import Machine
from actors.controller.status import audit
from actors.messages import (
    AdmitRequest,
    Adopt,
    Announcement,
    Claim,
    Ended,
    Fingerprint,
    FrontendCommand,
    FrontendHeartbeat,
    HeartbeatReply,
    Join,
    Lease,
    Occupancy,
    Opened,
    OpenedAt,
    Outcome,
    Overloaded,
    PageDelta,
    PlatformSize,
    ReplicaEvent,
    ReplicaHeartbeat,
    ReplicaLeaving,
    ReplicaLeft,
    ReplicaLost,
    ReplicaStarting,
    Request,
    Role,
    ScaleDecision,
    Seal,
    Sealed,
    SetTarget,
    StagingStatus,
    Ticket,
    TransferEvent,
    TransferReport,
    Verdict,
    WaitForHandOver,
)
from cluster.spec import ClusterSpec
from ops.simulate.announce import LAYOUT

SECOND = 1_000_000_000


def spec_of(**sections: Any) -> ClusterSpec:
    tree: dict[str, Any] = {
        "model": {"path": "test"},
        "pools": {
            "prefill": {"replicas": 1, "min_replicas": 0, "max_replicas": 8},
            "decode": {"replicas": 1, "min_replicas": 0, "max_replicas": 8},
        },
        "admission": {
            "queue_max": 4,
            "queue_wait_s": 10,
            "stale_after_s": 2,
            "fence_after_s": 5,
            "local_prefill_max_tokens": 0,
        },
        "transfer": {"hand_over_s": 8},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return ClusterSpec.parse(tree)


class ControllerDriver:
    def __init__(self, spec: ClusterSpec | None = None, epoch: int = 7) -> None:
        self.spec = spec or spec_of()
        self.now = 1_000 * SECOND
        self.machine = Machine(self.spec, epoch, self.now)
        self.answers: dict[int, Any] = {}
        self.orders: list[tuple[str, FrontendCommand]] = []
        self.platform: dict[Role, int] = {}  # what it holds; asks with every half second of `wait`
        self.refuses = False
        self.silent = False
        self.logs: list[str] = []
        self.stamps: dict[str, int] = {}
        self.bytes_max = 1 << 30  # of staging, on every node
        self._calls = 0

    @property
    def scaled(self) -> list[ScaleDecision]:
        return [decision for _, decision in self.machine.autoscaler.decisions]

    # -- raw

    def step(self, event: Event, call: int = 0) -> list[Effect]:
        effects = self.machine.step(event, self.now, call)
        for effect in effects:
            if isinstance(effect, Reply):
                assert effect.call_id not in self.answers, "a call was answered twice"
                self.answers[effect.call_id] = effect.value
            elif isinstance(effect, ToFrontend):
                self.orders.append((effect.frontend_id, effect.order))
            elif isinstance(effect, Log):
                self.logs.append(effect.text)
        return effects

    def call(self, message: Request[Any]) -> int:
        self._calls += 1
        self.step(message, self._calls)
        return self._calls

    def answer(self, call: int) -> Any:
        return self.answers.get(call)

    def wait(self, seconds: float, beats: tuple[str, ...] = (), frontends: tuple[str, ...] = ("f",)) -> None:
        """Time passes in half seconds, with ticks and heartbeats of those named (and of every frontend)."""
        until = self.now + int(seconds * SECOND)
        while self.now < until:
            self.now = min(until, self.now + SECOND // 2)
            for name in beats:
                self.beat(name)
            for name in frontends:
                self.frontend_beat(name)
            if not self.silent:
                self.ask_sizes()
            self.step(Tick())

    def ask_sizes(self) -> None:
        """As the platform does: tells what it holds and takes what it is asked for, unless it `refuses`."""
        for role in (Role.DECODE, Role.PREFILL):
            members = [r for r in self.machine.registry.replicas.values() if r.role is role]
            held = self.platform.setdefault(role, len(members))
            wanted = self.answers[self.call(PlatformSize(role, len(members), held))]
            if wanted is not None and not self.refuses:
                self.platform[role] = wanted

    # -- replicas

    def announcement(self, name: str, role: Role, **facts: Any) -> Announcement:
        dtype = "bfloat16" if role is Role.PREFILL else "float8_e4m3fn"
        values: dict[str, Any] = {
            "replica_id": name,
            "role": role,
            "node_id": "n",
            "incarnation": 1,
            "fingerprint": Fingerprint(geometry={"layers": 2}, tokenizer="t"),
            "layout": LAYOUT | {"dtype": dtype},
            "block_tokens": 32,
            "blocks_total": 100,
            "max_model_len": 4096,
        }
        return Announcement(**(values | facts))

    def join(self, name: str, role: Role, **facts: Any) -> HeartbeatReply | Exception:
        call = self.call(Join(self.announcement(name, role, **facts)))
        if not isinstance(self.answers[call], Exception):
            self.beat(name, incarnation=facts.get("incarnation", 1))
        reply: HeartbeatReply | Exception = self.answers[call]
        return reply

    def decode(self, *names: str, **facts: Any) -> None:
        for name in names:
            assert isinstance(self.join(name, Role.DECODE, **facts), HeartbeatReply)

    def prefill(self, *names: str, **facts: Any) -> None:
        for name in names:
            assert isinstance(self.join(name, Role.PREFILL, **facts), HeartbeatReply)

    def beat(
        self,
        name: str,
        held: int = 0,
        events: tuple[ReplicaEvent, ...] = (),
        pages: tuple[PageDelta, ...] = (),
        incarnation: int = 1,
        pages_whole: bool = False,
        **seen: Any,
    ) -> HeartbeatReply:
        known = self.machine.registry.replicas.get(name)
        total = known.announcement.blocks_total if known else 100
        occupancy = Occupancy(blocks_total=total, blocks_free=total - held, blocks_held=held, **seen)
        beat = ReplicaHeartbeat(
            replica_id=name,
            incarnation=incarnation,
            occupancy=occupancy,
            events=events,
            pages=pages,
            pages_whole=pages_whole,
        )
        reply: HeartbeatReply = self.answers[self.call(beat)]
        return reply

    # -- transfer

    def report(self, *events: TransferEvent, node: str = "n", incarnation: int = 1, **facts: Any) -> list[Any]:
        values: dict[str, Any] = {"node_id": node, "incarnation": incarnation, "bytes_held": 0}
        status = StagingStatus(**(values | {"leases": 0, "bytes_max": self.bytes_max} | facts))
        dead: list[Any] = self.answers[self.call(TransferReport(status, events))]
        return dead

    def seal(self, ticket: Ticket, node: str = "n") -> list[Any]:
        return self.report(sealed(ticket, node), node=node)

    def open(self, ticket: Ticket, verdict: Verdict = Verdict.OK) -> list[Any]:
        opened = Opened(
            ticket_id=ticket.ticket_id,
            attempt=ticket.attempt,
            replica_id=ticket.decode,
            num_pages=4,
            num_bytes=4096,
            num_tokens=100,
            verdicts={verdict: 4},
            seconds=0.01,
        )
        return self.report(OpenedAt(opened=opened))

    # -- frontends

    def ask(self, request: str = "r", frontend: str = "f", prompt: int = 320, most: int = 64, **more: Any) -> int:
        wish = AdmitRequest(request_id=request, frontend_id=frontend, num_prompt_tokens=prompt, max_tokens=most, **more)
        return self.call(wish)

    def admit(self, request: str = "r", **more: Any) -> Ticket:
        ticket = self.answers.get(self.ask(request, **more))
        assert isinstance(ticket, Ticket), ticket
        return ticket

    def busy(self, request: str, **more: Any) -> Overloaded:
        answer = self.answers.get(self.ask(request, **more))
        assert isinstance(answer, Overloaded), answer
        return answer

    def hand_over(self, ticket: Ticket, timeout_s: float = 8.0) -> int:
        return self.call(WaitForHandOver(ticket.ticket_id, ticket.attempt, timeout_s))

    def lost(
        self,
        ticket: Ticket,
        role: Role,
        tokens: int = 0,
        request: AdmitRequest | None = None,
        page_integrity: bool = False,
    ) -> int:
        name = ticket.decode if role is Role.DECODE else ticket.prefill or ""
        lost = ReplicaLost(
            ticket_id=ticket.ticket_id,
            attempt=ticket.attempt,
            role=role,
            replica_id=name,
            reason="it died",
            num_output_tokens=tokens,
            request=request,
            page_integrity=page_integrity,
        )
        return self.call(lost)

    def end(self, ticket: Ticket, outcome: Outcome = Outcome.DONE, tokens: int = 10) -> None:
        self.step(Ended(ticket.ticket_id, outcome, tokens))

    def frontend_beat(self, frontend: str = "f", live: tuple[int, ...] | None = None, stamp: int | None = None) -> Any:
        owned = self.machine.registry.by_frontend.get(frontend, set())
        tickets = tuple(sorted(owned)) if live is None else live
        said = self.stamps.get(frontend, 0) if stamp is None else stamp
        reply = self.answers[self.call(FrontendHeartbeat(frontend, tickets, said))]
        self.stamps[frontend] = reply.stamp
        return reply

    def adopt(self, *claims: Claim, frontend: str = "f") -> None:
        self.step(Adopt(frontend, claims))

    def leaving(self, name: str) -> None:
        self.step(ReplicaLeaving(name))

    def left(self, name: str) -> None:
        self.step(ReplicaLeft(name))

    def withdraw(self, call: int) -> None:
        self.step(Withdraw(call))

    def starting(self, name: str, role: Role) -> None:
        self.step(ReplicaStarting(name, role))

    def set_target(self, role: Role, target: int, hold_s: float = 0.0) -> str:
        answer: str = self.answers[self.call(SetTarget(role, target, hold_s))]
        return answer

    # -- looking

    def state(self, ticket: Ticket) -> str:
        live = self.machine.registry.tickets.get(ticket.ticket_id)
        return str(live.state) if live else "ended"

    def audit(self) -> list[str]:
        found: list[str] = audit(self.machine)["breaches"]
        return found


def sealed(ticket: Ticket, node: str = "n") -> Sealed:
    key = {"ticket_id": ticket.ticket_id, "attempt": ticket.attempt}
    return Sealed(
        seal=Seal(**key, layout_fingerprint="x", num_tokens=ticket.num_prompt_tokens, digests=((1, 2),)),
        lease=Lease(**key, node_id=node, segment="s", offset=0, num_bytes=8192),
    )
