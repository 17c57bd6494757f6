"""Frozen weights that need not lie in memory: those of parts that seldom run, and those that were cast.

Where latents and text states are made once, VAE and text encoders wait for the next sample grid: 0.8 GB of
Stable Diffusion 1.5 in float32. They are mapped from an unnamed file instead, so that the system can take
their pages and gives them back, with the same bits, when the part is run again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from darkroom.hardware.memory import drop_file_pages, give_back

LEAST_BYTES = 32 * 1024**2  # below, a file is not worth it
ALIGNMENT = 64


def rest(modules: Iterable[nn.Module], folder: Path) -> int:
    """Lay the frozen weights of parts on a CPU into a file in `folder`; returns how many bytes.

    The parts work as before: a weight that is read comes back into memory, and after the part has run it
    is let go again. Nothing is done where the file cannot be written, or for less than `LEAST_BYTES`.
    """
    parts = list(modules)
    tensors = [tensor for part in parts for tensor in _frozen(part)]
    if sum(tensor.nbytes for tensor in tensors) < LEAST_BYTES:
        return 0
    try:
        mapped, places = _written(tensors, folder)
    except OSError:
        return 0  # a full or read-only disk: they stay where they are
    for tensor, start in zip(tensors, places, strict=True):
        tensor.data = _view(mapped, tensor, start)
    for part in parts:
        for runs in _what_runs(part):
            runs.register_forward_hook(lambda *_: _let_go(mapped))
    _let_go(mapped)
    give_back()
    return mapped.nbytes


def laid_aside(named: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Copies of tensors in a file in `folder`, in memory only while they are read; else in memory."""
    try:
        mapped, places = _written(list(named.values()), folder)
    except OSError:  # a full or read-only disk
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
    pairs = zip(named.items(), places, strict=True)
    return {name: _view(mapped, tensor, start) for (name, tensor), start in pairs}


def _view(mapped: Tensor, like: Tensor, start: int) -> Tensor:
    return mapped[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _frozen(part: nn.Module) -> list[Tensor]:
    """Dense weights on the CPU that nothing trains."""
    found = (tensor for tensor in chain(part.parameters(), part.buffers()) if not tensor.requires_grad)
    plain = (tensor for tensor in found if type(tensor.data) is Tensor and tensor.device.type == "cpu")
    return [tensor for tensor in plain if tensor.is_contiguous() and tensor.nbytes]


def _written(tensors: list[Tensor], folder: Path) -> tuple[Tensor, list[int]]:
    """The file mapped as bytes, and where each tensor starts in it. It has no name once this returns."""
    places = []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".resting-") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            places.append(file.tell())
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        return torch.from_file(file.name, shared=True, size=file.tell(), dtype=torch.uint8), places


def _what_runs(part: nn.Module) -> list[nn.Module]:
    """A VAE is called by its halves, never as a whole."""
    halves = [getattr(part, name, None) for name in ("encoder", "decoder")]
    found = [half for half in halves if isinstance(half, nn.Module)]
    return found or [part]


def _let_go(mapped: Tensor) -> None:
    drop_file_pages(mapped.data_ptr(), mapped.nbytes)
