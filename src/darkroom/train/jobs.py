"""A job that can be trained: a checked recipe with everything that training it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from darkroom.recipe.sections import SamplePrompt
from darkroom.train.contents import Contents
from darkroom.train.data.feed import Feed
from darkroom.train.distributed.ranks import ALONE, Ranks
from darkroom.train.scores import Scores
from darkroom.train.step import Step
from darkroom.train.tasks.diffusion import Task

if TYPE_CHECKING:
    from darkroom.recipe.sections import Recipe


Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainingSetup:
    """A checked recipe with everything that training it needs."""

    recipe: Recipe
    task: Task
    step: Step
    feed: Feed
    device: torch.device
    rows: int  # pictures trained on
    environment: Mapping[str, Any]  # what bit-exactness depends on
    store: Mapping[str, Any]  # version, rows, contents and what is chosen, which the run pins
    base: Mapping[str, str]  # fingerprints of what is read of a base model, likewise
    heldout: dict[str, Tensor] | None
    scores: Scores | None
    calibration: list[dict[str, Tensor]]
    prompts: tuple[str | SamplePrompt, ...]
    notes: list[str]  # what was derived, and why
    ranks: Ranks = ALONE  # the processes that train together
    rows_of: Callable[[int], Sequence[int]] | None = None  # the store's rows that form global batch k
    flops: int | None = None  # of a picture's forward and backward pass, where counted beforehand

    @property
    def num_devices(self) -> int:
        """Devices that train together, a machine's whole CPU counting as one."""
        return devices_of(self.ranks, self.device)


def devices_of(ranks: Ranks, device: torch.device) -> int:
    """Devices of processes that train together, a machine's whole CPU counting as one."""
    return max(1, ranks.size if device.type != "cpu" else ranks.size // ranks.local_size)


@dataclass(frozen=True)
class Pinned:
    """What a run that goes on has settled before."""

    run: Path
    version: int | Sequence[int] | None = None  # of each store, where there are several
    rows: int | None = None
    micro_batch: int | None = None
    channels_last: bool | None = None  # where it was measured
    contents: Contents | None = None
    base: Mapping[str, str] | None = None
    chosen: str | None = None
