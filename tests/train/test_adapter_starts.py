"""Starts of LoRA by singular vectors: PEFT's own, and an adapter that goes with the base as it was."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from subjects import check_resumes_exactly, recipe_for

from darkroom import models
from darkroom.errors import CheckpointError, RecipeError
from darkroom.models.adapters.read import read_adapter
from darkroom.plan.training import profile_recipe
from darkroom.recipe.sections import AdapterSettings
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.jobs import Pinned
from darkroom.train.run import export
from darkroom.train.setup import make_job
from darkroom.train.tasks.lora import START, add_adapters, find_eva_start, note_start

PISSA = AdapterSettings(init_lora_weights="pissa", rank=3, alpha=6)
WEIGHT = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def answer(model: models.Model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    assert model.unet is not None
    width = model.unet.config["cross_attention_dim"]
    latents, text = (torch.randn(*shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 5, width)))
    with torch.no_grad():
        out: torch.Tensor = model.unet.eval()(latents, torch.tensor([7, 300]), text, return_dict=False)[0]
    return out


def trained_values(model: models.Model) -> dict[str, torch.Tensor]:
    assert model.unet is not None
    return {f"unet.{name}": p.data for name, p in model.unet.named_parameters() if p.requires_grad}


# ---- PiSSA


def attention_layers(model: models.Model) -> list[str]:
    assert model.unet is not None
    return [
        name for name, _ in model.unet.named_modules() if name.endswith(("to_q", "to_k", "to_v", "to_out.0"))
    ]


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "gaussian"])
def test_the_start_is_pefts_and_the_model_answers_as_before(start: str) -> None:
    ours, theirs = (models.create("tiny", seed=3) for _ in range(2))
    before = answer(ours)
    add_adapters(ours, AdapterSettings(init_lora_weights=start, rank=3, alpha=6), seed=1)
    assert theirs.unet is not None
    config = LoraConfig(r=3, lora_alpha=6, target_modules=attention_layers(theirs), init_lora_weights=start)
    torch.manual_seed(1)
    inject_adapter_in_model(config, theirs.unet.requires_grad_(False))
    values, expected = trained_values(ours), trained_values(theirs)
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[key], expected[key]) for key in values)
    torch.testing.assert_close(answer(ours), before, rtol=1e-4, atol=1e-5)
    assert (values[f"unet.{WEIGHT}.lora_B.default.weight"].abs().max() > 0) == start.startswith("pissa")


def test_pissa_takes_the_main_directions_out_of_the_base_and_a_noted_start_does_so_again(
    tmp_path: Path,
) -> None:
    plain, first, again = (models.create("tiny", seed=3) for _ in range(3))
    add_adapters(first, PISSA, seed=1)
    note_start(tmp_path, trained_values(first), PISSA)
    noted = load_file(tmp_path / START)
    add_adapters(again, PISSA, seed=99, begun=tmp_path)
    assert all(torch.equal(value, noted[name]) for name, value in trained_values(again).items())
    whole, rest, second = (
        model.unet.get_submodule(path).weight  # type: ignore[union-attr]
        for model, path in ((plain, WEIGHT), (first, f"{WEIGHT}.base_layer"), (again, f"{WEIGHT}.base_layer"))
    )
    assert torch.equal(rest, second)
    sizes = np.linalg.svd(whole.detach().numpy(), compute_uv=False)
    left = np.linalg.svd(rest.detach().numpy(), compute_uv=False)
    assert left[: len(sizes) - 3] == pytest.approx(sizes[3:], rel=1e-4, abs=1e-5)


def test_a_run_resumes_and_its_adapter_goes_with_the_base_as_it_was(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    overrides = ("adapter.init_lora_weights=pissa", "adapter.rank=2", "adapter.alpha=3", "optim.lr=2e-2")
    run = check_resumes_exactly(
        lambda *more: recipe_for("lora", base, photos, *overrides, *more),
        tmp_path,
        control=("adapter.init_lora_weights=default",),
    )
    adapter = read_adapter(run / "adapter.safetensors")
    assert {layer.rank for layer in adapter.layers.values()} == {4}
    # What was trained, as the trainer has it: the checkpoint's factors on the base that lacks the start.
    job = make_job(recipe_for("lora", base, photos, *overrides), Pinned(run))
    job.step.weights.load(load_checkpoint(checkpoints(run / "checkpoints")[-1]).tensors["weights"])
    trained = answer(job.task.model)
    merged = models.load(export(run, tmp_path / "merged"))
    torch.testing.assert_close(answer(merged), trained, rtol=1e-4, atol=1e-5)
    plain = models.load(base)
    assert (answer(plain) - trained).abs().max() > 1e-3
    pipe = DiffusionPipeline.from_pretrained(base, safety_checker=None)
    pipe.load_lora_weights(run / "adapter.safetensors")
    theirs = models.load(base)
    theirs.unet = pipe.unet
    torch.testing.assert_close(answer(theirs), trained, rtol=1e-4, atol=1e-5)
    (run / START).unlink()
    with pytest.raises(CheckpointError, match="the run has lost adapter_start.safetensors"):
        export(run, tmp_path / "again.safetensors")


# ---- EVA


def test_evas_directions_are_the_inputs_main_ones() -> None:
    """Against the singular vectors of all inputs together, each layer's own."""
    model = models.create("tiny", seed=3)
    parts = add_adapters(model, AdapterSettings(rank=2), seed=1)
    assert model.unet is not None
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name: str, layer: object, given: tuple[torch.Tensor, ...]) -> None:
        seen.setdefault(name, []).append(given[0].flatten(0, -2).double())

    for name, module in model.unet.named_modules():
        if name.endswith(("attn1.to_q", "attn2.to_k")):
            module.register_forward_pre_hook(partial(note, name))
    width = model.unet.config["cross_attention_dim"]
    generator = torch.Generator().manual_seed(0)

    def once() -> None:
        text = torch.randn(8, 9, width, generator=generator) * torch.linspace(2, 0.1, width)
        latents = torch.randn(8, 4, 8, 8, generator=generator)
        model.unet(latents, torch.tensor(500), text, return_dict=False)  # type: ignore[misc]

    found = find_eva_start(parts, [once] * 6)
    assert found.keys() == {name for name in trained_values(model) if ".lora_A." in name}
    for name, inputs in seen.items():
        rows = torch.cat(inputs)
        _, sizes, directions = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
        ours = found[f"unet.{name}.lora_A.default.weight"].double()
        torch.testing.assert_close(ours @ ours.T, torch.eye(2, dtype=torch.float64), atol=1e-4, rtol=0)
        caught = ((rows - rows.mean(dim=0)) @ ours.T).square().sum() / sizes[:2].square().sum()
        assert 0.9 < caught < 1.0001, name
        last = ((rows - rows.mean(dim=0)) @ directions[-2:].T).square().sum() / sizes[:2].square().sum()
        assert last < 0.6 * caught
    assert not any(module._forward_pre_hooks for n, module in model.unet.named_modules() if "lora" in n)


def test_a_run_begins_with_them_changes_nothing_yet_and_resumes(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    eva = "adapter.init_lora_weights=eva"
    few = "adapter.targets=['*down_blocks.0.*.to_?']"  # each layer takes PEFT a second; above are all of them
    job = make_job(recipe_for("lora", base, photos, eva, few), Pinned(tmp_path / "job"))
    torch.testing.assert_close(answer(job.task.model), answer(models.load(base)), rtol=1e-4, atol=1e-5)
    masters = job.step.weights.masters
    down = next(value for name, value in masters.items() if ".lora_A." in name)
    torch.testing.assert_close(down @ down.T, torch.eye(len(down)), atol=1e-4, rtol=0)
    run = check_resumes_exactly(
        lambda *more: recipe_for("lora", base, photos, eva, few, *more),
        tmp_path,
        control=("adapter.init_lora_weights=default",),
    )
    assert not (run / START).exists()
    assert {layer.rank for layer in read_adapter(run / "adapter.safetensors").layers.values()} == {8}


def test_a_plan_counts_them_as_any_lora(base: Path, photos: Path) -> None:
    recipe = recipe_for("lora", base, photos, "adapter.init_lora_weights=eva", "train.micro_batch=1")
    plain = recipe_for("lora", base, photos, "train.micro_batch=1")
    assert (
        profile_recipe(recipe.dump(), "float32", gpu=True).trained
        == profile_recipe(plain.dump(), "float32", gpu=True).trained
    )


# ---- what does not go together

REFUSED = [
    ("lora", ("adapter.kind=loha",), "init_lora_weights pissa with kind loha; use default"),
    ("lora", ("adapter.from=a.safetensors",), "init_lora_weights pissa with from; use default"),
    ("lora", ("adapter.dora=true",), "init_lora_weights pissa with dora"),
    ("dpo", (), "adapter.init_lora_weights: pissa with the task dpo, which compares with the base"),
    (
        "lora",
        ("adapter.init_lora_weights=eva", "parallel.mode=ddp"),
        "ddp with adapter.init_lora_weights=eva",
    ),
]


@pytest.mark.parametrize(("task", "overrides", "message"), REFUSED)
def test_impossible_pairs_are_refused(task: str, overrides: tuple[str, ...], message: str) -> None:
    given = {"data": {"folder": "x", "resolution": 32}} if task == "dpo" else {}
    with pytest.raises(RecipeError, match=message) as caught:
        recipe_for(task, Path("a"), Path("b"), "adapter.init_lora_weights=pissa", *overrides, **given)
    assert "\n" not in str(caught.value)


def test_convolutions_are_refused_by_name() -> None:
    for start in ("pissa", "eva"):
        with pytest.raises(RecipeError, match=r"is a convolution; set adapter.targets=all-linear"):
            add_adapters(models.create("tiny"), AdapterSettings(init_lora_weights=start, targets="conv"))
