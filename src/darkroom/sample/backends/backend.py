"""`Backend`: what the denoising loop drives, whatever computes behind it.

Shapes: B rows, C H W latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from PIL import Image

from darkroom.sample.denoise import Unet

if TYPE_CHECKING:
    from darkroom.models.model import Model

Decode = Callable[[torch.Tensor], list[Image.Image]]
Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(repr=False)
class Backend:
    """A model's U-Net and VAE, ready to be called."""

    name: str
    unet: Unet
    decode: Decode
    """Latents [B, C, H, W] to pictures."""
    encode: Encode
    """Pixels [B, 3, 8H, 8W] of -1 to 1 to the latents' mean and standard deviation, in the U-Net's scale."""
    device: torch.device
    """Where latents and conditions are handed over."""
    dtype: torch.dtype
    """What conditions are handed over in."""
    precision: str
    """What the U-Net is computed in, as pictures say it: float32, bfloat16, float16."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about the pictures: what was chosen or substituted."""
    times_s: dict[str, float] = field(default_factory=dict)
    """Seconds of work done once, by what it was: export, compile, warm-up."""
    model: Model | None = None
    """The model as optimisations changed it, with its text encoders; None: the one that was opened."""
    optimised: tuple[str, ...] = ()
    """Optimisations in place."""
    reasons: list[str] = field(default_factory=list)
    """Why they were chosen, where `auto` chose."""
    guidance_interval: tuple[float, float] | None = None
    """Noise levels between which guidance is on."""
