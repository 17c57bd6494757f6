"""A1111's schedules of sigmas: Euler and DPM++ 2M on them are k-diffusion's, by its formulas written here."""

from __future__ import annotations

import itertools
import math
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from scipy import stats

from darkroom.errors import InputError
from darkroom.options import A1111_SCHEDULES, SIGMAS
from darkroom.sample import denoise
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Condition, Row
from darkroom.sample.schedule import Schedule, _beta_quantiles

SHAPE = (4, 8, 8)
SD = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}
CUMPROD = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
TRAINED = np.sqrt((1 - CUMPROD) / CUMPROD)
LOW, HIGH = float(TRAINED[0]), float(TRAINED[-1])
SD_STEPS = [14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029]
XL_STEPS = [14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029]


def at_timesteps(timesteps: np.ndarray) -> list[float]:
    """k-diffusion's t_to_sigma: log-linear between the training timesteps."""
    found = []
    for t in timesteps:
        low, share = int(t), t - int(t)
        high = min(low + 1, 999)
        found.append(math.exp((1 - share) * math.log(TRAINED[low]) + share * math.log(TRAINED[high])))
    return found


def polyexponential(n: int, rho: float = 1.0) -> list[float]:
    ramp = np.linspace(1, 0, n) ** rho
    return list(np.exp(ramp * (math.log(HIGH) - math.log(LOW)) + math.log(LOW)))


def aligned(n: int, known: list[float]) -> list[float]:
    rising = np.interp(np.linspace(0, 1, n), np.linspace(0, 1, len(known)), np.log(known[::-1]))
    return list(np.exp(rising)[::-1])


def ddim(n: int) -> list[float]:
    stride = max(1000 // n, 1)
    return [float(TRAINED[at]) for at in range(1, 1000, stride)][::-1]


A1111 = {
    "exponential": polyexponential,
    "beta": lambda n: [LOW + stats.beta.ppf(x, 0.6, 0.6) * (HIGH - LOW) for x in 1 - np.linspace(0, 1, n)],
    "kl_optimal": lambda n: [
        math.tan(i / n * math.atan(LOW) + (1 - i / n) * math.atan(HIGH)) for i in range(n)
    ],
    "align_your_steps": lambda n: aligned(n, SD_STEPS),
    "simple": lambda n: [float(TRAINED[-(1 + int(x * 1000 / n))]) for x in range(n)],
    "normal": lambda n: at_timesteps(np.linspace(999, 0, n)),
    "ddim_uniform": ddim,
}
"""The sigmas of so many steps, without the end: zero, or with KL Optimal the lowest that was trained."""


def fake_unet(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A smooth function of latents and timestep, in place of a U-Net."""
    mixed = 0.6 * x + 0.3 * x.roll(1, -1) + 0.2 * x.flip(-2)
    return torch.sin(mixed + t.float().reshape(-1, 1, 1, 1) / 150) + 0.2 * x.roll(1, 1)


def noise() -> torch.Tensor:
    return torch.randn((1, *SHAPE), generator=torch.Generator().manual_seed(11))


def predicted(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """k-diffusion's denoiser: the picture in x, by the timestep of sigma."""
    t = torch.tensor([np.interp(math.log(sigma), np.log(TRAINED), np.arange(1000))])
    return x - sigma * fake_unet((x / math.sqrt(sigma**2 + 1)).float(), t).double()


def theirs(solver: str, sigmas: list[float], end: float = 0.0) -> torch.Tensor:
    """k-diffusion's sample_euler and sample_dpmpp_2m."""
    levels = [*sigmas, end]
    x, before = noise().double() * sigmas[0], None
    for i, (sigma, sigma_to) in enumerate(itertools.pairwise(levels)):
        x0 = predicted(x, sigma)
        if solver == "euler":
            x = x + (x - x0) / sigma * (sigma_to - sigma)
            continue
        if before is None or sigma_to == 0:
            mixed = x0
        else:
            r = math.log(levels[i - 1] / sigma) / math.log(sigma / sigma_to)
            mixed = (1 + 1 / (2 * r)) * x0 - before / (2 * r)
        x, before = sigma_to / sigma * x + (1 - sigma_to / sigma) * mixed, x0
    return x[0]


def ours(solver: str, steps: int, **options: Any) -> torch.Tensor:
    table = make_table(solver, SD, steps, **options)
    # k-diffusion's first noise; diffusers rounds that of DPM++ up to variance one.
    row = Row(table, noise()[0] * float(table.levels_S2[0, 1]), Condition(torch.zeros(1, 1)))
    *_, last = denoise(lambda x, t, text, added: fake_unet(x, t), [row])
    return last.latents_BCHW[0].double()


def off(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made - wanted).abs().max())


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
@pytest.mark.parametrize("sigmas", A1111)
def test_pictures_are_those_of_k_diffusion_on_a1111s_sigmas(sigmas: str, solver: str) -> None:
    for steps in (7, 11, 20, 30):
        if solver == "dpmpp_2m" and sigmas in ("exponential", "beta"):
            continue  # diffusers has these and cuts the timesteps' fractions off: test_solvers has that
        if solver == "dpmpp_2m" and sigmas == "kl_optimal" and steps < 15:
            continue  # as diffusers, the last of few steps is of the first order
        end = LOW if sigmas == "kl_optimal" else 0.0
        wanted = theirs(solver, A1111[sigmas](steps), end)
        if solver == "dpmpp_2m":  # as in diffusers, what is left of the noise counts in the latents' scale
            wanted = wanted / math.sqrt(1 + end**2)
        assert off(ours(solver, steps, sigmas=sigmas), wanted) < 2e-3, steps
        for other in SIGMAS:
            if other != sigmas:
                assert off(ours(solver, steps, sigmas=other), wanted) > 4e-3, (steps, other)


def test_align_your_steps_has_a_schedule_of_its_own_for_sdxl() -> None:
    wanted = theirs("euler", aligned(10, XL_STEPS))
    assert off(ours("euler", 10, sigmas="align_your_steps", is_sdxl=True), wanted) < 2e-3
    assert off(ours("euler", 10, sigmas="align_your_steps"), wanted) > 4e-3
    published = diffusers.schedulers.AysSchedules
    assert SD_STEPS[:10] == pytest.approx(published["StableDiffusionSigmas"][:10], abs=6e-4)
    assert XL_STEPS[:10] == pytest.approx(published["StableDiffusionXLSigmas"][:10], abs=6e-4)


def test_ddims_spacing_may_have_a_step_more_and_one_step_is_from_pure_noise() -> None:
    assert len(make_table("euler", SD, 30, sigmas="ddim_uniform")) == 31
    assert len(make_table("euler", SD, 20, sigmas="ddim_uniform")) == 20
    for sigmas in SIGMAS:
        if sigmas != "ddim_uniform":
            assert make_table("euler", SD, 1, sigmas=sigmas).initial_scale == pytest.approx(HIGH, rel=1e-4)


def test_quantiles_are_scipys() -> None:
    shares = np.linspace(0, 1, 101)
    assert _beta_quantiles(shares) == pytest.approx(stats.beta.ppf(shares, 0.6, 0.6), abs=1e-12)
    assert _beta_quantiles(shares, 0.7) == pytest.approx(stats.beta.ppf(shares, 0.7, 0.7), abs=1e-12)
    assert _beta_quantiles(shares, 0.7) != pytest.approx(stats.beta.ppf(shares, 0.6, 0.6), abs=1e-3)


def test_the_schedules_are_the_trained_ones() -> None:
    assert Schedule.from_config(SD).sigmas == pytest.approx(TRAINED, rel=3e-5)
    assert set(A1111_SCHEDULES.values()) == set(SIGMAS)


def test_short_forms_are_the_same_and_two_at_once_are_refused() -> None:
    for name in ("karras", "exponential"):
        assert off(ours("euler", 5, sigmas=name), ours("euler", 5, **{name: True})) == 0
    for given, said in (
        ({"sigmas": "beta", "karras": True}, "Karras and beta sigmas at once"),
        ({"sigmas": "cosine"}, "sigmas 'cosine'"),
    ):
        with pytest.raises(InputError, match=said):
            make_table("euler", SD, 5, **given)
    with pytest.raises(InputError, match="beta sigmas with solver ddim"):
        make_table("ddim", SD, 5, sigmas="beta")
