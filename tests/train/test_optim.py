"""Learning rates in closed form, AdamW's groups, clipping, and the optimiser's state there and back."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.optimization import (
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)

from darkroom.recipe.sections import OptimSettings
from darkroom.train.optim import make_optimiser, optimiser_tensors, parameter_groups, restore_optimiser
from darkroom.train.step import clipped_step, gradient_norm, lr_factor, set_lr


def test_rates_by_step() -> None:
    constant = OptimSettings(warmup_steps=4)
    assert [lr_factor(k, 10, constant) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = OptimSettings(warmup_steps=2, lr_schedule="linear", final_lr_ratio=0.2)
    assert [lr_factor(k, 10, linear) for k in (2, 6, 10)] == pytest.approx([1.0, 0.6, 0.2])
    cosine = OptimSettings(lr_schedule="cosine")
    assert [lr_factor(k, 8, cosine) for k in (0, 2, 4, 8)] == pytest.approx(
        [1.0, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.0]
    )
    assert lr_factor(99, 8, cosine) == 0.0  # a step beyond the end never rises again


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        ("cosine_with_restarts", {"num_cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"power": 2.0, "final_lr_ratio": 0.1}, {"power": 2.0, "lr_end": 0.1}),
    ],
)
def test_rates_are_transformers(name: str, settings: dict[str, float], theirs: dict[str, float]) -> None:
    made = {
        "cosine_with_restarts": get_cosine_with_hard_restarts_schedule_with_warmup,
        "polynomial": get_polynomial_decay_schedule_with_warmup,
    }[name]
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = made(sgd, num_warmup_steps=4, num_training_steps=40, **theirs)
    expected = []
    for _ in range(44):
        expected.append(schedule.get_last_lr()[0])
        sgd.step()
        schedule.step()
    decay = name.replace("_", "-")
    ours = OptimSettings.model_validate({"warmup_steps": 4, "lr_schedule": decay, **settings})
    found = [lr_factor(k, 40, ours) for k in range(44)]
    assert found[4:] == pytest.approx(expected[4:], abs=1e-12)  # a warm-up's first step learns here
    plain = OptimSettings(warmup_steps=4, lr_schedule="cosine")
    assert [lr_factor(k, 40, plain) for k in range(44)] != pytest.approx(found, abs=0.05)
    with pytest.raises(ValueError, match=rf"with lr_schedule cosine; it is of lr_schedule {decay}"):
        OptimSettings.model_validate({"lr_schedule": "cosine", **settings})


def test_biases_and_norms_are_not_decayed_and_parts_have_their_rates() -> None:
    params = {"unet.w": torch.zeros(2, 2), "unet.b": torch.zeros(2), "text_encoder.w": torch.zeros(3, 3)}
    groups = parameter_groups(params, {"unet": 1e-3, "text_encoder": 1e-4}, 0.1)
    told = [(group["weight_decay"], group["lr"], len(group["params"])) for group in groups]
    assert told == [(0.1, 1e-3, 1), (0.0, 1e-3, 1), (0.1, 1e-4, 1)]
    optimiser = make_optimiser(groups, OptimSettings())
    set_lr(optimiser, 0.5)
    assert [group["lr"] for group in optimiser.param_groups] == [5e-4, 5e-4, 5e-5]
    assert all(group["fused"] for group in optimiser.param_groups)


def test_clipping_is_torchs_own_without_a_pass_of_its_own() -> None:
    def stepped(max_norm: float | None, *, ours: bool) -> tuple[list[torch.Tensor], float]:
        params = [torch.zeros(3, 2, requires_grad=True), torch.zeros(1, requires_grad=True)]
        params[0].grad, params[1].grad = torch.arange(6.0).view(3, 2), torch.tensor([4.0])
        optimiser = make_optimiser([{"params": params, "lr": 0.1}], OptimSettings(eps=1.0))
        norm = gradient_norm(params)
        if ours:
            clipped_step(optimiser, norm, max_norm)
        else:
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, max_norm)
            optimiser.step()
        assert not hasattr(optimiser, "grad_scale")
        return [param.detach() for param in params], norm.item()

    for max_norm in (None, 1.0, 100.0):
        (one, norm), (other, _) = stepped(max_norm, ours=True), stepped(max_norm, ours=False)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
        assert norm == pytest.approx(math.sqrt(55 + 16))
    assert not torch.allclose(stepped(1.0, ours=True)[0][0], stepped(None, ours=True)[0][0])


def test_a_restored_optimiser_goes_on_to_the_bit() -> None:
    def fresh() -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        kernel = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
        params = {"unet.conv": kernel, "unet.bias": torch.randn(4, requires_grad=True)}
        groups = parameter_groups(params, {"unet": 1e-2}, 0.01)
        return params, make_optimiser(groups, OptimSettings())

    def train(params: dict[str, torch.Tensor], optimiser: torch.optim.Optimizer, steps: range) -> None:
        for k in steps:
            torch.manual_seed(k)
            for param in params.values():
                param.grad = torch.randn_like(param)
            optimiser.step()

    params, optimiser = fresh()
    train(params, optimiser, range(3))
    saved = {
        name: t.clone(memory_format=torch.contiguous_format)
        for name, t in optimiser_tensors(optimiser, params).items()
    }
    weights = {name: param.detach().clone() for name, param in params.items()}
    train(params, optimiser, range(3, 6))

    again, restored = fresh()
    with torch.no_grad():
        for name, param in again.items():
            param.copy_(weights[name])
    restore_optimiser(restored, again, saved)
    train(again, restored, range(3, 6))
    assert all(torch.equal(params[name], again[name]) for name in params)

    forgetful, empty = fresh()
    with torch.no_grad():
        for name, param in forgetful.items():
            param.copy_(weights[name])
    train(forgetful, empty, range(3, 6))
    assert not torch.equal(params["unet.conv"], forgetful["unet.conv"])
