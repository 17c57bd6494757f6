"""The simulation of failing machines against what can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scripts import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    module = load_script("benchmarks/cluster/failures.py")
    module.Assumed.model_rebuild(_types_namespace=vars(module))
    module.Finding.model_rebuild(_types_namespace=vars(module))
    return module


def test_waiting_costs_what_a_formula_says(script) -> None:
    """Stalls, and for each failure half an interval, the write, finding out, starting and the new machine."""
    given = script.Assumed(gpu_hours=2000)
    draws = np.random.default_rng(1)
    jobs = [script.simulate(1, 200.0, "wait", given, draws) for _ in range(400)]
    walls, failures, _ = (np.array(column) for column in zip(*jobs, strict=True))
    each_s = given.checkpoint_every_s / 2 + given.checkpoint_write_s + given.detect_s + given.start_s
    expected = (
        2000 / 8 * (1 + given.checkpoint_stall_s / given.checkpoint_every_s)
        + failures.mean() * (each_s + given.replace_s) / 3600
    )
    assert walls.mean() == pytest.approx(expected, rel=0.002)
    assert failures.mean() == pytest.approx(expected * 8 / 200, rel=0.1)
    assert walls.mean() != pytest.approx(2000 / 8, rel=0.01)


def test_a_seed_is_a_result_and_more_failures_cost_more(script) -> None:
    one, same = (script.finding(64, "spot-assumed", "elastic", script.Assumed(), 50, 3) for _ in range(2))
    assert one == same
    assert script.finding(64, "spot-assumed", "elastic", script.Assumed(), 50, 4) != one
    calm = script.finding(64, "llama-3", "elastic", script.Assumed(), 50, 3)
    spare = script.finding(64, "spot-assumed", "spare", script.Assumed(), 50, 3)
    assert calm.lost_h < spare.lost_h < one.lost_h


def test_machines_that_divide_the_batch(script) -> None:
    assert script.most_that_divide(63, 4096) == 32
    assert script.most_that_divide(63, 4032) == 63
    assert script.most_that_divide(0, 4096) == 0
