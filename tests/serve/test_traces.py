"""What a collector is sent: spans of requests, jobs and phases, in their client's trace."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from darkroom.errors import InputError
from darkroom.serve.logs import endpoint

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["queue", "text", "denoise", "decode", "write"]
BODY = {"prompt": "a secret garden", "steps": 3, "seed": 3}


class Collector:
    """Takes what an OTLP exporter posts, over real HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.bodies = b""
        taking = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                told = ExportTraceServiceRequest.FromString(body)
                taking.bodies += body
                for one in told.resource_spans:
                    taking.spans += [span for scope in one.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def named(self, name: str) -> Any:
        [found] = [span for span in self.spans if span.name == name]
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.http.shutdown()
    made.http.server_close()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind)
    return found


def test_a_real_server_sends_a_span_of_request_job_and_each_phase(serve, collector):
    server = serve("--traces", collector.url).ready()
    told = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "trace-17"}
    made = server.http.post("/jobs", json=BODY, headers=told).json()
    assert server.finished(made["id"])["state"] == "done"
    assert server.stop() == 0
    request, job = collector.named("POST /jobs"), collector.named("job")
    phases = [collector.named(phase) for phase in PHASES]
    assert request.trace_id.hex() == TRACE
    assert request.parent_span_id.hex() == PARENT
    assert attributes(request)["http.response.status_code"] == 202
    assert attributes(request)["darkroom.request_id"] == "trace-17"
    assert job.parent_span_id == request.span_id
    assert {span.parent_span_id for span in phases} == {job.span_id}
    assert {span.trace_id.hex() for span in [job, *phases]} == {TRACE}
    assert attributes(job)["darkroom.state"] == "done"
    ends = [job.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert ends == sorted(ends)
    starts = [span.start_time_unix_nano for span in phases]
    assert all(abs(start - end) < 1e6 for start, end in zip(starts, ends, strict=False)), (
        "one after the other"
    )
    assert abs(ends[-1] - job.end_time_unix_nano) < 1e8
    assert not [span for span in collector.spans if "ready" in span.name], "probes have none"
    assert b"secret" not in collector.bodies, "prompts are nobody else's"
    lines = [line for line in server.log.read_text().splitlines() if "request_id=trace-17" in line]
    assert len(lines) == 2
    assert all(f"trace_id={TRACE}" in line for line in lines)


def test_a_refusal_has_a_span_and_a_failed_job_says_so(run_http, collector):
    async def scenario(core, http):
        await http.post("/jobs", json={**BODY, "steps": 999}, headers={"traceparent": "00-nonsense"})
        await http.put("/jobs/late", json={**BODY, "steps": 150, "num": 8, "deadline_s": 0.001})
        await http.get("/jobs/late?wait_s=30")

    run_http(scenario, traces=collector.url)
    refused, job = collector.named("POST /jobs"), collector.named("job")
    assert attributes(refused)["darkroom.refused"] == "over_limit"
    assert refused.parent_span_id == b""
    assert (job.status.code, attributes(job)["darkroom.error"]) == (2, "deadline")


def test_without_a_collector_pictures_are_made_all_the_same(run_http):
    async def scenario(core, http):
        made = (await http.post("/jobs", json=BODY)).json()
        return (await http.get(f"/jobs/{made['id']}?wait_s=30")).json()["state"]

    assert run_http(scenario, traces="http://127.0.0.1:1") == "done"


def test_addresses_of_collectors_are_checked():
    assert endpoint("http://there:4318") == "http://there:4318/v1/traces"
    assert endpoint("http://there:4318/") == "http://there:4318/v1/traces"
    assert endpoint("https://there/otlp/traces") == "https://there/otlp/traces"
    for wrong in ("there:4318", "grpc://there", "http://", "http://a b"):
        with pytest.raises(InputError, match="--traces"):
            endpoint(wrong)
