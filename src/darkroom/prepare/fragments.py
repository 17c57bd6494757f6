"""The rows of one fragment: read in pieces, encoded, and written as the file that holds the column's values;
and notes of what is finished but not yet committed.

A piece is the rows that share an encoder's batch. Which rows those are depends on the fragment alone, never
on who reads it or from which row on.

`_prepare/<column>/<fragment>.json` in the store's folder names a finished file of encoded values in the same
folder. Committing moves the file into the dataset and removes the note, so the folder holds only what a kill
would lose; what is committed, the dataset itself knows.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileWriter

from darkroom.data.sidecars import PREPARING
from darkroom.errors import StoreError
from darkroom.hardware.system import atomic_replace, lock_file, remove_file, sync_file, write_atomically
from darkroom.prepare.columns import Column, Layout, Value


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
