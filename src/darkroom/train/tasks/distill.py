"""Few steps from many: latent consistency distillation (Luo et al. 2023, LCM; as a LoRA, LCM-LoRA), and what
every method of few steps needs. `dmd2` has the other method.

The student learns to answer with the same picture from everywhere on the way that the teacher takes with
guidance: from a noisy latent, and from the one that the teacher's DDIM step makes of it. The teacher is the
model as it was; as a LoRA, the model without its additions. The student's own answer, without gradients, is
the target, as in diffusers' train_lcm_distill_lora_sd.py.

Shapes: b rows of a micro-batch, C latent channels, h and w latent pixels, L tokens, D text width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from darkroom.data.loader import ReadSettings
from darkroom.errors import RecipeError
from darkroom.hardware.accelerator import to_device
from darkroom.models.model import Model, is_flow
from darkroom.prepare.encoders import text_states, tokenize
from darkroom.recipe.sections import DistillSettings
from darkroom.train.objective import Objective
from darkroom.train.tasks.diffusion import Columns, Diffusion

SIGMA_DATA = 0.5
"""LCM's: the boundary condition's standard deviation of data."""
USUAL_GUIDANCE = 7.5
_KEPT = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
    "rescale_betas_zero_snr",
)  # fmt: skip
"""What a distilled model's scheduler keeps of its teacher's."""


def lcm_scheduler(config: Mapping[str, Any], settings: DistillSettings) -> dict[str, Any]:
    """The `LCMScheduler` configuration that a distilled model's folder says how to draw by."""
    if is_flow(config):
        allowed = "models of diffusion (epsilon, v or sample)"
        raise RecipeError("task", "distill of a model of rectified flow", allowed=allowed)
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
        objective: Objective,
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
        """What diffusion takes, with DDIM's step index [B] and a guidance [B] for each row."""
        unet: Any = self.model.unet
        if self._teacher is not None and self._teacher.dtype != unet.dtype:
            nn.Module.to(self._teacher, unet.dtype)  # the step has cast the student meanwhile
        inputs = super().inputs(columns, device)
        steps = self._settings.ddim_steps
        whole_b = columns["u"] * steps  # float64, which not every accelerator takes: it stays where it is
        index_b = whole_b.long().clamp_(0, steps - 1)
        # What is left of the draw is a draw of its own.
        least, most = self._guidance
        guidance_b = (least + (most - least) * (whole_b - index_b)).to(inputs["latents"].dtype)
        return {**inputs, "index": to_device(index_b, device), "guidance": to_device(guidance_b, device)}

    def _answer_at(
        self,
        x_bChw: Tensor,
        t_b: Tensor,
        inputs: Mapping[str, Tensor],
        text: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """The student's picture, which at timestep 0 is what it is given (equation 9 of LCM's paper)."""
        picture_bChw, _ = self._both(x_bChw, t_b, self._call(self.model.unet, x_bChw, t_b, inputs, text))
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
        twice = {name: torch.cat([inputs[name]] * 2) for name in ("time_ids",) if name in inputs}
        x_2bChw, t_2b = torch.cat([x_bChw] * 2), torch.cat([t_b] * 2)
        with self._as_teacher() as unet:
            out = self._call(unet, x_2bChw, t_2b, twice, self._with_nothing(text))
        picture_bChw, noise_bChw = (
            without + wide(guidance_b) * (conditioned - without)
            for conditioned, without in (each.chunk(2) for each in self._both(x_2bChw, t_2b, out))
        )
        return picture_bChw, noise_bChw

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
        alpha, sigma = wide(self._diffusion.alphas[t_b]), wide(self._diffusion.sigmas[t_b])
        if self._diffusion.prediction == "epsilon":
            return (x_bChw - sigma * out_bChw) / alpha, out_bChw
        if self._diffusion.prediction == "v":
            return alpha * x_bChw - sigma * out_bChw, alpha * out_bChw + sigma * x_bChw
        return out_bChw, (x_bChw - alpha * out_bChw) / sigma

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
        objective: Objective,
        read: ReadSettings,
        modules: Mapping[str, nn.Module],
        settings: DistillSettings,
        **more: Any,
    ) -> None:
        super().__init__(model, objective, read, modules, settings, **more)
        steps = settings.ddim_steps
        self._stride = objective.num_timesteps // steps
        self._points = (
            [self._start_of(int((i + 0.5) * steps / 8)) for i in range(8)]
            if steps >= 8
            else [self._start_of(i) for i in range(steps)]
        )

    def _start_of(self, index: int) -> int:
        return (index + 1) * self._stride - 1

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row the pseudo-Huber distance of the student's two answers."""
        return {"loss": self._distance(inputs, inputs["index"], inputs["guidance"])}

    @torch.no_grad()
    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each row's distance to the teacher [B], and [B, n] at fixed points, at the middle guidance."""
        mean = sum(self._guidance) / 2
        found = []
        for point in self._points:
            index_b = torch.full_like(inputs["index"], (point + 1) // self._stride - 1)
            found.append(self._distance(inputs, index_b, torch.full_like(index_b, mean, dtype=torch.float32)))
        errors_bn = torch.stack(found, dim=1)
        return {"heldout_loss": errors_bn.mean(dim=1), "heldout_loss_by_timestep": errors_bn}

    def _distance(self, inputs: Mapping[str, Tensor], index_b: Tensor, guidance_b: Tensor) -> Tensor:
        start_b = (index_b + 1) * self._stride - 1
        before_b = (start_b - self._stride).clamp_(min=0)
        noisy_bChw = self._diffusion.add_noise(inputs["latents"], inputs["noise"], start_b)
        text = self._states(inputs)
        online_bChw = self._answer_at(noisy_bChw, start_b, inputs, text)
        with torch.no_grad():
            x_bChw = self._teachers_step(noisy_bChw, start_b, before_b, guidance_b, inputs, text)
            target_bChw = self._answer_at(x_bChw, before_b, inputs, text)
        c = self._settings.huber_c
        square_bChw = (online_bChw.float() - target_bChw.float()).square()
        return (torch.sqrt(square_bChw + c * c) - c).mean(dim=(1, 2, 3))

    def _teachers_step(
        self,
        x_bChw: Tensor,
        t_b: Tensor,
        before_b: Tensor,
        guidance_b: Tensor,
        inputs: Mapping[str, Tensor],
        text: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """One step of DDIM with guidance, from t to the timestep before it."""
        picture_bChw, noise_bChw = self._guided(x_bChw, t_b, guidance_b, inputs, text)
        # The first of DDIM's alphas belongs to timestep 0.
        alpha_b, sigma_b = self._diffusion.alphas[before_b], self._diffusion.sigmas[before_b]
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
