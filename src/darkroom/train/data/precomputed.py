"""What a run reads from its store instead of computing it: latents, text states and masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from darkroom import models
from darkroom.data.mixing import parts_of, versions_of
from darkroom.data.store import Store
from darkroom.data.versions import plain, wait
from darkroom.errors import RecipeError, StoreError
from darkroom.models.model import Model
from darkroom.prepare.columns import (
    TextEncoder,
    encoder_settings,
    latents_column,
    settings_that_differ,
    text_column,
)
from darkroom.prepare.job import prepare
from darkroom.train.data.feed import inline_step
from darkroom.train.data.local_dataset import has_own_store, open_store
from darkroom.train.tasks.diffusion import COLUMN, Masks

if TYPE_CHECKING:
    from darkroom.recipe.sections import DataSettings


PREPARED_PIXELS = 2**19  # at a time, where a run makes its own latents: two pictures of 512 px


def prepare_own(
    data: DataSettings,
    model: Model,
    stores: Sequence[Store],
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Make the latents of a run's own stores, where they are not there yet, and tell how many."""
    side = data.resolution
    for store in stores:
        store.refresh()
        report = prepare(
            store,
            replace(model, unet=None, text_encoders=[], tokenizers=[]),
            resolution=side,
            bucket_step=inline_step(side, model) if data.buckets else 0,
            batch_rows=max(1, PREPARED_PIXELS // side**2),
            device=str(device),
        )
        made = sum(report.encoded.values())
        if made:
            say(f"latents of {made} pictures made, kept in {store.path} ({report.wall_s:.1f} s)")


def stored_latents(data: DataSettings, model: Model, store: Store) -> str | None:
    """The prepared column to read, or None to encode pictures at each step."""
    if data.encode in ("inline", "online"):
        return None
    if data.encode == "auto":
        made = [meta for meta in store.columns().values() if meta.get("darkroom.kind") == "latents"]
        if not data.caches_latents or not any(
            meta.get("darkroom.resolution") == str(data.resolution) for meta in made
        ):
            return None
    assert model.vae is not None
    made_by = models.identity(model.vae), encoder_settings(model.vae)
    columns = {latents_column(one, data.resolution, *made_by) for one in parts_of(store)}
    return _shared(store, columns)


def _shared(store: Store, columns: set[str]) -> str:
    """A prepared column that all of a mixture's stores have alike."""
    column: str = columns.pop()
    if columns or column not in store.columns():
        raise RecipeError(
            "data.stores",
            f"their columns {', '.join(sorted({column, *columns}))} are not alike",
            mend="prepare all of them with the same settings (square, or --buckets)",
        )
    return column


def stored_text(data: DataSettings, model: Model, store: Store, *, trained: bool) -> str | None:
    """The prepared text column to read, or None to encode captions at each step.

    `trained` says whether the text encoders are.
    """
    asked = data.text
    says = data.prompts or data.changes_captions or not data.reads_text_plainly
    if trained or asked == "inline" or (says and asked == "auto"):
        return None
    made = [meta for meta in store.columns().values() if meta.get("darkroom.kind") == "text"]
    if asked == "auto" and not made:
        return None
    encoder = TextEncoder(model.text_encoders, model.tokenizers)
    if asked == "auto" and all(_of_another(meta, encoder) for meta in made):
        return None
    return _shared(store, {text_column(one, encoder.identity, encoder.settings) for one in parts_of(store)})


def _of_another(noted: Mapping[str, str], encoder: TextEncoder) -> bool:
    """Whether a column is another encoder's."""
    if noted.get("darkroom.encoder") != encoder.identity:
        return True
    return bool(settings_that_differ(noted, encoder.settings))


def stored_masks(data: DataSettings, store: Store, *, factor: int, floor: float) -> Masks | None:
    """What reads the masks, where there are any; RecipeError for a column that is missing."""
    given = data.mask
    column = COLUMN if has_own_store(data) and given in (None, "alpha") else given
    if column is None or (given is None and column not in store.columns()):
        return None
    if column not in store.columns():
        raise RecipeError(
            "data.mask", f"the store has no column '{column}'", allowed=", ".join(store.columns())
        )
    return Masks(column, factor=factor, floor=floor)


Say = Callable[[str], None]
Versions = int | Sequence[int] | None
TRIES = 10


def settled(data: DataSettings, run: Path, version: Versions, say: Say) -> Versions:
    """The version of the run's store, or of each of several, kept from now on under the run's name.

    `version` is what the run settled before; without one it is the newest, and a newer one where that is
    dropped before it is pinned. A store of the run's own needs no pin. StoreError where there is no store or
    no such version.
    """
    if has_own_store(data):
        return version
    for attempt in range(TRIES):
        opened = open_store(data, run, version)
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


def release_pins(data: DataSettings, run: Path) -> None:
    """Unpin what was settled for a run that cannot be."""
    if has_own_store(data):
        return
    with suppress(OSError, ValueError, StoreError):
        for store in parts_of(open_store(data, run)):
            store.unpin(_name(run))


def _name(run: Path) -> str:
    """The folder's whole path makes the name its own."""
    return f"run {run.resolve()}"
