"""Training: the objective, one optimiser step, averaged weights, checkpoints, and the loop around them.

`train` starts a run or goes on with one; `export` writes a model from a run's checkpoint. `setup` checks a
recipe and puts together what trains it, `trainer` is the loop, `tasks` say what is trained, `step` is the
bare optimiser step. The settings stand next to what they set, in files that import little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.lazy import importer

if TYPE_CHECKING:
    from darkroom.train.jobs import Pinned, TrainingSetup
    from darkroom.train.run import attempted, export, sweep, train
    from darkroom.train.setup import bare_step, make_job
    from darkroom.train.trainer import TrainResult

__all__ = [
    "Pinned",
    "TrainResult",
    "TrainingSetup",
    "attempted",
    "bare_step",
    "export",
    "make_job",
    "sweep",
    "train",
]

_MODULES = {
    "jobs": (
        "Pinned",
        "TrainingSetup",
    ),
    "run": (
        "attempted",
        "export",
        "sweep",
        "train",
    ),
    "setup": (
        "bare_step",
        "make_job",
    ),
    "trainer": ("TrainResult",),
}
__getattr__ = importer(__name__, _MODULES)
