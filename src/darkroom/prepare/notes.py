"""What a prepare has finished but not yet committed: small JSON files inside the store's folder.

`_prepare/<column>/<fragment>.json` names a finished file of encoded values in the same folder. Committing
moves the file into the dataset and lets the note go, so the folder holds only what a kill would lose; what is
committed, the dataset itself knows.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from darkroom.data.sidecars import PREPARING, write_atomically
from darkroom.errors import StoreError
from darkroom.hardware.system import atomic_replace, lock_file, remove_file, sync_file


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
