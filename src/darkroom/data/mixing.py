"""Several stores as one, mixed by weight: which rows of which form global batch k, a pure function again.

Each store keeps an endless stream of its own (`Order`), so that a small one with a large weight simply comes
round more often. How many rows of batch k each gives is dealt by systematic sampling: the weights' shares lie
behind each other on a line of B rows, and a comb with a tooth at every row is laid on it, moved a little for
each batch (by the golden ratio, so that any stretch of batches covers all places evenly). So each batch has
every store's share rounded up or down, and any run of batches its share to within a few rows. With buckets
the same dealing first says which bucket batch k is of.

Shares are whole multiples of 2^-64 and all else is integers: the same on every machine. Costs 8 bytes a store
for each 65,536 batches. A row's place is its store's first row plus its position there, so noise, crops and
dropped captions differ between stores.

Legend: B rows of a global batch, S stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from darkroom.data.draws import mix
from darkroom.data.order import BatchRows, Indexed, Ints, Order, OrderSettings, Rows
from darkroom.data.store import FragmentInfo, Store
from darkroom.errors import InputError

Size = tuple[int, int]
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
