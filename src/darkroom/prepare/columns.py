"""Prepared columns: their names, types and metadata, and finding the one that a model made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lance
import pyarrow as pa

from darkroom import __version__
from darkroom.data.store import Store
from darkroom.errors import ColumnError
from darkroom.models.latents import LatentScaling

# Latents and states hardly compress: trying only costs time.
_RAW = {"lance-encoding:compression": "none"}

LATENTS_TYPE = pa.struct(
    [
        pa.field("moments", pa.large_binary(), metadata=_RAW),  # float16 [2, C, h, w], little-endian
        pa.field("height", pa.int16()),  # h
        pa.field("width", pa.int16()),  # w
    ]
)
TEXT_TYPE = pa.struct(
    [
        pa.field("states", pa.large_binary(), metadata=_RAW),  # float16 [L, D], little-endian
        pa.field("length", pa.int16()),  # L
        pa.field("width", pa.int32()),  # D
        pa.field("pooled", pa.large_binary()),  # float16 [P]; null but for SDXL
    ]
)
COUNTED_FRAGMENTS = 4096
_MADE_ALIKE = ("kind", "encoder", "resolution", "crop", "precision")


def _latents_name(resolution: int, identity: str) -> str:
    """The column that holds the latents of one VAE at one resolution."""
    return f"latents_{resolution}_{identity[:8]}"


def _text_name(identity: str) -> str:
    """The column that holds the states of one text encoder."""
    return f"text_{identity[:8]}"


def latents_field(
    resolution: int, identity: str, *, scaling: LatentScaling, crop: str, precision: str
) -> pa.Field:
    """The latents column with its metadata."""
    noted = {
        "kind": "latents",
        "encoder": identity,
        "resolution": str(resolution),
        **scaling.noted(),
        "crop": crop,
        "precision": precision,
        "made_by": __version__,
    }
    return pa.field(_latents_name(resolution, identity), LATENTS_TYPE, metadata=_prefixed(noted))


def text_field(identity: str, *, empty: str, precision: str) -> pa.Field:
    """The text column with its metadata, the empty caption's states among it."""
    noted = {
        "kind": "text",
        "encoder": identity,
        "precision": precision,
        "empty": empty,
        "made_by": __version__,
    }
    return pa.field(_text_name(identity), TEXT_TYPE, metadata=_prefixed(noted))


def _prefixed(noted: dict[str, str]) -> dict[str, str]:
    return {f"darkroom.{key}": value for key, value in noted.items()}


def check_made_alike(store: Store, field: pa.Field) -> None:
    """ColumnError when the store's column of that name was made in another way."""
    there = store.columns()[field.name]
    new = {key.decode(): value.decode() for key, value in field.metadata.items()}
    for what in _MADE_ALIKE:
        made, wanted = (noted.get(f"darkroom.{what}") for noted in (there, new))
        if made != wanted:
            raise ColumnError(
                f"{store.path}: column {field.name} was made with {what} {made}, not {wanted}",
                mend=f"prepare with {what} {made}, or drop the column",
            )


@dataclass(frozen=True)
class Layout:
    """Where a column lies in the fragments' files: its own field ids and its source's."""

    leaves: frozenset[int]
    source: int

    @classmethod
    def of(cls, dataset: lance.LanceDataset, column: str, source: str) -> Layout:
        """The layout of a column in this version of the dataset."""
        schema = dataset.lance_schema
        leaves = [child.id() for child in schema.field(column).children()]
        return cls(frozenset(leaves), schema.field(source).id())

    def file(self, fragment: Any) -> str | None:
        """The file that holds the column's values of a fragment; None where all rows are still null."""
        return next((str(f.path) for f in fragment.files if self.leaves & set(f.fields)), None)

    def base(self, fragment: Any) -> str:
        """The file that holds what is encoded."""
        return next(str(f.path) for f in fragment.files if self.source in f.fields)


def latents_column(store: Store, resolution: int, identity: str) -> str:
    """The finished latents column of this VAE (`VaeEncoder.identity`) at a resolution; else ColumnError."""
    command = f"darkroom prepare {store.path} --model MODEL --resolution {resolution}"
    made = _of_kind(store, "latents")
    alike = {name: noted for name, noted in made.items() if noted["darkroom.resolution"] == str(resolution)}
    if made and not alike:
        there = sorted({int(noted["darkroom.resolution"]) for noted in made.values()})
        raise ColumnError(
            f"{store.path} has no latents at resolution {resolution}",
            allowed=f"resolution {', '.join(map(str, there))}",
            mend=f"or run: {command}",
        )
    return _by_identity(store, alike, "latents", identity, "picture", command)


def text_column(store: Store, identity: str) -> str:
    """The finished text column of this text encoder (`TextEncoder.identity`); else ColumnError."""
    command = f"darkroom prepare {store.path} --model MODEL --text"
    return _by_identity(store, _of_kind(store, "text"), "text", identity, "caption", command)


def _of_kind(store: Store, kind: str) -> dict[str, dict[str, str]]:
    return {name: noted for name, noted in store.columns().items() if noted.get("darkroom.kind") == kind}


def _by_identity(
    store: Store, made: dict[str, dict[str, str]], kind: str, identity: str, source: str, command: str
) -> str:
    for name, noted in made.items():
        if noted["darkroom.encoder"] == identity:
            _check_finished(store, name, source, command)
            return name
    if not made:
        raise ColumnError(f"{store.path} has no {kind} prepared", mend=f"run: {command}")
    others = ", ".join(noted["darkroom.encoder"] for noted in made.values())
    raise ColumnError(
        f"{store.path} has {kind} of another encoder: {others}, the model's is {identity}",
        mend=f"run: {command}",
    )


def _check_finished(store: Store, column: str, source: str, command: str) -> None:
    missing = _missing_rows(store, column, source)
    if missing:
        raise ColumnError(
            f"{store.path}: {missing} of {store.num_rows} rows have no {column} yet", mend=f"run: {command}"
        )


def _missing_rows(store: Store, column: str, source: str) -> int:
    """Rows that a column is null in: counted, or for a huge store read from the manifest alone.

    Counting reads a few hundred bytes a fragment (the heights, which compress to nothing). The manifest does
    not know of single nulls in fragments that were joined; those are noticed when they are read.
    """
    fragments = store.dataset.get_fragments()
    if len(fragments) <= COUNTED_FRAGMENTS:
        return int(store.dataset.count_rows(f"{column} IS NULL"))
    layout = Layout.of(store.dataset, column, source)
    metadata = [fragment.metadata for fragment in fragments]
    return sum(fragment.num_rows for fragment in metadata if layout.file(fragment) is None)
