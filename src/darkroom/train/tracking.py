"""Trackers behind three methods; `metrics.jsonl` is written in any case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import MissingExtra


class TrackSettings(BaseModel):
    """Where metrics go besides metrics.jsonl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensorboard: bool = Field(
        default=False, description="write TensorBoard events into the run (extra: track)"
    )


class Tracker(Protocol):
    """Where a run's metrics and pictures are shown."""

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """The numbers of one step."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """A picture that was saved at a step."""

    def close(self) -> None:
        """Write what is left."""


class NoTracker:
    """Shows nothing."""

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class TensorBoard:
    """TensorBoard events in a folder. A resumed run shows its later steps in place of those dropped."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, Mapping):
                self.log(step, {f"{name}/{key}": inner for key, inner in value.items()})
            elif isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, path: Path) -> None:
        import numpy as np
        from PIL import Image

        pixels_HW3 = np.asarray(Image.open(path).convert("RGB"))
        self._writer.add_image(name, pixels_HW3, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


def make_tracker(settings: TrackSettings, run: Path, first_step: int) -> Tracker:
    """The tracker a recipe asks for; `check_tracker` first says whether it can be had."""
    return TensorBoard(run / "tensorboard", first_step) if settings.tensorboard else NoTracker()


def check_tracker(settings: TrackSettings) -> None:
    """MissingExtra where TensorBoard is asked for and not installed."""
    import importlib.util

    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtra("tensorboard", "track")
