"""Encoders give diffusers' own numbers, and the same inline as stored."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch
from settings import RESOLUTION, tiny

from darkroom import models
from darkroom.data.loader import Loader, ReadSettings
from darkroom.data.order import Order
from darkroom.data.store import Store
from darkroom.errors import InputError, ModelError
from darkroom.models.model import Model
from darkroom.prepare.columns import (
    InlineEncoder,
    TextEncoder,
    VaeEncoder,
    latents_column,
    sample_latents,
    text_column,
)
from darkroom.prepare.job import prepare


def pixels(num: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, 3, 16, 16), generator=generator, dtype=torch.uint8)


def test_moments_are_the_vaes(model: Model) -> None:
    encoder = VaeEncoder(model.vae)
    with torch.no_grad():
        plain = model.vae.encode(pixels(3).float() / 127.5 - 1).latent_dist
    moments = encoder.encode(pixels(3))
    assert moments.shape == (3, 2, 4, 4, 4)
    assert (encoder.channels, encoder.factor) == (4, 4)
    assert torch.allclose(moments[:, 0].float(), plain.mean, atol=2e-3)
    assert torch.allclose(moments[:, 1].float(), plain.std, rtol=2e-3)
    assert not torch.allclose(
        moments[:, 0].float(), encoder.encode(pixels(3, seed=1))[:, 0].float(), atol=1e-2
    )


def test_sampled_latents_are_scaled_mean_plus_std_times_draw(model: Model) -> None:
    moments = torch.tensor([[[[[2.0]]], [[[0.5]]]]])
    draw = torch.full((1, 1, 1, 1), -3.0)
    assert sample_latents(moments, draw, models.LatentScaling(0.5)).item() == 0.25
    assert sample_latents(moments, None, models.LatentScaling(0.5)).item() == 1.0


def test_identity_is_of_weights_and_vocabulary(model: Model) -> None:
    assert VaeEncoder(model.vae).identity == VaeEncoder(tiny().vae).identity == models.identity(model.vae)
    assert VaeEncoder(model.vae, precision="bf16").identity == VaeEncoder(model.vae).identity
    assert VaeEncoder(tiny(seed=1).vae).identity != VaeEncoder(model.vae).identity
    text = TextEncoder(model.text_encoders, model.tokenizers)
    assert text.identity == TextEncoder(tiny().text_encoders, tiny().tokenizers).identity
    other = models.train_tokenizer(["entirely other words, quite different"] * 20, vocab_size=600)
    assert TextEncoder(model.text_encoders, [other]).identity != text.identity


def test_encoding_in_bf16_leaves_the_model_alone(model: Model) -> None:
    exact, rough = VaeEncoder(model.vae), VaeEncoder(model.vae, precision="bf16")
    assert next(model.vae.parameters()).dtype == torch.float32
    error = (rough.encode(pixels(4)) - exact.encode(pixels(4))).abs().float()
    assert 0 < error[:, 0].mean() < 0.05 * exact.encode(pixels(4))[:, 0].float().std()


@pytest.mark.parametrize("made", ["vae", "text"])
def test_fp16_on_a_cpu_is_refused(model: Model, made: str) -> None:
    makers = {
        "vae": lambda: VaeEncoder(model.vae, precision="fp16"),
        "text": lambda: TextEncoder(model.text_encoders, model.tokenizers, precision="fp16"),
    }
    with pytest.raises(InputError, match="fp16 on a CPU; allowed: float32, or bf16"):
        makers[made]()


def test_states_are_the_last_hidden_state(model: Model) -> None:
    text = TextEncoder(model.text_encoders, model.tokenizers)
    states, pooled = text.encode(["a red circle", ""])
    ids = model.tokenizers[0](
        ["a red circle", ""], padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        plain = model.text_encoders[0](ids)[0]
    assert pooled is None
    assert torch.allclose(states.float(), plain, atol=2e-3)
    assert not torch.allclose(states[0].float(), states[1].float(), atol=2e-2)
    empty = json.loads(text.empty())["text"]
    assert empty["shape"] == list(states.shape[1:])


def test_two_encoders_give_penultimate_layers_and_a_pooled_state(model: Model) -> None:
    """As SDXL's pipeline: hidden_states[-2] side by side, the second's projected pooled state."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(**{**model.text_encoders[0].config.to_dict(), "projection_dim": 24})
    torch.manual_seed(0)
    second = CLIPTextModelWithProjection(config).eval()
    text = TextEncoder([model.text_encoders[0], second], model.tokenizers * 2)
    states, pooled = text.encode(["a red circle"])
    ids = model.tokenizers[0](
        ["a red circle"], padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        one = model.text_encoders[0](ids, output_hidden_states=True).hidden_states[-2]
        two = second(ids, output_hidden_states=True)
    assert torch.allclose(states.float(), torch.cat([one, two.hidden_states[-2]], -1), atol=4e-3)
    assert pooled is not None
    assert torch.allclose(pooled.float(), two.text_embeds, atol=2e-3)
    assert set(json.loads(text.empty())) == {"text", "pooled"}
    with pytest.raises(ModelError, match="2 text encoders and 1 tokenizers"):
        TextEncoder([model.text_encoders[0], second], model.tokenizers)


def test_inline_encoding_gives_the_stored_numbers(store: Store, model: Model) -> None:
    """Latents, states, dropped captions and the loss of a small linear probe agree; another row's do not."""
    prepare(store, model, resolution=RESOLUTION, text=True, device="cpu", batch_rows=7)
    vae, text = VaeEncoder(model.vae), TextEncoder(model.text_encoders, model.tokenizers)
    order = Order(store.fragments, seed=0, global_batch=12)
    alike = {"draws": ("noise", "posterior"), "caption_dropout": 0.3, "latent_factor": vae.factor}
    stored = ReadSettings(
        latents=latents_column(store, RESOLUTION, vae.identity),
        text=text_column(store, text.identity),
        **alike,
    )
    inline = ReadSettings(pixels=RESOLUTION, caption=True, **alike)
    encode = InlineEncoder(vae, text)
    with Loader(store, order, read=stored) as one, Loader(store, order, read=inline) as other:
        for there, here in islice(zip(one, other, strict=True), 6):
            encode(here)
            assert 0 < int(there["dropped"].sum()) < 12
            assert torch.equal(there["dropped"], here["dropped"])
            assert torch.equal(there["noise"], here["noise"])
            assert torch.allclose(there["text"].float(), here["text"].float(), atol=2e-3)
            a, b = (sample_latents(x["moments"], x["posterior"], vae.scaling) for x in (there, here))
            assert torch.allclose(a, b, atol=2e-3 * float(a.abs().max()))
            probe = np.linspace(-1, 1, a[0].numel())
            losses = [((x.flatten(1).numpy() @ probe - 1) ** 2).mean() for x in (a, b)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-3)
            assert not torch.allclose(a, b.roll(1, 0), atol=1e-2)
