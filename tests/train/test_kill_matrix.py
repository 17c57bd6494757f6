"""A short round of benchmarks/kill_matrix.py: two ranks, killed at random, end with the same bits."""

from __future__ import annotations

from functools import partial

import pytest

import warm
from scripts import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("benchmarks/kill_matrix.py")


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
