"""What the U-Net is asked to predict: noise schedules, targets and loss weights, all pure functions.

Shapes: B rows of a batch, C channels, H and W latent pixels, T timesteps of the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

Prediction = Literal["epsilon", "v", "sample"]

# The same thing in darkroom's recipes and in diffusers' scheduler_config.json.
_SCHEDULES = {"scaled-linear": "scaled_linear", "linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "sample": "sample"}


class NoiseSettings(BaseModel):
    """How noise grows with the timestep. What is left out is what the model's scheduler says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schedule: Literal["scaled-linear", "linear", "cosine"] | None = Field(
        default=None, description="shape of the betas over the timesteps; null: the model's own"
    )
    beta_start: float | None = Field(default=None, gt=0, lt=1, description="beta of the first timestep")
    beta_end: float | None = Field(default=None, gt=0, lt=1, description="beta of the last timestep")
    num_timesteps: int | None = Field(default=None, gt=1, le=100_000, description="length of the schedule")
    zero_terminal_snr: bool | None = Field(
        default=None,
        description="rescale the betas so that the last timestep is pure noise (Lin et al. 2023)",
    )
    offset: float = Field(
        default=0.0, ge=0, le=1, description="offset noise: strength of a shift common to a channel's pixels"
    )


class AutoencoderLossSettings(BaseModel):
    """The loss of the task `autoencoder`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reconstruction: Literal["l1", "mse"] = Field(default="l1", description="distance of pixels in [-1, 1]")
    kl_weight: float = Field(
        default=1e-6, ge=0, description="weight of the KL divergence, summed over a latent"
    )
    edge_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the L1 distance between the pictures' horizontal and vertical "
        "differences; sharpens outlines",
    )


class ObjectiveSettings(BaseModel):
    """What is predicted, from how much noise, and how timesteps are weighed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prediction: Prediction | None = Field(
        default=None, description="what the U-Net predicts; null: what the model's scheduler says"
    )
    min_snr_gamma: float | None = Field(
        default=None,
        gt=0,
        description="min-SNR-gamma loss weights (Hang et al. 2023 use 5); null: equal weights",
    )
    noise: NoiseSettings = Field(default=NoiseSettings(), description="the noise schedule")
    autoencoder: AutoencoderLossSettings = Field(
        default=AutoencoderLossSettings(), description="loss of the task autoencoder"
    )

    @model_validator(mode="after")
    def _possible(self) -> ObjectiveSettings:
        if self.prediction == "epsilon" and self.noise.zero_terminal_snr:
            raise ValueError(
                "prediction epsilon with noise.zero_terminal_snr: at the last timestep the input is pure noise and "
                "epsilon teaches nothing; use prediction v or sample"
            )
        return self
