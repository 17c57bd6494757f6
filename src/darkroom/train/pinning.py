"""Which version of its stores a run reads: rank 0 opens and pins it before anything names it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from darkroom.data import Store
from darkroom.data.complaints import plain
from darkroom.data.mixing import parts_of, versions_of
from darkroom.data.races import wait
from darkroom.errors import StoreError
from darkroom.train.gather import has_own_store, open_store

if TYPE_CHECKING:
    from darkroom.recipe import Recipe

Say = Callable[[str], None]
Versions = int | Sequence[int] | None
TRIES = 10


def settled(recipe: Recipe, run: Path, version: Versions, say: Say) -> Versions:
    """The version of the run's store, or of each of several, kept from now on under the run's name.

    `version` is what the run settled before; without one it is the newest, and a newer one where that is
    dropped before it is pinned. A store of the run's own needs no pin. StoreError where there is no store or
    no such version.
    """
    if has_own_store(recipe):
        return version
    for attempt in range(TRIES):
        opened = open_store(recipe, run, version)
        try:
            for store in parts_of(opened):
                _pin(store, run, say)
        except ValueError as error:  # dropped since it was opened
            if version is not None:
                raise StoreError(f"{opened.path}: {plain(error)}") from error
            wait(attempt)
        else:
            return versions_of(opened)
    raise StoreError(
        f"{opened.path} is changed by others all the time", mend="run it again when they are done"
    )


def _pin(store: Store, run: Path, say: Say) -> None:
    try:
        store.pin(_name(run))
    except OSError as error:
        say(
            f"the store cannot be written ({error}): resuming works while its version {store.version} is kept"
        )


def let_go(recipe: Recipe, run: Path) -> None:
    """Unpin what was settled for a run that cannot be."""
    if has_own_store(recipe):
        return
    with suppress(OSError, ValueError, StoreError):
        for store in parts_of(open_store(recipe, run)):
            store.unpin(_name(run))


def _name(run: Path) -> str:
    """The folder's whole path makes the name its own."""
    return f"run {run.resolve()}"
