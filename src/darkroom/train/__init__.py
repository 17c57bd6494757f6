"""Training: the objective, one optimiser step, averaged weights, checkpoints, and the loop around them."""

from __future__ import annotations

from darkroom.train.checkpoint import CheckpointSettings
from darkroom.train.ema import EmaSettings
from darkroom.train.objective import AutoencoderLossSettings, NoiseSettings, ObjectiveSettings
from darkroom.train.optimisers import OptimSettings
from darkroom.train.step import TrainSettings
from darkroom.train.tracking import TrackSettings
from darkroom.train.watch import EvaluateSettings, SampleSettings

__all__ = [
    "AutoencoderLossSettings",
    "CheckpointSettings",
    "EmaSettings",
    "EvaluateSettings",
    "NoiseSettings",
    "ObjectiveSettings",
    "OptimSettings",
    "SampleSettings",
    "TrackSettings",
    "TrainSettings",
]
