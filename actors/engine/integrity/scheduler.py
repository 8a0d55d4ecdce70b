"""vLLM's scheduler with one more reason to end a request: the step's proof. Only with `integrity.mode: check`.

`make_scheduler` is given to vLLM as `scheduler_cls`; it builds on the asynchronous scheduler where that is on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from actors.engine.integrity.tracker import CheckTracker, Mismatch
from actors.messages import PAGE_INTEGRITY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class _Judging:
    """Ends the requests that a proof names before any output of that step is made."""

    def update_from_output(
        self: Any, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        tracker: CheckTracker = self.connector.scheduler.tracker
        connector_output = model_runner_output.kv_connector_output
        proof = connector_output.kv_connector_worker_meta if connector_output else None
        mismatches = tracker.judge(scheduler_output.num_scheduled_tokens, proof)
        ended = _end(self, tracker, mismatches) if mismatches else []
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for request in ended:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=PAGE_INTEGRITY,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs

    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> bool:
        # vLLM counts quarantined pages as held and would refuse; with no request alive they can do no harm.
        self.connector.scheduler.tracker.lift_quarantine()
        reset: bool = super().reset_prefix_cache(*args, **kwargs)
        return reset


def _end(scheduler: Any, tracker: CheckTracker, mismatches: list[Mismatch]) -> list[Request]:
    """Requests that a mismatch fails and that still run, ended with FINISHED_ERROR."""
    failed: dict[str, None] = {}
    waiting = {mismatch.request_id: mismatch for mismatch in mismatches}
    while waiting:
        request_id, mismatch = waiting.popitem()
        request = scheduler.requests.get(request_id)
        if request_id in failed or request is None or request.is_finished():
            continue
        failed[request_id] = None
        # Everything from the first token that has no good output yet: this step's, and what was scheduled after it.
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        for other in tracker.fail_requests(mismatch, computed // scheduler.block_size):
            waiting.setdefault(other, Mismatch(other, -1, -1))
    ended: list[Request] = scheduler.finish_requests(failed, RequestStatus.FINISHED_ERROR)
    return ended


class FerryScheduler(_Judging, Scheduler):
    pass


class FerryAsyncScheduler(_Judging, AsyncScheduler):
    pass


def make_scheduler(**kwargs: Any) -> Scheduler:
    """What vLLM calls in the place of a scheduler class."""
    cls = FerryAsyncScheduler if kwargs["vllm_config"].scheduler_config.async_scheduling else FerryScheduler
    return cls(**kwargs)
