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

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from darkroom.data.store import Chosen
from darkroom.errors import InputError

Ints = npt.NDArray[np.int64]


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
            if holdout < 0:
                raise InputError(f"holdout {holdout}", allowed="0 or more")
            stride = round(1 / holdout)
            return stride, -(-self.total // stride)
        if holdout != int(holdout) or holdout < 0:
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


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = np.float64(2.0**-53)

Keys = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a draw is for; part of its key, so new purposes never disturb the others. Never renumber."""

    NOISE = 1
    TIMESTEP = 2
    CROP_X = 3
    CROP_Y = 4
    FLIP = 5
    DROPOUT = 6
    POSTERIOR = 7
    OFFSET_NOISE = 8
    PROMPT = 9
    TAGS = 10
    MULTIRES = 11
    PERTURBATION = 12
    TAG_DROPOUT = 13
    WILDCARDS = 14
    FURTHER = 15
    COLOUR = 16
    OFFSET_STRENGTH = 17
    PERTURBATION_STRENGTH = 18


def _mix_int(h: int, part: int) -> int:
    h = ((h ^ part) + _GOLDEN) & _MASK
    h = ((h ^ (h >> 30)) * _A) & _MASK
    h = ((h ^ (h >> 27)) * _B) & _MASK
    return h ^ (h >> 31)


def _mix_array(h: Keys, part: Keys) -> Keys:
    h = (h ^ part) + np.uint64(_GOLDEN)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(_A)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(_B)
    return h ^ (h >> np.uint64(31))


def mix(*parts: int | npt.NDArray[np.int64] | Keys) -> Keys:
    """Hash of integers, elementwise over arrays, to uint64 (the last part is an array).

    Each part passes through the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014). Integer arithmetic only: the same on every machine and numpy
    release. Leading single numbers are mixed as Python's integers, ten times as quick as an array of one.
    """
    plain = 0
    h: Keys | None = None
    for part in parts:
        if h is None and not isinstance(part, np.ndarray):
            plain = _mix_int(plain, int(part) & _MASK)
            continue
        value = (
            part.astype(np.uint64) if isinstance(part, np.ndarray) else np.array(int(part) & _MASK, np.uint64)
        )
        h = _mix_array(np.full(1, plain, dtype=np.uint64) if h is None else h, value)
    if h is None:
        raise TypeError("mix needs an array among its parts")
    return h


def uniform(
    seed: int, epochs_B: npt.NDArray[np.int64], positions_B: npt.NDArray[np.int64], purpose: Purpose
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) a row, float64 [B]."""
    return (mix(seed, int(purpose), epochs_B, positions_B) >> np.uint64(11)).astype(np.float64) * _UNIT


def normal(
    seed: int,
    epochs_B: npt.NDArray[np.int64],
    positions_B: npt.NDArray[np.int64],
    shape: Sequence[int],
    purpose: Purpose = Purpose.NOISE,
) -> npt.NDArray[np.float32]:
    """Standard normal draws, float32 [B, *shape]: each row from its own Philox counter.

    Philox 4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by the seed and
    counted from (row, epoch, purpose); the normals are numpy's ziggurat. One generator is set anew for
    every row, which costs a quarter of building one.
    """
    out = np.empty((len(positions_B), *shape), dtype=np.float32)
    bits = np.random.Philox(key=seed & _MASK)
    generator, state = np.random.Generator(bits), bits.state
    counter = state["state"]["counter"]
    counter[3] = int(purpose)
    state["buffer_pos"], state["has_uint32"] = 4, 0  # nothing left over from the row before
    for row, epoch, position in zip(out, epochs_B.tolist(), positions_B.tolist(), strict=True):
        counter[0], counter[1], counter[2] = 0, position, epoch
        bits.state = state
        generator.standard_normal(dtype=np.float32, out=row)
    return out


def noise(
    seed: int, epochs_B: npt.NDArray[np.int64], positions_B: npt.NDArray[np.int64], shape: Sequence[int]
) -> npt.NDArray[np.float32]:
    """The diffusion noise of each row, float32 [B, *shape]."""
    return normal(seed, epochs_B, positions_B, shape, Purpose.NOISE)


def pyramid(
    seed: int,
    epochs_B: npt.NDArray[np.int64],
    positions_B: npt.NDArray[np.int64],
    shape: Sequence[int],
    iterations: int,
    discount: float,
) -> npt.NDArray[np.float32]:
    """What multi-resolution noise adds to plain noise, float32 [B, C, h, w]: ever coarser noises.

    Iteration i has noise of 1 / r^i of the sides, enlarged bilinearly, times discount^i; r is drawn anew from
    [2, 4) each time, and 1 pixel ends it (Whitaker 2023, as kohya's trainers have it). Each row has its own.
    """
    out = np.zeros((len(positions_B), *shape), dtype=np.float32)
    channels, height, width = shape
    keys = mix(seed, int(Purpose.MULTIRES), epochs_B, positions_B)
    for row, key in zip(out, keys.tolist(), strict=True):
        generator = np.random.Generator(np.random.Philox(key=key))
        for i in range(iterations):
            r = float(generator.random()) * 2 + 2
            sides = max(1, int(height / r**i)), max(1, int(width / r**i))
            coarse = generator.standard_normal((channels, *sides), dtype=np.float32)
            row += enlarged(coarse, (height, width)) * np.float32(discount**i)
            if 1 in sides:
                break
    return out


def enlarged(values: npt.NDArray[np.float32], size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Bilinear enlargement of [C, h, w] to a size, pixels' centres kept, as torch's interpolate does."""
    for axis, new in zip((1, 2), size, strict=True):
        old = values.shape[axis]
        at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, None).astype(np.float32)
        low = np.minimum(at.astype(np.int64), old - 1)
        high = np.minimum(low + 1, old - 1)
        share = (at - low).reshape((-1, 1) if axis == 1 else -1)
        values = values.take(low, axis) * (1 - share) + values.take(high, axis) * share
    return values.astype(np.float32, copy=False)


def shuffled_tags(caption: str, key: int, keep: int) -> str:
    """The parts of a caption between commas in an order that `key` decides; the first `keep` stay."""
    tags = [tag for part in caption.split(",") if (tag := part.strip())]
    order = np.argsort(mix(key, np.arange(max(len(tags) - keep, 0))), kind="stable")
    return ", ".join([*tags[:keep], *(tags[keep + i] for i in order.tolist())])


def kept_tags(
    caption: str, key: int, keep: int, dropout: float = 0.0, least: int = 1, share: float | None = None
) -> str:
    """What is left of a caption's parts between commas, the first `keep` always.

    Of the others the first `least` and a `share` of the rest (all, where that is None) are there yet; each of
    these is left out with probability `dropout`.
    """
    tags = [tag for part in caption.split(",") if (tag := part.strip())]
    fixed, others = tags[:keep], tags[keep:]
    if share is not None:
        others = others[: int(share * (len(others) - least)) + least if len(others) > least else len(others)]
    if dropout:
        drawn = (mix(key, np.arange(len(others))) >> np.uint64(11)).astype(np.float64) * _UNIT
        others = [tag for tag, u in zip(others, drawn.tolist(), strict=True) if u >= dropout]
    return ", ".join([*fixed, *others])


class CaptionParts(NamedTuple):
    """A caption cut at its separators: what stays at the start and at the end, and what changes."""

    first: str
    changing: str
    last: str
    parted: bool

    def around(self, changed: str) -> str:
        """The caption with what changes changed."""
        if not self.parted:
            return changed
        return ", ".join(part for part in (self.first, changed, self.last) if part)


def parts_of(caption: str, separator: str) -> CaptionParts:
    """A caption's parts by the first and second of a separator; where there is none all of it changes."""
    if not separator or separator not in caption:
        return CaptionParts("", caption, "", parted=False)
    first, _, rest = caption.partition(separator)
    changing, _, last = rest.partition(separator)
    return CaptionParts(*(part.strip(" ,\n") for part in (first, changing, last)), parted=True)


WILDCARD = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")


def chosen_wildcards(caption: str, key: int) -> str:
    """A caption with one of its lines, and one of every {a|b|c}; the innermost braces first."""
    lines = [line for line in caption.splitlines() if line.strip()] or [""]
    caption, n = lines[int(mix(key, np.array([0]))[0]) % len(lines)], 0
    while found := WILDCARD.search(caption):
        n += 1
        options = found[1].split("|")
        option = options[int(mix(key, np.array([n]))[0]) % len(options)].strip()
        caption = caption[: found.start()] + option + caption[found.end() :]
    return caption
