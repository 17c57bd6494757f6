"""What a program sets before torch is imported: quiet libraries, and OpenMP threads that sleep."""

from __future__ import annotations

import logging
import os


def limit_spinning() -> None:
    """Let OpenMP threads sleep after waiting a little, unless the user set it; torch reads it on import.

    Threads that spin without end make a U-Net step up to 30 times slower on a busy small machine.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def hush() -> None:
    """Let diffusers, transformers, torchao and torch's pytree tell errors only; call it before they load."""
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for library in ("torchao", "torch.utils._pytree"):  # torchao, where it is, tells of kernels it lacks
        logging.getLogger(library).setLevel(logging.ERROR)
