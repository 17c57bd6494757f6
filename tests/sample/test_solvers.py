"""Every solver's table against diffusers' own scheduler, trajectory by trajectory, in float32."""

from __future__ import annotations

import json
import re
import sys
import types
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from darkroom.errors import InputError
from darkroom.options import SOLVERS
from darkroom.sample import denoise
from darkroom.sample.choice import default_solver, make_table
from darkroom.sample.denoise import Condition, Row
from darkroom.sample.schedule import Schedule
from darkroom.sample.solvers import TERMS

SHAPE = (4, 8, 8)
SEED = 11
SD = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
    "set_alpha_to_one": False,
    "clip_sample": False,
    "skip_prk_steps": True,
}


def class_of(name: str) -> Any:
    """diffusers' class; of one whose module imports torchsde, for noise that is drawn here otherwise."""
    if name != "DPMSolverSDEScheduler":
        return getattr(diffusers, name)
    sys.modules.setdefault("torchsde", types.ModuleType("torchsde"))
    from diffusers.schedulers.scheduling_dpmsolver_sde import DPMSolverSDEScheduler

    return DPMSolverSDEScheduler


CLASSES = {name: class_of(row.scheduler) for name, row in SOLVERS.items()}


def fake_unet(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A smooth function of latents, position and timestep, in place of a U-Net."""
    mixed = 0.6 * x + 0.3 * x.roll(1, -1) + 0.2 * x.flip(-2)
    return torch.sin(mixed + t.float().reshape(-1, 1, 1, 1) / 150) + 0.2 * x.roll(1, 1)


def ours(
    solver: str | None, config: dict[str, Any], steps: int, seed: int = SEED, **options: Any
) -> list[torch.Tensor]:
    table = make_table(solver, config, steps, **options)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((1, *SHAPE), generator=generator)[0]
    row = Row(table, noise * table.initial_scale, Condition(torch.zeros(1, 1)), generator=generator)
    return [state.latents_BCHW[0] for state in denoise(lambda x, t, text, added: fake_unet(x, t), [row])]


class Path:
    """Noise of one Brownian path over sigma: to the middle of a step, then over the whole of it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.begun: tuple[float, torch.Tensor] | None = None

    def __call__(self, sigma: torch.Tensor, sigma_to: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn((1, *SHAPE), generator=self.generator)
        if self.begun is None:
            self.begun = float(sigma_to), drawn
            return drawn
        middle, first = self.begun
        self.begun = None
        walked, rest = float(sigma) - middle, middle - float(sigma_to)
        return (walked**0.5 * first + rest**0.5 * drawn) / (walked + rest) ** 0.5


def third_order_sde(config: dict[str, Any], steps: int, seed: int) -> list[torch.Tensor]:
    """k-diffusion's dpmpp_3m_sde, eta 1, on diffusers' levels; diffusers' own third order is another."""
    scheduler = CLASSES["dpmpp_2m"].from_config(config)
    scheduler.set_timesteps(steps)
    sigmas = scheduler.sigmas.double()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((1, *SHAPE), generator=generator).double() * (sigmas[0] ** 2 + 1).sqrt()
    earlier: list[torch.Tensor] = []
    widths: list[torch.Tensor] = []
    trajectory = []
    for i, t in enumerate(scheduler.timesteps):
        sigma, sigma_to = sigmas[i], sigmas[i + 1]
        alpha = 1 / (sigma**2 + 1).sqrt()
        out = fake_unet((x * alpha).float(), t).double()
        x0 = {"epsilon": x - sigma * out, "v_prediction": alpha**2 * x - alpha * sigma * out, "sample": out}[
            config.get("prediction_type", "epsilon")
        ]
        noise = torch.randn((1, *SHAPE), generator=generator).double()
        if sigma_to == 0:
            x = x0
        else:
            h = (sigma / sigma_to).log()
            twice = 2 * h
            x = (-twice).exp() * x - (-twice).expm1() * x0
            phi_2 = (-twice).expm1() / twice + 1
            if len(earlier) > 1:
                r0, r1 = widths[-1] / h, widths[-2] / h
                d1_0, d1_1 = (x0 - earlier[-1]) / r0, (earlier[-1] - earlier[-2]) / r1
                d2 = (d1_0 - d1_1) / (r0 + r1)
                x = x + phi_2 * (d1_0 + d2 * r0) - (phi_2 / twice - 0.5) * d2
            elif earlier:
                x = x + phi_2 * (x0 - earlier[-1]) * h / widths[-1]
            x = x + noise * sigma_to * (-(-twice).expm1()).sqrt()
            widths.append(h)
        earlier.append(x0)
        trajectory.append((x / (sigma_to**2 + 1).sqrt())[0].float())
    return trajectory


def theirs(
    solver: str, config: dict[str, Any], steps: int, seed: int = SEED, eta: float = 0.0
) -> list[torch.Tensor]:
    if solver == "dpmpp_3m_sde":
        return third_order_sde(config, steps, seed)
    scheduler = CLASSES[solver].from_config(config)
    scheduler.set_timesteps(steps)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)  # without it, two equal first timesteps make diffusers skip one
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((1, *SHAPE), generator=generator) * scheduler.init_noise_sigma
    if solver == "dpmpp_sde":
        scheduler.noise_sampler = Path(generator)
    extra: dict[str, Any] = {"eta": eta} if solver == "ddim" else {}
    if solver in ("ddim", "euler", "euler_a", "dpmpp_2m", "dpmpp_2m_sde", "lcm"):
        extra["generator"] = generator
    trajectory = []
    for t in scheduler.timesteps:
        out = fake_unet(scheduler.scale_model_input(x, t), t)
        x = scheduler.step(out, t, x, **extra, return_dict=False)[0]
        trajectory.append(x[0])
    return trajectory


def error(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest difference at any step, over 1e-4 * max(1, max|x|): at most 1 passes."""
    assert len(a) == len(b)
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        assert torch.isfinite(x).all()
        worst = max(worst, float((x - y).abs().max() / (1e-4 * max(1.0, float(y.abs().max())))))
    return worst


def configured(solver: str, **settings: Any) -> dict[str, Any]:
    config = {**SD, "_class_name": CLASSES[solver].__name__, **settings}
    if solver == "dpmpp_2m_sde":
        config["algorithm_type"] = "sde-dpmsolver++"
    return config


PREDICTIONS = ("epsilon", "v_prediction", "sample")
NOT_IN_DIFFUSERS = {(solver, "sample") for solver in ("pndm", "euler_a", "heun", "dpmpp_sde")}
PAIRS = [(s, p) for s in SOLVERS for p in PREDICTIONS if (s, p) not in NOT_IN_DIFFUSERS]


@pytest.mark.parametrize("steps", [5, 20, 50])
@pytest.mark.parametrize(("solver", "prediction"), PAIRS)
def test_follows_diffusers(solver: str, prediction: str, steps: int) -> None:
    config = configured(solver, prediction_type=prediction)
    reference = theirs(solver, config, steps)
    named = "dpmpp_3m_sde" if solver == "dpmpp_3m_sde" else None
    assert error(ours(named, config, steps), reference) <= 1
    # Controls: another seed, and another solver, are far off.
    assert error(ours(named, config, steps, seed=SEED + 1), reference) > 100
    other = ours("lcm" if solver != "lcm" else "ddim", config, steps)
    assert error([other[-1]], [reference[-1]]) > 100


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(
        (solver, {"timestep_spacing": spacing})
        for solver in CLASSES
        if solver != "lcm"
        for spacing in ("leading", "trailing", "linspace")
    ),
    *(
        (solver, {sigmas: True})
        for sigmas in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
        for solver in (
            "euler",
            "dpmpp_2m",
            "dpmpp_2m_sde",
            "unipc",
            "lms",
            "heun",
            "dpmpp_sde",
            "dpmpp_3m_sde",
        )
    ),
    *(
        (
            solver,
            {
                "rescale_betas_zero_snr": True,
                "timestep_spacing": "trailing",
                "prediction_type": "v_prediction",
            },
        )
        for solver in CLASSES
        if solver != "pndm"
    ),
    *((solver, {"beta_schedule": "squaredcos_cap_v2"}) for solver in CLASSES),
    *((solver, {"beta_schedule": "linear", "num_train_timesteps": 500}) for solver in CLASSES),
    ("euler", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 20.0}),
    ("euler", {"final_sigmas_type": "sigma_min"}),
    (
        "dpmpp_2m",
        {"use_karras_sigmas": True, "beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1},
    ),
    ("dpmpp_2m", {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1}),
    ("dpmpp_2m", {"final_sigmas_type": "sigma_min"}),
    ("dpmpp_2m", {"final_sigmas_type": "sigma_min", "use_karras_sigmas": True}),
    ("dpmpp_2m", {"final_sigmas_type": "sigma_min", "lower_order_final": False, "solver_order": 3}),
    *(
        ("dpmpp_2m", {"solver_order": order, "solver_type": kind, **more})
        for order in (1, 2, 3)
        for kind in ("midpoint", "heun")
        for more in ({}, {"euler_at_final": True}, {"lower_order_final": False})
    ),
    *(
        ("dpmpp_2m_sde", {"solver_order": order, "solver_type": kind})
        for order in (1, 2)
        for kind in ("midpoint", "heun")
    ),
    *(
        ("unipc", {"solver_order": order, "solver_type": kind})
        for order in (1, 2, 3)
        for kind in ("bh1", "bh2")
    ),
    ("unipc", {"disable_corrector": [0, 2]}),
    ("unipc", {"final_sigmas_type": "sigma_min", "lower_order_final": False}),
    ("ddim", {"set_alpha_to_one": True}),
    ("ddim", {"clip_sample": True}),
    ("ddim", {"clip_sample": True, "clip_sample_range": 2.5, "prediction_type": "v_prediction"}),
    ("lcm", {"clip_sample": True}),
    ("lcm", {"original_inference_steps": 100, "timestep_scaling": 3.0}),
    ("pndm", {"prediction_type": "v_prediction", "timestep_spacing": "linspace"}),
    ("pndm", {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
]


@pytest.mark.parametrize("steps", [5, 20, 50])
@pytest.mark.parametrize(("solver", "settings"), VARIANTS, ids=str)
def test_follows_diffusers_settings(solver: str, settings: dict[str, Any], steps: int) -> None:
    config = configured(solver, **settings)
    named = "dpmpp_3m_sde" if solver == "dpmpp_3m_sde" else None
    assert error(ours(named, config, steps), theirs(solver, config, steps)) <= 1


@pytest.mark.parametrize("settings", [{"solver_order": 3}, {"final_sigmas_type": "sigma_min"}], ids=str)
def test_few_steps_end_in_lower_order_as_in_diffusers(settings: dict[str, Any]) -> None:
    """Few are fewer than 15: the very step at which it changes is diffusers'."""
    config = configured("dpmpp_2m", **settings)
    for steps in (11, 12, 13, 14, 15, 16):
        reference = theirs("dpmpp_2m", config, steps)
        assert error(ours(None, config, steps), reference) <= 1
        other = ours(None, {**config, "lower_order_final": False}, steps)
        assert (error(other, reference) > 1) == (steps < 15)


def test_only_noisy_solvers_draw() -> None:
    """A draw moves a row's generator on, so a solver that needs none takes none; nor LCM at its last step."""
    draws = {name: make_table(name, configured(name), 4).draws_S for name in SOLVERS}
    noisy = {"euler_a": [True] * 4, "dpmpp_2m_sde": [True] * 4, "lcm": [True, True, True, False]}
    noisy |= {"dpmpp_sde": [*[True] * 6, False], "dpmpp_3m_sde": [True] * 4}
    assert {name: list(some) for name, some in draws.items() if any(some)} == noisy
    assert all(make_table("ddim", configured("ddim"), 4, eta=0.1).draws_S)


def test_lcm_scales_its_timesteps_as_diffusers_does() -> None:
    """What is kept of x is small: its size shows in the coefficients alone."""
    scheduler = CLASSES["lcm"].from_config(configured("lcm"))
    scheduler.set_timesteps(4)
    table = make_table("lcm", configured("lcm"), 4)
    skips = [float(scheduler.get_scalings_for_boundary_condition_discrete(t)[0]) for t in scheduler.timesteps]
    levels = [*(float(scheduler.alphas_cumprod[t]) for t in scheduler.timesteps[1:]), 1.0]
    expected = [level**0.5 * skip for level, skip in zip(levels, skips, strict=True)]
    found = table.values_SK[:, TERMS].tolist()
    assert found == pytest.approx(expected, rel=1e-4, abs=0)
    twice = make_table("lcm", configured("lcm", timestep_scaling=11.0), 4).values_SK[:, TERMS].tolist()
    assert twice != pytest.approx(expected, rel=1e-2, abs=0)


@pytest.mark.parametrize("steps", [5, 20, 50])
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_ddim_with_noise(eta: float, steps: int) -> None:
    config = configured("ddim")
    reference = theirs("ddim", config, steps, eta=eta)
    assert error(ours("ddim", config, steps, eta=eta), reference) <= 1
    assert error(ours("ddim", config, steps, eta=eta - 0.1), reference) > 10


@pytest.mark.parametrize("wrong", [{"beta_end": 0.0121}, {"steps_offset": 0}])
def test_a_wrong_setting_is_seen(wrong: dict[str, Any]) -> None:
    """Control: the tolerance notices a last beta that is off by 1 %."""
    config = configured("ddim")
    assert error(ours(None, {**config, **wrong}, 20), theirs("ddim", config, 20)) > 1


FOLDERS = {
    "sd15": {**SD, "_class_name": "PNDMScheduler", "trained_betas": None},
    "sdxl": {
        **SD,
        "_class_name": "EulerDiscreteScheduler",
        "interpolation_type": "linear",
        "prediction_type": "epsilon",
        "sample_max_value": 1.0,
        "timestep_spacing": "leading",
        "use_karras_sigmas": False,
    },
    "sd2": {**SD, "_class_name": "DDIMScheduler", "prediction_type": "v_prediction"},
}


@pytest.mark.parametrize("folder", list(FOLDERS))
@pytest.mark.parametrize("solver", [solver for solver in SOLVERS if solver != "dpmpp_2m_sde"])
def test_another_solver_on_a_folder_is_from_config(folder: str, solver: str) -> None:
    """Asking for a solver by name is what `Scheduler.from_config(pipe.scheduler.config)` is in diffusers."""
    config = FOLDERS[folder]
    assert error(ours(solver, config, 12), theirs(solver, config, 12)) <= 1


@pytest.mark.parametrize(("solver", "prediction"), [*PAIRS, ("euler_a", "sample")])
def test_a_perfect_model_gives_the_picture_back(solver: str, prediction: str) -> None:
    """Without diffusers: with the true x0 known, every solver ends on it."""
    config = configured(solver, prediction_type=prediction, set_alpha_to_one=True)
    schedule = Schedule.from_config(config)
    truth = torch.randn((1, *SHAPE), generator=torch.Generator().manual_seed(1))
    levels = torch.from_numpy(schedule.alphas_cumprod)

    def oracle(x: torch.Tensor, t: torch.Tensor, *_: object) -> torch.Tensor:
        low = t.double().floor().long().clamp(max=len(levels) - 2)
        alpha = levels[low].lerp(levels[low + 1], t.double() - low).sqrt()
        sigma = (1 - alpha**2).sqrt()
        noise = (x - alpha * truth) / sigma
        out = {"epsilon": noise, "v_prediction": alpha * noise - sigma * truth, "sample": truth.double()}
        return out[prediction].float()

    table = make_table(solver, config, 20)
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    row = Row(table, noise * table.initial_scale, Condition(torch.zeros(1, 1)))
    *_, last = denoise(oracle, [row])
    assert (last.x0_BCHW - truth).abs().max() < 0.02
    assert (last.latents_BCHW - truth).abs().max() < 0.05
    assert (noise - truth).abs().max() > 1


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 999, 1000])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("solver", [solver for solver in SOLVERS if solver != "lcm"])
def test_any_number_of_steps(solver: str, spacing: str, steps: int) -> None:
    table = make_table(solver, configured(solver), steps, spacing=spacing)
    twice = solver in ("heun", "dpmpp_sde")
    assert len(table) == (2 * steps - 1 if twice else steps + (solver == "pndm" and steps > 1))
    assert table.num_steps == steps
    assert all(0 <= t <= 999 for t in table.timesteps)
    assert table.timesteps == sorted(table.timesteps, reverse=True)
    if steps < 5:
        assert torch.isfinite(ours(solver, configured(solver), steps, spacing=spacing)[-1]).all()


def test_unipcs_last_step_to_the_picture_is_of_the_first_order_whatever_is_asked() -> None:
    """diffusers divides by an infinite step of lambda there."""
    table = make_table("unipc", configured("unipc", lower_order_final=False, solver_order=3), 10)
    assert np.isfinite(table.values_SK[:, TERMS:]).all()
    last = table.values_SK[-1, TERMS:]
    lower = make_table("unipc", configured("unipc", solver_order=3), 10).values_SK
    assert last[0] == pytest.approx(lower[-1, TERMS], abs=1e-6)
    before = table.values_SK[-2, TERMS:] - lower[-2, TERMS:]
    assert np.abs(before).max() > 1e-3  # the step before stays as high as asked


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_configuration_from_a_file_is_the_same(prediction: str) -> None:
    config = configured("euler", prediction_type=prediction)
    read = json.loads(json.dumps(config))
    for solver in ("euler", "ddim", "dpmpp_2m"):
        values = make_table(solver, config, 5).values_SK
        assert np.array_equal(make_table(solver, read, 5).values_SK, values)
        other = make_table(solver, {**config, "prediction_type": "v_prediction"}, 5).values_SK
        assert np.array_equal(other, values) == (prediction == "v_prediction")


def test_history_is_no_longer_than_needed() -> None:
    depths = {solver: make_table(solver, configured(solver), 20).earlier for solver in SOLVERS}
    assert depths == {
        "ddim": 0,
        "pndm": 3,
        "euler": 0,
        "euler_a": 0,
        "dpmpp_2m": 1,
        "dpmpp_2m_sde": 1,
        "unipc": 2,
        "lms": 3,
        "heun": 1,
        "dpmpp_sde": 1,
        "dpmpp_3m_sde": 2,
        "lcm": 0,
    }


def test_default_is_the_folders_scheduler() -> None:
    for solver, cls in CLASSES.items():
        if solver == "dpmpp_3m_sde":  # by name alone: diffusers' class is dpmpp_2m's
            continue
        assert default_solver(configured(solver)) == (solver, ()), cls
    assert make_table(None, configured("unipc"), 9).solver == "unipc"


@pytest.mark.parametrize(
    ("settings", "solver", "said"),
    [
        ({"_class_name": "DDPMScheduler"}, "ddim", "DDPMScheduler is replaced by solver ddim"),
        ({"_class_name": "KDPM2DiscreteScheduler"}, "dpmpp_2m", "KDPM2DiscreteScheduler is replaced"),
        ({"_class_name": "PNDMScheduler", "skip_prk_steps": False}, "pndm", "Runge-Kutta"),
        ({"algorithm_type": "dpmsolver"}, "dpmpp_2m", "dpmsolver++"),
        ({"algorithm_type": "sde-dpmsolver++", "solver_order": 3}, "dpmpp_2m_sde", "third order"),
        ({"_class_name": "DDIMScheduler", "clip_sample": True}, "ddim", "clips x0"),
        ({"_class_name": None}, "ddim", "no scheduler"),
    ],
)
def test_substitutions_are_told(settings: dict[str, Any], solver: str, said: str) -> None:
    table = make_table(None, configured("dpmpp_2m", **settings), 10)
    assert table.solver == solver
    assert any(said in note for note in table.notes)
    assert make_table(None, configured("dpmpp_2m"), 10).notes == ()


def test_a_model_without_a_scheduler_is_taken_for_stable_diffusion() -> None:
    assert error(ours(None, {}, 10), theirs("ddim", configured("ddim"), 10)) <= 1
    assert error(ours("euler", {}, 10), theirs("euler", configured("euler"), 10)) <= 1
    linear = {**configured("ddim"), "beta_schedule": "linear"}
    assert error(ours(None, {}, 10), theirs("ddim", linear, 10)) > 10


def test_another_class_that_is_silent_about_clipping_does_not_clip() -> None:
    """DDIMScheduler clips unless told not to; on SDXL's Euler folder that would ruin latents."""
    silent = {key: value for key, value in configured("euler").items() if key != "clip_sample"}
    free, clipped = configured("ddim", clip_sample=False), configured("ddim", clip_sample=True)
    assert error(ours("ddim", silent, 10), theirs("ddim", free, 10)) <= 1
    assert error(ours("ddim", silent, 10), theirs("ddim", clipped, 10)) > 100


def test_a_solver_that_ignores_zero_terminal_snr_says_so() -> None:
    zero = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    for solver in ("heun", "lms", "dpmpp_sde", "pndm", "euler", "dpmpp_2m"):
        notes = make_table(solver, configured("ddim", **zero), 4).notes
        assert any("zero terminal SNR" in note for note in notes) == (solver not in ("euler", "dpmpp_2m"))
        assert not any("zero terminal SNR" in one for one in make_table(solver, configured("ddim"), 4).notes)


@pytest.mark.parametrize(
    ("solver", "settings", "options", "said"),
    [
        ("dpm", {}, {}, "allowed: ddim, pndm"),
        ("ddim", {"beta_schedule": "sigmoid"}, {}, "beta_schedule 'sigmoid'"),
        ("ddim", {"prediction_type": "flow"}, {}, "prediction_type 'flow'"),
        ("ddim", {"beta_end": 1.5}, {}, "betas must lie in"),
        (None, {"thresholding": True}, {}, "thresholding"),
        (None, {"_class_name": "EDMEulerScheduler"}, {}, "EDMEulerScheduler is not known"),
        ("euler", {}, {"eta": 0.5}, "eta is for ddim alone"),
        ("ddim", {}, {"eta": 1.5}, "eta 1.5; allowed: 0"),
        ("ddim", {}, {"karras": True}, "allowed: euler, euler_a, dpmpp_2m"),
        ("euler", {}, {"spacing": "even"}, "allowed: leading, trailing, linspace"),
        ("pndm", {"prediction_type": "sample"}, {}, "use ddim or euler"),
        ("lcm", {}, {"num_steps": 51}, "allowed: 1 to 50"),
        ("ddim", {}, {"num_steps": 0}, "0 steps; allowed: 1 to 1000"),
        ("ddim", {}, {"num_steps": 1001}, "allowed: 1 to 1000"),
        ("ddim", {"num_train_timesteps": 100}, {"num_steps": 101}, "allowed: 1 to 100"),
        ("ddim", {"rescale_betas_zero_snr": True}, {"spacing": "trailing"}, "use v-prediction"),
    ],
)
def test_refusals(solver: str | None, settings: dict[str, Any], options: dict[str, Any], said: str) -> None:
    options = {"num_steps": 10, **options}
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        make_table(solver, configured("ddim", **settings), **options)
    assert "\n" not in str(caught.value)
