"""OpenTelemetry: a span per request, made when it has ended, where OTEL_EXPORTER_OTLP_ENDPOINT is set.

The trace goes on at the upstream: it gets a `traceparent` whose parent is this span. Export is a thread's work.
"""

from __future__ import annotations

import os
from typing import Any

from firsttoken.engine.config import ConfigError
from firsttoken.gateway.journal import Record


class Tracer:
    """Raises ConfigError when the packages are missing."""

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_ENDPOINT is set, but tracing is not installed: pip install 'firsttoken[otel]'"
            ) from None
        self._trace = trace
        resource = Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "firsttoken-gateway")}
        )
        self._ids = _Ids()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("firsttoken.gateway")

    def traceparent(self, request_id: str, given: str | None) -> str:
        """W3C header for the upstream: the client's trace, or a new one named by the request's id."""
        trace_id, _, flags = _parse(given) or (_trace_id(request_id), 0, 1)
        return f"00-{trace_id:032x}-{_span_id(request_id):016x}-{flags:02x}"

    def span(self, record: Record, given: bytes | None) -> None:
        """Records an ended request."""
        trace = self._trace
        parsed = _parse(given.decode("latin-1") if given else None)
        self._ids.trace_id, self._ids.span_id = _trace_id(record.id), _span_id(record.id)
        context = None
        if parsed is not None:
            parent = trace.SpanContext(parsed[0], parsed[1], True, trace.TraceFlags(parsed[2]))
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        start = int(record.started_at * 1e9)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": record.endpoint,
            "gen_ai.request.model": record.alias,
            "gen_ai.response.model": record.model,
            "firsttoken.upstream": record.upstream,
            "firsttoken.status": record.status,
            "firsttoken.request_id": record.id,
        }
        optional = {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.server.time_to_first_token": None if record.ttft_ms is None else record.ttft_ms / 1e3,
            "error.type": record.error,
        }
        attributes |= {name: value for name, value in optional.items() if value is not None}
        span = self._tracer.start_span(
            f"{record.endpoint} {record.alias}",
            context=context,
            kind=trace.SpanKind.SERVER,
            start_time=start,
            attributes=attributes,
        )
        if record.status == "error":
            span.set_status(trace.StatusCode.ERROR, record.error)
        span.end(start + int((record.duration_ms or 0.0) * 1e6))

    def close(self) -> None:
        self._provider.shutdown()


class _Ids:
    """Gives the next span the ids that its `traceparent` has announced."""

    trace_id = 1
    span_id = 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id

    def is_trace_id_random(self) -> bool:
        return True


def _trace_id(request_id: str) -> int:
    return int(request_id.removeprefix("req-")[-32:], 16) or 1


def _span_id(request_id: str) -> int:
    return int(request_id[-16:], 16) or 1


def _parse(traceparent: str | None) -> tuple[int, int, int] | None:
    """(trace id, span id, flags) of a valid header, else None."""
    try:
        version, trace_id, span_id, flags = (traceparent or "").split("-")
        parsed = int(trace_id, 16), int(span_id, 16), int(flags, 16)
    except ValueError:
        return None
    good = len(version) == 2 and len(trace_id) == 32 and len(span_id) == 16 and parsed[0] and parsed[1]
    return parsed if good else None
