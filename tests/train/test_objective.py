"""The objective against diffusers' DDPMScheduler and closed forms."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler
from pydantic import ValidationError

from darkroom.errors import RecipeError
from darkroom.recipe.sections import NoiseSettings, ObjectiveSettings
from darkroom.train.objective import Objective, min_snr_weights, offset_noise, scheduler_config, square_error

BASE = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "skip_prk_steps": True,
}


def resolved(prediction: str = "epsilon", **noise: object) -> dict[str, object]:
    return scheduler_config(
        ObjectiveSettings(prediction=prediction, noise=NoiseSettings(**noise)),  # type: ignore[arg-type]
        BASE,
    )


def diffusers_of(config: dict[str, object]) -> DDPMScheduler:
    return DDPMScheduler.from_config({k: v for k, v in config.items() if not k.startswith("_")})


CASES = [
    ("scaled-linear", False, "epsilon"),
    ("linear", False, "epsilon"),
    ("cosine", False, "sample"),
    ("scaled-linear", False, "v"),
    ("scaled-linear", True, "v"),
    ("cosine", True, "v"),
]


@pytest.mark.parametrize(("schedule", "zero_snr", "prediction"), CASES)
def test_noise_and_targets_are_those_of_diffusers(schedule: str, zero_snr: bool, prediction: str) -> None:
    config = resolved(prediction, schedule=schedule, zero_terminal_snr=zero_snr)
    theirs, ours = diffusers_of(config), Objective.from_config(config)
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(8, 4, 6, 6, generator=generator) for _ in range(2))
    t = torch.tensor([0, 1, 17, 250, 500, 750, 998, 999])
    torch.testing.assert_close(ours.add_noise(x, noise, t), theirs.add_noise(x, noise, t), atol=1e-4, rtol=0)
    target = {"epsilon": noise, "sample": x, "v": theirs.get_velocity(x, noise, t)}[prediction]
    torch.testing.assert_close(ours.target(x, noise, t), target, atol=1e-4, rtol=0)
    other = Objective.from_config(
        resolved(prediction, schedule=schedule, beta_end=0.02, zero_terminal_snr=False)
    )
    if schedule != "cosine":  # the cosine schedule has no betas to set
        assert (other.add_noise(x, noise, t) - theirs.add_noise(x, noise, t)).abs().max() > 1e-2


def test_zero_terminal_snr_ends_in_pure_noise_and_needs_trailing_steps() -> None:
    config = resolved("v", zero_terminal_snr=True)
    objective = Objective.from_config(config)
    assert objective.alphas[-1] == 0
    assert objective.sigmas[-1] == 1
    assert config["_class_name"] == "DDIMScheduler"  # PNDM cannot
    assert config["timestep_spacing"] == "trailing"
    assert "skip_prk_steps" not in config
    assert Objective.from_config(resolved("v")).alphas[-1] > 0.05


def test_epsilon_with_zero_terminal_snr_is_refused() -> None:
    with pytest.raises(ValidationError, match="pure noise"):
        ObjectiveSettings(prediction="epsilon", noise=NoiseSettings(zero_terminal_snr=True))
    with pytest.raises(RecipeError, match=r"objective.noise.zero_terminal_snr.*prediction=v"):
        scheduler_config(ObjectiveSettings(noise=NoiseSettings(zero_terminal_snr=True)), BASE)


def test_the_models_own_scheduler_stays_where_nothing_is_said() -> None:
    assert scheduler_config(ObjectiveSettings(), BASE) == BASE
    v_base = {**BASE, "prediction_type": "v_prediction"}
    assert Objective.from_config(scheduler_config(ObjectiveSettings(), v_base)).prediction == "v"
    with pytest.raises(RecipeError, match="beta_start"):
        scheduler_config(ObjectiveSettings(noise=NoiseSettings(beta_start=0.5)), BASE)


def test_min_snr_weights_are_the_papers() -> None:
    alphas_cumprod = torch.tensor([0.99, 0.9, 0.5, 0.1, 0.0], dtype=torch.float64)
    snr = [99.0, 9.0, 1.0, 1 / 9, 0.0]
    expected = {
        "epsilon": [min(s, 5) / s if s else 1.0 for s in snr],
        "v": [min(s, 5) / (s + 1) for s in snr],
        "sample": [min(s, 5) for s in snr],
    }
    for prediction, weights in expected.items():
        found = min_snr_weights(alphas_cumprod, prediction, 5.0)  # type: ignore[arg-type]
        torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float64))
    assert min_snr_weights(alphas_cumprod, "v", None).tolist() == [1.0] * 5


@pytest.mark.parametrize("weighs", [{"min_snr_gamma": 5.0}, {"soft_min_snr_gamma": 4.0}, {"p2_gamma": 1.0}])
def test_weights_make_the_three_predictions_one_loss(weighs: dict[str, float]) -> None:
    """One error of the picture weighs the same as epsilon, v or sample (Hang et al. 2023, section 3.4)."""
    config = {p: resolved(p) for p in ("epsilon", "v", "sample")}
    objectives = {
        p: Objective.from_config(c, ObjectiveSettings.model_validate(weighs)) for p, c in config.items()
    }
    generator = torch.Generator().manual_seed(1)
    x, noise, error = (torch.randn(4, 4, 8, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    t = torch.tensor([20, 300, 600, 900])
    alpha, sigma = (
        table.double()[t].view(-1, 1, 1, 1) for table in (objectives["v"].alphas, objectives["v"].sigmas)
    )
    wrong_x = x + 0.01 * error
    noisy = alpha * x + sigma * noise
    wrong = {
        "sample": wrong_x,
        "epsilon": (noisy - alpha * wrong_x) / sigma,
        "v": (alpha * noisy - wrong_x) / sigma,
    }
    losses = [o.loss(wrong[p], o.target(x, noise, t), t) for p, o in objectives.items()]
    torch.testing.assert_close(losses[0], losses[2], rtol=2e-3, atol=0)
    torch.testing.assert_close(losses[1], losses[2], rtol=2e-3, atol=0)
    plain = Objective.from_config(config["epsilon"]).loss(wrong["epsilon"], noise, t)
    assert ((plain - losses[2]).abs() / losses[2]).max() > 0.1


def test_timesteps_cover_the_schedule_evenly() -> None:
    objective = Objective.from_config(resolved())
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    assert torch.bincount(objective.timesteps(u)).tolist() == [4] * 1000
    assert objective.timesteps(torch.tensor([0.0, 0.9999999])).tolist() == [0, 999]


def test_offset_noise_shifts_each_channel_as_a_whole() -> None:
    noise, shift = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 1, 1)
    moved = offset_noise(noise, shift, 0.1) - noise
    torch.testing.assert_close(moved, (0.1 * shift).expand_as(noise), atol=1e-6, rtol=0)
    assert offset_noise(noise, shift, 0.0) is noise


def test_square_error_is_a_rows_mean_in_float32() -> None:
    out = torch.full((2, 1, 2, 2), 3.0, dtype=torch.bfloat16)
    error = square_error(out, torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 1, 2, 2))
    assert error.dtype == torch.float32
    assert error.tolist() == [4.0, 0.0]


def test_a_mask_of_a_single_faint_pixel_is_that_pixels_error() -> None:
    """The mask's own sum divides however small it is; a black mask gives 0."""
    out, target = torch.zeros(1, 2, 4, 4), torch.full((1, 2, 4, 4), 3.0)
    mask = torch.zeros(1, 1, 4, 4)
    assert square_error(out, target, mask).item() == 0
    mask[0, 0, 1, 2] = 0.01
    assert square_error(out, target, mask).item() == pytest.approx(9.0)
    target[0, :, 1, 2] = 1.0
    assert square_error(out, target, mask).item() == pytest.approx(1.0)


def test_betas_may_be_constant_and_not_fall() -> None:
    def asked(start: float, end: float) -> ObjectiveSettings:
        return ObjectiveSettings(noise=NoiseSettings(beta_start=start, beta_end=end))

    config = scheduler_config(asked(0.01, 0.01), {})
    assert (config["beta_start"], config["beta_end"]) == (0.01, 0.01)
    with pytest.raises(RecipeError, match="is more than beta_end"):
        scheduler_config(asked(0.011, 0.01), {})
