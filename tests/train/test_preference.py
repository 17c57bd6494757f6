"""Diffusion-DPO: the paper's loss, pairs that share their draws, a run that learns to prefer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from subjects import check_resumes_exactly, recipe_for

from darkroom.errors import RecipeError
from darkroom.plan.training import profile_recipe
from darkroom.recipe import Recipe
from darkroom.run import Run
from darkroom.train.jobs import Pinned
from darkroom.train.run import train
from darkroom.train.setup import make_job
from darkroom.train.tasks.diffusion import preference_loss, without_adapters


def test_the_loss_is_the_papers() -> None:
    """As train_diffusion_dpo.py writes it: chunks, differences, logsigmoid."""
    generator = torch.Generator().manual_seed(0)
    own, base = (torch.rand(6, generator=generator, dtype=torch.float64) * 1e-3 for _ in range(2))
    beta = 5000.0
    model_w, model_l, ref_w, ref_l = own[0::2], own[1::2], base[0::2], base[1::2]
    inside = -0.5 * beta * ((model_w - model_l) - (ref_w - ref_l))
    expected = -torch.nn.functional.logsigmoid(inside)
    found, right = preference_loss(own, base, beta)
    torch.testing.assert_close(found, expected)
    assert right.tolist() == (inside > 0).double().tolist()
    same, _ = preference_loss(base, base, beta)
    torch.testing.assert_close(same, torch.full((3,), 2.0, dtype=torch.float64).log())
    assert not torch.allclose(preference_loss(own.flip(0), base.flip(0), beta)[0], expected)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Red squares preferred to blue ones."""
    folder = tmp_path_factory.mktemp("pairs")
    for kind, colour in (("chosen", (220, 30, 30)), ("rejected", (30, 30, 220))):
        (folder / kind).mkdir()
        for i in range(4):
            Image.new("RGB", (32, 32), tuple(c + i for c in colour)).save(folder / kind / f"{i}.png")
    return folder


def recipe_of(base: Path, pairs: Path, *overrides: str) -> Recipe:
    data: dict[str, Any] = {"folder": str(pairs), "prompt": "a square", "resolution": 32}
    train: dict[str, Any] = {"steps": 4, "global_batch": 2, "micro_batch": 2, "precision": "float32"}
    return recipe_for("dpo", base, pairs, *overrides, data=data, train=train)


def test_pairs_share_caption_noise_and_timestep(base: Path, pairs: Path, tmp_path: Path) -> None:
    job = make_job(recipe_of(base, pairs), Pinned(tmp_path / "run"))
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    for name in ("noise", "t", "text"):
        assert torch.equal(inputs[name][0::2], inputs[name][1::2]), name
    assert not torch.equal(inputs["latents"][0::2], inputs["latents"][1::2])
    told = job.task.losses(inputs)
    torch.testing.assert_close(told["loss"].detach(), torch.full((4,), 2.0).log())  # the adapter adds nothing
    job.step(0, inputs)
    after = job.task.losses(inputs)["loss"].mean()
    assert after < torch.tensor(2.0).log()
    with without_adapters(job.task.modules):
        base_again = job.task.losses(inputs)["loss"]
    torch.testing.assert_close(base_again.detach(), torch.full((4,), 2.0).log())


def test_a_plan_and_the_largest_micro_batch_count_pairs(base: Path, pairs: Path, tmp_path: Path) -> None:
    recipe = recipe_of(base, pairs, "train.micro_batch=auto", "train.global_batch=4")
    job = make_job(recipe, Pinned(tmp_path / "run"))
    assert 4 % job.step.micro_batch == 0
    dpo = profile_recipe(recipe.dump(), "float32", gpu=True)
    lora = recipe_for("lora", base, pairs, "train.micro_batch=1")
    plain = profile_recipe(lora.dump(), "float32", gpu=True)
    assert dpo.trained == plain.trained
    ratio = dpo.flops(1) / plain.flops(1)
    assert 2 < ratio < 3.5  # two pictures and their reference, whose pass has no backward


def test_a_run_learns_what_is_preferred_and_resumes(base: Path, pairs: Path, tmp_path: Path) -> None:
    run = check_resumes_exactly(
        lambda *more: recipe_of(base, pairs, *more), tmp_path, control=("objective.dpo.beta=100",)
    )
    assert (run / "adapter.safetensors").is_file()
    long = recipe_of(base, pairs, "train.steps=12", "optim.lr=5e-3")
    rows = Run.open(train(long, out=tmp_path / "long", console=lambda _: None).run).metrics()
    shares = [row["preferred"] for row in rows if "preferred" in row]
    assert sum(shares[-4:]) > sum(shares[:4])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("adapter.kind=oft",), "adapter.kind: oft with the task dpo; allowed: lora, loha, lokr"),
        (("objective.loss.type=huber",), "objective.loss: given with the task dpo, whose loss has no place"),
        (
            ("data.folder=null", "data.store=a.lance"),
            "data.folder: missing; a folder with chosen/ and rejected/",
        ),
    ],
)
def test_impossible_pairs_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(Path("nowhere"), Path("pairs"), *overrides)
    with pytest.raises(RecipeError, match="objective.dpo: given with the task lora; allowed: dpo"):
        recipe_for("lora", Path("nowhere"), Path("nowhere"), "objective.dpo.beta=1")


def test_a_picture_without_its_partner_is_named(base: Path, pairs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pairs, tmp_path / "pairs"))
    (folder / "rejected" / "2.png").unlink()
    with pytest.raises(RecipeError, match=r"data.folder: .*2 has no partner"):
        make_job(recipe_of(base, folder), Pinned(tmp_path / "run"))
