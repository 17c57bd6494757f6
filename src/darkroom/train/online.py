"""Encoding by other machines while training runs: its settings, and what a feed from outside is handed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import RecipeError

if TYPE_CHECKING:
    from darkroom.data import Store
    from darkroom.data.order import SampleOrder
    from darkroom.recipe import Recipe
    from darkroom.train.feed import Feed
    from darkroom.train.ranks import Ranks
    from darkroom.train.tasks import Task


class OnlineSettings(BaseModel):
    """Who reads, cuts and encodes where data.encode is online."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    encoders: int | str = Field(default=1, description="how many encoders: N, or MIN:MAX")
    accelerator: str | None = Field(
        default=None, description="accelerator type that encoders run on, as Ray names it"
    )
    fraction: float = Field(
        default=1.0, gt=0, le=64, description="each one's share of a GPU, or of CPU cores where there is none"
    )
    cpu_workers: int = Field(default=2, ge=1, le=100_000, description="tasks that read and cut at once")
    timeout_s: float = Field(default=600.0, gt=0, description="longest wait for a batch, in seconds")


@runtime_checkable
class OpenFeed(Protocol):
    """A feed that is still to learn what it feeds: the order is the job's, never the feed's."""

    def bound(
        self,
        recipe: Recipe,
        task: Task,
        stores: Sequence[Store],
        order: SampleOrder,
        device: torch.device,
        ranks: Ranks,
    ) -> Feed:
        """The stream of this rank's batches of a job; arguments as `make_feed` takes them."""
        ...


def check_online(recipe: Recipe) -> None:
    """RecipeError for what cannot be encoded by other machines."""
    data = recipe.data
    if data.encode != "online":
        return
    if recipe.task in ("autoencoder", "extractor"):
        raise RecipeError(
            "data.encode", f"online with the task {recipe.task}, which learns from pixels", allowed="inline"
        )
    if data.store is None:
        raise RecipeError("data.encode", "online without data.store", allowed="inline or auto, with a folder")
