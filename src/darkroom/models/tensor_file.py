"""Safetensors files with the mode of any new file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


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
