"""Importing: read a source in order, decode in threads, write what passed, list the rest as rejected."""

from __future__ import annotations

import json
import queue
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import lance
import numpy as np
import pyarrow as pa
from PIL import Image

from darkroom.data.images import (
    EXTENSIONS,
    MAX_PIXELS,
    PILLOW_MAX_PIXELS,
    PictureError,
    colour,
    examine,
    paths_below,
)
from darkroom.data.importers.archives import WebdatasetSource, tars_in
from darkroom.data.importers.folder import METADATA, FolderSource
from darkroom.data.importers.shards import MdsSource, ParquetSource, indices_in, parquets_in
from darkroom.data.importers.source import (
    Columns,
    ExtraColumns,
    Item,
    PartRead,
    PassedPicture,
    Problem,
    Sample,
    Source,
    finish_widening,
    table,
    widen,
)
from darkroom.data.sidecars import Finished, SeenIds, Sidecars, short_id
from darkroom.data.store import ROWS_PER_FRAGMENT, Store, exists
from darkroom.data.texts import NOT_UTF8, checked_encoding, flaw_of, readable
from darkroom.data.versions import preparing
from darkroom.errors import InputError, Stopped
from darkroom.hardware.system import allowed_cores, on_stop_signal, remove_tree

Kind = Literal["auto", "folder", "webdataset", "parquet", "mds"]
KINDS: dict[str, Callable[[Path, Columns], Source]] = {
    "folder": FolderSource,
    "webdataset": WebdatasetSource,
    "parquet": ParquetSource,
    "mds": MdsSource,
}
CHUNK_ITEMS, CHUNK_BYTES = 128, 8 * 1024**2
TABLE_ROWS, TABLE_BYTES = 1024, 16 * 1024**2
MAX_WORKERS = 16


@dataclass
class ImportReport:
    """What an import did. `doubles` were there already, with the same caption; `rejected` counts by reason.

    `recoded` counts texts that were not UTF-8, by the encoding they were read as; `not_utf8` those rejected
    because nobody named one; `left_out` names columns of the source that are neither number, text nor list;
    `renamed` those whose name the store needs itself; `widened` those whose type had to change for values
    that came later; `same_name` counts pictures of a zip that have the name of a later one.
    """

    store: str
    source: str
    kind: str
    added: int = 0
    doubles: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    rejected_file: str = ""
    left_out: list[str] = field(default_factory=list)
    recoded: dict[str, int] = field(default_factory=dict)
    not_utf8: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    widened: dict[str, str] = field(default_factory=dict)
    same_name: int = 0
    num_rows: int = 0
    wall_s: float = 0.0
    pictures_per_s: float = 0.0

    def lines(self) -> list[str]:
        """The report for a reader, in a few lines."""
        lines = [
            f"{self.added:,} pictures of {self.source} added to {self.store}, now of {self.num_rows:,}",
            f"{self.wall_s:.1f} s, {self.pictures_per_s:,.0f} pictures/s",
        ]
        if self.doubles:
            lines.append(f"{self.doubles:,} were there already")
        if self.rejected:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.rejected.items()))
            lines.append(f"rejected: {reasons}; see {self.rejected_file}")
        if "no-caption" in self.rejected:
            lines.append("pictures without a caption come in with: --missing-caption keep")
        if self.not_utf8:
            lines.append(
                f"{self.not_utf8:,} texts are not UTF-8: name their encoding with --caption-encoding, "
                "such as cp1252 (Western) or cp1251 (Cyrillic), or save them as UTF-8, and import again"
            )
        if self.recoded:
            counts = ", ".join(f"{count:,} as {name}" for name, count in self.recoded.items())
            lines.append(f"texts that are not UTF-8, read {counts}: look whether their letters are right")
        if self.same_name:
            lines.append(
                f"{self.same_name:,} have the name of a later picture in the same zip: called NAME#1, ..."
            )
        if self.left_out:
            lines.append(f"left out, no number, text or list: {', '.join(self.left_out)}")
        if self.renamed:
            lines.append("renamed: " + ", ".join(f"{old} to {new}" for old, new in self.renamed.items()))
        if self.widened:
            lines.append("widened: " + ", ".join(f"{name} from {how}" for name, how in self.widened.items()))
        return lines


def import_pictures(
    source: str | Path,
    store: Store | str | Path,
    *,
    kind: str = "auto",
    image_column: str | None = None,
    caption_column: str | None = None,
    background: str = "white",
    min_size: int = 16,
    max_pixels: int = MAX_PIXELS,
    on_missing_caption: str = "reject",
    caption_encoding: str | None = None,
    rows_per_fragment: int = ROWS_PER_FRAGMENT,
    workers: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> ImportReport:
    """Bring pictures and captions into a store, which is made where there is none.

    `source` is a folder or zip of pictures with a metadata file or `.txt` captions, a folder of webdataset
    tars, Parquet files, or MDS shards. Pictures that are in the store already with the same caption are
    doubles and add nothing, so the same call goes on after it was stopped, and a source that was moved or
    has grown may be imported again. What cannot be used is listed in the store's `rejected.jsonl`.
    `background` is what transparent pictures are laid on for the perceptual hash; the bytes are kept as they
    are. `caption_encoding` is that of texts which are neither UTF-8 nor marked as UTF-16; without it they are
    rejected. Raises InputError for what is no source, Stopped after SIGINT or SIGTERM with all so far
    committed.
    """
    _check(background, min_size, max_pixels, on_missing_caption, rows_per_fragment)
    path = Path(source)
    kind = find_kind(path, kind)
    encoding = None if caption_encoding is None else checked_encoding(caption_encoding)
    reader = KINDS[kind](path, Columns(image_column, caption_column, encoding))
    made = not isinstance(store, Store) and not exists(store)
    target = store if isinstance(store, Store) else Store.open_or_create(store)
    # A store's finished parts are known by these: without the newest one they are written as before it.
    settings = [image_column, caption_column, min_size, max_pixels, on_missing_caption]
    settings += [] if encoding is None else [encoding]
    filter_ = _Filter(background, min_size, max_pixels, on_missing_caption == "keep")
    with Sidecars(target.path).alone():
        target.refresh()
        finish_widening(target)
        target.finish_purges()
        run = _Import(target, path, kind, reader, filter_, json.dumps(settings), rows_per_fragment)
        report = run(workers or min(MAX_WORKERS, allowed_cores()), progress)
        if made and not report.num_rows and not report.rejected:
            remove_tree(target.path, must=True)
            raise InputError(f"no pictures in {path}", mend="no store was made")
        target.sweep()
        return report


def _check(background: str, min_size: int, max_pixels: int, missing: str, rows_per_fragment: int) -> None:
    colour(background)
    if missing not in ("reject", "keep"):
        raise InputError(f"on_missing_caption '{missing}'", allowed="reject or keep")
    if min_size < 1 or rows_per_fragment < 1:
        raise InputError(f"min_size {min_size}, rows_per_fragment {rows_per_fragment}", allowed="1 or more")
    if not 1 <= max_pixels <= PILLOW_MAX_PIXELS:
        raise InputError(f"max_pixels {max_pixels}", allowed=f"1 to {PILLOW_MAX_PIXELS}")


def find_kind(path: Path, kind: str = "auto") -> str:
    """Which kind of source a path is; InputError where it is none."""
    if not path.exists():
        raise InputError(f"no such file or folder: {path}")
    if kind != "auto":
        if kind not in KINDS:
            raise InputError(f"kind '{kind}'", allowed=f"auto, {', '.join(KINDS)}")
        return kind
    if path.is_file():
        return _kind_of_file(path)
    if indices_in(path):
        return "mds"
    if tars_in(path):
        return "webdataset"
    names = [file.name.lower() for file in path.iterdir()]
    if any(name in METADATA or Path(name).suffix in (*EXTENSIONS, ".zip") for name in names):
        return "folder"
    return "parquet" if parquets_in(path) and _parquet_has_pictures(path) else "folder"


def _parquet_has_pictures(path: Path) -> bool:
    """Parquet files next to folders of pictures may be about anything; alone they are the source."""
    if not paths_below(path, tuple(EXTENSIONS)):
        return True
    try:
        ParquetSource(path, Columns())
    except InputError:
        return False
    return True


def _kind_of_file(path: Path) -> str:
    suffix = path.suffix.lower()
    kinds = {".zip": "folder", ".jsonl": "folder", ".csv": "folder", ".parquet": "parquet", ".json": "mds"}
    if tars_in(path):
        return "webdataset"
    if suffix not in kinds:
        raise InputError(f"{path} is no source", allowed="a folder, .zip, .tar, .parquet, .jsonl or .csv")
    return kinds[suffix]


@dataclass(frozen=True)
class _Double:
    id: str


class _Filter:
    """What the threads do: identify a sample, and decode what is not known yet."""

    def __init__(self, background: str, min_size: int, max_pixels: int, keep_uncaptioned: bool) -> None:
        self._background, self._min_size, self._max_pixels = background, min_size, max_pixels
        self._keep = keep_uncaptioned
        self.seen = SeenIds()
        self.deleted: set[str] = set()

    def __call__(self, items: list[Item]) -> list[tuple[Item | PassedPicture | _Double, str]]:
        """Each item as what became of it, with its id."""
        return [self._judge(item) if isinstance(item, Sample) else (item, "") for item in items]

    def _judge(self, sample: Sample) -> tuple[Item | PassedPicture | _Double, str]:
        caption = sample.caption or ""
        if flaw := flaw_of(caption):
            return Problem(sample.key, "bad-caption", flaw), ""
        id_ = picture_id(sample.picture, caption)
        if prefix(id_) in self.seen:
            return _Double(id_), id_
        if id_ in self.deleted:
            return Problem(sample.key, "deleted", "was deleted from this store"), id_
        if not caption and not self._keep:
            return Problem(sample.key, "no-caption", "the caption is missing or empty"), id_
        try:
            facts = examine(
                sample.picture,
                background=self._background,
                min_size=self._min_size,
                max_pixels=self._max_pixels,
            )
        except PictureError as error:
            return Problem(sample.key, error.reason, str(error)), id_
        return PassedPicture(id_, sample.picture, caption, facts, sample.key, sample.extras), id_


def picture_id(picture: bytes, caption: str) -> str:
    """The id of a row: 32 hexadecimal digits of BLAKE2b over the bytes, a zero, and the caption."""
    return blake2b(b"\0".join((picture, caption.encode())), digest_size=16).hexdigest()


def prefix(id_: str) -> int:
    """The first 64 bits of an id."""
    return int(id_[:16], 16)


class _Import:
    """One import into a store that nobody else imports into meanwhile."""

    def __init__(
        self,
        store: Store,
        path: Path,
        kind: str,
        reader: Source,
        filter_: _Filter,
        settings: str,
        rows_per_fragment: int,
    ) -> None:
        self.store, self.reader, self.filter = store, reader, filter_
        self.sidecars = Sidecars(store.path)
        name = store.name_source(path)
        self.report = ImportReport(store.path, name, kind, rejected_file=self.sidecars.rejected_path)
        self.extras = ExtraColumns(store.dataset.schema)
        self.writer = FragmentWriter(store, self._committed, rows_per_fragment)
        self.settings = settings
        self.finished = self.sidecars.finished(name, settings)
        self.rejected_before = self.sidecars.rejected_before()
        self.rejected: Counter[str] = Counter()
        self._read = 0
        self._of_part = Finished()
        self._ended: dict[str, Finished] = {}
        self._parts: dict[str, Finished] = {}
        self._flushed_at = time.monotonic()
        self._rows: list[PassedPicture] = []
        self._bytes = 0
        self._problems: list[str] = []

    def __call__(self, workers: int, progress: Callable[[int, int | None], None] | None) -> ImportReport:
        started = time.perf_counter()
        self.filter.seen = _known_ids(self.store)
        self.filter.deleted = self.store.deleted_ids()
        with _stoppable() as stopped, _quiet_pillow():
            try:
                self._run(workers, stopped, progress)
            finally:
                self._flush()
                self.writer.close()
            self.writer.finish()
            self._finish(time.perf_counter() - started)
            if stopped():
                raise Stopped(f"stopped with {self.report.added:,} pictures added; the same command goes on")
        return self.report

    def _run(
        self, workers: int, stopped: Callable[[], bool], progress: Callable[[int, int | None], None] | None
    ) -> None:
        pending: deque[Future[list[tuple[Item | PassedPicture | _Double, str]]]] = deque()
        with ThreadPoolExecutor(workers, thread_name_prefix="import") as pool:
            for chunk in _chunks(self.reader.items(self.finished)):
                pending.append(pool.submit(self.filter, chunk))
                while pending and (pending[0].done() or len(pending) > 2 * workers) and not stopped():
                    self._take(pending.popleft().result(), progress)
                if stopped():
                    break
            while pending:
                if stopped():
                    pool.shutdown(wait=False, cancel_futures=True)
                first = pending.popleft()
                if first.cancelled():
                    break  # it and what comes behind it in the source are read by the next import
                self._take(first.result(), progress)

    def _take(
        self,
        judged: list[tuple[Item | PassedPicture | _Double, str]],
        progress: Callable[[int, int | None], None] | None,
    ) -> None:
        for what, id_ in judged:
            match what:
                case PassedPicture():
                    self._add(what)
                case _Double():
                    self._of_part.doubles += 1
                case Problem():
                    self._reject(what, id_)
                case PartRead():
                    self._end_part(what.name)
            self._read += not isinstance(what, PartRead)
        late = time.monotonic() >= self._flushed_at + COMMIT_EVERY_S
        if len(self._rows) >= TABLE_ROWS or self._bytes >= TABLE_BYTES or late:
            self._flush()
        if progress is not None:
            progress(self._read, self.reader.total)

    def _add(self, row: PassedPicture) -> None:
        if not self.filter.seen.add(prefix(row.id)):
            self._of_part.doubles += 1
            return
        self._of_part.added += 1
        self._rows.append(row)
        self._bytes += len(row.picture)

    def _reject(self, problem: Problem, id_: str) -> None:
        self._of_part.rejected[problem.reason] += 1
        self.report.not_utf8 += NOT_UTF8 in problem.detail
        place = {"source": self.report.source, "key": readable(problem.key)}
        # A moved source names its pictures the same, so what its bytes identify is listed once.
        if self.rejected_before.add(short_id(f"{problem.reason}|{id_ or place}")):
            record = {**place, "reason": problem.reason, "detail": problem.detail, "id": id_ or None}
            self._problems.append(json.dumps(record))

    def _end_part(self, name: str) -> None:
        """Count what a part gave; one that was read by an earlier import gives only doubles."""
        if name in self.finished:
            before = self.finished[name]
            part = Finished(0, before.added + before.doubles, before.rejected)
            self._read += part.doubles + part.rejected.total()
        else:
            part = self._ended[name] = self._of_part
        self._count(part)
        self._of_part = Finished()

    def _count(self, part: Finished) -> None:
        self.report.added += part.added
        self.report.doubles += part.doubles
        self.rejected.update(part.rejected)

    def _flush(self) -> None:
        """Hand the rows on to the writer, with the store's columns fit to take them."""
        rows, self._rows, self._bytes = self._rows, [], 0
        ended, self._ended = self._ended, {}
        self._flushed_at = time.monotonic()
        if rows:
            self._write(rows)
        self._parts |= ended  # only now: a commit within the writing did not yet hold all of their rows

    def _write(self, rows: list[PassedPicture]) -> None:
        arrays, needed = self.extras.columns(rows)
        if needed:
            self.writer.close()
            has = set(self.store.dataset.schema.names)
            self.store.add_columns(pa.field(n, t) for n, t in needed.items() if n not in has)
            widen(self.store, {n: t for n, t in needed.items() if n in has})
        self.writer.write(table(rows, self.report.source, arrays))

    def _committed(self) -> None:
        self.sidecars.add_rejected(self._problems)
        self.sidecars.add_finished(self.report.source, self.settings, self._parts)
        self._problems, self._parts = [], {}

    def _finish(self, wall_s: float) -> None:
        self._count(self._of_part)
        report = self.report
        report.rejected = dict(sorted(self.rejected.items()))
        report.left_out = sorted(self.reader.left_out)
        report.recoded = dict(sorted(self.reader.recoded.items()))
        report.same_name = self.reader.same_name
        report.renamed, report.widened = self.extras.renamed, self.extras.widened
        report.num_rows, report.wall_s = self.store.num_rows, wall_s
        report.pictures_per_s = self._read / wall_s


def _known_ids(store: Store) -> SeenIds:
    """The ids of all rows of a store, 8 bytes each."""
    folder = None if "://" in store.path else Path(store.path)
    seen = SeenIds(folder)
    for batch in store.scan(["id"], batch_rows=65_536):
        raw = bytes.fromhex("".join(batch.column("id").to_pylist()))
        seen.add_all(np.frombuffer(raw, ">u8")[::2].astype(np.uint64))
    return seen


def _chunks(items: Iterator[Item]) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += len(item.picture) if isinstance(item, Sample) else 0
        if len(chunk) >= CHUNK_ITEMS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    yield chunk


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Within, the first SIGINT or SIGTERM is only noted, so that nothing is left half-done; a second ends."""
    noted = threading.Event()
    committed = "; what was committed is whole, and the same command goes on"
    with on_stop_signal(lambda *_: noted.set(), once=True, kept=lambda: committed):
        yield noted.is_set


@contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Bombs are judged by our own limit, and damaged EXIF is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", module="PIL")
        yield


# ---- writing rows as they come: committed every few seconds, then joined to whole fragments

FRAGMENT_BYTES = 1024**3
COMMIT_EVERY_S = 5.0
WAITING_TABLES = 2
LOOK_S = 1.0


class FragmentWriter:
    """Appends tables to a store, in fragments of so many rows or bytes, whatever the pace they come at.

    A commit is made after some seconds, so that a kill costs no more than those. Each makes a small fragment;
    a group of them that makes a whole one is joined, and so is the last group by `finish`. Groups that a kill
    left are continued. Fragments thus begin and end at the same rows however often an import was killed.
    While a fragment is open the store belongs to the writer's thread; a table with other columns closes it.
    `committed` is called after each commit, when all that was written before is safe.
    """

    def __init__(
        self, store: Store, committed: Callable[[], None], rows_per_fragment: int = ROWS_PER_FRAGMENT
    ) -> None:
        self._store, self._committed, self._limit = store, committed, rows_per_fragment
        self._fragment: _Fragment | None = None
        self._groups = store.sidecars.unjoined()
        self._rows, self._bytes = self._left_by_a_kill()

    def _left_by_a_kill(self) -> tuple[int, int]:
        """Rows and bytes of the group that a killed import had begun."""
        if not self._groups:
            self._groups.append([])
            return 0, 0
        there = {
            fragment.data_files()[0].path: (fragment.metadata.num_rows, _data_bytes(fragment))
            for fragment in self._store.dataset.get_fragments()
        }
        self._groups = [group for group in self._groups if group and there.keys() >= set(group)]
        open_group = [there[file] for file in self._groups[-1]] if self._groups else []
        rows, size = sum(n for n, _ in open_group), sum(b for _, b in open_group)
        if not rows or rows >= self._limit or size >= FRAGMENT_BYTES:
            self._groups.append([])
            return 0, 0
        return rows, size

    def write(self, rows: pa.Table) -> None:
        """Queue rows; waits where the disk is slower than the source."""
        while rows.num_rows:
            if self._fragment is not None and self._fragment.schema != rows.schema:
                self.close()
            if self._fragment is None:
                self._fragment = _Fragment(self._store, rows.schema)
            part = rows.slice(0, self._limit - self._rows)
            self._fragment.put(part)
            self._rows, self._bytes = self._rows + part.num_rows, self._bytes + part.nbytes
            rows = rows.slice(part.num_rows)
            if self._rows >= self._limit or self._bytes >= FRAGMENT_BYTES:
                self.close()
        if self._fragment is not None and time.monotonic() >= self._fragment.commit_at:
            self.close()

    def close(self) -> None:
        """Commit what was written; raises what went wrong."""
        fragment, self._fragment = self._fragment, None
        if fragment is not None:
            fragment.close()
            self._groups[-1].append(self._store.dataset.get_fragments()[-1].data_files()[0].path)
            whole = self._rows >= self._limit or self._bytes >= FRAGMENT_BYTES
            self._store.sidecars.note_unjoined(self._groups)
            if whole:
                self._join()
                self._groups.append([])
                self._rows = self._bytes = 0
        self._committed()

    def finish(self) -> None:
        """Commit, and join what is left of small fragments."""
        self.close()
        self._join()

    def _join(self) -> None:
        """Join each group; not during a running prepare, which would have to encode its fragment again."""
        root = self._store.sidecars.root
        if root is None or preparing(root):
            return
        several = [group for group in self._groups if len(group) > 1]
        for group in several:
            self._store.join(group)
        self._groups = []
        self._store.sidecars.note_unjoined([])
        if several:
            self._store.drop_old_versions()


def _data_bytes(fragment: lance.LanceFragment) -> int:
    return sum(file.file_size_bytes or 0 for file in fragment.data_files())


class _Fragment:
    """One append, whose rows come through a queue."""

    def __init__(self, store: Store, schema: pa.Schema) -> None:
        self.schema, self.commit_at = schema, time.monotonic() + COMMIT_EVERY_S
        self._queue: queue.Queue[pa.Table | None] = queue.Queue(WAITING_TABLES)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._append, args=(store,), name="fragment-writer", daemon=True
        )
        self._thread.start()

    def put(self, rows: pa.Table | None) -> None:
        """Queue rows for the writer, None at the end; waits while full. Raises the error of the writer."""
        while True:
            self._check()
            try:
                self._queue.put(rows, timeout=LOOK_S)
            except queue.Full:
                continue  # the writer may have died: look
            break

    def close(self) -> None:
        self.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _append(self, store: Store) -> None:
        try:
            store.append(pa.RecordBatchReader.from_batches(self.schema, self._batches()))
        except BaseException as error:
            self._error = error

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while (rows := self._queue.get()) is not None:
            yield from rows.to_batches()
