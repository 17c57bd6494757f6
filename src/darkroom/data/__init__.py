"""Pictures and captions: the store they live in, how they come in, and in which order they are read."""

from __future__ import annotations

from darkroom.data.images import PictureError, buckets, decode, nearest_bucket, resize_crop, to_tensor
from darkroom.data.importers.job import ImportReport, import_pictures
from darkroom.data.inspect import Verification, contact_sheet, describe, find_doubles, mark_doubles, verify
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
