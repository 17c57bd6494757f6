"""Orders over more than one set of rows: aspect-ratio buckets, and several stores mixed by weight."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from darkroom.data.draws import mix
from darkroom.data.images import nearest_bucket
from darkroom.data.order import BatchRows, Indexed, Ints, Order, OrderSettings, Rows
from darkroom.data.store import FragmentInfo, Store
from darkroom.errors import InputError

# ---- which rows lie in which aspect-ratio bucket, found when they are asked for instead of listed
#
# What is held for all rows is one count a fragment and bucket, from the sizes that were noted when rows were
# written. Where a bucket's i-th row lies follows from them up to the fragment; the fragment's widths and
# heights say the rest, and are read then. So two billion rows cost tens of megabytes, and no scan.
#
# Legend: F fragments, K buckets, N rows of a fragment.

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


# ---- several stores as one, mixed by weight: which rows of which form global batch k, a pure function again
#
# Each store keeps an endless stream of its own (`Order`), so that a small one with a large weight simply
# comes round more often. How many rows of batch k each gives is dealt by systematic sampling: the weights'
# shares lie behind each other on a line of B rows, and a comb with a tooth at every row is laid on it, moved
# a little for each batch (by the golden ratio, so that any stretch of batches covers all places evenly). So
# each batch has every store's share rounded up or down, and any run of batches its share to within a few
# rows. With buckets the same dealing first says which bucket batch k is of.
#
# Shares are whole multiples of 2^-64 and all else is integers: the same on every machine. Costs 8 bytes a
# store for each 65,536 batches. A row's place is its store's first row plus its position there, so noise,
# crops and dropped captions differ between stores.
#
# Legend: B rows of a global batch, S stores.

_STORE, _COMB = 11, 12  # what a key is for
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 by the golden ratio
_TURN = 1 << 64
_CHUNK = 1 << 16


# ---- stores


class MixedStore(Store):
    """Stores behind each other, as far as training reads: a position says which store and which of its rows.

    `columns` are those that all of them have; a prepared column counts where all were cut alike.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)
        self.path = " + ".join(store.path for store in stores)
        self._first_S: Ints = np.concatenate([[0], np.cumsum([store.num_rows for store in stores])])

    @property
    def offsets(self) -> list[int]:
        """The place of each store's first row."""
        return [int(first) for first in self._first_S[:-1]]

    @property
    def version(self) -> int:
        """Another number when any of the stores has moved on; `versions_of` says which."""
        return sum(store.version for store in self.stores)

    @property
    def num_rows(self) -> int:
        return int(self._first_S[-1])

    @property
    def fragments(self) -> list[FragmentInfo]:
        """The stores' fragments one after another, as if they were one store's."""
        return [
            replace(fragment, offset=fragment.offset + first)
            for store, first in zip(self.stores, self.offsets, strict=True)
            for fragment in store.fragments
        ]

    @property
    def dataset(self) -> Any:
        """What can be read of all of them by fragment."""
        return _Datasets(self.stores)

    def schemas(self) -> list[Any]:
        """The schema of each fragment of each store."""
        return [schema for store in self.stores for schema in store.schemas()]

    def columns(self) -> dict[str, dict[str, str]]:
        """The columns that every store has with the same crop, with the first store's metadata."""
        first, *others = (store.columns() for store in self.stores)
        cut = "darkroom.crop"
        return {
            name: noted
            for name, noted in first.items()
            if all(name in other and other[name].get(cut) == noted.get(cut) for other in others)
        }

    def take(self, positions: Sequence[int] | npt.NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """Rows [n] of the stores taken together, in the order of `positions` [n]."""
        wanted = np.asarray(positions, dtype=np.int64)
        which = np.searchsorted(self._first_S, wanted, side="right") - 1
        groups = [np.flatnonzero(which == s) for s in range(len(self.stores))]
        tables = [
            store.take(wanted[group] - first, columns)
            for store, first, group in zip(self.stores, self.offsets, groups, strict=True)
            if len(group)
        ]
        if not tables:
            return self.stores[0].take(wanted, columns)
        back = np.argsort(np.concatenate([group for group in groups if len(group)]), kind="stable")
        return pa.concat_tables([table.replace_schema_metadata() for table in tables]).take(pa.array(back))

    def select(self, filter: str | None) -> npt.NDArray[np.int64]:
        parts = [s.select(filter) + first for s, first in zip(self.stores, self.offsets, strict=True)]
        found: npt.NDArray[np.int64] = np.concatenate(parts)
        return found


@dataclass(frozen=True)
class _Datasets:
    stores: Sequence[Store]

    def get_fragments(self) -> list[Any]:
        """All fragments, one store's after the other's."""
        return [fragment for store in self.stores for fragment in store.dataset.get_fragments()]


def parts_of(store: Store) -> list[Store]:
    """The stores that one is made of: itself, where it is no mixture."""
    return store.stores if isinstance(store, MixedStore) else [store]


def versions_of(store: Store) -> int | list[int]:
    """What a run pins of a store: its version, or that of each in a mixture."""
    return [one.version for one in store.stores] if isinstance(store, MixedStore) else store.version


@dataclass(frozen=True)
class MixedRows(Rows):
    """The rows of each store of a mixture, behind each other; positions are the mixture's."""

    parts: tuple[Rows, ...] = ()
    offsets: tuple[int, ...] = ()

    @classmethod
    def over(cls, parts: Sequence[Rows], offsets: Sequence[int]) -> MixedRows:
        """The rows of stores whose first rows have these places."""
        return cls(sum(len(part) for part in parts), parts=tuple(parts), offsets=tuple(offsets))

    def __len__(self) -> int:
        return self.total

    def split(self, holdout: float | int) -> tuple[Rows, Rows]:
        """Training and held-out rows of each store; of a number each holds out its share of the rows."""
        whole = holdout == int(holdout)
        shares = [round(holdout * len(part) / len(self)) if whole else holdout for part in self.parts]
        train, held = zip(
            *(part.split(one) for part, one in zip(self.parts, shares, strict=True)), strict=True
        )
        return MixedRows.over(train, self.offsets), MixedRows.over(held, self.offsets)

    def positions(self, index: npt.ArrayLike) -> Ints:
        """Positions [n] in the mixed store of the rows with these numbers [n]."""
        i = np.asarray(index, dtype=np.int64)
        firsts = np.concatenate([[0], np.cumsum([len(part) for part in self.parts])])
        which = np.searchsorted(firsts, i, side="right") - 1
        out = np.empty_like(i)
        for s in np.unique(which).tolist():
            here = which == s
            out[here] = self.parts[s].positions(i[here] - firsts[s]) + self.offsets[s]
        return out


# ---- dealing


class Dealer:
    """Deals `each` items at a time to shares that sum up to one."""

    def __init__(self, shares: Sequence[Fraction], each: int, seed: int) -> None:
        edges = [sum(shares[: s + 1], Fraction(0)) * each for s in range(len(shares) - 1)]
        self._whole_S: Ints = np.array([0, *(int(edge) for edge in edges), each], dtype=np.int64)
        parts = [int((edge - int(edge)) * _TURN) for edge in edges]
        self._part_S = np.array([0, *parts, 0], dtype=np.uint64)
        self._start = np.uint64(mix(seed, _COMB, np.array([0]))[0])
        self._before = [np.zeros(len(shares) + 1, dtype=np.int64)]  # of edges passed, at each chunk's start
        self._growing = threading.Lock()

    def quota(self, k: int) -> Ints:
        """How many of deal k each share gets, [S]."""
        dealt: Ints = np.diff(self._whole_S + self._passed(k, k + 1))
        return dealt

    def before(self, k: int) -> Ints:
        """How many each share got in the deals before k, [S]."""
        chunk, rest = divmod(k, _CHUNK)
        with self._growing:
            while len(self._before) <= chunk:
                done = len(self._before)
                passed = self._passed((done - 1) * _CHUNK, done * _CHUNK)
                self._before.append(self._before[-1] + passed)
        passed = self._before[chunk] + self._passed(k - rest, k)
        dealt: Ints = np.diff(k * self._whole_S + passed)
        return dealt

    def _passed(self, start: int, end: int) -> Ints:
        """In how many of these deals the comb stands before each edge, [S + 1]."""
        with np.errstate(over="ignore"):
            comb = self._start + np.arange(start, end, dtype=np.uint64) * np.uint64(_GOLDEN)
        passed: Ints = (self._part_S[:, None] > comb[None, :]).sum(axis=1, dtype=np.int64)
        return passed


def shares_of(weights: Sequence[float | Fraction]) -> list[Fraction]:
    """Weights as exact shares of one; InputError where one is not above 0."""
    exact = [Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    if not exact or min(exact) <= 0:
        raise InputError(f"weights {', '.join(map(str, weights))}", allowed="above 0")
    return [weight / sum(exact) for weight in exact]


# ---- orders


class _Behind:
    """Orders behind each other: indices and blocks of the second follow those of the first."""

    def __init__(self, orders: Sequence[Order], offsets: Sequence[int]) -> None:
        self.orders, self._offsets = list(orders), list(offsets)
        counts = np.array([order.num_rows for order in orders], dtype=np.int64)
        self.block_rows, self.global_batch = orders[0].block_rows, orders[0].global_batch
        self._first_index: Ints = np.concatenate([[0], np.cumsum(counts)])
        self._first_block: Ints = np.concatenate([[0], np.cumsum(-(-counts // self.block_rows))])
        self.num_rows = int(counts.sum())
        self.window_rows = sum(min(order.window_rows, order.num_rows) for order in orders)

    def positions(self, index: npt.ArrayLike) -> Ints:
        """Positions in the mixture of the order's own indices."""
        i = np.asarray(index, dtype=np.int64)
        which = np.searchsorted(self._first_index, i, side="right") - 1
        out = np.empty_like(i)
        for s in np.unique(which).tolist():
            here = which == s
            out[here] = self.orders[s].positions(i[here] - self._first_index[s]) + self._offsets[s]
        return out

    def block_of(self, index: Ints) -> Ints:
        """The number of the block each index lies in; a block never spans two stores."""
        which = np.searchsorted(self._first_index, index, side="right") - 1
        blocks: Ints = self._first_block[which] + (index - self._first_index[which]) // self.block_rows
        return blocks

    def block(self, number: int) -> tuple[int, int]:
        """First index and length of a block."""
        which = int(np.searchsorted(self._first_block, number, side="right")) - 1
        first, count = self.orders[which].block(number - int(self._first_block[which]))
        return first + int(self._first_index[which]), count


class MixedOrder(_Behind):
    """The endless mixed stream of several stores' rows, cut into global batches."""

    def __init__(
        self,
        rows: Sequence[Rows | Indexed | npt.ArrayLike],
        weights: Sequence[float | Fraction],
        *,
        offsets: Sequence[int],
        seed: int,
        global_batch: int,
        settings: OrderSettings | None = None,
    ) -> None:
        """`rows` of each store, by their positions there; `offsets` say where its first row lies."""
        keys = mix(seed, _STORE, np.arange(len(rows))).tolist()
        orders = [
            Order(some, seed=key, global_batch=global_batch, settings=settings)  # type: ignore[arg-type]
            for some, key in zip(rows, keys, strict=True)
        ]
        super().__init__(orders, offsets)
        self._dealer = Dealer(shares_of(weights), global_batch, seed)

    def batch(self, k: int) -> BatchRows:
        """The rows of global batch k, ascending by position and then by epoch."""
        quota, before = self._dealer.quota(k).tolist(), self._dealer.before(k).tolist()
        dealt = [
            (epochs, indices + first)
            for order, first, start, count in zip(
                self.orders, self._first_index[:-1].tolist(), before, quota, strict=True
            )
            if count
            for epochs, indices in [order.items(start, count)]
        ]
        epochs_B = np.concatenate([epochs for epochs, _ in dealt])
        indices_B = np.concatenate([indices for _, indices in dealt])
        by_index = np.lexsort((epochs_B, indices_B))
        indices_B = indices_B[by_index]
        return BatchRows(k, epochs_B[by_index], indices_B, self.positions(indices_B))


class MixedBucketOrder(_Behind):
    """The same where every global batch holds rows of one aspect-ratio bucket, of all stores that have some.

    A bucket's share is what its rows weigh: a store's weight times the part of its rows that lie there.
    """

    def __init__(
        self,
        buckets: Sequence[Mapping[Size, Any]],
        weights: Sequence[float | Fraction],
        *,
        offsets: Sequence[int],
        seed: int,
        global_batch: int,
        settings: OrderSettings | None = None,
    ) -> None:
        """`buckets` of each store: its rows by size."""
        shares = shares_of(weights)
        totals = [sum(len(rows) for rows in one.values()) for one in buckets]
        self.sizes = sorted({size for one in buckets for size, rows in one.items() if len(rows)})
        keys = mix(seed, _STORE, np.array([w << 32 | h for w, h in self.sizes])).tolist()
        self._mixed: list[MixedOrder] = []
        heights: list[Fraction] = []
        for size, key in zip(self.sizes, keys, strict=True):
            there = [s for s, one in enumerate(buckets) if len(one.get(size, ()))]
            weigh = [shares[s] * Fraction(len(buckets[s][size]), totals[s]) for s in there]
            rows, places = [buckets[s][size] for s in there], [offsets[s] for s in there]
            self._mixed.append(
                MixedOrder(
                    rows, weigh, offsets=places, seed=key, global_batch=global_batch, settings=settings
                )
            )
            heights.append(sum(weigh, Fraction(0)))
        orders = [order for mixed in self._mixed for order in mixed.orders]
        super().__init__(orders, [offset for mixed in self._mixed for offset in mixed._offsets])
        self._dealer = Dealer(shares_of(heights), 1, seed)
        first_order = np.cumsum([0, *(len(mixed.orders) for mixed in self._mixed)])
        self._first_of = [int(self._first_index[number]) for number in first_order[:-1]]
        self._place: Callable[[int], tuple[int, int]] = lru_cache(maxsize=512)(self._find_place)

    def _find_place(self, k: int) -> tuple[int, int]:
        """The bucket of batch k, and which batch of that bucket it is."""
        bucket = int(np.argmax(self._dealer.quota(k)))
        return bucket, int(self._dealer.before(k)[bucket])

    def batch(self, k: int) -> BatchRows:
        """The rows of global batch k, all of one bucket, whose (width, height) is `size`."""
        bucket, number = self._place(k)
        rows = self._mixed[bucket].batch(number)
        indices = rows.indices_B + self._first_of[bucket]
        return replace(rows, k=k, indices_B=indices, size=self.sizes[bucket])
