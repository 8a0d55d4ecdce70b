"""The Serve ingress. A frontend has no engine: it admits, tokenises, detokenises and streams; there can be many.

vLLM is imported when a replica starts, not when this module is: a process that deploys the application needs no engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator
from typing import Any

import ray.util.metrics
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors import logs
from actors.messages import Configure, Role, SetTarget
from actors.tracing import tracer
from app.api.health import cannot_serve
from app.api.status import whole_audit
from app.client.asgi import call
from app.loop_stall import LoopStall
from app.rpc import directory
from app.rpc.controller_loops import ControllerLoops
from app.rpc.remote import CONTROLLER_AWAY_S
from app.serve_http import refuse_other_address
from cluster.spec import ClusterSpec

logger = logging.getLogger("pageferry.frontend")


@serve.ingress()
class Frontend:
    async def __init__(
        self,
        spec_tree: dict[str, Any],
        deployment: int,
        prefill: DeploymentHandle[Any] | None,
        decode: DeploymentHandle[Any],
    ) -> None:
        logs.below_serve()
        self.spec = spec = ClusterSpec.parse(spec_tree)
        await asyncio.to_thread(refuse_other_address, spec)  # before seconds of imports: Serve tries three times
        from actors.controller.actor import get_or_create
        from actors.engine.config import set_environment
        from app.rpc.batching import BatchingHandle
        from app.rpc.remote import RemoteController, RemoteDecode, RemotePrefill

        set_environment(spec, Role.DECODE)
        context = serve.get_replica_context()
        self.frontend_id = context.replica_id.unique_id
        self.controller = RemoteController(
            lambda: BatchingHandle(get_or_create(context.app_name, spec, deployment), self.frontend_id),
            self.frontend_id,
        )
        for handle in (decode, prefill):
            if handle is not None:
                handle.options(method_name="utility")  # from here on its router follows the replicas
        self.decode = RemoteDecode(decode, self.frontend_id)
        self.prefill = RemotePrefill(prefill if prefill is not None else decode, self.frontend_id)
        self._answered_at = -math.inf  # when the controller last said how the pools are
        self._loop = asyncio.get_running_loop()
        await self._start_server()
        hung_s = 2 * spec.admission.fence_after_s
        configuration, stall = Configure(spec, deployment), LoopStall(self._metrics)
        self._loops = ControllerLoops(self.controller, self.client, configuration, hung_s, self._reachable, stall.take)
        self._loops.start()
        self._stall_watch = asyncio.create_task(stall.watch())
        directory.watch(self._replicas_changed)

    async def _start_server(self) -> None:
        from actors.engine.config import generation, tokenizer_of
        from app.api.keys import KeyRing
        from app.api.server import build_server, frontend_config, server_args
        from app.metrics import FrontendMetrics
        from app.request.core_client import FerryCoreClient

        spec = self.spec
        ring = KeyRing(spec.frontend.keys_file, os.environ)
        # Without a live decode replica, which a pool at zero has none of: a request must be able to wake it.
        self._generation, self._tokenizer = generation(spec), tokenizer_of(spec)
        args = server_args(spec)
        config = frontend_config(args)
        self._metrics = FrontendMetrics(ray.util.metrics, serve.get_replica_context().app_name, ring.tenants)
        self.client = FerryCoreClient(
            self.frontend_id,
            self.controller,
            self.prefill,
            self.decode,
            block_tokens=spec.pools.decode.block_tokens,
            caches_prefixes=spec.pools.prefill.enable_prefix_caching,
            num_engines=spec.pools.decode.bounds[1],
            tokenizer=self._tokenizer,
            retries_mismatch=spec.integrity.policy == "retry",
            metrics=self._metrics,
        )
        self._asgi, self._fastapi, self.llm = await build_server(
            spec,
            args,
            config,
            self.client,
            ring,
            tracer(spec.tracing, "frontend", self.frontend_id),
            status=self.controller.status,
            audit=self._audit,
            pages=self.controller.pages,
            health=self._missing,
            scale=self._scale,
            fault=self._fault if spec.faults.kinds else None,
        )

    def __serve_build_asgi_app__(self) -> Any:
        return self._asgi

    # -- for Serve and for clients with a handle

    async def check_health(self) -> None:
        if self.llm.errored:
            raise RuntimeError("vLLM's output handler has stopped")
        if reason := self._loops.standing_still():
            raise RuntimeError(reason)

    async def status(self) -> dict[str, Any]:
        return await self.controller.status()

    async def http(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> AsyncGenerator[Any, None]:
        """One HTTP request over a handle: `(status, headers)`, then the body's chunks. See `app.client`."""
        async for item in call(self._asgi, method, path, headers, body):
            yield item

    async def _scale(self, pool: Role, target: int, hold_s: float) -> str:
        return await self.controller.call(SetTarget(pool, target, hold_s), 1.0)

    async def _audit(self) -> dict[str, Any]:
        async def engine(pool: str, replica_id: str) -> dict[str, Any]:
            return await (self.prefill if pool == Role.PREFILL else self.decode).audit(replica_id)

        return await whole_audit(self.controller.audit, engine)

    async def _fault(self, kind: str, victim: str, trial: int, more: float) -> Any:
        from app.api.fault_injection import plant

        async def send(to_prefill: bool, replica_id: str, *what: Any) -> dict[str, Any]:
            return await (self.prefill if to_prefill else self.decode).fault(replica_id, *what)

        return await plant(self.client, send, kind, victim, trial, more)

    async def _missing(self) -> str:
        """Why no request can be served now; "" when one can."""
        if reason := self._loops.standing_still():
            return reason
        now = asyncio.get_running_loop().time()
        try:
            status = await asyncio.wait_for(self.controller.status(), 3.0)
        except Exception as error:  # while it restarts, requests wait for it
            logger.warning("health: the controller does not answer: %s: %s", type(error).__name__, error)
            return "the controller does not answer" if now - self._answered_at > CONTROLLER_AWAY_S else ""
        self._answered_at = now
        return cannot_serve(status, self.spec, self._generation, self._tokenizer)

    def _reachable(self) -> frozenset[str]:
        return directory.live(self.decode.name) | directory.live(self.prefill.name)

    def _replicas_changed(self, deployment: str, live: frozenset[str], left: frozenset[str]) -> None:
        """Called from the thread of Serve's router."""
        self._loop.call_soon_threadsafe(self._loops.replicas_changed)
        if left:
            self._loop.call_soon_threadsafe(self._loops.replicas_left, left)

    async def __del__(self) -> None:
        if (loops := getattr(self, "_loops", None)) is not None:
            loops.stop()
            self._stall_watch.cancel()
        if (llm := getattr(self, "llm", None)) is not None:
            llm.shutdown()
            await self.client.drained(5.0)
