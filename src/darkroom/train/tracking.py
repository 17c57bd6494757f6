"""Trackers behind three methods; `metrics.jsonl` is written in any case."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TrackSettings(BaseModel):
    """Where metrics go besides metrics.jsonl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensorboard: bool = Field(
        default=False, description="write TensorBoard events into the run (extra: track)"
    )
