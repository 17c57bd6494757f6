"""Small real pictures and stores for the tests of this room."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from darkroom.data.store import SCHEMA


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """A picture's file as bytes."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise_picture(seed: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    """A picture that differs from all others: a few random patches, enlarged."""
    patches = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize(size, Image.Resampling.BICUBIC)


def rows(
    num: int, start: int = 0, *, source: str = "made", width: Callable[[int], int] = lambda i: 24
) -> pa.Table:
    """Rows as an import writes them."""
    numbers = range(start, start + num)
    content = {
        "id": [f"{i:032x}" for i in numbers],
        "picture": [b"picture %d" % i for i in numbers],
        "caption": [f"caption {i}" for i in numbers],
        "width": [width(i) for i in numbers],
        "height": [20] * num,
        "format": ["PNG"] * num,
        "phash": list(numbers),
        "source": [source] * num,
        "key": [f"{i}.png" for i in numbers],
    }
    return pa.table(content, schema=SCHEMA)
