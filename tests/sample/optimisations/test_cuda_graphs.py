"""cuda_graphs, with graphs that a CPU replays (`cpu_graphs`): the same pictures, one capture a size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cpu_graphs import Captured
from darkroom import sample
from darkroom.sample.backends.backend import Backend, torch_backend
from darkroom.sample.optimisations import compiled
from darkroom.sample.optimisations.applied import Applied
from darkroom.sample.optimisations.table import OPTIMISATIONS

SETTINGS = {"steps": 3, "guidance": 5.0}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    return Captured(monkeypatch)


def opened(model: Any, *names: str) -> Backend:
    applied = Applied(model, torch.device("cpu"))
    for name in (*names, "cuda_graphs"):
        OPTIMISATIONS[name].apply(applied, "")
    return torch_backend(applied)


def latents(model: Any, seed: int, backend: Backend | None = None, **more: Any) -> torch.Tensor:
    chosen = {"optimise": "none"} if backend is None else {"backend": backend}
    return sample.generate(model, "a red circle", seed=seed, **chosen, **SETTINGS, **more)[0].latents


@pytest.mark.parametrize("names", [(), ("channels_last", "fused_qkv")])
def test_replayed_steps_make_the_plain_pictures(tiny, captured, names):
    backend = opened(tiny, *names)
    for seed in (1, 2):
        torch.testing.assert_close(latents(tiny, seed, backend), latents(tiny, seed), atol=1e-4, rtol=1e-5)
    assert not torch.allclose(latents(tiny, 1), latents(tiny, 2), atol=0.1), "the control"
    [graph] = captured.graphs
    assert graph.replays == 2 * SETTINGS["steps"]
    assert captured.modes == {"thread_local"}, "another thread may allocate while one is captured"


def test_each_size_has_a_graph_up_to_a_bound(tiny, captured, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "MOST_SHAPES", 2)
    backend = opened(tiny)
    for size in ((32, 32), (64, 32), (32, 32), (32, 64), (32, 64)):
        plain = latents(tiny, 3, size=size)
        torch.testing.assert_close(latents(tiny, 3, backend, size=size), plain, atol=1e-4, rtol=1e-5)
    assert len(captured.graphs) == 2
    said = [record.getMessage() for record in caplog.records]
    assert said == ["2 sizes are kept; further ones run without"]


def test_what_cannot_be_captured_runs_as_it_is_and_says_so(tiny, captured, caplog):
    """A number that is read to the host in the middle of the U-Net."""
    read = []
    hook = tiny.unet.mid_block.register_forward_hook(lambda *given: read.append(float(given[-1].sum())))
    try:
        backend = opened(tiny)
        torch.testing.assert_close(latents(tiny, 1, backend), latents(tiny, 1), atol=1e-4, rtol=1e-5)
        latents(tiny, 2, backend)
    finally:
        hook.remove()
    assert len(read) > 2 * SETTINGS["steps"]
    assert captured.graphs == []
    said = [record.getMessage() for record in caplog.records]
    assert said == ["no CUDA graph for (2, 4, 8, 8): operation not permitted when stream is capturing"], (
        "once a size, in one line"
    )
