"""Tasks: the autoencoder's losses in closed form, and batches turned into what the U-Net is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributions import Normal
from torch.distributions import kl_divergence as torchs_kl

from darkroom.recipe.rules import divisors
from darkroom.recipe.sections import TrainSettings
from darkroom.train.jobs import Pinned, TrainingSetup
from darkroom.train.memory import activation_bytes, choose_micro_batch
from darkroom.train.setup import make_job
from darkroom.train.tasks.diffusion import distance, edge_distance, kl_divergence
from train.conftest import MakeRecipe


def job_of(recipe_of: MakeRecipe, task: str, *overrides: str) -> TrainingSetup:
    return make_job(recipe_of(task, *overrides), Pinned(Path("nowhere")))


def first_inputs(job: TrainingSetup) -> dict[str, torch.Tensor]:
    with job.feed(0) as batches:
        return job.task.inputs(next(batches), job.device)


def test_kl_is_that_of_the_distributions() -> None:
    mean, logvar = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    expected = torchs_kl(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0)).sum(dim=(1, 2, 3))
    torch.testing.assert_close(kl_divergence(mean, logvar), expected)
    assert kl_divergence(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)).item() == 0


def test_distances_by_hand() -> None:
    out, pixels = torch.zeros(1, 1, 2, 2), torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]])
    assert distance(out, pixels, "l1").item() == 1.0
    assert distance(out, pixels, "mse").item() == 2.5
    assert edge_distance(out, pixels).item() == (1 + 3) / 2 + (0 + 2) / 2
    assert edge_distance(pixels + 0.7, pixels).item() == pytest.approx(0, abs=1e-6)  # a shift has no edges


def test_the_autoencoders_loss_is_its_parts(recipe_of: MakeRecipe) -> None:
    overrides = ("objective.autoencoder.kl_weight=0.5", "objective.autoencoder.edge_weight=0.25")
    job = job_of(recipe_of, "autoencoder", *overrides)
    inputs = first_inputs(job)
    assert inputs["pixels"].shape == (8, 3, 16, 16)
    assert (inputs["pixels"].min() >= -1, inputs["pixels"].max() <= 1) == (True, True)
    told = job.task.losses(inputs)
    plain = job_of(recipe_of, "autoencoder").task.losses(inputs)
    torch.testing.assert_close(told["reconstruction"], plain["reconstruction"])
    edges = told["loss"] - told["reconstruction"] - 0.5 * told["kl"]
    assert (edges > 0).all()
    torch.testing.assert_close(plain["loss"], plain["reconstruction"] + 1e-6 * plain["kl"])


def test_the_measured_scale_brings_latents_to_one(recipe_of: MakeRecipe) -> None:
    job = job_of(recipe_of, "autoencoder")
    scale = job.task.measure(job.calibration)["vae.scaling_factor"]
    vae = job.task.model.vae
    assert vae is not None
    pixels = torch.cat([some["pixels"] for some in job.calibration])
    assert len(pixels) == 44  # all there are
    draws = torch.cat([some["posterior"] for some in job.calibration])
    posterior = vae.encode(pixels).latent_dist
    latents = scale * (posterior.mean + posterior.std * draws)
    assert latents.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_dropped_captions_are_the_empty_caption(recipe_of: MakeRecipe) -> None:
    rates = {rate: job_of(recipe_of, "pretrain", f"data.caption_dropout={rate}") for rate in (0.0, 1.0)}
    with rates[1.0].feed(0) as batches:
        assert next(batches)["caption"] == [""] * 8
    none, every = (first_inputs(job)["text"] for job in rates.values())
    assert torch.equal(every[0], every[1])
    assert not torch.equal(none[0], none[1])
    assert not torch.equal(none[0], every[0])


def test_a_trained_text_encoder_gets_gradients_and_its_own_rate(recipe_of: MakeRecipe) -> None:
    overrides = ("model.train_text_encoder=true", "optim.text_encoder_lr=1e-5")
    job = job_of(recipe_of, "pretrain", *overrides)
    assert {group["peak_lr"] for group in job.step.optimiser.param_groups} == {2e-3, 1e-5}
    before = {name: p.detach().clone() for name, p in job.step.weights.masters.items()}
    job.step(0, first_inputs(job))
    moved = {name: (p - before[name]).abs().max().item() for name, p in job.step.weights.masters.items()}
    assert 0 < moved["text_encoder.encoder.layers.0.mlp.fc1.weight"] < 2e-5
    assert moved["unet.conv_in.weight"] > 1e-3
    frozen = job_of(recipe_of, "pretrain")
    assert not any(name.startswith("text_encoder") for name in frozen.step.weights.masters)
    assert not any(p.requires_grad for p in frozen.task.model.text_encoders[0].parameters())


def test_heldout_loss_is_the_same_each_time_and_told_by_timestep(recipe_of: MakeRecipe) -> None:
    job = job_of(recipe_of, "pretrain", "data.holdout=6", "objective.min_snr_gamma=5")
    assert job.heldout is not None
    assert list(job.task.points) == [62, 187, 312, 437, 562, 687, 812, 937]
    told = job.task.heldout(job.heldout)
    assert told["heldout_loss_by_timestep"].shape == (6, 8)
    again = job_of(recipe_of, "pretrain", "data.holdout=6", "train.seed=9")
    assert again.heldout is not None
    for name, value in job.heldout.items():
        assert torch.equal(value, again.heldout[name]), name
    # Random weights answer near zero, so the loss of each timestep is near the noise's variance of 1.
    assert 0.8 < told["heldout_loss"].mean() < 1.2


def test_buckets_make_batches_of_one_size(recipe_of: MakeRecipe) -> None:
    job = job_of(recipe_of, "pretrain", "data.buckets=true", "data.resolution=32")
    assert first_inputs(job)["latents"].shape[-2:] == (16, 16)  # all pictures here are square


def test_micro_batches_are_what_fits(recipe_of: MakeRecipe) -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    job = job_of(recipe_of, "pretrain", "train.micro_batch=auto")
    assert job.step.micro_batch == 8  # everything, it is tiny
    inputs = first_inputs(job)
    one = activation_bytes(job.task, {name: t[:1] for name, t in inputs.items()})
    two = activation_bytes(job.task, {name: t[:2] for name, t in inputs.items()})
    assert 1.8 < two / one < 2.05
    settings = TrainSettings(global_batch=2**14 * 3)
    most, told = choose_micro_batch(settings, job.task, inputs, job.device)
    assert settings.global_batch % most == 0
    assert "a row" in told
