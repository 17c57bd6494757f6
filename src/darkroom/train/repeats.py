"""Folders that say how often their pictures come, as kohya's trainers have them: `10_sks dog/`, `1_more/`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from darkroom.data import Store
from darkroom.data.order import Ints, Rows
from darkroom.errors import RecipeError

if TYPE_CHECKING:
    from darkroom.recipe import Recipe

FOLDER = re.compile(r"([1-9]\d*)_[^/]*/")


def times_of(key: str) -> int:
    """How often a picture comes against those of no such folder, by its place in the folder trained on."""
    named = FOLDER.match(key)
    return int(named[1]) if named else 1


def check_repeats(recipe: Recipe, keys: Iterable[str]) -> None:
    """RecipeError where folders are to say how often, and none does."""
    if recipe.data.repeats == "folders" and not any(FOLDER.match(key) for key in keys):
        raise RecipeError("data.repeats", "folders, but no folder is named like '10_sks dog'", allowed="1")


def repeated(recipe: Recipe, store: Store, rows: Rows) -> dict[int, Ints]:
    """Positions of the rows by how often each comes, where the recipe leaves that to folders; else none."""
    if recipe.data.repeats != "folders":
        return {}
    positions = rows.positions(np.arange(len(rows)))
    times = np.array([times_of(key) for key in store.take(positions, ["key"])["key"].to_pylist()])
    return {n: positions[times == n] for n in np.unique(times).tolist()}


def rows_an_epoch(recipe: Recipe, store: Store, rows: Rows) -> int:
    """Pictures that an epoch in the metrics counts."""
    if recipe.data.repeats == "folders":
        return sum(n * len(some) for n, some in repeated(recipe, store, rows).items())
    return len(rows) * recipe.data.repeats
