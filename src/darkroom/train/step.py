"""One optimiser step: micro-batches forward and backward, clipping, AdamW. `measure` times it bare."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from darkroom.train.ema import EmaSettings

Precision = Literal["float32", "bf16", "fp16"]


class TrainSettings(BaseModel):
    """Length, batch and numbers of a training run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=1000, gt=0, description="optimiser steps")
    global_batch: int = Field(default=64, gt=0, le=1_000_000, description="pictures in an optimiser step")
    micro_batch: int | Literal["auto"] = Field(
        default="auto",
        description="pictures in one forward pass; divides global_batch; auto: the most that fit",
    )
    precision: Precision | Literal["auto"] = Field(
        default="auto",
        description="number format of computation (master weights are float32); auto: bf16 where it is fast",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of order, noise, timesteps, crops and dropout")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    gradient_checkpointing: bool = Field(
        default=False,
        description="compute activations again in the backward pass: less memory, a third more time",
    )
    channels_last: bool | Literal["auto"] = Field(
        default="auto", description="memory layout of convolutions; auto: as is faster on the device"
    )
    log_every: int = Field(default=10, gt=0, description="steps between console lines and writes of metrics")
    ema: EmaSettings = Field(default=EmaSettings(), description="averaged weights")
