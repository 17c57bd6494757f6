"""Backends: what computes the U-Net and the VAE behind the one denoising loop.

`open_backend` opens one. `backend` says what a backend is and holds PyTorch's; `exported` is what ONNX
Runtime (`onnx_engine`) and OpenVINO (`openvino_engine`) share: modules in the form of `shells`, kept in a
cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from darkroom import options
from darkroom.errors import InputError
from darkroom.models.model import NAMES
from darkroom.options import BACKENDS
from darkroom.sample.backends.backend import Backend, open_compiled, open_torch, torch_backend
from darkroom.sample.backends.exported import ExportEngine, open_exported

if TYPE_CHECKING:
    from darkroom.models.model import Model

LOG = logging.getLogger("darkroom")


def open_backend(
    name: str,
    model: Model,
    *,
    optimise: Sequence[str] | str = (),
    device: torch.device | str | None = None,
    notice: Callable[[str], None] = LOG.warning,
) -> Backend:
    """A model made ready by one of `BACKENDS`.

    `optimise` names optimisations: any for torch and compile; for the others those that do
    not change the U-Net. `device` is where torch works if that is not where the weights lie (offloading).
    `notice` hears of exports and other long work before it starts. InputError for what cannot be.
    """
    _check_pair(name, model, optimise, device)
    if name == "torch":
        return open_torch(model, optimise, device)
    if name == "compile":
        return open_compiled(model, optimise, device, notice)
    parameter = next(model.unet.parameters())  # type: ignore[union-attr]
    if device is not None and torch.device(device) != parameter.device:
        raise InputError(f"offloading with backend {name}", mend="use backend torch")
    return open_exported(model, _engine(name), optimise, notice)


def _check_pair(
    name: str, model: Model, optimise: Sequence[str] | str, device: torch.device | str | None
) -> None:
    """InputError where the backend cannot compute in the precision that the model has, or is cast to."""
    from darkroom.sample.optimisations.table import loading

    weight = next(model.unet.parameters())  # type: ignore[union-attr]
    where = weight.device if device is None else torch.device(device)
    dtype = loading(optimise, where)[0] or weight.dtype
    options.check_pair(name, NAMES.get(dtype, "float32"), where.type)


def _engine(name: str) -> type[ExportEngine]:
    if name == "onnx":
        from darkroom.sample.backends.onnx_engine import OnnxRuntime

        return OnnxRuntime
    from darkroom.sample.backends.openvino_engine import OpenVino

    return OpenVino


__all__ = ["BACKENDS", "Backend", "open_backend", "torch_backend"]
