"""Versions of a store: several writers' commits, and deleted bytes that leave the disk.

Lance gives a version its number by making a file that must not be there yet. Where versions are dropped
between a writer's look at the newest and its commit, that number may be free again: the commit goes well,
below the newest version, and its rows are in no version after it. A process that commits thus holds a shared
lock on the store's folder, and one that drops versions an exclusive one.

A data file is in no version until its commit. So a process that writes one holds a second lock, shared, from
the file's start to its commit, and one that removes files that no version names holds it exclusively.
"""

from __future__ import annotations

import difflib
import json
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import lance

from darkroom.data.sidecars import PREPARING
from darkroom.errors import DarkroomError, StoreError, is_system_failure
from darkroom.hardware.system import lock_file, remove_file, write_atomically

# ---- concurrent writers: conflicts, files that vanish, and numbers that must not come twice

T = TypeVar("T")

LOOKS = 10
VANISHED = re.compile(
    r"not found.*[/\\](_versions[/\\][^/\\,]+\.manifest|data[/\\][^/\\,]+\.lance,"
    r"|(_deletions|_transactions)[/\\])",
    re.I,
)
PATH = re.compile(r"\S*[/\\]\S*")
NETWORK = re.compile(r"error sending request|connection (refused|reset|closed)|timed out|dns error", re.I)
COMMITS, WRITERS = "_commits.lock", "_writers.lock"


def conflicted(error: Exception) -> bool:
    """Whether a commit conflicts with one that came before it."""
    return "conflict" in PATH.sub("", str(error)).lower()


def vanished(error: Exception) -> bool:
    """Whether a file of a store's version is gone: the version was dropped, or the store is damaged."""
    return VANISHED.search(str(error)) is not None


def wait(attempt: int) -> None:
    """Let the others go first: 20 to 100 ms, up to ten times as long after many attempts."""
    time.sleep(random.uniform(0.02, 0.1) * min(attempt + 1, 10))


def look(call: Callable[[], T]) -> T:
    """What `call` returns, called up to ten times where what it listed is gone before it is read."""
    for _ in range(LOOKS - 1):
        try:
            return call()
        except (OSError, ValueError) as error:
            if not vanished(error):
                raise
            wait(0)
    return call()


@contextmanager
def committing(folder: Path | None) -> Iterator[None]:
    """Within, nobody drops versions of the store in a folder; other commits go on."""
    with _locked(folder, COMMITS, shared=True, wait=True):
        yield


@contextmanager
def dropping(folder: Path | None) -> Iterator[bool]:
    """Within, nobody commits to the store in a folder; False where that cannot be had, as at an address."""
    with _locked(folder, COMMITS, wait=True) as locked:
        yield locked


@contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """Within, nobody removes data files that are in no version yet; other writers go on."""
    with _locked(folder, WRITERS, shared=True, wait=True):
        yield


@contextmanager
def sole_writer(folder: Path | None) -> Iterator[bool]:
    """Within, nobody writes data files; False where somebody does, or where there are no locks."""
    with _locked(folder, WRITERS) as locked:
        yield locked


@contextmanager
def _locked(folder: Path | None, name: str, *, shared: bool = False, wait: bool = False) -> Iterator[bool]:
    if folder is None:
        yield False
        return
    with (folder / name).open("ab") as file:
        try:
            lock_file(file, shared=shared, wait=wait)
            locked = True
        except OSError:  # a file system without locks, or somebody else has it
            locked = False
        yield locked


def not_opened(path: str, version: int | None, error: Exception) -> DarkroomError:
    """Why a store at a path, or a version of it, could not be opened."""
    if is_system_failure(error) or NETWORK.search(str(error)):
        return DarkroomError(f"{path} could not be read: {plain(error)}; the same command tries again")
    if "not found" not in str(error):
        return StoreError(f"{path} is damaged: {plain(error)}")
    if version is not None and "://" not in path and (Path(path) / "_versions").is_dir():
        return StoreError(f"{path} has no version {version}", mend="it was dropped; pin a version to keep it")
    return StoreError(f"no picture store at {path}", mend=f"make one with: darkroom import SOURCE {path}")


def no_column(name: str, names: Sequence[str], what: str) -> StoreError:
    """That none of the `names` is this one, with those that are near; `what` they are, in a word."""
    near = difflib.get_close_matches(name.lower(), names, 3, 0.5)
    mend = f"did you mean {' or '.join(near)}?" if near else ""
    return StoreError(f"no {what} '{name}'", allowed=", ".join(names), mend=mend)


def plain(error: Exception) -> str:
    """Lance's message in one line, without the place in its own source."""
    text = " ".join(str(error).split()).removeprefix("Invalid user input: ")
    return re.sub(r"(, )?\S*[/\\]rust[/\\]\S+\.rs:\d+:\d+", "", text)


class Filtering:
    """Within, what Lance says of a filter becomes a StoreError of one line."""

    def __init__(self, filter: str | None, names: Sequence[str]) -> None:
        self._filter, self._names = filter, names
        for quoted in re.findall(r'"([^"]*)"', filter or ""):
            if quoted in names:
                # Lance takes it for a text and would find nothing.
                raise StoreError(f'filter {filter!r}: "{quoted}" is a text', mend=f"the column is `{quoted}`")

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._filter is None or not isinstance(error, ValueError):
            return
        unknown = re.search(r"No field named [\"`]?([^\"`. ]+)", str(error))
        if unknown:
            raise no_column(unknown[1], self._names, "column") from error
        raise StoreError(
            f"filter {self._filter!r}: {plain(error)}", mend="SQL, such as: width >= 512"
        ) from error


# ---- purging: what has to go is noted before a deletion commits, and finished after a kill
#
# A deletion only marks rows. Their bytes go in three steps: fragments that lost rows are written anew, the
# versions that still show them are dropped, and the files that no version names any more are removed. A note
# in `_purge/` lists the files that hold deleted rows; it is made before the deletion commits and removed when
# none of them is left. So a purge that was killed at any moment is finished by the next write to the store.

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
