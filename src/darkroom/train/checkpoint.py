"""Checkpoints that are whole or not there: written beside, flushed, hashed, renamed."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CheckpointSettings(BaseModel):
    """When the state of a run is saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        default=500, gt=0, description="steps between checkpoints (the last step is always saved)"
    )
    keep: int = Field(
        default=2, ge=1, description="how many to keep; the newest is proven before an older one goes"
    )
