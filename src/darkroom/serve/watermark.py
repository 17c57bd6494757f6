"""An invisible mark that says a picture was made, not taken: `--hook darkroom.serve.watermark:mark`.

A fixed pattern of small steps up and down is added to the brightness, drawn from a key, and found again by
correlation (spread spectrum: Cox, Kilian, Leighton, Shamoon 1997). It survives JPEG, a change of brightness
and a cut along whole tiles, not rotation, scaling, or somebody who means to remove it. `DARKROOM_MARK` is the
key; whoever has it can find the mark and no one else. Metadata says the same, for all who do not strip it.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

if TYPE_CHECKING:
    from darkroom import sample


KEY = "DARKROOM_MARK"
STRENGTH = 2.0
"""Steps of 1/255 up and down: 42 dB."""
TILE = 128
FOUND = 10.0
"""Standard deviations: far above a picture without the mark (3), or with that of another key (8)."""


def mark(picture: sample.Picture) -> Image.Image:
    """The hook: the picture with the mark in it."""
    return marked(picture.image, _key())


def marked(image: Image.Image, key: str) -> Image.Image:
    """An image with the mark of a key."""
    rgb = np.asarray(image.convert("RGB"), dtype=np.float32)
    pattern = _pattern(key, *rgb.shape[:2])
    return Image.fromarray(np.clip(np.rint(rgb + STRENGTH * pattern[..., None]), 0, 255).astype(np.uint8))


def score(image: Image.Image, key: str) -> float:
    """How sure it is that the mark of a key is in an image, in standard deviations; see `FOUND`."""
    grey = image.convert("L")
    blurred = np.asarray(grey.filter(ImageFilter.GaussianBlur(1.5)), dtype=np.float32)
    fine = np.asarray(grey, dtype=np.float32) - blurred
    fine = np.clip(fine, -4 * STRENGTH, 4 * STRENGTH)  # edges of the picture itself say nothing
    products = (fine - fine.mean()) * _pattern(key, *fine.shape)
    return float(products.mean() / (products.std() / products.size**0.5 + 1e-9))


def _pattern(key: str, height: int, width: int) -> NDArray[np.float32]:
    """Plus and minus one [height, width]: a tile drawn from the key, over and over."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    tile: NDArray[Any] = np.random.default_rng(seed).integers(0, 2, (TILE, TILE)) * 2 - 1
    across, down = -(-width // TILE), -(-height // TILE)
    return np.tile(tile, (down, across))[:height, :width].astype(np.float32)


def _key() -> str:
    return os.environ.get(KEY, "darkroom")
