"""Pictures and captions: the store they live in, how they come in, and in which order they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from darkroom.data.images import PictureError, buckets, decode, nearest_bucket, resize_crop, to_tensor
    from darkroom.data.importers.job import ImportReport, import_pictures
    from darkroom.data.inspect import (
        Verification,
        contact_sheet,
        describe,
        find_doubles,
        mark_doubles,
        verify,
    )
    from darkroom.data.store import FragmentInfo, Store
    from darkroom.data.versions import writing

__all__ = [
    "FragmentInfo",
    "ImportReport",
    "PictureError",
    "Store",
    "Verification",
    "buckets",
    "contact_sheet",
    "decode",
    "describe",
    "find_doubles",
    "import_pictures",
    "mark_doubles",
    "nearest_bucket",
    "resize_crop",
    "to_tensor",
    "verify",
    "writing",
]

_MODULES = ("images", "importers.job", "inspect", "store", "versions")


def __getattr__(name: str) -> Any:
    """Import the public functions when they are used: a plan counts a folder's pictures without a store."""
    from importlib import import_module

    for module in _MODULES if name in __all__ else ():
        if hasattr(found := import_module(f"darkroom.data.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module 'darkroom.data' has no attribute '{name}'")
