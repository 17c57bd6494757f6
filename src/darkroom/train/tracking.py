"""Trackers behind three methods; `metrics.jsonl` is written in any case."""

from __future__ import annotations

import importlib.util
import netrc
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlparse

import yaml

from darkroom.errors import DarkroomError, MissingExtra, RecipeError
from darkroom.hardware.system import write_atomically
from darkroom.recipe.sections import TrackSettings

if TYPE_CHECKING:
    from darkroom.recipe.sections import CheckpointSettings, EvaluateSettings


WANDB_ID = "wandb-id"  # a file of the run: its later sessions are the same run there


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
        """A row of metrics as scalars."""
        for name, value in _numbers(row):
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """A grid of samples."""
        import numpy as np
        from PIL import Image

        pixels_HW3 = np.asarray(Image.open(path).convert("RGB"))
        self._writer.add_image(name, pixels_HW3, step, dataformats="HWC")

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run on Weights & Biases, of the same name and settings; all sessions of a run are one there.

    A resumed run writes the steps it makes again a second time: they are drawn over their step, not over
    the number of the call.
    """

    def __init__(self, project: str, run: Path) -> None:
        import wandb

        recipe = run / "recipe.yaml"
        try:
            self._run = wandb.init(
                project=project,
                dir=run,
                name=run.resolve().name,
                id=_wandb_id(run),
                resume="allow",
                config=yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else None,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            message = " ".join(str(error).split())
            raise DarkroomError(
                f"track.wandb: no run could be opened: {message}; WANDB_MODE=offline needs no network"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """A row of metrics."""
        self._run.log({"step": step, **dict(_numbers(row))})

    def picture(self, step: int, name: str, path: Path) -> None:
        """A grid of samples."""
        import wandb

        self._run.log({"step": step, name: wandb.Image(str(path))})

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


class Several:
    """Shows everything in each of several places."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """To each of them."""
        for tracker in self._trackers:
            tracker.log(step, row)

    def picture(self, step: int, name: str, path: Path) -> None:
        """To each of them."""
        for tracker in self._trackers:
            tracker.picture(step, name, path)

    def close(self) -> None:
        """Each of them."""
        for tracker in self._trackers:
            tracker.close()


def _numbers(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row by name, those of an inner mapping as `name/key`; its step apart."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, (int, float)) and name != "step":
            yield f"{above}{name}", value


def _wandb_id(run: Path) -> str:
    """The run's id there, made once."""
    file = run / WANDB_ID
    if not file.is_file():
        write_atomically(file, uuid.uuid4().hex[:16] + "\n")
    return file.read_text(encoding="utf-8").strip()


def make_tracker(settings: TrackSettings, run: Path, first_step: int) -> Tracker:
    """The trackers a recipe asks for, as one; `check_tracker` first says whether they can be had."""
    made: list[Tracker] = []
    if settings.tensorboard:
        made.append(TensorBoard(run / "tensorboard", first_step))
    if settings.wandb is not None:
        made.append(WeightsAndBiases(settings.wandb, run))
    if not made:
        return NoTracker()
    return made[0] if len(made) == 1 else Several(made)


def check_tracker(settings: TrackSettings) -> None:
    """MissingExtra where a tracker that is asked for is not installed; RecipeError where W&B knows no key."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtra("tensorboard", "track")
    if settings.wandb is None:
        return
    if importlib.util.find_spec("wandb") is None:
        raise MissingExtra("wandb", "track")
    if os.environ.get("WANDB_MODE", "online") == "online" and not _knows_key():
        raise RecipeError(
            "track.wandb",
            f"'{settings.wandb}', but there is no API key",
            mend="run `wandb login`, set WANDB_API_KEY, or stay offline with WANDB_MODE=offline",
        )


def _knows_key() -> bool:
    """Whether a key is in the environment or in the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# ---- what a recipe asks of this machine: found before any work, and as a rule without torch


def check_reach(track: TrackSettings, evaluate: EvaluateSettings, checkpoint: CheckpointSettings) -> None:
    """Raise RecipeError or MissingExtra for a tracker, score or address that cannot be had from here."""
    check_tracker(track)
    if evaluate.every_images:
        from darkroom.train.scores import check_scores

        check_scores(evaluate)
    if checkpoint.url is not None:
        from darkroom.train.checkpoint_storage import check_url

        check_url(checkpoint.url)
