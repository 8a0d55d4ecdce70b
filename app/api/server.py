"""vLLM's own OpenAI server on our engine core client: arguments, configuration, application."""

from __future__ import annotations

import difflib
import ipaddress
import math
from argparse import Namespace
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import ASGIApp
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from actors.engine.config import engine_kwargs
from actors.messages import Role
from actors.spans import Tracer
from app.api.error_rewriter import error_response
from app.api.fault_injection import NoVictim
from app.api.keys import KeyRing
from app.api.llm import FerryLLM
from app.api.middleware import Access, RequestFilter
from app.api.page import PATHS, add_page
from app.api.request_models import RequestModels
from app.api.vllm_app import make_ours
from app.request.core_client import FerryCoreClient
from app.request.many_engines import for_many_engines
from app.token_gaps import SocketGaps
from cluster.spec import ClusterSpec, SpecError

RequestError = Callable[[str, str, int, float], Awaitable[Any]]
SetSize = Callable[[Role, int, float], Awaitable[str]]

# A frontend has decode's settings but no engine: what only an engine uses is left out.
ENGINE_ONLY = ("kv_transfer_config", "worker_extension_cls", "distributed_executor_backend", "tensor_parallel_size")


def server_args(spec: ClusterSpec) -> Namespace:
    """What `vllm serve` would have parsed for a single engine with decode's settings."""
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    known = set(vars(args))
    frontend = spec.frontend
    settings = {
        name: value
        for name, value in engine_kwargs(spec, Role.DECODE, "", "").items()
        if name not in ENGINE_ONLY and value is not None
    }
    settings |= {
        "host": frontend.host,
        "port": frontend.port,
        "enable_auto_tool_choice": frontend.enable_auto_tool_choice,
        "tool_call_parser": frontend.tool_call_parser,
        "chat_template": spec.model.chat_template,
    }
    if frontend.reasoning_parser is not None:
        settings["reasoning_parser"] = frontend.reasoning_parser
    for name, value in frontend.server_args.items():
        key = name.replace("-", "_")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise SpecError(
                f"frontend.server_args.{name} is no argument of vLLM's server"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        settings[key] = value
    for name, value in settings.items():
        setattr(args, name, value)
    validate_parsed_serve_args(args)
    return args


def frontend_config(args: Namespace) -> VllmConfig:
    """Decode's engine configuration, of which a frontend needs the model's part; no engine is asked for it."""
    config: VllmConfig = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    for_many_engines(config)
    return config


def tasks_without_engine(config: VllmConfig) -> tuple[str, ...] | None:
    """What a model that generates text serves; None for the others, whose engine has to be asked."""
    model = config.model_config
    if model.runner_type != "generate":
        return None
    found, _ = model.registry.inspect_model_cls(model.architectures, model)
    if found.supports_transcription_only:
        return ("transcription",)
    known = (("generate", found.is_text_generation_model), ("transcription", found.supports_transcription))
    return tuple(task for task, served in known if served)


async def build_server(
    spec: ClusterSpec,
    args: Namespace,
    config: VllmConfig,
    client: FerryCoreClient,
    ring: KeyRing,
    tracer: Tracer,
    *,
    status: Callable[[], Awaitable[dict[str, Any]]],
    audit: Callable[[], Awaitable[Any]],
    pages: Callable[[], Awaitable[Any]],
    health: Callable[[], Awaitable[str]],
    scale: SetSize,
    fault: RequestError | None = None,
) -> tuple[ASGIApp, FastAPI, FerryLLM]:
    """The guarded ASGI application, vLLM's FastAPI application in it, and the LLM. `health` says what is missing.

    `scale(pool, replicas, hold_s)` sets a pool's size and says why not.
    `fault(kind, victim, trial, more)` puts a fault into an engine; without it there is no such route.
    """
    client.supported_tasks = tasks_without_engine(config)
    llm = FerryLLM(config, client, log_stats=not args.disable_log_stats, log_requests=args.enable_log_requests)
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    for base in app.state.openai_serving_models.base_model_paths:
        base.model_path = base.name  # clients see it as a model's `root`; where our files lie is not theirs to know
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM's error handler would stop its own HTTP server
    make_ours(app)
    routes = _routes(status, audit, pages, health)
    _add_scale(routes, scale)
    add_page(routes, status)
    if fault is not None:
        _add_faults(routes, fault)
    _put_first(app, routes)
    guarded = RequestFilter(app, access(spec, ring), RequestModels(app).blame, client.limited, tracer)
    return SocketGaps(guarded, client.metrics), app, llm


def access(spec: ClusterSpec, ring: KeyRing) -> Access:
    return Access(ring, is_loopback(spec.frontend.host), spec.frontend)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _routes(
    status: Callable[[], Awaitable[dict[str, Any]]],
    audit: Callable[[], Awaitable[Any]],
    pages: Callable[[], Awaitable[Any]],
    health: Callable[[], Awaitable[str]],
) -> FastAPI:
    routes = FastAPI()

    @routes.get("/health")
    async def get_health() -> Response:
        missing = await health()
        return Response(status_code=200) if not missing else error_response(503, missing, "Service Unavailable")

    @routes.get("/status")
    async def get_status(request: Request) -> JSONResponse:
        found = await status()
        if request.query_params.get("audit", "0") not in ("", "0", "false"):
            found = {**found, "audit": await audit()}
        return JSONResponse(found)

    @routes.get("/status/audit")
    async def get_audit() -> JSONResponse:
        return JSONResponse(await audit())

    @routes.get("/status/pages")
    async def get_pages() -> JSONResponse:
        return JSONResponse(await pages())

    return routes


class _Size(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pool: Role
    replicas: int = Field(ge=0, le=100_000)
    hold_s: float = Field(default=600.0, ge=0, le=30 * 24 * 3600.0)


def _add_scale(routes: FastAPI, scale: SetSize) -> None:
    @routes.post("/admin/scale")
    async def post_scale(request: Request) -> Response:
        try:
            size = _Size.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            return error_response(400, f"{where}: {first['msg']}", "BadRequestError", where)
        problem = await scale(size.pool, size.replicas, size.hold_s)
        return error_response(409, problem, "Conflict") if problem else JSONResponse(size.model_dump(mode="json"))


def _add_faults(routes: FastAPI, fault: RequestError) -> None:
    @routes.post("/faults")
    async def post_fault(request: Request) -> JSONResponse:
        try:
            body = await request.json()
            more = float(body.get("more", 0))
            if not math.isfinite(more):
                raise ValueError(f"more {more} is no number of positions or seconds")
            done = await fault(body["kind"], body["victim"], int(body.get("trial", 0)), more)
        except NoVictim as error:
            return error_response(404, str(error), "Not Found")
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            return error_response(400, f"{type(error).__name__}: {error}", "BadRequestError")
        return JSONResponse(done)


def _put_first(app: FastAPI, routes: FastAPI) -> None:
    """Ours answer before vLLM's routes of the same path."""
    ours = [route for route in routes.router.routes if getattr(route, "path", "") in OURS]
    app.router.routes[:0] = ours


OURS = ("/health", "/status", "/status/audit", "/status/pages", "/admin/scale", "/faults", *PATHS)
