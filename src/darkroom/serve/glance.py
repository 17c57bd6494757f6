"""`Glance`: what a picture on its way looks like, without its VAE: each latent pixel's colour, by one matrix.

A VAE's latents are close to a small picture whose channels are mixed. How its own are mixed is learnt once,
by least squares, from smooth random latents and what the VAE makes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

if TYPE_CHECKING:
    from darkroom.models import Model
    from darkroom.sample.backends import Backend

PICTURES, SIDE, PATCHES = 8, 16, 4
"""To learn from: so many, of so many latent pixels a side, of so many colours a side that run into each
other."""


class Glance:
    """Latents to the colours of their pixels: `matrix` [C + 1, 3], whose last row is the colour of zero."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix

    @classmethod
    def learnt(cls, backend: Backend, channels: int) -> Glance:
        """From what the backend's VAE makes of latents of so many channels."""
        draw = torch.Generator().manual_seed(0)
        coarse_BCHW = 1.5 * torch.randn(PICTURES, channels, PATCHES, PATCHES, generator=draw)
        latents_BCHW = torch.nn.functional.interpolate(coarse_BCHW, size=(SIDE, SIDE), mode="bilinear")
        images = backend.decode(latents_BCHW.to(backend.device, backend.dtype))
        colours = [
            _values(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)) for image in images
        ]
        return cls(torch.linalg.lstsq(_with_one(latents_BCHW.movedim(1, -1)), torch.cat(colours)).solution)

    def at(self, latents_CHW: torch.Tensor, size: tuple[int, int]) -> Image.Image:
        """What latents look like, in a picture's size (width, height)."""
        height, width = latents_CHW.shape[1:]
        colours = _with_one(latents_CHW.float().cpu().movedim(0, -1)) @ self.matrix
        values = colours.reshape(height, width, 3).clamp(0, 255).round().to(torch.uint8)
        return Image.fromarray(values.numpy()).resize(size, Image.Resampling.BICUBIC)


def channels_of(model: Model) -> int:
    """Of the model's latents."""
    vae: Any = model.vae
    return int(vae.config.latent_channels)


def _with_one(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels [..., C] as rows [N, C + 1] that end with 1."""
    rows = pixels.reshape(-1, pixels.shape[-1]).float()
    return torch.cat([rows, torch.ones(len(rows), 1)], dim=1)


def _values(image: Image.Image) -> torch.Tensor:
    """Pixels as rows [N, 3]."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32).reshape(-1, 3).copy())
