"""`offload_mmap`: weights stay in the model's files, and each layer has its own only while it is called.

For a CPU with little memory. The files are mapped; a layer's weights are read, and cast to what is computed
in, just before its call, and let go of right after. Nothing is rounded that is not rounded in the file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from darkroom.errors import InputError
from darkroom.hardware.memory import drop_file_pages, file_mappings, within_file
from darkroom.sample.ladder.applied import Applied
from darkroom.sample.ladder.rung import Place

SMALL_BYTES = 2**18
"""Layers smaller than this are read once and stay: norms, biases, small projections."""
SAMPLE_BYTES = 64 * 2**20
"""How much is read to say what reading costs."""


def offload_mmap(applied: Applied, argument: str) -> None:
    """Each layer's weights in memory for its own call only, read from the model's files."""
    if not in_files(applied.model.modules.values()):
        raise InputError(
            "offload_mmap: these weights do not lie in files",
            allowed="models opened from a folder, a .safetensors file or the hub",
            mend="save it first: darkroom export MODEL --to FOLDER",
        )
    dtype = compute_type(applied)
    parts = applied.own_all()
    seconds = seconds_to_read(parts["unet"], dtype)
    for module in parts.values():
        for layer in module.modules():
            _stream(layer, dtype)
    stored = sum(p.numel() for p in parts["unet"].parameters()) * 2
    applied.reasons.append(
        f"offload_mmap: the U-Net's weights ({stored / 1e9:.2g} G) are read anew at each call, "
        f"about {seconds:.2g} s a call by a measured sample"
    )


def compute_type(applied: Applied) -> torch.dtype:
    """What is computed in: as asked, else the weights' own type, or float32 where a CPU has no use for it."""
    weight = next(applied.model.unet.parameters())  # type: ignore[union-attr]
    own = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    return applied.dtype or own


def lacks_mmap(place: Place) -> str | None:
    """For weights that lie where the work is done."""
    return None if place.device.type == "cpu" else f"it is of CPUs; this is {place.device.type}"


def in_files(modules: Iterable[nn.Module]) -> bool:
    """Whether all large weights are mapped from files."""
    files = file_mappings()
    large = [p for module in modules for p in module.parameters() if p.nbytes >= SMALL_BYTES]
    return bool(large) and all(
        p.device.type == "cpu" and p.is_contiguous() and within_file(p.data_ptr(), p.nbytes, files)
        for p in large
    )


def let_go(modules: Iterable[nn.Module]) -> None:
    """Take no memory for weights that lie in files, until they are read again."""
    files = file_mappings()
    for module in modules:
        for p in module.parameters():
            if p.device.type == "cpu" and within_file(p.data_ptr(), p.nbytes, files):
                drop_file_pages(p.data_ptr(), p.nbytes)


def seconds_to_read(module: nn.Module, dtype: torch.dtype) -> float:
    """What reading and casting all weights of a part takes, by a sample of its layers."""
    parameters = sorted(module.parameters(), key=lambda p: p.nbytes, reverse=True)
    total, read = sum(p.nbytes for p in parameters), 0
    start = time.perf_counter()
    for p in parameters:
        p.detach().to(dtype, copy=True)
        drop_file_pages(p.data_ptr(), p.nbytes)
        read += p.nbytes
        if read >= SAMPLE_BYTES:
            break
    return (time.perf_counter() - start) * total / max(read, 1)


def _stream(layer: nn.Module, dtype: torch.dtype) -> None:
    """Have a layer's own weights wait in their file."""
    own = {name: p for name, p in layer._parameters.items() if p is not None}
    if sum(p.numel() for p in own.values()) * dtype.itemsize < SMALL_BYTES:
        for name, p in own.items():
            layer._parameters[name] = _still(p.detach().to(dtype, copy=True))
        for name, buffer in layer._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                layer._buffers[name] = buffer.to(dtype)
        return
    waiting = {name: _still(torch.zeros((), dtype=dtype).expand(p.shape)) for name, p in own.items()}

    def arrive(*_: Any) -> None:
        for name, p in own.items():
            layer._parameters[name] = _still(p.detach().to(dtype))

    def leave(*_: Any) -> None:
        layer._parameters.update(waiting)
        for p in own.values():
            drop_file_pages(p.data_ptr(), p.nbytes)

    layer._parameters.update(waiting)
    layer.register_forward_pre_hook(arrive)
    layer.register_forward_hook(leave, always_call=True)


def _still(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
