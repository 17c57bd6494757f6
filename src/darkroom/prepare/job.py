"""The prepare job: adds columns of latents and text states to a store, fragment by fragment.

A column starts as null in all rows. Each fragment's values are encoded into one file, which is noted when
it is complete and then committed to the fragment; the rest of the store is never rewritten, and several
resolutions and encoders stand side by side. Which rows share an encoder's batch depends on the fragment
alone, so a column is the same to the bit however often the job was killed. When the store has moved on
meanwhile (rows appended or deleted, fragments joined), the commit is made anew on what is there now; rows
that arrived are encoded before the job ends.

Not Lance's own `add_columns`: its checkpoint knows nothing of encoders and its commit fails when rows were
appended. Not `merge_columns` and `update_columns` either, although this does what they do: a file written
directly streams at any fragment size, and can be finished, noted and committed in three separate steps.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileWriter

from darkroom import models
from darkroom.data.sidecars import PREPARING
from darkroom.data.store import Store
from darkroom.errors import StoreError
from darkroom.hardware.system import atomic_replace, lock_file, remove_file, sync_file, write_atomically
from darkroom.prepare.columns import Column, Layout, Value, check_made_alike, columns_to_make

# ---- fragments
#
# The rows of one fragment: read in pieces, encoded, and written as the file that holds the column's values;
# and notes of what is finished but not yet committed.
#
# A piece is the rows that share an encoder's batch. Which rows those are depends on the fragment alone, never
# on who reads it or from which row on.
#
# `_prepare/<column>/<fragment>.json` in the store's folder names a finished file of encoded values in the
# same folder. Committing moves the file into the dataset and removes the note, so the folder holds only what
# a kill would lose; what is committed, the dataset itself knows.


@dataclass(frozen=True)
class Note:
    """A fragment whose rows are all encoded."""

    fragment: int
    physical_rows: int
    base: str  # the data file that the values were made from
    file: str  # the data file that holds them
    rows: int  # how many were encoded
    unreadable: list[str]  # ids of rows whose picture could not be decoded; they stay null


class Notes:
    """The notes of one column, held by one process at a time."""

    def __init__(self, store_path: str, column: str) -> None:
        if "://" in store_path:
            raise StoreError(f"{store_path} is no local folder", mend="prepare a store on a local disk")
        self.column = column
        self.folder = Path(store_path) / PREPARING / column
        self._data = Path(store_path) / "data"
        self._lock: IO[str] | None = None

    def __enter__(self) -> Notes:
        """Take the lock, and clear away what a killed process left half-written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("a+", encoding="utf-8")
        try:
            lock_file(self._lock)
        except BlockingIOError:
            self._lock.close()
            raise StoreError(
                f"another process is preparing {self.column}", mend="wait for it, or stop it"
            ) from None
        except OSError as error:
            self._lock.close()
            raise StoreError(
                f"the file system of {self.folder} has no file locks ({error.strerror})",
                mend="mount it with them (Lustre: -o flock), or keep the store on another",
            ) from None
        notes = self.all()
        kept = {"lock"} | {note.file for note in notes} | {f"{note.fragment}.json" for note in notes}
        for path in self.folder.iterdir():
            if path.name not in kept:
                remove_file(path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def all(self) -> list[Note]:
        """Every finished fragment whose file is there."""
        found = []
        for path in sorted(self.folder.glob("[0-9]*.json")):
            note = Note(**json.loads(path.read_text(encoding="utf-8")))
            if (self.folder / note.file).is_file() or (self._data / note.file).is_file():
                found.append(note)
        return found

    def add(self, note: Note) -> None:
        """Note a fragment; its file is flushed to the disk first."""
        sync_file(self.folder / note.file)
        write_atomically(self.folder / f"{note.fragment}.json", json.dumps(asdict(note)))

    def place(self, note: Note) -> None:
        """Move a finished file to where the dataset looks for it."""
        if (waiting := self.folder / note.file).is_file():
            atomic_replace(waiting, self._data / note.file)

    def drop(self, note: Note) -> None:
        """Forget a fragment. A file that waits here goes too; one in the dataset may be in use by now."""
        remove_file(self.folder / f"{note.fragment}.json")
        remove_file(self.folder / note.file)


READ_BUFFER_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class EncodeBatch:
    """Rows that share a batch: offsets in the fragment, ids, source values, values kept as they are."""

    offsets: list[int]
    ids: list[str]
    values: list[Any]
    kept: list[Value]

    @property
    def todo(self) -> list[int]:
        """Which rows are to be encoded."""
        return [i for i, kept in enumerate(self.kept) if kept is None]


@dataclass(frozen=True)
class Encoded:
    """A piece's values, those of unreadable rows null."""

    offsets: list[int]  # ascending
    values: pa.Array
    rows: int  # how many were encoded now
    unreadable: list[str] = field(default_factory=list)


def read_pieces(
    fragment: lance.LanceFragment,
    column: Column,
    *,
    keep: bool,
    first: int = 0,
    count: int | None = None,
) -> Iterator[EncodeBatch]:
    """A fragment's live rows in pieces: all, or `count` from live row `first`, a multiple of batch_rows.

    With `keep`, values that are there already stay.
    """
    name, source = column.name, column.source
    scanner = fragment.scanner(
        columns=["id", source] + ([name] if keep else []),
        with_row_address=True,
        batch_size=column.batch_rows,
        strict_batch_size=True,
        batch_readahead=2,
        io_buffer_size=READ_BUFFER_BYTES,
        offset=first or None,
        limit=count,
    )
    for batch in scanner.to_batches():
        offsets = batch.column("_rowaddr").to_numpy() & np.uint64(0xFFFFFFFF)
        yield EncodeBatch(
            offsets.astype(np.int64).tolist(),
            batch.column("id").to_pylist(),
            batch.column(source).to_pylist(),
            batch.column(name).to_pylist() if keep else [None] * len(batch),
        )


def encode_piece(piece: EncodeBatch, ready: Sequence[Any], column: Column) -> Encoded:
    """Encode the ready values of the rows to be encoded; the others keep what they have."""
    values, todo = list(piece.kept), piece.todo
    if todo:
        for i, value in zip(todo, column.encode(ready), strict=True):
            values[i] = value
    lost = [piece.ids[i] for i in todo if values[i] is None]
    return Encoded(piece.offsets, pa.array(values, column.field.type), len(todo) - len(lost), lost)


class FragmentFile:
    """One file with a value for every row of a fragment, null where rows were deleted or are unreadable."""

    def __init__(
        self, folder: Path, field: pa.Field, metadata: Any, layout: Layout, storage_version: str
    ) -> None:
        self._schema = pa.schema([field])
        self._physical_rows, self._next = int(metadata.physical_rows), 0
        self._fragment, self._base = int(metadata.id), layout.base(metadata)
        self._file = f"{field.name}-{metadata.id}-{uuid.uuid4().hex}.lance"
        self._rows, self._unreadable = 0, list[str]()
        self._writer = LanceFileWriter(str(folder / self._file), self._schema, version=storage_version)

    def add(self, encoded: Encoded) -> None:
        """Write the values of the next rows."""
        if not encoded.offsets:
            return
        end = encoded.offsets[-1] + 1
        places = np.full(end - self._next, -1)
        places[np.array(encoded.offsets) - self._next] = np.arange(len(encoded.offsets))
        self._write(encoded.values.take(pa.array(places, mask=places < 0)))
        self._next = end
        self._rows += encoded.rows
        self._unreadable += encoded.unreadable

    def close(self) -> Note:
        """Finish the file; the note says what is in it."""
        self._write(pa.nulls(self._physical_rows - self._next, self._schema.field(0).type))
        self._writer.close()
        return Note(
            fragment=self._fragment,
            physical_rows=self._physical_rows,
            base=self._base,
            file=self._file,
            rows=self._rows,
            unreadable=self._unreadable,
        )

    def _write(self, values: pa.Array) -> None:
        self._writer.write_batch(pa.record_batch([values], schema=self._schema))


# ---- the job

COMMIT_EVERY_S = 20.0
READY_THREADS = 4
TOMBSTONE = -2  # Lance's mark for a field that a file no longer answers for

Progress = Callable[[int, int | None], None]


@dataclass
class PrepareReport:
    """What a prepare did: rows encoded and rows found done by column, pictures that could not be decoded."""

    columns: list[str] = field(default_factory=list)
    encoded: dict[str, int] = field(default_factory=dict)
    done_before: dict[str, int] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    rows_per_s: float = 0.0

    def lines(self) -> list[str]:
        """The report for people."""
        lines = [
            f"{name}: {self.encoded[name]:,} rows encoded, {self.done_before[name]:,} were done before"
            for name in self.columns
        ]
        if self.unreadable:
            lines.append(
                f"{len(self.unreadable):,} pictures could not be decoded and have no latents; training "
                f"refuses them until they are deleted: {', '.join(self.unreadable[:5])}"
            )
        return [*lines, f"{self.wall_s:,.1f} s, {self.rows_per_s:,.1f} rows/s"]


@dataclass(frozen=True)
class EncodeTask:
    """What an engine is to do: fragments of a store that lack values of a column, by number."""

    store: Store
    column: Column
    folder: Path  # where finished files are laid
    numbers: list[int]
    advance: Callable[[int], None]  # so many rows more are encoded

    def layout(self) -> Layout:
        """Where the column lies in the store as it is now."""
        return Layout.of(self.store.dataset, self.column.name, self.column.source)


Engine = Callable[[EncodeTask], Iterator[Note]]
"""Encodes what a work lists and hands out a note of each fragment as soon as its file is finished."""


def _encode_here(work: EncodeTask) -> Iterator[Note]:
    """The local engine: one fragment after the other in this process, reading and cutting a piece ahead."""
    for number in work.numbers:
        fragment = work.store.dataset.get_fragment(number)
        if fragment is not None:
            yield _encode_fragment(work, fragment)


def _encode_fragment(work: EncodeTask, fragment: lance.LanceFragment) -> Note:
    layout, column = work.layout(), work.column
    version = work.store.dataset.data_storage_version
    file = FragmentFile(work.folder, column.field, fragment.metadata, layout, version)
    pieces = read_pieces(fragment, column, keep=layout.file(fragment.metadata) is not None)
    with ThreadPoolExecutor(READY_THREADS) as pool:
        for piece, ready in _ahead(pieces, column, pool):
            file.add(encode_piece(piece, [value.result() for value in ready], column))
            work.advance(len(ready))
    return file.close()


def _ahead(
    pieces: Iterator[EncodeBatch], column: Column, pool: ThreadPoolExecutor
) -> Iterator[tuple[EncodeBatch, list[Future[Any]]]]:
    """Each piece with its ready values on their way, those of the next one too."""
    ahead: tuple[EncodeBatch, list[Future[Any]]] | None = None
    for piece in pieces:
        coming = piece, [pool.submit(column.ready, piece.values[i]) for i in piece.todo]
        if ahead is not None:
            yield ahead
        ahead = coming
    if ahead is not None:
        yield ahead


def prepare(
    store: Store | str | Path,
    model: models.Model | str | Path,
    *,
    resolution: int = 512,
    text: bool = False,
    latents: bool = True,
    precision: str = "float32",
    bucket_step: int = 0,
    batch_rows: int = 16,
    device: str = "auto",
    progress: Progress | None = None,
    engine: Engine = _encode_here,
) -> PrepareReport:
    """Encode what the store's columns of this model lack; a second call encodes only what is new.

    `bucket_step` above 0 keeps aspect ratios: pictures are encoded at the nearest bucket's size instead of a
    square. `engine` does the encoding: this process, unless another one is given. Raises ColumnError when the
    column there was made with other settings, StoreError when another process is at it, InputError for a
    precision that the device does not do.
    """
    began = time.perf_counter()
    opened = store if isinstance(store, Store) else Store.open(store)
    place = models.device(device)
    report = PrepareReport()
    for column in columns_to_make(
        model,
        resolution,
        latents,
        text,
        bucket_step,
        precision=precision,
        device=place,
        batch_rows=batch_rows,
    ):
        _ColumnJob(opened, column, report, progress or (lambda done, total: None), engine).run()
    opened.sweep()
    report.wall_s = time.perf_counter() - began
    report.rows_per_s = sum(report.encoded.values()) / report.wall_s
    return report


class _ColumnJob:
    """One column of one store, until no row lacks it."""

    def __init__(
        self, store: Store, column: Column, report: PrepareReport, progress: Progress, engine: Engine
    ) -> None:
        self._store, self._column, self._report, self._progress = store, column, report, progress
        self._engine = engine
        self._done_rows = 0
        self._unreadable: dict[int, int] = {}

    def run(self) -> None:
        """Encode fragment after fragment; whatever arrives meanwhile is encoded too."""
        name = self._column.name
        self._report.columns.append(name)
        self._report.encoded[name] = self._report.done_before[name] = 0
        with Notes(self._store.path, name) as notes:
            self._add_column()
            self._commit(notes)  # what a killed job had finished
            missing = sum(count for _, count in self._store.patiently(self._pending))
            self._done_rows = self._report.done_before[name] = self._store.num_rows - missing
            while self._store.patiently(partial(self._pass, notes)):
                pass

    def _pass(self, notes: Notes) -> bool:
        """Encode what is pending now; False when nothing is."""
        self._report.encoded[self._column.name] += self._commit(notes)
        pending = self._pending()
        if pending:
            self._encode_all(notes, [number for number, _ in pending])
        return bool(pending)

    def _add_column(self) -> None:
        self._store.refresh()
        if self._column.name not in self._store.columns():
            self._store.add_columns([self._column.field])
        check_made_alike(self._store, self._column.field)

    # ---- which fragments

    def _pending(self) -> list[tuple[int, int]]:
        """Fragments with rows to encode, and how many, in the store as it is now."""
        self._store.refresh()
        layout = self._layout()
        counts = [(f.fragment_id, self._missing(f, layout)) for f in self._store.dataset.get_fragments()]
        return [(number, count) for number, count in counts if count]

    def _layout(self) -> Layout:
        return Layout.of(self._store.dataset, self._column.name, self._column.source)

    def _missing(self, fragment: lance.LanceFragment, layout: Layout) -> int:
        """Live rows without a value, but for those that this job has found to be unreadable."""
        if layout.file(fragment.metadata) is None:
            return int(fragment.metadata.num_rows)
        unreadable = self._unreadable.get(fragment.fragment_id, 0)
        return max(0, int(fragment.count_rows(f"{self._column.name} IS NULL")) - unreadable)

    # ---- encoding

    def _encode_all(self, notes: Notes, numbers: list[int]) -> None:
        name = self._column.name
        last_commit = time.monotonic()
        work = EncodeTask(self._store, self._column, notes.folder, numbers, self._advance)
        for note in self._engine(work):
            self._finish(notes, note)
            if time.monotonic() - last_commit > COMMIT_EVERY_S:
                self._report.encoded[name] += self._commit(notes)
                last_commit = time.monotonic()
        self._report.encoded[name] += self._commit(notes)

    def _advance(self, rows: int) -> None:
        self._done_rows += rows
        self._progress(self._done_rows, self._store.num_rows)

    def _finish(self, notes: Notes, note: Note) -> None:
        """Note a finished fragment, unless nothing of it could be encoded."""
        self._report.unreadable += note.unreadable
        self._unreadable[note.fragment] = len(note.unreadable)
        if note.rows:
            notes.add(note)
        else:
            notes.drop(note)

    # ---- committing

    def _commit(self, notes: Notes) -> int:
        """Add finished files to the fragments of the store as it is now; returns the rows that they
        encode."""
        usable: list[Note] = []

        def commit() -> lance.LanceDataset:
            """Commit every finished file that still fits the store's rows; returns the new version."""
            self._store.refresh()
            usable[:] = [note for note in notes.all() if self._still_fits(notes, note)]
            for note in usable:
                notes.place(note)
            if not usable:
                return self._store.dataset
            return lance.LanceDataset.commit(
                self._store.dataset, self._operation(usable), read_version=self._store.version
            )

        self._store.commit(commit)
        for note in usable:
            notes.drop(note)
        return sum(note.rows for note in usable)

    def _still_fits(self, notes: Notes, note: Note) -> bool:
        """Whether a file belongs to the fragment of that number; a joined or already served one is
        dropped."""
        layout = self._layout()
        fragment = self._store.dataset.get_fragment(note.fragment)
        if fragment is not None:
            metadata = fragment.metadata
            same = (metadata.physical_rows, layout.base(metadata)) == (note.physical_rows, note.base)
            if same and layout.file(metadata) != note.file:
                return True
        notes.drop(note)
        return False

    def _operation(self, notes: list[Note]) -> Any:
        """The fragments as they are, with our files answering for the column."""
        layout = self._layout()
        updated = []
        for note in notes:
            metadata = self._store.dataset.get_fragment(note.fragment).metadata
            for file in metadata.files:
                file.fields = [TOMBSTONE if leaf in layout.leaves else leaf for leaf in file.fields]
            kept = [file for file in metadata.files if set(file.fields) != {TOMBSTONE}]
            metadata.files = [*kept, lance.fragment.DataFile.create(self._store.dataset, note.file)]
            updated.append(metadata)
        return lance.LanceOperation.Update(updated_fragments=updated, fields_modified=sorted(layout.leaves))
