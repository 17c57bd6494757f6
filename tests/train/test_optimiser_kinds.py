"""Every optimiser: it learns, it goes on from a checkpoint to the bit, and a fused step is the plain one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from subjects import recipe_for
from torch import Tensor, nn

from darkroom.errors import RecipeError
from darkroom.plan.training import profile_recipe
from darkroom.recipe import make_recipe
from darkroom.recipe.sections import OptimSettings, TrainSettings
from darkroom.run import Run
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.optim import (
    make_optimiser,
    optimiser_numbers,
    optimiser_tensors,
    parameter_groups,
    restore_optimiser,
)
from darkroom.train.run import train
from darkroom.train.step import Step, clipped_step, gradient_norm, make_weights, set_lr
from train.conftest import MakeRecipe

KINDS = ["adamw", "adamw8bit", "adafactor", "came", "lion", "prodigy", "schedule-free", "muon"]
RATES = {"prodigy": 1.0, "adafactor": 1e-1}


def params_of(seed: int = 0) -> dict[str, Tensor]:
    """A matrix large enough for 8 bits, a kernel in another memory layout, and a bias."""
    torch.manual_seed(seed)
    kernel = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    return {
        "unet.m": torch.randn(64, 128, requires_grad=True),
        "unet.k": kernel,
        "unet.b": torch.randn(4, requires_grad=True),
    }


@pytest.mark.parametrize("name", [*KINDS, "adafactor absolute", "prodigy corrected"])
def test_a_state_saved_as_tensors_and_json_goes_on_to_the_bit(name: str) -> None:
    name, _, more = name.partition(" ")
    own = {"absolute": {"scale_parameter": False}, "corrected": {"use_bias_correction": True, "d_coef": 2.0}}
    settings = OptimSettings(name=name, lr=RATES.get(name, 1e-2), **own.get(more, {}))

    def stepped(params: dict[str, Tensor], optimiser, steps: range) -> None:
        for k in steps:
            torch.manual_seed(k)
            for param in params.values():
                param.grad = torch.randn_like(param) + 0.1 * param.detach()
            clipped_step(optimiser, gradient_norm(params.values()), 1.0)

    def fresh(values: dict[str, Tensor] | None = None):
        params = params_of()
        if values:
            with torch.no_grad():
                for key, param in params.items():
                    param.copy_(values[key])
        return params, make_optimiser(parameter_groups(params, {"unet": settings.lr}, 0.01), settings)

    params, optimiser = fresh()
    stepped(params, optimiser, range(3))
    kept = {key: param.detach().clone() for key, param in params.items()}
    tensors = {key: value.contiguous() for key, value in optimiser_tensors(optimiser, params).items()}
    file = save({f"{i}": value.clone() for i, value in enumerate(tensors.values())})
    tensors = dict(zip(tensors, (load(file)[str(i)] for i in range(len(tensors))), strict=True))
    numbers = json.loads(json.dumps(optimiser_numbers(optimiser, params)))
    stepped(params, optimiser, range(3, 7))

    again, restored = fresh(kept)
    restore_optimiser(restored, again, tensors, numbers)
    stepped(again, restored, range(3, 7))
    for key, param in params.items():
        assert torch.equal(param, again[key]), key
    forgetful, empty = fresh(kept)
    stepped(forgetful, empty, range(3, 7))
    assert not torch.equal(params["unet.m"], forgetful["unet.m"])
    if name == "adamw8bit":
        assert {value.dtype for key, value in tensors.items() if key.endswith(".codes")} == {torch.uint8}


def test_adafactors_rate_for_all_weights_moves_them_about_as_far_as_adamws() -> None:
    def moved(name: str, lr: float) -> float:
        torch.manual_seed(0)
        start = torch.randn(64, 128) * 0.02
        param, settings = start.clone().requires_grad_(), OptimSettings(name=name, lr=lr)
        optimiser = make_optimiser([{"params": [param], "lr": lr, "weight_decay": 0.0}], settings)
        slope = torch.randn(64, 128)
        for _ in range(10):
            param.grad = slope + 0.5 * torch.randn(64, 128)
            optimiser.step()
        return (param.detach() - start).square().mean().sqrt().item()

    data = {"finetune": {"folder": "a"}, "dreambooth": {"instance": "a", "prompt": "a photo of sks dog"}}
    for task, one in data.items():
        content = {"task": task, "model": {"base": "tiny"}, "data": one}
        plain, relative = (make_recipe(content, [f"optim.name={n}"]).optim.lr for n in ("adamw", "adafactor"))
        assert moved("adafactor", relative) == pytest.approx(moved("adamw", plain), rel=0.5), task
    assert moved("adafactor", 1e-5) < 0.05 * moved("adamw", 1e-5)


# ---- against the papers' formulas


def walked(name: str, steps: int = 6, **settings: object) -> list[dict[str, np.ndarray]]:
    """The weights before and after each step, and the gradients, in float64."""
    optim = OptimSettings.model_validate({"name": name, "lr": 1e-2, "beta1": 0.8, "beta2": 0.95, **settings})
    params = params_of()
    optimiser = make_optimiser(parameter_groups(params, {"unet": optim.lr}, optim.weight_decay, optim), optim)
    seen = [{key: param.detach().double().numpy().copy() for key, param in params.items()}]
    for k in range(steps):
        torch.manual_seed(k)
        for param in params.values():
            param.grad = torch.randn_like(param) + 0.1 * param.detach()
        seen[-1] |= {f"{key}/grad": p.grad.double().numpy().copy() for key, p in params.items()}  # type: ignore[union-attr]
        optimiser.step()
        seen.append({key: param.detach().double().numpy().copy() for key, param in params.items()})
    return seen


def decay_of(key: str) -> float:
    return 0.0 if key == "unet.b" else 0.3


def test_lion_is_the_papers_algorithm() -> None:
    seen = walked("lion", weight_decay=0.3)
    for key in params_of():
        weight, mean = seen[0][key], 0.0
        for before, after in itertools.pairwise(seen):
            grad = before[f"{key}/grad"]
            moved = np.sign(0.8 * mean + 0.2 * grad)
            weight = weight - 1e-2 * (moved + decay_of(key) * weight)
            mean = 0.95 * mean + 0.05 * grad
            assert after[key] == pytest.approx(weight, abs=1e-5)
            plain = before[key] - 1e-2 * np.sign(grad)
            assert key == "unet.b" or np.abs(after[key] - plain).max() > 1e-3


def test_came_is_the_papers_algorithm() -> None:
    """Algorithm 2 written out row by row; without confidence (algorithm 1 of Adafactor's mean) it differs."""

    def factored(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return rows[..., :, None] * columns[..., None, :] / rows.mean(axis=-1)[..., None, None]

    seen = walked("came", weight_decay=0.3, beta3=0.9)
    for key, param in params_of().items():
        flat = param.ndim == 1
        weight, mean, sq, res = seen[0][key], 0.0, [0.0, 0.0], [0.0, 0.0]
        for before, after in itertools.pairwise(seen):
            grad = before[f"{key}/grad"]
            square = grad**2 + 1e-30
            sq = [0.95 * sq[i] + 0.05 * (square if flat else square.mean(axis=-1 - i)) for i in (0, 1)]
            update = grad / np.sqrt(sq[0] if flat else factored(*sq))
            update = update / max(1.0, np.sqrt((update**2).mean()))
            mean = 0.8 * mean + 0.2 * update
            unsure = (update - mean) ** 2 + 1e-16
            res = [0.9 * res[i] + 0.1 * (unsure if flat else unsure.mean(axis=-1 - i)) for i in (0, 1)]
            step = mean if flat else mean / np.sqrt(factored(*res))
            weight = weight - 1e-2 * (step + decay_of(key) * weight)
            assert after[key] == pytest.approx(weight, abs=2e-4)
        assert flat or np.abs(step - mean).max() > 0.1


def test_adafactor_with_absolute_rates_moves_as_far_as_the_rate_says() -> None:
    absolute = walked("adafactor", steps=1, scale_parameter=False, weight_decay=0.0)
    relative = walked("adafactor", steps=1, weight_decay=0.0)
    moved = [np.abs(after["unet.m"] - before["unet.m"]) for before, after in (absolute, relative)]
    assert np.sqrt((moved[0] ** 2).mean()) == pytest.approx(1e-2, rel=0.01)  # the update's mean square is one
    size = np.sqrt((absolute[0]["unet.m"] ** 2).mean())
    assert np.sqrt((moved[1] ** 2).mean()) == pytest.approx(1e-2 * size, rel=0.05)


def test_adafactor_is_the_papers_however_small_gradients_are() -> None:
    """Algorithm 4 of Shazeer & Stern (2018), in float64; gradients of 1e-6 are usual in fine-tuning."""

    def factored(grads: list[Tensor], weight: Tensor) -> Tensor:
        row, column = torch.zeros(6, 1).double(), torch.zeros(1, 8).double()
        for t, grad in enumerate(grads, 1):
            beta = 1 - t**-0.8
            square = grad.double().square() + 1e-30
            row = beta * row + (1 - beta) * square.mean(dim=1, keepdim=True)
            column = beta * column + (1 - beta) * square.mean(dim=0, keepdim=True)
            update = grad / (row * column / row.mean()).sqrt()
            update /= max(1.0, update.square().mean().sqrt())
            weight = weight - 1e-2 * max(1e-3, weight.square().mean().sqrt()) * update
        return weight

    torch.manual_seed(0)
    start = torch.randn(6, 8)
    loud = [torch.randn(6, 8) * scale for scale in (1.0, 0.2, 0.5, 0.1)]
    for scale in (1.0, 1e-4, 1e-6):
        param = start.clone().requires_grad_()
        settings = OptimSettings(name="adafactor", lr=1e-2)
        optimiser = make_optimiser(parameter_groups({"unet.m": param}, {"unet": 1e-2}, 0.0), settings)
        grads = [scale * grad for grad in loud]
        for grad in grads:
            param.grad = grad.clone()
            optimiser.step()
        torch.testing.assert_close(
            param.detach(), factored(grads, start.double()).float(), rtol=1e-4, atol=1e-5
        )
    assert (param.detach() - start).abs().max() > 1e-3


def test_what_stops_stays_with_schedule_free_too() -> None:
    """Its step moves weights towards their average at a rate of 0 as well."""
    params = params_of()
    rules = ({"match": "unet.m", "stop_step": 3}, {"match": "unet.k", "start_step": 2})
    settings = OptimSettings.model_validate({"name": "schedule-free", "lr": 1e-2, "layers": rules})
    optimiser = make_optimiser(parameter_groups(params, {"unet": 1e-2}, 0.01, settings), settings)
    seen: dict[str, list[Tensor]] = {name: [] for name in params}
    for k in range(6):
        for name, param in params.items():
            seen[name].append(param.detach().clone())
            param.grad = torch.ones_like(param)
        set_lr(optimiser, 1.0, k)
        clipped_step(optimiser, gradient_norm(params.values()), None)
    moved = {
        name: [not torch.equal(a, b) for a, b in itertools.pairwise([*values, params[name].detach()])]
        for name, values in seen.items()
    }
    assert moved["unet.m"] == [True] * 3 + [False] * 3
    assert moved["unet.k"] == [False] * 2 + [True] * 4
    assert moved["unet.b"] == [True] * 6
    step = (seen["unet.k"][3] - seen["unet.k"][2]).abs().max()
    assert step < 2e-2  # the first step of what starts late is no larger than others


def test_lions_defaults_are_a_third_of_the_rate_and_thrice_the_decay() -> None:
    lora = {"task": "lora", "model": {"base": "tiny"}, "data": {"folder": "a"}}
    found = make_recipe(lora, ["optim.name=lion"])
    assert (found.optim.lr, found.optim.beta2, found.optim.weight_decay) == (3e-5, 0.99, 0.03)
    assert any("optim.lr" in line and "Lion moves every weight" in line for line in found.derived)
    said = make_recipe(lora, ["optim.name=lion", "optim.lr=1e-4", "optim.beta2=0.9"]).optim
    assert (said.lr, said.beta2) == (1e-4, 0.9)
    word = {"task": "textual-inversion", "model": {"base": "tiny", "word": {"token": "<x>", "initial": "a"}}}
    found = make_recipe({**word, "data": {"instance": "a"}}, ["optim.name=lion"])
    assert (found.optim.lr, found.optim.weight_decay) == (7e-4, 0.0)
    assert make_recipe(lora).optim.beta2 == 0.999


def test_plans_hold_each_ones_state(base: Path, photos: Path) -> None:
    """Lion keeps one number a weight, CAME one and its rows and columns, AdamW two."""
    held = {}
    for name in ("adamw", "came", "lion"):
        recipe = recipe_for("finetune", base, photos, f"optim.name={name}", "train.micro_batch=1")
        profile = profile_recipe(recipe.dump(), "float32", gpu=True)
        held[name] = max(moment.at(1)["optimiser"] for moment in profile.moments) / profile.trained
    assert held["lion"] == pytest.approx(4, rel=0.05)
    assert held["adamw"] == pytest.approx(8, rel=0.05)  # in the allocator's pieces
    assert held["lion"] < held["came"] < held["adamw"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.beta3=0.9", r"optim.beta3: 0.9 with optim.name=adamw; allowed: with came"),
        (
            "optim.scale_parameter=false",
            r"scale_parameter: false with optim.name=adamw; allowed: with adafactor",
        ),
        ("optim.d_coef=2", r"optim.d_coef: 2 with optim.name=adamw; allowed: with prodigy"),
    ],
)
def test_settings_of_another_optimiser_are_refused(
    recipe_of: MakeRecipe, override: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of("pretrain", override)


class Quadratic:
    """The distance of a small network's answer from what it should be."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def losses(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"].to(next(self.module.parameters()).dtype)
        return {"loss": (self.module(x).float() - inputs["y"]).square().mean(dim=1)}


def step_of(name: str, *, fused: bool, dtype: torch.dtype) -> tuple[Step, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optim = OptimSettings(name=name, lr=RATES.get(name, 1e-2), clip_norm=None, fused_backward=fused)
    settings = TrainSettings(steps=9, global_batch=8, ema={"enabled": False})
    weights = make_weights({"unet": module}, dtype)
    step = Step(Quadratic(module), weights, train=settings, optim=optim, micro_batch=8)
    return step, {"x": torch.randn(8, 16), "y": torch.randn(8, 4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "prodigy"])
def test_stepping_inside_the_backward_pass_is_the_same_step(name: str, dtype: torch.dtype) -> None:
    (plain, inputs), (fused, _) = (step_of(name, fused=fused, dtype=dtype) for fused in (False, True))
    for k in range(4):
        one, other = plain(k, inputs), fused(k, inputs)
        assert other.losses["loss"].item() == pytest.approx(one.losses["loss"].item(), rel=1e-5)
        assert other.grad_norm.item() == pytest.approx(one.grad_norm.item(), rel=1e-4)
    for key, master in plain.weights.masters.items():
        torch.testing.assert_close(master, fused.weights.masters[key], rtol=1e-4, atol=1e-5)
        assert fused.weights.masters[key].grad is None  # nothing is held after the step
        assert fused.weights.computing[key].grad is None
    assert one.losses["loss"] != plain(4, inputs).losses["loss"]  # it moves


def test_no_full_set_of_gradients_is_held() -> None:
    """While a weight steps, no other weight has a gradient."""
    step, inputs = step_of("adamw", fused=True, dtype=torch.bfloat16)
    held: list[int] = []
    for param in step.weights.computing.values():
        param.register_post_accumulate_grad_hook(
            lambda _: held.append(
                sum(
                    p.grad is not None
                    for p in (*step.weights.computing.values(), *step.weights.masters.values())
                )
            )
        )
    step(0, inputs)
    assert held == [0] * 4


@pytest.mark.parametrize("name", KINDS[1:])
def test_a_run_with_it_learns_stops_and_goes_on_to_the_bit(
    recipe_of: MakeRecipe, tmp_path: Path, name: str
) -> None:
    overrides = (f"optim.name={name}", f"optim.lr={RATES.get(name, 2e-3)}", "train.ema.enabled=false")
    whole = recipe_of("pretrain", *overrides, "train.steps=6", "checkpoint.every=3", "checkpoint.keep=9")
    quiet = {"console": lambda _: None}
    one = train(whole, out=tmp_path / "whole", **quiet)
    half = recipe_of("pretrain", *overrides, "train.steps=3", "checkpoint.every=3", "checkpoint.keep=9")
    train(half, out=tmp_path / "parts", **quiet)
    two = train(whole, out=tmp_path / "parts", **quiet)
    rows = [[row["loss"] for row in Run.open(run.run).metrics()] for run in (one, two)]
    assert rows[0] == rows[1]
    last = [load_checkpoint(checkpoints(run.run / "checkpoints")[-1]).tensors for run in (one, two)]
    for file in ("weights", "optimiser", *(["ema"] if name == "schedule-free" else [])):
        assert last[0][file].keys() == last[1][file].keys() != set()
        assert all(torch.equal(last[0][file][key], last[1][file][key]) for key in last[0][file]), file
    if name == "schedule-free":  # the model that is written is the average, not what the gradients see
        assert not torch.equal(
            last[0]["ema"]["unet.conv_in.weight"], last[0]["weights"]["unet.conv_in.weight"]
        )


def test_accumulating_with_a_fused_step_is_refused(recipe_of: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match="train.micro_batch: 4 with optim.fused_backward"):
        recipe_of("pretrain", "optim.fused_backward=true", "train.micro_batch=4")
