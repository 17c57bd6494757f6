"""Diffusion-DPO: an adapter that makes pictures more like preferred ones (Wallace et al. 2023).

Rows of a batch come in pairs, the preferred picture before the other, with one caption, noise and timestep.

Shapes: P pairs, b = 2 P rows of a micro-batch, C latent channels, h and w latent pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.train.objective import square_error
from darkroom.train.tasks.diffusion import Diffusion


class Preference(Diffusion):
    """Train an adapter on pairs; what it is compared with is the model without it."""

    def __init__(self, *args: Any, beta: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._beta = beta
        self.rows_a_picture = 2

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Diffusion-DPO's loss of each row [B], with whether the pair's preferred picture is nearer."""
        if len(inputs["t"]) % 2:  # one picture, to try a step with, stands for both of its pair
            inputs = {name: tensor.repeat_interleave(2, dim=0) for name, tensor in inputs.items()}
        t_b = inputs["t"]
        own_b = square_error(*self._predict(inputs, t_b), inputs.get("mask"))
        with torch.no_grad(), without_adapters(self.modules):
            base_b = square_error(*self._predict(inputs, t_b), inputs.get("mask"))
        loss_P, right_P = preference_loss(own_b, base_b, self._beta)
        # Each row has its pair's, so that the mean over rows is that over pairs.
        return {"loss": loss_P.repeat_interleave(2), "preferred": right_P.repeat_interleave(2)}


def preference_loss(own_b: Tensor, base_b: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """-log sigmoid(-beta / 2 ((own_w - base_w) - (own_l - base_l))) of each pair [P], and which are right.

    The errors [b] are those of the preferred (w) and the other picture (l) by turns, of the model that is
    trained and of the base. As in the paper's own code beta stands for beta T omega.
    """
    gap_P2 = (own_b - base_b).view(-1, 2)
    inside_P = -0.5 * beta * (gap_P2[:, 0] - gap_P2[:, 1])
    return -F.logsigmoid(inside_P), (inside_P > 0).float().detach()


@contextmanager
def without_adapters(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within, PEFT's layers pass their additions by."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for module in modules.values() for m in module.modules() if isinstance(m, BaseTunerLayer)]
    flags = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, flag in zip(layers, flags, strict=True):
            layer._disable_adapters = flag
