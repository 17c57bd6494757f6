"""Encoding by other machines while training runs: its settings, and what a feed from outside is handed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from darkroom.data.order import SampleOrder
    from darkroom.data.store import Store
    from darkroom.recipe.sections import DataSettings, TrainSettings
    from darkroom.train.data.feed import Feed
    from darkroom.train.distributed.ranks import Ranks
    from darkroom.train.tasks.diffusion import Task


@runtime_checkable
class OpenFeed(Protocol):
    """A feed that is still to learn what it feeds: the order is the job's, never the feed's."""

    def bound(
        self,
        train: TrainSettings,
        data: DataSettings,
        task: Task,
        stores: Sequence[Store],
        order: SampleOrder,
        device: torch.device,
        ranks: Ranks,
    ) -> Feed:
        """The stream of this rank's batches of a job; arguments as `make_feed` takes them."""
        ...
