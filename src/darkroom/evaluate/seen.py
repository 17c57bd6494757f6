"""Which pictures an extractor was trained on, and whether it meets them again in a score."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from darkroom.data.pictures import PictureError, examine
from darkroom.evaluate.pictures import Pictures
from darkroom.evaluate.small import SEEN_FILE

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Seen:
    """Training pictures by 64 bits of their bytes' BLAKE2b, and by perceptual hash; both sorted."""

    bytes_N: Ids
    looks_N: Ids

    @classmethod
    def of(cls, pictures: Iterable[tuple[bytes, int]]) -> Seen:
        """Of pictures with their perceptual hashes (the store's column `phash`)."""
        pairs = [(digest(data), look) for data, look in pictures]
        exact, looks = (np.unique(np.array([pair[i] for pair in pairs], np.int64)) for i in (0, 1))
        return cls(exact, looks)

    def __or__(self, other: Seen) -> Seen:
        return Seen(
            np.union1d(self.bytes_N, other.bytes_N).astype(np.int64),
            np.union1d(self.looks_N, other.looks_N).astype(np.int64),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """As they are saved."""
        return {"bytes": torch.from_numpy(self.bytes_N), "looks": torch.from_numpy(self.looks_N)}

    @classmethod
    def read(cls, folder: Path) -> Seen | None:
        """What an extractor's folder says; None where it does not say (published extractors)."""
        from safetensors.torch import load_file

        file = folder / SEEN_FILE
        if not file.is_file():
            return None
        tensors = load_file(str(file))
        return cls(tensors["bytes"].numpy(), tensors["looks"].numpy())

    def overlap(self, pictures: Pictures) -> Overlap:
        """How many of these pictures were trained on: the very files, and those that look the same."""
        exact = alike = 0
        for data, look in _looked_at(pictures):
            is_exact = _in(digest(data), self.bytes_N)
            exact += is_exact
            alike += not is_exact and look is not None and _in(look, self.looks_N)
        return Overlap(exact, alike, len(pictures))


@dataclass(frozen=True)
class Overlap:
    """Pictures that an extractor was trained on, among those it is to judge."""

    exact: int
    alike: int
    of: int

    def __bool__(self) -> bool:
        return bool(self.exact or self.alike)

    def __str__(self) -> str:
        parts = [f"{self.exact} the same files"] if self.exact else []
        parts += [f"{self.alike} that look the same"] if self.alike else []
        return f"{self.exact + self.alike} of {self.of} pictures ({', '.join(parts)})"


def digest(data: bytes) -> int:
    """64 bits of a file, signed."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)


def _in(number: int, sorted_N: Ids) -> bool:
    place = int(np.searchsorted(sorted_N, number))
    return place < len(sorted_N) and int(sorted_N[place]) == number


def _looked_at(pictures: Pictures) -> Iterator[tuple[bytes, int | None]]:
    for data in pictures.bytes():
        try:
            look: int | None = examine(data).phash
        except PictureError:
            look = None
        # A picture of one colour hashes to zero, as all such pictures do.
        yield data, look or None
