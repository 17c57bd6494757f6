"""Blocks of neighbouring rows: read in one request, parsed without copying, kept while they are needed.

Legend: B rows of a batch, N rows of a block, C channels, h and w latent pixels, L tokens, D width of a state.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from darkroom.data.images import PictureError, decode, resize_crop
from darkroom.data.order import Ints, SampleOrder
from darkroom.data.row_files import RowFiles
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
    """Parsed rows, the bytes that they hold in memory, and the order's index of a block's first row."""

    values: dict[str, Values]
    memory_bytes: int
    first: int = 0


# ---- parsing


def _bytes_of(column: pa.Array, missing: str) -> tuple[Array, Array]:
    """The data of a binary column as uint8 and its N+1 offsets; no copy."""
    if column.null_count:
        raise ColumnError(f"{column.null_count} of {len(column)} rows read {missing}")
    _, offsets, data = column.buffers()
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    bounds = np.frombuffer(offsets, dtype=width)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, np.uint8), bounds


def _float16_rows(column: pa.Array, shapes: Array, missing: str) -> Values:
    """Rows of float16 [N, *shape], or a list of arrays where the shapes (int [N, sides]) differ."""
    data, bounds = _bytes_of(column, missing)
    if len(shapes) and (shapes == shapes[0]).all():
        whole = data[bounds[0] : bounds[-1]].view(np.float16)
        return whole.reshape(len(shapes), *shapes[0].tolist())
    views = (data[a:b].view(np.float16) for a, b in pairwise(bounds.tolist()))
    return [view.reshape(shape) for view, shape in zip(views, shapes.tolist(), strict=True)]


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
    shapes = np.stack([np.full_like(per_pixel, 2), per_pixel // 2, heights, widths], axis=1)
    return {"moments": _float16_rows(moments, shapes, f"are null in {name}")}


def parse_text(column: pa.Array, name: str) -> dict[str, Values]:
    """`text` float16 [N, L, D], and for SDXL `pooled` [N, P], of a prepared text column."""
    _whole(column, name, "--text ")
    shapes = np.stack([column.field(side).to_numpy(zero_copy_only=False) for side in ("length", "width")], 1)
    values: dict[str, Values] = {"text": _float16_rows(column.field("states"), shapes, f"are null in {name}")}
    pooled = column.field("pooled")
    if pooled.null_count < len(pooled):
        _, bounds = _bytes_of(pooled, f"lack the pooled state in {name}")
        sizes = np.diff(bounds) // 2
        values["pooled"] = _float16_rows(pooled, sizes[:, None], f"lack the pooled state in {name}")
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
    start, shape = 0, out.shape[1:]
    for values, pick in zip(blocks, picks, strict=True):
        end = start + len(pick)
        if isinstance(values, np.ndarray) and values.shape[1:] == shape:
            values.take(pick, axis=0, out=out[start:end], mode="clip")
        else:
            for place, row in enumerate(pick.tolist(), start):
                if values[row].shape != shape:
                    raise InputError(
                        f"rows of {values[row].shape} and {shape} in one batch",
                        mend="set data.buckets=true, so that a batch holds one size",
                    )
                out[place] = values[row]
        start = end


# ---- reading

SESSIONS = 128
"""The most fragments of a store whose files stay open, one or more each."""


class _FragmentRows:
    """Columns of a fragment, opened anew for every block."""

    def __init__(self, fragment: Any, columns: list[str], schema: Any) -> None:
        self._fragment, self._columns, self._schema = fragment, columns, schema

    @cached_property
    def content(self) -> bytes:
        """A hash of what the rows are: files are named anew when they change, and a column that was given
        another's name has another number in the schema.
        """
        held = self._fragment.metadata.to_json()
        parts = [held[name] for name in ("files", "overlays", "deletion_file", "physical_rows")]
        columns = [_numbers(field) for field in self._schema.fields() if field.name() in self._columns]
        return hashlib.sha256(json.dumps([columns, *parts]).encode()).digest()

    def take(self, rows: list[int]) -> pa.Table:
        """Rows by their number in the fragment."""
        return self._fragment.take(rows, columns=self._columns)


def _numbers(field: Any) -> list[Any]:
    """A field of a Lance schema: its name, its number and its children's."""
    return [field.name(), field.id(), [_numbers(child) for child in field.children()]]


class _OpenRows(_FragmentRows):
    """Columns of a fragment whose files stay open from the first block on, their footers decoded once."""

    @cached_property
    def _session(self) -> Any:
        return self._fragment.open_session(self._columns)

    def take(self, rows: list[int]) -> pa.Table:
        """Rows by their number in the fragment."""
        return self._session.take(rows)


class Reader:
    """Reads rows of an order from a store, by fragment, only the columns that are wanted, from
    `files` where they are kept there."""

    def __init__(
        self, store: Store, order: SampleOrder, wanted: Sequence[Wanted], files: RowFiles | None = None
    ) -> None:
        known = store.columns()
        for want in wanted:
            if want.column not in known:
                raise ColumnError(f"{store.path} has no column {want.column}", allowed=", ".join(known))
        self._order, self._wanted, self._files = order, list(wanted), files
        self._starts = np.array([fragment.offset for fragment in store.fragments], dtype=np.int64)
        self._columns = [want.column for want in wanted]
        fragments = list(zip(store.dataset.get_fragments(), store.schemas(), strict=True))
        self._fragments: list[_FragmentRows] = [
            _FragmentRows(fragment, self._columns, schema) for fragment, schema in fragments
        ]
        if len(fragments) <= SESSIONS:
            self._fragments = [_OpenRows(one, self._columns, schema) for one, schema in fragments]

    def block(self, number: int) -> Block:
        """A whole block of the order; from one file, where rows are kept."""
        first, count = self._order.block(number)
        if not self._columns:
            return Block({}, 0, first)
        parts = self._parts(np.arange(first, first + count))
        return replace(self._parsed(self._kept(parts)), first=first)

    def rows(self, indices: Ints) -> Block:
        """Rows by the order's ascending indices; repeats are allowed. Each from a file of its own, where rows
        are kept; those that lack are read together.
        """
        if not self._columns:
            return Block({}, 0)
        if self._files is None:
            return self._parsed(_table(self._parts(indices)))
        names = [_name(self._parts(index)) for index in indices[:, None]]
        places = {name: i for i, name in enumerate(names)}
        found = {name: self._files.get(name) for name in places}
        lacking = [name for name, table in found.items() if table is None]
        if lacking:
            table = _table(self._parts(indices[[places[name] for name in lacking]]))
            for i, name in enumerate(lacking):
                found[name] = table.slice(i, 1)
                self._files.keep(name, table.slice(i, 1))
        return self._parsed(pa.concat_tables([found[name] for name in names]).combine_chunks())

    def row_bytes(self, index: Ints) -> float:
        """What a row holds in memory, by the one at `index`, or its block, where rows are kept."""
        if self._files is None:
            return self.rows(index).memory_bytes
        number = int(self._order.block_of(index)[0])
        return self.block(number).memory_bytes / self._order.block(number)[1]

    def _kept(self, parts: list[_Part]) -> pa.Table:
        if self._files is None:
            return _table(parts)
        name = _name(parts)
        table = self._files.get(name)
        if table is None:
            table = _table(parts)
            self._files.keep(name, table)
        return table

    def _parts(self, indices: Ints) -> list[_Part]:
        """Which rows of which fragments are meant, in order."""
        positions = self._order.positions(indices)
        fragments = np.searchsorted(self._starts, positions, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(fragments)) + 1).tolist(), len(positions)]
        inside = positions - self._starts[fragments]
        return [(self._fragments[fragments[a]], inside[a:b].tolist()) for a, b in pairwise(cuts)]

    def _parsed(self, table: pa.Table) -> Block:
        values: dict[str, Values] = {}
        memory_bytes = 0
        for want in self._wanted:
            column = table.column(want.column).chunk(0)
            parsed = want.parse(column, want.column)
            arrays = [part for part in parsed.values() if isinstance(part, np.ndarray)]
            memory_bytes += sum(array.nbytes for array in arrays) if arrays else column.nbytes
            values |= parsed
        return Block(values, memory_bytes)


_Part: TypeAlias = tuple[_FragmentRows, list[int]]


def _name(parts: Sequence[_Part]) -> str:
    """What the file of these rows is called: a hash of what they are."""
    found = hashlib.sha256()
    for fragment, rows in parts:
        found.update(fragment.content + np.array([len(rows), *rows], np.int64).tobytes())
    return found.hexdigest()


def _table(parts: Sequence[_Part]) -> pa.Table:
    """Rows of fragments, read and put together; each column is one chunk."""
    tables = [fragment.take(rows) for fragment, rows in parts]
    return (pa.concat_tables(tables) if len(tables) > 1 else tables[0]).combine_chunks()


class BlockCache:
    """Blocks in memory, the least recently used ones released beyond a limit; each is read by one thread."""

    def __init__(self, read: Callable[[int], Block], capacity_bytes: int) -> None:
        self._read, self._capacity_bytes = read, capacity_bytes
        self._blocks: OrderedDict[int, Block | Future[Block]] = OrderedDict()
        self._lock = threading.Lock()
        self.memory_bytes = 0

    def get(self, numbers: Sequence[int]) -> list[Block]:
        """Blocks, each read now unless it is there or another thread is reading it."""
        with self._lock:
            found = [self._blocks.get(number) for number in numbers]
            for number, block in zip(numbers, found, strict=True):
                if block is not None:
                    self._blocks.move_to_end(number)
        return [
            block if isinstance(block, Block) else self._awaited(number)
            for number, block in zip(numbers, found, strict=True)
        ]

    def _awaited(self, number: int) -> Block:
        with self._lock:
            known = self._blocks.setdefault(number, future := Future[Block]())
        if known is future:
            self._fill(number, future)
        return known if isinstance(known, Block) else known.result()

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
        with self._lock:
            if self._blocks.get(number) is future:  # else it was released while it was read
                self._blocks[number] = block
                self.memory_bytes += block.memory_bytes
                while self.memory_bytes > self._capacity_bytes and self._let_one_go(number):
                    pass
        future.set_result(block)

    def _let_one_go(self, newest: int) -> bool:
        for number, block in self._blocks.items():
            if number != newest and isinstance(block, Block):
                self.memory_bytes -= block.memory_bytes
                del self._blocks[number]
                return True
        return False
