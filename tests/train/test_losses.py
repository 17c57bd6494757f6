"""Losses, timesteps and noises that fine-tuners know, against the formulas they come from."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.training_utils import compute_density_for_timestep_sampling
from subjects import check_resumes_exactly, recipe_for

from darkroom.data import draws
from darkroom.errors import RecipeError
from darkroom.recipe import make_recipe
from darkroom.recipe.sections import ObjectiveSettings
from darkroom.train.jobs import Pinned
from darkroom.train.objective import (
    Objective,
    make_objective,
    multires_noise,
    offset_strength,
    row_error,
)
from darkroom.train.setup import make_job

BASE = {
    "_class_name": "DDIMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
T = torch.tensor([0, 100, 500, 999])


def objective(config: dict[str, object] = BASE, **settings: object) -> Objective:
    made = make_objective(config, ObjectiveSettings.model_validate(settings))
    assert isinstance(made, Objective)
    return made


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 4, 6, 5, generator=generator), torch.randn(4, 4, 6, 5, generator=generator)


# ---- losses


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
@pytest.mark.parametrize("kind", ["huber", "smooth-l1"])
def test_huber_losses_are_kohyas(kind: str, schedule: str) -> None:
    out, target = pair()
    made = objective(loss={"type": kind, "huber_c": 0.2, "huber_schedule": schedule, "huber_scale": 1.5})
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    kept = torch.cumprod(1 - betas, 0)
    expected = []
    for row, t in enumerate(T.tolist()):
        c = {
            "constant": 0.2 * 1.5,
            "exponential": 1.5 * math.exp(math.log(0.2) / 1000 * t),
            "snr": 0.8 / (1 + math.sqrt((1 - kept[t]) / kept[t])) ** 2 + 0.2,
        }[schedule]
        smooth = (torch.sqrt((out[row] - target[row]) ** 2 + c**2) - c).mean()
        expected.append(2 * smooth * (c if kind == "huber" else 1))
    found = made.loss(out, target, T)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)
    other = objective(loss={"type": kind, "huber_c": 0.5, "huber_schedule": schedule}).loss(out, target, T)
    assert (other - found).abs().max() > 1e-2


def test_huber_far_below_its_threshold_is_the_square_and_above_it_the_distance() -> None:
    out, target = pair()
    wide = row_error(out, target, None, "huber", torch.full((4,), 1e3))
    torch.testing.assert_close(wide, (out - target).square().mean(dim=(1, 2, 3)), rtol=1e-2, atol=1e-2)
    narrow = row_error(out, target, None, "smooth-l1", torch.full((4,), 1e-4))
    distance = row_error(out, target, None, "l1")
    torch.testing.assert_close(narrow, 2 * distance, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(distance.mean(), F.l1_loss(out, target))


def test_a_mask_holds_for_every_loss() -> None:
    out, target = pair()
    mask = torch.zeros(4, 1, 6, 5)
    mask[..., :2] = 1
    for kind in ("mse", "l1", "huber", "smooth-l1"):
        masked = row_error(out, target, mask, kind, torch.full((4,), 0.1))
        alone = row_error(out[..., :2], target[..., :2], None, kind, torch.full((4,), 0.1))
        torch.testing.assert_close(masked, alone)
        assert not torch.allclose(masked, row_error(out, target, None, kind, torch.full((4,), 0.1)))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_debiased_estimation_weighs_by_the_signal(prediction: str) -> None:
    config = {**BASE, "prediction_type": prediction}
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    kept = torch.cumprod(1 - betas, 0)
    snr = (kept / (1 - kept)).clamp(max=1000)[T]
    expected = {"epsilon": snr**-0.5, "v_prediction": 1 / (snr + 1), "sample": snr**0.5}[prediction]
    found = objective(config, debiased_estimation=True).weights[T]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)
    assert not torch.allclose(found, objective(config).weights[T])


SNR_T = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2, 0)
SNR_T = (SNR_T / (1 - SNR_T))[T]
PREDICTIONS = {"epsilon": SNR_T, "v_prediction": SNR_T + 1, "sample": torch.ones(4, dtype=torch.float64)}
"""The square error of what is predicted, as a multiple of the picture's."""


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_soft_min_snr_is_k_diffusions(prediction: str) -> None:
    """Its weight of sigma = SNR^-0.5, over c_out^2 as its target has it, is on the picture's error."""
    sigma, data = SNR_T**-0.5, 0.5
    weight = (sigma * data) ** 2 / (sigma**2 + data**2) ** 2
    c_out = sigma * data / (sigma**2 + data**2).sqrt()
    expected = weight / c_out**2 / PREDICTIONS[prediction]
    config = {**BASE, "prediction_type": prediction}
    found = objective(config, soft_min_snr_gamma=data**-2).weights[T]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)
    hard = objective(config, min_snr_gamma=data**-2).weights[T]
    assert ((found - hard).abs() / hard).max() > 0.1


@pytest.mark.parametrize(("gamma", "k"), [(0.5, 1.0), (1.0, 3.0)])
def test_p2_weights_are_the_papers(gamma: float, k: float) -> None:
    """The authors' code: 1 / (p2_k + snr)^p2_gamma, snr = 1 / (1 - alphas_cumprod) - 1, of epsilon."""
    found = objective(p2_gamma=gamma, p2_k=k).weights[T]
    torch.testing.assert_close(found.double(), 1 / (k + SNR_T) ** gamma, rtol=1e-4, atol=0)
    for prediction, errors in PREDICTIONS.items():
        other = objective({**BASE, "prediction_type": prediction}, p2_gamma=gamma, p2_k=k).weights[T]
        torch.testing.assert_close(other.double() * errors, found.double() * SNR_T, rtol=1e-4, atol=0)
    assert not torch.allclose(found, objective(p2_gamma=gamma, p2_k=k + 1).weights[T])


def test_the_loss_of_v_is_scaled_as_kohyas() -> None:
    config = {**BASE, "prediction_type": "v_prediction"}
    snr = SNR_T.clamp(max=1000)
    found = objective(config, scale_v_pred_loss_like_noise_pred=True, min_snr_gamma=5).weights[T]
    expected = SNR_T.clamp(max=5) / (SNR_T + 1) * (snr / (snr + 1))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)
    assert not torch.allclose(found, objective(config, min_snr_gamma=5).weights[T], rtol=1e-2)
    with pytest.raises(
        RecipeError, match=r"true, but the model predicts epsilon; allowed: with objective.pred"
    ):
        objective(scale_v_pred_loss_like_noise_pred=True)


# ---- timesteps


def test_a_range_of_timesteps_is_drawn_evenly_and_nothing_else() -> None:
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    found = objective(timesteps={"min": 200, "max": 600}).timesteps(u)
    counts = torch.bincount(found, minlength=1000)
    assert counts[200:600].tolist() == [10] * 400
    assert counts.sum() == counts[200:600].sum()
    assert objective().timesteps(u).min() == 0


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (
            {"distribution": "logit-normal", "mean": -0.5, "std": 0.8},
            {"weighting_scheme": "logit_normal", "logit_mean": -0.5, "logit_std": 0.8},
        ),
        ({"distribution": "mode", "mode_scale": 0.8}, {"weighting_scheme": "mode", "mode_scale": 0.8}),
        (
            {"distribution": "logit-normal"},
            {"weighting_scheme": "logit_normal", "logit_mean": 0.0, "logit_std": 1.0},
        ),
        ({"distribution": "uniform"}, {"weighting_scheme": "none"}),
    ],
)
def test_times_are_distributed_as_diffusers_draws_them(
    settings: dict[str, object], theirs: dict[str, object]
) -> None:
    """The quantiles of 40,000 of each; another distribution's lie elsewhere."""
    count = 40_000
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    given = {"logit_mean": None, "logit_std": None, "mode_scale": None} | theirs
    generator = torch.Generator().manual_seed(0)
    drawn = compute_density_for_timestep_sampling(batch_size=count, generator=generator, **given)
    at = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    expected = torch.quantile(drawn.double(), at)
    found = torch.quantile(objective(timesteps=settings).timesteps(u).double() / 1000, at)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)
    other = {"distribution": "logit-normal", "mean": 1.0, "std": 0.5}
    wrong = torch.quantile(objective(timesteps=other).timesteps(u).double() / 1000, at)
    assert (wrong - expected).abs().max() > 0.1


def test_rectified_flow_has_them_too() -> None:
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    even = make_objective(
        FLOW, ObjectiveSettings(timesteps={"distribution": "uniform", "min": 100, "max": 900})
    )
    torch.testing.assert_close(even.timesteps(u), (100 + 800 * u).float())
    assert not torch.allclose(make_objective(FLOW).timesteps(u), even.timesteps(u))
    out, target = pair()
    soft = {"type": "smooth-l1", "huber_schedule": "constant"}
    found = make_objective(FLOW, ObjectiveSettings(loss=soft)).loss(out, target, T.float())
    torch.testing.assert_close(found, row_error(out, target, None, "smooth-l1", torch.full((4,), 0.1)))


# ---- noise


def test_strength_of_offset_noise_is_kohyas() -> None:
    """offset * share + adaptive * |mean of a channel|, and never below 0."""
    latents = torch.tensor([1.0, -3.0, 0.5]).view(1, 3, 1, 1).expand(2, 3, 4, 5)
    share = torch.tensor([0.5, 0.25]).view(2, 1, 1, 1)
    assert offset_strength(latents, 0.2, None, None) == 0.2
    assert offset_strength(latents, 0.2, share, None).flatten().tolist() == pytest.approx([0.1, 0.05])  # type: ignore[union-attr]
    found = offset_strength(latents, 0.2, share, 0.1)
    assert isinstance(found, torch.Tensor)
    assert found.shape == (2, 3, 1, 1)
    assert found.flatten().tolist() == pytest.approx([0.2, 0.4, 0.15, 0.15, 0.35, 0.1])
    less = offset_strength(latents, 0.2, None, -0.1)
    assert isinstance(less, torch.Tensor)
    assert less[0].flatten().tolist() == pytest.approx([0.1, 0.0, 0.15])


def test_multires_noise_is_kohyas_with_each_rows_own_draws() -> None:
    epochs, rows = np.zeros(2, np.int64), np.array([3, 8])
    found = draws.pyramid(5, epochs, rows, (4, 12, 9), 6, 0.4)
    keys = draws.mix(5, int(draws.Purpose.MULTIRES), epochs, rows).tolist()
    plain = torch.from_numpy(draws.normal(5, epochs, rows, (4, 12, 9)))
    for row, key in enumerate(keys):  # the published loop, on one row
        generator = np.random.Generator(np.random.Philox(key=key))
        noise = plain[row][None].clone()
        for i in range(6):
            r = generator.random() * 2 + 2
            h, w = max(1, int(12 / r**i)), max(1, int(9 / r**i))
            coarse = torch.from_numpy(generator.standard_normal((1, 4, h, w), dtype=np.float32))
            noise += F.interpolate(coarse, size=(12, 9), mode="bilinear") * 0.4**i
            if h == 1 or w == 1:
                break
        ours = multires_noise(plain, torch.from_numpy(found))[row]
        torch.testing.assert_close(ours, (noise / noise.std())[0], atol=1e-5, rtol=1e-5)
    again = draws.pyramid(5, epochs[:1], rows[1:], (4, 12, 9), 6, 0.4)
    assert np.array_equal(again[0], found[1])  # whoever shares the batch
    assert not np.array_equal(draws.pyramid(6, epochs, rows, (4, 12, 9), 6, 0.4), found)


def test_perturbation_is_in_the_input_and_not_in_the_target(base: Path, photos: Path, tmp_path: Path) -> None:
    recipe = recipe_for("lora", base, photos, "objective.noise.perturbation=0.5")
    job = make_job(recipe, Pinned(tmp_path / "run"))
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    more = {**inputs, "noise": inputs["noise"] + 0.5 * inputs["perturbation"]}
    plain = {key: value for key, value in more.items() if key != "perturbation"}
    t = inputs["t"]
    (out, target), (same, moved) = (job.task._predict(one, t) for one in (inputs, plain))  # type: ignore[attr-defined]
    assert torch.equal(out, same)
    assert torch.equal(target, inputs["noise"])
    assert not torch.equal(moved, target)
    other = {key: value for key, value in inputs.items() if key != "perturbation"}
    held = job.task.heldout(inputs)["heldout_loss"]
    assert torch.equal(held, job.task.heldout(other)["heldout_loss"])  # measured without it


def test_strengths_of_noise_are_drawn_picture_by_picture(base: Path, photos: Path, tmp_path: Path) -> None:
    """kohya's noise + max(rand * offset + adaptive * |mean of latents|, 0) * shift, with own draws."""
    noise = "{offset: 0.2, offset_random_strength: true, adaptive_scale: -0.1, perturbation: 0.4, "
    recipe = recipe_for("lora", base, photos, f"objective.noise={noise} perturbation_random_strength: true}}")
    job = make_job(recipe, Pinned(tmp_path / "run"))
    with job.feed(0) as batches:
        columns = next(batches)
        inputs = job.task.inputs(columns, job.device)
    shares = [columns[f"{name}_strength"] for name in ("offset", "perturbation")]
    assert not torch.equal(*shares)
    assert len({float(share) for share in shares[0]}) == len(shares[0]) > 1
    mean = inputs["latents"].mean(dim=(2, 3), keepdim=True).abs()
    strength = torch.clamp(0.2 * shares[0] - 0.1 * mean, min=0)
    torch.testing.assert_close(inputs["noise"], columns["noise"] + strength * columns["offset"])
    assert not torch.allclose(inputs["noise"], columns["noise"] + 0.2 * columns["offset"], atol=1e-3)
    torch.testing.assert_close(inputs["perturbation"], columns["perturbation"] * shares[1])
    again = draws.uniform(
        recipe.train.seed, np.zeros(9, np.int64), np.arange(9), draws.Purpose.OFFSET_STRENGTH
    )
    assert set(shares[0].flatten().tolist()) <= set(again.astype(np.float32).tolist())


ALL = (
    "objective.loss.type=huber",
    "objective.debiased_estimation=true",
    "objective.timesteps={min: 50, max: 900, distribution: mode}",
    "objective.noise={multires_iterations: 4, perturbation: 0.1, perturbation_random_strength: true, "
    "offset: 0.05, offset_random_strength: true, adaptive_scale: 0.02}",
)


def test_a_run_with_all_of_them_resumes_to_the_bit(base: Path, photos: Path, tmp_path: Path) -> None:
    check_resumes_exactly(
        lambda *more: recipe_for("lora", base, photos, *ALL, *more),
        tmp_path,
        control=("objective.noise.perturbation=0.2",),
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("objective.timesteps={min: 500, max: 400}",), "min 500 is not below max 400"),
        (("objective.timesteps.mean=1",), "which distribution logit-normal alone has"),
        (
            ("objective.debiased_estimation=true", "objective.min_snr_gamma=5"),
            "debiased_estimation with min_snr_gamma",
        ),
        (
            ("objective.p2_gamma=1", "objective.soft_min_snr_gamma=4"),
            "p2_gamma with soft_min_snr_gamma: both weigh timesteps",
        ),
        (("objective.p2_k=2",), "p2_k without p2_gamma"),
        (
            ("objective.prediction=sample", "objective.scale_v_pred_loss_like_noise_pred=true"),
            "scale_v_pred_loss_like_noise_pred with prediction sample; use v",
        ),
        (("objective.noise.offset_random_strength=true",), "but offset is 0; set noise.offset"),
        (("objective.noise.adaptive_scale=0.1",), "adaptive_scale, but offset is 0; set noise.offset"),
        (("task=dpo", "objective.p2_gamma=1"), "objective.p2_gamma: given with the task dpo"),
        (("task=distill", "objective.p2_gamma=1"), "objective.p2_gamma: 1.* with the task distill"),
        (
            ("task=distill", "objective.noise.perturbation=0.1"),
            "objective.noise.perturbation: 0.1 with the task distill",
        ),
        (("objective.loss.type=hubert",), "objective.loss.type: 'hubert' was given"),
    ],
)
def test_impossible_pairs_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        make_recipe({"task": "lora", "model": {"base": "tiny"}, "data": {"folder": "x"}}, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"debiased_estimation": True}, "debiased_estimation: true with rectified flow"),
        ({"soft_min_snr_gamma": 4.0}, "soft_min_snr_gamma: 4 with rectified flow"),
        ({"scale_v_pred_loss_like_noise_pred": True}, "noise_pred: true with rectified flow"),
        ({"loss": {"type": "huber"}}, "huber_schedule: snr with rectified flow; allowed: constant"),
        (
            {"timesteps": {"distribution": "logit-normal", "mean": 1.0}},
            "mean or std with rectified flow; say objective.flow.mean",
        ),
    ],
)
def test_what_rectified_flow_has_not_is_refused(settings: dict[str, object], message: str) -> None:
    from darkroom.train.objective import scheduler_config

    with pytest.raises(RecipeError, match=message):
        scheduler_config(ObjectiveSettings.model_validate(settings), FLOW)


def test_a_range_beyond_the_schedule_is_refused() -> None:
    for config in (BASE, FLOW):
        with pytest.raises(RecipeError, match=r"objective.timesteps.max: 2000; allowed: 0 to 1000"):
            make_objective(config, ObjectiveSettings(timesteps={"max": 2000}))
        with pytest.raises(RecipeError, match=r"objective.timesteps.min: 1000; allowed: 0 to 1000"):
            make_objective(config, ObjectiveSettings(timesteps={"min": 1000}))
        make_objective(config, ObjectiveSettings(timesteps={"min": 999, "max": 1000}))
