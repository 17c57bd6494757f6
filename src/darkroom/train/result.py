"""From trained weights to a model folder that diffusers opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from darkroom import models
from darkroom.errors import CheckpointError
from darkroom.models import Model
from darkroom.train.weights import cast


def write_model(
    model: Model, values: Mapping[str, Tensor], measured: Mapping[str, float], path: Path
) -> None:
    """Save a whole model in float32 with these trained weights, named `<part>.<name>`; it holds them then.

    `measured` goes into the parts' configurations, named likewise: `vae.scaling_factor`.
    """
    for part, module in model.modules.items():
        cast(module.eval(), torch.float32)
        start = f"{part}."
        state = {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
        unknown = module.load_state_dict(state, strict=False).unexpected_keys
        if unknown:
            raise CheckpointError(f"the checkpoint has weights that the {part} lacks: {unknown[0]}, ...")
    for name, value in measured.items():
        part, key = name.split(".", 1)
        described: Any = model.modules[part]
        described.register_to_config(**{key: value})
    models.save(model, path)
