"""A short round of benchmarks/kill_matrix.py: two ranks, killed at random, end with the same bits."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest

import warm

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "kill_matrix.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kill_matrix", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_killed_ranks_end_with_the_same_bits(script, tmp_path, monkeypatch, mode):
    monkeypatch.setattr(script, "Popen", partial(warm.Popen, ranks=2))
    found = script.kill_matrix(
        tmp_path, rounds=2, ranks=2, mode=mode, steps=60, every=5, seed=3, within_s=1.0
    )
    assert found["failed_resumes"] == 0, found["log"]
    assert found["same_bits"]
    assert found["kills"] == 2
