"""Logs of a server: one line a request and one a job, as text or as JSON; and OpenTelemetry traces (extra
`otel`): a span a request, below it one a job, below that one a phase.

A line is a message and fields. A request's has its id (`X-Request-Id`, taken from the client or made here),
route, status, the key's name, never the key, and why it was refused; a job's has the ids of the job and of
the request that brought it, how it ended, the seconds of each phase, and the SHA-256 of each picture's file.
A request that is answered with files made for it, JPEG or WebP or upscaled, has theirs. So "who drew this
picture?" is a search for its hash.

The parent of a request's span is what its `traceparent` names (W3C Trace Context). A job outlives the request
that brought it: its spans are made when it is over, with the times that its phases had, and one that another
process accepted has a trace of its own.

Spans go to a collector over OTLP by HTTP, from a thread of their own; where it cannot be reached they are
dropped, and nobody waits. The SDK's variables hold, such as `OTEL_TRACES_SAMPLER` and `OTEL_SERVICE_NAME`.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import logging
import os
import re
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import darkroom
from darkroom.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from darkroom.serve.engine.tickets import EngineJob

FORMATS = ("text", "json")
OTHERS = ("uvicorn", "asyncio", "py.warnings", "mcp")
"""Further loggers of a server's process, whose warnings are to be lines as ours are."""
QUOTED = re.compile(r'[\s"=]')
"""What a field's text has in quotes."""
LEVELS = ("debug", "info", "warning", "error")
REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
LOG = logging.getLogger("darkroom.serve")


@dataclass
class RequestNotes:
    """What a request's line says of it besides method and status; handlers add to it while it is answered."""

    id: str
    jobs: list[str] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    """SHA-256 of picture files that were made for its answer."""
    again: str | None = None
    """What tells the request when it comes again after a refusal: the hash of its body."""
    refused: str | None = None
    reason: str | None = None
    trace: Any = None
    """Its OpenTelemetry span, where there are traces."""


NOTES: contextvars.ContextVar[RequestNotes | None] = contextvars.ContextVar("darkroom_request", default=None)
"""Of the request that is being answered; tasks that it starts see it too."""


def request_id(given: str | None) -> str:
    """The client's id for a request where it is one that a log may hold, else a new one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def refused(code: str, message: str) -> None:
    """Note why the request at hand is not served."""
    if (notes := NOTES.get()) is not None:
        notes.refused, notes.reason = code, message


def again(digest: str) -> str:
    """What tells the request at hand when it comes again: the hash of its body where that was taken, else
    the digest of what it asks for."""
    notes = NOTES.get()
    return digest if notes is None or notes.again is None else notes.again


def about(job: str) -> None:
    """Note a job that the request at hand made, or asked for once more."""
    if (notes := NOTES.get()) is not None and job not in notes.jobs:
        notes.jobs.append(job)


def sent(content: bytes) -> None:
    """Note a picture's file that was made for the answer to the request at hand."""
    if (notes := NOTES.get()) is not None:
        notes.hashes.append(hashlib.sha256(content).hexdigest())


def event(message: str, level: int = logging.INFO, **fields: Any) -> None:
    """One line; fields that are None are left out."""
    if LOG.isEnabledFor(level):
        fields_given = {name: value for name, value in fields.items() if value is not None}
        LOG.log(level, message, extra={"fields": fields_given})


class TextFormatter(logging.Formatter):
    """Time, level, message, and the fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """The line without its traceback. A message may quote a client: it begins no line of its own."""
        if not record.message.isprintable():
            record.message = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in record.message)
        fields: dict[str, Any] = getattr(record, "fields", {})
        line = super().formatMessage(record)
        return " ".join([line, *(f"{name}={_plain(value)}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Of `logging.Formatter`."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        record_fields: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            record_fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(record_fields, default=str)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(_plain(one) for one in value)
    if isinstance(value, dict):
        return ",".join(f"{name}:{_plain(one)}" for name, one in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not QUOTED.search(text)
    return text if plain else json.dumps(text)  # which also escapes what would steer a terminal


def set_up(form: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Have darkroom's loggers write to `stream` (stderr). InputError for a format or level there is not."""
    if form not in FORMATS:
        raise InputError(f"--log-format {form}", allowed=", ".join(FORMATS))
    if level not in LEVELS:
        raise InputError(f"--log-level {level}", allowed=", ".join(LEVELS))
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in OTHERS:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    logging.captureWarnings(True)
    logger = logging.getLogger("darkroom")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


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
