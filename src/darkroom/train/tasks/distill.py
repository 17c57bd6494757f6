"""Few steps from many: latent consistency distillation (Luo et al. 2023, LCM; as a LoRA, LCM-LoRA), and
distribution matching: DMD2 (Yin et al. 2024, arXiv 2405.14867), without its GAN loss.

LCM's student learns to answer with the same picture from everywhere on the way that the teacher takes with
guidance: from a noisy latent, and from the one that the teacher's DDIM step makes of it. The teacher is the
model as it was; as a LoRA, the model without its additions. The target is the answer of the run's averaged
weights, as in the paper and diffusers' train_lcm_distill_sd_wds.py; of a LoRA the student's own without
gradients, as in train_lcm_distill_lora_sd.py.

DMD2's student draws pictures by itself, in the steps of its sampler. Two scores look at them under noise: the
teacher's with guidance, and that of a second network which learns what the student draws. The student moves
along their difference. The second network learns at each step, the student at one of `fake_updates` (two
time-scales); what the student starts from at its later steps are its own pictures (backward simulation).

Of rectified flow the teacher's steps are Euler's, evenly spaced before the model's shift, and the student's
answer is the picture that its velocity means: at time 0 that is what it is given, without more ado.

Shapes: b rows of a micro-batch, C latent channels, h and w latent pixels, L tokens, D text width, N steps of
the student.
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
from darkroom.sample.schedule import Flow, lcm_timesteps
from darkroom.train.ddp_fsdp import is_cut, rows_here
from darkroom.train.objective import FLOW, FlowObjective, Objective, square_error
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


FAKE = "fake_unet"
NOISY = (0.02, 0.98)
"""Between which shares of the timesteps the two scores look (DMD, section 4.1)."""


def _few(objective: Objective | FlowObjective, settings: DistillSettings) -> list[int] | list[float]:
    """The timesteps that a student of few steps draws at, falling."""
    total, steps = objective.num_timesteps, settings.steps
    if isinstance(objective, FlowObjective):
        flow = Flow.from_config({"num_train_timesteps": total, "shift": objective.shift})
        levels: list[float] = (total * flow.levels(steps, "trailing")[:-1]).tolist()
        return levels
    timesteps: list[int] = lcm_timesteps(settings.ddim_steps, total, steps).astype(int).tolist()
    return timesteps


class DistributionMatching(FewSteps):
    """Train the U-Net to draw in few steps what the teacher would."""

    def __init__(
        self,
        model: Model,
        objective: Objective | FlowObjective,
        read: ReadSettings,
        modules: Mapping[str, nn.Module],
        settings: DistillSettings,
        **more: Any,
    ) -> None:
        super().__init__(model, objective, read, modules, settings, adapts=False, **more)
        fake: Any = copy.deepcopy(model.unet)
        self._fake = fake.requires_grad_(True)
        self.modules[FAKE] = self._fake
        if settings.fake_lr is not None:
            self.rates[FAKE] = settings.fake_lr
        self._steps = _few(objective, settings)
        self._moves = True
        draws = (*self.read.draws, "further")
        self.read = self.read.model_copy(update={"draws": draws, "further": len(self._steps) + 1})

    @property
    def turns(self) -> dict[int, float]:
        """The first step of each kind, and its share of all steps."""
        every = self._settings.fake_updates
        return {0: 1.0} if every == 1 else {0: 1 / every, 1: 1 - 1 / every}

    @property
    def points(self) -> Sequence[int]:
        return ()

    def begin(self, k: int) -> None:
        """Step k (from 0): whether the student moves, or its second score alone learns."""
        self._moves = k % self._settings.fake_updates == 0

    def inputs(self, columns: Columns, device: torch.device) -> dict[str, Tensor]:
        """What diffusion takes, with the student's step [B] and the two timesteps [B] of the scores."""
        inputs = super().inputs(columns, device)
        del inputs["index"]
        total, steps = self._diffusion.num_timesteps, len(self._steps)
        least, most = (int(share * total) for share in NOISY)
        # One draw of 53 bits holds all three: what is left of each is the next one's.
        at_b = columns["u"] * steps
        index_b = at_b.long().clamp_(0, steps - 1)
        first_b = (at_b - index_b) * (most - least)
        second_b = (first_b - first_b.floor()) * total
        drawn = {
            "index": index_b,
            "t_matched": least + first_b.long().clamp_(0, most - least - 1),
            "t_learned": second_b.long().clamp_(0, total - 1),
        }
        further = {"further": columns["further"]}
        return inputs | {name: to_device(value, device) for name, value in {**drawn, **further}.items()}

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row: `loss`, what the student moves by (0 at steps at which it does not), and the error of
        its second score.
        """
        text = self._states(inputs)
        with torch.set_grad_enabled(self._moves and torch.is_grad_enabled()):
            x_bChw = self.draw(inputs, text)
        fake_b = self._fake_error(x_bChw.detach(), inputs, text)
        moved_b = self._matched(x_bChw, inputs, text) if self._moves else torch.zeros_like(fake_b)
        return {"loss": moved_b + fake_b, "matching_loss": moved_b, "fake_loss": fake_b}

    @torch.no_grad()
    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row [B] the matching loss and the error of the second score."""
        text = self._states(inputs)
        x_bChw = self.draw(inputs, text)
        return {
            "heldout_loss": self._matched(x_bChw, inputs, text),
            "heldout_fake_loss": self._fake_error(x_bChw, inputs, text),
        }

    def draw(self, inputs: Mapping[str, Tensor], text: tuple[Tensor, Tensor | None]) -> Tensor:
        """The student's picture after the step that each row drew, from its own pictures before it."""
        x_bChw, further_bNChw = inputs["noise"], inputs["further"]
        starts = [x_bChw]
        with torch.no_grad():
            for i, (t, then) in enumerate(zip(self._steps, self._steps[1:], strict=False)):
                t_b, then_b = (self._at(step, inputs) for step in (t, then))
                picture_bChw = self._answer_at(x_bChw, t_b, inputs, text)
                x_bChw = self._diffusion.add_noise(picture_bChw, further_bNChw[:, i], then_b)
                starts.append(x_bChw)
        index_b = inputs["index"]
        rows_b = torch.arange(len(index_b), device=index_b.device)
        t_b = self._at(0, inputs)
        for i, t in enumerate(self._steps):  # no table to copy to the device
            t_b = torch.where(index_b == i, t, t_b)
        return self._answer_at(torch.stack(starts)[index_b, rows_b], t_b, inputs, text)

    def _at(self, timestep: float, inputs: Mapping[str, Tensor]) -> Tensor:
        """One timestep for all rows [b], as the model takes them."""
        return self._diffusion.at(timestep, inputs["index"])

    def _matched(
        self, x_bChw: Tensor, inputs: Mapping[str, Tensor], text: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        """A loss [b] whose gradient by the picture is the difference of the scores (DMD, equations 7, 8)."""
        with torch.no_grad():
            step_bChw = self.direction(x_bChw, inputs, text)
        return 0.5 * square_error(x_bChw, (x_bChw - step_bChw).detach())

    def direction(
        self, x_bChw: Tensor, inputs: Mapping[str, Tensor], text: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        """(fake - real) / mean |x - real| of the pictures that both scores see in x under noise."""
        t_b = inputs["t_matched"]
        noisy_bChw = self._diffusion.add_noise(x_bChw, inputs["further"][:, -2], t_b)
        real_bChw, _ = self._guided(noisy_bChw, t_b, inputs["guidance"], inputs, text)
        fake_bChw, _ = self._both(noisy_bChw, t_b, self._call(self._fake, noisy_bChw, t_b, inputs, text))
        scale_b = (x_bChw - real_bChw).abs().mean(dim=(1, 2, 3))
        return torch.nan_to_num((fake_bChw - real_bChw) / wide(scale_b))

    def _fake_error(
        self, x_bChw: Tensor, inputs: Mapping[str, Tensor], text: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        t_b, noise_bChw = inputs["t_learned"], inputs["further"][:, -1]
        noisy_bChw = self._diffusion.add_noise(x_bChw, noise_bChw, t_b)
        states = text[0].detach(), None if text[1] is None else text[1].detach()
        out_bChw = self._call(self._fake, noisy_bChw, t_b, inputs, states)
        return square_error(out_bChw, self._diffusion.target(x_bChw, noise_bChw, t_b))
