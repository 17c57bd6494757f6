"""The lean blocks against diffusers' own, to the bit; and when a text's keys and values may be kept."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import Attention

from darkroom import models, sample
from darkroom.sample import optimisations
from darkroom.sample.optimisations.attention import LeanAttention, LeanBlock, LeanFeedForward, LeanResnet
from models.made_adapters import made


@pytest.fixture(scope="module")
def model():
    return models.create("tiny", seed=1)


def given(model, rows=2, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, 8, 8, generator=drawn)
    text = torch.randn(rows, 77, model.unet.config.cross_attention_dim, generator=drawn)
    return x, torch.full((rows,), 300.0), text


def calls(model, names="lean"):
    unet = sample.open_backend("torch", model, optimise=names).unet

    def call(x, t, text, added=None):
        with torch.no_grad():
            return unet(x, t, text, added or {})

    return call


@pytest.mark.parametrize("others", ["", ",fused_qkv", ",channels_last", ",bf16"])
def test_the_numbers_are_the_same_to_the_bit(model, others):
    plain, lean = calls(model, "none" + others), calls(model, "lean" + others)
    for rows in (1, 2, 20):  # of 20 rows nothing is kept
        x, t, text = given(model, rows)
        text = text.to(torch.bfloat16) if "bf16" in others else text
        assert torch.equal(plain(x, t, text), lean(x, t, text))
        assert torch.equal(plain(x + 1, t, text), lean(x + 1, t, text))
    assert not torch.equal(plain(x, t, text), lean(x, t, text + 0.1))


def test_every_block_is_replaced_and_the_model_stays(model):
    unet = optimisations.optimise(model, "lean").model.unet
    kinds = [type(module) for module in unet.modules()]
    assert {LeanAttention, LeanBlock, LeanFeedForward, LeanResnet} <= set(kinds)
    assert Attention not in kinds
    assert not any(kind.__name__.startswith("Lean") for kind in map(type, model.unet.modules()))
    assert unet.state_dict().keys() == model.unet.state_dict().keys()


def test_another_text_and_one_written_over_are_seen(model):
    plain, lean = calls(model, "none"), calls(model)
    x, t, text = given(model)
    first = lean(x, t, text)
    assert torch.equal(lean(x, t, text), first)
    text *= 2
    assert torch.equal(lean(x, t, text), plain(x, t, text))
    assert not torch.equal(lean(x, t, text), first)
    other = given(model, seed=1)[2]
    assert torch.equal(lean(x, t, other), plain(x, t, other))


def test_keys_and_values_are_made_once(model, monkeypatch):
    count = []
    inner = LeanAttention._keys_and_values
    monkeypatch.setattr(
        LeanAttention, "_keys_and_values", lambda self, text: count.append(1) or inner(self, text)
    )
    lean = calls(model)
    x, t, text = given(model)
    lean(x, t, text)
    layers = len(count)
    lean(x + 1, t, text)
    assert len(count) == layers > 0
    lean(x, t, text.clone())
    assert len(count) == 2 * layers
    lean(*given(model, rows=20))
    lean(*given(model, rows=20))
    assert len(count) == 4 * layers


def test_keys_and_values_are_kept_where_no_row_has_an_adapter_of_the_bank(monkeypatch):
    """A bank that nobody uses costs nothing; rows that use it are never given those of other rows."""
    both = [
        models.create("tiny", seed=1),
        optimisations.optimise(models.create("tiny", seed=1), "lean").model,
    ]
    banks = [models.Bank(one, slots=2, max_rank=4) for one in both]
    for bank in banks:
        bank.load(1, made(both[0], 1, where=lambda path: path.endswith(("attn2.to_k", "attn2.to_v"))))
    count = []
    inner = LeanAttention._keys_and_values
    monkeypatch.setattr(
        LeanAttention, "_keys_and_values", lambda self, text: count.append(1) or inner(self, text)
    )
    x, t, text = given(both[0])

    def call(at, *weights):
        rows = banks[at].lay_out([[(1, weight)] for weight in weights], "cpu").values() or (None, None)
        with torch.no_grad(), banks[at].applied("unet", *rows):
            return both[at].unet(x, t, text, return_dict=False)[0]

    first = call(1, 0, 0)
    layers = len(count)
    assert torch.equal(call(1, 0, 0), first)
    assert len(count) == layers > 0
    for weight in (0.5, 1.0):
        mixed = call(1, weight, 0)
        assert torch.equal(mixed, call(0, weight, 0))
        assert (mixed[0] - first[0]).abs().max() > 1e-3
        assert torch.allclose(mixed[1], first[1], atol=1e-5)
    assert len(count) == 3 * layers  # each layout of rows has its own
    for _ in range(2):
        assert torch.equal(call(1, 0, 0), first)
    assert len(count) == 4 * layers
