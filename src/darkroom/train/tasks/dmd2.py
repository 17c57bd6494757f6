"""Distribution matching: DMD2 (Yin et al. 2024, arXiv 2405.14867).

The student draws pictures by itself, in the steps of its sampler. Two scores look at them under noise: the
teacher's with guidance, and that of a second network which learns what the student draws. The student moves
along their difference. The second network learns at each step, the student at one of `fake_updates` (two
time-scales); what the student starts from at its later steps are its own pictures (backward simulation).
The second network is given a token of the student's step, which the paper's is not: the mixture of all steps
may be right where the first are too smooth and the last too rough.
With a GAN loss a few layers on the second network's middle tell the student's pictures from the batch's.

Shapes: b rows of a micro-batch, C latent channels, h and w latent pixels, L tokens, D text width or width of
the U-Net's middle, N steps of the student.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.data.loader import ReadSettings
from darkroom.errors import RecipeError
from darkroom.hardware.accelerator import to_device
from darkroom.models.model import Model
from darkroom.recipe.sections import DistillSettings
from darkroom.sample.schedule import Flow, lcm_timesteps
from darkroom.train.objective import FlowObjective, Objective, square_error
from darkroom.train.tasks.diffusion import Columns
from darkroom.train.tasks.distill import FewSteps, wide

FAKE = "fake_unet"
LEAST_LOGIT = -15.0
"""Below it the factor that turns the discriminator's gradient is no larger."""
NOISY = (0.02, 0.98)
"""Between which shares of the timesteps the two scores look (DMD, section 4.1)."""


class StepTokens(nn.Module):
    """One token for each of the student's steps, after a caption's: so one network learns what the student
    draws at each, not the mixture of them all."""

    def __init__(self, weight_ND: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_ND)

    def forward(self, text_bLD: Tensor, index_b: Tensor) -> Tensor:
        """Text states with the token of each row's step [b, L + 1, D]."""
        token_bD = F.embedding(index_b, self.weight).to(text_bLD.dtype)
        return torch.cat([text_bLD, token_bD[:, None]], dim=1)

    def enable_gradient_checkpointing(self) -> None:
        """Asked of every trained part; here is nothing worth computing twice."""


class Discriminator(nn.Module):
    """What tells the student's pictures from real ones, by what a denoiser's middle makes of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        groups = math.gcd(width, 32)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(groups, width)
        self.last = nn.Linear(width, 1)

    def forward(self, hidden_bDhw: Tensor) -> Tensor:
        """Hidden states of a U-Net's middle to one number a picture [b], high for real ones."""
        out_bDhw = F.silu(self.norm(self.first(hidden_bDhw)))
        logit_b1: Tensor = self.last(out_bDhw.mean(dim=(2, 3)))
        return logit_b1[:, 0]

    def enable_gradient_checkpointing(self) -> None:
        """Asked of every trained part; here is nothing worth computing twice."""


def make_discriminator(model: Model, device: torch.device, seed: int) -> Discriminator:
    """A new one for the middle of a model's U-Net; RecipeError for a model that has none."""
    if model.is_dit:
        raise RecipeError(
            "objective.distill.gan_weight", "given, but the model is a transformer", allowed="U-Nets"
        )
    unet: Any = model.unet
    if unet.mid_block is None:
        raise RecipeError("objective.distill.gan_weight", "given, but the U-Net has no middle block")
    config: Any = unet.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Discriminator(int(config.block_out_channels[-1])).to(device)


@contextmanager
def _seeing_inside(unet: Any) -> Iterator[list[Tensor]]:
    """Within, what leaves the U-Net's middle [b, D, h, w] is put into the list."""
    found: list[Tensor] = []
    handle = unet.mid_block.register_forward_hook(lambda _, __, out: found.append(out))
    try:
        yield found
    finally:
        handle.remove()


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
        *,
        discriminator: Discriminator | None = None,
        **more: Any,
    ) -> None:
        """`discriminator`: what has the GAN loss; None for none."""
        super().__init__(model, objective, read, modules, settings, adapts=False, **more)
        fake: Any = copy.deepcopy(model.unet)
        self._fake, self._discriminator = fake.requires_grad_(True), discriminator
        self.modules[FAKE] = self._fake
        if discriminator is not None:
            self.modules["discriminator"] = discriminator
        self._step_tokens: StepTokens | None = None
        if settings.steps > 1:
            empty_1LD = self._empty[0]
            self._step_tokens = StepTokens(empty_1LD.new_zeros((settings.steps, empty_1LD.shape[-1])))
            self.modules["step_tokens"] = self._step_tokens
        if settings.fake_lr is not None:
            self.rates |= {name: settings.fake_lr for name in self.modules if name != "unet"}
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
        found = {"loss": moved_b + fake_b, "matching_loss": moved_b, "fake_loss": fake_b}
        if self._discriminator is not None:
            apart_b = self.told_apart(self._discriminator, x_bChw, inputs, text)
            found["discriminator_loss"] = apart_b
            found["loss"] = found["loss"] + self._settings.discriminator_weight * apart_b
        return found

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
        out_bChw = self._call_fake(noisy_bChw, t_b, inputs, text)
        fake_bChw, _ = self._both(noisy_bChw, t_b, out_bChw)
        scale_b = (x_bChw - real_bChw).abs().mean(dim=(1, 2, 3))
        return torch.nan_to_num((fake_bChw - real_bChw) / wide(scale_b))

    def _call_fake(
        self,
        x_bChw: Tensor,
        t_b: Tensor,
        inputs: Mapping[str, Tensor],
        text: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """The second network's answer, of pictures that the student drew at each row's step."""
        states = text[0] if self._step_tokens is None else self._step_tokens(text[0], inputs["index"])
        return self._call(self._fake, x_bChw, t_b, inputs, (states, text[1]))

    def _fake_error(
        self, x_bChw: Tensor, inputs: Mapping[str, Tensor], text: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        t_b, noise_bChw = inputs["t_learned"], inputs["further"][:, -1]
        noisy_bChw = self._diffusion.add_noise(x_bChw, noise_bChw, t_b)
        states = text[0].detach(), None if text[1] is None else text[1].detach()
        out_bChw = self._call_fake(noisy_bChw, t_b, inputs, states)
        return square_error(out_bChw, self._diffusion.target(x_bChw, noise_bChw, t_b))

    def told_apart(
        self,
        discriminator: Discriminator,
        x_bChw: Tensor,
        inputs: Mapping[str, Tensor],
        text: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """The error [b] of telling the student's pictures from the batch's, both under noise (DMD2, section
        4.3): softplus(drawn) + softplus(-real) of the discriminator's two answers.

        What goes back to the student is the gradient of `gan_weight` softplus(-drawn) in its place: the
        slopes of softplus(d) and of softplus(-d) differ by the factor -exp(-d).
        """
        t_b, settings = inputs["t_matched"], self._settings
        factors: list[Tensor] = []
        if x_bChw.requires_grad:
            x_bChw = x_bChw.view_as(x_bChw)  # the hook is of this pass alone
            x_bChw.register_hook(lambda gradient: gradient * wide(factors[0]))  # type: ignore[no-untyped-call]
        pictures = (x_bChw, inputs["further"][:, -2]), (inputs["latents"], inputs["further"][:, -1])
        noisy_2bChw = torch.cat(
            [self._diffusion.add_noise(picture, noise, t_b) for picture, noise in pictures]
        )
        named = [name for name in ("time_ids", "index") if name in inputs]
        twice = {name: torch.cat([inputs[name]] * 2) for name in named}
        states, pooled = (None if each is None else torch.cat([each.detach()] * 2) for each in text)
        assert states is not None
        with _seeing_inside(self._fake) as hidden:
            self._call_fake(noisy_2bChw, torch.cat([t_b] * 2), twice, (states, pooled))
        drawn_b, real_b = discriminator(hidden[0]).float().chunk(2)
        share = settings.gan_weight / settings.discriminator_weight
        factors.append(-share * torch.exp(-drawn_b.detach().clamp(min=LEAST_LOGIT)))
        return F.softplus(drawn_b) + F.softplus(-real_b)
