"""Adapters with random weights that change pictures a lot, for the tests of files and banks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from darkroom.models.adapters.adapter import Adapter, Layer
from darkroom.models.adapters.read import adaptable
from darkroom.models.model import Model


def made(
    model: Model,
    seed: int,
    *,
    rank: int = 4,
    scale: float = 1.0,
    size: float = 0.3,
    where: Callable[[str], bool] = lambda path: "attn" in path,
) -> Adapter:
    """A LoRA on the layers of a model that `where` takes, by path."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for path, layer in adaptable(model).items():
        if where(path):
            outputs, *inputs = layer.weight.shape
            down = torch.randn(rank, *inputs, generator=generator) / torch.tensor(inputs).prod() ** 0.5
            up = torch.randn(outputs, rank, *[1] * (len(inputs) - 1), generator=generator) * size
            layers[path] = Layer(down, up, scale)
    return Adapter(f"made{seed}", layers)


def everywhere(path: str) -> bool:
    """Linear layers and convolutions of all kinds, in the U-Net and the text encoders."""
    return path.endswith(EVERYWHERE)


EVERYWHERE = (
    *("to_q", "to_v", "to_out.0", "net.0.proj", "conv1", "conv_shortcut", "samplers.0.conv", "proj_in"),
    *("time_emb_proj", "q_proj", "fc1", "conv_in", "linear_1"),
)
