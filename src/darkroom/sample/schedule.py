"""Noise schedules: how much signal is left at each training timestep, and which timesteps sampling visits.

Everything is float64 and read from a scheduler's configuration in diffusers' terms. Notation: `alpha` is
sqrt(alphas_cumprod), the scale of the picture; `sigma_vp` = sqrt(1 - alphas_cumprod), that of the noise;
`sigma` = sigma_vp / alpha, the noise level once the picture has scale one (Karras et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darkroom.errors import InputError

Array = NDArray[np.float64]

BETA_SCHEDULES = ("scaled_linear", "linear", "squaredcos_cap_v2")
PREDICTIONS = ("epsilon", "v_prediction", "sample")
SPACINGS = ("leading", "trailing", "linspace")

# With zero terminal SNR the last sigma would be infinite; diffusers' sigma solvers start from this instead.
SMALLEST_ALPHA_CUMPROD = 2.0**-24
KARRAS_RHO = 7.0


@dataclass(frozen=True)
class Schedule:
    """The training noise schedule: `alphas_cumprod` [T], falling, and what the U-Net predicts."""

    alphas_cumprod: Array
    prediction: str
    zero_terminal_snr: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Schedule:
        """Read the schedule of a diffusers scheduler configuration; InputError for what is not known here."""
        from darkroom.models.model import is_flow  # torch is imported there

        # Read as betas, a rectified flow's settings would pass for epsilon on diffusers' defaults.
        if is_flow(config):
            raise InputError("scheduler: rectified flow has no betas", allowed=", ".join(PREDICTIONS))
        prediction = config.get("prediction_type", "epsilon")
        if prediction not in PREDICTIONS:
            raise InputError(f"scheduler: prediction_type '{prediction}'", allowed=", ".join(PREDICTIONS))
        zero_snr = bool(config.get("rescale_betas_zero_snr", False))
        betas = _betas_of(config)
        if betas.ndim != 1 or not len(betas) or not np.all((betas >= 0) & (betas < 1)):
            raise InputError("scheduler: betas must lie in 0 <= beta < 1", mend="see beta_start and beta_end")
        # Training takes betas in float32, where 1 - 0.999 (cosine) is off by 5e-5: do as it does.
        alphas_cumprod = np.cumprod(1.0 - betas.astype(np.float32), dtype=np.float64)
        if zero_snr:
            alphas_cumprod = _rescale_to_zero_terminal_snr(alphas_cumprod)
        return cls(alphas_cumprod, prediction, zero_snr)

    @property
    def num_train_timesteps(self) -> int:
        """How many timesteps training knows, T."""
        return len(self.alphas_cumprod)

    @property
    def sigmas(self) -> Array:
        """Noise over signal at each training timestep [T]; finite also with zero terminal SNR (4096)."""
        floor = SMALLEST_ALPHA_CUMPROD if self.zero_terminal_snr else 0.0
        alphas_cumprod = np.maximum(self.alphas_cumprod, floor)
        sigmas: Array = np.sqrt((1 - alphas_cumprod) / alphas_cumprod)
        return sigmas

    def sigmas_at(self, timesteps: Array) -> Array:
        """Sigma at (fractional) timesteps, linear between the training timesteps."""
        return np.interp(timesteps, np.arange(self.num_train_timesteps), self.sigmas)

    def timesteps_at(self, sigmas: Array) -> Array:
        """The fractional timesteps of given sigmas, linear in log sigma, held within the training range."""
        return np.interp(np.log(sigmas), np.log(self.sigmas), np.arange(self.num_train_timesteps))


def _betas_of(config: Mapping[str, Any]) -> Array:
    """The betas [T] that a scheduler configuration names."""
    # Some classes' own defaults are Stable Diffusion's; LCMScheduler's schedule is too.
    is_lcm = config.get("_class_name") == "LCMScheduler"
    is_sd = is_lcm or config.get("_class_name") in ("HeunDiscreteScheduler", "DPMSolverSDEScheduler")
    kind = config.get("beta_schedule", "scaled_linear" if is_lcm else "linear")
    start = float(config.get("beta_start", 0.00085 if is_sd else 0.0001))
    end = float(config.get("beta_end", 0.012 if is_sd else 0.02))
    count = int(config.get("num_train_timesteps", 1000))
    if (trained := config.get("trained_betas")) is not None:
        return np.asarray(trained, dtype=np.float64)
    if kind == "linear":
        return np.linspace(start, end, count)
    if kind == "scaled_linear":
        return np.asarray(np.linspace(start**0.5, end**0.5, count) ** 2)
    if kind == "squaredcos_cap_v2":
        return _cosine_betas(count)
    raise InputError(f"scheduler: beta_schedule '{kind}'", allowed=", ".join(BETA_SCHEDULES))


def _cosine_betas(count: int, max_beta: float = 0.999) -> Array:
    """The cosine schedule of Nichol & Dhariwal 2021, betas capped at `max_beta`."""
    alpha_bar: Array = np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * math.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], max_beta)


def _rescale_to_zero_terminal_snr(alphas_cumprod: Array) -> Array:
    """Shift and scale sqrt(alphas_cumprod) so that the last is zero (Lin et al. 2024, algorithm 1)."""
    alphas = np.sqrt(alphas_cumprod)
    rescaled: Array = ((alphas - alphas[-1]) * alphas[0] / (alphas[0] - alphas[-1])) ** 2
    return rescaled


def spaced_timesteps(spacing: str, num_train: int, num_steps: int, offset: int) -> Array:
    """Timesteps of DDIM, PNDM and Euler, falling (Lin et al. 2024, table 2); linspace ones are fractional.

    A single linspace step starts from the last timestep: diffusers starts it from timestep 0, where a
    picture of pure noise does not belong.
    """
    check_spacing(spacing)
    steps = np.arange(num_steps, dtype=np.float64)
    if spacing == "linspace":
        return (
            np.linspace(0, num_train - 1, num_steps)[::-1].copy() if num_steps > 1 else steps + num_train - 1
        )
    if spacing == "leading":
        return _leading(steps[::-1] * (num_train // num_steps), num_train, offset)
    return np.asarray(np.round(num_train - steps * (num_train / num_steps)) - 1)


def _leading(timesteps: Array, num_train: int, offset: int) -> Array:
    """Shifted by the offset as far as it goes: with 1000 of 1000 steps there is none."""
    return timesteps + min(offset, num_train - 1 - int(timesteps[0]))


def multistep_timesteps(spacing: str, num_train: int, last: int, num_steps: int, offset: int) -> Array:
    """Timesteps of DPM-Solver++ and UniPC, falling: leading and linspace leave a last step to zero.

    `last` is one past the noisiest timestep to use (num_train unless the schedule is clipped).
    """
    check_spacing(spacing)
    steps = np.arange(num_steps, 0, -1, dtype=np.float64)
    if spacing == "trailing":  # a clipped schedule keeps its stride, so it has fewer steps
        ends = last - (num_steps - steps) * (num_train / num_steps)
        return np.maximum(np.round(ends[ends > 1e-6]) - 1, 0)
    if num_steps + 1 > last:  # none left over: visit every timestep
        return np.arange(num_steps, dtype=np.float64)[::-1].copy()
    if spacing == "linspace":
        return np.asarray(np.round(np.linspace(0, last - 1, num_steps + 1))[::-1][:-1])
    return _leading(steps * (last // (num_steps + 1)), num_train, offset)


def check_spacing(spacing: str) -> None:
    """InputError unless `spacing` is one of SPACINGS."""
    if spacing not in SPACINGS:
        raise InputError(f"spacing '{spacing}'", allowed=", ".join(SPACINGS))


def _karras_sigmas(sigma_min: float, sigma_max: float, num_steps: int) -> Array:
    """Falling sigmas, evenly spaced in sigma^(1/7) (Karras et al. 2022, equation 5)."""
    low, high = sigma_min ** (1 / KARRAS_RHO), sigma_max ** (1 / KARRAS_RHO)
    sigmas: Array = (high + np.linspace(0, 1, num_steps) * (low - high)) ** KARRAS_RHO
    return sigmas


def _exponential_sigmas(sigma_min: float, sigma_max: float, num_steps: int) -> Array:
    """Falling sigmas, evenly spaced in log sigma (k-diffusion's exponential schedule)."""
    sigmas: Array = np.exp(np.linspace(math.log(sigma_max), math.log(sigma_min), num_steps))
    return sigmas


def _beta_sigmas(sigma_min: float, sigma_max: float, num_steps: int) -> Array:
    """Falling sigmas at the quantiles of a beta distribution, dense at both ends (Lee et al. 2024)."""
    return sigma_min + _beta_quantiles(1 - np.linspace(0, 1, num_steps)) * (sigma_max - sigma_min)


def _beta_quantiles(shares: Array, a: float = 0.6) -> Array:
    """Quantiles of the beta distribution whose parameters both are `a`: its power series, bisected."""
    n = np.arange(60.0)
    series = np.cumprod(np.append(1.0, (n[1:] - a) / n[1:])) / (a + n)
    tail = np.minimum(shares, 1 - shares) * math.gamma(a) ** 2 / math.gamma(2 * a)  # it is symmetrical
    low, high = np.zeros_like(shares), np.full_like(shares, 0.5)
    for _ in range(60):
        middle = (low + high) / 2
        below = middle**a * np.polyval(series[::-1], middle) < tail
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.where(shares <= 0.5, low, 1 - low)


ALIGN_YOUR_STEPS = (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029)
ALIGN_YOUR_STEPS_XL = (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029)
"""Sigmas of ten steps that were optimised for SD 1.5 and for SDXL (Sabour et al. 2024)."""


def align_your_steps(num_steps: int, *, is_sdxl: bool = False) -> Array:
    """Falling sigmas of any number of steps, by A1111's log-linear interpolation of the optimised ones."""
    known = np.log(ALIGN_YOUR_STEPS_XL if is_sdxl else ALIGN_YOUR_STEPS)
    sigmas: Array = np.exp(np.interp(np.linspace(0, 1, num_steps), np.linspace(0, 1, len(known)), known))
    return sigmas


def _simple_sigmas(schedule: Schedule, num_steps: int) -> Array:
    """Falling sigmas of training timesteps, evenly spaced from the last one (A1111's Simple)."""
    stride = schedule.num_train_timesteps / num_steps
    return schedule.sigmas[-1 - (np.arange(num_steps) * stride).astype(np.int64)]


def _kl_optimal_sigmas(schedule: Schedule, num_steps: int) -> Array:
    """Falling sigmas, evenly spaced in arctan sigma (Sabour et al. 2024, theorem 3.1); the lowest, where the
    last step ends, is left out, as in A1111."""
    shares = np.arange(num_steps) / num_steps
    low, high = math.atan(schedule.sigmas[0]), math.atan(schedule.sigmas[-1])
    sigmas: Array = np.tan(shares * low + (1 - shares) * high)
    return sigmas


def _normal_sigmas(schedule: Schedule, num_steps: int) -> Array:
    """Falling sigmas of timesteps from the last to the first, log-linear between (k-diffusion's own)."""
    timesteps = np.linspace(schedule.num_train_timesteps - 1, 0, num_steps)
    known = np.arange(schedule.num_train_timesteps)
    sigmas: Array = np.exp(np.interp(timesteps, known, np.log(schedule.sigmas)))
    return sigmas


def _ddim_uniform_sigmas(schedule: Schedule, num_steps: int) -> Array:
    """Falling sigmas of every so many-th training timestep from 1 on, as DDIM spaces them (A1111's DDIM).

    Where the steps do not divide the timesteps there is one step more, as in A1111.
    """
    stride = max(schedule.num_train_timesteps // num_steps, 1)
    return schedule.sigmas[1::stride][::-1].copy()


BETWEEN = {"karras": _karras_sigmas, "exponential": _exponential_sigmas, "beta": _beta_sigmas}
OF_SCHEDULE = {
    "simple": _simple_sigmas,
    "normal": _normal_sigmas,
    "ddim_uniform": _ddim_uniform_sigmas,
    "kl_optimal": _kl_optimal_sigmas,
}


def named_sigmas(
    name: str, schedule: Schedule, num_steps: int, low: float, high: float, *, is_sdxl: bool
) -> Array:
    """Falling sigmas [S] of one of `options.SIGMAS`: between two, or of the whole training schedule."""
    if name == "align_your_steps":
        return align_your_steps(num_steps, is_sdxl=is_sdxl)
    if name in OF_SCHEDULE:
        return OF_SCHEDULE[name](schedule, num_steps)
    return BETWEEN[name](low, high, num_steps)


def lcm_timesteps(original: int, num_train: int, num_steps: int) -> Array:
    """The timesteps of so few of the `original` steps that a model was distilled from, falling."""
    distilled = (np.arange(original, 0, -1) * (num_train // original) - 1).astype(np.float64)
    chosen = np.floor(np.linspace(0, original, num_steps, endpoint=False)).astype(np.int64)
    timesteps: Array = distilled[chosen]
    return timesteps


# ---- rectified flow

FLOW_PREDICTION = "flow_prediction"
FLOW_SPACINGS = ("linspace", "trailing")
# Settings that would change the levels and are not known here, with the value that leaves them alone.
FLOW_UNKNOWN: dict[str, Any] = {
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "invert_sigmas": False,
    "stochastic_sampling": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "scale_factors": None,
}


@dataclass(frozen=True)
class Flow(Schedule):
    """A straight line from picture to noise; `shift` moves the steps towards noise where it is above 1."""

    shift: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Flow:
        """Read a FlowMatch scheduler's configuration, or another's with use_flow_sigmas."""
        for key, harmless in FLOW_UNKNOWN.items():
            if (given := config.get(key, harmless)) != harmless:
                raise InputError(f"the model's scheduler sets {key} to {given}", allowed=str(harmless))
        prediction = config.get("prediction_type", FLOW_PREDICTION)
        if prediction != FLOW_PREDICTION:
            raise InputError(f"prediction_type '{prediction}' with rectified flow", allowed=FLOW_PREDICTION)
        shift = float(config.get("shift", config.get("flow_shift", 1.0)))
        if not shift > 0:
            raise InputError(f"the model's scheduler sets shift to {shift:g}", allowed="above 0")
        count = int(config.get("num_train_timesteps", 1000))
        sigmas = np.arange(1, count + 1) / count
        signal = (1 - sigmas) ** 2
        return cls(signal / (signal + sigmas**2), FLOW_PREDICTION, zero_terminal_snr=True, shift=shift)

    def shifted(self, sigmas: Array) -> Array:
        """Levels moved as a larger picture needs them (Esser et al. 2024, equation 23)."""
        return self.shift * sigmas / (1 + (self.shift - 1) * sigmas)

    def levels(self, num_steps: int, spacing: str) -> Array:
        """Falling sigmas [S + 1] of Euler and Heun, from 1 to 0."""
        if spacing == "trailing":
            return self.shifted(np.linspace(1, 0, num_steps + 1))
        first = self.shifted(np.array([1 / self.num_train_timesteps]))[0]
        return np.append(self.shifted(np.linspace(1, first, num_steps)), 0.0)
