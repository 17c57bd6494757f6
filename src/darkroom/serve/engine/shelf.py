"""Files of a folder by name, read in a thread while steps run, and held by the pictures that use them.

What adapters (`adapters.Library`) and nets (`nets.Nets`) have in common. A file that cannot be read is
refused by name, and tried again when it changes.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from darkroom.errors import DarkroomError, InputError
from darkroom.hardware import accelerator
from darkroom.serve.engine.tickets import File, Ticket
from darkroom.serve.request import say

if TYPE_CHECKING:
    import torch

LOG = logging.getLogger("darkroom.serve")
SUFFIX = ".safetensors"
LOOK_S = 1.0
MOST_FILES = 10_000
MOST_NAME = 200
MOST_LISTED = 20
"""Names in a message."""


class Shelf:
    """`hold` and `let_go` belong to the engine's thread; the rest may be called from any."""

    noun = ""
    """What a file is."""

    def __init__(self, folder: Path, option: str, wake: Callable[[], None], device: torch.device) -> None:
        if not folder.is_dir():
            raise InputError(f"{option} '{folder}' is no folder")
        self.folder, self._wake = folder, wake
        self._lock = threading.RLock()
        self._looked_s = -LOOK_S
        self._files: dict[str, File] = {}
        self._troubles: dict[File, DarkroomError] = {}
        self._reading: set[File] = set()
        self._held: dict[Ticket, dict[str, File]] = {}
        self._users: Counter[File] = Counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="darkroom-reader")
        self._alone = accelerator.alone(device)
        self._stream = accelerator.new_stream(device)
        """Of the reading thread: on the steps' stream each tensor of a file would wait for a step."""

    def _scan(self) -> dict[str, File]:
        """What is in the folder, by name."""
        return scan(self.folder, self.noun)

    def _has(self, file: File) -> bool:
        """Whether it was read and is still there; the lock is held."""
        raise NotImplementedError

    def _load(self, file: File) -> None:
        """Read a file and keep what it holds; on the reading thread."""
        raise NotImplementedError

    def names(self) -> set[str]:
        """What a request may name."""
        return set(self._look())

    def trouble(self, file: File) -> str | None:
        """What is known to be wrong with a file."""
        error = self._troubles.get(file)
        return None if error is None else say(error)

    def check(self, names: Iterable[str]) -> None:
        """Raises what is known to be wrong with one of them."""
        files = self._look()
        for name in names:
            if name in files and (trouble := self._troubles.get(files[name])) is not None:
                if isinstance(trouble, InputError):
                    raise trouble
                with self._lock:  # the machine's trouble, not the file's: it is tried again
                    self._troubles.pop(files[name], None)

    def _look(self) -> dict[str, File]:
        """The folder's files, looked up anew at most every second."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._looked_s = time.monotonic()
                self._files = self._scan()
            return self._files

    def fetch(self, names: Iterable[str]) -> None:
        """Begin to read files that are not at hand."""
        files = self._look()
        for name in names:
            if (file := files.get(name)) is not None:
                self._fetch(file)

    def _fetch(self, file: File) -> None:
        with self._lock:
            if self._has(file) or file in self._troubles or file in self._reading:
                return
            self._reading.add(file)
        self._pool.submit(self._read, file)

    def _read(self, file: File) -> None:
        try:
            self._load(file)
        except DarkroomError as error:
            self._note_trouble(file, error)
        except Exception as error:
            self._note_trouble(file, self._unreadable(file, error))
        with self._lock:
            self._reading.discard(file)
        self._wake()

    def _unreadable(self, file: File, error: Exception) -> DarkroomError:
        """What clients see of a failure that is not darkroom's own; the log has all of it."""
        LOG.error("%s '%s' cannot be read", self.noun, file.name, exc_info=error)
        return DarkroomError(f"{self.noun} '{file.name}' could not be read: {type(error).__name__}")

    def _note_trouble(self, file: File, error: DarkroomError) -> None:
        with self._lock:
            self._troubles = {
                other: trouble for other, trouble in self._troubles.items() if other.name != file.name
            }
            self._troubles[file] = error

    def _files_of(self, names: Iterable[str]) -> dict[str, File]:
        files, found = self._look(), {}
        for name in names:
            if name not in files:
                raise InputError(f"{self.noun} '{name}' is no longer there")
            found[name] = files[name]
        return found

    def _raise_trouble(self, file: File) -> None:
        """Raises what is wrong with a file that a picture waits for."""
        if (trouble := self._troubles.get(file)) is not None:
            raise trouble

    def _take(self, ticket: Ticket, files: dict[str, File]) -> None:
        """Note that a ticket uses these."""
        self._held[ticket] = files
        self._users.update(files.values())

    def let_go(self, ticket: Ticket) -> None:
        """A ticket needs its files no more."""
        for file in self._held.pop(ticket, {}).values():
            self._users[file] -= 1
            if not self._users[file]:
                del self._users[file]

    def close(self) -> None:
        """Read no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def scan(
    folder: Path, noun: str, is_named: Callable[[os.DirEntry[str]], File | None] | None = None
) -> dict[str, File]:
    """Plain files of a folder by their names. Links do not count: nothing leads out of it. `is_named` says
    what else counts."""
    found: dict[str, File] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                file = _plain(entry) or (None if is_named is None else is_named(entry))
                if file is not None and len(found) < MOST_FILES:
                    found[file.name] = file
    except OSError as error:
        LOG.warning("the folder of %ss cannot be read: %s", noun, error.strerror)
    return found


def _plain(entry: os.DirEntry[str]) -> File | None:
    """A .safetensors file that is no link."""
    name = entry.name.removesuffix(SUFFIX)
    if name == entry.name or not may_be_named(name):
        return None
    at = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(at.st_mode):
        return None
    return File(name, Path(entry.path), at.st_size, (at.st_mtime_ns, at.st_ino))


def may_be_named(name: str) -> bool:
    """Whether requests may name it so."""
    return not name.startswith(".") and 0 < len(name) <= MOST_NAME
