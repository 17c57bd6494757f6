"""`GenerateSettings`: how pictures are made, and `PictureSettings`: which ones are planned. Every default,
range and meaning stands here once.

The command line's options are generated from it, so nothing heavy is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from darkroom.errors import InputError, allowed_of
from darkroom.options import FLOW_SOLVER_NAMES, LCM_SOLVERS, MAX_SIDE, SOLVER_NAMES, Sigmas, parse_solver

MAX_STEPS = 1000
SOLVERS_TEXT = (
    f"{', '.join((*SOLVER_NAMES, *FLOW_SOLVER_NAMES))}, or A1111's name such as 'DPM++ 2M Karras'; "
    "None: the scheduler in the model's folder"
)
DEFAULT_STEPS, DEFAULT_GUIDANCE = 30, 7.5
PLAIN_UPSCALERS = ("latent", "lanczos")
# A consistency model is distilled to few steps and has its guidance built in.
LCM_STEPS, LCM_GUIDANCE = 4, 1.0
DEFAULT_STRENGTH, HIRES_STRENGTH = 0.75, 0.7
MAX_SEED = 2**63 - 1


def steps_of_share(taken: int, strength: float) -> int:
    """The fewest steps of which a share takes so many."""
    steps = max(1, math.floor(min(min(taken, MAX_STEPS) / strength, MAX_STEPS)))
    while steps < MAX_STEPS and int(steps * strength) < taken:
        steps += 1
    return steps


class Hires(BaseModel):
    """A second pass at a larger size, from the first pass's picture."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    scale: float = Field(ge=1, le=8, description="how much larger each side becomes")
    strength: float = Field(
        HIRES_STRENGTH, gt=0, le=1, description="share of the steps taken at the large size"
    )
    steps: int | None = Field(
        None, ge=1, le=MAX_STEPS, description="of which it is a share; None: as the first"
    )
    upscaler: str = Field(
        "latent",
        max_length=200,
        description="latent: bilinear, between the latents; lanczos, or a network's name: decoded, enlarged, "
        "encoded",
    )

    @classmethod
    def parsed(cls, text: str, upscaler: str = "latent") -> Hires:
        """From the command line: SCALE[:STRENGTH[:STEPS]]."""
        parts = text.split(":")
        names = ("scale", "strength", "steps")
        if len(parts) > len(names) or not all(parts):
            raise InputError(f"hires '{text}'", allowed="SCALE[:STRENGTH[:STEPS]], such as 1.5:0.6:20")
        return checked(cls, {**dict(zip(names, parts, strict=False)), "upscaler": upscaler}, "hires ")


class GenerateSettings(BaseModel):
    """How pictures are made, whatever the prompt. None leaves a choice to the model."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    negative: str | None = Field(
        None, description="what to steer away from; None: nothing (SD encodes '', SDXL takes zeros)"
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="picture i of a call has seed + i")
    num: int = Field(1, ge=1, le=10_000, description="pictures for each prompt")
    variation_seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="of the noise that variations go towards; picture i has this + i, and all have one seed",
    )
    variation_strength: float = Field(
        0.0, ge=0, le=1, description="how far it goes: 0 not at all, 1 is the other seed's picture"
    )
    seed_size: tuple[int, int] | None = Field(
        None, description="width and height of the picture whose noise is kept in the middle of this one's"
    )
    size: tuple[int, int] | None = Field(
        None,
        description="width and height in pixels; None: what the U-Net was made for, in a picture's shape",
    )
    steps: int | None = Field(None, ge=1, le=MAX_STEPS, description="of the solver; None: 30, with lcm 4")
    guidance: float | None = Field(
        None,
        ge=0,
        le=1000,
        allow_inf_nan=False,
        description="above 1 is on; None: the model's own, else 7.5, with lcm 1",
    )
    solver: str | None = Field(None, description=SOLVERS_TEXT)
    guidance_rescale: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the guided output that is brought back to the contrast unguided",
    )
    eta: float = Field(0.0, ge=0, le=1, description="noise of ddim: 0 none, 1 as much as DDPM")
    karras: bool | None = Field(None, description="Karras sigmas; None: as the scheduler says")
    exponential: bool | None = Field(None, description="exponential sigmas; None: as the scheduler says")
    sigmas: Sigmas | None = Field(None, description="how sigmas are spaced; None: as the scheduler says")
    spacing: str | None = Field(
        None, description="timesteps leading, trailing or linspace; None: as the scheduler says"
    )

    weighting: Literal["none", "a1111", "compel"] = Field(
        "none", description="syntax of weights in the prompts; none: brackets mean what they say"
    )
    clip_skip: int = Field(
        0,
        ge=0,
        le=100,
        description="last layers of the text encoder left out; A1111's 'Clip skip: 2' is 1",
    )
    strength: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the steps taken from a given picture; None: 0.75, with a mask 1",
    )
    paste: bool = Field(True, description="put the given picture back outside the mask when done")
    only_masked: int | None = Field(
        None,
        ge=0,
        le=MAX_SIDE,
        description="draw only the masked part and so many pixels around it, at `size`",
    )
    masked_content: Literal["original", "fill", "noise", "nothing"] | None = Field(
        None,
        description="what the masked part starts from, as A1111 has it: the picture, the colours around the "
        "mask, noise or nothing; None: original",
    )
    hires: Hires | None = Field(None, description="a second pass at a larger size")

    def seed_of(self, i: int) -> int:
        """Of picture i of a call: variations are all of one seed."""
        return self.seed if self.variation_strength else self.seed + i

    @classmethod
    def of(cls, **given: Any) -> GenerateSettings:
        """The settings, with a user's mistake raised as an InputError in one line.

        A solver may have A1111's name; its 'Karras' is then `karras`.
        """
        return checked(cls, {**given, **_solver(given)})

    def resolved(self, solver: str, own: float | None = None) -> GenerateSettings:
        """With the defaults of a solver in place of None, and with the model's `own` guidance scale."""
        is_lcm = solver in LCM_SOLVERS
        usual = LCM_GUIDANCE if is_lcm else DEFAULT_GUIDANCE if own is None else own
        return self.model_copy(
            update={
                "solver": solver,
                "steps": self.steps or (LCM_STEPS if is_lcm else DEFAULT_STEPS),
                "guidance": usual if self.guidance is None else self.guidance,
            }
        )


def _solver(given: Mapping[str, Any]) -> dict[str, Any]:
    """A solver's own name, and the spacing of sigmas that A1111's name says."""
    if not isinstance(name := given.get("solver"), str):
        return {}
    solver, sigmas = parse_solver(name)
    if sigmas is None:
        return {"solver": solver}
    if sigmas == "karras":
        if given.get("karras") is False:
            raise InputError(f"solver '{name}' without Karras sigmas", mend=f"say {solver}")
        return {"solver": solver, "karras": True}
    if given.get("sigmas") not in (None, sigmas):
        raise InputError(f"solver '{name}' with {given['sigmas']} sigmas", mend=f"say {solver}")
    return {"solver": solver, "sigmas": sigmas}


Settings = TypeVar("Settings", bound=BaseModel)


def checked(cls: type[Settings], given: dict[str, Any], prefix: str = "") -> Settings:
    """Settings of a class, with a user's mistake raised as an InputError in one line."""
    try:
        return cls(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{prefix}{name}: {first.get('input')!r}", allowed=allowed_of(first)) from error


class PictureSettings(BaseModel):
    """Pictures that are planned, and how they are made."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    model: str = Field("sd15", description="jobs: a family or a model folder")
    size: str = Field("512x512", description="generate, serve: the pictures' size")
    steps: int = Field(DEFAULT_STEPS, ge=1, description="generate, serve: denoising steps")
    guidance: float | None = Field(
        None, ge=0, description="generate, serve: above 1 doubles the work; None: the model's own or 7.5"
    )
    batch: int = Field(1, ge=1, description="generate: pictures at once")
    attention: str = Field("fused", description="generate, serve: fused or plain")
    channels_last: bool | None = Field(
        None, description="generate, serve: memory layout; None: in half precisions that are compiled"
    )
    pictures: int = Field(1000, ge=1, description="generate, prepare: how many")
