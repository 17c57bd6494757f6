"""Rectified flow: times, mixture and target against closed forms, and what is saved of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from pydantic import ValidationError

from darkroom.errors import RecipeError
from darkroom.recipe.sections import FlowSettings, NoiseSettings, ObjectiveSettings
from darkroom.train.objective import (
    FlowObjective,
    Objective,
    make_objective,
    resolution_shift,
    scheduler_config,
)

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
BETAS = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "skip_prk_steps": True,
}


def resolved(base: dict[str, Any] = FLOW, pixels: int = 1024, **settings: Any) -> dict[str, Any]:
    return scheduler_config(ObjectiveSettings(**settings), base, pixels)


def test_the_mixture_is_that_of_diffusers_and_the_target_its_derivative() -> None:
    objective = FlowObjective.from_config(FLOW)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    draw = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(4, 4, 6, 6, generator=draw) for _ in range(2))
    t = torch.tensor([1000.0, 617.0, 250.0, 1.0])
    ours = objective.add_noise(x, noise, t)
    torch.testing.assert_close(ours, scheduler.scale_noise(x, t, noise), atol=1e-6, rtol=0)
    later = objective.add_noise(x, noise, t + 1)
    torch.testing.assert_close((later - ours) * 1000, objective.target(x, noise, t), atol=2e-3, rtol=0)
    assert (ours - objective.add_noise(noise, x, t)).abs().max() > 0.1


def test_times_are_logit_normal_and_shifted() -> None:
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    plain = FlowObjective.from_config(FLOW).timesteps(u).double() / 1000
    z = torch.logit(plain)
    assert z.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert z.std().item() == pytest.approx(1.0, abs=2e-3)
    other = FlowObjective.from_config({**FLOW, "logit_mean": -0.6, "logit_std": 1.4, "shift": 3.0})
    z = torch.logit(other.timesteps(u).double() / 1000)
    assert z.mean().item() == pytest.approx(-0.6 + math.log(3), abs=2e-3)  # a shift adds log(shift)
    assert z.std().item() == pytest.approx(1.4, abs=3e-3)
    ends = other.timesteps(torch.tensor([0.0, 1.0 - 2**-24]))
    assert ends[0] == 0
    assert 990 < ends[1] <= 1000


def test_a_rows_time_does_not_depend_on_the_batch() -> None:
    objective = FlowObjective.from_config(FLOW)
    u = torch.rand(37, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([objective.timesteps(one[None]) for one in u])
    torch.testing.assert_close(objective.timesteps(u), alone, atol=1e-4, rtol=0)
    assert objective.timesteps(u).unique().numel() == 37


def test_the_shift_follows_the_resolution() -> None:
    assert resolution_shift(64 * 64) == 2.0  # 512 px
    assert resolution_shift(128 * 128) == 4.0
    assert resolution_shift(48 * 48) == 1.5
    assert resolution_shift(8 * 8) == 1.0
    assert resolved(pixels=64 * 64)["shift"] == 2.0
    assert resolved(pixels=64 * 64, flow=FlowSettings(shift=3.0))["shift"] == 3.0
    kept = resolved({**FLOW, "shift": 1.7}, 64 * 64, flow=FlowSettings(shift="model"))
    assert kept["shift"] == 1.7
    assert FlowObjective.from_config(kept).shift == 1.7
    silent = {key: value for key, value in FLOW.items() if key != "shift"}
    assert resolved(silent, 64 * 64, flow=FlowSettings(shift="model"))["shift"] == 1.0


def test_the_model_remembers_how_it_is_trained() -> None:
    config = resolved(flow=FlowSettings(mean=-0.4))
    assert (config["logit_mean"], config["logit_std"]) == (-0.4, 1.0)
    again = resolved(config)
    assert again["logit_mean"] == -0.4
    assert make_objective(again) == FlowObjective(-0.4, 1.0, 1.0, 1000)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    assert scheduler.config.shift == config["shift"]


def test_any_base_can_be_trained_as_flow_and_back() -> None:
    flow = resolved(BETAS, prediction="flow")
    assert flow["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert "beta_start" not in flow
    assert isinstance(make_objective(flow), FlowObjective)
    back = resolved(flow, prediction="epsilon")
    objective = make_objective(back)
    assert isinstance(objective, Objective)
    torch.testing.assert_close(objective.alphas, Objective.from_config(BETAS).alphas)
    assert make_objective(resolved(flow, prediction="v")).prediction == "v"
    assert isinstance(make_objective(resolved()), FlowObjective)  # the base's own


REFUSED = [
    ({"min_snr_gamma": 5.0}, r"objective.min_snr_gamma: 5 with rectified flow"),
    ({"noise": NoiseSettings(offset=0.1)}, r"objective.noise.offset: 0.1 with rectified flow"),
    ({"noise": NoiseSettings(zero_terminal_snr=True)}, r"objective.noise.zero_terminal_snr: True"),
    ({"noise": NoiseSettings(schedule="cosine")}, r"objective.noise.schedule: cosine"),
]


@pytest.mark.parametrize(("settings", "told"), REFUSED)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        resolved(**settings)
    with pytest.raises(RecipeError, match=told):
        resolved(BETAS, prediction="flow", **settings)


def test_flow_settings_without_flow_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"objective.flow.*objective.prediction=flow"):
        resolved(BETAS, flow=FlowSettings(mean=1.0))
    for wrong in ({"std": 0.0}, {"shift": 0.0}, {"shift": "sometimes"}):
        with pytest.raises(ValidationError):
            FlowSettings(**wrong)  # type: ignore[arg-type]


def test_the_loss_is_the_plain_mean_square_error() -> None:
    objective = FlowObjective.from_config(FLOW)
    x = torch.zeros(2, 1, 2, 2)
    target = objective.target(x, torch.ones_like(x), torch.tensor([10.0, 900.0]))
    assert objective.loss(x, target, torch.tensor([10.0, 900.0])).tolist() == [1.0, 1.0]
    mask = torch.zeros(2, 1, 2, 2)
    assert objective.loss(x, target, torch.tensor([10.0, 900.0]), mask).tolist() == [0.0, 0.0]
