"""OpenTelemetry traces (extra `otel`): a span a request, below it one a job, below that one a phase.

A request's parent is what its `traceparent` names (W3C Trace Context). A job outlives the request that
brought it: its spans are made when it is over, with the times that its phases had, and one that another
process accepted has a trace of its own.

Spans go to a collector over OTLP by HTTP, from a thread of their own; where it cannot be reached they are
dropped, and nobody waits. The SDK's variables hold, such as `OTEL_TRACES_SAMPLER` and `OTEL_SERVICE_NAME`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import darkroom
from darkroom.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from darkroom.serve.engine.tickets import EngineJob

EXTRA = "otel"
EXPORT_S, CLOSE_S = 5.0, 5.0
"""The most that one export takes, and that the end of the process waits for the last."""


def endpoint(given: str) -> str:
    """The whole address of a collector's traces; InputError where it is none."""
    if not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", given, re.IGNORECASE):
        raise InputError(f"--traces {given}", allowed="an OTLP/HTTP collector, such as http://127.0.0.1:4318")
    bare = given.rstrip("/")
    return bare if re.search(r"://[^/]+/", bare) else f"{bare}/v1/traces"


class Traces:
    """Makes spans and sends them. Used from the event loop's thread."""

    def __init__(self, to: str) -> None:
        address = endpoint(to)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtra("opentelemetry-sdk", EXTRA) from error
        named = {"service.version": darkroom.__version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            named["service.name"] = "darkroom"
        self._api: Any = trace
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=address, timeout=EXPORT_S))
        )
        self._tracer = self._provider.get_tracer("darkroom.serve", darkroom.__version__)
        self._context = TraceContextTextMapPropagator()

    def request(self, method: str, headers: Mapping[str, str]) -> Any:
        """A request's span, begun now, below its client's if it names one."""
        parent = self._context.extract(dict(headers))
        kind = self._api.SpanKind.SERVER
        return self._tracer.start_span(method, parent, kind, {"http.request.method": method})

    def answered(self, span: Any, method: str, fields: Mapping[str, Any]) -> None:
        """End a request's span with what its line in the log says."""
        span.update_name(f"{method} {fields['route']}")
        attributes = {
            "http.route": fields["route"],
            "url.path": fields["path"],
            "http.response.status_code": fields["status"],
            "client.address": fields["client"],
            "darkroom.request_id": fields["request_id"],
            "darkroom.key": fields["key"],
            "darkroom.refused": fields["refused"],
            "darkroom.jobs": fields["jobs"],
        }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if fields["status"] >= 500:
            span.set_status(self._api.StatusCode.ERROR, fields["why"])
        span.end()

    def job(self, work: EngineJob, state: str | None, fields: Mapping[str, Any]) -> str:
        """The spans of a job that is over; its trace's id."""
        now_s = time.monotonic()
        parent = None if work.trace is None else self._api.set_span_in_context(work.trace)
        span = self._tracer.start_span(
            "job",
            parent,
            attributes={f"darkroom.{name}": value for name, value in fields.items() if value is not None},
            start_time=_epoch_ns(work.accepted_s, now_s),
        )
        if state == "failed":
            span.set_status(self._api.StatusCode.ERROR, fields.get("why"))
        within = self._api.set_span_in_context(span)
        begun_s = work.accepted_s
        for phase, seconds in work.phases().items():
            one = self._tracer.start_span(phase, within, start_time=_epoch_ns(begun_s, now_s))
            begun_s = min(now_s, begun_s + seconds)
            one.end(_epoch_ns(begun_s, now_s))
        span.end(_epoch_ns(now_s, now_s))
        return trace_id(span)

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="darkroom-traces", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def trace_id(span: Any) -> str:
    """As logs and collectors write it."""
    return f"{span.get_span_context().trace_id:032x}"


def _epoch_ns(at_s: float, now_s: float) -> int:
    """A time of the monotonic clock, in nanoseconds since 1970."""
    return time.time_ns() - round((now_s - at_s) * 1e9)
