"""Silence for libraries whose remarks are for those who call them directly. Imports nothing heavy."""

from __future__ import annotations

import logging
import os


def hush() -> None:
    """Let diffusers, transformers, torchao and torch's pytree tell errors only; call it before they load."""
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for library in ("torchao", "torch.utils._pytree"):  # torchao, where it is, tells of kernels it lacks
        logging.getLogger(library).setLevel(logging.ERROR)
