"""Positions of the rows that a filter chose: one bit a row of the store, found by counting bits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
PAGE = 4096  # rows whose bits are counted together


class Chosen:
    """Ascending positions of chosen rows, as an array would hold them, in a bit for each row there is.

    Two billion rows cost 250 MB, however many are chosen; an array costs 8 bytes for each chosen one.
    `parts` are positions in any order.
    """

    def __init__(self, num_rows: int, parts: Iterable[Ints]) -> None:
        pages = -(-num_rows // PAGE)
        self._bits: npt.NDArray[np.uint8] = np.zeros((pages, PAGE // 8), dtype=np.uint8)
        flat = self._bits.reshape(-1)
        for positions in parts:
            np.bitwise_or.at(flat, positions >> 3, (1 << (positions & 7)).astype(np.uint8))
        counts = np.array([int(np.bitwise_count(page).sum()) for page in self._bits], dtype=np.int64)
        self._before: Ints = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, index: Ints) -> Ints:
        """Positions of indices 0..len-1, of any shape."""
        flat = np.asarray(index, dtype=np.int64).ravel()
        pages = np.searchsorted(self._before, flat, side="right") - 1
        out = np.empty_like(flat)
        for page in np.unique(pages).tolist():
            here = pages == page
            inside = np.flatnonzero(np.unpackbits(self._bits[page], bitorder="little"))
            out[here] = page * PAGE + inside[flat[here] - self._before[page]]
        return out.reshape(np.shape(index))
