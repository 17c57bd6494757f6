"""The folder of adapters, and which of them lie in the bank's slots.

Adapters are chosen by name: that of a `.safetensors` file directly in the folder. Files are read, checked and
moved to the device in a thread; putting one into a slot is a copy between two steps. The slot that was not
used for longest gives way; one that a row on its way uses is never touched. What cannot be read is refused
by name, and tried again when its file changes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import InputError
from darkroom.hardware import accelerator
from darkroom.models.adapters.read import read_adapter
from darkroom.sample.adapters import Adapted, said_of
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
        """Slots, and the U-Net's weights."""
        return tuple((loan.slot, choice.weight) for choice, loan in self._loans())

    def text_choice(self, prompt: int) -> tuple[tuple[int, float], ...]:
        """Slots, and the text encoders' weights."""
        return tuple((loan.slot, choice.text) for choice, loan in self._loans())

    def parameters(self, prompt: int) -> list[dict[str, Any]]:
        """What a picture says of its adapters."""
        return [
            said_of(choice.name, choice.weight, choice.text, choice.blocks, loan.read.sha256)
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

    def __init__(
        self,
        folder: Path,
        bank: Bank,
        metrics: Metrics,
        wake: Callable[[], None],
        most_bytes: float = math.inf,
    ) -> None:
        place = accelerator.computed_on(bank.model.unet)  # type: ignore[arg-type]
        super().__init__(folder, "--adapters", wake, place)
        self.bank, self._metrics = bank, metrics
        self.most_bytes = most_bytes
        """What differences as large as layers may take, in slots and staged."""
        self._staged: OrderedDict[File, ReadAdapter] = OrderedDict()
        self._at_hand: dict[File, ReadAdapter] = {}  # of files in slots, without what was staged
        self._slots: OrderedDict[File, int] = OrderedDict()  # least lately used first
        self._free = list(range(bank.slots, 0, -1))

    def cards(self) -> list[AdapterCard]:
        """The adapters there are, by name."""
        files = self._look()
        with self._lock:
            loaded = {replace(file, blocks=()).name for file in self._slots}
            return [
                AdapterCard(name, file.bytes, name in loaded, self.trouble(file))
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
        with self._alone, accelerator.on_stream(self._stream):
            staged = self.bank.stage(adapter, file.blocks)
        accelerator.used_here(*(one for change in staged.changes.values() for one in change.tensors))
        if staged.dense_bytes > self.most_bytes:
            raise self._too_large(f"adapter '{file.name}' ({adapter.kind})", staged.dense_bytes)
        read = ReadAdapter(staged, adapter.sha256, adapter.notes, staged.dense_bytes)
        with self._lock:
            self._staged[file] = read
            while len(self._staged) > self.bank.slots + MOST_STAGED:
                self._staged.popitem(last=False)
            for other in [one for one, kept in self._staged.items() if kept.dense_bytes and one != file]:
                if self.dense_bytes > self.most_bytes:
                    del self._staged[other]

    @property
    def dense_bytes(self) -> int:
        """Of differences as large as layers, in slots and staged."""
        with self._lock:
            return sum(read.dense_bytes for read in (*self._staged.values(), *self._at_hand.values()))

    def _too_large(self, what: str, needs: int) -> InputError:
        return InputError(
            f"{what} takes {needs / 2**20:.1f} MiB of differences as large as layers",
            allowed=f"{self.most_bytes / 2**20:.1f} MiB on this server (--adapter-memory)",
        )

    def fetch_for(self, work: EngineJob) -> None:
        """Begin to read a work's adapters that are not at hand."""
        files = self._look()
        for choice in work.request.adapters:
            if (file := files.get(choice.name)) is not None:
                self._fetch(replace(file, blocks=choice.blocks))

    def hold(self, ticket: Ticket) -> bool:
        """Put a ticket's adapters into slots and keep them there; False while one is being read or no slot
        is free. Raises what is wrong with one of them."""
        if ticket in self._held:
            return True
        blocks = {choice.name: choice.blocks for choice in ticket.work.request.adapters}
        files = {
            name: replace(file, blocks=blocks[name])
            for name, file in self._files_of(ticket.work.adapters).items()
        }
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
        slot = self._slot_for(read, together)
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

    def _slot_for(self, read: ReadAdapter, together: set[File]) -> int | None:
        """A slot, and memory for differences as large as layers; None while both are in use."""
        if read.dense_bytes:
            with self._lock:
                there = {file: self._at_hand[file].dense_bytes for file in self._slots}
            used = sum(there[file] for file in there if self._users[file] or file in together)
            if used + read.dense_bytes > self.most_bytes:
                if used == sum(there.get(file, 0) for file in together):
                    raise self._too_large("what one picture asks for", used + read.dense_bytes)
                return None
            for file in [one for one in there if there[one]]:
                if (
                    sum(self._at_hand[one].dense_bytes for one in self._slots) + read.dense_bytes
                    <= self.most_bytes
                ):
                    break
                if not self._users[file] and file not in together:
                    self._free.append(self._release(file))
        if self._free:
            return self._free.pop()
        unused = (file for file in self._slots if not self._users[file] and file not in together)
        oldest = next(unused, None)
        return None if oldest is None else self._release(oldest)

    def _release(self, file: File) -> int:
        """Take an adapter that nobody uses out of its slot."""
        with self._lock:
            slot = self._slots.pop(file)
            if self._at_hand.pop(file).dense_bytes:
                self.bank.clear(slot)
        return slot

    def lend(self, work: EngineJob) -> Lent:
        """A work's adapters for `sample.Generation`; in force while tickets of the work hold them."""
        return Lent([work.request.prompt], [[]], bank=self.bank, work=work)
