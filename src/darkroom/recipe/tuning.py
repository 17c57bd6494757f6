"""Sections of a recipe that fine-tuners know from other trainers: losses, timesteps, layers' own rates."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LossSettings(BaseModel):
    """How far an answer is from its target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["mse", "l1", "huber", "smooth-l1"] = Field(
        default="mse",
        description="huber and smooth-l1 are the smooth forms that kohya's trainers know: square below the "
        "threshold c, linear above. huber: 2c (sqrt(d^2 + c^2) - c); smooth-l1: 2 (sqrt(d^2 + c^2) - c)",
    )
    huber_c: float = Field(default=0.1, gt=0, le=10, description="the threshold c, where the schedule ends")
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        default="snr",
        description="c by timestep. constant; exponential: from huber_scale down to huber_c times it; snr: "
        "(1 - huber_c) / (1 + sigma)^2 + huber_c with sigma = noise / signal",
    )
    huber_scale: float = Field(
        default=1.0, gt=0, le=100, description="factor of c with schedules constant and exponential"
    )


class TimestepSettings(BaseModel):
    """Which timesteps are trained, and how often."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min: int = Field(default=0, ge=0, description="the first timestep that is trained")
    max: int | None = Field(
        default=None, gt=0, description="the first that is not trained any more; null: the schedule's length"
    )
    distribution: Literal["uniform", "logit-normal", "mode"] | None = Field(
        default=None,
        description="how they are drawn in that range. logit-normal: the logistic of a normal number; mode: "
        "heavy at both ends or in the middle (both Esser et al. 2024); null: uniform, and logit-normal for "
        "rectified flow",
    )
    mean: float | None = Field(
        default=None,
        ge=-10,
        le=10,
        description="of logit-normal's normal number; null: 0, for rectified flow objective.flow.mean",
    )
    std: float | None = Field(
        default=None, gt=0, le=10, description="its standard deviation; null: 1, or objective.flow.std"
    )
    mode_scale: float = Field(default=1.29, ge=-1, le=1.75, description="of mode: above 0 favours the middle")

    @model_validator(mode="after")
    def _possible(self) -> TimestepSettings:
        if self.max is not None and self.min >= self.max:
            raise ValueError(f"min {self.min} is not below max {self.max}")
        if (self.mean is not None or self.std is not None) and self.distribution != "logit-normal":
            raise ValueError("mean and std are given, which distribution logit-normal alone has")
        return self


class PreferenceSettings(BaseModel):
    """Diffusion-DPO, the task `dpo`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beta: float = Field(
        default=2500.0,
        gt=0,
        le=1e6,
        description="how closely the model keeps to its base (Wallace et al. 2023): larger is closer",
    )


class LayerRule(BaseModel):
    """A rate and a time of its own for some weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str = Field(
        min_length=1,
        description="names of weights with * and ?, such as 'unet.up_blocks.*', 'unet.*.attn2.*' or "
        "'text_encoder'; the first entry that matches a weight holds",
    )
    lr_scale: float = Field(
        default=1.0, ge=0, le=1000, description="their rate as a multiple of their part's; 0: they stay"
    )
    start_step: int = Field(default=0, ge=0, description="steps before they are trained")
    stop_step: int | None = Field(default=None, gt=0, description="step after which they stay; null: never")

    @model_validator(mode="after")
    def _possible(self) -> LayerRule:
        if self.stop_step is not None and self.stop_step <= self.start_step:
            raise ValueError(f"stop_step {self.stop_step} is not after start_step {self.start_step}")
        return self

    def holds_for(self, name: str) -> bool:
        """Whether a weight's name, `<part>.<path>`, is meant."""
        return fnmatchcase(name, self.match) or fnmatchcase(name, f"{self.match}.*")


class DataSet(BaseModel):
    """One folder of several."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = Field(description="its pictures, with .txt captions or metadata.jsonl")
    captions: str | None = Field(
        default=None, description="a JSON file of kohya's fine-tuning: {picture: {caption: ..., tags: ...}}"
    )
    repeats: int = Field(
        default=1, ge=1, le=10_000, description="how often each of its pictures comes against the others'"
    )
    prompt: str | None = Field(
        default=None, description="caption of its pictures without one; null: data.prompt"
    )
    loss_weight: float = Field(default=1.0, gt=0, le=100, description="weight of its pictures' loss")
    resolution: int | None = Field(
        default=None,
        ge=8,
        le=8192,
        multiple_of=8,
        description="side in pixels, at most data.resolution; null: that",
    )


class AugmentSettings(BaseModel):
    """How the colours of pictures vary, anew each time a picture comes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    brightness: float = Field(default=0.0, ge=0, le=1, description="factor between 1 - x and 1 + x")
    contrast: float = Field(default=0.0, ge=0, le=1, description="likewise")
    saturation: float = Field(default=0.0, ge=0, le=1, description="likewise")
    hue: float = Field(default=0.0, ge=0, le=0.5, description="largest shift, as a share of the whole circle")
    gamma: float = Field(default=0.0, ge=0, lt=1, description="power between 1 - x and 1 + x")
    share: float = Field(default=1.0, ge=0, le=1, description="share of pictures that are changed each time")

    @property
    def used(self) -> bool:
        """Whether anything varies."""
        return bool(
            self.share and (self.brightness or self.contrast or self.saturation or self.hue or self.gamma)
        )


class SamplePrompt(BaseModel):
    """One picture of a sample grid with settings of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(description="what is drawn")
    negative: str | None = Field(default=None, description="what is not to be in it")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="null: as if it stood alone")
    steps: int | None = Field(default=None, gt=0, le=1000, description="solver steps; null: sample.steps")
    guidance: float | None = Field(default=None, ge=0, le=100, description="null: sample.guidance")
    solver: str | None = Field(default=None, description="null: sample.solver")
