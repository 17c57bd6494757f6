"""Deleted bytes leave the disk: what has to go is noted before a deletion commits, and finished after a kill.

A deletion only marks rows. Their bytes go in three steps: fragments that lost rows are written anew, the
versions that still show them are dropped, and the files that no version names any more are removed. A note in
`_purge/` lists the files that hold deleted rows; it is made before the deletion commits and removed when
none of them is left. So a purge that was killed at any moment is finished by the next write to the store.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import lance

from darkroom.data.sidecars import PREPARING
from darkroom.hardware.system import lock_file, remove_file, write_atomically

PURGE = "_purge"
LANCE_FOLDERS = ("data", "_deletions", "_transactions", "_versions")
HINT = "latest_version_hint.json"


PERCENT_ENCODED = frozenset('\\{^}%`]">[~<#|*?')
"""What Lance writes as %XX in the path of a folder that it makes for its tags, besides what is not ASCII."""


@contextmanager
def no_stray_folder(path: Path) -> Iterator[None]:
    """Within, tags may be made: Lance 14 leaves an empty folder at the percent-encoded twin of a store's path
    that is removed. Folders that were there before stay.
    """
    whole = path.absolute()
    stray = Path(whole.anchor).joinpath(*map(_percent_encoded, whole.relative_to(whole.anchor).parts))
    if stray == whole:
        yield
        return
    made = [folder for folder in (stray, *stray.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in (stray / "_refs" / "tags", stray / "_refs", *made):
            with suppress(OSError):  # it holds something, or is not there
                folder.rmdir()


def _percent_encoded(name: str) -> str:
    return "".join(
        quote(sign, safe="")
        if sign in PERCENT_ENCODED or not (sign.isascii() and sign.isprintable())
        else sign
        for sign in name
    ).replace("~", "%7E")  # which `quote` never encodes


@dataclass
class Purged:
    """What a purge took off the disk, and what it had to leave.

    `pinned` names the pins, with their versions, that still show deleted rows; `left_files` are files with
    deleted rows that stay for them, or for versions too young to be dropped where there are no file locks.
    `others_writing`: files that no version names were left, as somebody else may be writing them.
    """

    files: int = 0
    bytes: int = 0
    left_files: int = 0
    left_bytes: int = 0
    pinned: dict[str, int] = field(default_factory=dict)
    others_writing: bool = False

    def lines(self) -> list[str]:
        """What stayed, for a reader; nothing where nothing did."""
        lines = []
        if self.pinned:
            pins = ", ".join(f"version {version} by '{name}'" for name, version in self.pinned.items())
            lines.append(
                f"{self.left_bytes:,} bytes with deleted pictures stay for what is pinned ({pins}); they go "
                "with the first write after it is unpinned"
            )
        elif self.left_files:
            lines.append(
                f"{self.left_bytes:,} bytes with deleted pictures stay for versions of the last ten minutes; "
                "they go with the first write after that"
            )
        return lines


@dataclass(frozen=True)
class PendingPurge:
    """A deletion that is not yet off the disk: of which source (None: by id), and in which files."""

    path: Path
    source: str | None
    files: list[str]
    pins: dict[str, int]


class Journal:
    """The notes in a store's `_purge/`; at an address (s3://) there are none."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._folder = root / PURGE if root is not None else None

    def add(self, source: str | None, files: Iterable[str]) -> None:
        """Note files that hold rows which are about to be deleted; on the disk when it returns."""
        if self._folder is not None:
            self._write(PendingPurge(self._folder / f"{uuid.uuid4().hex}.json", source, sorted(files), {}))

    def _write(self, note: PendingPurge) -> None:
        content = {"source": note.source, "files": note.files, "pins": note.pins}
        write_atomically(note.path, json.dumps(content), durable=True)

    def notes(self) -> list[PendingPurge]:
        """All that is still to be purged."""
        if self._folder is None or not self._folder.is_dir():
            return []
        read = ((path, json.loads(path.read_text("utf-8"))) for path in sorted(self._folder.glob("*.json")))
        return [
            PendingPurge(path, record["source"], record["files"], record["pins"]) for path, record in read
        ]

    def settle(self, note: PendingPurge, left: list[str], pins: dict[str, int]) -> None:
        """Note what is left of a deletion, or that nothing is."""
        if not left:
            remove_file(note.path)
        elif (left, pins) != (note.files, note.pins):
            self._write(PendingPurge(note.path, note.source, left, pins))


def files_of(fragment: lance.LanceFragment) -> set[str]:
    """The files that hold a fragment's rows, of all columns."""
    return {f"data/{file.path}" for file in fragment.data_files()}


def with_deletions(dataset: lance.LanceDataset) -> list[lance.LanceFragment]:
    """The fragments of which rows were deleted, and are still in the files."""
    return [f for f in dataset.get_fragments() if f.metadata.num_deletions]


def affected(dataset: lance.LanceDataset, where: str) -> set[str]:
    """The files that hold the rows a filter finds."""
    numbers: set[int] = set()
    for batch in dataset.to_batches(columns=[], filter=where, with_row_address=True):
        numbers.update((batch.column("_rowaddr").to_numpy() >> 32).tolist())
    return {file for number in numbers for file in files_of(dataset.get_fragment(number))}


@dataclass(frozen=True)
class VersionFiles:
    """The files that versions name: all that are kept, and the newest alone."""

    all: set[str]
    newest: set[str]

    @classmethod
    def of(cls, dataset: lance.LanceDataset) -> VersionFiles:
        """Read from the manifests of every version that there is."""
        rows = dataset.tracked_files().read_all()
        paths = (path.replace(os.sep, "/") for path in rows["path"].to_pylist())
        pairs = list(zip(rows["version"].to_pylist(), paths, strict=True))
        return cls({p for _, p in pairs}, {p for v, p in pairs if v == dataset.version})


def unnamed(root: Path, named: set[str]) -> list[Path]:
    """Files in Lance's folders that belong to no version."""
    found = []
    for folder in LANCE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.relative_to(root).as_posix() not in named and path.name != HINT:
                found.append(path)
    return found


def remove_counts(root: Path) -> None:
    """Remove the sizes noted for data files that are no more."""
    files = {path.stem for path in (root / "data").glob("*.lance")}
    for path in (root / "_shapes").glob("*.json"):
        if path.stem not in files:
            remove_file(path)


def remove_files(root: Path, dataset: lance.LanceDataset, *, alone: bool, pins: dict[str, int]) -> Purged:
    """Remove what no version names: the files noted, and with `alone` all others too. Call it with commits
    locked out and old versions dropped.
    """
    journal, named, purged = Journal(root), VersionFiles.of(dataset), Purged(others_writing=not alone)
    notes = journal.notes()
    noted = {file for note in notes for file in note.files}
    gone = {root / file for file in noted - named.all}
    gone.update(unnamed(root, named.all) if alone else ())
    gone.update(stale_preparations(root, named.newest))
    for path in sorted(gone):
        purged.bytes += path.stat().st_size if path.is_file() else 0
        purged.files += path.is_file()
        remove_file(path)
    remove_counts(root)
    left = (noted & named.all) - named.newest
    purged.left_files, purged.left_bytes = len(left), sum((root / file).stat().st_size for file in left)
    if left:
        purged.pinned = {name: version for name, version in pins.items() if version != dataset.version}
    # The note that knows the source goes last: while it is there, the same deletion again is no mistake.
    for note in sorted(notes, key=lambda note: note.source is not None):
        journal.settle(note, [file for file in note.files if file in left], purged.pinned)
    return purged


def stale_preparations(root: Path, newest: set[str]) -> Iterator[Path]:
    """Values that a killed prepare left for fragments that are no more, and what it left half-written."""
    for folder in sorted((root / PREPARING).glob("*/")):
        with _unused(folder) as unused:
            if not unused:
                continue  # a running prepare lets go itself of what no longer fits
            kept = {"lock"}
            for path in sorted(folder.glob("[0-9]*.json")):
                record: dict[str, Any] = json.loads(path.read_text("utf-8"))
                if f"data/{record['base']}" in newest:
                    kept |= {path.name, record["file"]}
            yield from (path for path in sorted(folder.iterdir()) if path.name not in kept)


@contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Whether no prepare holds a column's folder; none can start within."""
    with (folder / "lock").open("ab") as file:
        try:
            lock_file(file)
            free = True
        except OSError:
            free = False
        yield free


def preparing(root: Path) -> bool:
    """Whether a prepare is running on a store."""
    for folder in (root / PREPARING).glob("*/"):
        with _unused(folder) as unused:
            if not unused:
                return True
    return False
