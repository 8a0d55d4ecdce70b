"""The tracer of a process. Off, which is the default, nothing of OpenTelemetry is imported or done."""

from __future__ import annotations

from actors.spans import Tracer
from cluster.frontend_spec import TracingSpec


def tracer(spec: TracingSpec, service: str, instance: str) -> Tracer:
    """`service`: frontend, controller, prefill, transfer or decode; `instance`: which of them."""
    if spec.endpoint is None:
        return Tracer()
    from actors.opentelemetry_tracer import OpenTelemetryTracer

    return OpenTelemetryTracer(spec, service, instance)
