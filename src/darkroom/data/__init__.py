"""Pictures and captions: the store they live in, how they come in, and in which order they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.lazy import importer

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

_MODULES = {
    "images": (
        "PictureError",
        "buckets",
        "decode",
        "nearest_bucket",
        "resize_crop",
        "to_tensor",
    ),
    "importers.job": (
        "ImportReport",
        "import_pictures",
    ),
    "inspect": (
        "Verification",
        "contact_sheet",
        "describe",
        "find_doubles",
        "mark_doubles",
        "verify",
    ),
    "store": (
        "FragmentInfo",
        "Store",
    ),
    "versions": ("writing",),
}
__getattr__ = importer(__name__, _MODULES)
