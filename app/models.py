"""A Serve application that leads requests to the applications of several models: `app.models:build`.

Each model's application has its own controller, staging and scaling; this one holds nothing but their names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextvars import Context
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application

from actors import logs
from app.api.by_model import ByModel
from app.placement import MAX_ONGOING


class IngressArgs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, str] = Field(min_length=1, description="name that clients use -> Serve application")
    replicas: int = Field(default=1, ge=1)
    cpus_per_replica: float = Field(default=0.1, ge=0)


def build(args: dict[str, Any]) -> Application:
    """`args`: see `IngressArgs`."""
    typed = IngressArgs.model_validate(args)
    deployment = serve.deployment(
        ModelIngress,
        name="Models",
        num_replicas=typed.replicas,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": typed.cpus_per_replica},
    )
    application: Application = deployment.bind(typed.models)
    return application


@serve.ingress()
class ModelIngress:
    def __init__(self, models: dict[str, str]) -> None:
        logs.below_serve()
        self._handles: dict[str, Any] = {}
        self._asgi = ByModel(models, self._ask)

    def __serve_build_asgi_app__(self) -> Any:
        return self._asgi

    async def _ask(
        self, application: str, method: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> AsyncGenerator[Any, None]:
        """Raises what Serve raises when there is no such application now."""
        if application not in self._handles:
            handle: Any = serve.get_app_handle(application)
            self._handles[application] = handle.options(method_name="http", stream=True)
        # An empty context: several calls of one HTTP request must not share its id (see `app.rpc.remote`).
        response = Context().run(self._handles[application].remote, method, path, headers, body)
        try:
            async for item in response:
                yield item
        finally:
            response.cancel()
