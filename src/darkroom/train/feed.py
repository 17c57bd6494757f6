"""What feeds a job: which pictures come when, how they are read, and class pictures with the subject's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from darkroom.data.images import ColourChange, buckets
from darkroom.data.loader import Loader, ReadSettings, open_batches
from darkroom.data.mixing import (
    BucketIndex,
    MixedBucketOrder,
    MixedOrder,
    MixedRows,
    MixedStore,
    listed_buckets,
)
from darkroom.data.order import BatchRows, BucketOrder, Ints, Order, OrderSettings, Rows, SampleOrder
from darkroom.data.row_files import RowFiles
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.hardware import accelerator
from darkroom.models.model import Model
from darkroom.recipe.sections import DataSettings, TrainSettings
from darkroom.train.ranks import ALONE, Ranks
from darkroom.train.tasks.diffusion import SIZES, Columns, Preference, Task

Feed = Callable[[int], AbstractContextManager[Iterator[Columns]]]
"""Opens the stream of global batches from step k on."""

HELDOUT_SEED = 0
SET, PROMPT, LOSS_WEIGHT = "set", "set_prompt", "loss_weight"
"""Columns of a run's own store of several sets."""
CLASS_SEED = 0x632BE59BD9B4E019  # class pictures get other noise than the subject's in the same place


def bucket_step(data: DataSettings, store: Store, column: str) -> int:
    """What the sides of a prepared column's pictures are multiples of; 0 where they are squares.

    RecipeError where the recipe asks for the other kind.
    """
    crop = store.columns()[column].get("darkroom.crop", "centre")
    step = int(crop.removeprefix("buckets-")) if crop.startswith("buckets-") else 0
    if data.buckets != bool(step):
        made = f"buckets of {step} pixels" if step else "squares"
        raise RecipeError(
            "data.buckets",
            f"{str(data.buckets).lower()}, but {column} was prepared in {made}",
            mend=f"set data.buckets={str(bool(step)).lower()}, or encode=inline",
        )
    return step


def make_order(train: TrainSettings, data: DataSettings, task: Task, store: Store, rows: Rows) -> SampleOrder:
    """The order of a run's rows: by size where pictures lie in buckets, by weight where they are mixed."""
    if isinstance(store, MixedStore):
        assert isinstance(rows, MixedRows)
        weights = [one.weight for one in data.stores]
        return _mixed_order(train, data, task, store.stores, rows.parts, rows.offsets, weights)
    if data.sets:
        return _order_of_sets(train, data, task.model, store, rows)
    if len(times := repeated(data, store, rows)) > 1:
        shares = [float(n * len(some)) for n, some in times.items()]
        parts = [Rows.of(some) for some in times.values()]
        return _mixed_order(train, data, task, [store] * len(parts), parts, [0] * len(parts), shares)
    if not data.buckets:
        return Order(rows, seed=train.seed, global_batch=train.global_batch)
    by_size = _by_size(data, task, store, rows)
    return BucketOrder(by_size, seed=train.seed, global_batch=train.global_batch)


def _order_of_sets(
    train: TrainSettings, data: DataSettings, model: Model, store: Store, rows: Rows
) -> SampleOrder:
    """Each set's rows by their repeats; of several resolutions or in buckets, a batch is of one size."""
    positions = _by_set(store, rows)
    shares = [float(data.sets[i].repeats * len(some)) for i, some in positions.items()]
    parts, offsets = [Rows.of(some) for some in positions.values()], [0] * len(positions)
    if not data.buckets and set(data.sides) == {data.resolution}:
        return MixedOrder(parts, shares, offsets=offsets, seed=train.seed, global_batch=train.global_batch)
    sizes: list[Mapping[tuple[int, int], Any]] = []
    for i, some in positions.items():
        side = data.sides[i]
        allowed = buckets(side, step=inline_step(side, model))
        sizes.append(listed_buckets(store, allowed, some) if data.buckets else {(side, side): some})
    return MixedBucketOrder(sizes, shares, offsets=offsets, seed=train.seed, global_batch=train.global_batch)


def _by_set(store: Store, rows: Rows) -> dict[int, Ints]:
    """Positions of the rows by the number of their set."""
    positions = rows.positions(np.arange(len(rows)))
    numbers = np.array(store.take(positions, [SET])[SET].to_pylist())
    return {n: positions[numbers == n] for n in np.unique(numbers).tolist()}


def _mixed_order(
    train: TrainSettings,
    data: DataSettings,
    task: Task,
    stores: Sequence[Store],
    parts: Sequence[Rows],
    offsets: Sequence[int],
    weights: Sequence[float],
) -> SampleOrder:
    """The order of rows of several stores, or of several parts of one, by weight."""
    seed, batch = train.seed, train.global_batch
    if not data.buckets:
        return MixedOrder(parts, weights, offsets=offsets, seed=seed, global_batch=batch)
    sizes = [_by_size(data, task, one, some) for one, some in zip(stores, parts, strict=True)]
    return MixedBucketOrder(sizes, weights, offsets=offsets, seed=seed, global_batch=batch)


def _by_size(data: DataSettings, task: Task, store: Store, rows: Rows) -> Mapping[tuple[int, int], Any]:
    """One store's rows by aspect-ratio bucket."""
    column = task.read.latents
    step = bucket_step(data, store, column) if column else inline_step(data.resolution, task.model)
    allowed = buckets(data.resolution, step=step)
    if rows.selected is None:
        return BucketIndex(store, allowed, rows).buckets()
    return listed_buckets(store, allowed, rows.positions(np.arange(len(rows))))


def rows_of_one_size(data: DataSettings, task: Task, store: Store, rows: Rows) -> Rows:
    """Rows that are read together: all, or of stored latents in buckets those of the most frequent size."""
    column = task.read.latents
    if not data.buckets or column is None:
        return rows
    allowed = buckets(data.resolution, step=bucket_step(data, store, column))
    by_size = listed_buckets(store, allowed, rows.positions(np.arange(len(rows))))
    return Rows.of(max(by_size.values(), key=len))


def inline_step(resolution: int, model: Model) -> int:
    """Bucket sides as the SDXL trainers have them; small models take what their levels allow."""
    return 64 if resolution >= 256 else model.size_unit


def make_feed(
    train: TrainSettings,
    data: DataSettings,
    task: Task,
    stores: Sequence[Store],
    order: SampleOrder,
    device: torch.device,
    ranks: Ranks = ALONE,
    files: RowFiles | None = None,
) -> Feed:
    """The stream of this rank's batches; a second store's rows, of class pictures, go between the first's.
    What is read is kept in `files`, if any.
    """
    store, *others = stores
    sources = [(store, order, task.read)]
    if isinstance(task, Preference):  # pairs: the same rows, captions and draws
        sources += [(other, order, task.read) for other in others]
    else:
        sources += [(other, *_class_order(train, data, task, other, order)) for other in others]
    return partial(
        open_batches,
        sources,
        end=train.steps,
        rank=ranks.rank,
        world_size=ranks.size,
        workers=data.workers,
        ahead=data.prefetch_batches,
        pin_memory=accelerator.kind_of(device).streams,
        files=files,
    )


def make_row_files(data: DataSettings, say: Callable[[str], object]) -> RowFiles | None:
    """The folder in which a recipe has the rows that are read kept, if any; `say` hears that it is full."""
    if data.cache is None:
        return None
    limit = None if data.cache_gb is None else int(data.cache_gb * 1e9)
    try:
        return RowFiles(Path(data.cache).expanduser(), limit_bytes=limit, say=say)
    except OSError as error:
        raise RecipeError("data.cache", f"{data.cache}: {error.strerror}") from error


class _OrderSizedAs(Order):
    """An order whose batches are cut to the sizes of another one's."""

    def __init__(self, rows: Rows, *, like: SampleOrder, seed: int, global_batch: int) -> None:
        super().__init__(rows, seed=seed, global_batch=global_batch)
        self._like = like

    def batch(self, k: int) -> BatchRows:
        return replace(super().batch(k), size=self._like.batch(k).size)


def _class_order(
    train: TrainSettings, data: DataSettings, task: Task, store: Store, subject: SampleOrder
) -> tuple[Order, ReadSettings]:
    """Which class pictures come when, and how they are read: with their own prompt and noise, in the shape of
    the subject's pictures.
    """
    seed, prompt = train.seed ^ CLASS_SEED, data.class_prompt
    rows = Rows.of(min(data.num_class_images, store.num_rows))
    update: dict[str, Any] = {"prompts": (prompt,), "prompts_replace": True, "seed": seed}
    update |= {"around": ("", ""), "tag_dropout": 0.0, "token_warmup": (0, 1), "wildcards": False}
    update["columns"] = tuple(name for name in task.read.columns if name in SIZES)  # they have no masks
    update["prompt_column"] = None
    order = _OrderSizedAs(rows, like=subject, seed=seed, global_batch=train.global_batch)
    return order, task.read.model_copy(update=update)


def read_once(store: Store, rows: Rows, count: int, read: ReadSettings) -> Columns:
    """`count` rows spread evenly, the same each time: centre cut, no flip, no dropped caption."""
    index = np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))
    still = OrderSettings(shuffle=False)
    order = Order(rows.positions(index), seed=HELDOUT_SEED, global_batch=len(index), settings=still)
    plain: dict[str, Any] = {"crop": "centre", "flip": False, "caption_dropout": 0.0, "seed": HELDOUT_SEED}
    plain |= {"colour": ColourChange(), "shuffle_tags": False, "tag_dropout": 0.0, "token_warmup": (0, 1)}
    with Loader(store, order, read=read.model_copy(update=plain), end=1) as loader:
        return next(loader).columns


FOLDER = re.compile(r"([1-9]\d*)_[^/]*/")


def times_of(key: str) -> int:
    """How often a picture comes against those of no such folder, by its place in the folder trained on."""
    named = FOLDER.match(key)
    return int(named[1]) if named else 1


def check_repeats(data: DataSettings, keys: Iterable[str]) -> None:
    """RecipeError where folders are to say how often, and none does."""
    if data.repeats == "folders" and not any(FOLDER.match(key) for key in keys):
        raise RecipeError("data.repeats", "folders, but no folder is named like '10_sks dog'", allowed="1")


def repeated(data: DataSettings, store: Store, rows: Rows) -> dict[int, Ints]:
    """Positions of the rows by how often each comes, where the recipe leaves that to folders; else none."""
    if data.repeats != "folders":
        return {}
    positions = rows.positions(np.arange(len(rows)))
    times = np.array([times_of(key) for key in store.take(positions, ["key"])["key"].to_pylist()])
    return {n: positions[times == n] for n in np.unique(times).tolist()}


def rows_an_epoch(data: DataSettings, store: Store, rows: Rows) -> int:
    """Pictures that an epoch in the metrics counts."""
    if data.sets:
        return sum(data.sets[i].repeats * len(some) for i, some in _by_set(store, rows).items())
    if data.repeats == "folders":
        return sum(n * len(some) for n, some in repeated(data, store, rows).items())
    return len(rows) * data.repeats


# ---- the rows of a store that a recipe trains on


def select_rows(store: Store, data: DataSettings) -> tuple[Rows, Rows]:
    """The rows that are trained on, and those held out; of several stores, those of each."""
    if isinstance(store, MixedStore):
        parts = [_matching(one, data) for one in store.stores]
        rows: Rows = MixedRows.over(parts, store.offsets)
    else:
        rows = _matching(store, data)
    if data.holdout >= 1 and data.holdout != int(data.holdout):
        raise RecipeError("data.holdout", f"{data.holdout}", allowed="a share below 1, or a whole number")
    if data.holdout * 2 > len(rows) or 0.5 < data.holdout < 1:
        raise RecipeError(
            "data.holdout", f"{data.holdout:g} of {len(rows)} rows", allowed="at most half of the rows"
        )
    return rows.split(data.holdout if data.holdout < 1 else int(data.holdout))


def _matching(store: Store, data: DataSettings) -> Rows:
    """The rows of one store that the recipe's filter lets through; RecipeError where there are none."""
    given = data.filter
    rows = Rows.of(store.choose(given) if given else store.num_rows)
    if len(rows):
        return rows
    of = f" of '{store.path}'" if data.stores else ""
    if given:
        raise RecipeError("data.filter", f"no row of {store.num_rows}{of} matches '{given}'")
    raise RecipeError("data.stores" if data.stores else "data.store", f"the store{of} is empty")


# ---- encoding by other machines while training runs


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
