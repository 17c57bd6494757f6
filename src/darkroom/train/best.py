"""The weights of the best evaluation so far, where a run ends when its held-out loss stands still.

They lie in a file without a name in the run's folder, so that they are in no memory twice, and go with every
checkpoint, so that a run that goes on has those that an undisturbed one would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from darkroom.train.checkpoint import Checkpoint
from darkroom.train.resting import laid_aside
from darkroom.train.weights import Weights, held_rows

KIND = "best"  # what a checkpoint calls them


@dataclass(frozen=True)
class Best:
    """After which step they are, the averaged weights by name, and what the task measured with them.

    Where ranks share the weights, the rows of this one.
    """

    step: int
    values: Mapping[str, Tensor]
    measured: Mapping[str, float]

    @classmethod
    def of(cls, step: int, values: Mapping[str, Tensor], measured: Mapping[str, float], run: Path) -> Best:
        """A copy of these weights."""
        return cls(step, laid_aside(values, run), measured)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, weights: Weights, run: Path) -> Best | None:
        """Those that a checkpoint holds; None where it has none."""
        told = checkpoint.scalars.get(KIND)
        if told is None:
            return None
        return cls.of(told["step"], held_rows(checkpoint.tensors[KIND], weights), told["measured"], run)

    @property
    def scalars(self) -> dict[str, Any]:
        """What a checkpoint says of them beside their values."""
        return {"step": self.step, "measured": dict(self.measured)}
