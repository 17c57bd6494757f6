"""A picture as an extractor wants it: resized, cut and normalised with Pillow and torch.

As `preprocessor_config.json` says it, in the keys that CLIP's, ViT's and DINOv2's files use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import ModelError

FILE = "preprocessor_config.json"
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Preprocess(BaseModel):
    """How pixels become an extractor's input [3, H, W]. Resizing is antialiased."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shortest: int | None = Field(None, gt=0, description="bring the shortest side to so many pixels")
    size: tuple[int, int] | None = Field(None, description="or both sides to this (height, width), squeezed")
    crop: tuple[int, int] | None = Field(None, description="then cut this (height, width) from the middle")
    resampling: str = Field("bicubic", description="nearest, lanczos, bilinear, bicubic, box or hamming")
    mean: tuple[float, float, float] = Field(IMAGENET[0], description="taken off pixels of 0 to 1")
    std: tuple[float, float, float] = Field(IMAGENET[1], description="what they are then divided by")
    unrounded: bool = Field(False, description="resize in float, each channel by itself, as clean-fid does")

    @classmethod
    def read(cls, folder: Path) -> Preprocess:
        """As the folder's file says; ModelError where there is none."""
        try:
            told = json.loads((folder / FILE).read_text())
        except FileNotFoundError as error:
            raise ModelError(f"'{folder}' has no {FILE}", mend="it says how pictures are resized") from error
        except ValueError as error:
            raise ModelError(f"'{folder / FILE}' is no JSON: {error}") from error
        return cls.of(told)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Preprocess:
        """From the content of such a file."""
        size = told.get("size", 224) if told.get("do_resize", True) else None
        crop = told.get("crop_size", 224) if told.get("do_center_crop", "crop_size" in told) else None
        shortest, both = _size(size)
        if isinstance(size, int) and crop is None:
            shortest, both = None, (size, size)  # ViT's old files mean both sides by one number
        normalises = told.get("do_normalize", True)
        return cls(
            shortest=shortest,
            size=both,
            crop=None if crop is None else _pair(crop),
            resampling=RESAMPLING[int(told.get("resample", 3))],
            mean=tuple(told["image_mean"]) if normalises else (0.0, 0.0, 0.0),
            std=tuple(told["image_std"]) if normalises else (1.0, 1.0, 1.0),
        )

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """An RGB picture as float32 [3, H, W]."""
        whole = image.convert("RGB")
        if self.unrounded:
            cut = [np.asarray(self._crop(self._resize(channel.convert("F")))) for channel in whole.split()]
            pixels = np.stack(cut, axis=-1).clip(0, 255)
        else:
            pixels = np.asarray(self._crop(self._resize(whole)), dtype=np.float32)
        pixels_HW3 = torch.from_numpy(pixels / np.float32(255))
        mean_3, std_3 = torch.tensor(self.mean), torch.tensor(self.std)
        return ((pixels_HW3 - mean_3) / std_3).permute(2, 0, 1).contiguous()

    def _resize(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        if self.size is not None:
            height, width = self.size
        elif self.shortest is not None:
            # The longer side is cut to whole pixels, as CLIP's and DINOv2's processors do.
            least = min(width, height)
            width, height = (int(self.shortest * side / least) for side in (width, height))
        if (width, height) == image.size:
            return image
        return image.resize((width, height), Image.Resampling[self.resampling.upper()])

    def _crop(self, image: Image.Image) -> Image.Image:
        if self.crop is None:
            return image
        height, width = self.crop
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))


def _size(told: Any) -> tuple[int | None, tuple[int, int] | None]:
    if told is None:
        return None, None
    if isinstance(told, int):
        return told, None
    if "shortest_edge" in told:
        return int(told["shortest_edge"]), None
    return None, _pair(told)


def _pair(told: Any) -> tuple[int, int]:
    return (told, told) if isinstance(told, int) else (int(told["height"]), int(told["width"]))
