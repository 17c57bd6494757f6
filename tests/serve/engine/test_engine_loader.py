"""How many rows a server's step holds: by memory, and on a CPU by how long a step takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from darkroom.serve.engine import loader
from darkroom.serve.engine.loader import rows_for_time


def backend(kind: str) -> Any:
    return cast(Any, SimpleNamespace(device=torch.device(kind)))


@pytest.mark.parametrize(
    ("two_rows_s", "rows"),
    [(0.0, 16), (0.1, 16), (1.875, 16), (2.0, 15), (3.0, 10), (10.0, 3), (15.0, 2), (100.0, 2)],
)
def test_a_full_step_takes_fifteen_seconds_at_most(two_rows_s: float, rows: int) -> None:
    assert rows_for_time(backend("cpu"), 16, two_rows_s) == rows
    assert rows_for_time(backend("cuda"), 16, two_rows_s) == 16, "cards gain from each row"


def capacity_of(core: Any) -> Any:
    async def scenario() -> int:
        return int(core.engine.capacity)

    return scenario()


def test_a_server_on_a_cpu_times_a_step(run_core, monkeypatch) -> None:
    monkeypatch.setattr(loader, "rows_for_memory", lambda *_: 24)
    assert run_core(capacity_of, capacity=None) == 24, "the control: a tiny model's step takes milliseconds"
    monkeypatch.setattr(loader, "STEP_S", 1e-6)
    assert run_core(capacity_of, capacity=None) == 2
    assert run_core(capacity_of, capacity=24) == 24, "what is asked for is taken"
