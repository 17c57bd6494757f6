"""Scaling of latents: as diffusers has it with a shift, with means and deviations, and refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FluxImg2ImgPipeline

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models.model import LatentScaling
from darkroom.sample.pictures import decode, encode

VAE = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
SHIFTED = {"scaling_factor": 1.5, "shift_factor": 0.375}
MEANS = {"scaling_factor": 0.5, "latents_mean": [0.5, -1.0, 0.25, 2.0], "latents_std": [2.0, 0.5, 1.0, 4.0]}
PLAIN = {"scaling_factor": 1.5}


def vae_with(**config: Any) -> Any:
    return models.create("tiny", seed=2, parts=("vae",), overrides={"vae": VAE | config}).vae


def pixels() -> torch.Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def theirs(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """What diffusers' pipelines hand to the VAE: SD 3's with a shift, SDXL's with means and deviations."""
    config = vae.config
    if config.latents_mean is not None:
        mean, std = (torch.tensor(config[key]).view(1, 4, 1, 1) for key in ("latents_mean", "latents_std"))
        return latents * std / config.scaling_factor + mean
    return latents / config.scaling_factor + (config.shift_factor or 0)


def test_a_shift_is_taken_as_diffusers_takes_it() -> None:
    vae = vae_with(**SHIFTED)
    pipe = SimpleNamespace(vae=vae)
    with torch.no_grad():
        draw = [torch.Generator().manual_seed(5)]
        expected = FluxImg2ImgPipeline._encode_vae_image(pipe, pixels()[:1], draw)
        noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    mean, std = encode(vae, pixels()[:1])
    assert torch.allclose(mean + std * noise, expected, atol=1e-5)
    plain_mean, plain_std = encode(vae_with(**PLAIN), pixels()[:1])
    assert torch.allclose(plain_mean - mean, torch.full_like(mean, 1.5 * 0.375), atol=1e-5)
    assert torch.equal(plain_std, std)
    assert not torch.allclose(plain_mean + plain_std * noise, expected, atol=0.1)


def test_means_and_deviations_are_taken_channel_by_channel() -> None:
    vae = vae_with(**MEANS)
    with torch.no_grad():
        posterior = vae.encode(pixels()).latent_dist
    mean, std = encode(vae, pixels())
    shift, spread = (torch.tensor(MEANS[key]).view(1, 4, 1, 1) for key in ("latents_mean", "latents_std"))
    assert torch.allclose(mean, (posterior.mean - shift) * 0.5 / spread, atol=1e-5)
    assert torch.allclose(std, posterior.std * 0.5 / spread, atol=1e-5)
    assert not torch.allclose(mean, posterior.mean * 0.5, atol=0.1)


@pytest.mark.parametrize("config", [PLAIN, SHIFTED, MEANS], ids=["plain", "shift", "means"])
def test_decoding_hands_the_vae_what_diffusers_does_and_undoes_encoding(config: dict[str, Any]) -> None:
    vae = vae_with(**config)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = vae.decode(theirs(vae, latents)).sample
    seen: list[torch.Tensor] = []
    decode(vae, latents, decoder=lambda raw: seen.append(raw) or torch.zeros(len(raw), 3, 16, 16))
    assert torch.allclose(torch.cat(seen), theirs(vae, latents), atol=1e-6)
    for image, picture in zip(decode(vae, latents), expected, strict=True):
        wanted = ((picture / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
        assert (torch.tensor(list(image.tobytes())).view(16, 16, 3) - wanted.int()).abs().max() <= 1
    scaling = LatentScaling.of(vae)
    assert torch.allclose(scaling.seen(scaling.undone(latents)), latents, atol=1e-5)
    if config is not PLAIN:
        assert not torch.allclose(theirs(vae, latents), latents / config["scaling_factor"], atol=0.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"shift_factor": "a"}, "the VAE's shift_factor is 'a'; allowed: a number"),
        ({"scaling_factor": float("nan")}, "the VAE's scaling_factor is nan"),
        ({"scaling_factor": 0.0}, "scaling_factor is 0"),
        ({"latents_mean": [0.0] * 4}, "configuration has latents_mean; allowed: shift_factor alone"),
        (
            {**MEANS, "shift_factor": 0.1},
            "has shift_factor, latents_mean, latents_std; allowed:",
        ),
        ({**MEANS, "latents_std": [1.0] * 3}, "latents_std is .*; allowed: 4 numbers, one a channel"),
        ({**MEANS, "latents_std": [1.0, 1.0, 1.0, 0.0]}, "allowed: numbers above 0"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LatentScaling.of(vae_with(**config))


def test_a_saved_model_keeps_its_shift(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = models.create("tiny", seed=2, overrides={"vae": VAE | SHIFTED})
    models.save(model, tmp_path / "model")
    expected = LatentScaling(1.5, (0.375,))
    assert models.load(tmp_path / "model", parts=("vae",)).latent_scaling == expected != LatentScaling(1.5)
    with caplog.at_level("WARNING", logger="darkroom.models"):
        models.save_single_file(model, tmp_path / "one.safetensors")
    assert "keeps the VAE's shift in a note that only" in caplog.text
    assert models.load(tmp_path / "one.safetensors", parts=("vae",)).latent_scaling == expected


@pytest.mark.parametrize(("dtype", "upcast", "rounds"), [
    (torch.float16, True, True), (torch.float16, False, False), (torch.bfloat16, True, False),
])  # fmt: skip
def test_a_vae_that_overflows_in_fp16_decodes_in_float32_with_fp16s_own_rounding(
    dtype: torch.dtype, upcast: bool, rounds: bool
) -> None:
    """TF32 keeps as many bits as fp16, and a card is many times as fast with it."""
    vae = vae_with(force_upcast=upcast).to(dtype)
    seen: list[tuple[bool, bool, torch.dtype]] = []

    def look(*_: object) -> None:
        flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        seen.append((*flags, next(vae.parameters()).dtype))

    vae.decoder.register_forward_pre_hook(look)
    with torch.backends.cudnn.flags(allow_tf32=False):
        decode(vae, torch.zeros(1, 4, 4, 4))
        assert not torch.backends.cudnn.allow_tf32
    assert seen == [(rounds, rounds, torch.float32 if rounds else dtype)]
    assert next(vae.parameters()).dtype == dtype


def test_nothing_is_said_where_a_model_is_cast(caplog: pytest.LogCaptureFixture) -> None:
    model = models.create("tiny", parts=("vae", "unet"))
    model.to("cpu", torch.bfloat16)
    assert caplog.text == ""
    model.vae.to(torch.float32)  # type: ignore[union-attr]
    assert "float32" in caplog.text, "diffusers' own `to` does"
