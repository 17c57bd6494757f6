"""Every route against generated requests: whatever comes, the server does not fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.conftest import Server

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


@pytest.fixture(scope="module")
def fuzzed(model_folder, adapter_folder, tmp_path_factory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("fuzzed") / "state"
    started = Server(model_folder, state, "--adapters", str(adapter_folder), "--rate", "100000")
    yield started.ready()
    started.kill()


@pytest.mark.slow
def test_no_route_answers_with_a_server_error(fuzzed, tmp_path):
    if not SCHEMATHESIS.exists():
        pytest.skip("schemathesis is not installed (darkroom[dev])")
    told = subprocess.run(
        [
            str(SCHEMATHESIS),
            "run",
            f"{fuzzed.url}/openapi.json",
            "--checks=not_a_server_error",
            "--max-examples=6",
            "--max-time=240",
            "--phases=examples,coverage,fuzzing",
            "--request-timeout=20",
            "--suppress-health-check=all",
            "--generation-database=none",
            "--seed=1",
            "--exclude-path-regex=/events$",
        ],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,
    )
    assert told.returncode == 0, told.stdout[-6000:]
    assert fuzzed.http.get("/ready").status_code == 200
    assert " 500 " not in fuzzed.log.read_text()
    metrics = fuzzed.http.get("/metrics").text
    failures = [line for line in metrics.splitlines() if 'status="5' in line and not line.endswith(" 0.0")]
    assert failures == []
