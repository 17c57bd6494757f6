"""The denoising loop: rows packed into batches, one step for all solvers, and a generator over the steps.

A row is one picture on its way. It owns its latents, table, step, guidance, text and random generator, so the
rows of one U-Net call may be at different steps of different solvers, and rows may come and go between steps.
Latents and solver arithmetic are float32 whatever the U-Net computes in.

Shapes: B rows, G of them guided, C H W latents, L tokens, D text width, P steps ahead, K table columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from darkroom.hardware.accelerator import new_tensor, to_device
from darkroom.models.adapters.bank import SLOTS, WEIGHTS, Choice, lay_out, rows_of, take_rows
from darkroom.models.control import take_residuals
from darkroom.sample.solvers import (
    CLIP_RANGE,
    CLIPPED,
    K_OUT,
    K_X,
    NOISE,
    NUM_TERMS,
    SCALE,
    TERMS,
    TIMESTEP,
    SolverTable,
)

Unet = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""unet(x_BCHW, t_B, text_BLD, added) -> out_BCHW. `added` holds the U-Net's further conditions, by name, each
with a row for every row of x (SDXL: text_embeds, time_ids); it is empty for SD 1 and 2."""


@dataclass(frozen=True, repr=False)
class Condition:
    """The U-Net's conditions of one picture: text states [L, D] and further named vectors."""

    text_LD: torch.Tensor
    added: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Stage:
    """What a prompt that changes between steps says up to a step."""

    until: int
    """The last step, from 0, at which it is read."""
    positive: Condition
    negative: Condition | None
    further: tuple[Condition, ...] = ()


@dataclass(frozen=True, repr=False)
class KnownPart:
    """What stays of a picture in part repainted: after each step it is laid over the latents, as noisy."""

    latents_CHW: torch.Tensor
    noise_CHW: torch.Tensor
    mask_1HW: torch.Tensor
    """1 where the picture is made anew, 0 where it stays."""


@dataclass(eq=False, repr=False)
class Row:
    """One picture on its way. `latents_CHW` starts as noise times the table's `initial_scale`, in float32.

    Guidance is on where it is above 1, a negative condition is given, and the step lies within
    `guidance_interval` (fractions of all steps, 0 to 1); elsewhere the row costs one evaluation, not two.
    A row with `weights` is composed: it is guided at every step, by each of its conditions times its weight.
    `generator` gives the noise of stochastic solvers; it draws on its own device.
    """

    table: SolverTable
    latents_CHW: torch.Tensor
    positive: Condition
    negative: Condition | None = None
    guidance: float = 1.0
    guidance_rescale: float = 0.0
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    generator: torch.Generator | None = None
    step: int = 0
    x0_CHW: torch.Tensor | None = None
    """The picture's latents as predicted at the latest step."""
    earlier: tuple[torch.Tensor, ...] = ()
    """x, x0 of the steps before, newest first."""
    known: KnownPart | None = None
    extra_CHW: torch.Tensor | None = None
    """Channels that the U-Net sees behind the latents, unscaled: an inpainting U-Net's mask and picture."""
    adapters: Choice = ()
    """(slot of the adapter bank, weight) of each; they hold for both evaluations of a guided row."""
    stages: tuple[Stage, ...] = ()
    """Of a prompt that changes between steps, in their order; they stand in for `positive` and `negative`."""
    further: tuple[Condition, ...] = ()
    """What a composed prompt (Liu et al. 2022) says besides `positive`; an evaluation each."""
    weights: tuple[float, ...] = ()
    """Of a composed prompt: of `positive` and of each of `further`."""
    controls: tuple[Any, ...] = ()
    """Its nets (`control.RowControl`), which a `ControlledUnet` runs."""

    @property
    def done(self) -> bool:
        """Whether every step of the table is taken."""
        return self.step >= len(self.table)

    def stage_at(self, step: int) -> int:
        """Which of its stages is read at a step; -1, as the last, for a prompt that does not change."""
        return next((i for i, stage in enumerate(self.stages) if step <= stage.until), len(self.stages) - 1)

    def conditions_at(self, step: int) -> tuple[Condition, Condition | None, tuple[Condition, ...]]:
        """What is read at a step: the positive and the negative condition, and what is composed with them."""
        if not self.stages:
            return self.positive, self.negative, self.further
        stage = self.stages[self.stage_at(step)]
        return stage.positive, stage.negative, stage.further

    def guided_at(self, step: int) -> bool:
        """Whether a step needs the second evaluation."""
        if self.weights:
            return True
        low, high = self.guidance_interval
        inside = low <= step / len(self.table) < high
        return inside and self.negative is not None and self.guidance > 1


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a row, those of its conditions and nets among them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, one.name) for one in fields(value)])


NEGATIVE = -1
Owner = tuple[Row, int]
"""Whose a row of a U-Net call is, and which of its texts it reads: 0, those that are composed with it from 1,
or NEGATIVE. A U-Net that keeps something for each row between steps has a method `of_rows(owners)`, which
gives the call for them."""


@dataclass(frozen=True, repr=False)
class StepState:
    """What a step left behind. The tensors are not written to afterwards."""

    index: int
    """How many steps the loop took before this one."""
    rows: tuple[Row, ...]
    latents_BCHW: torch.Tensor
    x0_BCHW: torch.Tensor


class RunningBatch:
    """Rows packed for shared U-Net calls; good for `steps_left` steps, until the first row is done.

    In the batch, a row's latents and history live here; `unpack` gives them back. Every row must have the
    same latent shape; rows whose texts differ in length share a batch, but not a U-Net call.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self.steps_left = min(len(row.table) - row.step for row in self.rows)
        if self.steps_left < 1:
            raise ValueError("a row that is done cannot take another step")
        self.device = self.rows[0].latents_CHW.device
        self._at = 0
        self._x = torch.stack([row.latents_CHW for row in self.rows]).float()
        self._x0 = self._x
        self._earlier = self._stack_earlier()
        self._extra = self._stack_extra()
        self._read_tables()
        self._read_known()
        self._guided: tuple[int, ...] | None = None
        self._staged: tuple[int, ...] | None = None

    def _stack_earlier(self) -> list[torch.Tensor]:
        depth = 2 * max(row.table.earlier for row in self.rows)
        blank = torch.zeros_like(self._x[0])
        return [
            torch.stack([row.earlier[j] if j < len(row.earlier) else blank for row in self.rows])
            for j in range(depth)
        ]

    def _stack_extra(self) -> torch.Tensor | None:
        extra = [row.extra_CHW for row in self.rows if row.extra_CHW is not None]
        if extra and len(extra) < len(self.rows):
            raise ValueError("rows with and without extra channels cannot share a batch")
        return torch.stack(extra) if extra else None

    def _read_known(self) -> None:
        """Lay side by side what stays of each picture, and how noisy it is after each step ahead."""
        self._knows = any(row.known is not None for row in self.rows)
        if not self._knows:
            return
        blank, anew = torch.zeros_like(self._x[0]), torch.ones_like(self._x[0, :1])
        known = [row.known or KnownPart(blank, blank, anew) for row in self.rows]
        self._known = torch.stack([one.latents_CHW for one in known]).float()
        self._known_noise = torch.stack([one.noise_CHW for one in known]).float()
        self._mask = torch.stack([one.mask_1HW for one in known]).float()
        ahead = range(1, self.steps_left + 1)
        levels = [[_level(row.table, row.step + p) for row in self.rows] for p in ahead]
        levels_P2B = new_tensor(levels, self.device).transpose(1, 2)
        self._levels = levels_P2B[..., None, None, None]

    def _read_tables(self) -> None:
        """Lay the rows' next steps side by side: a step then takes slices and never waits for the device."""
        ahead = self.steps_left
        values_BPK = np.stack([row.table.values_SK[row.step : row.step + ahead] for row in self.rows])
        used_PK: NDArray[np.bool_] = np.any(values_BPK != 0, axis=0)
        self._terms = [[j for j in range(NUM_TERMS) if used[TERMS + j]] for used in used_PK.tolist()]
        self._clips = used_PK[:, CLIPPED].tolist()
        self._scales = (values_BPK[:, :, SCALE] != 1).any(axis=0).tolist()
        self._draws = [[row.table.draws_S[row.step + p] for row in self.rows] for p in range(ahead)]
        # Where adapted rows come last, their unguided halves come first: together they are one slice.
        last = self.rows[-1].adapters and not self.rows[0].adapters
        order = range(len(self.rows))[:: -1 if last else 1]
        self._guides = [
            tuple(i for i in order if self.rows[i].guided_at(self.rows[i].step + p)) for p in range(ahead)
        ]
        staged = any(row.stages for row in self.rows)
        self._stages = [
            tuple(row.stage_at(row.step + p) for row in self.rows) if staged else () for p in range(ahead)
        ]
        columns_PKB = new_tensor(values_BPK.transpose(1, 2, 0), self.device)
        self._timesteps_PB = columns_PKB[:, TIMESTEP]
        self._columns = columns_PKB[..., None, None, None]

    @torch.no_grad()
    def advance(self, unet: Unet) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step with every row; returns the new latents and the predicted x0, both [B, C, H, W]."""
        p, x = self._at, self._x
        c = self._columns[p].unbind()
        if self._guides[p] != self._guided or self._stages[p] != self._staged:
            self._gather_conditions(self._guides[p])
            self._staged = self._stages[p]
        out = self._guide(self._evaluate(unet, x * c[SCALE] if self._scales[p] else x))
        x0 = torch.addcmul(c[K_X] * x, c[K_OUT], out)
        terms = [x, x0, *self._earlier]
        used = self._terms[p]
        x_next = c[TERMS + used[0]] * terms[used[0]] if used else torch.zeros_like(x)
        for j in used[1:]:
            x_next.addcmul_(c[TERMS + j], terms[j])
        if self._clips[p]:
            x0 = torch.clamp(x0, -c[CLIP_RANGE], c[CLIP_RANGE])
            x_next.addcmul_(c[CLIPPED], x0)
        if any(self._draws[p]):
            x_next.addcmul_(c[NOISE], self._noise(self._draws[p]))
        if self._knows:
            picture, noise = self._levels[p].unbind()
            stays = (picture * self._known).addcmul_(noise, self._known_noise)
            x_next = x_next.mul_(self._mask).addcmul_(1 - self._mask, stays)
        self._earlier = terms[: len(self._earlier)]
        self._x, self._x0 = x_next, x0
        self._move_on()
        return x_next, x0

    def _move_on(self) -> None:
        self._at += 1
        self.steps_left -= 1
        for row in self.rows:
            row.step += 1

    @torch.inference_mode()  # a tenth faster than no_grad on a small U-Net; the latents stay ordinary tensors
    def _evaluate(self, unet: Unet, x_in: torch.Tensor) -> torch.Tensor:
        """One U-Net call: every row with its own text, then the guided ones with their negative text, then
        what is composed."""
        guided = self._guided
        if self._extra is not None:
            x_in = torch.cat([x_in, self._extra], dim=1)
        if guided:
            again = x_in if self._all_guided else x_in[self._guided_index]
            further = [] if self._composed is None else [x_in[self._composed[0]]]
            x_in = torch.cat([x_in, again, *further])
        timesteps = self._unet_timesteps[self._at]
        if len(self._texts) == 1:
            out = self._call_of(unet)(x_in, timesteps, self._texts[0], self._added)
        else:
            parts = [
                self._call_of(unet, rows)(x_in[i], timesteps[i], text, added)
                for i, rows, text, added in zip(
                    self._members, self._member_rows, self._texts, self._added_parts, strict=True
                )
            ]
            out = torch.cat(parts)[self._places]
        return out if out.dtype == torch.float32 else out.float()

    def _call_of(self, unet: Unet, places: Sequence[int] | None = None) -> Unet:
        """The call for all rows of this step or some: a U-Net with `of_rows` gets their indices."""
        of_rows: Callable[[Sequence[Owner]], Unet] | None = getattr(unet, "of_rows", None)
        if of_rows is None:
            return unet
        owners: list[Owner] = [(row, 0) for row in self.rows]
        owners += [(self.rows[i], NEGATIVE) for i in self._guided or ()]
        owners += [(row, 1 + j) for row in self.rows for j in range(len(row.weights) - 1)]
        return of_rows(owners if places is None else [owners[i] for i in places])

    def _gather_conditions(self, guided: tuple[int, ...]) -> None:
        """Lay out text and timesteps for the U-Net; they hold until others are guided or a prompt changes."""
        self._guided = guided
        self._all_guided = guided == tuple(range(len(self.rows)))
        self._guided_index = new_tensor(guided, self.device, torch.int64)
        read = [row.conditions_at(row.step) for row in self.rows]
        conditions = [positive for positive, _, _ in read]
        conditions += [negative for i in guided if (negative := read[i][1]) is not None]
        conditions += [one for _, _, further in read for one in further]
        whose = [i for i, (_, _, further) in enumerate(read) for _ in further]
        self._gather_texts([condition.text_LD for condition in conditions])
        self._added = {
            name: torch.stack([condition.added[name] for condition in conditions])
            for name in conditions[0].added
        }
        places = [*range(len(self.rows)), *guided, *whose]
        self._added |= lay_out([self.rows[i].adapters for i in places], self.device)
        if len(self._texts) > 1:
            parts = zip(self._members, self._member_rows, strict=True)
            self._added_parts = [take_rows(self._added, i, rows) for i, rows in parts]
        extra = self._timesteps_PB[:, new_tensor(places[len(self.rows) :], self.device, torch.int64)]
        self._unet_timesteps = torch.cat([self._timesteps_PB, extra], dim=1)
        rows = [self.rows[i] for i in guided]
        self._weight = self._vector([row.guidance for row in rows])
        rescale = [row.guidance_rescale for row in rows]
        self._rescale = self._vector(rescale) if any(rescale) else None
        self._composed = self._gather_weights(rows, whose) if any(row.weights for row in rows) else None

    def _gather_weights(
        self, rows: Sequence[Row], whose: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of composed rows: whose the further evaluations are, among all rows and among the guided ones; the
        weights of these and of the guided rows' first conditions."""
        assert self._guided is not None
        at = [self._guided.index(i) for i in whose]
        return (
            new_tensor(whose, self.device, torch.int64),
            new_tensor(at, self.device, torch.int64),
            self._vector([weight for row in rows for weight in row.weights[1:]]),
            self._vector([row.weights[0] if row.weights else 1.0 for row in rows]),
        )

    def _gather_texts(self, texts: list[torch.Tensor]) -> None:
        """Stack texts by their length; each length is a U-Net call of its own."""
        lengths = sorted({len(text) for text in texts})
        self._texts = [torch.stack([text for text in texts if len(text) == length]) for length in lengths]
        if len(lengths) > 1:
            members = [[i for i, text in enumerate(texts) if len(text) == length] for length in lengths]
            self._member_rows = members
            self._members = [new_tensor(some, self.device) for some in members]
            self._places = torch.cat(self._members).argsort()

    def _vector(self, values: list[float]) -> torch.Tensor:
        return new_tensor(values, self.device, torch.float32)[:, None, None, None]

    def _guide(self, out: torch.Tensor) -> torch.Tensor:
        """Classifier-free guidance (Ho & Salimans 2022), with Lin et al. 2024's rescaling where asked for."""
        if not self._guided:
            return out
        count = len(self.rows)
        positive, negative, further = out.tensor_split([count, count + len(self._guided)])
        towards = positive if self._all_guided else positive[self._guided_index]
        if self._composed is None:
            mixed = torch.addcmul(negative, self._weight, towards - negative)
        else:
            _, whose, weights, firsts = self._composed
            away = ((towards - negative) * firsts).index_add_(0, whose, (further - negative[whose]) * weights)
            mixed, towards = torch.addcmul(negative, self._weight, away), negative + away
        if self._rescale is not None:
            ratio = towards.std((1, 2, 3), keepdim=True) / mixed.std((1, 2, 3), keepdim=True)
            mixed = torch.where(self._rescale > 0, mixed * (self._rescale * ratio + 1 - self._rescale), mixed)
        return mixed if self._all_guided else positive.index_copy(0, self._guided_index, mixed)

    def _noise(self, draws: list[bool]) -> torch.Tensor:
        """A fresh draw for the rows whose solver asks for one, each from its own generator."""
        shape = self._x.shape[1:]
        drawn = [
            _draw(shape, row.generator) if wanted else None
            for row, wanted in zip(self.rows, draws, strict=True)
        ]
        if any(one is not None and one.device.type != "cpu" for one in drawn):
            blank = torch.zeros(shape, device=self.device)
            return torch.stack([blank if one is None else one.to(self.device) for one in drawn])
        blank = torch.zeros(shape)
        noise = torch.stack([blank if one is None else one for one in drawn])
        return to_device(noise, self.device)  # one copy for all rows

    def unpack(self) -> None:
        """Give every row its latents, predicted x0 and history back."""
        earlier = [tensor.unbind() for tensor in self._earlier]
        for i, (row, x, x0) in enumerate(zip(self.rows, self._x.unbind(), self._x0.unbind(), strict=True)):
            row.latents_CHW, row.x0_CHW = x, x0 if self._at else row.x0_CHW
            row.earlier = tuple(tensor[i] for tensor in earlier[: 2 * row.table.earlier])


def _level(table: SolverTable, step: int) -> list[float]:
    """How much of picture and noise x is made of before a step; after the last, of the picture alone."""
    return table.levels_S2[step].tolist() if step < len(table) else [1.0, 0.0]


def _draw(shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
    device = generator.device if generator is not None else torch.device("cpu")
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)


def denoise(unet: Unet, rows: Sequence[Row]) -> Iterator[StepState]:
    """Take every row through its table, all unfinished rows in each U-Net call; yields after each step.

    `rows` is read anew before each step: a row appended to a list meanwhile joins, one removed from it
    leaves with its state intact, and a finished one is passed over. Rows hold their state whenever the set
    of rows changes and when the generator ends or is closed; in between, the yielded tensors are current.
    """
    batch: RunningBatch | None = None
    index = 0
    try:
        while active := tuple(row for row in rows if not row.done):
            if batch is None or batch.rows != active:
                if batch is not None:
                    batch.unpack()
                batch = RunningBatch(active)
            latents, x0 = batch.advance(unet)
            yield StepState(index, active, latents, x0)
            index += 1
    finally:
        if batch is not None:
            batch.unpack()


def advance(unet: Unet, rows: Sequence[Row]) -> None:
    """Take one step with every row and leave each its new latents; for a loop, `denoise` is cheaper."""
    batch = RunningBatch(rows)
    batch.advance(unet)
    batch.unpack()


def unet_call(unet: Any) -> Unet:
    """A diffusers U-Net as the denoising loop calls it, in the precision of its weights.

    Where rows have adapters, the bank that the U-Net is in applies them.
    """
    dtype = next(unet.parameters()).dtype

    def call(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """[B, C, h, w] to [B, C, h, w] in the model's precision, with adapters and added states."""
        added = dict(added)
        guidance = added.pop("timestep_cond", None)
        slots, weights = added.pop(SLOTS, None), added.pop(WEIGHTS, None)
        residuals = take_residuals(added)
        with nullcontext() if slots is None else rows_of(unet).applied(slots, weights):
            out: torch.Tensor = unet(
                x.to(dtype),
                t,
                encoder_hidden_states=text,
                timestep_cond=guidance,
                added_cond_kwargs=added or None,
                return_dict=False,
                **residuals,
            )[0]
        return out

    return call
