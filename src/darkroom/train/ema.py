"""Exponential moving average of the weights, kept in float32."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EmaSettings(BaseModel):
    """The averaged weights, which are sampled from and exported."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(default=True, description="keep averaged weights")
    decay: float = Field(default=0.999, ge=0, lt=1, description="share of the average that a step keeps")
    start_step: int = Field(
        default=0, ge=0, description="the first step that is averaged; until then the average is the weights"
    )
    warmup: bool = Field(
        default=True,
        description="keep at most (1 + n) / (10 + n) after n averaged steps, so that early weights go",
    )
