"""Silence for the chatter of diffusers and transformers while darkroom opens or writes a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from darkroom.late_imports import waiting


@contextmanager
def quiet() -> Iterator[None]:
    """Only errors, and no progress bars, from diffusers and transformers; what was set before comes back."""
    with waiting():
        from diffusers.utils import logging as diffusers_logging
        from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    before = [library.get_verbosity() for library in libraries]
    bar_before = transformers_logging.is_progress_bar_enabled()
    for library in libraries:
        library.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
        if bar_before:
            transformers_logging.enable_progress_bar()
