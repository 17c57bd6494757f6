"""Concurrent writers of one store: conflicts, files that vanish, and numbers that must not come twice.

Lance gives a version its number by making a file that must not be there yet. Where versions are dropped
between a writer's look at the newest and its commit, that number may be free again: the commit goes well,
below the newest version, and its rows are in no version after it. A process that commits thus holds a shared
lock on the store's folder, and one that drops versions an exclusive one.

A data file is in no version until its commit. So a process that writes one holds a second lock, shared, from
the file's start to its commit, and one that removes files that no version names holds it exclusively.
"""

from __future__ import annotations

import difflib
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from darkroom.errors import DarkroomError, StoreError, is_system_failure
from darkroom.hardware.system import lock_file

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
