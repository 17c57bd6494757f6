"""Optimisers of our own against those whose numbers they have, and AdamW where its kernel takes no scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import prodigyopt
import pytest
import torch
from torch import Tensor

from darkroom.hardware import accelerator
from darkroom.recipe.sections import OptimSettings
from darkroom.train.optim import (
    Adafactor,
    Prodigy,
    make_optimiser,
    optimiser_numbers,
    optimiser_tensors,
    parameter_groups,
    restore_optimiser,
)
from darkroom.train.step import clipped_step, gradient_norm

SHAPES = {"unet.m": (24, 40), "unet.k": (4, 3, 3, 3), "unet.b": (6,)}


def groups_of(decay: float) -> list[dict[str, Any]]:
    """Matrices and kernels with weight decay, one of them zero as a new adapter's, and a bias without."""
    torch.manual_seed(0)
    params = [torch.randn(shape) for shape in SHAPES.values()]
    params[1].zero_()
    for param in params:
        param.requires_grad_()
    return [{"params": params[:2], "weight_decay": decay}, {"params": params[2:], "weight_decay": 0.0}]


def walked(
    optimiser: torch.optim.Optimizer, steps: int = 8, rates: list[float] | None = None
) -> list[Tensor]:
    """The weights after some steps that descend from some hills."""
    params = [param for group in optimiser.param_groups for param in group["params"]]
    for k in range(steps):
        torch.manual_seed(k)
        for param in params:
            param.grad = param.detach() + 0.3 * torch.randn_like(param)
        for group in optimiser.param_groups if rates else ():
            group["lr"] = rates[k]
        optimiser.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_pytorchs(decay: float) -> None:
    eps = (1e-18, 1e-3)
    ours = walked(Adafactor(groups_of(decay), lr=1e-2, eps=eps))
    theirs = walked(torch.optim.Adafactor(groups_of(decay), lr=1e-2, eps=eps))
    other = walked(Adafactor(groups_of(decay), lr=1.1e-2, eps=eps))
    for one, two, three in zip(ours, theirs, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
        assert not torch.allclose(one, three, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"weight_decay": 0.1},
        {"use_bias_correction": True, "d_coef": 2.0},
        {"safeguard_warmup": True},
    ],
)
def test_prodigy_is_its_authors(more: dict[str, Any]) -> None:
    """The rate that is found as well, over a warm-up and in its full height."""
    given = {key: value for key, value in more.items() if key != "weight_decay"}
    rates = [0.25, 0.5, 0.75, *[1.0] * 17]
    made = [kind(groups_of(more.get("weight_decay", 0.0)), **given) for kind in (Prodigy, prodigyopt.Prodigy)]
    ours, theirs = (walked(one, 20, rates) for one in made)
    [found] = [state["d"] for state in made[0].state.values() if "d" in state]
    assert float(found) == pytest.approx(made[1].param_groups[0]["d"], rel=1e-4)
    assert float(found) > 100 * 1e-6  # it has found one
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=5e-5)
    other = walked(Prodigy(groups_of(0.0), betas=(0.8, 0.999), **given), 20, rates)
    assert (ours[0] - other[0]).abs().max() > 5e-4


def test_prodigy_without_a_gradient_stands_still() -> None:
    groups = groups_of(0.1)
    before = [param.detach().clone() for group in groups for param in group["params"]]
    optimiser = Prodigy(groups)
    for group in optimiser.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimiser.step()
    after = [param.detach() for group in groups for param in group["params"]]
    assert all(map(torch.equal, before, after))
    assert not torch.equal(walked(optimiser, 1)[0], before[0])


@pytest.mark.parametrize("name", ["adafactor", "prodigy"])
def test_a_checkpoint_of_the_packages_goes_on(name: str) -> None:
    """PyTorch's and prodigyopt's states of earlier releases; without them the weights come out elsewhere."""
    kinds = {
        "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "eps": (1e-18, 1e-3)}),
        "prodigy": (prodigyopt.Prodigy, {}),
    }
    kind, given = kinds[name]
    settings = OptimSettings(name=name, lr=given.get("lr", 1.0), weight_decay=0.0)

    def params_of() -> dict[str, Tensor]:
        values = [param for group in groups_of(0.0) for param in group["params"]]
        return dict(zip(SHAPES, values, strict=True))

    def grouped(params: dict[str, Tensor]) -> list[dict[str, Any]]:
        return parameter_groups(params, {"unet": settings.lr}, 0.0, settings)

    params = params_of()
    theirs = make_optimiser(grouped(params), settings)
    theirs.inner = [kind(grouped(params), **given)]
    walked(theirs.inner[0], 5)
    kept = {key: param.detach().clone() for key, param in params.items()}
    tensors = {key: value.clone() for key, value in optimiser_tensors(theirs, params).items()}
    numbers = optimiser_numbers(theirs, params)
    expected = walked(theirs.inner[0], 5)

    def gone_on(*, restores: bool) -> list[Tensor]:
        again = params_of()
        with torch.no_grad():
            for key, param in again.items():
                param.copy_(kept[key])
        ours = make_optimiser(grouped(again), settings)
        if restores:
            restore_optimiser(ours, again, tensors, numbers)
        return walked(ours.inner[0], 5)

    for one, two in zip(gone_on(restores=True), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(gone_on(restores=False)[0], expected[0], rtol=1e-4, atol=1e-6)


# ---- AdamW's fused kernel on Metal reads neither the scale of the gradients nor whether they overflowed


def stepped(norm_limit: float | None, odd: Tensor | None = None) -> list[Tensor]:
    settings = OptimSettings(lr=1e-2)
    params = {key: torch.full(shape, 0.5).requires_grad_() for key, shape in SHAPES.items()}
    optimiser = make_optimiser(parameter_groups(params, {"unet": 1e-2}, 0.0), settings)
    for k in range(3):
        torch.manual_seed(k)
        for param in params.values():
            param.grad = 10.0**k * torch.randn_like(param)
        clipped_step(optimiser, gradient_norm(params.values()), norm_limit, odd)
    return [param.detach() for param in params.values()]


def test_gradients_are_clipped_and_steps_left_out_on_metal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped, still = stepped(1.0), stepped(1.0, torch.tensor(1.0))
    fused = torch._fused_adamw_

    def passing_by(*args: Any, **kwargs: Any) -> None:
        fused(*args, **{**kwargs, "grad_scale": None, "found_inf": None})

    monkeypatch.setattr(torch, "_fused_adamw_", passing_by)
    assert not torch.allclose(stepped(1.0)[0], clipped[0])  # the control: what such a kernel makes of it
    assert not torch.equal(stepped(1.0, torch.tensor(1.0))[0], still[0])
    assert accelerator.kind_of("mps").scaled_adamw is False
    monkeypatch.setattr(accelerator, "CPU", replace(accelerator.CPU, scaled_adamw=False))
    for found, wanted in ((stepped(1.0), clipped), (stepped(1.0, torch.tensor(1.0)), still)):
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    for one, two in zip(stepped(1.0, torch.tensor(0.0)), clipped, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_an_overflowing_step_in_fp16_is_left_out_on_metal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's scaler gives fused AdamW `found_inf`; where that is passed by, it has to skip the step."""

    def after_overflow() -> Tensor:
        param = torch.ones(4, requires_grad=True)
        optimiser = make_optimiser(parameter_groups({"unet.b": param}, {"unet": 1e-2}, 0.0), OptimSettings())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(param.sum() * float("inf")).backward()
        scaler.unscale_(optimiser.inner[0])
        scaler.step(optimiser.inner[0])
        return param.detach()

    assert torch.equal(after_overflow(), torch.ones(4))
    fused = torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *a, **k: fused(*a, **{**k, "grad_scale": None, "found_inf": None})
    )
    assert after_overflow().isnan().all()  # the control
    monkeypatch.setattr(accelerator, "CPU", replace(accelerator.CPU, scaled_adamw=False))
    assert torch.equal(after_overflow(), torch.ones(4))
