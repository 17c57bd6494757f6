"""The diffusion transformer and rectified flow through the same trainer: resume, precision, ranks, LoRA."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import warm
from darkroom import cli, models, sample
from darkroom.models.adapters.read import read_adapter
from darkroom.recipe import Recipe
from darkroom.run import Run
from darkroom.train.run import train
from train.conftest import SIDE, TEXT, UNET, VAE, MakeRecipe

DIT = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8}
MODEL = {"base": "tiny-dit", "vae": VAE, "unet": DIT, "text_encoder": TEXT}
CLOSE = 1e-6


def dit(recipe_of: MakeRecipe, *overrides: str, **extra: Any) -> Recipe:
    return recipe_of("pretrain", "data.holdout=4", *overrides, **({"model": MODEL} | extra))


def quietly(recipe: Recipe, out: Path) -> None:
    train(recipe, out=out, console=lambda _: None)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in Run.open(run).metrics() if "loss" in row]


@pytest.fixture(scope="module")
def trained(recipe_of: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps."""
    out = tmp_path_factory.mktemp("dit") / "run"
    quietly(dit(recipe_of, "train.steps=8", "checkpoint.every=4", "evaluate.every=4"), out)
    return out


def pixels(model: models.Model, **more: Any) -> np.ndarray:
    told = {"seed": 4, "steps": 3, "size": (SIDE, SIDE), "guidance": 3.0, "notice": lambda _: None}
    return np.asarray(sample.generate(model, "a red square", **(told | more))[0].image).astype(int)


def test_it_learns_and_is_measured_by_timestep(trained: Path) -> None:
    rows = [row for row in Run.open(trained).metrics() if "heldout_loss" in row]
    by_timestep = rows[-1]["heldout_loss_by_timestep"]
    assert [int(t) for t in by_timestep] == [62, 187, 312, 437, 562, 687, 812, 937]
    assert rows[-1]["heldout_loss"] < rows[0]["heldout_loss"]
    config = json.loads((trained / "model" / "scheduler" / "scheduler_config.json").read_text())
    assert config["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert (config["shift"], config["logit_mean"], config["logit_std"]) == (1.0, 0.0, 1.0)
    model = models.load(trained / "model")
    assert model.is_dit
    assert pixels(model).shape == (SIDE, SIDE, 3)


def test_it_goes_on_to_the_bit(trained: Path, recipe_of: MakeRecipe, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(trained, again)
    shutil.rmtree(again / "model")
    for newest in (again / "checkpoints").glob("step-*8"):
        shutil.rmtree(newest)
    recipe = dit(recipe_of, "train.steps=8", "checkpoint.every=4", "evaluate.every=4")
    said: list[str] = []
    train(recipe, out=again, console=said.append)
    assert any("going on after step 4 of 8" in line for line in said)
    one, other = (
        load_file(f / "model/transformer/diffusion_pytorch_model.safetensors") for f in (trained, again)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert losses(trained) == losses(again)
    seeded = tmp_path / "seeded"
    quietly(dit(recipe_of, "train.steps=8", "train.seed=1"), seeded)
    assert losses(seeded) != losses(trained)


def test_checkpointing_and_bf16_learn_the_same(trained: Path, recipe_of: MakeRecipe, tmp_path: Path) -> None:
    first = losses(trained)[:4]
    quietly(dit(recipe_of, "train.gradient_checkpointing=true", "train.micro_batch=4"), tmp_path / "a")
    assert np.abs(np.array(losses(tmp_path / "a")) - first).max() < CLOSE
    quietly(dit(recipe_of, "train.precision=bf16"), tmp_path / "b")
    apart = np.abs(np.array(losses(tmp_path / "b")) - first).max()
    assert CLOSE < apart < 0.03


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_ranks_learn_what_one_process_does(
    mode: str, trained: Path, recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    two = (f"parallel.mode={mode}", "parallel.devices=2", "train.micro_batch=2", "train.steps=8")
    recipe = dit(recipe_of, "checkpoint.every=4", *two)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    command = [sys.executable, "-m", "darkroom", "train", str(file), "--out", str(tmp_path / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run(command, capture_output=True, text=True, env=env, timeout=240, ranks=2)
    assert done.returncode == 0, done.stderr
    assert np.abs(np.array(losses(tmp_path / "run")) - losses(trained)).max() < CLOSE
    one, other = models.load(trained / "model"), models.load(tmp_path / "run" / "model")
    apart = [
        (a - b).abs().max().item()
        for a, b in zip(one.unet.state_dict().values(), other.unet.state_dict().values(), strict=True)
    ]
    assert max(apart) < 1e-5


@pytest.mark.parametrize("targets", ["attention", "all-linear"])
def test_lora(trained: Path, recipe_of: MakeRecipe, tmp_path: Path, targets: str) -> None:
    recipe = recipe_of(
        "lora", f"adapter.targets={targets}", "adapter.rank=2", model={"base": str(trained / "model")}
    )
    quietly(recipe, tmp_path / "run")
    file = tmp_path / "run" / "adapter.safetensors"
    adapter = read_adapter(file)
    assert len(adapter.layers) == 3 * (8 if targets == "attention" else 10)
    assert adapter.base == "dit"
    assert losses(tmp_path / "run")[0] != losses(tmp_path / "run")[-1]
    model = models.load(trained / "model")
    plain, own = pixels(model, guidance=7.0), pixels(model, guidance=7.0, adapters={"own": (str(file), 60.0)})
    assert np.abs(plain - own).max() > 0
    nothing = pixels(model, guidance=7.0, adapters={"own": (str(file), 0.0)})
    assert np.abs(plain - nothing).max() <= 1


def test_a_u_net_learns_rectified_flow_too(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    model = {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT}
    recipe = recipe_of("pretrain", "objective.prediction=flow", "objective.flow.shift=2", model=model)
    quietly(recipe, tmp_path / "run")
    made = models.load(tmp_path / "run" / "model")
    assert not made.is_dit
    assert made.prediction == "flow_prediction"
    assert made.scheduler["shift"] == 2.0
    assert pixels(made).shape == (SIDE, SIDE, 3)


def test_a_transformer_learns_diffusion_too(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    quietly(dit(recipe_of, "objective.prediction=v", "objective.min_snr_gamma=5"), tmp_path / "run")
    made = models.load(tmp_path / "run" / "model")
    assert made.prediction == "v_prediction"
    assert pixels(made).shape == (SIDE, SIDE, 3)


def failed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_what_a_transformer_cannot_is_refused_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = trained / "model", tmp_path / "out"
    told = failed(capsys, "generate", model, "x", "--optimise", "feature_cache", "--out", out)
    assert "optimise 'feature_cache' with a diffusion transformer; leave it out" in told
    told = failed(capsys, "generate", model, "x", "--solver", "ddim", "--out", out)
    assert "solver ddim with a model of rectified flow; allowed: flow_euler" in told
    told = failed(capsys, "export", model, "--to", tmp_path / "one.safetensors", "--single-file")
    assert "a single file with a diffusion transformer" in told
    assert len(told.strip().splitlines()) == 1


def test_the_command_line_goes_through(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: object) -> Any:
        with pytest.raises(SystemExit) as left:
            cli.main([*map(str, arguments), "--json"])
        out = capsys.readouterr()
        assert not left.value.code, out.err
        return json.loads(out.out.strip().splitlines()[-1])

    model = trained / "model"
    size = f"{SIDE}x{SIDE}"
    told("generate", model, "a red square", "--steps", 3, "--size", size, "--out", tmp_path / "a")
    told(
        "generate", model, "a", "--steps", 2, "--size", size, "--solver", "flow_heun", "--out", tmp_path / "b"
    )
    assert len(list((tmp_path / "a").glob("*.png"))) == 1
    told("export", trained, "--to", tmp_path / "at4", "--checkpoint", 4)
    assert models.load(tmp_path / "at4").is_dit
    assert told("inspect", model)["denoiser"] == "transformer: DiT"
