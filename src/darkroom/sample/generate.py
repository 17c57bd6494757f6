"""Prompts to pictures: `generate`, and the pieces it is made of."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import darkroom
from darkroom.errors import InputError
from darkroom.sample.backends import Backend, open_backend
from darkroom.sample.choice import MAX_STEPS, default_solver, make_table
from darkroom.sample.denoise import Condition, Row, denoise
from darkroom.sample.pictures import Picture
from darkroom.sample.prompts import check_text_parts, encode_prompts, guidance_embedding, silent
from darkroom.sample.table import Table

if TYPE_CHECKING:
    from darkroom.models import Model

LOG = logging.getLogger("darkroom")

DEFAULT_STEPS, DEFAULT_GUIDANCE = 30, 7.5
# A consistency model is distilled to few steps and has its guidance built in.
LCM_STEPS, LCM_GUIDANCE = 4, 1.0
MAX_SIDE = 8192
MAX_SEED = 2**63 - 1
# As many pictures a U-Net call as have this many latent pixels together: 8 of 512 px with a factor of 8.
CALL_LATENT_PIXELS, CALL_PICTURES = 8 * 64 * 64, 64


class GenerateSettings(BaseModel):
    """How pictures are made, whatever the prompt. None leaves a choice to the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    negative: str | None = Field(
        None, description="what to steer away from; None: nothing (SD encodes '', SDXL takes zeros)"
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="picture i of a call has seed + i")
    num: int = Field(1, ge=1, le=10_000, description="pictures for each prompt")
    size: tuple[int, int] | None = Field(
        None, description="width and height in pixels; None: what the U-Net was made for"
    )
    steps: int | None = Field(None, ge=1, le=MAX_STEPS, description="None: 30, with lcm 4")
    guidance: float | None = Field(
        None, ge=0, le=1000, allow_inf_nan=False, description="above 1 is on; None: 7.5, with lcm 1"
    )
    solver: str | None = Field(None, description="None: the scheduler in the model's folder")
    guidance_rescale: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the guided output that is brought back to the contrast unguided",
    )
    eta: float = Field(0.0, ge=0, le=1, description="noise of ddim: 0 none, 1 as much as DDPM")
    karras: bool | None = Field(None, description="Karras sigmas; None: as the scheduler says")
    spacing: str | None = Field(
        None, description="timesteps leading, trailing or linspace; None: as the scheduler says"
    )

    @classmethod
    def of(cls, **given: Any) -> GenerateSettings:
        """The settings, with a user's mistake told as an InputError in one line."""
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            allowed = first["msg"].removeprefix("Input should be ")
            raise InputError(f"{name}: {first.get('input')!r}", allowed=allowed) from error

    def resolved(self, solver: str) -> GenerateSettings:
        """With the defaults of a solver in place of None."""
        is_lcm = solver == "lcm"
        return self.model_copy(
            update={
                "solver": solver,
                "steps": self.steps or (LCM_STEPS if is_lcm else DEFAULT_STEPS),
                "guidance": (LCM_GUIDANCE if is_lcm else DEFAULT_GUIDANCE)
                if self.guidance is None
                else self.guidance,
            }
        )


def generate(
    model: Model,
    prompts: Sequence[str] | str,
    *,
    negative: str | None = None,
    seed: int = 0,
    num: int = 1,
    size: tuple[int, int] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    solver: str | None = None,
    guidance_rescale: float = 0.0,
    eta: float = 0.0,
    karras: bool | None = None,
    spacing: str | None = None,
    batch_rows: int | None = None,
    backend: str | Backend = "torch",
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] = LOG.warning,
) -> list[Picture]:
    """Make `num` pictures of each prompt, in the order of the prompts; picture i of the call has seed + i.

    The settings are those of `GenerateSettings`. `batch_rows` bounds the pictures of one U-Net call (guidance
    doubles the rows in it); the pictures do not depend on it. `backend` computes: `torch`, `compile`, `onnx`,
    `openvino`, or one opened before (`open_backend`). `progress(done, total)` counts steps. What was
    substituted or cut goes to `notice` and into each picture's parameters. InputError for what cannot be.
    """
    settings = GenerateSettings.of(
        negative=negative,
        seed=seed,
        num=num,
        size=size,
        steps=steps,
        guidance=guidance,
        solver=solver,
        guidance_rescale=guidance_rescale,
        eta=eta,
        karras=karras,
        spacing=spacing,
    )
    job = Job(model, [prompts] if isinstance(prompts, str) else list(prompts), settings, backend, notice)
    for note in job.notes:
        notice(note)
    pictures: list[Picture] = []
    for start, count in _chunks(job.num_pictures, job.rows_a_call if batch_rows is None else batch_rows):
        rows = [job.row(i) for i in range(start, start + count)]
        for state in denoise(job.backend.unet, rows):
            if progress is not None:
                progress(
                    start * len(job.table) + (state.index + 1) * count, job.num_pictures * len(job.table)
                )
        pictures += job.finish(start, rows)
    return pictures


def _chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    if size < 1:
        raise InputError(f"batch_rows {size}", allowed="1 or more")
    for start in range(0, total, size):
        yield start, min(size, total - start)


class Job:
    """One call of `generate`, checked and ready: table, encoded prompts, and a row for each picture."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[str],
        settings: GenerateSettings,
        backend: str | Backend = "torch",
        notice: Callable[[str], None] = LOG.warning,
    ) -> None:
        _check_parts(model)
        self.model, self.prompts = model, prompts
        self.table = table_for(model, settings)
        self.settings = settings.resolved(self.table.solver)
        self.size = checked_size(model, settings.size)
        self.num_pictures = len(prompts) * settings.num
        if not prompts:
            raise InputError("no prompt", mend="give at least one")
        if settings.seed + self.num_pictures - 1 > MAX_SEED:
            raise InputError(f"seed {settings.seed}", allowed=f"at most {MAX_SEED} for the last picture")
        if isinstance(backend, str):
            backend = open_backend(backend, model, notice=notice)
        self.backend, self.device, self.dtype = backend, backend.device, backend.dtype
        self.positives, self.negative, cut = self._conditions()
        self.notes = [*self.table.notes, *backend.notes, *cut]

    @property
    def rows_a_call(self) -> int:
        """Pictures for one U-Net call: eight of 512 px, more of smaller ones."""
        width, height = self.size
        pixels = width * height // self.model.vae_factor**2
        return max(1, min(CALL_PICTURES, CALL_LATENT_PIXELS // pixels))

    def _conditions(self) -> tuple[list[Condition], Condition | None, list[str]]:
        told = [*self.prompts]
        width = getattr(self.model.unet.config, "time_cond_proj_dim", None)  # type: ignore[union-attr]
        guided = self.guidance > 1 and width is None
        encodes_negative = guided and (self.settings.negative is not None or not self.model.is_sdxl)
        if encodes_negative:
            told.append(self.settings.negative or "")
        encoded, cut = encode_prompts(self.model, told, self.size)
        positives = [self._moved(condition) for condition in encoded[: len(self.prompts)]]
        if width is not None:
            told_guidance = guidance_embedding(self.guidance, width).to(self.device, self.dtype)
            for condition in positives:
                condition.added["timestep_cond"] = told_guidance
        negative = None
        if guided:
            negative = self._moved(encoded[-1]) if encodes_negative else silent(positives[0])
        return positives, negative, cut

    def _moved(self, condition: Condition) -> Condition:
        added = {
            name: value.to(self.device, torch.float32 if name == "time_ids" else self.dtype)
            for name, value in condition.added.items()
        }
        return Condition(condition.text_LD.to(self.device, self.dtype), added)

    @property
    def guidance(self) -> float:
        """The guidance scale, the default resolved."""
        assert self.settings.guidance is not None
        return self.settings.guidance

    def row(self, i: int) -> Row:
        """Picture i at its first step: noise from its own seed, drawn on the CPU as diffusers does."""
        width, height = self.size
        factor = self.model.vae_factor
        generator = torch.Generator("cpu").manual_seed(self.settings.seed + i)
        shape = (self.model.latent_channels, height // factor, width // factor)
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        return Row(
            self.table,
            (noise * self.table.initial_scale).to(self.device),
            self.positives[i // self.settings.num],
            self.negative,
            guidance=self.guidance,
            guidance_rescale=self.settings.guidance_rescale,
            generator=generator,
        )

    def finish(self, start: int, rows: Sequence[Row]) -> list[Picture]:
        """Decode finished rows, the first of which is picture `start`."""
        latents_BCHW = torch.stack([row.latents_CHW for row in rows])
        images = self.backend.decode(latents_BCHW)
        latents_BCHW = latents_BCHW.cpu()
        return [Picture(image, self.parameters(start + i), latents_BCHW[i]) for i, image in enumerate(images)]

    def parameters(self, i: int) -> dict[str, Any]:
        """What picture i is made with, as plain values."""
        width, height = self.size
        settings, model = self.settings, self.model
        return {
            "prompt": self.prompts[i // settings.num],
            "negative": settings.negative or "",
            "seed": settings.seed + i,
            "width": width,
            "height": height,
            "steps": settings.steps,
            "guidance": self.guidance,
            "guidance_rescale": settings.guidance_rescale,
            "solver": self.table.solver,
            "eta": settings.eta,
            "karras": self.table.karras,
            "spacing": self.table.spacing,
            "model": model.path.rstrip("/").rsplit("/", 1)[-1] if model.path else model.family,
            "precision": self.backend.precision,
            "backend": self.backend.name,
            "notes": self.notes,
            "version": darkroom.__version__,
        }


def table_for(model: Model, settings: GenerateSettings) -> Table:
    """The table that settings ask of a model's scheduler."""
    steps = settings.steps
    if steps is None:
        steps = settings.resolved(settings.solver or default_solver(model.scheduler)[0]).steps
    assert steps is not None
    return make_table(
        settings.solver,
        model.scheduler,
        steps,
        eta=settings.eta,
        spacing=settings.spacing,
        karras=settings.karras,
    )


def checked_size(model: Model, size: tuple[int, int] | None) -> tuple[int, int]:
    """Width and height in pixels; the U-Net's own where None. InputError unless the model can make it."""
    if size is None:
        return model.sample_size, model.sample_size
    unit = model.vae_factor * 2 ** (len(model.unet.config.block_out_channels) - 1)  # type: ignore[union-attr]
    for side in size:
        if side % unit or not unit <= side <= MAX_SIDE:
            raise InputError(
                f"size {size[0]}x{size[1]}",
                allowed=f"sides of {unit} to {MAX_SIDE} pixels, multiples of {unit}",
                mend="nearest: " + "x".join(str(_nearest(one, unit)) for one in size),
            )
    return size


def _nearest(side: int, unit: int) -> int:
    return min(max(unit, math.floor(side / unit + 0.5) * unit), MAX_SIDE // unit * unit)


def _check_parts(model: Model) -> None:
    missing = [name for name in ("unet", "vae") if getattr(model, name) is None]
    if missing:
        raise InputError(f"the model has no {' and no '.join(missing)}", mend="load it with all its parts")
    check_text_parts(model)
    assert model.unet is not None
    takes = int(model.unet.config.in_channels)
    if takes != model.latent_channels:
        raise InputError(
            f"the U-Net takes {takes} channels and the latents have {model.latent_channels}",
            mend="inpainting and picture-to-picture U-Nets are not known",
        )
