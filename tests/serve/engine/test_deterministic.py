"""With calls of one fixed shape a picture has the same bits whoever shares them."""

from __future__ import annotations

import random

import pytest
import torch

from darkroom import models
from darkroom.errors import InputError
from darkroom.serve.engine.batch import fixed
from darkroom.serve.engine.tickets import EngineJob
from serve.conftest import SMALL, difference
from serve.engine.test_engine import Running, drawn_together, mixed_request

MOST = 32
ROWS = 4


def drawn_alone(running: Running, requests) -> list[EngineJob]:
    """Their works, one after the other."""
    works = []
    for i, request in enumerate(requests):
        works.append(running.work(f"alone-{i}", request))
        running.waiting.wait(i + 1)
    return works


def apart(one: EngineJob, other: EngineJob) -> tuple[int, bool]:
    """Their pictures' largest difference, and whether their latents have the same bits."""
    pair = one.pictures[0], other.pictures[0]
    return difference(pair[0].image, pair[1].image), torch.equal(pair[0].latents, pair[1].latents)


def in_company_and_alone(model, folder, count: int, seed: int, **more) -> list[tuple[int, bool]]:
    draw = random.Random(seed)
    requests = [mixed_request(draw, i) for i in range(count)]
    with Running(model, folder=folder, **more) as running:
        together = drawn_together(running, requests, draw)
    with Running(model, folder=folder, **more) as running:
        single = drawn_alone(running, requests)
    return [apart(one, other) for one, other in zip(together, single, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixes_have_the_bits_of_their_lone_runs(adapter_folder, dtype):
    model = models.create("tiny", seed=1, overrides=SMALL).to(dtype=dtype)
    found = in_company_and_alone(model, adapter_folder, MOST, 3, fixed_rows=ROWS)
    assert found == [(0, True)] * MOST


def test_without_fixed_shapes_some_bits_differ(adapter_folder):
    """The control."""
    model = models.create("tiny", seed=1, overrides=SMALL)
    found = in_company_and_alone(model, adapter_folder, MOST, 3)
    assert (0, False) in found or any(apart_by for apart_by, _ in found)


def test_each_call_has_the_same_shape_and_rows_keep_their_places():
    seen = []

    def unet(x, t, text, added):
        seen.append((len(x), len(t), len(text), *(tuple(value.shape) for value in added.values())))
        return x * 2

    x = torch.arange(5.0)[:, None, None, None]
    out = fixed(unet, 4, 2)(x, torch.zeros(5), torch.zeros(5, 1, 1), {})
    assert out.flatten().tolist() == [0, 2, 4, 6, 8]
    assert seen == [(4, 4, 4, (4, 2), (4, 2))] * 2


def test_what_keeps_work_between_steps_is_refused():
    def unet(*given):
        return given[0]

    unet.of_rows = lambda owners: unet
    with pytest.raises(InputError, match="--deterministic"):
        fixed(unet, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_1000_mixes_have_the_bits_of_their_lone_runs(adapter_folder, dtype):
    model = models.create("tiny", seed=1, overrides=SMALL).to(dtype=dtype)
    found = in_company_and_alone(model, adapter_folder, 1000, 7, fixed_rows=ROWS)
    assert found == [(0, True)] * 1000
