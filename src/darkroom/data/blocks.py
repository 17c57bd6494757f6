"""Blocks of neighbouring rows: read in one request, parsed without copying, kept while they are needed.

Legend: B rows of a batch, N rows of a block, C channels, h and w latent pixels, L tokens, D width of a state.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from darkroom.data.images import PictureError, decode, resize_crop
from darkroom.data.order import Ints, SampleOrder
from darkroom.data.store import Store
from darkroom.errors import ColumnError, InputError, LoaderError

Array: TypeAlias = npt.NDArray[Any]
Values: TypeAlias = "Array | list[Any]"
"""One value a row: an array [N, ...], or a list where rows differ in size or are no numbers."""

Parse: TypeAlias = Callable[[pa.Array, str], dict[str, Values]]


@dataclass(frozen=True)
class Wanted:
    """A store column to read and how its values become named parts of a batch."""

    column: str
    parse: Parse


@dataclass(frozen=True)
class Block:
    """Parsed rows, and the bytes that they hold in memory."""

    values: dict[str, Values]
    memory_bytes: int


# ---- parsing


def _bytes_of(column: pa.Array, missing: str) -> tuple[Array, Array]:
    """The data of a binary column as uint8 and its N+1 offsets; no copy."""
    if column.null_count:
        raise ColumnError(f"{column.null_count} of {len(column)} rows read {missing}")
    _, offsets, data = column.buffers()
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    bounds = np.frombuffer(offsets, dtype=width)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, np.uint8), bounds


def _float16_rows(column: pa.Array, shapes: Sequence[tuple[int, ...]], missing: str) -> Values:
    """Rows of float16 [N, *shape], or a list of arrays where the shapes differ."""
    data, bounds = _bytes_of(column, missing)
    if len(set(shapes)) == 1:
        whole = data[bounds[0] : bounds[-1]].view(np.float16)
        return whole.reshape(len(shapes), *shapes[0])
    views = (data[a:b].view(np.float16) for a, b in pairwise(bounds.tolist()))
    return [view.reshape(shape) for view, shape in zip(views, shapes, strict=True)]


def _whole(column: pa.Array, name: str, verb: str) -> None:
    if column.null_count:
        raise ColumnError(
            f"{column.null_count} of {len(column)} rows read are null in {name}",
            mend=f"darkroom prepare {verb}encodes what is new",
        )


def parse_latents(column: pa.Array, name: str) -> dict[str, Values]:
    """`moments` float16 [N, 2, C, h, w] of a prepared latents column."""
    _whole(column, name, "")
    moments = column.field("moments")
    heights, widths = (column.field(side).to_numpy(zero_copy_only=False) for side in ("height", "width"))
    _, bounds = _bytes_of(moments, f"are null in {name}")
    per_pixel = np.diff(bounds) // (2 * heights.astype(np.int64) * widths)  # bytes: 2 a float16, C of 2
    sides = zip(per_pixel.tolist(), heights.tolist(), widths.tolist(), strict=True)
    shapes = [(2, c // 2, h, w) for c, h, w in sides]
    return {"moments": _float16_rows(moments, shapes, f"are null in {name}")}


def parse_text(column: pa.Array, name: str) -> dict[str, Values]:
    """`text` float16 [N, L, D], and for SDXL `pooled` [N, P], of a prepared text column."""
    _whole(column, name, "--text ")
    lengths, widths = (column.field(side).to_pylist() for side in ("length", "width"))
    shapes = list(zip(lengths, widths, strict=True))
    values: dict[str, Values] = {"text": _float16_rows(column.field("states"), shapes, f"are null in {name}")}
    pooled = column.field("pooled")
    if pooled.null_count < len(pooled):
        _, bounds = _bytes_of(pooled, f"lack the pooled state in {name}")
        sizes = [(int(size) // 2,) for size in np.diff(bounds)]
        values["pooled"] = _float16_rows(pooled, sizes, f"lack the pooled state in {name}")
    return values


def parse_plain(column: pa.Array, name: str) -> dict[str, Values]:
    """A column under its own name: numbers as an array, anything else as a list."""
    if column.null_count == 0 and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return {name: column.to_numpy(zero_copy_only=False)}
    return {name: column.to_pylist()}


def parse_bytes(column: pa.Array, name: str) -> dict[str, Values]:
    """Binary values as memory views into what was read."""
    data, bounds = _bytes_of(column, f"are null in {name}")
    held = data.data
    return {name: [held[a:b] for a, b in pairwise(bounds.tolist())]}


def decode_rows(column: pa.Array, name: str, *, side: int, background: str) -> dict[str, Values]:
    """`pixels` uint8 [N, 3, side, side]: pictures decoded and cut in the middle, for rows that stay in
    memory."""
    pictures = parse_bytes(column, name)[name]
    out = np.empty((len(pictures), 3, side, side), dtype=np.uint8)
    for i, picture in enumerate(pictures):
        out[i] = pixels_of(picture, (side, side), background=background)
    return {"pixels": out}


def pixels_of(
    picture: memoryview, size: tuple[int, int], *, background: str, at: tuple[float, float] = (0.5, 0.5)
) -> Array:
    """A picture's bytes as uint8 [3, H, W], scaled to cover `size` (width, height) and cut at (u, v)."""
    try:
        image = decode(bytes(picture), background=background)
    except PictureError as error:
        raise LoaderError(f"a stored picture cannot be decoded: {error}") from error
    return np.asarray(resize_crop(image, size, crop=at)).transpose(2, 0, 1)


def gather(blocks: Sequence[Values], picks: Sequence[Ints], out: Array) -> None:
    """Copy picked rows of blocks, one after the other, into `out` [B, ...]."""
    start = 0
    for values, pick in zip(blocks, picks, strict=True):
        end = start + len(pick)
        if isinstance(values, np.ndarray) and values.shape[1:] == out.shape[1:]:
            values.take(pick, axis=0, out=out[start:end], mode="clip")
        else:
            for place, row in enumerate(pick.tolist(), start):
                if values[row].shape != out.shape[1:]:
                    raise InputError(
                        f"rows of {values[row].shape} and {out.shape[1:]} in one batch",
                        mend="set data.buckets=true, so that a batch holds one size",
                    )
                out[place] = values[row]
        start = end


# ---- reading

SESSIONS = 128
"""The most fragments of a store whose files stay open, one or more each."""


class _FragmentRows:
    """Columns of a fragment, opened anew for every block."""

    def __init__(self, fragment: Any, columns: list[str]) -> None:
        self._fragment, self._columns = fragment, columns

    def take(self, rows: list[int]) -> pa.Table:
        """Rows by their number in the fragment."""
        return self._fragment.take(rows, columns=self._columns)


class _OpenRows(_FragmentRows):
    """Columns of a fragment whose files stay open from the first block on, their footers decoded once."""

    @cached_property
    def _session(self) -> Any:
        return self._fragment.open_session(self._columns)

    def take(self, rows: list[int]) -> pa.Table:
        """Rows by their number in the fragment."""
        return self._session.take(rows)


class Reader:
    """Reads rows of an order from a store, by fragment, only the columns that are wanted."""

    def __init__(self, store: Store, order: SampleOrder, wanted: Sequence[Wanted]) -> None:
        known = store.columns()
        for want in wanted:
            if want.column not in known:
                raise ColumnError(f"{store.path} has no column {want.column}", allowed=", ".join(known))
        self._order, self._wanted = order, list(wanted)
        self._starts = np.array([fragment.offset for fragment in store.fragments], dtype=np.int64)
        self._columns = [want.column for want in wanted]
        fragments = store.dataset.get_fragments()
        self._fragments: list[_FragmentRows] = [
            _FragmentRows(fragment, self._columns) for fragment in fragments
        ]
        if len(fragments) <= SESSIONS:
            self._fragments = [_OpenRows(fragment, self._columns) for fragment in fragments]

    def block(self, number: int) -> Block:
        """A whole block of the order."""
        first, count = self._order.block(number)
        return self.rows(np.arange(first, first + count))

    def rows(self, indices: Ints) -> Block:
        """Rows by the order's ascending indices; repeats are allowed."""
        if not self._columns:
            return Block({}, 0)
        positions = self._order.positions(indices)
        fragments = np.searchsorted(self._starts, positions, side="right") - 1
        cuts = np.flatnonzero(np.diff(fragments)) + 1
        tables = [
            self._fragments[which].take((part - self._starts[which]).tolist())
            for which, part in zip(fragments[np.r_[0, cuts]], np.split(positions, cuts), strict=True)
        ]
        table = (pa.concat_tables(tables) if len(tables) > 1 else tables[0]).combine_chunks()
        values: dict[str, Values] = {}
        memory_bytes = 0
        for want in self._wanted:
            column = table.column(want.column).chunk(0)
            parsed = want.parse(column, want.column)
            arrays = [part for part in parsed.values() if isinstance(part, np.ndarray)]
            memory_bytes += sum(array.nbytes for array in arrays) if arrays else column.nbytes
            values |= parsed
        return Block(values, memory_bytes)


class BlockCache:
    """Blocks in memory, the least recently used ones released beyond a limit; each is read by one thread."""

    def __init__(self, read: Callable[[int], Block], capacity_bytes: int) -> None:
        self._read, self._capacity_bytes = read, capacity_bytes
        self._blocks: OrderedDict[int, Future[Block]] = OrderedDict()
        self._lock = threading.Lock()
        self.memory_bytes = 0

    def get(self, number: int) -> Block:
        """The block, read now unless it is there or another thread is reading it."""
        with self._lock:
            future = self._blocks.get(number)
            mine = future is None
            if future is None:
                future = self._blocks[number] = Future()
            self._blocks.move_to_end(number)
        if mine:
            self._fill(number, future)
        return future.result()

    def has(self, number: int) -> bool:
        """Whether the block is there or on its way."""
        with self._lock:
            return number in self._blocks

    def release(self) -> None:
        """Keep nothing from now on: what is read or asked for later is handed out and not kept."""
        with self._lock:
            self._capacity_bytes = self.memory_bytes = 0
            self._blocks.clear()

    def _fill(self, number: int, future: Future[Block]) -> None:
        try:
            block = self._read(number)
        except BaseException as error:
            with self._lock:
                self._blocks.pop(number, None)
            future.set_exception(error)
            return
        future.set_result(block)
        with self._lock:
            if self._blocks.get(number) is not future:  # released while it was read
                return
            self.memory_bytes += block.memory_bytes
            while self.memory_bytes > self._capacity_bytes and self._let_one_go(number):
                pass

    def _let_one_go(self, newest: int) -> bool:
        for number, future in self._blocks.items():
            if number != newest and future.done():
                self.memory_bytes -= future.result().memory_bytes
                del self._blocks[number]
                return True
        return False
