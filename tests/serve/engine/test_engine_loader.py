"""How many rows a server's step holds: by memory, and on a CPU by how long a step takes."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cpu_graphs import Captured
from darkroom import count_cache, models, sample
from darkroom.sample.backends import open_backend
from darkroom.sample.backends.backend import torch_backend
from darkroom.sample.optimisations.applied import Applied
from darkroom.sample.optimisations.compiled import cuda_graphs
from darkroom.serve.engine import loader
from darkroom.serve.engine.batch import padded
from darkroom.serve.engine.loader import PAD_TO, first_job, rows_for_time


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


def test_sizes_that_are_declared_are_captured_before_the_first_job(monkeypatch) -> None:
    """Whatever rows share a step of one of them afterwards: with --pad no batch is another shape."""
    captured, model = Captured(monkeypatch), models.create("tiny")
    applied = Applied(model, torch.device("cpu"))
    cuda_graphs(applied, "")
    backend = torch_backend(applied)
    engine: Any = SimpleNamespace(unet=padded(backend.unet, PAD_TO), capacity=8)
    settings: Any = SimpleNamespace(warm_sizes=("32x32", "64x32"), pad=True)
    loader._warm_sizes(settings, model, backend, engine)
    assert len(captured.graphs) == len([1, 2, 4, 8]) + len([1, 2, 4])

    def step(size: tuple[int, int], *guidance: float) -> int:
        """Graphs that a step of such pictures captures."""
        before = len(captured.graphs)
        jobs = [first_job(model, backend, guidance=scale, size=size) for scale in guidance]
        sample.advance(engine.unet, [job.row(0) for job in jobs])
        return len(captured.graphs) - before

    assert [step((32, 32), *scales) for scales in ((1.0,), (5.0,), (1.0, 5.0), (5.0, 5.0, 5.0))] == [0] * 4
    assert step((64, 32), 5.0, 1.0) == 0
    assert step((32, 64), 5.0) == 1, "the control: a size that was not declared"


def test_a_row_is_counted_once_for_models_that_are_built_alike(tmp_path, monkeypatch):
    """Also by later processes. And anew for a wider one, another type, other code or an empty cache."""
    counted = []
    plain = loader._call_bytes
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "_call_bytes", lambda *how: counted.append(how[2]) or plain(*how))

    def rows_of(name, dtype=None, **unet):
        model = models.create("tiny", seed=len(counted), overrides={"unet": unet})
        models.save(model, tmp_path / name)
        opened = models.load(tmp_path / name, dtype=dtype)
        return loader.row_bytes(opened, open_backend("torch", opened, optimise="none"))

    first = rows_of("a")
    assert rows_of("b") == first
    assert counted == [2]
    wider = rows_of("c", block_out_channels=[64, 64])
    assert rows_of("d", dtype=torch.bfloat16) < first < wider
    assert counted == [2] * 3
    monkeypatch.setattr(count_cache, "_code", lambda: "changed")
    assert rows_of("e") == first
    assert counted == [2] * 4
    for file in (tmp_path / "cache" / "plans").iterdir():  # as a full disk may leave them
        file.write_text("{")
    assert rows_of("f") == first
    assert counted == [2] * 5
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder can be made here")
    assert rows_of("g") == first
    assert counted == [2] * 6
