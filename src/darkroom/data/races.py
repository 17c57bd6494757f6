"""Writers of one store beside each other: conflicts, files that vanish, and numbers that must not come twice.

Lance gives a version its number by making a file that must not be there yet. Where versions are dropped
between a writer's look at the newest and its commit, that number may be free again: the commit goes well,
below the newest version, and its rows are in no version after it. So whoever commits holds a shared lock on
the store's folder, and whoever drops versions an exclusive one.

A data file is in no version until its commit. So whoever writes one holds a second lock, shared, from the
file's start to its commit, and whoever removes files that no version names holds it exclusively.
"""

from __future__ import annotations

import fcntl
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LOOKS = 10
VANISHED = re.compile(
    r"not found.*/(_versions/[^/,]+\.manifest|data/[^/,]+\.lance,|_deletions/|_transactions/)", re.I
)
PATH = re.compile(r"\S*/\S*")
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
    with _locked(folder, COMMITS, fcntl.LOCK_SH):
        yield


@contextmanager
def dropping(folder: Path | None) -> Iterator[bool]:
    """Within, nobody commits to the store in a folder; False where that cannot be had, as at an address."""
    with _locked(folder, COMMITS, fcntl.LOCK_EX) as locked:
        yield locked


@contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """Within, nobody removes data files that are in no version yet; other writers go on."""
    with _locked(folder, WRITERS, fcntl.LOCK_SH):
        yield


@contextmanager
def sole_writer(folder: Path | None) -> Iterator[bool]:
    """Within, nobody writes data files; False where somebody does, or where there are no locks."""
    with _locked(folder, WRITERS, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
        yield locked


@contextmanager
def _locked(folder: Path | None, name: str, how: int) -> Iterator[bool]:
    if folder is None:
        yield False
        return
    with (folder / name).open("ab") as file:
        try:
            fcntl.flock(file, how)
            locked = True
        except OSError:  # a file system without locks, or somebody else has it
            locked = False
        yield locked
