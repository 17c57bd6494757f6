"""The solvers, each a pure function from a `SolverRequest` to the `SolverTable` it amounts to.

Settings keep the names, meaning and defaults of diffusers' scheduler classes, so that the same scheduler
configuration, seed and number of steps give the same picture there and here. Coefficients of solvers with
history are worked out as vectors over the basis h of table.py.

Notation: `alpha`, `sigma` scale picture and noise at a step, `lam` = log(alpha / sigma); `_to` is the level
that a step goes to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darkroom.errors import InputError
from darkroom.sample.schedule import (
    BETWEEN,
    FLOW_PREDICTION,
    Array,
    Flow,
    Schedule,
    lcm_timesteps,
    multistep_timesteps,
    named_sigmas,
    spaced_timesteps,
)

TWICE = ("heun", "dpmpp_sde", "flow_heun")
"""Solvers that call the U-Net twice a step, the last one apart."""

Levels = tuple[Array, Array, Array]
"""alpha, sigma and lambda, each [S + 1]."""


@dataclass(frozen=True)
class SolverRequest:
    """What a solver is asked for. `settings` are a scheduler configuration's remaining keys."""

    schedule: Schedule
    num_steps: int
    spacing: str
    eta: float = 0.0
    sigmas: str | None = None
    """One of `options.SIGMAS`; None is as the timesteps are spaced."""
    clip: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    start: int = 0
    """The first step that is taken, which has no history; the rows before it are filled and left out."""
    is_sdxl: bool = False
    """Which of the optimised schedules (Align Your Steps) is meant."""

    @property
    def offset(self) -> int:
        """How many timesteps later than 0 leading spacing starts."""
        return int(self.settings.get("steps_offset", 0))

    def spaced(self) -> Array:
        """The timesteps of a solver that ends at its last timestep."""
        return spaced_timesteps(self.spacing, self.schedule.num_train_timesteps, self.num_steps, self.offset)

    @property
    def stride(self) -> int:
        """How far apart diffusers takes neighbouring steps of DDIM and PNDM to be, whatever the spacing."""
        return self.schedule.num_train_timesteps // self.num_steps

    def alphas_cumprod(self, timesteps: Array) -> Array:
        """At whole timesteps; before the first, what the settings say the end of sampling is."""
        whole = timesteps.astype(np.int64)
        known = self.schedule.alphas_cumprod
        end = 1.0 if self.settings.get("set_alpha_to_one", True) else known[0]
        return np.where(whole >= 0, known[np.clip(whole, 0, len(known) - 1)], end)


def ddim(plan: SolverRequest) -> SolverTable:
    """DDIM (Song et al. 2021, equation 12) with any eta; eta 1 is DDPM's ancestral sampling."""
    timesteps = np.round(plan.spaced())
    bar, bar_to = plan.alphas_cumprod(timesteps), plan.alphas_cumprod(timesteps - plan.stride)
    alpha, sigma, alpha_to = np.sqrt(bar), np.sqrt(1 - bar), np.sqrt(bar_to)
    std = plan.eta * np.sqrt(np.maximum((1 - bar_to) / (1 - bar) * (1 - bar / bar_to), 0))
    direction = np.sqrt(np.maximum(1 - bar_to - std**2, 0))
    sheet = Sheet(timesteps)
    sheet.predict(plan.schedule.prediction, alpha, sigma)
    # The noise is (x - alpha * x0) / sigma: of the x0 before clipping, as in diffusers.
    sheet.term(0)[:] = direction / sigma
    sheet.term(1)[:] = -alpha * direction / sigma
    _land_on_x0(sheet, alpha_to, plan.clip)
    sheet.columns[:, NOISE] = std
    return sheet.finish("ddim", plan.num_steps, draws=plan.eta > 0, notes=plan.notes)


def _land_on_x0(sheet: Sheet, weight: Array, clip: float | None) -> None:
    """Add weight * x0, clipped to +-clip where a range is given."""
    if clip is None:
        sheet.term(1)[:] += weight
    else:
        sheet.columns[:, CLIPPED], sheet.columns[:, CLIP_RANGE] = weight, clip


def euler(plan: SolverRequest) -> SolverTable:
    """Euler steps of the probability-flow ODE (Karras et al. 2022, algorithm 2 without churn)."""
    timesteps, sigma = _sigma_levels(plan)
    sigma_to = np.append(sigma[1:], _end(plan))
    sheet = _sigma_sheet(plan, timesteps, sigma)
    sheet.term(0)[:] = sigma_to / sigma
    sheet.term(1)[:] = 1 - sigma_to / sigma
    return sheet.finish("euler", plan.num_steps, initial_scale=_initial_scale(plan, sigma), notes=plan.notes)


def lms(plan: SolverRequest) -> SolverTable:
    """Linear multistep steps of order 4 (k-diffusion's LMS): Adams-Bashforth on unevenly spaced sigmas.

    The polynomial through the slopes (x - x0) / sigma of the last four steps is integrated exactly. From a
    picture (image-to-image) the order rises from 1 as from noise; diffusers starts there with the fourth
    order's weights, for slopes that it does not have.
    """
    timesteps, sigma = _sigma_levels(plan)
    sigma_to = np.append(sigma[1:], _end(plan) if plan.sigmas == "kl_optimal" else 0.0)
    sheet = _sigma_sheet(plan, timesteps, sigma)
    sheet.term(0)[:] = 1.0
    for i in range(plan.start, len(timesteps)):
        order = min(i + 1 - plan.start, 1 + MAX_EARLIER)
        known = sigma[i - order + 1 : i + 1][::-1]
        for back, at in enumerate(known):
            others = np.delete(known, back)
            # Measured from here, where the integral begins, so that close levels do not cancel.
            integral = np.polyint(np.atleast_1d(np.poly(others - sigma[i])))
            weight = np.polyval(integral, sigma_to[i] - sigma[i]) / np.prod(at - others)
            sheet.term(2 * back)[i] += weight / at
            sheet.term(2 * back + 1)[i] -= weight / at
    return sheet.finish("lms", plan.num_steps, initial_scale=_initial_scale(plan, sigma), notes=plan.notes)


def heun(plan: SolverRequest) -> SolverTable:
    """Heun steps (Karras et al. 2022, algorithm 1, without churn): two calls each, the last step one."""
    timesteps, sigma = _sigma_levels(plan)
    at = (np.arange(2 * len(sigma) - 1) + 1) // 2
    sheet = _sigma_sheet(plan, timesteps[at], sigma[at])
    _heun_terms(sheet, np.append(sigma, 0.0))
    return sheet.finish("heun", plan.num_steps, initial_scale=_initial_scale(plan, sigma), notes=plan.notes)


def _heun_terms(sheet: Sheet, sigma: Array) -> None:
    """Call 2i leaves level i by Euler; call 2i - 1 takes the step that came there again, with the mean of the
    slopes (x - x0) / sigma at both its ends."""
    euler, again = slice(0, None, 2), slice(1, None, 2)
    ratio = sigma[1:] / sigma[:-1]
    sheet.term(0)[euler], sheet.term(1)[euler] = ratio, 1 - ratio
    start, end = sigma[:-2], sigma[1:-1]
    half = (end - start) / 2
    sheet.term(0)[again], sheet.term(1)[again] = half / end, -half / end
    sheet.term(2)[again], sheet.term(3)[again] = 1 + half / start, -half / start


def dpmpp_sde(plan: SolverRequest) -> SolverTable:
    """DPM-Solver++ of the second order for the reverse SDE, singlestep (k-diffusion's dpmpp_sde, r = 1/2).

    Call 2i goes from level i to the middle of the step, call 2i + 1 takes the whole step from its start with
    the prediction there. Both noises are of one Brownian path over sigma, as k-diffusion has it: what the
    first drew is found again in x, and only the rest is drawn for the second.
    """
    timesteps, sigma = _sigma_levels(plan)
    start, end = sigma[:-1], sigma[1:]
    middle = np.sqrt(start * end)
    levels, times = np.empty(2 * len(sigma) - 1), np.empty(2 * len(sigma) - 1)
    levels[0::2], levels[1::2] = sigma, middle
    times[0::2], times[1::2] = timesteps, plan.schedule.timesteps_at(middle)
    sheet = _sigma_sheet(plan, times, levels)
    first, second = slice(0, -1, 2), slice(1, None, 2)
    (down, up), (down_to, up_to) = _ancestral(start, middle), _ancestral(start, end)
    sheet.term(0)[first], sheet.term(1)[first] = down / start, 1 - down / start
    sheet.columns[first, NOISE] = up
    share = np.sqrt((start - middle) / (start - end))
    again = up_to * share / up
    sheet.term(0)[second], sheet.term(1)[second] = again, 1 - down_to / start
    sheet.term(2)[second] = down_to / start - again * down / start
    sheet.term(3)[second] = -again * (1 - down / start)
    sheet.columns[second, NOISE] = up_to * np.sqrt(1 - share**2)
    sheet.term(1)[-1] = 1.0  # the last step ends on the picture
    draws = [True] * (len(levels) - 1) + [False]
    scale = _initial_scale(plan, sigma)
    return sheet.finish("dpmpp_sde", plan.num_steps, draws=draws, initial_scale=scale, notes=plan.notes)


def _ancestral(sigma: Array, sigma_to: Array) -> tuple[Array, Array]:
    """What is left of sigma before noise is added, and how much is, to end at `sigma_to`."""
    up = np.sqrt(np.maximum(sigma_to**2 * (sigma**2 - sigma_to**2) / sigma**2, 0))
    return np.sqrt(np.maximum(sigma_to**2 - up**2, 0)), up


def euler_a(plan: SolverRequest) -> SolverTable:
    """Euler steps with ancestral noise (Song et al. 2021's DDPM step in k-diffusion's form)."""
    timesteps, sigma = _sigma_levels(plan)
    down, up = _ancestral(sigma, np.append(sigma[1:], _end(plan) if plan.sigmas == "kl_optimal" else 0.0))
    sheet = _sigma_sheet(plan, timesteps, sigma)
    sheet.term(0)[:] = down / sigma
    sheet.term(1)[:] = 1 - down / sigma
    sheet.columns[:, NOISE] = up
    scale = _initial_scale(plan, sigma)
    return sheet.finish("euler_a", plan.num_steps, draws=True, initial_scale=scale, notes=plan.notes)


def _sigma_levels(plan: SolverRequest) -> tuple[Array, Array]:
    timesteps = plan.spaced()
    sigma = plan.schedule.sigmas_at(timesteps)
    if plan.sigmas is not None:
        sigma = _spread(plan, sigma[-1], sigma[0])
        timesteps = plan.schedule.timesteps_at(sigma)
    return timesteps, sigma


def _spread(plan: SolverRequest, low: float, high: float) -> Array:
    """Falling sigmas [S] as the plan has them, between two or those that its settings say."""
    low = plan.settings.get("sigma_min") or low
    high = plan.settings.get("sigma_max") or high
    name = str(plan.sigmas)
    return named_sigmas(name, plan.schedule, plan.num_steps, low, high, is_sdxl=plan.is_sdxl)


def _end(plan: SolverRequest) -> float:
    """Where the last step ends: on the picture, or at the least noise that was trained. KL Optimal ends there
    too, but for Heun and DPM++ SDE, whose last step is one call to the picture."""
    to_min = plan.settings.get("final_sigmas_type") == "sigma_min" or plan.sigmas == "kl_optimal"
    return float(plan.schedule.sigmas[0]) if to_min else 0.0


def _sigma_sheet(plan: SolverRequest, timesteps: Array, sigma: Array) -> Sheet:
    """x = x0 + sigma * noise; the U-Net sees it scaled to variance one."""
    sheet = Sheet(timesteps)
    sheet.columns[:, SCALE] = 1 / np.sqrt(sigma**2 + 1)
    sheet.predict(plan.schedule.prediction, np.ones_like(sigma), sigma)
    return sheet


def _initial_scale(plan: SolverRequest, sigma: Array) -> float:
    # diffusers' rule: leading spacing starts below the last timestep, so the noise is one variance short.
    return float(sigma.max() if plan.spacing != "leading" else math.sqrt(sigma.max() ** 2 + 1))


def lcm(plan: SolverRequest) -> SolverTable:
    """Latent consistency sampling (Luo et al. 2023, algorithm 3), on the timesteps of the distillation."""
    num_train = plan.schedule.num_train_timesteps
    original = min(int(plan.settings.get("original_inference_steps", 50)), num_train)
    if plan.num_steps > original:
        raise InputError(
            f"{plan.num_steps} steps with solver lcm",
            allowed=f"1 to {original}, the steps it was distilled from",
            mend="4 to 8 are usual",
        )
    timesteps = lcm_timesteps(original, num_train, plan.num_steps)
    bar, bar_to = plan.alphas_cumprod(timesteps), plan.alphas_cumprod(np.append(timesteps[1:], -1))
    bar_to[-1] = 1.0  # the last step ends on the picture itself
    scaled = timesteps * float(plan.settings.get("timestep_scaling", 10.0))
    sigma_data = 0.5
    c_skip = sigma_data**2 / (scaled**2 + sigma_data**2)
    c_out = scaled / np.sqrt(scaled**2 + sigma_data**2)
    sheet = Sheet(timesteps)
    sheet.predict(plan.schedule.prediction, np.sqrt(bar), np.sqrt(1 - bar))
    sheet.term(0)[:] = np.sqrt(bar_to) * c_skip
    _land_on_x0(sheet, np.sqrt(bar_to) * c_out, plan.clip)
    sheet.columns[:, NOISE] = np.sqrt(1 - bar_to)
    draws = [i + 1 < len(timesteps) for i in range(len(timesteps))]
    return sheet.finish("lcm", plan.num_steps, draws=draws, notes=plan.notes)


def pndm(plan: SolverRequest) -> SolverTable:
    """PNDM as SD 1.5 uses it: PLMS (Liu et al. 2022, equations 9 and 12) without Runge-Kutta steps.

    The second call repeats the first step from its start with the mean of both outputs (pseudo Euler-Heun).
    """
    rising = np.round(plan.spaced())[::-1]
    timesteps = np.concatenate([rising[:-1], rising[-2:-1], rising[-1:]])[::-1].copy()
    origins, targets = timesteps.copy(), timesteps - plan.stride
    if (again := plan.start + 1) < len(timesteps):
        origins[again], targets[again] = timesteps[again] + plan.stride, timesteps[again]
    keep, gain = _transfer(plan, origins, targets)
    sheet = Sheet(timesteps)
    bar = plan.alphas_cumprod(timesteps)
    sheet.predict(plan.schedule.prediction, np.sqrt(bar), np.sqrt(1 - bar))
    first = keep[plan.start : plan.start + 2], gain[plan.start : plan.start + 2]
    for i in range(plan.start, len(timesteps)):
        outputs = _plms_outputs(sheet, i, i - plan.start, *first)
        start = _unit(2) if i == plan.start + 1 else _unit(0)
        sheet.columns[i, TERMS:] = keep[i] * start + gain[i] * outputs
    return sheet.finish("pndm", plan.num_steps, notes=plan.notes)


def _transfer(plan: SolverRequest, origins: Array, targets: Array) -> tuple[Array, Array]:
    """x at the targets = keep * x at the origins + gain * the U-Net's output (equation 9, epsilon or v)."""
    bar, bar_to = plan.alphas_cumprod(origins), plan.alphas_cumprod(targets)
    keep = np.sqrt(bar_to / bar)
    gain = -(bar_to - bar) / (bar * np.sqrt(1 - bar_to) + np.sqrt(bar * (1 - bar) * bar_to))
    if plan.schedule.prediction == "v_prediction":
        return keep + gain * np.sqrt(1 - bar), gain * np.sqrt(bar)
    return keep, gain


def _plms_outputs(sheet: Sheet, i: int, taken: int, keep: Array, gain: Array) -> Array:
    """The combination of the U-Net's outputs that row i steps along, over h, with `taken` calls before it.

    The output of call 1 leaves the multistep sum after its own step, so call 4 needs that of call 0, four
    calls back. It follows from pairs nearer by: x_1 and x_2 both start from x_0.
    """

    def output(back: int) -> Array:
        k_x, k_out = sheet.columns[i - back, K_X], sheet.columns[i - back, K_OUT]
        return np.asarray((_unit(2 * back + 1) - k_x * _unit(2 * back)) / k_out)

    if taken == 0:
        return output(0)
    if taken == 1:
        return (output(0) + output(1)) / 2
    if taken == 2:
        return (3 * output(0) - output(2)) / 2
    if taken == 3:
        return (23 * output(0) - 16 * output(1) + 5 * output(3)) / 12
    if taken > 4:
        return (55 * output(0) - 59 * output(1) + 37 * output(2) - 9 * output(3)) / 24
    ratio = keep[1] / keep[0]
    x_1, x_2 = _unit(2 * 3), _unit(2 * 2)
    first = (x_2 - ratio * x_1 - gain[1] / 2 * output(3)) / (gain[1] / 2 - ratio * gain[0])
    return np.asarray((55 * output(0) - 59 * output(1) + 37 * output(2) - 9 * first) / 24)


def _unit(j: int) -> Array:
    vector = np.zeros(NUM_TERMS)
    vector[j] = 1.0
    return vector


def dpmpp_2m(plan: SolverRequest) -> SolverTable:
    """DPM-Solver++ multistep (Lu et al. 2022, algorithm 2), order 2 unless the settings say 1 or 3."""
    timesteps, sigmas = _multistep_levels(plan)
    return _dpmpp("dpmpp_2m", plan, timesteps, _vp(sigmas), stochastic=False)


def dpmpp_2m_sde(plan: SolverRequest) -> SolverTable:
    """DPM-Solver++ multistep for the reverse SDE (Lu et al. 2022, section 5): noise at every step."""
    timesteps, sigmas = _multistep_levels(plan)
    return _dpmpp("dpmpp_2m_sde", plan, timesteps, _vp(sigmas), stochastic=True)


def dpmpp_3m_sde(plan: SolverRequest) -> SolverTable:
    """DPM-Solver++ multistep of the third order for the reverse SDE (k-diffusion's dpmpp_3m_sde)."""
    timesteps, sigmas = _multistep_levels(plan)
    # What k-diffusion does at all orders, in diffusers' words; the last step ends on the picture.
    own = {"solver_order": 3, "solver_type": "heun", "lower_order_final": False}
    plan = replace(plan, settings={**plan.settings, **own})
    return _dpmpp("dpmpp_3m_sde", plan, timesteps, _vp(sigmas), stochastic=True)


def _dpmpp(
    solver: str, plan: SolverRequest, timesteps: Array, levels: Levels, *, stochastic: bool
) -> SolverTable:
    """DPM-Solver++ over timesteps [S] and levels [S + 1], whatever schedule they are of."""
    alpha, sigma, lam = levels
    order = int(plan.settings.get("solver_order", 2))
    heun = plan.settings.get("solver_type") == "heun"
    sheet = Sheet(timesteps)
    sheet.predict(plan.schedule.prediction, alpha[:-1], sigma[:-1])
    for i in range(len(timesteps)):
        h = lam[i + 1] - lam[i]
        if h == 0:  # Karras sigmas that end on sigma_min have arrived already
            sheet.columns[i, TERMS:] = _unit(0)
            continue
        q = 2 * h if stochastic else h
        phi = -math.expm1(-q)
        now = max(1, min(order, i + 1 - plan.start, _final_order(plan, i, len(timesteps))))
        slopes = _slopes(lam, i, now)
        weights = [phi, phi / 2 if now == 2 and not heun else 1 - phi / q if now > 1 else 0.0]
        weights.append(0.5 - (q - phi) / q**2 if now == 3 else 0.0)
        update = sum((w * slope for w, slope in zip(weights, slopes, strict=False)), np.zeros(NUM_TERMS))
        shrink = math.exp(-h) if stochastic else 1.0
        sheet.columns[i, TERMS:] = alpha[i + 1] * update + sigma[i + 1] / sigma[i] * shrink * _unit(0)
        sheet.columns[i, NOISE] = sigma[i + 1] * math.sqrt(phi) if stochastic else 0.0
    return sheet.finish(solver, plan.num_steps, draws=stochastic, notes=plan.notes)


def _final_order(plan: SolverRequest, i: int, count: int) -> int:
    """The highest order for step i near the end, where few steps or sigma zero make higher ones unstable."""
    few = bool(plan.settings.get("lower_order_final", True)) and count < 15
    to_zero = _end(plan) == 0
    if i == count - 1 and (few or to_zero or plan.settings.get("euler_at_final", False)):
        return 1
    return 2 if i == count - 2 and few else 3


def _slopes(lam: Array, i: int, order: int) -> list[Array]:
    """x0 and its first and second divided differences in lambda at step i, over h."""
    m0, m1, m2 = _unit(1), _unit(3), _unit(5)
    if order == 1:
        return [m0]
    h, h_0 = lam[i + 1] - lam[i], lam[i] - lam[i - 1]
    r_0 = h_0 / h
    d_0 = (m0 - m1) / r_0
    if order == 2:
        return [m0, d_0]
    r_1 = (lam[i - 1] - lam[i - 2]) / h
    d_1 = (m1 - m2) / r_1
    return [m0, d_0 + r_0 / (r_0 + r_1) * (d_0 - d_1), (d_0 - d_1) / (r_0 + r_1)]


def _multistep_levels(plan: SolverRequest, *, unipc: bool = False) -> tuple[Array, Array]:
    """Timesteps [S] and sigmas [S + 1] of DPM-Solver++ and UniPC."""
    schedule, count = plan.schedule, plan.num_steps
    keeps_fractions = plan.settings.get("beta_schedule") == "squaredcos_cap_v2" and not unipc
    if plan.sigmas is not None:
        sigmas = _spread(plan, schedule.sigmas[0], schedule.sigmas[-1])
        timesteps = schedule.timesteps_at(sigmas)
        # With a cosine schedule, and with exponential and beta sigmas, diffusers does not round, but cuts the
        # fraction off on storing integers; its float32 noise levels put the first one a hair below the last
        # timestep. Schedules that diffusers does not have keep their fractions, as in k-diffusion.
        if plan.sigmas == "karras" and not keeps_fractions:
            timesteps = np.round(timesteps)
        elif plan.sigmas in BETWEEN:
            timesteps = np.maximum(np.floor(timesteps - 1e-6), 0)
        return timesteps, np.append(sigmas, _end(plan))
    # lambda = -log sigma; a clipped (cosine) schedule leaves out its noisiest timesteps.
    clipped = -math.inf if unipc else float(plan.settings.get("lambda_min_clipped", -math.inf))
    last = int(np.searchsorted(np.log(schedule.sigmas), -clipped, side="right"))
    timesteps = multistep_timesteps(plan.spacing, schedule.num_train_timesteps, last, count, plan.offset)
    return timesteps, np.append(schedule.sigmas_at(timesteps), _end(plan))


def _vp(sigmas: Array) -> Levels:
    alpha = 1 / np.sqrt(sigmas**2 + 1)
    with np.errstate(divide="ignore"):
        return alpha, sigmas * alpha, -np.log(sigmas)


def unipc(plan: SolverRequest) -> SolverTable:
    """UniPC (Zhao et al. 2023, algorithms 1 to 3) on x0: correct the last step, then predict the next.

    The corrected latents before a step are no entry of h, but follow from the predicted ones and earlier x0s.
    """
    timesteps, sigmas = _multistep_levels(plan, unipc=True)
    count = len(timesteps)
    order = int(plan.settings.get("solver_order", 2))
    lower_last = bool(plan.settings.get("lower_order_final", True))
    taken = range(1 - plan.start, count + 1 - plan.start)
    orders = [max(1, min(order, taken[i], count - i if lower_last else order)) for i in range(count)]
    if sigmas[-1] == 0:  # lambda is infinite there: only the first order is defined
        orders[-1] = 1
    off = plan.settings.get("disable_corrector") or []
    levels = _vp(sigmas)
    kind = str(plan.settings.get("solver_type", "bh2"))
    sheet = Sheet(timesteps)
    sheet.predict(plan.schedule.prediction, levels[0][:-1], levels[1][:-1])
    predicted = [np.zeros(NUM_TERMS)] * count
    for i in range(count):
        corrected = _unit(0)
        if i > plan.start and i - 1 not in off:
            # `before` solves x = keep * before + the rest of the last predictor.
            keep, rest = predicted[i - 1][0], _one_step_back(predicted[i - 1])
            before = (_unit(0) - rest) / keep
            corrected = _bh_update(levels, i - 1, orders[i - 1], before, kind, now=_unit(1))
        predicted[i] = _bh_update(levels, i, orders[i], _unit(0), kind)
        # the predictor starts from the corrected latents
        row = predicted[i].copy()
        row[0] = 0.0
        sheet.columns[i, TERMS:] = row + predicted[i][0] * corrected
    return sheet.finish("unipc", plan.num_steps, notes=plan.notes)


def _one_step_back(vector: Array) -> Array:
    """What was over (x, x0, x0_1, ...) one step ago, over today's h, without its x."""
    moved = np.zeros(NUM_TERMS)
    moved[3::2] = vector[1:-2:2]
    return moved


def _bh_update(
    levels: Levels, i: int, order: int, start: Array, kind: str, now: Array | None = None
) -> Array:
    """The B(h) update from level i to i + 1, over h; `now` is x0 at i + 1, which makes it the corrector."""
    alpha, sigma, lam = levels
    shift = 0 if now is None else 1
    m = [_unit(2 * (k + shift) + 1) for k in range(order)]
    h = lam[i + 1] - lam[i]
    if h == 0:
        return start
    hh = -h
    phi_1 = math.expm1(hh)
    b_h = hh if kind == "bh1" else phi_1
    ratios = [(lam[i - k] - lam[i]) / h for k in range(1, order)]
    slopes = [(m[k] - m[0]) / ratios[k - 1] for k in range(1, order)]
    if now is not None:
        ratios, slopes = [*ratios, 1.0], [*slopes, now - m[0]]
    base = sigma[i + 1] / sigma[i] * start - alpha[i + 1] * phi_1 * m[0]
    if not slopes:
        return np.asarray(base)
    rhos = _rhos(ratios, hh, b_h)
    return np.asarray(base - alpha[i + 1] * b_h * sum(r * s for r, s in zip(rhos, slopes, strict=True)))


def _rhos(ratios: list[float], hh: float, b_h: float) -> Array:
    """Weights of the slopes: one slope takes a half, more solve equation 10's Vandermonde system."""
    count = len(ratios)
    if count == 1:
        return np.array([0.5])
    phi_k, factorial, right = math.expm1(hh) / hh - 1, 1.0, []
    for k in range(1, count + 1):
        right.append(phi_k * factorial / b_h)
        factorial *= k + 1
        phi_k = phi_k / hh - 1 / factorial
    matrix = np.array([np.power(ratios, k) for k in range(count)])
    return np.asarray(np.linalg.solve(matrix, np.array(right)))


def _flow_of(plan: SolverRequest) -> Flow:
    """The schedule of a plan for a flow solver."""
    assert isinstance(plan.schedule, Flow)
    return plan.schedule


def flow_euler(plan: SolverRequest) -> SolverTable:
    """Euler steps along the predicted velocity (Liu et al. 2023, rectified flow)."""
    flow = _flow_of(plan)
    sigma = flow.levels(plan.num_steps, plan.spacing)
    sheet = _sheet(flow, sigma[:-1])
    ratio = sigma[1:] / sigma[:-1]
    sheet.term(0)[:], sheet.term(1)[:] = ratio, 1 - ratio
    return sheet.finish("flow_euler", plan.num_steps, notes=plan.notes)


def flow_heun(plan: SolverRequest) -> SolverTable:
    """Heun steps (Karras et al. 2022, algorithm 1) along the velocity: two calls each, the last step one."""
    flow = _flow_of(plan)
    sigma = flow.levels(plan.num_steps, plan.spacing)
    at = (np.arange(2 * plan.num_steps - 1) + 1) // 2
    sheet = _sheet(flow, sigma[at])
    _heun_terms(sheet, sigma)
    return sheet.finish("flow_heun", plan.num_steps, notes=plan.notes)


def flow_dpmpp_2m(plan: SolverRequest) -> SolverTable:
    """DPM-Solver++ multistep (Lu et al. 2022, algorithm 2) on the levels of rectified flow."""
    flow = _flow_of(plan)
    whole = np.linspace(1, 1 / flow.num_train_timesteps, plan.num_steps + 1)
    sigma = np.append(flow.shifted(1 - whole)[:0:-1], 0.0)
    levels: Levels = (1 - sigma, sigma, np.log((1 - sigma) / sigma))
    # diffusers tells the model whole timesteps here, their fractions cut off.
    timesteps = np.floor(sigma[:-1] * flow.num_train_timesteps)
    return _dpmpp("flow_dpmpp_2m", plan, timesteps, levels, stochastic=False)


def flow_lcm(plan: SolverRequest) -> SolverTable:
    """Latent consistency sampling (Luo et al. 2023, algorithm 3) on the levels of rectified flow.

    Their spacing is trailing, as the pipelines of distilled flow models ask of diffusers' class
    (`sigmas=[1, 3/4, 1/2, 1/4]`); its own, linspace, spends the last call where there is hardly any noise.
    """
    flow = _flow_of(plan)
    sigma = flow.levels(plan.num_steps, plan.spacing)
    sheet = _sheet(flow, sigma[:-1])
    sheet.term(1)[:] = 1 - sigma[1:]
    sheet.columns[:, NOISE] = sigma[1:]
    draws = [i + 1 < plan.num_steps for i in range(plan.num_steps)]
    return sheet.finish("flow_lcm", plan.num_steps, draws=draws, notes=plan.notes)


def _sheet(flow: Flow, sigma: Array) -> Sheet:
    sheet = Sheet(sigma * flow.num_train_timesteps)
    sheet.predict(FLOW_PREDICTION, 1 - sigma, sigma)
    return sheet


MAX_EARLIER = 3
NUM_TERMS = 2 * (1 + MAX_EARLIER)

# The columns of a table.
SCALE, TIMESTEP, K_X, K_OUT, NOISE, CLIPPED, CLIP_RANGE, TERMS = range(8)
NUM_COLUMNS = TERMS + NUM_TERMS


@dataclass(frozen=True, eq=False, repr=False)
class SolverTable:
    """One way of denoising, as numbers. Read-only; any number of pictures share one table."""

    solver: str
    num_steps: int
    """The steps asked for; PNDM calls the U-Net once more."""
    values_SK: NDArray[np.float32]
    draws_S: tuple[bool, ...]
    """Whether a step draws noise from the generator (also where its weight is zero, as diffusers does)."""
    initial_scale: float
    """What standard normal noise is multiplied by to give the first latents."""
    notes: tuple[str, ...] = ()
    spacing: str = ""
    sigmas: str | None = None
    """How its sigmas are spaced: one of `options.SIGMAS`; None for as the timesteps are."""
    levels_S2: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 2), np.float32))
    """What x is made of before each call: how much of the picture, how much of the noise."""
    earlier: int = field(init=False)
    """How many earlier (x, x0) pairs the steps look back at: 0 to 3."""

    def __post_init__(self) -> None:
        used = np.flatnonzero(np.abs(self.values_SK[:, TERMS + 2 :]).sum(axis=0))
        object.__setattr__(self, "earlier", int(used.max()) // 2 + 1 if len(used) else 0)

    def __len__(self) -> int:
        return len(self.draws_S)

    @property
    def calls_a_step(self) -> int:
        """U-Net calls of one of the steps asked for."""
        return 2 if self.solver in TWICE else 1

    @property
    def karras(self) -> bool:
        """Whether its sigmas are Karras'."""
        return self.sigmas == "karras"

    def begun_at(self, start: int) -> SolverTable:
        """The same steps without the first `start` of them."""
        return replace(
            self,
            values_SK=self.values_SK[start:],
            draws_S=self.draws_S[start:],
            levels_S2=self.levels_S2[start:],
        )

    @property
    def timesteps(self) -> list[float]:
        """The timestep given to the U-Net at each call."""
        return [float(t) for t in self.values_SK[:, TIMESTEP]]


class Sheet:
    """A table being filled in, in float64: `columns` [S, K]; scale 1 and no clipping unless set."""

    def __init__(self, timesteps: Array) -> None:
        self.columns = np.zeros((len(timesteps), NUM_COLUMNS))
        self.columns[:, SCALE] = 1.0
        self.columns[:, TIMESTEP] = timesteps
        self.columns[:, CLIP_RANGE] = np.inf
        self.levels = np.zeros((len(timesteps), 2))

    def predict(self, prediction: str, alpha: Array, sigma: Array) -> None:
        """Set x0 = k_x * x + k_out * out for x = alpha * x0 + sigma * noise."""
        self.levels[:, 0], self.levels[:, 1] = alpha, sigma
        if prediction == "epsilon":
            k_x, k_out = 1 / alpha, -sigma / alpha
        elif prediction == "sample":
            k_x, k_out = np.zeros_like(alpha), np.ones_like(alpha)
        elif prediction == "flow_prediction":  # noise - picture
            k_x, k_out = 1 / (alpha + sigma), -sigma / (alpha + sigma)
        else:
            norm = np.sqrt(alpha**2 + sigma**2)
            k_x, k_out = alpha / norm**2, -sigma / norm
        self.columns[:, K_X], self.columns[:, K_OUT] = k_x, k_out

    def term(self, j: int) -> Array:
        """The coefficients of h_j, one a step; a view to write to."""
        column: Array = self.columns[:, TERMS + j]
        return column

    def finish(
        self,
        solver: str,
        num_steps: int,
        *,
        draws: list[bool] | bool = False,
        initial_scale: float = 1.0,
        notes: tuple[str, ...] = (),
    ) -> SolverTable:
        """Round to float32 and hand out the table."""
        count = len(self.columns)
        return SolverTable(
            solver,
            num_steps,
            self.columns.astype(np.float32),
            tuple(draws) if isinstance(draws, list) else (draws,) * count,
            float(initial_scale),
            notes,
            levels_S2=self.levels.astype(np.float32),
        )
