"""vLLM's own AsyncLLM on our engine core client."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from actors.engine import vllm_patches
from app.api.errors import to_exception
from app.request.core_client import FerryCoreClient
from app.request.events import RequestError


class FerryLLM(AsyncLLM):
    """Everything but the engine core is vLLM's: templates, tokens, parsers, n, logprobs, stop strings, usage."""

    def __init__(self, vllm_config: VllmConfig, client: FerryCoreClient, **options: Any) -> None:
        with vllm_patches.core_client(client):
            super().__init__(vllm_config, Executor.get_class(vllm_config), **options)
        client.on_fault = self._fail

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """vLLM calls it before it adds the n sequences of a prompt, with the id of the whole."""
        super().check_admission(n, request_id)
        if n > 1 and request_id is not None:
            self.engine_core.begin_group(request_id, n)

    async def add_request(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        queue = await super().add_request(request_id, *args, **kwargs)
        self.engine_core.end_group(queue.request_id)
        return queue

    async def _add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        try:
            await super()._add_request(request, *args, **kwargs)
        except BaseException:
            # vLLM registers a request before its engine has taken it; ours may refuse.
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise

    async def abort(self, request_id: Any, internal: bool = False) -> None:
        """The client is gone, or a sequence could not be added.

        A stop string that vLLM has found comes to the engine core client by itself.
        """
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self.engine_core.cancel(self.output_processor.abort_requests(request_ids, internal))
        for name in request_ids:
            self.engine_core.end_group(name)

    def _fail(self, request_id: str, fault: RequestError) -> None:
        """A request has failed after it was added: its generator raises the error instead of ending quietly.

        With n > 1 the error is the whole answer, so the other sequences end as well.
        """
        processor = self.output_processor
        state = processor.request_states.get(request_id)
        processor.abort_requests([request_id], internal=True)
        if state is None or state.queue is None:
            return
        state.queue.put(to_exception(fault))
        if state.parent_req is not None:
            self.engine_core.cancel(processor.abort_requests([state.queue.request_id], internal=True))
