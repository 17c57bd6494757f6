"""Safetensors files with the mode of any new file, and weights that are mapped from a model's own files.

Mapped weights are paged in as they are read, and released again. `models.load(..., dtype=None)` opens them
so, in the type that the files have. Letting go of a weight that was changed in place would lose the change:
only models that say so (`Model.in_files`) are treated like this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from darkroom.hardware.meters import drop_file_pages, file_mappings, within_file


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file that others may read where the umask lets them; safetensors itself leaves 600.

    OSError where it cannot be written.
    """
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode & 0o777
    save_file(dict(tensors), str(file), metadata=None if metadata is None else dict(metadata))
    file.chmod(mode)


MOST = 0.95
"""The share of a model's bytes that must lie in files for it to be called mapped."""


def is_mapped(tensor: Tensor, files: list[tuple[int, int]] | None = None) -> bool:
    """Whether a tensor lies in a mapped file, whole and in one piece."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return within_file(tensor.data_ptr(), tensor.nbytes, file_mappings() if files is None else files)


def _mapped_bytes(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Bytes of weights that lie in files, and of all."""
    files = file_mappings()
    weights = [p for module in modules for p in module.parameters()]
    return sum(p.nbytes for p in weights if is_mapped(p, files)), sum(p.nbytes for p in weights)


def are_mapped(modules: Iterable[nn.Module]) -> bool:
    """Whether a model's weights lie in files, but for a few that were brought into another shape."""
    mapped, total = _mapped_bytes(modules)
    return mapped > MOST * total


def let_go(modules: Iterable[nn.Module]) -> None:
    """Take no memory for weights that lie in files until they are read again."""
    files = file_mappings()
    for module in modules:
        for p in module.parameters():
            if is_mapped(p, files):
                drop_file_pages(p.data_ptr(), p.nbytes)


def cast_opened(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module in place whose weights are as they were opened, letting go of their file on the way.

    The file's pages would stay in memory with the copies until the last is made: 3.4 GB of SD 1.5's U-Net.
    """
    files = file_mappings()
    for inner in module.modules():
        opened = [tensor.data for tensor in chain(inner.parameters(False), inner.buffers(False))]
        inner._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)  # type: ignore[no-untyped-call]
        for tensor in opened:
            if tensor.dtype != dtype and is_mapped(tensor, files):
                drop_file_pages(tensor.data_ptr(), tensor.nbytes)
