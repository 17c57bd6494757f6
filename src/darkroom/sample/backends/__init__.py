"""Backends: what computes the U-Net and the VAE behind the one denoising loop.

`backend` says what a backend is and `open_backend` is the door. `eager` is PyTorch as it stands; `exported`
is what ONNX Runtime (`onnx_engine`) and OpenVINO (`openvino_engine`) share: modules in the form of `shells`,
kept in the `cache`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from darkroom.errors import InputError
from darkroom.sample.backends.backend import Backend
from darkroom.sample.backends.eager import (
    open_compiled,
    open_torch,
    refuse_half_on_cpu,
    torch_backend,
    unet_call,
)
from darkroom.sample.backends.exported import Engine, open_exported

if TYPE_CHECKING:
    from darkroom.models import Model

LOG = logging.getLogger("darkroom")
BACKENDS = ("torch", "compile", "onnx", "openvino")


def open_backend(
    name: str,
    model: Model,
    *,
    optimise: Sequence[str] | str = (),
    device: torch.device | str | None = None,
    notice: Callable[[str], None] = LOG.warning,
) -> Backend:
    """A model made ready by one of `BACKENDS`.

    `optimise` names optimisations: any of the ladder's for torch and compile; for the others those that do
    not change the U-Net. `device` is where torch works if that is not where the weights lie (offloading).
    `notice` hears of exports and other long work before it starts. InputError for what cannot be.
    """
    if name not in BACKENDS:
        raise InputError(f"backend '{name}'", allowed=", ".join(BACKENDS))
    refuse_half_on_cpu(model)
    if name == "torch":
        return open_torch(model, optimise, device)
    if name == "compile":
        return open_compiled(model, optimise, device, notice)
    parameter = next(model.unet.parameters())  # type: ignore[union-attr]
    if device is not None and torch.device(device) != parameter.device:
        raise InputError(f"offloading with backend {name}", mend="use backend torch")
    return open_exported(model, _engine(name), optimise, notice)


def _engine(name: str) -> type[Engine]:
    if name == "onnx":
        from darkroom.sample.backends.onnx_engine import OnnxRuntime

        return OnnxRuntime
    from darkroom.sample.backends.openvino_engine import OpenVino

    return OpenVino


__all__ = ["BACKENDS", "Backend", "open_backend", "torch_backend", "unet_call"]
