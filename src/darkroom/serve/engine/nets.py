"""The folder of nets (ControlNets, LLLites, T2I-Adapters, IP-Adapters), and those of them that are in memory.

A net is named by its file or folder. It is read when a job asks for it, in a thread, and stays until others
need its memory: the one that was not used for longest goes first, one that a row on its way uses never. All
together take no more than the bound, also while one is being read.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from darkroom.errors import DarkroomError, InputError
from darkroom.hardware import accelerator
from darkroom.models.control import ControlCard, Net, describe_control, read_control
from darkroom.models.image_prompt import ENCODER_FOLDER, ImagePrompt, install
from darkroom.models.lllite import ControlNetLite
from darkroom.sample.control import Control, Controls, make_alike
from darkroom.serve.engine.shelf import MOST_LISTED, SUFFIX, Shelf, may_be_named, scan
from darkroom.serve.engine.tickets import EngineJob, File, Ticket, opened

if TYPE_CHECKING:
    from darkroom.models.model import Model

PATIENCE_S = 2.0
"""A ticket that has waited so long for memory gets it before others may use nets that stand in its way."""
MIB = 2**20


@dataclass(frozen=True)
class NetCard:
    """A net that a request may name. `trouble` says why one cannot be used, once that was found out."""

    name: str
    bytes: int
    kind: str | None = None
    """controlnet, controlnet-lllite, t2i-adapter or ip-adapter, once a request has named it."""
    loaded: bool = False
    trouble: str | None = None


def names_of_nets(folder: Path) -> set[str]:
    """What requests may name of a folder."""
    return set(scan(folder, Nets.noun, _folder_of_net))


class Nets(Shelf):
    """The nets of the folder, and those in memory."""

    noun = "net"

    def __init__(
        self,
        folder: Path,
        model: Model,
        device: torch.device,
        dtype: torch.dtype,
        most_bytes: int,
        wake: Callable[[], None],
        optimised: Sequence[str] = (),
    ) -> None:
        super().__init__(folder, "--controls", wake, device)
        self.model, self.most_bytes, self._optimised = model, most_bytes, optimised
        self._device, self._dtype = device, dtype
        self._known: dict[File, ControlCard] = {}
        self._loaded: OrderedDict[File, Net] = OrderedDict()  # least lately used first
        self._bytes: dict[File, int] = {}  # of what is in memory or being read
        self._first: Ticket | None = None  # who has waited longest, for whom others are released
        self._first_s = 0.0
        self.in_attention: dict[int, ImagePrompt | ControlNetLite] = {}
        """The IP-Adapters and LLLites in memory, by their place in the U-Net's attentions."""
        install(model, self.in_attention)

    def _scan(self) -> dict[str, File]:
        return scan(self.folder, self.noun, _folder_of_net)

    @property
    def bytes(self) -> int:
        """Of the nets in memory or being read."""
        return sum(list(self._bytes.values()))

    def cards(self) -> list[NetCard]:
        """The nets there are, by name."""
        files = self._look()
        with self._lock:
            return [
                NetCard(name, file.bytes, self._kind(file), file in self._loaded, self.trouble(file))
                for name, file in sorted(files.items())
            ]

    def _kind(self, file: File) -> str | None:
        known = self._known.get(file)
        return None if known is None else known.kind

    # ---- before a job is accepted

    def describe(self, name: str) -> ControlCard:
        """What a net is; InputError for none of that name, or one that cannot be used with this model.

        The first time its configuration is read, so not for the event loop.
        """
        file = self._look().get(name)
        if file is None:
            there = list(itertools.islice(self._fitting(), MOST_LISTED + 1))
            more = ", ..." if len(there) > MOST_LISTED else ""
            raise InputError(
                f"no net '{name[:100]}' here", allowed=", ".join(there[:MOST_LISTED]) + more or "none"
            )
        self.check([name])
        if file not in self._known:
            try:
                self._known[file] = describe_control(file.path, self.model)
            except DarkroomError as error:
                self._note_trouble(file, error)
                raise
            except Exception as error:
                message = self._unreadable(file, error)
                self._note_trouble(file, message)
                raise message from error
        return self._known[file]

    def _fitting(self) -> Iterator[str]:
        """The names of those that this model can use, in order. May read configurations."""
        for name in sorted(self.names()):
            try:
                self.describe(name)
            except DarkroomError:
                continue
            yield name

    def first_of(self, kind: str) -> str | None:
        """The first net of a kind by name, of those that this model can use. May read configurations."""
        return next((name for name in self._fitting() if self.describe(name).kind == kind), None)

    def check_room(self, names: Iterable[str]) -> None:
        """InputError where these nets together are more than may be in memory."""
        files = self._files_of(dict.fromkeys(names))
        needs = sum(self._needs(file) for file in files.values())
        if needs > self.most_bytes:
            raise InputError(
                f"{', '.join(files)}: {needs / MIB:.0f} MiB together",
                allowed=f"{self.most_bytes / MIB:.0f} MiB of nets in memory (--control-memory)",
            )

    def _needs(self, file: File) -> int:
        known = self._known.get(file)
        # A file that was not looked into may hold half precision.
        return file.bytes * 2 if known is None else known.num_weights * self._dtype.itemsize

    # ---- in memory

    def _has(self, file: File) -> bool:
        return file in self._loaded

    def _fetch(self, file: File, keep: Collection[File] | None = None) -> None:
        """Begin to read a net if it fits; it is made of all but `keep`, unless that is None."""
        with self._lock:
            if file in self._loaded or file in self._troubles or file in self._reading:
                return
            if not self._make_room(file, keep):
                return
            self._reading.add(file)
        self._pool.submit(self._read, file)

    def _make_room(self, file: File, keep: Collection[File] | None) -> bool:
        needs, free = self._needs(file), self.most_bytes - self.bytes
        unused = (
            [] if keep is None else [one for one in self._loaded if not self._users[one] and one not in keep]
        )
        if needs > free + sum(self._bytes[one] for one in unused):
            return False
        for one in unused:
            if needs <= free:
                break
            free += self._release(one)
        self._bytes[file] = needs
        return True

    def _release(self, file: File) -> int:
        """Let go of a net that nobody uses; its bytes."""
        net = self._loaded.pop(file)
        for place, other in tuple(self.in_attention.items()):
            if other is net:
                del self.in_attention[place]
        return self._bytes.pop(file)

    def _load(self, file: File) -> None:
        try:
            net = read_control(file.path, self.model, name=file.name)
            with self._alone, accelerator.on_stream(self._stream):
                net.to(self._device, self._dtype)
            make_alike(net, self._optimised)
            accelerator.used_here(*net.weights)
        except BaseException:
            with self._lock:
                del self._bytes[file]
            raise
        with self._lock:
            self._bytes[file] = net.num_bytes
            self._loaded[file] = net
            if isinstance(net, (ImagePrompt, ControlNetLite)):
                taken = self.in_attention.keys()
                self.in_attention[min(set(range(len(taken) + 1)) - taken)] = net

    def hold(self, ticket: Ticket) -> bool:
        """Keep a ticket's nets in memory; False while one is being read or it does not fit. Raises
        what is wrong with one of them."""
        if ticket in self._held:
            return True
        files = self._files_of(choice.net for choice in ticket.work.request.controls)
        first = self._waits_longest()
        with self._lock:
            missing = [file for file in files.values() if file not in self._loaded]
            if missing:
                for file in missing:
                    self._raise_trouble(file)
                if first is None:
                    self._first, self._first_s = ticket, time.monotonic()
                keep = set(files.values()) if self._first is ticket else None
                for file in missing:
                    self._fetch(file, keep)
                return False
            if first not in (None, ticket) and time.monotonic() - self._first_s > PATIENCE_S:
                return False
            ticket.work.nets = {name: self._loaded[file] for name, file in files.items()}
            for file in files.values():
                self._loaded.move_to_end(file)
        if first is ticket:
            self._first = None
        self._take(ticket, files)
        return True

    def _waits_longest(self) -> Ticket | None:
        if self._first is not None and self._first.work.over:
            self._first = None
        return self._first

    def let_go(self, ticket: Ticket) -> None:
        """A ticket needs its nets no more, or no longer waits for them."""
        if self._first is ticket:
            self._first = None
        super().let_go(ticket)

    def lend(self, work: EngineJob) -> Controls:
        """A work's nets with their pictures, as `sample.Generation` takes them."""
        uploads = () if work.uploads is None else work.uploads.controls
        controls = [
            Control(
                work.nets[choice.net],
                opened(given.image),
                choice.weight,
                choice.start,
                choice.end,
                choice.guess,
                choice.map,
                None if given.mask is None else opened(given.mask),
                soft=choice.soft,
            )
            for choice, given in zip(work.request.controls, uploads, strict=True)
        ]
        return Controls.read(controls, self.model)


def _folder_of_net(entry: os.DirEntry[str]) -> File | None:
    """A folder of diffusers that is no link."""
    if (
        not may_be_named(entry.name)
        or entry.name == ENCODER_FOLDER
        or not entry.is_dir(follow_symlinks=False)
    ):
        return None
    folder = Path(entry.path)
    if not (folder / "config.json").is_file():
        return None
    parts = [file.stat() for file in (folder / "config.json", *folder.glob(f"*{SUFFIX}"))]
    stamp = max(part.st_mtime_ns for part in parts), entry.stat(follow_symlinks=False).st_ino
    return File(entry.name, folder, sum(part.st_size for part in parts), stamp)
