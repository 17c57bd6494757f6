"""Few steps from many: latent consistency distillation (Luo et al. 2023, LCM; as a LoRA, LCM-LoRA).

LCM's student learns to answer with the same picture from everywhere on the way that the teacher takes with
guidance: from a noisy latent, and from the one that the teacher's DDIM step makes of it. The teacher is the
model as it was; as a LoRA, the model without its additions. The target is the answer of the run's averaged
weights, as in the paper and diffusers' train_lcm_distill_sd_wds.py; of a LoRA the student's own without
gradients, as in train_lcm_distill_lora_sd.py.

Of rectified flow the teacher's steps are Euler's, evenly spaced before the model's shift, and the student's
answer is the picture that its velocity means: at time 0 that is what it is given, without more ado.

Shapes: b rows of a micro-batch, C latent channels, h and w latent pixels, L tokens, D text width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from darkroom.data.loader import ReadSettings
from darkroom.errors import RecipeError
from darkroom.hardware.accelerator import to_device
from darkroom.models.model import Model, is_flow
from darkroom.prepare.columns import text_states, tokenize
from darkroom.recipe.sections import DistillSettings
from darkroom.sample.schedule import Flow
from darkroom.train.ddp_fsdp import is_cut, rows_here
from darkroom.train.objective import FLOW, FlowObjective, Objective
from darkroom.train.tasks.diffusion import Columns, Diffusion

Index = TypeVar("Index", Tensor, float)

SIGMA_DATA = 0.5
"""LCM's: the boundary condition's standard deviation of data."""
USUAL_GUIDANCE = 7.5
PLACES = 1024
"""Within a step of the teacher, from which a student of rectified flow starts."""
LEAST_SIGMA = 1e-3
"""Of unusual schedules the first timesteps have less, and velocities would be without bounds there."""
_KEPT = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
    "rescale_betas_zero_snr",
)  # fmt: skip
"""What a distilled model's scheduler keeps of its teacher's."""


def lcm_scheduler(config: Mapping[str, Any], settings: DistillSettings) -> dict[str, Any]:
    """The configuration of `LCMScheduler`, of flow `FlowMatchLCMScheduler`, that a distilled model has."""
    if is_flow(config):
        flow = Flow.from_config(config)
        if settings.timestep_scaling != DistillSettings().timestep_scaling:
            key, given = "objective.distill.timestep_scaling", f"{settings.timestep_scaling:g}"
            raise RecipeError(key, f"{given} with rectified flow, which needs none", mend="leave it out")
        count = flow.num_train_timesteps
        return {"_class_name": "FlowMatchLCMScheduler", "num_train_timesteps": count, "shift": flow.shift}
    return {
        "_class_name": "LCMScheduler",
        **{key: config[key] for key in _KEPT if key in config},
        "original_inference_steps": settings.ddim_steps,
        "timestep_scaling": settings.timestep_scaling,
        "clip_sample": False,
        "set_alpha_to_one": True,
        "timestep_spacing": "leading",
    }


class FewSteps(Diffusion):
    """A student of few steps and its teacher, the model as it was: what both methods share."""

    def __init__(
        self,
        model: Model,
        objective: Objective | FlowObjective,
        read: ReadSettings,
        modules: Mapping[str, nn.Module],
        settings: DistillSettings,
        *,
        adapts: bool,
        **more: Any,
    ) -> None:
        """`adapts`: the teacher is the U-Net without its adapter, else a copy of it as it is now."""
        super().__init__(model, objective, read, modules, **more)
        steps, total = settings.ddim_steps, objective.num_timesteps
        if steps > total:
            raise RecipeError("objective.distill.ddim_steps", f"{steps}", allowed=f"at most {total}")
        self._settings, self._diffusion = settings, objective
        self._guidance = _guidance_range(settings, model)
        self._teacher: Any = None
        if not adapts:
            self._teacher = copy.deepcopy(model.unet).requires_grad_(False).eval()  # type: ignore[union-attr]
            self.frozen = (self._teacher,)
        self._empty = self._states_of_nothing()

    def inputs(self, columns: Columns, device: torch.device) -> dict[str, Tensor]:
        """What diffusion takes, with the teacher's step [B] and a guidance [B] for each row.

        Steps are whole, of rectified flow any fraction: few steps are drawn between the teacher's there.
        """
        unet: Any = self.model.unet
        for module in self.frozen:
            if module.dtype != unet.dtype and not is_cut(module):
                nn.Module.to(module, unet.dtype)  # the step has cast the student meanwhile
        inputs = super().inputs(columns, device)
        steps = self._settings.ddim_steps
        whole_b = columns["u"] * steps  # float64, which not every accelerator takes: it stays where it is
        index_b = whole_b.long().clamp_(0, steps - 1)
        # What is left of the draw is a draw of its own.
        left_b = whole_b - index_b
        if self._diffusion.prediction == FLOW:
            place_b = left_b * PLACES
            left_b = place_b - place_b.floor()
            index_b = (index_b - place_b.floor() / PLACES).float()
        least, most = self._guidance
        guidance_b = (least + (most - least) * left_b).to(inputs["latents"].dtype)
        return {**inputs, "index": to_device(index_b, device), "guidance": to_device(guidance_b, device)}

    def _answer_at(
        self,
        x_bChw: Tensor,
        t_b: Tensor,
        inputs: Mapping[str, Tensor],
        text: tuple[Tensor, Tensor | None],
        unet: Any = None,
    ) -> Tensor:
        """The student's picture, or another U-Net's, which at timestep 0 is what it is given (equation 9 of
        LCM's paper; of rectified flow by itself).
        """
        unet = self.model.unet if unet is None else unet
        picture_bChw, _ = self._both(x_bChw, t_b, self._call(unet, x_bChw, t_b, inputs, text))
        if self._diffusion.prediction == FLOW:
            return picture_bChw
        scaled_b = self._settings.timestep_scaling * t_b.float()
        skip_b = SIGMA_DATA**2 / (scaled_b**2 + SIGMA_DATA**2)
        out_b = scaled_b / (scaled_b**2 + SIGMA_DATA**2).sqrt()
        return wide(skip_b) * x_bChw + wide(out_b) * picture_bChw

    def _guided(
        self,
        x_bChw: Tensor,
        t_b: Tensor,
        guidance_b: Tensor,
        inputs: Mapping[str, Tensor],
        text: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """The picture and the noise that the teacher sees, with guidance."""
        guidance_b = self._where_guided(guidance_b, t_b)
        twice = {name: torch.cat([inputs[name]] * 2) for name in ("time_ids",) if name in inputs}
        x_2bChw, t_2b = torch.cat([x_bChw] * 2), torch.cat([t_b] * 2)
        with self._as_teacher() as unet:
            out = self._call(unet, x_2bChw, t_2b, twice, self._with_nothing(text))
        picture_bChw, noise_bChw = (
            without + wide(guidance_b) * (conditioned - without)
            for conditioned, without in (each.chunk(2) for each in self._both(x_2bChw, t_2b, out))
        )
        return picture_bChw, noise_bChw

    def _where_guided(self, guidance_b: Tensor, t_b: Tensor) -> Tensor:
        """A guidance [b], 1 at timesteps outside the interval of noise in which there is one."""
        settings = self._settings
        if not settings.guidance_sigma_min and settings.guidance_sigma_max is None:
            return guidance_b
        alpha_b, sigma_b = self._levels(t_b)
        ratio_b = sigma_b / alpha_b  # infinite where rectified flow has noise alone
        most = math.inf if settings.guidance_sigma_max is None else settings.guidance_sigma_max
        is_inside_b = (ratio_b > settings.guidance_sigma_min) & (ratio_b <= most)
        return torch.where(is_inside_b, guidance_b, 1.0)

    def _with_nothing(self, text: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """The states of b captions, and after them b times those of an empty one."""
        states, pooled = text
        empty, empty_pooled = self._empty
        both = torch.cat([states, _repeated(empty, states)])
        return both, None if pooled is None or empty_pooled is None else torch.cat(
            [pooled, _repeated(empty_pooled, pooled)]
        )

    def _call(
        self,
        unet: Any,
        x_bChw: Tensor,
        t_b: Tensor,
        inputs: Mapping[str, Tensor],
        text: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        added = {"text_embeds": text[1], "time_ids": inputs["time_ids"]} if self.model.is_sdxl else None
        out: Tensor = unet(
            x_bChw.to(unet.dtype),
            t_b,
            encoder_hidden_states=text[0].to(unet.dtype),
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
        return out.float()

    def _both(self, x_bChw: Tensor, t_b: Tensor, out_bChw: Tensor) -> tuple[Tensor, Tensor]:
        """The picture and the noise that an answer means."""
        alpha, sigma = (wide(levels_b) for levels_b in self._levels(t_b))
        if self._diffusion.prediction == FLOW:  # noise - picture
            return x_bChw - sigma * out_bChw, x_bChw + alpha * out_bChw
        if self._diffusion.prediction == "epsilon":
            return (x_bChw - sigma * out_bChw) / alpha, out_bChw
        if self._diffusion.prediction == "v":
            return alpha * x_bChw - sigma * out_bChw, alpha * out_bChw + sigma * x_bChw
        return out_bChw, (x_bChw - alpha * out_bChw) / sigma

    def _levels(self, t_b: Tensor) -> tuple[Tensor, Tensor]:
        """How much picture and how much noise there is at a timestep."""
        if isinstance(self._diffusion, FlowObjective):
            sigma_b = t_b.float() / self._diffusion.num_timesteps
            return 1 - sigma_b, sigma_b
        return self._diffusion.alphas[t_b], self._diffusion.sigmas[t_b]

    def _time(self, index: Index) -> Index:
        """The timestep at which the teacher's step `index` ends, counted from the picture.

        Step 0 ends at 0, of diffusion at -1, before the first; step `ddim_steps` would where the last starts.
        """
        total, steps = self._diffusion.num_timesteps, self._settings.ddim_steps
        if not isinstance(self._diffusion, FlowObjective):
            return index * (total // steps) - 1
        share, shift = index / steps, self._diffusion.shift
        return total * shift * share / (1 + (shift - 1) * share)

    @contextmanager
    def _as_teacher(self) -> Iterator[Any]:
        """The U-Net as it was before."""
        unet: Any = self.model.unet
        if self._teacher is not None:
            yield self._teacher
            return
        # peft's own switch also takes the gradients off its parameters, which the optimiser has hooks on.
        layers = [layer for layer in unet.modules() if hasattr(layer, "_disable_adapters")]
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield unet
        finally:
            for layer in layers:
                layer._disable_adapters = False

    @torch.no_grad()
    def _states_of_nothing(self) -> tuple[Tensor, Tensor | None]:
        """The states of an empty caption [1, L, D] that the teacher's guidance leads away from."""
        encoders: Sequence[nn.Module] = self.model.text_encoders
        device = next(encoders[0].parameters()).device
        ids = [rows.to(device) for rows in tokenize(self.model.tokenizers, [""])]
        states, pooled = text_states(self.model.text_encoders, ids)
        return states, pooled


class Distillation(FewSteps):
    """Latent consistency: train the U-Net, or a LoRA in it, to draw in few steps what it draws in many."""

    def __init__(
        self,
        model: Model,
        objective: Objective | FlowObjective,
        read: ReadSettings,
        modules: Mapping[str, nn.Module],
        settings: DistillSettings,
        *,
        averages: bool = False,
        **more: Any,
    ) -> None:
        """`averages`: the target is the answer of averaged weights, which `follow` is given; else the
        student's own.
        """
        super().__init__(model, objective, read, modules, settings, **more)
        self._target: Any = None
        self.follow: Callable[[Mapping[str, Tensor]], None] | None = None
        if averages:
            self._target = copy.deepcopy(self._teacher)
            self.frozen = (*self.frozen, self._target)
            self.follow = self._take
        steps = settings.ddim_steps
        self._fixed = [int((i + 0.5) * steps / 8) for i in range(8)] if steps >= 8 else list(range(steps))
        self._points = [round(self._time(float(index + 1))) for index in self._fixed]

    @torch.no_grad()
    def _take(self, averaged: Mapping[str, Tensor]) -> None:
        """Take the averaged weights, by the trained ones' names, for the target of the next step."""
        weights = {name: rows_here(param) for name, param in self._target.named_parameters(prefix="unet")}
        torch._foreach_copy_([weights[name] for name in averaged], list(averaged.values()))

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row the pseudo-Huber distance of the student's two answers."""
        return {"loss": self._distance(inputs, inputs["index"], inputs["guidance"])}

    @torch.no_grad()
    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each row's distance to the teacher [B], and [B, n] at fixed points, at the middle guidance."""
        mean = sum(self._guidance) / 2
        found = []
        for index in self._fixed:
            index_b = torch.full_like(inputs["index"], index)
            found.append(self._distance(inputs, index_b, torch.full_like(index_b, mean, dtype=torch.float32)))
        errors_bn = torch.stack(found, dim=1)
        return {"heldout_loss": errors_bn.mean(dim=1), "heldout_loss_by_timestep": errors_bn}

    def _distance(self, inputs: Mapping[str, Tensor], index_b: Tensor, guidance_b: Tensor) -> Tensor:
        start_b, before_b = self._time(index_b + 1), self._time(index_b).clamp_(min=0)
        noisy_bChw = self._diffusion.add_noise(inputs["latents"], inputs["noise"], start_b)
        text = self._states(inputs)
        online_bChw = self._answer_at(noisy_bChw, start_b, inputs, text)
        with torch.no_grad():
            x_bChw = self._teachers_step(noisy_bChw, start_b, before_b, guidance_b, inputs, text)
            target_bChw = self._answer_at(x_bChw, before_b, inputs, text, self._target)
        c, apart_bChw = self._settings.huber_c, online_bChw.float() - target_bChw.float()
        if self._settings.distance == "velocity":  # of the same noisy latent, alpha x - sigma v
            apart_bChw = apart_bChw / wide(self._levels(start_b)[1].clamp_min(LEAST_SIGMA))
        return (torch.sqrt(apart_bChw.square() + c * c) - c).mean(dim=(1, 2, 3))

    def _teachers_step(
        self,
        x_bChw: Tensor,
        t_b: Tensor,
        before_b: Tensor,
        guidance_b: Tensor,
        inputs: Mapping[str, Tensor],
        text: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """One step of DDIM, of rectified flow Euler's, with guidance, from t to the timestep before it."""
        picture_bChw, noise_bChw = self._guided(x_bChw, t_b, guidance_b, inputs, text)
        # The first of DDIM's alphas belongs to timestep 0.
        alpha_b, sigma_b = self._levels(before_b)
        return wide(alpha_b) * picture_bChw + wide(sigma_b) * noise_bChw


def _guidance_range(settings: DistillSettings, model: Model) -> tuple[float, float]:
    usual = model.guidance if model.guidance is not None and model.guidance > 1 else USUAL_GUIDANCE
    least = usual if settings.guidance_min is None else settings.guidance_min
    most = max(usual, least) if settings.guidance_max is None else settings.guidance_max
    if not (least <= most and math.isfinite(most)):
        raise RecipeError("objective.distill.guidance_max", f"{most:g} is less than guidance_min {least:g}")
    return least, most


def _repeated(row: Tensor, like: Tensor) -> Tensor:
    return row.to(like).expand_as(like)


def wide(values_b: Tensor) -> Tensor:
    """A number a row, to multiply [b, C, h, w] with."""
    return values_b.view(-1, 1, 1, 1)
