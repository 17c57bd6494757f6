"""The pictures that are scored and compared with: a folder, a store, or what was just drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from darkroom.data.pictures import EXTENSIONS, PictureError, decode
from darkroom.data.source import pictures_below
from darkroom.data.store import Store
from darkroom.errors import InputError

BATCH = 64
T = TypeVar("T")
GRID = "grid-"


class Pictures(Protocol):
    """A set of pictures that can be gone through more than once."""

    @property
    def name(self) -> str:
        """What it is called in a row of scores."""
        ...

    @property
    def sha256(self) -> str:
        """Of what the pictures are, whatever their names."""
        ...

    def __len__(self) -> int: ...

    def bytes(self) -> Iterator[bytes]:
        """The pictures as they lie on disk."""
        ...


def images(pictures: Pictures) -> Iterator[Image.Image]:
    """The pictures decoded, upright RGB; InputError for one that cannot be."""
    for i, data in enumerate(pictures.bytes()):
        try:
            yield decode(data)
        except PictureError as error:
            raise InputError(f"picture {i} of {pictures.name} cannot be read: {error}") from error


@dataclass(frozen=True, eq=False)
class FolderPictures:
    """Picture files in a fixed order."""

    name: str
    files: tuple[Path, ...]

    @classmethod
    def of(cls, folder: str | Path) -> FolderPictures:
        """All pictures below a folder but masks and contact sheets (`grid-*.png`); InputError for none."""
        path = Path(folder)
        if not path.is_dir():
            raise InputError(f"no folder '{folder}'")
        files = [file for file in pictures_below(path) if not file.name.startswith(GRID)]
        if not files:
            raise InputError(f"no pictures in '{folder}'", allowed=", ".join(sorted(EXTENSIONS)))
        return cls(str(folder), tuple(files))

    def __len__(self) -> int:
        return len(self.files)

    def bytes(self) -> Iterator[bytes]:
        """Each picture file's bytes, in order."""
        return (file.read_bytes() for file in self.files)

    @cached_property
    def sha256(self) -> str:
        """Of all their bytes, in any order: which pictures these are."""
        return joint_sha256(hashlib.sha256(data).digest() for data in self.bytes())


@dataclass(frozen=True, eq=False)
class StorePictures:
    """Rows of a picture store at one version, optionally those that a filter lets through."""

    store: Store
    filter: str | None = None
    most: int | None = None
    positions: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        positions = self.store.select(self.filter)
        if not len(positions):
            chosen = f" where {self.filter}" if self.filter else ""
            raise InputError(f"no pictures in '{self.store.path}'{chosen}")
        if self.most is not None and self.most < len(positions):
            spread = np.linspace(0, len(positions) - 1, self.most).round().astype(np.int64)
            positions = positions[np.unique(spread)]
        object.__setattr__(self, "positions", positions)

    @property
    def name(self) -> str:
        """The store, its version and the filter, as rows say it."""
        chosen = f" where {self.filter}" if self.filter else ""
        return f"{self.store.path}@{self.store.version}{chosen}"

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> Iterator[Any]:
        """A column's values, part by part."""
        for start in range(0, len(self.positions), BATCH):
            yield from self.store.take(self.positions[start : start + BATCH], [name])[name].to_pylist()

    def bytes(self) -> Iterator[bytes]:
        """Each picture's bytes, in the store's order."""
        return self.column("picture")

    @cached_property
    def sha256(self) -> str:
        """Of all their ids: which pictures these are."""
        return joint_sha256(str(id_).encode() for id_ in self.column("id"))


def joint_sha256(parts: Iterator[bytes]) -> str:
    """One hash of many, in whatever order they come."""
    return hashlib.sha256(b"\n".join(sorted(parts))).hexdigest()


def open_pictures(where: str | Path, *, filter: str | None = None, most: int | None = None) -> Pictures:
    """A store where there is one, else a folder of pictures; InputError for neither."""
    path = Path(where)
    if str(where).endswith(".lance") or "://" in str(where) or (path / "_versions").is_dir():
        return StorePictures(Store.open(where), filter, most)
    if filter is not None:
        raise InputError(f"a filter on '{where}'", mend="only a store's rows can be filtered")
    found = FolderPictures.of(path)
    return found if most is None else FolderPictures(found.name, found.files[:most])


def in_batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Values in parts of `size`; the last may be smaller."""
    remaining = iter(values)
    while some := list(islice(remaining, size)):
        yield some
