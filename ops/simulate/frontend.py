"""A frontend: the shipped engine core client, its requests and its loops towards the controller, in virtual time.

Nothing of a request is decided here. In the place of vLLM's AsyncLLM stands a reader that hands tokens to clients; in
the place of Ray stand ports that call simulated processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors.messages import Configure, ReplicaLost
from actors.transfer.staging import Key
from app.api.errors import RequestErrorResponse
from app.metrics import Discard, FrontendMetrics
from app.request.context import CALLER, Caller
from app.request.core_client import FerryCoreClient
from app.request.events import RequestError
from app.rpc.controller_loops import ControllerLoops
from cluster.spec import ClusterSpec
from ops.simulate.clients import Record, Sequence
from ops.simulate.controller import ControllerSim
from ops.simulate.decode import DecodeSim
from ops.simulate.model import Model, Script, advance, prompt_of, request_of
from ops.simulate.network import Net
from ops.simulate.ports import ControllerPort, DecodePort, PrefillPort
from ops.simulate.replica import ReplicaSim
from ops.simulate.traces import Arrival
from ops.simulate.world import Process, ProcessLoop, World

Find = Callable[[str], ReplicaSim | None]


class CountedMetrics(FrontendMetrics):
    """The frontend's counters, kept here; nothing is exported."""

    def __init__(self, counted: dict[str, float]) -> None:
        self._counted = counted
        super().__init__(Discard)

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        self._counted[name] = self._counted.get(name, 0) + value

    def observe(self, name: str, value: float, **labels: str) -> None:
        pass


class FrontendSim(Process):
    kind = "frontend"

    def __init__(
        self, world: World, net: Net, name: str, spec: ClusterSpec, controller: ControllerSim, model: Model, find: Find
    ) -> None:
        super().__init__(world, name)
        self.net = net
        self.spec = spec
        self.controller = controller
        self.model = model
        self.find = find
        self.counted: dict[str, float] = {}  # its metrics, all lives together
        self._base_name = name
        self._begin()

    def _begin(self) -> None:
        self.records: dict[str, Record] = {}  # requests of this life that have not ended
        self._sequences: dict[str, tuple[Record, Sequence]] = {}  # that the output processor still knows
        self._losses: set[Key] = set()  # reported
        self.submitted: set[Key] = set()  # decode has said that it has them
        self.client: FerryCoreClient | None = None
        self.loop = ProcessLoop(self)  # type: ignore[abstract]  # what no shipped code calls is not there
        self.loop.spawn(self._main())

    async def _main(self) -> None:
        controller = ControllerPort(self)
        self.client = client = FerryCoreClient(
            self.name,
            controller,
            PrefillPort(self),
            DecodePort(self),
            block_tokens=self.spec.pools.decode.block_tokens,
            num_engines=self.spec.pools.decode.bounds[1],
            retries_mismatch=self.spec.integrity.policy == "retry",
            metrics=CountedMetrics(self.counted),
        )
        client.on_fault = self._failed
        hung_s = 2 * self.spec.admission.fence_after_s
        self.controller_loops = ControllerLoops(controller, client, Configure(self.spec), hung_s)
        self.controller_loops.start()
        while True:
            outputs = await client.get_output_async()
            ended = [end for output in outputs.outputs if (end := self._take(output))]
            if ended:
                await client.abort_requests_async(ended)

    def reborn(self) -> None:
        super().reborn()
        self.name = f"{self._base_name}~{self.life}"
        self._begin()

    def die(self) -> None:
        super().die()
        for record in self.records.values():
            record.end("client_gone", "its frontend died", self.world.now_ns)
        self.records, self._sequences = {}, {}
        self.loop.end()

    def replicas_left(self, replica_ids: list[str]) -> None:
        self.loop.spawn(self._replicas_left(replica_ids))

    async def _replicas_left(self, replica_ids: list[str]) -> None:
        self.controller_loops.replicas_left(replica_ids)

    # -- requests

    def accept(self, record: Record, arrival: Arrival) -> None:
        self.records[record.request_id] = record
        self.loop.spawn(self._add(record, arrival))

    async def _add(self, record: Record, arrival: Arrival) -> None:
        """What `FerryLLM.add_request` does with a request of n sequences."""
        assert self.client is not None
        CALLER.set(Caller(tenant=arrival.tenant, session=arrival.session))
        if arrival.num_sequences > 1:
            self.client.begin_group(record.request_id, arrival.num_sequences)
        prompt = prompt_of(arrival)
        start = advance(0, prompt)
        try:
            for seed in range(arrival.num_sequences):
                if record.ends:
                    break
                sequence = self._sequence(record, arrival, seed, start, len(prompt))
                request = request_of(sequence.request_id, arrival, prompt, arrival.limit_of(seed), seed)
                self._sequences[sequence.request_id] = (record, sequence)
                await self.client.add_request_async(request)
        except RequestErrorResponse as error:
            self._end_record(record)
            record.fail(error.fault, self.world.now_ns)
        finally:
            self.client.end_group(record.request_id)

    def _sequence(self, record: Record, arrival: Arrival, seed: int, start: int, num_prompt: int) -> Sequence:
        name = record.request_id if arrival.num_sequences == 1 else f"{seed}_{record.request_id}"
        last = arrival.length_of(seed)
        script = Script(num_prompt, last if arrival.ending == "eos" else None)
        self.model.scripts[name] = script
        sequence = Sequence(name, script, start, None if arrival.recovery == "none" else seed, last)
        sequence.stops = arrival.ending == "stop"
        record.sequences.append(sequence)
        return sequence

    def _take(self, output: Any) -> str:
        """One output for the client. The request's id when the client's stop string ends it before the engine does."""
        found = self._sequences.get(output.request_id)
        if found is None:
            return ""
        record, sequence = found
        before = sequence.position
        tokens = output.new_token_ids
        stopped = sequence.stops and before + len(tokens) >= sequence.last
        record.take(sequence, tokens[: sequence.last - before] if stopped else tokens, self.world.now_ns)
        if stopped or output.finish_reason is not None:
            sequence.finished = True
            del self._sequences[output.request_id]
            if all(s.finished for s in record.sequences) and len(record.sequences) == record.num_sequences:
                self.records.pop(record.request_id, None)
                record.end("done", "", self.world.now_ns)
        return output.request_id if stopped and output.finish_reason is None else ""

    def _failed(self, request_id: str, error: RequestError) -> None:
        found = self._sequences.get(request_id)
        if found is not None:
            self._end_record(found[0])
            found[0].fail(error, self.world.now_ns)

    def leave(self, record: Record) -> None:
        """The client hangs up."""
        record.end("cancelled", "the client left", self.world.now_ns)
        self.loop.call_soon(self._end_record, record)

    def _end_record(self, record: Record) -> None:
        """Its tokens are not read any more: every sequence of it is cancelled."""
        assert self.client is not None
        self.records.pop(record.request_id, None)
        names = [sequence.request_id for sequence in record.sequences]
        for name in names:
            self._sequences.pop(name, None)
        self.client.cancel(names)

    def check_loss(self, loss: ReplicaLost) -> None:
        """A request gives up its replica: not without a cause, where the truth is plain to see."""
        key = loss.ticket_id, loss.attempt
        if key in self._losses or loss.request is None:
            return  # said again
        self._losses.add(key)
        replica, known = self.find(loss.replica_id), self.controller.machine.registry.replicas.get(loss.replica_id)
        allowed = loss.page_integrity or "leaving" in loss.reason or "claimed" in loss.reason
        if (
            isinstance(replica, DecodeSim)
            and replica.works_on(key, self)
            and key in self.submitted
            and self.controller.alive
            and known is not None
            and not known.fenced
            and not (allowed or loss.request.num_sequences > 1)
        ):
            text = f"{loss.request.request_id} gives up {loss.replica_id}, which is well: {loss.reason}"
            self.world.violations.append(text)

    def __repr__(self) -> str:
        return f"{self.name}({len(self.records)} live)"
