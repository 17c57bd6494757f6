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

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lance

from darkroom import models
from darkroom.data.store import Store
from darkroom.prepare.columns import Column, Layout, check_made_alike, columns_to_make
from darkroom.prepare.fragments import EncodeBatch, FragmentFile, Note, Notes, encode_piece, read_pieces

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
