"""Offloading with main memory on both sides: the same pictures, weights put away after calls.

That no copy and no layer overtakes what it depends on is shown with streams that stand in for a card's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clocked_streams import CPU, Clocked, Stream
from darkroom import models, sample
from darkroom.hardware import accelerator
from darkroom.models.adapters.adapter import Adapter, Layer
from darkroom.models.adapters.bank import Bank
from darkroom.models.adapters.read import adaptable
from darkroom.sample.backends.backend import torch_backend
from darkroom.sample.optimisations import offload
from darkroom.sample.optimisations.applied import Applied
from darkroom.sample.optimisations.table import OPTIMISATIONS

SETTINGS = {"steps": 3, "guidance": 5.0, "seed": 2}


@pytest.fixture(autouse=True)
def all_move(monkeypatch):
    """The tiny model's layers are smaller than what is worth a copy."""
    monkeypatch.setattr(offload, "SMALL_BYTES", 2**10)


def offloaded(model: Any, *names: str) -> Applied:
    applied = Applied(model, CPU)
    for name in names:
        OPTIMISATIONS[name].apply(applied, "")
    return applied


@pytest.mark.parametrize("name", ["offload_model", "offload_sequential", "offload_group"])
def test_offloaded_models_make_the_same_pictures(tiny, name):
    plain = sample.generate(tiny, "a red circle", optimise="none", **SETTINGS)[0]
    applied = offloaded(tiny, name)
    made = sample.generate(tiny, "a red circle", backend=torch_backend(applied), **SETTINGS)[0]
    torch.testing.assert_close(made.latents, plain.latents, atol=1e-5, rtol=1e-5)
    other = sample.generate(tiny, "a red circle", backend=torch_backend(applied), **{**SETTINGS, "seed": 5})[
        0
    ]
    assert (other.latents - plain.latents).abs().max() > 0.1
    assert not any(hasattr(module, "_hf_hook") for module in tiny.unet.modules())


def dora_of(model: Any) -> Adapter:
    """Magnitudes that are told by the weights they are fitted to."""
    draw = torch.Generator().manual_seed(7)
    layers = {}
    for path, layer in adaptable(model).items():
        if path.endswith("to_q"):
            outputs, inputs = layer.weight.shape
            down, up = torch.randn(2, inputs, generator=draw), torch.randn(outputs, 2, generator=draw)
            layers[path] = Layer(down, up, 0.5, torch.rand(outputs, 1, generator=draw) + 0.5)
    return Adapter("soft", layers, kind="dora")


def assert_fitted_alike(model: Any, plain: Any) -> None:
    found, right = (Bank(one, slots=1, max_rank=2).stage(dora_of(plain)).changes for one in (model, plain))
    assert found.keys() == right.keys() != set()
    for path, change in found.items():
        for one, other in zip(change.tensors, right[path].tensors, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_a_dora_is_fitted_to_weights_at_home_while_the_part_is_on_the_device(tiny):
    """`meta` stands for a card: whatever is read there, or copied back from there, is lost."""
    applied = Applied(tiny, torch.device("meta"))
    OPTIMISATIONS["offload_model"].apply(applied, "")
    unet, vae = applied.model.unet, applied.model.vae
    unet._hf_hook.pre_forward(unet)
    assert {p.device.type for p in unet.parameters()} == {"meta"}, "the control: it has moved"
    setattr(unet, accelerator.COMPUTED_ON, CPU)
    for encoder in applied.model.text_encoders:
        setattr(encoder, accelerator.COMPUTED_ON, CPU)
    assert_fitted_alike(applied.model, tiny)
    vae._hf_hook.pre_forward(vae)
    for one, other in zip(unet.parameters(), tiny.unet.parameters(), strict=True):
        assert torch.equal(one, other)
    assert_fitted_alike(applied.model, tiny)


def test_a_dora_is_fitted_to_weights_in_files(tmp_path):
    models.save(models.create("tiny", seed=1).to(dtype=torch.float16), tmp_path / "model")
    applied = Applied(models.load(tmp_path / "model", dtype=None), CPU)
    OPTIMISATIONS["offload_mmap"].apply(applied, "")
    assert_fitted_alike(applied.model, models.load(tmp_path / "model"))


def drawn(model: Any, monkeypatch: Any, *more: str) -> tuple[Clocked, torch.Tensor]:
    """A picture's latents with layers sent ahead, watched."""
    clocked = Clocked()
    monkeypatch.setattr(accelerator, "new_stream", lambda device: clocked.copying)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: clocked.current)
    backend = torch_backend(offloaded(model, *more, "offload_group"))
    with clocked:
        [picture] = sample.generate(model, "a red circle", backend=backend, **SETTINGS)
    return clocked, picture.latents


@pytest.mark.parametrize("more", [(), ("lean",)])
def test_layers_sent_ahead_are_neither_read_early_nor_written_late(tiny, monkeypatch, more):
    """lean leaves out a text's keys and values from the second step on: the order of layers changes."""
    plain = sample.generate(tiny, "a red circle", optimise="none", **SETTINGS)[0]
    clocked, latents = drawn(tiny, monkeypatch, *more)
    assert clocked.wrong == []
    assert clocked.copies > 100
    torch.testing.assert_close(latents, plain.latents, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wait", ["wait_event", "wait_stream"])
def test_a_wait_that_is_left_out_is_seen(tiny, monkeypatch, wait):
    """The control."""
    monkeypatch.setattr(Stream, wait, lambda self, other: None)
    clocked, _ = drawn(tiny, monkeypatch)
    what = {"wait_event": "before its weights are there", "wait_stream": "still read"}[wait]
    assert any(what in one for one in clocked.wrong)


def test_large_weights_lie_in_main_memory_between_calls_alone(tiny):
    applied = offloaded(tiny, "offload_sequential")
    moved = [p for p in applied.model.unet.parameters() if p.nbytes >= offload.SMALL_BYTES]
    assert len(moved) > 20
    seen = []
    layer = applied.model.unet.conv_in
    before = layer.weight
    layer.register_forward_pre_hook(
        lambda *_: seen.append((layer.weight is before, accelerator.weight_of(layer) is before))
    )
    sample.generate(tiny, "a red circle", backend=torch_backend(applied), **SETTINGS)
    assert set(seen) == {(False, True)}, "what adapters are fitted to is no copy of a call"
    assert layer.weight is before
    total = sum(p.nbytes for p in tiny.unet.parameters())
    assert offload.staying_bytes(tiny.unet) == total - sum(p.nbytes for p in moved)


def test_a_layer_that_fails_has_its_weights_put_away(tiny):
    applied = offloaded(tiny, "offload_sequential")
    before = applied.model.unet.conv_in.weight
    with pytest.raises(RuntimeError, match="channels"):
        applied.model.unet.conv_in(torch.zeros(1, 9, 8, 8))
    assert applied.model.unet.conv_in.weight is before
