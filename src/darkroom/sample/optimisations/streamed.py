"""`offload_mmap`: weights stay in the model's files, and each layer has its own only while it is called.

For a CPU with little memory. The files are mapped; a layer's weights are read, and cast to what is computed
in, just before its call, and released right after. Nothing is rounded that is not rounded in the file.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from darkroom.errors import InputError
from darkroom.hardware.memory import drop_file_pages, file_mappings
from darkroom.models.mapped import are_mapped, is_mapped
from darkroom.sample.optimisations.applied import Applied
from darkroom.sample.optimisations.optimisation import ComputeTarget

SMALL_BYTES = 2**18
"""Layers smaller than this are read once and stay: norms, small projections."""
SAMPLE_BYTES = 64 * 2**20
"""How much is read to say what reading costs."""
READ = "read weights a U-Net call"


def offload_mmap(applied: Applied, argument: str) -> None:
    """Each layer's weights in memory for its own call only, read from the model's files."""
    if not (applied.model.in_files and are_mapped(applied.model.modules.values())):
        raise InputError(
            "offload_mmap: these weights do not lie in files as they are needed",
            allowed="a model opened from a folder, a .safetensors file or the hub, with --memory",
            mend="random weights: darkroom export FAMILY --to FOLDER first",
        )
    dtype = computed_in(applied)
    parts = applied.own_all()
    files = file_mappings()
    applied.times_s[READ] = _seconds_to_read(parts["unet"], dtype, files)
    for module in parts.values():
        for layer in module.modules():
            _stream(layer, dtype, files)


def computed_in(applied: Applied) -> torch.dtype:
    """As asked, else the weights' own type, or float32 where that is float16: CPUs emulate it."""
    weight = next(applied.model.unet.parameters())  # type: ignore[union-attr]
    return applied.dtype or (torch.float32 if weight.dtype == torch.float16 else weight.dtype)


def lacks_mmap(place: ComputeTarget) -> str | None:
    """On a card weights wait in main memory instead."""
    return None if place.device.type == "cpu" else f"it is of CPUs, and this is {place.device.type}"


def _seconds_to_read(module: nn.Module, dtype: torch.dtype, files: list[tuple[int, int]]) -> float:
    """What reading and casting all weights of a part takes, by its largest layers."""
    parameters = sorted(module.parameters(), key=lambda p: p.nbytes, reverse=True)
    total, read = sum(p.nbytes for p in parameters), 0
    start = time.perf_counter()
    for p in parameters:
        p.detach().to(dtype, copy=True)
        if is_mapped(p, files):
            drop_file_pages(p.data_ptr(), p.nbytes)
        read += p.nbytes
        if read >= SAMPLE_BYTES:
            break
    return (time.perf_counter() - start) * total / max(read, 1)


def _stream(layer: nn.Module, dtype: torch.dtype, files: list[tuple[int, int]]) -> None:
    """Have a layer's own weights wait in their file."""
    own = {name: p for name, p in layer._parameters.items() if p is not None}
    for name, buffer in layer._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            layer._buffers[name] = buffer.to(dtype)
    if sum(p.numel() for p in own.values()) * dtype.itemsize < SMALL_BYTES:
        layer._parameters.update({name: _still(p.detach().to(dtype, copy=True)) for name, p in own.items()})
        return
    waiting = {name: _still(torch.zeros((), dtype=dtype).expand(p.shape)) for name, p in own.items()}
    in_files = [p for p in own.values() if is_mapped(p, files)]

    def arrive(*_: Any) -> None:
        layer._parameters.update({name: _still(p.detach().to(dtype)) for name, p in own.items()})

    def leave(*_: Any) -> None:
        layer._parameters.update(waiting)
        for p in in_files:
            drop_file_pages(p.data_ptr(), p.nbytes)

    layer._parameters.update(waiting)
    layer.register_forward_pre_hook(arrive)
    layer.register_forward_hook(leave, always_call=True)


def _still(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
