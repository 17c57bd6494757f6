"""What is looked at while training goes on: held-out loss by timestep, and sample grids."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SampleSettings(BaseModel):
    """Pictures drawn from fixed prompts and seeds while training, with the averaged weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        default=0, ge=0, description="steps between sample grids; 0: only at the end if prompts are given"
    )
    prompts: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="one picture each; empty: the captions of the first held-out pictures",
    )
    num: int = Field(
        default=8, ge=0, le=256, description="how many held-out captions, where prompts is empty"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="picture i has seed + i")
    steps: int = Field(default=30, gt=0, le=1000, description="solver steps")
    guidance: float = Field(default=7.5, ge=0, le=100, description="guidance scale; 1 is none")
    solver: str | None = Field(default=None, description="a solver's name; null: the model's own")


class EvaluateSettings(BaseModel):
    """The loss on held-out pictures at fixed timesteps with fixed noise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        default=0, ge=0, description="steps between evaluations; 0: only at the end, if rows are held out"
    )
    rows: int = Field(default=256, gt=0, description="at most so many of the held-out pictures")
    timesteps: int = Field(
        default=8, gt=0, le=100, description="how many timesteps, spread evenly over the schedule"
    )
