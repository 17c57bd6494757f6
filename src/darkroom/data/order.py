"""Which rows form global batch k: a pure function, never a list.

The rows of an epoch are cut into blocks of neighbours. A keyed permutation deals the blocks in a new order
every epoch, a window takes so many blocks at a time, and the rows of a window are shuffled among each
other. Epochs follow each other without a seam: batch k is items k*B to (k+1)*B of one endless stream, so no
batch is ever short; the one that crosses an epoch's end is filled from the head of the next, and every row
carries its own epoch.

Nothing here depends on ranks, workers, columns or fragments: only on how many rows there are (pinned when a
run starts), seed, global batch and the settings. Nothing is materialised beyond one window, so two billion
rows start as quickly as two thousand. All shuffling is integer arithmetic of our own, so no library's
release changes it.

Legend: B rows of a global batch, W rows of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from darkroom.data.draws import mix
from darkroom.errors import InputError

Ints = npt.NDArray[np.int64]


PAGE = 4096  # rows whose bits are counted together


class Chosen:
    """Ascending positions of chosen rows, as an array would hold them, in a bit for each row there is.

    Two billion rows cost 250 MB, however many are chosen; an array costs 8 bytes for each chosen one.
    `parts` are positions in any order.
    """

    def __init__(self, num_rows: int, parts: Iterable[Ints]) -> None:
        pages = -(-num_rows // PAGE)
        self._bits: npt.NDArray[np.uint8] = np.zeros((pages, PAGE // 8), dtype=np.uint8)
        flat = self._bits.reshape(-1)
        for positions in parts:
            np.bitwise_or.at(flat, positions >> 3, (1 << (positions & 7)).astype(np.uint8))
        counts = np.array([int(np.bitwise_count(page).sum()) for page in self._bits], dtype=np.int64)
        self._before: Ints = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, index: Ints) -> Ints:
        """Positions of indices 0..len-1, of any shape."""
        flat = np.asarray(index, dtype=np.int64).ravel()
        pages = np.searchsorted(self._before, flat, side="right") - 1
        out = np.empty_like(flat)
        for page in np.unique(pages).tolist():
            here = pages == page
            inside = np.flatnonzero(np.unpackbits(self._bits[page], bitorder="little"))
            out[here] = page * PAGE + inside[flat[here] - self._before[page]]
        return out.reshape(np.shape(index))


class HasRows(Protocol):
    """A fragment of a store, as far as the order cares."""

    @property
    def num_rows(self) -> int:
        """Its live rows."""
        ...


RowsLike: TypeAlias = "Rows | Chosen | int | Ints | Sequence[HasRows]"


class Indexed(Protocol):
    """Rows that find their positions themselves."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def positions(self, index: npt.ArrayLike) -> Ints:
        """Store positions of indices 0..len-1; ascending where the indices ascend."""
        ...


# What a key is for. Rows and slots keep off the numbers of `draws.Purpose`, which are hashed with the same
# parts: rows that came sorted by the number that is their timestep would share one timestep in a batch.
_BLOCKS, _HELD, _BUCKET = 1, 3, 5
_ROWS, _SLOTS = 1002, 1004
_FEISTEL_ROUNDS = 7
_GOLDEN_RATIO = 0.6180339887498949  # its multiples, modulo 1, cover [0, 1) evenly


class OrderSettings(BaseModel):
    """How rows are shuffled. Part of the order: another value is another order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shuffle: bool = Field(True, description="False reads the rows as they lie in the store")
    block_rows: int = Field(64, gt=0, description="neighbouring rows that are read together, in one request")
    window_blocks: int = Field(
        128, gt=0, description="blocks shuffled among each other; a window of rows is held in memory"
    )


@dataclass(frozen=True)
class Rows:
    """The rows an order runs over: all of a store or a selection, with or without the held-out ones.

    `positions` turns indices 0..count-1 into store positions in O(1) memory for any number of rows, unless a
    selection was given: ascending int64 positions, 8 bytes a row, or Chosen, a bit a row of the store.
    """

    total: int
    selected: Ints | Chosen | None = None
    stride: int = 0  # one row of every `stride` is held out; 0: none
    strata: int = 0  # how many strides hold one out
    held: bool = False  # this is the held-out side

    @classmethod
    def of(cls, rows: RowsLike) -> Rows:
        """Rows from a count, an array of positions, Chosen, a list of fragments (their `num_rows`), or
        Rows themselves."""
        if isinstance(rows, Rows):
            return rows
        if isinstance(rows, Chosen):
            return cls(len(rows), rows)
        if isinstance(rows, (int, np.integer)):
            return cls(int(rows))
        if isinstance(rows, Sequence) and len(rows) and hasattr(rows[0], "num_rows"):
            return cls(sum(fragment.num_rows for fragment in rows))
        selected: Ints = np.asarray(rows, dtype=np.int64)
        if selected.ndim != 1 or (np.diff(selected) <= 0).any():
            raise InputError("positions of rows must be one ascending list without doubles")
        return cls(len(selected), selected)

    def split(self, holdout: float | int) -> tuple[Rows, Rows]:
        """Training and held-out rows; the held-out ones are the same for every seed.

        A fraction holds out one row of every round(1/fraction), chosen by a hash of the stride's number:
        rows appended later never move a held-out row into training. A number holds out exactly so many,
        evenly spread, but which ones changes when the store has grown. InputError when nothing would be
        left to train on.
        """
        if not holdout >= 0:  # nor is NaN
            raise InputError(f"holdout {holdout}", allowed="0 or more")
        if holdout == 0:
            return self, replace(self, held=True)
        stride, strata = self._strides(holdout)
        if stride < 2:
            raise InputError(
                f"holdout {holdout} of {self.total} rows",
                allowed="a fraction up to 0.5 or up to half of the rows",
            )
        train = replace(self, stride=stride, strata=strata)
        return train, replace(train, held=True)

    def _strides(self, holdout: float | int) -> tuple[int, int]:
        if isinstance(holdout, float) and holdout < 1:
            stride = round(1 / holdout)
            return stride, -(-self.total // stride)
        if holdout % 1:  # as is infinity
            raise InputError(f"holdout {holdout}", allowed="a fraction below 1, or a whole number of rows")
        return self.total // int(holdout), int(holdout)

    def others(self) -> Rows:
        """The other side of a holdout; no rows where nothing is held out."""
        return replace(self, held=not self.held)

    def holds(self, positions: Ints) -> npt.NDArray[np.bool_]:
        """Which of these positions are among the rows, where no selection was given."""
        assert self.selected is None
        if not self.strata:
            return np.full(len(positions), not self.held)
        stratum = positions // self.stride
        held = (stratum < self.strata) & (positions % self.stride == self._held_offset(stratum))
        among: npt.NDArray[np.bool_] = held == self.held
        return among

    def _held_offset(self, stratum: Ints) -> Ints:
        return (mix(_HELD, stratum) % np.uint64(max(self.stride, 1))).astype(np.int64)

    @property
    def _num_held(self) -> int:
        if not self.strata:
            return 0
        last = self.strata - 1
        inside = last * self.stride + int(self._held_offset(np.array([last]))[0]) < self.total
        return self.strata - (not inside)

    def __len__(self) -> int:
        return self._num_held if self.held else self.total - self._num_held

    def positions(self, index: npt.ArrayLike) -> Ints:
        """Store positions of indices 0..len-1; ascending where the indices ascend."""
        i = np.asarray(index, dtype=np.int64)
        if self.held:
            i = i * self.stride + self._held_offset(i)
        elif self.strata:
            stratum = i // (self.stride - 1)
            offset = i - stratum * (self.stride - 1)
            inside = stratum * self.stride + offset + (offset >= self._held_offset(stratum))
            i = np.where(stratum < self.strata, inside, i + self.strata)
        return i if self.selected is None else self.selected[i]


def permute(index: Ints, size: int, *key: int, inverse: bool = False) -> Ints:
    """A keyed bijection of 0..size-1, vectorised, without a table.

    A Feistel network over the next power of four, walked until it lands inside (cycle walking: Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    rounds = range(_FEISTEL_ROUNDS)[:: -1 if inverse else 1]
    out = np.array(index, dtype=np.uint64)
    todo = np.arange(out.size)
    while todo.size:
        left, right = out[todo] >> half, out[todo] & mask
        for number in rounds:
            if inverse:
                left, right = right ^ (mix(*key, number, left) & mask), left
            else:
                left, right = right, left ^ (mix(*key, number, right) & mask)
        out[todo] = (left << half) | right
        todo = todo[out[todo] >= np.uint64(size)]
    return out.astype(np.int64)


@dataclass(frozen=True)
class BatchRows:
    """The rows of one global batch, ascending by position, so that a rank's slice touches few blocks."""

    k: int
    epochs_B: Ints
    indices_B: Ints  # into the order's own rows
    positions_B: Ints  # into the store
    size: tuple[int, int] | None = None  # (width, height) of the batch's bucket

    def __len__(self) -> int:
        return len(self.positions_B)

    def rank(self, rank: int, world_size: int) -> BatchRows:
        """This rank's contiguous share; all ranks' shares one after the other are the batch."""
        if len(self) % world_size:
            raise InputError(
                f"a global batch of {len(self)} over {world_size} ranks", allowed="a multiple of the ranks"
            )
        share = len(self) // world_size
        cut = slice(rank * share, (rank + 1) * share)
        return replace(
            self,
            epochs_B=self.epochs_B[cut],
            indices_B=self.indices_B[cut],
            positions_B=self.positions_B[cut],
        )


class SampleOrder(Protocol):
    """What the loader needs to know of an order."""

    global_batch: int
    num_rows: int
    window_rows: int
    block_rows: int

    def batch(self, k: int) -> BatchRows:
        """The rows of global batch k."""
        ...

    def positions(self, index: npt.ArrayLike) -> Ints:
        """Store positions of the order's own indices."""
        ...

    def block_of(self, index: Ints) -> Ints:
        """The number of the block each index lies in."""
        ...

    def block(self, number: int) -> tuple[int, int]:
        """First index and length of a block."""
        ...


class Order:
    """The endless stream of one store's rows, cut into global batches.

    `rows` is a row count, the store's fragments, an ascending array of positions, Rows, or what finds its
    positions itself.
    """

    def __init__(
        self,
        rows: RowsLike | Indexed,
        *,
        seed: int,
        global_batch: int,
        settings: OrderSettings | None = None,
    ) -> None:
        self.rows = cast(Indexed, rows) if hasattr(rows, "positions") else Rows.of(rows)
        self.settings = settings or OrderSettings()
        self.seed, self.global_batch = seed, global_batch
        self.num_rows = len(self.rows)
        if self.num_rows == 0:
            raise InputError("there is no row to read", mend="import pictures, or widen the filter")
        if global_batch < 1:
            raise InputError(f"global_batch {global_batch}", allowed="1 or more")
        self.block_rows = self.settings.block_rows
        self.window_rows = self.block_rows * self.settings.window_blocks
        self._num_blocks = -(-self.num_rows // self.block_rows)
        self._tail_place: Callable[[int], int] = lru_cache(maxsize=8)(self._find_tail)
        self._window: Callable[[int, int], Ints] = lru_cache(maxsize=4)(self._shuffle_window)

    @property
    def batches_per_epoch(self) -> float:
        """Global batches in one pass over the rows."""
        return self.num_rows / self.global_batch

    def positions(self, index: npt.ArrayLike) -> Ints:
        """Store positions of the order's own indices."""
        return self.rows.positions(index)

    def block_of(self, index: Ints) -> Ints:
        """The number of the block each index lies in."""
        return index // self.block_rows

    def block(self, number: int) -> tuple[int, int]:
        """First index and length of a block; the last one may be short."""
        first = number * self.block_rows
        return first, min(self.block_rows, self.num_rows - first)

    def batch(self, k: int) -> BatchRows:
        """The rows of global batch k, ascending by position and then by epoch."""
        epochs, indices = self.items(k * self.global_batch, self.global_batch)
        by_index = np.lexsort((epochs, indices))
        indices = indices[by_index]
        return BatchRows(k, epochs[by_index], indices, self.positions(indices))

    def items(self, start: int, count: int) -> tuple[Ints, Ints]:
        """Epochs and indices of `count` items of the stream from item `start`."""
        epochs, indices = [], []
        while count:
            epoch, offset = divmod(start, self.num_rows)
            part = self._within_window(epoch, offset, count)
            epochs.append(np.full(len(part), epoch, dtype=np.int64))
            indices.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(epochs), np.concatenate(indices)

    def _within_window(self, epoch: int, offset: int, count: int) -> Ints:
        """At most `count` indices from the epoch's item `offset`, up to the end of its window."""
        if not self.settings.shuffle:
            return np.arange(offset, min(offset + count, self.num_rows), dtype=np.int64)
        window = self._window_of(epoch, offset)
        first = self._items_before(epoch, window * self.settings.window_blocks)
        return self._window(epoch, window)[offset - first : offset - first + count]

    def _find_tail(self, epoch: int) -> int:
        """Where this epoch's order puts the last block, the only one that may be short."""
        last = np.array([self._num_blocks - 1])
        return int(permute(last, self._num_blocks, self.seed, _BLOCKS, epoch, inverse=True)[0])

    def _items_before(self, epoch: int, place: int) -> int:
        """Items in the first `place` blocks of the epoch's order."""
        missing = self._num_blocks * self.block_rows - self.num_rows
        return place * self.block_rows - (missing if place > self._tail_place(epoch) else 0)

    def _window_of(self, epoch: int, offset: int) -> int:
        window = offset // self.window_rows
        next_start = self._items_before(epoch, (window + 1) * self.settings.window_blocks)
        return window + (offset >= next_start)

    def _shuffle_window(self, epoch: int, window: int) -> Ints:
        """All indices of a window in the order they are served."""
        first = window * self.settings.window_blocks
        places = np.arange(first, min(first + self.settings.window_blocks, self._num_blocks))
        blocks = permute(places, self._num_blocks, self.seed, _BLOCKS, epoch)
        index = (blocks[:, None] * self.block_rows + np.arange(self.block_rows)).ravel()
        index = index[index < self.num_rows]
        return index[np.argsort(mix(self.seed, _ROWS, epoch, index), kind="stable")]


def _indexed(rows: npt.ArrayLike | Indexed) -> Indexed:
    return cast(Indexed, rows) if hasattr(rows, "positions") else Rows.of(np.asarray(rows))


class BucketOrder:
    """An order in which every global batch holds rows of one aspect-ratio bucket.

    Each bucket has its own endless stream. A round of ceil(rows / B) batches deals the batches to the
    buckets by systematic sampling: in every round a bucket gets its share rounded up or down, over many
    rounds exactly its share; within the round they are shuffled. A bucket smaller than the global batch
    repeats rows within a batch, each time in a later epoch (so with other noise). Costs as little as Order
    where the buckets' rows find their positions themselves (`bucket_rows`), 8 bytes a row where they are
    listed.
    """

    def __init__(
        self,
        buckets: Mapping[tuple[int, int], npt.ArrayLike | Indexed],
        *,
        seed: int,
        global_batch: int,
        settings: OrderSettings | None = None,
    ) -> None:
        listed = {size: _indexed(rows) for size, rows in sorted(buckets.items())}
        kept = {size: rows for size, rows in listed.items() if len(rows)}
        if not kept:
            raise InputError("there is no row to read", mend="import pictures, or widen the filter")
        self.seed, self.global_batch = seed, global_batch
        self.sizes = list(kept)
        self.settings = settings or OrderSettings()
        keys = mix(seed, _BUCKET, np.array([w << 32 | h for w, h in kept])).tolist()
        self.orders = [
            Order(rows, seed=key, global_batch=global_batch, settings=self.settings)
            for key, rows in zip(keys, kept.values(), strict=True)
        ]
        counts = np.array([order.num_rows for order in self.orders], dtype=np.int64)
        self._first_index: Ints = np.concatenate([[0], np.cumsum(counts)])
        blocks = -(-counts // self.settings.block_rows)
        self._first_block: Ints = np.concatenate([[0], np.cumsum(blocks)])
        self.num_rows = int(counts.sum())
        self.block_rows = self.settings.block_rows
        self.window_rows = sum(min(order.window_rows, order.num_rows) for order in self.orders)
        self.batches_per_round = -(-self.num_rows // global_batch)
        self._round: Callable[[int], tuple[Ints, Ints]] = lru_cache(maxsize=4)(self._deal)

    @property
    def batches_per_epoch(self) -> float:
        """Global batches that together hold as many rows as there are."""
        return self.num_rows / self.global_batch

    def positions(self, index: npt.ArrayLike) -> Ints:
        """Store positions of the order's own indices (all buckets, one after the other)."""
        i = np.asarray(index, dtype=np.int64)
        bucket = np.searchsorted(self._first_index, i, side="right") - 1
        out = np.empty_like(i)
        for b in np.unique(bucket):
            here = bucket == b
            out[here] = self.orders[b].positions(i[here] - self._first_index[b])
        return out

    def block_of(self, index: Ints) -> Ints:
        """The number of the block each index lies in; a block never spans two buckets."""
        bucket = np.searchsorted(self._first_index, index, side="right") - 1
        blocks: Ints = self._first_block[bucket] + (index - self._first_index[bucket]) // self.block_rows
        return blocks

    def block(self, number: int) -> tuple[int, int]:
        """First index and length of a block."""
        bucket = int(np.searchsorted(self._first_block, number, side="right")) - 1
        first, count = self.orders[bucket].block(number - int(self._first_block[bucket]))
        return first + int(self._first_index[bucket]), count

    def batch(self, k: int) -> BatchRows:
        """The rows of global batch k, all of one bucket, whose (width, height) is `size`."""
        number, slot = divmod(k, self.batches_per_round)
        buckets, ordinals = self._round(number)
        bucket = int(buckets[slot])
        rows = self.orders[bucket].batch(int(ordinals[slot]))
        indices = rows.indices_B + self._first_index[bucket]
        return replace(rows, k=k, indices_B=indices, size=self.sizes[bucket])

    def _quotas(self, rounds: int) -> Ints:
        """Batches of each bucket in the first rounds, [rounds, buckets]: its share, rounded by an even
        shift."""
        start = mix(self.seed, _SLOTS, np.array([0]))[0] / 2.0**64
        shift = (start + np.arange(rounds) * _GOLDEN_RATIO) % 1.0
        share = self._first_index / self.num_rows * self.batches_per_round
        edges: Ints = np.ceil(share[None, :] - shift[:, None]).astype(np.int64)
        return np.diff(edges, axis=1)

    def _deal(self, number: int) -> tuple[Ints, Ints]:
        """Bucket of every slot of a round, and which batch of that bucket's own stream it is."""
        quotas = self._quotas(number + 1)
        buckets = np.repeat(np.arange(len(self.orders)), quotas[number])
        slots = np.arange(self.batches_per_round)
        if self.settings.shuffle:
            buckets = buckets[np.argsort(mix(self.seed, _SLOTS, number, slots), kind="stable")]
        by_bucket = np.argsort(buckets, kind="stable")
        ordinals = np.empty_like(slots)
        ordinals[by_bucket] = slots - np.searchsorted(buckets[by_bucket], buckets[by_bucket])
        return buckets, ordinals + quotas[:number].sum(axis=0)[buckets]
