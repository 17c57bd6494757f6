"""A set of ids that stays small: eight bytes an id, in sorted runs, the large ones on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PENDING = 65_536
RUN = 4 * 1024**2

Ids = NDArray[np.uint64]


def short_id(text: str) -> int:
    """64 bits of a text, as a member of the set; a file's name that is no UTF-8 is one too."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class SeenIds:
    """Ids of 64 bits that were seen before.

    Of a hash that long, one in 2**64 / n new ids is mistaken for one of n old ones. New ids go into a
    plain set, from time to time into a sorted run; runs of like size are joined, and a run of four million
    is put into a file without a name, of which only what is looked up lies in memory. One thread adds, any
    may ask.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._pending: set[int] = set()
        self._runs: tuple[Ids, ...] = ()

    def __len__(self) -> int:
        return len(self._pending) + sum(len(run) for run in self._runs)

    def add(self, number: int) -> bool:
        """Add an id; False where it was there."""
        if number in self:
            return False
        self._pending.add(number)
        if len(self._pending) >= PENDING:
            self.add_all(np.fromiter(self._pending, np.uint64, len(self._pending)))
            self._pending = set()
        return True

    def __contains__(self, number: int) -> bool:
        # In this order: an id on its way from the plain set to a run is found in one of them.
        return number in self._pending or bool(self._in_runs(np.array([number], np.uint64))[0])

    def which(self, numbers: Iterable[int]) -> list[bool]:
        """For each id, whether it is there."""
        listed = list(numbers)
        pending = self._pending
        found = self._in_runs(np.array(listed, np.uint64))
        return [number in pending or bool(there) for number, there in zip(listed, found, strict=True)]

    def _in_runs(self, numbers: Ids) -> NDArray[np.bool_]:
        found = np.zeros(len(numbers), np.bool_)
        for run in self._runs:
            places = np.searchsorted(run, numbers)
            places[places == len(run)] = 0
            found |= run[places] == numbers
        return found

    def add_all(self, numbers: Ids) -> None:
        """Add many ids at once, which may hold some twice."""
        run = np.unique(numbers)
        runs = list(self._runs)
        while runs and len(runs[-1]) <= 2 * len(run) and len(runs[-1]) + len(run) <= RUN:
            run = np.union1d(runs.pop(), run)
        self._runs = (*runs, self._on_disk(run) if len(run) > RUN // 2 else run) if len(run) else tuple(runs)

    def _on_disk(self, run: Ids) -> Ids:
        # Removed by the system with the last process that has it open, also after a kill.
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        mapped: Ids = np.memmap(file, np.uint64, "w+", shape=run.shape)
        mapped[:] = run
        return mapped
