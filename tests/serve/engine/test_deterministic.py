"""With calls of few shapes a picture has the same bits whoever shares them."""

from __future__ import annotations

import random
import time

import pytest
import torch

from darkroom import models
from darkroom.errors import InputError
from darkroom.serve.engine.fixed_shapes import (
    FixedDecode,
    FixedRows,
    FixedShapes,
    _Seen,
    parts_of,
    steady,
)
from darkroom.serve.engine.tickets import EngineJob
from serve.conftest import SMALL, difference
from serve.engine.test_engine import Running, mixed_request

MOST = 20
ROWS = FixedRows(8, 64 * 64, tries=True)
"""As a small model is served."""


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


def drawn_with_some_given_up(running: Running, requests, draw: random.Random) -> list[EngineJob]:
    """Their works, done; meanwhile others come and are given up at random times."""
    works, given_up = [], []
    for i, request in enumerate(requests):
        works.append(running.work(str(i), request, key=f"key{i % 3}"))
        if draw.random() < 0.2:
            given_up.append(running.work(f"given up {i}", mixed_request(draw, i)))
        time.sleep(draw.choice([0, 0, 0.004, 0.02]))
        if given_up and draw.random() < 0.5:
            running.engine.drop(given_up.pop(0))
    running.waiting.wait_for({work.uid for work in works})
    assert all(running.waiting.over[work.uid] is None for work in works)
    return works


def in_company_and_alone(model, folder, count: int, seed: int, **more) -> list[tuple[int, bool]]:
    draw = random.Random(seed)
    requests = [mixed_request(draw, i) for i in range(count)]
    with Running(model, folder=folder, **more) as running:
        together = drawn_with_some_given_up(running, requests, draw)
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


def a_unet(seen: list[int], apart: tuple[int, ...] = ()):
    """A U-Net that notes the rows of its calls; with some numbers of rows it sums otherwise."""

    def unet(x, t, text, added):
        assert len(x) == len(t) == len(text) == len(added.get("adapter_slots", x))
        seen.append(len(x))
        return x * 2 + (1e-6 if len(x) in apart else 0)

    return unet


def called(unet, count: int, **added):
    x = torch.arange(float(count))[:, None, None, None]
    out = unet(x, torch.zeros(count), torch.zeros(count, 1, 1), added)
    return out.flatten().tolist()


def test_calls_have_the_defined_number_of_rows():
    seen = []
    unet = FixedShapes(a_unet(seen), FixedRows(4))
    assert called(unet, 5) == [0, 2, 4, 6, 8]
    assert seen == [4, 4]


def test_numbers_of_rows_with_the_same_bits_are_used_and_no_others():
    seen = []
    unet = FixedShapes(a_unet(seen, apart=(1, 2, 3, 12)), FixedRows(8, 8, tries=True))
    called(unet, 1)
    seen.clear()
    assert called(unet, 3) == [0, 2, 4]
    assert called(unet, 12) == [2.0 * i for i in range(12)]
    assert called(unet, 16) == [2.0 * i for i in range(16)]
    assert seen == [4, 13, 16]


def test_rows_with_adapters_come_in_the_defined_number_with_places_for_as_many_as_a_row_may_have():
    seen, widths = [], []

    def unet(x, t, text, added):
        widths.append([value.shape[1] for value in added.values()])
        return a_unet(seen)(x, t, text, added)

    told = {"adapter_slots": torch.ones(3, 1, dtype=torch.int64), "adapter_weights": torch.ones(3, 1)}
    called(FixedShapes(unet, FixedRows(8, 8, tries=True), 2), 3, **told)
    assert seen == [8]
    assert widths == [[2, 2]]


def test_a_batch_is_laid_out_once_for_all_its_steps():
    texts = []

    def unet(x, t, text, added):
        texts.append(text)
        return x

    call, text = FixedShapes(unet, FixedRows(4)), torch.zeros(5, 1, 1)
    x = torch.zeros(5, 1, 1, 1)
    for _ in range(2):
        call(x, torch.zeros(5), text, {})
    assert [one is other for one, other in zip(texts[:2], texts[2:], strict=True)] == [True, True]
    call(x, torch.zeros(5), text + 1, {})
    assert texts[4][0, 0, 0] == 1


@pytest.mark.parametrize(
    ("count", "allowed", "parts"),
    [
        (16, {8}, (8, 8)),
        (3, {8}, (8,)),
        (13, {4, 6, 8, 12}, (8, 6)),
        (20, {4, 8, 12}, (12, 8)),
        (2, {1}, (1, 1)),
    ],
)
def test_rows_are_made_in_the_cheapest_calls(count, allowed, parts):
    assert parts_of(count, frozenset(allowed)) == parts


def test_steady_layers_do_the_same_for_few_rows_as_for_many():
    draw = torch.Generator().manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(32, 128), torch.nn.Conv2d(32, 32, 3, padding=1)])
    lines, pictures = torch.randn(20, 32, generator=draw), torch.randn(20, 32, 8, 8, generator=draw)
    plain = [layer(x) for layer, x in zip(layers, (lines, pictures), strict=True)]
    names = list(layers.state_dict())
    steady(layers)
    assert list(layers.state_dict()) == names
    linear, conv = layers
    assert torch.allclose(linear(lines), plain[0], atol=1e-5)
    assert torch.allclose(conv(pictures), plain[1], atol=1e-5)
    assert torch.equal(linear(lines[:2]), linear(lines)[:2])
    assert torch.equal(linear(lines[:2, None]), linear(lines)[:2, None])
    assert torch.equal(conv(pictures[:8]), conv(pictures)[:8])


class Kernels(torch.nn.Module):
    """A decoder that sums otherwise with some numbers of pictures; it notes how many each call had."""

    def __init__(self, apart: tuple[int, ...]) -> None:
        super().__init__()
        self.apart, self.calls = apart, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        return x + (1e-6 if len(x) in self.apart else 0)


@pytest.mark.parametrize(
    ("apart", "count", "side", "calls"),
    [
        ((), 5, 8, [5]),
        ((1,), 1, 8, [2]),  # filled up: alone it would differ
        ((1, 3, 5, 7), 7, 8, [6, 2]),  # where the last is filled up as well
        ((), 3, 32, [1, 1, 1]),
    ],
)
def test_small_pictures_are_decoded_in_numbers_with_the_same_bits(apart, count, side, calls):
    kernels = Kernels(apart)
    decode = FixedDecode(lambda x: list(kernels(x)), kernels)
    x = torch.randn(count, 4, side, side, generator=torch.Generator().manual_seed(0))
    decode(x)
    kernels.calls.clear()
    images = decode(x)
    assert kernels.calls == calls
    assert len(images) == count
    assert all(torch.equal(image, one) for image, one in zip(images, x, strict=True))


def test_in_16_bits_one_picture_alone_is_no_proof():
    """It has few numbers, which were all the same by chance; a picture then was 1/255 off beside others."""
    kernels = Kernels(())
    decode = FixedDecode(lambda x: list(kernels(x.to(torch.bfloat16))), kernels)
    decode(torch.zeros(1, 4, 4, 4))
    kernels.calls.clear()
    decode(torch.zeros(1, 4, 4, 4))
    assert kernels.calls == [2]


@pytest.mark.parametrize(("dtype", "trials"), [(torch.float32, 1), (torch.bfloat16, 8)])
def test_in_16_bits_many_numbers_are_compared(dtype, trials):
    calls = []
    seen = _Seen()

    def plain(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x + (1 if len(calls) == trials else 0)

    x = torch.randn(16, 4, 16, 16).to(dtype)
    assert torch.equal(seen.call(plain, lambda x: x, x), x)
    assert len(calls) == trials, "the last one showed that they differ"
    assert torch.equal(seen.call(plain, lambda x: x, x), x)
    assert len(calls) == trials


def test_without_a_decoder_to_compare_pictures_are_decoded_alone():
    calls = []
    FixedDecode(lambda x: [calls.append(len(x))], None)(torch.zeros(3, 4, 8, 8))
    other = Kernels(())
    FixedDecode(lambda x: [calls.append(len(x))] * len(x), other)(torch.zeros(1, 4, 64, 64))
    assert (calls, other.calls) == ([1, 1, 1, 1], [])


@pytest.mark.parametrize(("apart", "expected"), [(False, [16]), (True, [8, 8])])
def test_a_layer_is_called_plainly_where_that_gives_the_same_bits(monkeypatch, apart, expected):
    """Convolutions of 16 pictures had been taken in parts even where the whole gives the same bits."""
    sizes, plain = [], torch.nn.Conv2d._conv_forward

    def watched(layer, x, weight, bias):
        sizes.append(len(x))
        return plain(layer, x, weight, bias) + (1e-6 if apart and len(x) > 12 else 0)

    monkeypatch.setattr(torch.nn.Conv2d, "_conv_forward", watched)
    layer = torch.nn.Conv2d(4, 4, 3)
    steady(layer)
    layer(torch.randn(16, 4, 8, 8))
    sizes.clear()
    assert layer(torch.randn(16, 4, 8, 8)).shape == (16, 4, 6, 6)
    assert sizes == expected


def test_large_pictures_have_calls_of_one_row():
    rows = FixedRows(8, 32 * 32)
    assert [rows.of(side * side) for side in (8, 16, 24, 32, 64)] == [8, 4, 2, 1, 1]


def test_what_keeps_work_between_steps_is_refused():
    def unet(*given):
        return given[0]

    unet.of_rows = lambda owners: unet
    with pytest.raises(InputError, match="--deterministic"):
        FixedShapes(unet, FixedRows(4))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_1000_mixes_have_the_bits_of_their_lone_runs(adapter_folder, dtype):
    model = models.create("tiny", seed=1, overrides=SMALL).to(dtype=dtype)
    found = in_company_and_alone(model, adapter_folder, 1000, 7, fixed_rows=ROWS)
    assert found == [(0, True)] * 1000
