"""Which rows lie in which aspect-ratio bucket, found when they are asked for instead of listed.

What is held for all rows is one count a fragment and bucket, from the sizes that were noted when rows were
written. Where a bucket's i-th row lies follows from them up to the fragment; the fragment's widths and
heights say the rest, and are read then. So two billion rows cost tens of megabytes, and no scan.

Legend: F fragments, K buckets, N rows of a fragment.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from darkroom.data.images import nearest_bucket
from darkroom.data.order import Ints, Rows
from darkroom.data.store import Store

Size = tuple[int, int]
Codes = npt.NDArray[np.uint8]

OUTSIDE = 255  # the code of a row that is none of these
CODES_BYTES = 64 * 1024**2  # of fragments that were looked into last
JOIN_AT = 64  # notes read one by one before they are joined in one file
SIZES_AT_ONCE = 65_536


class Sorter:
    """Sorts sizes (width, height) into buckets; each size is thought about once."""

    def __init__(self, allowed: Sequence[Size]) -> None:
        assert len(allowed) < OUTSIDE
        self.allowed = list(allowed)
        self._number = {size: number for number, size in enumerate(self.allowed)}
        # Sizes met so far, ascending, and their codes; replaced as one, as several threads look.
        self._known: tuple[Ints, Codes] = (np.array([-1], dtype=np.int64), np.zeros(1, dtype=np.uint8))

    def codes(self, widths: npt.ArrayLike, heights: npt.ArrayLike) -> Codes:
        """The number of the bucket that each picture goes to, uint8 [N]."""
        packed = np.asarray(widths, dtype=np.int64) << 32 | np.asarray(heights, dtype=np.int64)
        sizes, codes = self._known
        place = np.minimum(np.searchsorted(sizes, packed), len(sizes) - 1)
        unknown = sizes[place] != packed
        if unknown.any():
            sizes, codes = self._learn(np.unique(packed[unknown]))
            place = np.searchsorted(sizes, packed)
        return codes[place]

    def _learn(self, packed: Ints) -> tuple[Ints, Codes]:
        pairs = ((size >> 32, size & 0xFFFFFFFF) for size in packed.tolist())
        new = [self._number[nearest_bucket(width, height, self.allowed)] for width, height in pairs]
        sizes, codes = self._known
        sizes, first = np.unique(np.concatenate([sizes, packed]), return_index=True)
        self._known = (sizes, np.concatenate([codes, np.array(new, dtype=np.uint8)])[first])
        return self._known

    def counts(self, shapes_S3: Ints) -> Ints:
        """How many pictures go to each bucket, [K], from rows of (width, height, how many)."""
        counts = np.zeros(len(self.allowed), dtype=np.int64)
        np.add.at(counts, self.codes(shapes_S3[:, 0], shapes_S3[:, 1]), shapes_S3[:, 2])
        return counts


class BucketIndex:
    """The rows of a store by bucket: all of them, or those of `rows` where some are held out.

    Costs 8 bytes a fragment and bucket, and 64 MiB of what was read last. Held-out rows cost a look at their
    sizes. Safe to use from several threads.
    """

    def __init__(self, store: Store, allowed: Sequence[Size], rows: Rows) -> None:
        assert rows.selected is None
        self._store, self._rows, self._sorter = store, rows, Sorter(allowed)
        fragments = store.fragments
        self._ids = [fragment.id for fragment in fragments]
        self._offsets_F = np.array([fragment.offset for fragment in fragments], dtype=np.int64)
        self._num_rows_F = np.array([fragment.num_rows for fragment in fragments], dtype=np.int64)
        counts_FK = _counts(store, self._sorter, self._num_rows_F)
        counts_FK -= self._left_out(len(allowed))
        # [K, F + 1], so that one bucket's lie together.
        self._before_KF = np.zeros((len(allowed), len(fragments) + 1), dtype=np.int64)
        np.cumsum(counts_FK.T, axis=1, out=self._before_KF[:, 1:])
        self._held: OrderedDict[int, Codes] = OrderedDict()
        self._held_bytes, self._lock = 0, threading.Lock()

    def _left_out(self, num_buckets: int) -> npt.NDArray[np.uint32]:
        """How many rows of each fragment and bucket are not among `rows`, [F, K]."""
        counts = np.zeros((len(self._ids), num_buckets), dtype=np.uint32)
        others = self._rows.others()
        for start in range(0, len(others), SIZES_AT_ONCE):
            stop = min(start + SIZES_AT_ONCE, len(others))
            positions = others.positions(np.arange(start, stop))
            sizes = self._store.take(positions, ["width", "height"])
            fragments = np.searchsorted(self._offsets_F, positions, side="right") - 1
            np.add.at(counts, (fragments, self._sorter.codes(sizes["width"], sizes["height"])), 1)
        return counts

    def buckets(self) -> dict[Size, BucketRows]:
        """The rows of every bucket that has any."""
        totals = self._before_KF[:, -1].tolist()
        return {
            size: BucketRows(self, number, totals[number])
            for number, size in enumerate(self._sorter.allowed)
            if totals[number]
        }

    def positions(self, number: int, index: Ints) -> Ints:
        """Store positions of rows of one bucket, by their place in it."""
        before = self._before_KF[number]
        fragments = np.searchsorted(before, index, side="right") - 1
        out = np.empty_like(index)
        for fragment in np.unique(fragments).tolist():
            here = fragments == fragment
            inside = np.flatnonzero(self._codes(fragment) == number)
            out[here] = self._offsets_F[fragment] + inside[index[here] - before[fragment]]
        return out

    def _codes(self, fragment: int) -> Codes:
        """The bucket of each of a fragment's rows, uint8 [N]; read again where it was long not needed."""
        with self._lock:
            if fragment in self._held:
                self._held.move_to_end(fragment)
                return self._held[fragment]
        codes = self._read(fragment)
        with self._lock:
            if fragment not in self._held:
                self._held[fragment] = codes
                self._held_bytes += codes.nbytes
            while self._held_bytes > CODES_BYTES and len(self._held) > 1:
                self._held_bytes -= self._held.popitem(last=False)[1].nbytes
        return codes

    def _read(self, fragment: int) -> Codes:
        lance_fragment = self._store.dataset.get_fragment(self._ids[fragment])
        sizes = lance_fragment.to_table(columns=["width", "height"])
        codes = self._sorter.codes(sizes["width"], sizes["height"])
        first = int(self._offsets_F[fragment])
        codes[~self._rows.holds(np.arange(first, first + len(codes)))] = OUTSIDE
        return codes


@dataclass(frozen=True)
class BucketRows:
    """The rows of one bucket, as an order needs them."""

    index: BucketIndex
    number: int
    count: int

    def __len__(self) -> int:
        return self.count

    def positions(self, index: npt.ArrayLike) -> Ints:
        """Store positions of indices 0..len-1; ascending where the indices ascend."""
        return self.index.positions(self.number, np.asarray(index, dtype=np.int64))


def listed_buckets(store: Store, allowed: Sequence[Size], positions: Ints) -> dict[Size, Ints]:
    """Positions by bucket, for a selection of rows; reads their sizes, and holds 8 bytes for each."""
    sorter = Sorter(allowed)
    codes = np.empty(len(positions), dtype=np.uint8)
    for start in range(0, len(positions), SIZES_AT_ONCE):
        part = slice(start, start + SIZES_AT_ONCE)
        sizes = store.take(positions[part], ["width", "height"])
        codes[part] = sorter.codes(sizes["width"], sizes["height"])
    return {sorter.allowed[number]: positions[codes == number] for number in np.unique(codes).tolist()}


def _counts(store: Store, sorter: Sorter, num_rows_F: Ints) -> npt.NDArray[np.uint32]:
    """Rows of each fragment and bucket, [F, K]: joined in one file, what is new since then from its notes."""
    ids_F = np.array([fragment.id for fragment in store.fragments], dtype=np.int64)
    counts_FK = np.zeros((len(ids_F), len(sorter.allowed)), dtype=np.uint32)
    name = "buckets-" + hashlib.sha256(repr(sorter.allowed).encode()).hexdigest()[:16]
    joined = store.sidecars.read_table(name)
    if joined is not None and joined.num_rows:
        known = joined["id"].to_numpy()
        place = np.minimum(np.searchsorted(known, ids_F), len(known) - 1)
        there = known[place] == ids_F
        noted = joined["counts"].combine_chunks().flatten().to_numpy().reshape(len(known), -1)
        counts_FK[there] = noted[place[there]]
    unknown = np.flatnonzero(counts_FK.sum(axis=1, dtype=np.int64) != num_rows_F)
    for at in unknown.tolist():
        counts_FK[at] = sorter.counts(store.shapes_of(int(ids_F[at])))
    if len(unknown) > JOIN_AT:
        by_id = np.argsort(ids_F)
        counts = pa.FixedSizeListArray.from_arrays(counts_FK[by_id].ravel(), len(sorter.allowed))
        store.sidecars.write_table(name, pa.table({"id": ids_F[by_id], "counts": counts}))
    return counts_FK
