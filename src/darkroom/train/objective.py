"""What the U-Net is asked to predict: noise schedules, targets and loss weights, all pure functions.

`Objective` is diffusion over a table of timesteps, `FlowObjective` rectified flow; both are called alike.

Shapes: B rows of a batch, C channels, H and W latent pixels, T timesteps of the schedule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from darkroom.errors import RecipeError
from darkroom.models.model import is_flow
from darkroom.recipe.objective import HUBER
from darkroom.recipe.sections import FlowSettings, LossSettings, ObjectiveSettings, TimestepSettings
from darkroom.sample.choice import SD_SCHEDULE
from darkroom.sample.schedule import Flow, Schedule

Prediction = Literal["epsilon", "v", "sample"]
FLOW = "flow"

# The same thing in darkroom's recipes and in diffusers' scheduler_config.json.
_SCHEDULES = {"scaled-linear": "scaled_linear", "linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "sample": "sample"}
_FLOW_CLASS = "FlowMatchEulerDiscreteScheduler"
_NAMES: dict[str, Prediction] = {"epsilon": "epsilon", "v_prediction": "v", "sample": "sample"}


FLOW_BASE_PIXELS = 32 * 32
"""Latent pixels of a picture that needs no shift: 256 px through a VAE of factor 8."""
_FLOW_SAID = "objective.prediction=flow"


def scheduler_config(
    settings: ObjectiveSettings, base: Mapping[str, Any], latent_pixels: int = FLOW_BASE_PIXELS
) -> dict[str, Any]:
    """The diffusers scheduler configuration of the trained model: the base's, with what the recipe says.

    PNDM knows neither prediction of the sample nor zero terminal SNR: then it becomes DDIM. Where the base
    is of rectified flow and the recipe of diffusion, or the other way round, it is written anew. A picture
    has `latent_pixels`. Raises RecipeError where the recipe and the base's scheduler together are impossible.
    """
    flows = is_flow(base) if settings.prediction is None else settings.prediction == FLOW
    if flows:
        return _flow_config(settings, base if is_flow(base) else {}, latent_pixels)
    if settings.flow != FlowSettings():
        raise RecipeError("objective.flow", "given, but this is no rectified flow", mend=f"set {_FLOW_SAID}")
    config = {"_class_name": "DDIMScheduler", "clip_sample": False, **SD_SCHEDULE} if is_flow(base) else {}
    config |= {} if is_flow(base) else base
    noise = settings.noise
    changes = {
        "prediction_type": settings.prediction and _PREDICTIONS[settings.prediction],
        "beta_schedule": noise.schedule and _SCHEDULES[noise.schedule],
        "beta_start": noise.beta_start,
        "beta_end": noise.beta_end,
        "num_train_timesteps": noise.num_timesteps,
        "rescale_betas_zero_snr": noise.zero_terminal_snr,
    }
    config |= {key: value for key, value in changes.items() if value is not None}
    if config.get("rescale_betas_zero_snr"):
        config["timestep_spacing"] = "trailing"  # the only spacing that visits the last timestep
    _refuse_impossible(config)
    pndm_cannot = config.get("prediction_type") == "sample" or config.get("rescale_betas_zero_snr")
    if config.get("_class_name", "PNDMScheduler") == "PNDMScheduler" and pndm_cannot:
        config["_class_name"] = "DDIMScheduler"
        config.pop("skip_prk_steps", None)
        config["clip_sample"] = False
    return config


def _flow_config(settings: ObjectiveSettings, base: Mapping[str, Any], latent_pixels: int) -> dict[str, Any]:
    """The scheduler configuration of rectified flow; the times of training stand in it too."""
    weighs = settings.weighs
    if settings.scale_v_pred_loss_like_noise_pred:
        weighs["scale_v_pred_loss_like_noise_pred"] = True
    if given := next(iter(weighs), None):
        shown = json.dumps(weighs[given]).removesuffix(".0")
        raise RecipeError(
            f"objective.{given}",
            f"{shown} with rectified flow, whose times are drawn where they teach most",
            mend="leave it out; objective.flow.mean and .std say where",
        )
    if settings.loss.type in HUBER and settings.loss.huber_schedule == "snr":
        raise RecipeError(
            "objective.loss.huber_schedule", "snr with rectified flow", allowed="constant or exponential"
        )
    if settings.timesteps.mean is not None or settings.timesteps.std is not None:
        raise RecipeError(
            "objective.timesteps", "mean or std with rectified flow", mend="say objective.flow.mean and .std"
        )
    if config := settings.noise.model_dump(exclude_defaults=True):
        raise RecipeError(
            f"objective.noise.{next(iter(config))}",
            f"{next(iter(config.values()))} with rectified flow, whose line from picture to noise is fixed",
            mend="leave it out",
        )
    flow = settings.flow
    shift = flow.shift
    if shift == "auto":
        shift = resolution_shift(latent_pixels)
    elif shift == "model":
        shift = float(base.get("shift", 1.0))
    times = {"logit_mean": flow.mean, "logit_std": flow.std}
    return {
        "_class_name": _FLOW_CLASS,
        "num_train_timesteps": 1000,
        "logit_mean": 0.0,
        "logit_std": 1.0,
        **base,
        "shift": shift,
        **{name: value for name, value in times.items() if value is not None},
    }


def resolution_shift(latent_pixels: int) -> float:
    """sqrt(m / n), the shift that hides a picture of m latent pixels as well as one of n without any.

    A constant picture's value can be read from m noisy pixels sqrt(m) times better than from one (Esser et
    al. 2024, section 5.3.2). n is that of 256 px; smaller pictures are not shifted.
    """
    return max(1.0, math.sqrt(latent_pixels / FLOW_BASE_PIXELS))


def _refuse_impossible(config: Mapping[str, Any]) -> None:
    if config.get("rescale_betas_zero_snr") and config.get("prediction_type", "epsilon") == "epsilon":
        raise RecipeError(
            "objective.noise.zero_terminal_snr",
            "true, but the model predicts epsilon, which pure noise cannot teach",
            mend="set objective.prediction=v (or sample)",
        )
    if config.get("beta_start", 0.0) > config.get("beta_end", 1.0):
        raise RecipeError(
            "objective.noise.beta_start", f"{config['beta_start']} is more than beta_end {config['beta_end']}"
        )


_PLAIN, _EVENLY = LossSettings(), TimestepSettings()


@dataclass(frozen=True)
class Objective:
    """Noise, targets and weights by timestep, as float32 tables [T] on one device.

    `thresholds` are the Huber losses' c.
    """

    prediction: Prediction
    alphas: Tensor
    sigmas: Tensor
    weights: Tensor
    thresholds: Tensor
    error: str = "mse"
    times: TimestepSettings = _EVENLY

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        settings: ObjectiveSettings | None = None,
        device: torch.device | str = "cpu",
    ) -> Objective:
        """The objective of a scheduler configuration (see `scheduler_config`)."""
        asked = settings or ObjectiveSettings()
        loss, times = asked.loss, asked.timesteps
        schedule = Schedule.from_config(config)
        prediction = _NAMES[schedule.prediction]
        alphas_cumprod = torch.from_numpy(schedule.alphas_cumprod)
        _check_range(times, len(alphas_cumprod))
        weight = _timestep_weights(alphas_cumprod, prediction, asked)
        every_T = torch.arange(len(alphas_cumprod), dtype=torch.float64)
        c = _huber_thresholds(loss, every_T, len(alphas_cumprod), alphas_cumprod)
        tables = (alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt(), weight, c)
        alphas, sigmas, weights, thresholds = (table.to(device, torch.float32) for table in tables)
        return cls(prediction, alphas, sigmas, weights, thresholds, loss.type, times)

    @property
    def num_timesteps(self) -> int:
        """Length of the schedule, T."""
        return len(self.alphas)

    def to(self, device: torch.device | str) -> Objective:
        """The same tables on a device."""
        names = ("alphas", "sigmas", "weights", "thresholds")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def timesteps(self, u_B: Tensor) -> Tensor:
        """Timesteps [B] of uniform draws in [0, 1), each of the range equally likely unless it is said."""
        first, end = self.times.min, self.times.max or self.num_timesteps
        share_B = _drawn_times(u_B, self.times)
        return (first + (share_B * (end - first)).long()).clamp_(first, end - 1)

    def at(self, point: float, t_B: Tensor) -> Tensor:
        """One timestep for all rows [B], in the form in which `timesteps` gives them."""
        return torch.full_like(t_B, point, dtype=torch.long)

    def add_noise(self, x_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """The U-Net's input: the picture and the noise, mixed as timestep t says."""
        return _rows(self.alphas, t_B, x_BCHW) * x_BCHW + _rows(self.sigmas, t_B, x_BCHW) * noise_BCHW

    def target(self, x_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """What the U-Net should answer: the noise, the velocity (Salimans & Ho 2022) or the picture."""
        if self.prediction == "epsilon":
            return noise_BCHW
        if self.prediction == "sample":
            return x_BCHW
        return _rows(self.alphas, t_B, x_BCHW) * noise_BCHW - _rows(self.sigmas, t_B, x_BCHW) * x_BCHW

    def loss(
        self, out_BCHW: Tensor, target_BCHW: Tensor, t_B: Tensor, mask_B1HW: Tensor | None = None
    ) -> Tensor:
        """Weighted mean error of each row [B], in float32; of what a mask shows, if given."""
        c_B = self.thresholds[t_B] if self.error in HUBER else None
        error_B = row_error(out_BCHW, target_BCHW, mask_B1HW, self.error, c_B)
        return error_B * self.weights[t_B]


@dataclass(frozen=True)
class FlowObjective:
    """Rectified flow (Liu et al. 2023) with logit-normal times (Esser et al. 2024), called as `Objective`.

    x_t = (1 - t) * picture + t * noise, and the target is noise - picture. Timesteps are t * 1000, fractions
    and all.
    """

    mean: float
    std: float
    shift: float
    num_timesteps: int
    error: LossSettings = _PLAIN
    times: TimestepSettings = _EVENLY
    prediction = FLOW

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, loss: LossSettings = _PLAIN, times: TimestepSettings = _EVENLY
    ) -> FlowObjective:
        """The objective of a scheduler configuration (see `scheduler_config`)."""
        flow = Flow.from_config(config)
        _check_range(times, flow.num_train_timesteps)
        mean, std = float(config.get("logit_mean", 0.0)), float(config.get("logit_std", 1.0))
        return cls(mean, std, flow.shift, flow.num_train_timesteps, loss, times)

    def to(self, device: torch.device | str) -> FlowObjective:
        """Itself: it holds no tensors."""
        return self

    def timesteps(self, u_B: Tensor) -> Tensor:
        """Timesteps [B], float32, of uniform draws in [0, 1): logistic of normal numbers, shifted.

        The normal number is the quantile of the draw, so that a row has its time whatever the batch is.
        """
        own = {"distribution": self.times.distribution or "logit-normal", "mean": self.mean, "std": self.std}
        t_B = _drawn_times(u_B.double(), self.times.model_copy(update=own))
        t_B = self.shift * t_B / (1 + (self.shift - 1) * t_B)
        first, end = self.times.min, self.times.max or self.num_timesteps
        return (first + (end - first) * t_B).float()

    def at(self, point: float, t_B: Tensor) -> Tensor:
        """One timestep for all rows [B]."""
        return torch.full_like(t_B, point, dtype=torch.float32)

    def add_noise(self, x_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """The model's input: so far along the line from the picture to the noise as timestep t says."""
        share = (t_B / self.num_timesteps).view(-1, *(1,) * (x_BCHW.ndim - 1))
        return (1 - share) * x_BCHW + share * noise_BCHW

    def target(self, x_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """What the model should answer: the way from the picture to the noise."""
        return noise_BCHW - x_BCHW

    def loss(
        self, out_BCHW: Tensor, target_BCHW: Tensor, t_B: Tensor, mask_B1HW: Tensor | None = None
    ) -> Tensor:
        """Mean error of each row [B], in float32; of what a mask shows, if given."""
        kind = self.error.type
        c_B = _huber_thresholds(self.error, t_B.float(), self.num_timesteps) if kind in HUBER else None
        return row_error(out_BCHW, target_BCHW, mask_B1HW, kind, c_B)


def make_objective(
    config: Mapping[str, Any],
    settings: ObjectiveSettings | None = None,
    device: torch.device | str = "cpu",
) -> Objective | FlowObjective:
    """The objective of a scheduler configuration, of diffusion or rectified flow."""
    asked = settings or ObjectiveSettings()
    if is_flow(config):
        return FlowObjective.from_config(config, loss=asked.loss, times=asked.timesteps)
    return Objective.from_config(config, asked, device)


def _check_range(times: TimestepSettings, total: int) -> None:
    if max(times.min + 1, times.max or 0) > total:
        key, value = ("max", times.max) if times.max and times.max > total else ("min", times.min)
        raise RecipeError(
            f"objective.timesteps.{key}", f"{value}", allowed=f"0 to {total}, the schedule's timesteps"
        )


def _drawn_times(u_B: Tensor, settings: TimestepSettings) -> Tensor:
    """Times [B] in [0, 1] of uniform draws, by the distributions of Esser et al. (2024), section 3.1."""
    if settings.distribution == "logit-normal":
        mean, std = settings.mean or 0.0, 1.0 if settings.std is None else settings.std
        return torch.sigmoid(mean + std * torch.special.ndtri(u_B))
    if settings.distribution == "mode":
        return 1 - u_B - settings.mode_scale * (torch.cos(math.pi / 2 * u_B).square() - 1 + u_B)
    return u_B


def square_error(out_BCHW: Tensor, target_BCHW: Tensor, mask_B1HW: Tensor | None = None) -> Tensor:
    """Mean square error of each row [B], in float32, or the mean weighted by a mask of values from 0 to 1."""
    return row_error(out_BCHW, target_BCHW, mask_B1HW)


def row_error(
    out_BCHW: Tensor,
    target_BCHW: Tensor,
    mask_B1HW: Tensor | None = None,
    kind: str = "mse",
    c_B: Tensor | None = None,
) -> Tensor:
    """Mean error of each row [B], in float32, or the mean weighted by a mask of values from 0 to 1.

    The mask's own sum divides: a small subject counts as much as a large one. A black mask gives 0.
    """
    off_BCHW = out_BCHW.float() - target_BCHW.float()
    if kind == "mse":
        error_BCHW = off_BCHW.square()
    elif kind == "l1":
        error_BCHW = off_BCHW.abs()
    else:
        assert c_B is not None
        c_B111 = c_B.float().view(-1, *(1,) * (off_BCHW.ndim - 1))
        error_BCHW = 2 * (torch.sqrt(off_BCHW.square() + c_B111.square()) - c_B111)
        error_BCHW = c_B111 * error_BCHW if kind == "huber" else error_BCHW
    if mask_B1HW is None:
        return error_BCHW.mean(dim=(1, 2, 3))
    weight_B = mask_B1HW.sum(dim=(1, 2, 3)).clamp(min=1e-6)
    return (error_BCHW.mean(dim=1, keepdim=True) * mask_B1HW).sum(dim=(1, 2, 3)) / weight_B


def _huber_thresholds(
    settings: LossSettings, t_B: Tensor, total: int, alphas_cumprod_T: Tensor | None = None
) -> Tensor:
    """The Huber losses' c at timesteps [B] of `total`, in the precision of these."""
    c = settings.huber_c
    if settings.huber_schedule == "exponential":
        return settings.huber_scale * c ** (t_B / total)
    if settings.huber_schedule == "constant" or alphas_cumprod_T is None:
        return torch.full_like(t_B, c * settings.huber_scale)
    at_B = alphas_cumprod_T.to(t_B.dtype)[t_B.long()]
    return (1 - c) / (1 + ((1 - at_B) / at_B).sqrt()).square() + c


def _timestep_weights(
    alphas_cumprod_T: Tensor, prediction: Prediction, settings: ObjectiveSettings
) -> Tensor:
    """Loss weights [T] as the settings say; RecipeError where they are of v alone."""
    weight_T = min_snr_weights(alphas_cumprod_T, prediction, settings.min_snr_gamma)
    if settings.soft_min_snr_gamma is not None:
        weight_T = _soft_min_snr_weights(alphas_cumprod_T, prediction, settings.soft_min_snr_gamma)
    if settings.p2_gamma is not None:
        weight_T = _p2_weights(alphas_cumprod_T, prediction, settings.p2_gamma, settings.p2_k)
    if settings.debiased_estimation:
        weight_T = _debiased_weights(alphas_cumprod_T, prediction)
    if not settings.scale_v_pred_loss_like_noise_pred:
        return weight_T
    if prediction != "v":
        raise RecipeError(
            "objective.scale_v_pred_loss_like_noise_pred",
            f"true, but the model predicts {prediction}",
            allowed="with objective.prediction=v",
        )
    snr_T = (alphas_cumprod_T / (1 - alphas_cumprod_T)).clamp(max=1000)  # as in sd-scripts
    return weight_T * snr_T / (snr_T + 1)


def _soft_min_snr_weights(alphas_cumprod_T: Tensor, prediction: Prediction, gamma: float) -> Tensor:
    """Loss weights [T] of soft min-SNR (Crowson et al. 2024): SNR gamma / (SNR + gamma) on the picture's
    error, of epsilon divided by SNR, of v by SNR + 1.
    """
    snr_T = alphas_cumprod_T / (1 - alphas_cumprod_T)
    of_noise_T = gamma / (snr_T + gamma)
    return of_noise_T * snr_T / _picture_errors(snr_T, prediction) if prediction != "epsilon" else of_noise_T


def _p2_weights(alphas_cumprod_T: Tensor, prediction: Prediction, gamma: float, k: float) -> Tensor:
    """Loss weights [T] of P2 (Choi et al. 2022): 1 / (k + SNR)^gamma on the noise's error, which is SNR times
    the picture's, and SNR / (SNR + 1) times that of v.
    """
    snr_T = alphas_cumprod_T / (1 - alphas_cumprod_T)
    of_noise_T = (k + snr_T) ** -gamma
    return of_noise_T * snr_T / _picture_errors(snr_T, prediction) if prediction != "epsilon" else of_noise_T


def _picture_errors(snr_T: Tensor, prediction: Prediction) -> Tensor:
    """The square error of what is predicted, as a multiple of the picture's [T]."""
    return {"epsilon": snr_T, "v": snr_T + 1, "sample": torch.ones_like(snr_T)}[prediction]


def _debiased_weights(alphas_cumprod_T: Tensor, prediction: Prediction) -> Tensor:
    """Loss weights [T] of debiased estimation (Yu et al. 2023): 1 / sqrt(SNR), of v 1 / (SNR + 1).

    SNR is at most 1000. The picture's own error is SNR times smaller than the noise's, hence sqrt(SNR).
    """
    snr = (alphas_cumprod_T / (1 - alphas_cumprod_T)).clamp(max=1000)
    if prediction == "v":
        return 1 / (snr + 1)
    return snr.sqrt() if prediction == "sample" else 1 / snr.sqrt()


def min_snr_weights(alphas_cumprod_T: Tensor, prediction: Prediction, gamma: float | None) -> Tensor:
    """Loss weights [T] of min-SNR-gamma (Hang et al. 2023): min(SNR, gamma) on the picture's error.

    The error of epsilon is SNR times that of the picture, of v SNR + 1 times, hence the divisors. At zero
    SNR the epsilon weight is its limit 1.
    """
    if gamma is None:
        return torch.ones_like(alphas_cumprod_T)
    snr = alphas_cumprod_T / (1 - alphas_cumprod_T)
    if prediction == "epsilon":
        return torch.clamp(gamma / snr, max=1.0)
    clipped = snr.clamp(max=gamma)
    return clipped / (snr + 1) if prediction == "v" else clipped


def offset_noise(noise_BCHW: Tensor, shift_BC11: Tensor, strength: float | Tensor) -> Tensor:
    """Noise with a shift common to each channel's pixels, so that a picture's mean can be learned too."""
    if not isinstance(strength, Tensor) and not strength:
        return noise_BCHW
    return noise_BCHW + strength * shift_BC11


def offset_strength(
    latents_BCHW: Tensor, offset: float, share_B111: Tensor | None, adaptive: float | None
) -> float | Tensor:
    """Offset noise's strength: a share of `offset`, if drawn, and with `adaptive` more where a channel's mean
    is far from 0 (kohya's adaptive_noise_scale), at least 0: [B, 1, 1, 1] or [B, C, 1, 1].
    """
    strength: float | Tensor = offset if share_B111 is None else offset * share_B111
    if adaptive is None:
        return strength
    mean_BC11 = latents_BCHW.mean(dim=(2, 3), keepdim=True).abs()
    return (strength + adaptive * mean_BC11).clamp(min=0)


def multires_noise(noise_BCHW: Tensor, pyramid_BCHW: Tensor) -> Tensor:
    """Noise with coarser noises added (`data.draws.pyramid`), each row scaled back to unit deviation."""
    noise_BCHW = noise_BCHW + pyramid_BCHW
    return noise_BCHW / noise_BCHW.std(dim=tuple(range(1, noise_BCHW.ndim)), keepdim=True)


def _rows(table_T: Tensor, t_B: Tensor, like_BCHW: Tensor) -> Tensor:
    return table_T[t_B].view(-1, *(1,) * (like_BCHW.ndim - 1))
