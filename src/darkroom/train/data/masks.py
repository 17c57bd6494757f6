"""Masks: where in a picture the loss counts, at the size of its latents.

Shapes: B rows, h and w latent pixels.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from darkroom.errors import StoreError

COLUMN = "mask"


class Masks:
    """Reads a batch's masks [B, 1, h, w]: 1 where they are white, `floor` where black; 1 without one.

    They are cut and mirrored as the batch says of its pictures.
    """

    def __init__(self, column: str, *, factor: int, floor: float) -> None:
        self.column, self._factor, self._floor = column, factor, floor
        self._read = lru_cache(maxsize=4096)(self._decoded)

    def __call__(self, columns: Mapping[str, Any], size: Sequence[int]) -> Tensor:
        height, width = size
        pictures, places = columns[self.column], columns.get("cut_at")
        if places is None:
            rows = [self._read(picture, height, width) for picture in pictures]
        else:  # each time at another place: nothing to be kept
            pairs = zip(pictures, places.tolist(), strict=True)
            rows = [self._decoded(picture, height, width, (u, v)) for picture, (u, v) in pairs]
        masks_B1hw = torch.stack(rows)
        if "mirrored" in columns:
            mirrored = columns["mirrored"]
            masks_B1hw[mirrored] = masks_B1hw[mirrored].flip(-1)
        return masks_B1hw

    def _decoded(
        self, picture: bytes | None, height: int, width: int, at: tuple[float, float] = (0.5, 0.5)
    ) -> Tensor:
        if picture is None:
            return torch.ones(1, height, width)
        from darkroom.data.images import PictureError, open_picture, resize_crop

        try:
            image = open_picture(picture).convert("L").convert("RGB")
        except PictureError as error:
            raise StoreError(f"column {self.column} holds what is no picture: {error}") from error
        # Cut as the picture is, then a latent pixel's mean.
        whole = resize_crop(image, (width * self._factor, height * self._factor), crop=at)
        grey_hw = np.asarray(whole.convert("L").resize((width, height), Image.Resampling.BOX), np.float32)
        return torch.from_numpy(self._floor + (1 - self._floor) * grey_hw / 255)[None]


def alpha_of(picture: bytes) -> bytes | None:
    """A picture's transparency as a mask: what is seen is white; None where it has none."""
    from darkroom.data.images import FORMATS

    image = Image.open(io.BytesIO(picture), formats=FORMATS)
    if not image.has_transparency_data:
        return None
    return png_of(image.convert("RGBA").getchannel("A"))


def png_of(image: Image.Image) -> bytes:
    """A picture's PNG."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
