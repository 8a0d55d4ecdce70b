"""The tracer that is on: OpenTelemetry's SDK and its OTLP exporter over HTTP. Imported only where tracing is on."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.spans import NO_SPAN, Span, Tracer
from cluster.frontend_spec import TracingSpec

EXPORT_EVERY_MS = 1000
EXPORT_S = 5.0  # for the collector's answer
PROPAGATOR = TraceContextTextMapPropagator()


def _context(traceparent: str, tracestate: str = "") -> Context:
    return PROPAGATOR.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


class OpenTelemetryTracer(Tracer):
    """Spans are sent from a thread, in batches; when the collector is away they are dropped, and no request waits."""

    def __init__(self, spec: TracingSpec, service: str, instance: str) -> None:
        names = {"service.name": f"pageferry-{service}", "service.instance.id": instance}
        sampler = ParentBased(TraceIdRatioBased(spec.sample_ratio))
        self.provider = TracerProvider(resource=Resource.create(names), sampler=sampler, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=spec.endpoint, timeout=EXPORT_S)
        self.provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_EVERY_MS))
        self._tracer = self.provider.get_tracer("pageferry")

    def request(self, name: str, traceparent: str, tracestate: str) -> Span:
        context = _context(traceparent, tracestate) if traceparent else Context()
        made = self._tracer.start_span(name, context, SpanKind.SERVER)
        return RequestSpan(self, made) if made.is_recording() else NO_SPAN

    def span(self, name: str, parent: str, seconds: float, **attributes: Any) -> None:
        if parent:
            now = time.time_ns()
            kept = {key: value for key, value in attributes.items() if value is not None}
            made = self._tracer.start_span(
                name, _context(parent), SpanKind.INTERNAL, kept, start_time=now - int(seconds * 1e9)
            )
            made.end(now)


class RequestSpan(Span):
    def __init__(self, tracer: OpenTelemetryTracer, made: Any) -> None:
        self._tracer = tracer
        self._made = made
        self.began = time.monotonic()
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, set_span_in_context(made, Context()))
        self.context = carrier["traceparent"]

    def child(self, name: str, seconds: float, **attributes: Any) -> None:
        self._tracer.span(name, self.context, seconds, **attributes)

    def end(self, status: int, **attributes: Any) -> None:
        self._made.set_attributes({"http.response.status_code": status, **attributes})
        if status >= 500:
            self._made.set_status(StatusCode.ERROR)
        self._made.end()
