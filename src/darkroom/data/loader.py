"""The loader: turns an order into batches of tensors, ahead of time, on threads.

Threads, not processes: Lance, Pillow, numpy and torch work outside Python's global lock, so nothing has to be
copied between processes, nothing lies in shared memory, and no dead process can be waited for.

Blocks of neighbouring rows are read whole and kept in memory as long as their window is served. Reading
runs a window ahead of the batches that are asked for, so a new window's blocks come in while the last one
is served.

Legend: B rows of a batch, C channels, h and w latent pixels, H and W pixels, L tokens, D width of a state.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from darkroom.data import draws
from darkroom.data.blocks import (
    Array,
    Block,
    BlockCache,
    Reader,
    Values,
    Wanted,
    decode_rows,
    gather,
    parse_bytes,
    parse_latents,
    parse_plain,
    parse_text,
    pixels_of,
)
from darkroom.data.draws import Purpose
from darkroom.data.images import ColourChange
from darkroom.data.order import BatchRows, Ints, Order, OrderSettings, SampleOrder
from darkroom.data.row_files import RowFiles
from darkroom.data.store import Store
from darkroom.errors import InputError, LoaderError

Draw = Literal[
    "noise",
    "posterior",
    "u",
    "offset",
    "offset_strength",
    "multires",
    "perturbation",
    "perturbation_strength",
    "further",
]
"""noise float32 [B, C, h, w]; posterior likewise, for mean + std * posterior; u float64 [B] in [0, 1), for
the timestep; offset float32 [B, C, 1, 1], for offset noise; multires, perturbation float32 [B, C, h, w];
offset_strength, perturbation_strength float32 [B, 1, 1, 1] in [0, 1), a factor of these;
further float32 [B, N, C, h, w], more noise."""

CLOSED = "the loader was closed while a batch was awaited"


class ReadSettings(BaseModel):
    """What of its rows a batch holds, and which draws come with it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    latents: str | None = Field(None, description="prepared column to read as `moments`")
    text: str | None = Field(None, description="prepared column to read as `text` (and `pooled`)")
    caption: bool = Field(False, description="read captions")
    pixels: int | None = Field(None, gt=0, description="decode pictures to this side; buckets say their own")
    crop: Literal["centre", "random"] = Field("centre", description="where pictures are cut")
    flip: bool = Field(False, description="mirror half of the pictures")
    colour: ColourChange = Field(ColourChange(), description="how colours vary")
    background: str = Field("white", description="colour laid under transparent pictures")
    columns: tuple[str, ...] = Field((), description="further columns, under their own names")
    prompts: tuple[str, ...] = Field((), description="one of these is the caption of rows that have none")
    prompt_column: str | None = Field(None, description="column with the caption of rows that have none")
    prompts_replace: bool = Field(False, description="and of those that have one")
    shuffle_tags: bool = Field(False, description="deal a caption's parts between commas anew each time")
    keep_tokens: int = Field(0, ge=0, description="parts at the start that stay there")
    keep_tokens_separator: str = Field("", description="what ends the parts at the start that stay there")
    secondary_separator: str = Field("", description="what joins some parts to one, and becomes a comma")
    tag_dropout: float = Field(0.0, ge=0, lt=1, description="share of a caption's parts that are left out")
    token_warmup: tuple[int, int] = Field(
        (0, 1), description="steps in which a caption grows to all of its parts, and with how many it begins"
    )
    wildcards: bool = Field(False, description="draw one of {a|b} in a caption, and one of its lines")
    around: tuple[str, str] = Field(("", ""), description="what is put before and after every caption")
    caption_dropout: float = Field(0.0, ge=0, le=1, description="share of rows that get the empty caption")
    draws: tuple[Draw, ...] = Field((), description="which random numbers come with each row")
    latent_channels: int = Field(4, gt=0, description="shape of the draws where no latents are read")
    latent_factor: int = Field(8, gt=0, description="pixels a latent pixel spans, likewise")
    multires: tuple[int, float] = Field((0, 0.3), description="iterations and discount of the draw multires")
    further: int = Field(1, gt=0, description="N of the draw further")
    seed: int = Field(0, description="of all draws")


@dataclass
class Batch:
    """One rank's share of global batch k.

    `columns` holds what was asked for: `moments` float16 [B, 2, C, h, w] (mean, deviation; not scaled),
    `pixels` uint8 [B, 3, H, W] with `cut_at` float64 [B, 2] (u, v) if cut at random and `mirrored` bool [B]
    if half are, `caption` list[str], `text` float16 [B, L, D], `pooled` float16 [B, P], `dropped` bool [B]
    (there all three are the empty caption's), and the draws. `wait_s`: how long the caller stood still.
    """

    k: int
    epochs_B: Ints
    positions_B: Ints
    columns: dict[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    wait_s: float = 0.0

    def __len__(self) -> int:
        return len(self.positions_B)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns


class Loader:
    """Batches start, start+1, ... of an order, each rank its slice; endless unless `end` is given.

    An error on a worker thread is raised by next() (and closes the loader); so is LoaderError when no batch
    comes for `timeout_s`. All needed columns stay in memory when they take at most half of `memory_bytes`;
    else two windows of blocks do; when not even those fit, rows are read one by one, which is slower.
    What is read is kept in `files`, if any, and comes from there when it is needed again.
    `wait_s` sums up how long callers stood still, `memory_bytes` what the cache holds now.
    """

    def __init__(
        self,
        store: Store,
        order: SampleOrder,
        *,
        read: ReadSettings,
        start: int = 0,
        end: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 2,
        ahead: int = 4,
        timeout_s: float = 120.0,
        memory_bytes: int = 1 << 30,
        pin_memory: bool = False,
        files: RowFiles | None = None,
    ) -> None:
        if workers < 1 or ahead < 1:
            raise InputError(f"workers={workers}, ahead={ahead}", allowed="1 or more of each")
        self._order, self._read = order, read
        self._rank, self._world_size = rank, world_size
        self._ahead, self._timeout_s = ahead, timeout_s
        self._next, self._end = start, end
        self._submitted = self._prefetched = start
        self.wait_s, self.batches = 0.0, 0
        # Asked twice for each batch: once to fetch its blocks ahead, once to build it.
        self._rows: Callable[[int], BatchRows] = lru_cache(maxsize=128)(self._find_rows)
        first = self._rows(start)
        self._reader = Reader(store, order, _wanted(read), files)
        self._plan = _plan_memory(self._reader, order, first, world_size, memory_bytes)
        if _keeps_decoded(read, order, memory_bytes):
            self._reader = Reader(store, order, _wanted(read, decoded=True), files)
        self._assembler = Assembler(read, self._blocks, empty=_empty_states(store, read), pin=pin_memory)
        self._cache = BlockCache(self._reader.block, self._plan.capacity_bytes)
        self._batches: dict[int, Future[Batch]] = {}
        self._pool = _PriorityThreads(workers)

    @property
    def memory_bytes(self) -> int:
        """What the cache of blocks holds now."""
        return self._cache.memory_bytes

    def _find_rows(self, k: int) -> BatchRows:
        return self._order.batch(k).rank(self._rank, self._world_size)

    # ---- the caller's side

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._end is not None and self._next >= self._end:
            self.close()
            raise StopIteration
        if self._pool.closed:
            raise LoaderError("the loader is closed")
        self._run_ahead()
        began = time.perf_counter()
        batch = self._take(self._next)
        batch.wait_s = time.perf_counter() - began
        self.wait_s += batch.wait_s
        self.batches += 1
        self._next += 1
        return batch

    def _take(self, k: int) -> Batch:
        if (future := self._batches.pop(k, None)) is None:
            raise LoaderError(CLOSED)
        try:
            return future.result(self._timeout_s)
        except CancelledError:
            raise LoaderError(CLOSED) from None
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError) and not future.done():
                raise LoaderError(
                    f"no batch for {self._timeout_s:g} s (batch {k}); is the storage reachable?"
                ) from None
            raise

    def _run_ahead(self) -> None:
        """Order batches up to `ahead`, and the blocks of those up to a window after them."""
        last = self._next + self._ahead
        reach = last + self._plan.prefetch_batches
        if self._end is not None:
            last, reach = min(last, self._end), min(reach, self._end)
        for k in range(self._submitted, last):
            self._batches[k] = self._pool.submit(k, partial(self._build, k))
        self._submitted = max(self._submitted, last)
        for k in range(max(self._prefetched, last), reach):
            self._pool.submit(k, partial(self._prefetch, k))
        self._prefetched = max(self._prefetched, reach)

    def close(self) -> None:
        """Stop the threads and release the blocks; returns within seconds even when a read hangs."""
        self._pool.close()
        for future in list(self._batches.values()):
            future.cancel()
        self._batches.clear()
        self._cache.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the workers' side

    def _prefetch(self, k: int) -> None:
        for number in np.unique(self._order.block_of(self._rows(k).indices_B)).tolist():
            if self._pool.closed:
                return
            if not self._cache.has(number):
                self._cache.get([number])

    def _build(self, k: int) -> Batch:
        return self._assembler.build(self._rows(k))

    def _blocks(self, indices: Ints) -> tuple[list[Block], list[Ints]]:
        """The blocks of ascending indices, and which rows of each are meant."""
        if not self._plan.cached:
            distinct, inverse = np.unique(indices, return_inverse=True)
            return [self._reader.rows(distinct)], [inverse]
        numbers = self._order.block_of(indices)
        bounds = np.r_[0, np.flatnonzero(np.diff(numbers)) + 1, len(indices)]
        blocks = self._cache.get(numbers[bounds[:-1]].tolist())
        inside = indices - np.repeat([block.first for block in blocks], np.diff(bounds))
        return blocks, [inside[a:b] for a, b in itertools.pairwise(bounds.tolist())]


@contextmanager
def open_batches(
    sources: Sequence[tuple[Store, SampleOrder, ReadSettings]],
    k: int,
    *,
    end: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 2,
    ahead: int = 4,
    pin_memory: bool = False,
    files: RowFiles | None = None,
) -> Iterator[Iterator[Mapping[str, Any]]]:
    """The columns of global batches from step `k` on, each rank its slice; of two sources rows of both by
    turns. Loaders, one a source, end on leaving; arguments as `Loader` takes them.
    """
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                Loader(
                    store,
                    order,
                    read=read,
                    start=k,
                    end=end,
                    rank=rank,
                    world_size=world_size,
                    workers=workers,
                    ahead=ahead,
                    pin_memory=pin_memory,
                    files=files,
                )
            )
            for store, order, read in sources
        ]
        if len(loaders) == 1:
            yield (batch.columns for batch in loaders[0])
        else:
            yield (_interleaved(one.columns, other.columns) for one, other in zip(*loaders, strict=True))


def _interleaved(subject: Mapping[str, Any], prior: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of both by turns, and `is_prior` [2B] that tells them apart."""
    mixed: dict[str, Any] = {}
    for name, one in subject.items():
        other = prior.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            mixed[name] = torch.stack([one, other], dim=1).flatten(0, 1)
        else:
            pairs = zip(one, other or [None] * len(one), strict=True)
            mixed[name] = [value for pair in pairs for value in pair]
    count = len(next(iter(subject.values())))
    mixed["is_prior"] = torch.tensor([False, True]).repeat(count)
    return mixed


# ---- what a batch is made of


FindRows = Callable[[Ints], tuple[list[Block], list[Ints]]]
"""Blocks that hold the rows of ascending indices, and which rows of each are meant."""


class Assembler:
    """Builds batches from blocks of rows: pictures cut, captions said and dropped, draws made."""

    def __init__(
        self,
        read: ReadSettings,
        find: FindRows,
        *,
        empty: Mapping[str, torch.Tensor] | None = None,
        pin: bool = False,
    ) -> None:
        self._read, self._find, self._empty, self._pin = read, find, empty or {}, pin

    def build(self, rows: BatchRows) -> Batch:
        """The batch of these rows."""
        batch = Batch(rows.k, rows.epochs_B, rows.positions_B, size=rows.size)
        blocks, picks = self._find(rows.indices_B)
        for name in blocks[0].values:
            parts = [block.values[name] for block in blocks]
            if name == "picture":
                at = self._cut_at(rows)
                batch.columns["pixels"] = self._pixels(rows, _rows_of(parts, picks), at)
                if self._read.crop == "random":
                    batch.columns["cut_at"] = torch.from_numpy(at)
            else:
                batch.columns[name] = _stack(parts, picks, len(rows), self._pin)
        self._flip(batch)
        self._recolour(batch)
        self._say_captions(batch)
        self._drop_captions(batch)
        self.add_draws(batch)
        return batch

    def _uniform(self, batch: Batch | BatchRows, purpose: Purpose) -> Array:
        return draws.uniform(self._read.seed, batch.epochs_B, batch.positions_B, purpose)

    def _cut_at(self, rows: BatchRows) -> Array:
        """Where each picture is cut [B, 2]: the share of the overhang left out on the left and at the top."""
        if self._read.crop != "random":
            return np.full((len(rows), 2), 0.5)
        return np.stack([self._uniform(rows, p) for p in (Purpose.CROP_X, Purpose.CROP_Y)], axis=1)

    def _pixels(self, rows: BatchRows, pictures: list[memoryview], at: Array) -> torch.Tensor:
        width, height = rows.size or (self._read.pixels or 0,) * 2
        out = _empty((len(rows), 3, height, width), torch.uint8, self._pin)
        for target, picture, (u, v) in zip(out.numpy(), pictures, at.tolist(), strict=True):
            target[:] = pixels_of(picture, (width, height), background=self._read.background, at=(u, v))
        return out

    def _flip(self, batch: Batch) -> None:
        if self._read.flip and "pixels" in batch:
            flips = torch.from_numpy(self._uniform(batch, Purpose.FLIP) < 0.5)
            batch["pixels"][flips] = batch["pixels"][flips].flip(-1)
            batch.columns["mirrored"] = flips

    def _recolour(self, batch: Batch) -> None:
        colour = self._read.colour
        if not colour.changes or "pixels" not in batch:
            return
        keys = draws.mix(self._read.seed, int(Purpose.COLOUR), batch.epochs_B, batch.positions_B).tolist()
        for target_3HW, key in zip(batch["pixels"].numpy(), keys, strict=True):
            changed = colour.applied(
                Image.fromarray(np.ascontiguousarray(target_3HW.transpose(1, 2, 0))), key
            )
            target_3HW[:] = np.asarray(changed).transpose(2, 0, 1)

    def _say_captions(self, batch: Batch) -> None:
        read = self._read
        if "caption" not in batch or not self._changes_captions:
            return
        captions = batch["caption"]
        if read.prompt_column is not None:
            own = batch.columns.pop(read.prompt_column)
            captions = [old or prompt for old, prompt in zip(captions, own, strict=True)]
        if read.prompts:
            drawn = (self._uniform(batch, Purpose.PROMPT) * len(read.prompts)).astype(np.int64).tolist()
            kept = ("" if read.prompts_replace else caption for caption in captions)
            captions = [old or read.prompts[i] for old, i in zip(kept, drawn, strict=True)]
        if read.around != ("", ""):
            captions = [read.around[0] + caption + read.around[1] for caption in captions]
        if read.wildcards:
            keys = self._keys(batch, Purpose.WILDCARDS)
            captions = [draws.chosen_wildcards(one, key) for one, key in zip(captions, keys, strict=True)]
        captions = self._change_tags(batch, captions)
        if read.secondary_separator:
            captions = [caption.replace(read.secondary_separator, ", ") for caption in captions]
        batch.columns["caption"] = captions

    def _keys(self, batch: Batch, purpose: Purpose) -> list[int]:
        keys: list[int] = draws.mix(self._read.seed, int(purpose), batch.epochs_B, batch.positions_B).tolist()
        return keys

    def _change_tags(self, batch: Batch, captions: list[str]) -> list[str]:
        """Captions with their tags warmed up, dealt and left out; what separators fix stays."""
        read = self._read
        parts = [draws.parts_of(caption, read.keep_tokens_separator) for caption in captions]
        changing = [part.changing for part in parts]
        keeps = [0 if part.parted else read.keep_tokens for part in parts]
        for purpose, used, change in (
            (Purpose.TAGS, bool(read.token_warmup[0]), partial(self._warmed_up, batch.k)),
            (Purpose.TAGS, read.shuffle_tags, draws.shuffled_tags),
            (Purpose.TAG_DROPOUT, bool(read.tag_dropout), partial(draws.kept_tags, dropout=read.tag_dropout)),
        ):
            if used:
                keys = self._keys(batch, purpose)
                changing = [change(*one) for one in zip(changing, keys, keeps, strict=True)]
        return [part.around(left) for part, left in zip(parts, changing, strict=True)]

    @property
    def _changes_captions(self) -> bool:
        read = self._read
        tags = read.shuffle_tags or read.tag_dropout or read.token_warmup[0] or read.wildcards
        separated = read.keep_tokens_separator or read.secondary_separator
        return bool(read.prompts or read.prompt_column or tags or separated or read.around != ("", ""))

    def _warmed_up(self, k: int, caption: str, key: int, keep: int) -> str:
        """The first of a caption's tags, so many as are there yet at step k."""
        steps, least = self._read.token_warmup
        share = k / steps if k < steps else None
        return draws.kept_tags(caption, key, keep, least=least, share=share)

    def _drop_captions(self, batch: Batch) -> None:
        rate = self._read.caption_dropout
        if not rate:
            return
        dropped = self._uniform(batch, Purpose.DROPOUT) < rate
        batch.columns["dropped"] = torch.from_numpy(dropped)
        if "caption" in batch:
            pairs = zip(batch["caption"], dropped, strict=True)
            batch.columns["caption"] = ["" if drop else caption for caption, drop in pairs]
        for name, empty in self._empty.items():
            batch[name][batch["dropped"]] = empty

    def add_draws(self, batch: Batch) -> None:
        """Add the random numbers that come with each row."""
        keys = self._read.seed, batch.epochs_B, batch.positions_B
        latent = self._latent_shape(batch)
        for name in self._read.draws:
            if name == "u":
                drawn: Array = draws.uniform(*keys, Purpose.TIMESTEP)
            elif name == "offset":
                drawn = draws.normal(*keys, (latent[0], 1, 1), Purpose.OFFSET_NOISE)
            elif name in ("offset_strength", "perturbation_strength"):
                drawn = draws.uniform(*keys, Purpose[name.upper()]).astype(np.float32)[:, None, None, None]
            elif name == "further":
                drawn = draws.normal(*keys, (self._read.further, *latent), Purpose.FURTHER)
            elif name == "multires":
                drawn = draws.pyramid(*keys, latent, *self._read.multires)
            else:
                drawn = draws.normal(*keys, latent, Purpose[name.upper()])
            tensor = torch.from_numpy(drawn)
            batch.columns[name] = tensor.pin_memory() if self._pin else tensor

    def _latent_shape(self, batch: Batch) -> tuple[int, int, int]:
        if "moments" in batch:
            channels, height, width = batch["moments"].shape[2:]
            return channels, height, width
        wide, high = batch.size or (self._read.pixels or 0,) * 2
        factor = self._read.latent_factor
        return self._read.latent_channels, high // factor, wide // factor


def row_assembler(store: Store, read: ReadSettings) -> Assembler:
    """Builds batches of rows by their positions in a store, which are read one by one."""
    order = Order(store.num_rows, seed=0, global_batch=1, settings=OrderSettings(shuffle=False))
    reader = Reader(store, order, _wanted(read))

    def find(positions: Ints) -> tuple[list[Block], list[Ints]]:
        distinct, inverse = np.unique(positions, return_inverse=True)
        return [reader.rows(distinct)], [inverse]

    return Assembler(read, find, empty=_empty_states(store, read))


def _keeps_decoded(read: ReadSettings, order: SampleOrder, memory_bytes: int) -> bool:
    """Whether each picture is decoded once for all epochs: always cut alike, and all of them fit."""
    if not read.pixels or read.crop == "random" or order.batch(0).size:
        return False
    return 3 * read.pixels**2 * order.num_rows <= memory_bytes // 4


def _wanted(read: ReadSettings, *, decoded: bool = False) -> list[Wanted]:
    wanted = [Wanted(read.latents, parse_latents)] if read.latents else []
    if read.text:
        wanted.append(Wanted(read.text, parse_text))
    if read.caption:
        wanted.append(Wanted("caption", parse_plain))
    if read.pixels:
        decode = partial(decode_rows, side=read.pixels, background=read.background)
        wanted.append(Wanted("picture", decode if decoded else parse_bytes))
    return wanted + [Wanted(name, parse_plain) for name in read.columns]


def _empty_states(store: Store, read: ReadSettings) -> dict[str, torch.Tensor]:
    """The empty caption's states from the text column's metadata, where captions are dropped."""
    if not read.text or not read.caption_dropout:
        return {}
    stored = json.loads(store.columns().get(read.text, {}).get("darkroom.empty", "{}"))
    return {name: _unpacked(part["data"], part["shape"]) for name, part in stored.items()}


def _unpacked(data: str, shape: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(data), dtype=np.float16).reshape(shape).copy())


def _empty(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=pin)


def _rows_of(parts: list[Values], picks: list[Ints]) -> list[Any]:
    return [part[i] for part, pick in zip(parts, picks, strict=True) for i in pick.tolist()]


def _stack(parts: list[Values], picks: list[Ints], count: int, pin: bool) -> Any:
    """One tensor [B, ...] of the picked rows, or a list of what does not stack."""
    sample = parts[0][int(picks[0][0])]
    if not isinstance(sample, (np.ndarray, np.generic)):
        return _rows_of(parts, picks)
    dtype = torch.from_numpy(np.empty(0, sample.dtype)).dtype
    out = _empty((count, *sample.shape), dtype, pin)
    gather(parts, picks, out.numpy())
    return out


# ---- memory


@dataclass(frozen=True)
class _Memory:
    cached: bool
    capacity_bytes: int
    prefetch_batches: int


def _plan_memory(
    reader: Reader, order: SampleOrder, rows: BatchRows, world_size: int, memory_bytes: int
) -> _Memory:
    """Keep everything, two windows of blocks, or nothing: by the size of rows that are read to see."""
    row_bytes = reader.row_bytes(rows.indices_B[:1])
    window_batches = -(-order.window_rows // order.global_batch)
    if row_bytes * order.num_rows <= memory_bytes // 2:
        return _Memory(True, memory_bytes, window_batches)
    # A rank's slice of each batch covers its share of a window's blocks, and some at the borders.
    blocks = order.window_rows / order.block_rows
    share = min(blocks, blocks / world_size * 1.25 + 4) * order.block_rows * row_bytes
    if share > memory_bytes:
        return _Memory(False, 0, 0)
    capacity = int(min(2.25 * share, memory_bytes))
    ahead = max(0.0, min(1.0, capacity / share - 1.1))
    return _Memory(True, capacity, int(window_batches * ahead))


# ---- threads


class _PriorityThreads:
    """Threads that do the task with the smallest number first; daemons, so that a hung one holds up
    nobody."""

    def __init__(self, workers: int) -> None:
        self.closed = False
        self._tasks: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._changed = threading.Condition()
        self._serial = itertools.count()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call; its result or error is the future's."""
        future: Future[Any] = Future()
        with self._changed:
            heapq.heappush(self._tasks, (priority, next(self._serial), future, call))
            self._changed.notify()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self.closed:
                    self._changed.wait()
                if self.closed:
                    return
                _, _, future, call = heapq.heappop(self._tasks)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # whatever it is, the caller must hear of it
                future.set_exception(error)

    def close(self) -> None:
        """Take no further task; wait a moment for running ones."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._tasks.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
