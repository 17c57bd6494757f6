"""The folder of adapters, and which of them lie in the bank's slots.

Adapters are chosen by name: that of a `.safetensors` file directly in the folder. Files are read, checked and
moved to the device in a thread; putting one into a slot is a copy between two steps. The slot that was not
used for longest gives way; one that a row on its way uses is never touched. What cannot be read is refused
by name, and tried again when its file changes.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import DarkroomError, InputError
from darkroom.models.adapters.read import read_adapter
from darkroom.sample.adapters import Adapted
from darkroom.serve.engine.tickets import AdapterCard, File, Loan, Read, Ticket, Work
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import AdapterChoice

if TYPE_CHECKING:
    from darkroom.models.adapters.bank import Bank


LOG = logging.getLogger("darkroom.serve")
SUFFIX = ".safetensors"
LOOK_S = 1.0
MOST_FILES = 10_000
MOST_NAME = 200
MOST_STAGED = 32


@dataclass(repr=False)
class Lent(Adapted):
    """A work's adapters where `sample.Job` expects those of a call: the bank is everybody's."""

    work: Work | None = None

    def _loans(self) -> list[tuple[AdapterChoice, Loan]]:
        assert self.work is not None
        return [(choice, self.work.lent[choice.name]) for choice in self.work.request.adapters]

    def choice(self, prompt: int) -> tuple[tuple[int, float], ...]:
        """Slots and weights."""
        return tuple((loan.slot, choice.weight) for choice, loan in self._loans())

    def parameters(self, prompt: int) -> list[dict[str, Any]]:
        """What a picture says of its adapters."""
        return [
            {"name": choice.name, "weight": choice.weight, "sha256": loan.read.sha256}
            for choice, loan in self._loans()
        ]

    @property
    def notes(self) -> list[str]:
        """What users should know of the files."""
        return [
            f"adapter '{choice.name}': {note}" for choice, loan in self._loans() for note in loan.read.notes
        ]


class Library:
    """`hold` and `let_go` belong to the engine's thread; the rest may be called from any."""

    def __init__(self, folder: Path, bank: Bank, metrics: Metrics, wake: Callable[[], None]) -> None:
        if not folder.is_dir():
            raise InputError(f"--adapters '{folder}' is no folder")
        self.folder, self.bank, self._metrics, self._wake = folder, bank, metrics, wake
        self._lock = threading.Lock()
        self._looked_s = -LOOK_S
        self._files: dict[str, File] = {}
        self._staged: OrderedDict[File, Read] = OrderedDict()
        self._at_hand: dict[File, Read] = {}  # of files in slots, without what was staged
        self._troubles: dict[File, DarkroomError] = {}
        self._reading: set[File] = set()
        self._slots: OrderedDict[File, int] = OrderedDict()  # least lately used first
        self._free = list(range(bank.slots, 0, -1))
        self._held: dict[Ticket, dict[str, File]] = {}
        self._users: Counter[File] = Counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="darkroom-adapters")

    def cards(self) -> list[AdapterCard]:
        """The adapters there are, by name."""
        files = self._look()
        with self._lock:
            return [
                AdapterCard(name, file.bytes, file in self._slots, _told(self._troubles.get(file)))
                for name, file in sorted(files.items())
            ]

    def names(self) -> set[str]:
        """What a request may name."""
        return set(self._look())

    def at_hand(self) -> set[str]:
        """The adapters that lie in slots or are about to."""
        with self._lock:
            return {file.name for file in (*self._slots, *self._staged)}

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
                self._files = _scan(self.folder)
            return self._files

    def fetch(self, names: Iterable[str]) -> None:
        """Begin to read adapters that are not at hand."""
        files = self._look()
        for name in names:
            if (file := files.get(name)) is not None:
                self._fetch(file)

    def _fetch(self, file: File) -> None:
        with self._lock:
            known = file in self._slots or file in self._staged or file in self._troubles
            if known or file in self._reading:
                return
            self._reading.add(file)
        self._pool.submit(self._read, file)

    def _read(self, file: File) -> None:
        try:
            adapter = read_adapter(file.path)
            read = Read(self.bank.stage(adapter), adapter.sha256, adapter.notes)
        except DarkroomError as error:
            self._note_trouble(file, error)
        except Exception as error:
            LOG.exception("adapter '%s' cannot be read", file.name)
            self._note_trouble(
                file, DarkroomError(f"adapter '{file.name}' could not be read: {type(error).__name__}")
            )
        else:
            with self._lock:
                self._staged[file] = read
                while len(self._staged) > self.bank.slots + MOST_STAGED:
                    self._staged.popitem(last=False)
                self._reading.discard(file)
        self._wake()

    def _note_trouble(self, file: File, error: DarkroomError) -> None:
        with self._lock:
            self._troubles = {
                other: trouble for other, trouble in self._troubles.items() if other.name != file.name
            }
            self._troubles[file] = error
            self._reading.discard(file)

    def hold(self, ticket: Ticket) -> bool:
        """Put a ticket's adapters into slots and keep them there; False while one is being read or no slot
        is free. Raises what is wrong with one of them."""
        if ticket in self._held:
            return True
        files = self._files_of(ticket.work.adapters)
        if len(files) > self.bank.slots:  # of a job that was accepted when there were more
            raise InputError(
                f"{len(files)} adapters in one picture", allowed=f"at most {self.bank.slots} on this server"
            )
        for file in files.values():
            if file not in self._slots and not self._place(file, set(files.values())):
                return False
        self._held[ticket] = files
        ticket.work.lent = {
            name: Loan(self._slots[file], self._at_hand[file]) for name, file in files.items()
        }
        self._users.update(files.values())
        for file in files.values():
            self._slots.move_to_end(file)
        return True

    def _files_of(self, names: Iterable[str]) -> dict[str, File]:
        files, found = self._look(), {}
        for name in names:
            if name not in files:
                raise InputError(f"adapter '{name}' is no longer there")
            found[name] = files[name]
        return found

    def _place(self, file: File, together: set[File]) -> bool:
        """Copy an adapter into a slot; False while it is not at hand or all slots are in use."""
        with self._lock:
            if (trouble := self._troubles.get(file)) is not None:
                raise trouble
            read = self._staged.pop(file, None)
        if read is None or read.staged is None:
            self._fetch(file)
            return False
        slot = self._free.pop() if self._free else self._give_way(together)
        if slot is None:
            with self._lock:
                self._staged[file] = read
            return False
        self.bank.load(slot, read.staged)
        with self._lock:
            self._slots[file] = slot
            self._at_hand[file] = replace(read, staged=None)
        self._metrics.swaps.inc()
        return True

    def _give_way(self, together: set[File]) -> int | None:
        """The slot of the adapter that was not used for longest and is not in use."""
        for file, slot in self._slots.items():
            if not self._users[file] and file not in together:
                with self._lock:
                    del self._slots[file], self._at_hand[file]
                return slot
        return None

    def lend(self, work: Work) -> Lent:
        """A work's adapters, as `sample.Job` takes them; in force while tickets of the work hold them."""
        return Lent([work.request.prompt], [[]], bank=self.bank, work=work)

    def let_go(self, ticket: Ticket) -> None:
        """A ticket needs its adapters no more."""
        for file in self._held.pop(ticket, {}).values():
            self._users[file] -= 1
            if not self._users[file]:
                del self._users[file]

    def close(self) -> None:
        """Read no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _told(error: DarkroomError | None) -> str | None:
    return None if error is None else str(error)


def _scan(folder: Path) -> dict[str, File]:
    """Plain files of the folder by their names. Links and folders do not count: nothing leads out of it."""
    found: dict[str, File] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                if name == entry.name or name.startswith(".") or not 0 < len(name) <= MOST_NAME:
                    continue
                at = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(at.st_mode) and len(found) < MOST_FILES:
                    found[name] = File(name, Path(entry.path), at.st_size, (at.st_mtime_ns, at.st_ino))
    except OSError as error:
        LOG.warning("the folder of adapters cannot be read: %s", error.strerror)
    return found
