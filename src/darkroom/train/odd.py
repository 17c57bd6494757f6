"""Steps whose loss or gradients are no numbers, or gradients far too large: which, and what is done.

They are seen when metrics are read, steps later, so that nothing waits for the device. Their batches' rows
are written down in the run's `odd_batches.jsonl`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from darkroom.train.ranks import ALONE, Ranks

FILE = "odd_batches.jsonl"
MOST_ROLLBACKS = 10  # from one checkpoint: then it is not the batches


def is_odd(row: Mapping[str, Any], spike_norm: float | None, *, scaled: bool) -> bool:
    """Whether a step's row of metrics is odd. fp16 (`scaled`) leaves out those that overflow by itself."""
    if not math.isfinite(row["loss"]):
        return True
    if not math.isfinite(row["grad_norm"]):
        return not scaled
    return spike_norm is not None and row["grad_norm"] > spike_norm


class OddBatches:
    """The odd batches of a run, and the steps that are passed over since."""

    def __init__(
        self, run: Path, rows_of: Callable[[int], Sequence[int]] | None, ranks: Ranks = ALONE
    ) -> None:
        self._file, self._rows_of = run / FILE, rows_of
        self.passed: set[int] = set()
        self._rollbacks: dict[int, int] = {}
        for line in ranks.tell(self._noted):  # other machines need not see the run's folder
            told = json.loads(line)
            if told["done"] == "rollback":
                self._note(told["step"], told["to"])

    def _noted(self) -> list[str]:
        return self._file.read_text().splitlines() if self._file.exists() else []

    def _note(self, step: int, to: int) -> None:
        self.passed.add(step)
        self._rollbacks[to] = self._rollbacks.get(to, 0) + 1

    def may_roll_back(self, to: int) -> bool:
        """Whether going back to this step's checkpoint once more is worth it."""
        return self._rollbacks.get(to, 0) < MOST_ROLLBACKS

    def write(self, rows: Iterable[Mapping[str, Any]], done: str, *, to: int = 0, first: bool = True) -> None:
        """Note odd steps and what was done; rank 0 (`first`) writes it down."""
        lines = []
        for row in rows:
            step = row["step"]
            if done == "rollback":
                self._note(step, to)
            ids = [] if self._rows_of is None else list(self._rows_of(step - 1))
            told = {"step": step, "loss": str(row["loss"]), "grad_norm": str(row["grad_norm"])}
            lines.append(json.dumps({**told, "done": done, "to": to, "rows": ids}) + "\n")
        if first:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
