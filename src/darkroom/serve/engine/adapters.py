"""The folder of adapters, and which of them lie in the bank's slots.

Adapters are chosen by name: that of a `.safetensors` file directly in the folder. Files are read, checked and
moved to the device in a thread; putting one into a slot is a copy between two steps. The slot that was not
used for longest gives way; one that a row on its way uses is never touched. What cannot be read is refused
by name, and tried again when its file changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import InputError
from darkroom.models.adapters.read import read_adapter
from darkroom.sample.adapters import Adapted
from darkroom.serve.engine.shelf import Shelf
from darkroom.serve.engine.tickets import AdapterCard, EngineJob, File, Loan, ReadAdapter, Ticket
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import AdapterChoice

if TYPE_CHECKING:
    from darkroom.models.adapters.bank import Bank


MOST_STAGED = 32


@dataclass(repr=False)
class Lent(Adapted):
    """A work's adapters where `sample.Generation` expects those of a call: the bank is everybody's."""

    work: EngineJob | None = None

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


class Library(Shelf):
    """The adapters of the folder, and the bank's slots."""

    noun = "adapter"

    def __init__(self, folder: Path, bank: Bank, metrics: Metrics, wake: Callable[[], None]) -> None:
        super().__init__(folder, "--adapters", wake)
        self.bank, self._metrics = bank, metrics
        self._staged: OrderedDict[File, ReadAdapter] = OrderedDict()
        self._at_hand: dict[File, ReadAdapter] = {}  # of files in slots, without what was staged
        self._slots: OrderedDict[File, int] = OrderedDict()  # least lately used first
        self._free = list(range(bank.slots, 0, -1))

    def cards(self) -> list[AdapterCard]:
        """The adapters there are, by name."""
        files = self._look()
        with self._lock:
            return [
                AdapterCard(name, file.bytes, file in self._slots, self.trouble(file))
                for name, file in sorted(files.items())
            ]

    def at_hand(self) -> set[str]:
        """The adapters that lie in slots or are about to."""
        with self._lock:
            return {file.name for file in (*self._slots, *self._staged)}

    def _has(self, file: File) -> bool:
        return file in self._slots or file in self._staged

    def _load(self, file: File) -> None:
        adapter = read_adapter(file.path)
        read = ReadAdapter(self.bank.stage(adapter), adapter.sha256, adapter.notes)
        with self._lock:
            self._staged[file] = read
            while len(self._staged) > self.bank.slots + MOST_STAGED:
                self._staged.popitem(last=False)

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
        self._take(ticket, files)
        ticket.work.lent = {
            name: Loan(self._slots[file], self._at_hand[file]) for name, file in files.items()
        }
        for file in files.values():
            self._slots.move_to_end(file)
        return True

    def _place(self, file: File, together: set[File]) -> bool:
        """Copy an adapter into a slot; False while it is not at hand or all slots are in use."""
        with self._lock:
            self._raise_trouble(file)
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

    def lend(self, work: EngineJob) -> Lent:
        """A work's adapters for `sample.Generation`; in force while tickets of the work hold them."""
        return Lent([work.request.prompt], [[]], bank=self.bank, work=work)
