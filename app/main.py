"""The Serve application. `serve run app.main:build config=cluster/topologies/local-cpu.yaml [key=value ...]`.

Needs no engine where it runs: replicas import theirs when they start.
"""

from __future__ import annotations

import time
from typing import Any

import yaml
from ray import serve
from ray.serve import Application

from actors.engine.replica import DecodeReplica, PrefillReplica
from app.frontend import Frontend
from app.placement import deployment_options, frontend_options
from cluster.plan.preflight import refuse_unfit_cpu_pools
from cluster.quality import refuse_poor_quality
from cluster.spec import ClusterSpec, SpecError


def build(args: dict[str, Any]) -> Application:
    """`args`: `config`, a topology: a file, the name of one that ships, or its content as a mapping.

    Every other key overrides a dotted setting.
    """
    if "config" not in args:
        raise SpecError("config is missing: serve run app.main:build config=cluster/topologies/local-cpu.yaml")
    overrides: dict[str, Any] = {
        key: yaml.safe_load(value) if isinstance(value, str) else value
        for key, value in args.items()
        if key != "config"
    }
    return application(ClusterSpec.load(args["config"], overrides))


def application(spec: ClusterSpec) -> Application:
    """Frontend, Prefill and Decode. The controller and the transfer actors are found or made by who needs them.

    Each call makes a deployment of its own number, the time in nanoseconds: of two that are there at once, in a rolling
    update, the later one's configuration counts.
    """
    refuse_unfit_cpu_pools(spec)
    refuse_poor_quality(spec)
    tree, number = spec.model_dump(mode="json"), time.time_ns()
    decode = serve.deployment(DecodeReplica, **deployment_options(spec, "decode")).bind(tree, number)
    prefill = None
    if spec.has_prefill:
        prefill = serve.deployment(PrefillReplica, **deployment_options(spec, "prefill")).bind(tree, number)
    application: Application = serve.deployment(Frontend, **frontend_options(spec)).bind(tree, number, prefill, decode)
    return application
