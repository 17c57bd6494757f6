"""Near-doubles: the same picture scaled, compressed anew or slightly changed, under any caption.

Candidates are found by their perceptual hashes, then compared by their pixels: a hash of grey differences
alone takes a red circle for a green one, and all plain pictures for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from darkroom.data.images import PictureError, decode
from darkroom.data.store import DOUBLE_OF, Store
from darkroom.errors import InputError

FIELD = pa.field(DOUBLE_OF, pa.string(), metadata={"darkroom.kind": DOUBLE_OF})

MAX_DISTANCE = 7
THUMBNAIL = 16
MAX_MEAN, MAX_PATCH = 5.0, 24.0
DECODE_ROWS = 256

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]


def find_doubles(
    store: Store, *, max_distance: int = 3, progress: Callable[[int, int | None], None] | None = None
) -> dict[int, int]:
    """Each double's position and that of the first picture like it.

    Pictures are alike whose hashes differ in at most `max_distance` of 64 bits (up to 7), and whose
    thumbnails of 16x16 pixels differ by at most 5 levels of 255 on average and 24 in any patch. Only
    candidates are decoded. Takes 16 bytes of memory a row.
    """
    if not 0 <= max_distance <= MAX_DISTANCE:
        raise InputError(f"max_distance {max_distance}", allowed=f"0 to {MAX_DISTANCE}")
    hashes = np.concatenate(
        [np.zeros(0, np.uint64)]
        + [b.column("phash").to_numpy().view(np.uint64) for b in store.scan(["phash"], batch_rows=65_536)]
    )
    groups = candidates(hashes, max_distance)
    total, done, found = sum(map(len, groups)), 0, dict[int, int]()
    for group in groups:
        found |= _alike(store, group, hashes[group], max_distance)
        done += len(group)
        if progress is not None:
            progress(done, total)
    return found


def mark_doubles(
    store: Store, *, max_distance: int = 3, progress: Callable[[int, int | None], None] | None = None
) -> int:
    """Note in the column `double_of` which picture a row is a double of; returns the number of doubles.

    `double_of IS NULL` then selects one picture of each kind. Run it again after an import. Nothing but
    this column is written, and only in fragments where it changes.
    """
    store.refresh()
    store.add_columns([FIELD])
    found = find_doubles(store, max_distance=max_distance, progress=progress)
    doubles = np.array(sorted(found), np.int64)
    ids = dict(zip(doubles.tolist(), _ids(store, doubles), strict=True))
    originals = dict(zip(doubles.tolist(), _ids(store, [found[i] for i in doubles.tolist()]), strict=True))
    marks = {ids[position]: originals[position] for position in ids}
    store.set_by_id(DOUBLE_OF, marks)
    return len(marks)


def _ids(store: Store, positions: Sequence[int] | Ints) -> list[str]:
    ids: list[str] = store.take(np.asarray(positions, np.int64), ["id"])["id"].to_pylist()
    return ids


def candidates(hashes: Hashes, max_distance: int) -> list[Ints]:
    """Positions whose hashes hang together by steps of at most `max_distance` bits, in groups of two up.

    Two hashes that differ in d bits agree in at least one of d + 1 bands (pigeonholes), so only those that
    share a band are compared; equal hashes count once.
    """
    distinct, number_of = np.unique(hashes, return_inverse=True)
    root = np.arange(len(distinct))
    for a, b in _near_pairs(distinct, max_distance):
        _join(root, a, b)
    root_of = np.array([_root(root, i) for i in range(len(distinct))], np.int64)[number_of]
    order = np.argsort(root_of, kind="stable")
    cuts = np.flatnonzero(np.diff(root_of[order])) + 1
    groups = [group for group in np.split(order, cuts) if len(group) > 1]
    return sorted(groups, key=lambda group: int(group[0]))


def _root(root: Ints, i: int) -> int:
    while root[i] != i:
        root[i] = root[root[i]]
        i = int(root[i])
    return i


def _join(root: Ints, a: int, b: int) -> None:
    a, b = _root(root, a), _root(root, b)
    root[max(a, b)] = min(a, b)


def _near_pairs(distinct: Hashes, max_distance: int) -> Iterator[tuple[int, int]]:
    """Pairs that differ in few bits: sorted by a band, each hash meets its followers while they share it."""
    if max_distance == 0:
        return
    edges = np.linspace(0, 64, max_distance + 2).astype(int)
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        band = (distinct >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        order = np.argsort(band, kind="stable")
        band, first, step = band[order], np.arange(len(order)), 1
        while len(first):
            first = first[first + step < len(order)]
            first = first[band[first] == band[first + step]]
            a, b = order[first], order[first + step]
            near = np.bitwise_count(distinct[a] ^ distinct[b]) <= max_distance
            yield from zip(a[near].tolist(), b[near].tolist(), strict=True)
            step += 1


def _alike(store: Store, group: Ints, hashes: Hashes, max_distance: int) -> dict[int, int]:
    """Within a group of candidates, each double and the first picture that it is like by its pixels."""
    found: dict[int, int] = {}
    first: list[int] = []
    first_hashes, first_thumbnails = (
        np.zeros(0, np.uint64),
        np.zeros((0, THUMBNAIL, THUMBNAIL, 3), np.float32),
    )
    for start in range(0, len(group), DECODE_ROWS):
        positions = group[start : start + DECODE_ROWS]
        pictures = store.take(positions, ["picture"])["picture"].to_pylist()
        for position, hash_, data in zip(
            positions.tolist(), hashes[start : start + DECODE_ROWS], pictures, strict=True
        ):
            thumbnail = _thumbnail(data)
            near = np.bitwise_count(first_hashes ^ hash_) <= max_distance
            alike = [i for i in np.flatnonzero(near) if _are_alike(thumbnail, first_thumbnails[i])]
            if alike:
                found[position] = first[alike[0]]
                continue
            first.append(position)
            first_hashes = np.append(first_hashes, hash_)
            first_thumbnails = np.concatenate([first_thumbnails, thumbnail[None]])
    return found


def _thumbnail(data: bytes) -> NDArray[np.float32]:
    """A picture as 16x16 RGB; one that does not decode is like nothing."""
    try:
        image = decode(data).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    except PictureError:
        return np.full((THUMBNAIL, THUMBNAIL, 3), np.nan, np.float32)
    return np.asarray(image, np.float32)


def _are_alike(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    difference = np.abs(a - b).max(axis=-1)
    patches = difference.reshape(THUMBNAIL // 2, 2, THUMBNAIL // 2, 2).mean(axis=(1, 3))
    return bool(difference.mean() <= MAX_MEAN and patches.max() <= MAX_PATCH)
