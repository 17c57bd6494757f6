"""From a run's checkpoint to a model folder that diffusers opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from darkroom import models
from darkroom.errors import CheckpointError
from darkroom.train.tasks import Task


def write_model(task: Task, values: Mapping[str, Tensor], measured: Mapping[str, float], path: Path) -> None:
    """Save the task's whole model with these trained weights, in float32; the modules hold them then."""
    for part, module in task.modules.items():
        module.float().eval()
        named = {name: value for name, value in values.items() if name.startswith(f"{part}.")}
        state = {name.removeprefix(f"{part}."): value.detach() for name, value in named.items()}
        unknown = module.load_state_dict(state, strict=False).unexpected_keys
        if unknown:
            raise CheckpointError(f"the checkpoint has weights that the {part} lacks: {unknown[0]}, ...")
    task.finish(measured)
    models.save(task.model, path)
