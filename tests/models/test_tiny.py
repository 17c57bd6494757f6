"""A tiny autoencoder in the VAE's place: opened from the repository's layout, trained and drawn in, saved."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from darkroom import models, sample
from darkroom.errors import ModelError
from darkroom.models.tiny import TinyAutoencoder
from darkroom.prepare.columns import VaeEncoder

CONFIG = {
    "width": 8,
    "latent_channels": 6,
    "downscale": 4,
    "blocks_per_stage_encoder": [1, 1, 1],
    "blocks_per_stage_decoder": [1, 1, 1],
    "midblock_groupnorm_pool": True,
    "pool_channels": 16,
    "pool_groups": 4,
}
NOTED = {"model": "TAEF2", "dtype": "float16", "keys": "encoder.<index>", "pixel_range": [0, 1]}


@pytest.fixture
def folder(tmp_path):
    """As the repository has it: tensors by layer number in half precision, a note of the architecture."""
    (tmp_path / "tiny" / "vae").mkdir(parents=True)
    torch.manual_seed(0)
    weights = {name: value.half() for name, value in TinyAutoencoder(**CONFIG).state_dict().items()}
    save_file(weights, tmp_path / "tiny" / "vae" / "taef2.safetensors")
    (tmp_path / "tiny" / "vae" / "config.json").write_text(json.dumps(CONFIG | NOTED))
    return tmp_path / "tiny"


def test_names_of_tensors_are_those_of_the_repository(folder):
    names = load_file(folder / "vae" / "taef2.safetensors").keys()
    assert {"encoder.0.weight", "decoder.1.weight"} <= names
    assert all(name.split(".")[1].isdigit() for name in names)


def test_a_model_is_drawn_in_its_latents_and_kept_to_the_bit(folder, tmp_path):
    vae = models.load(folder, parts=("vae",)).vae
    assert isinstance(vae, TinyAutoencoder)
    unet = {"in_channels": 6, "out_channels": 6, "sample_size": 8}
    model = models.create("tiny", overrides={"unet": unet})
    model.vae = vae
    assert (model.latent_channels, model.vae_factor) == (6, 4)
    models.save(model, tmp_path / "kept")
    index = json.loads((tmp_path / "kept" / "model_index.json").read_text())
    assert index["vae"] == ["darkroom", "TinyAutoencoder"]
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    opened = models.load(tmp_path / "kept")
    for name, value in vae.state_dict().items():
        assert torch.equal(opened.vae.state_dict()[name], value)
    drawn = [sample.generate(one, "a dog", size=(32, 32), steps=2)[0].image for one in (model, opened)]
    assert drawn[0].size == (32, 32)
    assert drawn[0].tobytes() == drawn[1].tobytes()
    with torch.no_grad():
        opened.vae.decoder[1].bias += 1
    other = sample.generate(opened, "a dog", size=(32, 32), steps=2)[0].image
    assert other.tobytes() != drawn[0].tobytes()


def test_latents_are_those_of_the_encoder_and_have_no_spread(folder):
    vae = models.load(folder, parts=("vae",)).vae
    pixels = torch.randint(0, 256, (2, 3, 16, 24), dtype=torch.uint8)
    moments = VaeEncoder(vae).encode(pixels)
    assert moments.shape == (2, 2, 6, 4, 6)
    with torch.no_grad():
        wanted = vae.encoder(pixels.float() / 127.5 - 1)
    torch.testing.assert_close(moments[:, 0], wanted.half())
    assert moments[:, 1].abs().max() < 1e-5
    assert moments[:, 0].std() > 1e-3


def test_stages_that_do_not_make_the_downscale_are_refused(folder):
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps(CONFIG | NOTED | {"downscale": 8}))
    with pytest.raises(ModelError, match="stages do not make a latent of 8 pixels"):
        models.load(folder, parts=("vae",))


def test_weights_of_another_shape_are_refused(folder):
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps(CONFIG | NOTED | {"width": 16}))
    with pytest.raises(ModelError):
        models.load(folder, parts=("vae",))
