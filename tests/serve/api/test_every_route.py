"""Every route against generated requests: whatever comes, the server does not fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from darkroom.serve.api.guard import make_key
from darkroom.serve.api.shared import STATUSES
from needs import missing
from serve.api.conftest import on_vertex
from serve.conftest import Server

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


@pytest.fixture(scope="module")
def fuzzed(model_folder, adapter_folder, tmp_path_factory) -> Iterator[Server]:
    """A server with all its routes, those of Vertex too, and a key for all of them."""
    folder = tmp_path_factory.mktemp("fuzzed")
    key = make_key(folder / "keys", "fuzz")
    more = ("--adapters", str(adapter_folder), "--rate", "100000", "--api-key-file", str(folder / "keys"))
    started = on_vertex(model_folder, folder / "state", *more)
    started.http.headers["Authorization"] = f"Bearer {key}"
    yield started.ready()
    started.kill()


def server_errors(server: Server) -> dict[str, float]:
    """The counters of answers from 500 on (waiting for a server that still loads gives 503s too)."""
    lines = (line for line in server.http.get("/metrics").text.splitlines() if not line.startswith("#"))
    counted = (line.rsplit(" ", 1) for line in lines if "requests_total" in line and 'status="5' in line)
    return {name: float(value) for name, value in counted if 'status="504"' not in name}


EXPECTED = """[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""
"""504 says that a request's own `deadline_s` is over: of 5e-324 seconds, for example."""


@pytest.mark.nightly
def test_no_route_answers_with_a_server_error(fuzzed, tmp_path):
    if not SCHEMATHESIS.exists():
        missing("schemathesis is not installed: pip install '.[dev]'")
    paths = fuzzed.http.get("/openapi.json").json()["paths"]
    assert {"/predict", "/health", "/jobs/{job_id}/events"} <= set(paths)
    assert [code for code, status in STATUSES.items() if status == 504] == ["deadline"]
    (tmp_path / "schemathesis.toml").write_text(EXPECTED)
    before = server_errors(fuzzed)
    told = subprocess.run(
        [
            str(SCHEMATHESIS),
            f"--config-file={tmp_path / 'schemathesis.toml'}",
            "run",
            f"{fuzzed.url}/openapi.json",
            "--checks=not_a_server_error",
            "--max-examples=6",
            "--max-time=75",
            "--phases=examples,coverage,fuzzing",
            "--request-timeout=20",
            "--suppress-health-check=all",
            "--generation-database=none",
            "--seed=1",
            f"--header=Authorization: {fuzzed.http.headers['Authorization']}",
        ],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,
    )
    assert told.returncode == 0, told.stdout[-6000:]
    assert fuzzed.http.get("/ready").status_code == 200
    assert "status=500" not in fuzzed.log.read_text()
    assert server_errors(fuzzed) == before
