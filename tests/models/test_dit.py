"""The diffusion transformer: any size, rows that do not depend on each other, saved and opened again."""

from __future__ import annotations

import json

import pytest
import torch

from darkroom import models
from darkroom.errors import InputError, ModelError
from darkroom.models.dit import DiT, patches, pictures, put_back, taken


def stirred(model=None):
    """A transformer whose gates are open: a fresh one answers zero to everything."""
    network = (model or models.create("tiny-dit", seed=3, parts=("unet",))).unet
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in network.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=draw))
    return network


def asked(rows=3, height=8, width=12, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, height, width, generator=draw)
    text = torch.randn(rows, 7, 64, generator=draw)
    return x, torch.linspace(40.0, 900.0, rows), text


def test_patches_are_taken_apart_and_put_together_again():
    x = torch.arange(2 * 4 * 6 * 8.0).view(2, 4, 6, 8)
    tokens = patches(x, 2)
    assert tokens.shape == (2, 12, 16)
    assert torch.equal(tokens[0, 1], x[0, :, :2, 2:4].flatten())  # row by row
    assert torch.equal(pictures(tokens, 3, 4, 2), x)


def test_a_fresh_one_answers_zero_and_learns():
    network = models.create("tiny-dit", parts=("unet",)).unet
    x, t, text = asked()
    out = network(x, t, text, return_dict=False)[0]
    assert out.shape == x.shape
    assert not out.any()
    (out - x).square().mean().backward()
    assert network.patch_out.weight.grad.abs().max() > 0


@pytest.mark.parametrize("sides", [(8, 8), (6, 14), (2, 4), (32, 20)])
def test_any_latents_go_through_and_rows_are_alone(sides):
    network = stirred()
    x, t, text = asked(3, *sides)
    with torch.no_grad():
        together = network(x, t, text, return_dict=False)[0]
        alone = torch.cat([network(x[i : i + 1], t[i], text[i : i + 1]).sample for i in range(3)])
        other = network(x, t, text.roll(1, 0), return_dict=False)[0]
        later = network(x, t + 60, text, return_dict=False)[0]
    assert together.shape == x.shape
    assert torch.allclose(together, alone, atol=1e-5)
    assert (together - other).abs().max() > 1e-3  # the text counts
    assert (together - later).abs().max() > 1e-3  # so does the timestep


def test_places_count():
    network = stirred()
    x, t, text = asked(1, 8, 8)
    with torch.no_grad():
        out = network(x, t, text).sample
        mirrored = network(x.roll(2, -1), t, text).sample.roll(-2, -1)
    assert (out - mirrored).abs().max() > 1e-3


def test_sides_that_are_no_patches_are_refused():
    with pytest.raises(ValueError, match="multiples of 2"):
        stirred()(*asked(1, 7, 8))


def test_routed_tokens_pass_blocks_by():
    network = stirred()
    x, t, text = asked(2, 8, 8)
    keep = torch.tensor([[0, 3, 5, 9], [1, 2, 8, 15]])
    everything = torch.arange(16).expand(2, -1)
    with torch.no_grad():
        plain = network(x, t, text).sample
        all_kept = network(x, t, text, keep_BK=everything, route=(1, 3)).sample
        routed, tapped = network(x, t, text, keep_BK=keep, route=(1, 4), tap=2, return_dict=False)
    assert torch.allclose(plain, all_kept, atol=1e-6)
    assert tapped.shape == (2, 4, 64)
    assert (plain - routed).abs().max() > 1e-3
    tokens = torch.randn(2, 16, 3)
    assert torch.equal(put_back(tokens, keep, taken(tokens, keep)), tokens)


def test_checkpointing_gives_the_same_gradients():
    found = []
    for checkpointed in (False, True):
        network = stirred().train()
        if checkpointed:
            network.enable_gradient_checkpointing()
        x, t, text = asked()
        network(x, t, text).sample.square().mean().backward()
        found.append(network.blocks[0].attn1.to_q.weight.grad)
    assert torch.allclose(*found, atol=1e-7)
    assert found[0].abs().max() > 0


def test_a_folder_is_written_and_opened(tmp_path):
    model = models.create("tiny-dit", seed=4)
    stirred(model)
    models.save(model, tmp_path / "model")
    folder = tmp_path / "model"
    assert sorted(p.name for p in (folder / "transformer").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    assert json.loads((folder / "model_index.json").read_text())["transformer"] == ["darkroom", "DiT"]
    again = models.load(folder)
    assert isinstance(again.unet, DiT)
    assert again.family == "tiny-dit"
    assert (again.size_unit, again.sample_size, again.prediction) == (8, 32, "flow_prediction")
    assert models.identity(again.unet) == models.identity(model.unet)
    assert models.identity(again.unet) != models.identity(models.create("tiny-dit").unet)
    assert models.describe(folder)["denoiser"] == "transformer: DiT"
    with pytest.raises(InputError, match="a single file with a diffusion transformer"):
        models.export_model(folder, tmp_path / "one.safetensors", single_file=True)


def test_diffusers_opens_the_scheduler_and_the_vae(tmp_path):
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

    models.save(models.create("tiny-dit", seed=4), tmp_path / "model")
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "model", subfolder="scheduler")
    assert scheduler.config.shift == 1.0
    assert AutoencoderKL.from_pretrained(tmp_path / "model", subfolder="vae").config.latent_channels == 4


def test_another_transformer_is_refused(tmp_path):
    models.save(models.create("tiny-dit"), tmp_path / "model")
    file = tmp_path / "model" / "transformer" / "config.json"
    file.write_text(file.read_text().replace('"DiT"', '"FluxTransformer2DModel"'))
    with pytest.raises(ModelError, match="FluxTransformer2DModel"):
        models.load(tmp_path / "model")


def test_the_full_size_has_this_many_parameters():
    model = models.create("dit", parts=("unet",), device="meta")
    assert model.num_parameters["unet"] == pytest.approx(279e6, rel=0.01)


def test_its_schedule_is_refused_where_betas_are_read():
    """It would pass for epsilon on diffusers' default betas, and train or sample wrongly without a word."""
    from darkroom.sample.schedule import Schedule

    with pytest.raises(InputError, match="rectified flow has no betas"):
        Schedule.from_config(models.create("tiny-dit", parts=("tokenizer",)).scheduler)
    assert Schedule.from_config(models.create("tiny", parts=("tokenizer",)).scheduler).prediction == "epsilon"
