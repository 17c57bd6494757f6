"""Backends: what computes the U-Net and the VAE behind the one denoising loop.

`backend` says what a backend is, `eager` is PyTorch as it stands. `open_backend` is the door.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from darkroom.errors import InputError
from darkroom.sample.backends.backend import Backend
from darkroom.sample.backends.eager import open_torch, refuse_half_on_cpu, unet_call

if TYPE_CHECKING:
    from darkroom.models import Model

LOG = logging.getLogger("darkroom")
BACKENDS = ("torch", "compile", "onnx", "openvino")


def open_backend(
    name: str,
    model: Model,
    *,
    optimise: Sequence[str] = (),
    notice: Callable[[str], None] = LOG.warning,
) -> Backend:
    """A model made ready by one of `BACKENDS`.

    `optimise` names optimisations for the torch backend. `notice` hears of exports and other long work before
    it starts. InputError for what cannot be.
    """
    if name not in BACKENDS:
        raise InputError(f"backend '{name}'", allowed=", ".join(BACKENDS))
    refuse_half_on_cpu(model)
    if name == "torch":
        return open_torch(model, optimise)
    raise InputError(f"backend '{name}' is not there yet", allowed="torch")


__all__ = ["BACKENDS", "Backend", "open_backend", "unet_call"]
