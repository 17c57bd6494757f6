"""The Ray engine of `darkroom prepare`: the same job, its blocks read, cut and encoded all over a cluster.

A block is a few pieces of one fragment: rows that share an encoder's batch in the local engine do so here.
An encoder writes its block as a part file next to the job's notes; when all parts of a fragment are there, a
CPU task joins them to the one file that the local engine would have written, and note and commit are its
own. So whatever dies costs the blocks it had, and a job that was killed whole goes on from the parts.

The store, and its parts, lie on storage that every node sees.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from darkroom import models
from darkroom.cluster.connect import check_here, check_nodes, connected, resources_of_nodes
from darkroom.cluster.encoders import (
    BlockTimes,
    Bounds,
    Pool,
    Use,
    check_room,
    device_here,
    on_one_machine,
    options_of,
)
from darkroom.cluster.stages import MOST_TRIES, Stages
from darkroom.errors import DarkroomError, StoreError
from darkroom.hardware.system import atomic_replace, remove_tree, sync_file
from darkroom.prepare.columns import Column, Layout, Value
from darkroom.prepare.job import (
    Encoded,
    EncodeTask,
    FragmentFile,
    Note,
    PrepareReport,
    Progress,
    encode_piece,
    prepare,
    read_pieces,
)

__all__ = ["ClusterReport", "prepare_on_ray"]
BLOCK_BYTES = 32 * 1024**2  # of ready values
BLOCK_ROWS = 4096
JOINING = 2  # fragments whose parts are joined at a time
SAY_EVERY_S = 15.0
SIZE_EVERY_S = 5.0  # how often the CPU stage is fitted to the nodes that are there
ASKED_AHEAD = 8  # CPU tasks more than there are CPUs where the cluster grows: what it grows for
PARTS = "parts"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Ask:
    """A block: live rows `first` to `first + count` of a fragment, at one version of the store."""

    store: str
    version: int
    fragment: int
    first: int
    count: int
    keep: bool
    part: str  # where its values are written


@dataclass
class ClusterReport(PrepareReport):
    """What a prepare on a cluster did, and how busy its stages were."""

    cluster: str = ""
    stages: dict[str, float] = field(default_factory=dict)  # share of the time each was busy
    bottleneck: str = ""
    encoders_lost: int = 0
    blocks_repeated: int = 0

    def lines(self) -> list[str]:
        """The report for people."""
        lost = f"{self.encoders_lost} encoders were lost, {self.blocks_repeated} blocks made again"
        more = ([lost] if self.encoders_lost or self.blocks_repeated else []) + [self.bottleneck]
        return [*super().lines(), *filter(None, more)]


def prepare_on_ray(
    store: str | Path,
    model: models.Model | str | Path,
    *,
    address: str | None = None,
    bounds: Bounds | None = None,
    cpu_workers: int | None = None,
    grows: bool = False,
    progress: Progress | None = None,
    say: Say = lambda _: None,
    **options: Any,
) -> ClusterReport:
    """`prepare` with its encoding on a Ray cluster; `options` are prepare's own.

    `cpu_workers` is how many tasks read and cut at once: all CPUs that encoders leave, as nodes come and go,
    unless said. A cluster that `grows` has an autoscaler: what it lacks is waited for. Raises what prepare
    does, and InputError where the cluster is missing, lacks what is asked, or has a node that does not see
    the store.
    """
    bounds = bounds or Bounds()
    if "://" in str(store):
        raise StoreError(f"{store} is no folder", mend="prepare a store in a folder that every node sees")
    with connected(address, accelerator=bounds.accelerator, grows=grows) as cluster:
        say(cluster.line())
        if waits := cluster.waits_for(bounds.accelerator):
            say(waits)
        if not cluster.may_grow:
            bounds = on_one_machine(bounds, resources_of_nodes())
            check_room(bounds, resources_of_nodes())
        place = Path(store).resolve()
        if place.is_dir():  # where it is not, prepare says so
            check_nodes(str(place), say)
        sized = _Sized(bounds, cpu_workers, cluster.may_grow)
        engine = _Engine(bounds, sized, say)
        report = prepare(place, model, progress=progress, engine=engine, device="cpu", **options)
        for column in report.columns:
            remove_tree(place / "_prepare" / f"{column}.{PARTS}")
        return ClusterReport(**vars(report), cluster=cluster.line(), **engine.usage())


@dataclass(frozen=True)
class _Sized:
    """How many CPU tasks there are at once: as many as said, or as the nodes have CPUs that encoders leave.

    Where the cluster grows some more are asked for, so that it sees that they are wanted.
    """

    bounds: Bounds
    said: int | None = None
    grows: bool = False

    def fit(self, use: Use, encoders: int) -> None:
        """Set how many, while so many encoders are up."""
        each = 0.1 if options_of(self.bounds).get("num_gpus") else self.bounds.fraction
        total = sum(node.get("CPU", 0.0) for node in resources_of_nodes())
        spare = max(1, int(total - each * max(encoders, self.bounds.least)))
        more = max(ASKED_AHEAD, spare // 2) if self.grows else 0
        use.cpu_workers, use.cpus = self.said or spare + more, spare


# ---- on the driver


class _Engine:
    """Encodes a work's fragments on the cluster; see `darkroom.prepare.job.Engine`."""

    def __init__(self, bounds: Bounds, sized: _Sized, say: Say) -> None:
        self._bounds, self._sized, self._say = bounds, sized, say
        self._lost = self._repeated = 0
        self._longest_s = 0.0
        self._usage: dict[str, Any] = {}

    def usage(self) -> dict[str, Any]:
        """How the stages were used, by the column that took longest."""
        return self._usage

    def _count(self, use: Use, lost: int) -> None:
        self._lost, self._repeated = self._lost + lost, self._repeated + use.repeated
        self._usage |= {"encoders_lost": self._lost, "blocks_repeated": self._repeated}
        if use.wall_s >= self._longest_s:
            self._longest_s = use.wall_s
            shares = {name: round(share, 4) for name, share in use.shares().items()}
            self._usage |= {"stages": shares, "bottleneck": use.bottleneck()}

    def __call__(self, work: EncodeTask) -> Iterator[Note]:
        import ray

        column = ray.put(work.column)
        light = ray.put(replace(work.column, encode=NoEncoder()))
        encoder: Any = ray.remote(BlockEncoder)
        pool = Pool(self._bounds, lambda options: encoder.options(**options).remote(column))
        each = 0 if self._bounds.shares else 1
        cut: Any = ray.remote(cut_block).options(num_cpus=each, num_returns=2, max_retries=MOST_TRIES)
        use = Use(1)
        stages = Stages(pool, lambda ask: tuple(cut.remote(ask, light)), use)
        fragments = _Fragments(work)
        try:
            yield from _EncodePass(work, fragments, stages, light, self._sized, self._say).notes()
        finally:
            self._count(use, pool.lost)
            pool.close()


class _EncodePass:
    """One pass over the fragments of a work: blocks through the stages, finished fragments joined."""

    def __init__(
        self, work: EncodeTask, fragments: _Fragments, stages: Stages, column: Any, sized: _Sized, say: Say
    ) -> None:
        import ray

        self._work, self._fragments, self._stages = work, fragments, stages
        self._sized, self._sized_at = sized, -math.inf
        self._say, self._said = say, time.monotonic()
        stages.look = self._look
        join: Any = ray.remote(join_parts).options(num_cpus=1, max_retries=MOST_TRIES)
        self._join: Callable[[Fragment], Any] = lambda whole: join.remote(whole, column, str(work.folder))
        self._begun: dict[int, Fragment] = {}  # those of which blocks are on their way
        self._left: dict[int, int] = {}  # blocks that such a fragment still lacks
        self._joining: dict[Any, Fragment] = {}

    def notes(self) -> Iterator[Note]:
        """Notes of fragments as they are finished."""
        for (number, rows), _ in self._stages.run(self._blocks()):
            self._left[number] -= 1
            self._work.advance(rows)
            if not self._left[number]:
                yield from self._finish(number)
        yield from self._joined(most=0)

    def _blocks(self) -> Iterator[tuple[tuple[int, int], Ask, int]]:
        """Blocks that have no part yet; what is whole already is joined at once."""
        for number in self._work.numbers:
            fragment = self._fragments.find(number)
            if fragment is None:
                continue
            Path(fragment.folder).mkdir(parents=True, exist_ok=True)
            missing = [ask for ask in fragment.asks if not Path(ask.part).is_file()]
            there = sum(ask.count for ask in fragment.asks) - sum(ask.count for ask in missing)
            self._work.advance(there)
            if missing:
                self._begun[number], self._left[number] = fragment, len(missing)
            else:
                self._whole(fragment)
            for ask in missing:
                yield (number, ask.count), ask, ask.count

    def _whole(self, fragment: Fragment) -> None:
        self._joining[self._join(fragment)] = fragment

    def _finish(self, number: int) -> Iterator[Note]:
        del self._left[number]
        self._whole(self._begun.pop(number))
        yield from self._joined(most=JOINING)

    def _joined(self, most: int) -> Iterator[Note]:
        """Notes of joined fragments; waits until at most so many are being joined."""
        import ray

        while self._joining:
            wait_s = None if len(self._joining) > most else 0
            done, _ = ray.wait(list(self._joining), num_returns=1, timeout=wait_s)
            if not done:
                return
            try:
                note = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (cause if isinstance(cause, BaseException) else error) from None
            except ray.exceptions.RayError as error:
                number = self._joining[done[0]].number
                raise DarkroomError(
                    f"fragment {number} was lost {MOST_TRIES} times with the worker that joined its parts "
                    f"({type(error).__name__}); is there enough memory?"
                ) from error
            fragment = self._joining.pop(done[0])
            yield note
            remove_tree(fragment.folder)  # after it was noted

    def _look(self) -> None:
        """Fit the CPU stage to the nodes, and say how it goes, each from time to time."""
        now, use, up = time.monotonic(), self._stages.use, len(self._stages.pool.up)
        if now - self._sized_at > SIZE_EVERY_S:
            self._sized_at = now
            self._sized.fit(use, up)
        if now - self._said < SAY_EVERY_S:
            return
        self._said = now
        if up:
            self._say(f"{use.rows_per_s():,.1f} rows/s; {use.bottleneck()}")
        if waits := self._stages.pool.waits():
            self._say(waits)


@dataclass(frozen=True)
class Fragment:
    """A fragment to be encoded, its blocks, and the folder of their parts."""

    store: str
    version: int
    number: int
    folder: str
    asks: tuple[Ask, ...]


class _Fragments:
    """Cuts the fragments of a work into blocks; folders of parts that belong to none of them are dropped."""

    def __init__(self, work: EncodeTask) -> None:
        self._work = work
        self._version = work.store.version
        self._dataset = lance.dataset(work.store.path, version=self._version)
        self._layout = Layout.of(self._dataset, work.column.name, work.column.source)
        # Beside the notes, which clear away whatever they do not know.
        root, wanted = parts_folder(work.folder), set(work.numbers)
        for path in root.iterdir() if root.is_dir() else ():
            number = path.name.partition("-")[0]
            fragment = self.find(int(number)) if number.isdecimal() and int(number) in wanted else None
            if fragment is None or Path(fragment.folder) != path:
                remove_tree(path)

    def find(self, number: int) -> Fragment | None:
        """A fragment by number, cut anew each time; None where it is gone."""
        found = self._dataset.get_fragment(number)
        if found is None:
            return None
        column, metadata = self._work.column, found.metadata
        rows, size = block_rows(column), int(metadata.num_rows)
        kept = self._layout.file(metadata)
        identity = [metadata.physical_rows, size, self._layout.base(metadata), kept, rows, column.batch_rows]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        folder = parts_folder(self._work.folder) / f"{number}-{digest}"
        return Fragment(
            self._work.store.path,
            self._version,
            number,
            str(folder),
            tuple(
                Ask(
                    store=self._work.store.path,
                    version=self._version,
                    fragment=number,
                    first=first,
                    count=min(rows, size - first),
                    keep=kept is not None,
                    part=str(folder / f"{first}.arrow"),
                )
                for first in range(0, size, rows)
            ),
        )


def parts_folder(notes: Path) -> Path:
    """Where the parts of a column lie, next to its notes."""
    return notes.with_name(f"{notes.name}.{PARTS}")


def block_rows(column: Column) -> int:
    """Rows of a block: whole batches, within BLOCK_BYTES of ready values and BLOCK_ROWS."""
    most = min(BLOCK_ROWS, BLOCK_BYTES // column.ready_bytes)
    return max(1, most // column.batch_rows) * column.batch_rows


# ---- on the workers


class NoEncoder:
    """In place of the encoder, for tasks that need none: the weights stay out of them."""

    def __call__(self, ready: Sequence[Any]) -> list[Value]:
        raise DarkroomError("encoding is the encoders' work")

    def on(self, device: Any) -> NoEncoder:
        return self


@lru_cache(maxsize=4)
def _opened(path: str, version: int) -> lance.LanceDataset:
    """A version of a store, opened once a worker: at billions of rows its manifest is large."""
    check_here(path)
    return lance.dataset(path, version=version)


def cut_block(ask: Ask, column: Column) -> tuple[list[Any], BlockTimes]:
    """The CPU stage: read a block's rows and make them ready: pieces with their ready values."""
    began = time.perf_counter()
    fragment = _opened(ask.store, ask.version).get_fragment(ask.fragment)
    pieces = list(read_pieces(fragment, column, keep=ask.keep, first=ask.first, count=ask.count))
    read = time.perf_counter()
    made = [
        (replace(piece, values=[]), [column.ready(piece.values[i]) for i in piece.todo]) for piece in pieces
    ]
    return made, BlockTimes(read_s=read - began, ready_s=time.perf_counter() - read)


class BlockEncoder:
    """An encoder actor: encodes blocks piece by piece and writes their parts."""

    def __init__(self, column: Column) -> None:
        self._column = replace(column, encode=column.encode.on(device_here()))

    def ping(self) -> int:
        """That it is up: its process."""
        return os.getpid()

    def encode(self, pieces: list[Any], ask: Ask) -> tuple[int, BlockTimes]:
        """Encode a block; returns the rows encoded."""
        began = time.perf_counter()
        encoded = [encode_piece(piece, ready, self._column) for piece, ready in pieces]
        done = time.perf_counter()
        _write_part(ask.part, encoded, self._column.field)
        seconds = BlockTimes(encode_s=done - began, write_s=time.perf_counter() - done)
        return sum(piece.rows for piece in encoded), seconds


def join_parts(fragment: Fragment, column: Column, folder: str) -> Note:
    """Write a fragment's file from its parts; they are deleted when it has been noted."""
    dataset = _opened(fragment.store, fragment.version)
    layout = Layout.of(dataset, column.name, column.source)
    metadata = dataset.get_fragment(fragment.number).metadata
    file = FragmentFile(Path(folder), column.field, metadata, layout, dataset.data_storage_version)
    for ask in fragment.asks:
        for encoded in read_part(ask.part):
            file.add(encoded)
    return file.close()


def _write_part(path: str, encoded: list[Encoded], field: pa.Field) -> None:
    """Write a block's values as one Arrow file, atomically."""
    schema = pa.schema([pa.field("offset", pa.int64()), field])
    counts = json.dumps([[one.rows, one.unreadable] for one in encoded])
    temporary = Path(f"{path}.{platform.node()}.{os.getpid()}")
    with (
        pa.OSFile(str(temporary), "wb") as file,
        pa.ipc.new_file(file, schema.with_metadata({"counts": counts})) as out,
    ):
        for one in encoded:
            out.write_batch(pa.record_batch([pa.array(one.offsets, pa.int64()), one.values], schema=schema))
    sync_file(temporary)
    atomic_replace(temporary, path)


def read_part(path: str) -> Iterator[Encoded]:
    """The pieces of a part."""
    with pa.memory_map(path) as file:
        reader = pa.ipc.open_file(file)
        counts = json.loads(reader.schema.metadata[b"counts"])
        for i, (rows, unreadable) in enumerate(counts):
            batch = reader.get_batch(i)
            yield Encoded(batch.column(0).to_pylist(), batch.column(1), rows, unreadable)
