"""A tiny VAE learned from a VAE: its losses by hand, its folder in diffusers and `generate`, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from darkroom import models, sample
from darkroom.errors import InputError, RecipeError
from darkroom.plan.training import profile_recipe
from darkroom.recipe import Recipe, make_recipe
from darkroom.run import Run
from darkroom.train import train
from darkroom.train.jobs import Pinned, TrainingSetup
from darkroom.train.setup import make_job
from train.conftest import MakeRecipe
from train.subjects import check_resumes_exactly

SMALL = {"tiny_vae": {"width": 8, "blocks": 1}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose VAE shrinks sides by 4 and scales its latents."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    vae = {"block_out_channels": [8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1}
    vae |= {"scaling_factor": 0.5, "shift_factor": 0.1}
    models.save(models.create("tiny", seed=3, overrides={"vae": vae}), path)
    return path


def recipe(recipe_of: MakeRecipe, teacher: Path, *overrides: str) -> Recipe:
    return recipe_of("tiny-vae", *overrides, model={"base": str(teacher)}, objective=SMALL)


def job_of(recipe_of: MakeRecipe, teacher: Path, *overrides: str) -> TrainingSetup:
    return make_job(recipe(recipe_of, teacher, *overrides), Pinned(Path("nowhere")))


def first_inputs(job: TrainingSetup) -> dict[str, torch.Tensor]:
    with job.feed(0) as batches:
        return job.task.inputs(next(batches), job.device)


@torch.no_grad()
def test_the_loss_is_what_diffusers_parts_differ_by(recipe_of: MakeRecipe, teacher: Path) -> None:
    """Latents as the denoiser sees them: (latents - 0.1) * 0.5. The control has the VAE's own."""
    from diffusers import AutoencoderKL

    told = ("objective.tiny_vae.latent_weight=3", "objective.tiny_vae.reconstruction=mse")
    job = job_of(recipe_of, teacher, *told)
    inputs, tiny = first_inputs(job), job.task.modules["tiny_vae"]
    vae: Any = AutoencoderKL.from_pretrained(teacher, subfolder="vae")
    posterior = vae.encode(inputs["pixels"]).latent_dist
    drawn = posterior.mean + posterior.std * inputs["posterior"]
    wanted = vae.decode(drawn).sample
    losses = {}
    for name, scale, shift in (("seen", 0.5, 0.1), ("raw", 1.0, 0.0)):
        out = tiny.decode((drawn - shift) * scale).sample
        latents = (tiny.encode(inputs["pixels"]).latents - (posterior.mean - shift) * scale).square()
        losses[name] = ((out - wanted).square() + 0).mean(dim=(1, 2, 3)) + 3 * latents.mean(dim=(1, 2, 3))
    found = job.task.losses(inputs)["loss"]
    torch.testing.assert_close(found, losses["seen"], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, losses["raw"], rtol=1e-2)
    plain = job_of(recipe_of, teacher, *told, "objective.tiny_vae.target=picture").task.losses(inputs)
    out = tiny.decode((drawn - 0.1) * 0.5).sample
    wanted_b = (out - inputs["pixels"]).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(plain["reconstruction"], wanted_b, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(plain["reconstruction"], job.task.losses(inputs)["reconstruction"], rtol=1e-2)


def test_it_learns_the_teacher_and_generate_draws_with_it(
    recipe_of: MakeRecipe, teacher: Path, tmp_path: Path
) -> None:
    """The control is the same network before it has learned."""
    from diffusers import AutoencoderTiny

    told = ("train.steps=60", "data.holdout=8", "optim.lr=1e-2", "checkpoint.every=60", "sample.every=60")
    run = Run.open(train(recipe(recipe_of, teacher, *told), out=tmp_path / "run", console=lambda _: None).run)
    rows = [row for row in run.metrics() if "heldout_psnr_db" in row]
    assert rows[0]["step"] == 0
    assert rows[-1]["heldout_psnr_db"] > rows[0]["heldout_psnr_db"] + 3
    assert rows[-1]["heldout_latents"] < 0.5 * rows[0]["heldout_latents"]
    assert (run.samples / "step-00000060.png").is_file()
    tiny: Any = AutoencoderTiny.from_pretrained(run.model)
    model = models.load(teacher)
    made = sample.generate(model, "a red square", steps=2, size=(32, 32), optimise=f"tiny_vae:{run.model}")[0]
    with torch.no_grad():
        pixels = tiny.decode(made.latents[None]).sample[0]
    wanted = ((pixels / 2 + 0.5).clamp(0, 1) * 255).permute(1, 2, 0)
    levels = torch.frombuffer(bytearray(made.image.tobytes()), dtype=torch.uint8).view(32, 32, 3)
    assert (levels - wanted).abs().max() <= 1
    other = models.create("tiny", overrides={"vae": {"block_out_channels": [8, 8]}})
    with pytest.raises(InputError, match="makes 4 pixels of each latent's side; allowed: a decoder that ma"):
        sample.generate(other, "a", steps=1, optimise=f"tiny_vae:{run.model}")
    # It teaches another in its turn: the folder is a base as a model's is.
    again = job_of(recipe_of, run.model)
    pixels_8 = first_inputs(again)["pixels"]
    assert again.task.model.vae_factor == 4
    with torch.no_grad():
        mean = again.task.model.vae.encode(pixels_8)[0].mean
        torch.testing.assert_close(mean, tiny.encode(pixels_8).latents)


def test_a_resumed_run_learns_the_same(recipe_of: MakeRecipe, teacher: Path, tmp_path: Path) -> None:
    check_resumes_exactly(
        lambda *more: recipe(recipe_of, teacher, *more),
        tmp_path,
        control=("objective.tiny_vae.latent_weight=9",),
    )


def test_a_plan_counts_the_teachers_passes(recipe_of: MakeRecipe, teacher: Path) -> None:
    """From the pictures alone the teacher need not decode; trained is the small one."""
    whole = profile_recipe(recipe(recipe_of, teacher).dump(), "float32", gpu=True)
    pictures = recipe(recipe_of, teacher, "objective.tiny_vae.target=picture")
    half = profile_recipe(pictures.dump(), "float32", gpu=True)
    assert whole.trained == half.trained == whole.parameters["tiny_vae"]
    assert whole.parameters["vae"] > 0
    assert whole.flops(1) > half.flops(1) > 0
    assert whole.memory(2)["activations"] > 0


def test_what_it_cannot_do_is_refused(recipe_of: MakeRecipe, teacher: Path) -> None:
    with pytest.raises(RecipeError, match="gradient_checkpointing: given with the task tiny-vae"):
        recipe(recipe_of, teacher, "train.gradient_checkpointing=true").check()
    with pytest.raises(RecipeError, match="data.buckets: given with the task tiny-vae"):
        recipe(recipe_of, teacher, "data.buckets=true").check()
    with pytest.raises(RecipeError, match="evaluate.every_images"):
        recipe(recipe_of, teacher, "evaluate.every_images=8", "data.holdout=8").check()
    with pytest.raises(RecipeError, match=r"data.folder: a folder with the task tiny-vae; import it into a"):
        make_recipe({"task": "tiny-vae", "model": {"base": "x"}, "data": {"folder": "y"}}).check()
