"""AdamW, its learning rate over the steps, and clipping by the global norm."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OptimSettings(BaseModel):
    """The optimiser and its learning rate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["adamw"] = Field(default="adamw", description="AdamW (Loshchilov & Hutter 2019), fused")
    lr: float = Field(default=1e-4, gt=0, le=10, description="peak learning rate")
    text_encoder_lr: float | None = Field(
        default=None, gt=0, le=10, description="peak rate of the text encoder where it is trained; null: lr"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate rises from 0 to lr")
    decay: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="the rate after warm-up, until train.steps"
    )
    final_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="the last step's rate as a share of lr (cosine and linear)"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of the gradients")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean of their squares")
    eps: float = Field(default=1e-8, gt=0, description="keeps the division finite")
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        description="decoupled weight decay of matrices and kernels (not biases and norms)",
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest norm of all gradients together; null: no clipping"
    )
