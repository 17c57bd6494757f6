"""Pictures and captions: the store they live in, how they come in, and in which order they are read."""

from __future__ import annotations

from darkroom.data.store import FragmentInfo, Store

__all__ = ["FragmentInfo", "Store"]
