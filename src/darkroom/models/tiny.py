"""Small autoencoders in the layout of the TAESD repository (Ollin Boer Bohan): layers by number, picture
values of 0 to 1, latents as the denoiser sees them.

`TinyAutoencoder` is one in the place of a model's VAE: a model is trained and drawn in its latents. Its
folder holds the repository's tensors in one safetensors file, and a `config.json` that says how many layers
there are.

Shapes: B pictures, C channels, H W pixels or latent pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from darkroom.models.parts import (
    ConfigMixin,
    DiagonalGaussianDistribution,
    ModelMixin,
    register_to_config,
)

NO_SPREAD = -30.0
"""Logarithm of the variance of latents that have next to none."""


class NumberedDecoder(nn.Sequential):
    """Latents, softly bounded, to pixels of -1 to 1: stages of residual blocks with doubling between."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        width, stages = int(config["width"]), list(config["blocks_per_stage_decoder"])
        pool = int(config["pool_channels"]) if config.get("midblock_groupnorm_pool") else 0
        # The first place is the soft bound, done in `forward`; it has a number but no weights.
        enter = nn.Conv2d(int(config["latent_channels"]), width, 3, padding=1)
        layers: list[nn.Module] = [nn.Identity(), enter, nn.ReLU()]
        for i, count in enumerate(stages):
            pooled = pool if i == 0 else 0
            layers += [Residual(width, pooled, int(config.get("pool_groups", 1))) for _ in range(count)]
            if i + 1 < len(stages):
                layers += [nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1, bias=False)]
        super().__init__(*layers, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, H, W] to pixels [B, 3, 8H, 8W]."""
        pixels: torch.Tensor = super().forward(torch.tanh(latents_BCHW / 3) * 3)  # type: ignore[no-untyped-call]
        return pixels.clamp(0, 1) * 2 - 1


class NumberedEncoder(nn.Sequential):
    """Pixels of -1 to 1 to latents: stages of residual blocks with halving between."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        width, stages = int(config["width"]), list(config["blocks_per_stage_encoder"])
        pool = int(config["pool_channels"]) if config.get("midblock_groupnorm_pool") else 0
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for i, count in enumerate(stages):
            if i:
                layers.append(nn.Conv2d(width, width, 3, padding=1, stride=2, bias=False))
            pooled = pool if i + 1 == len(stages) else 0
            layers += [Residual(width, pooled, int(config.get("pool_groups", 1))) for _ in range(count)]
        super().__init__(*layers, nn.Conv2d(width, int(config["latent_channels"]), 3, padding=1))

    def forward(self, pixels_B3HW: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, 8H, 8W] to latents [B, C, H, W]."""
        latents: torch.Tensor = super().forward(pixels_B3HW / 2 + 0.5)  # type: ignore[no-untyped-call]
        return latents


class Residual(nn.Module):
    """Three convolutions and a skip connection; `pooled` channels of normalised context first."""

    def __init__(self, width: int, pooled: int = 0, groups: int = 1) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(width, width, 3, padding=1) for _ in range(3)]
        self.conv = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU(), convolutions[2])
        self.pool: nn.Module | None = None
        if pooled:
            into, back = nn.Conv2d(width, pooled, 1, bias=False), nn.Conv2d(pooled, width, 1, bias=False)
            self.pool = nn.Sequential(into, nn.GroupNorm(groups, pooled), nn.ReLU(), back)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to the same."""
        if self.pool is not None:
            x_BCHW = x_BCHW + self.pool(x_BCHW)
        return torch.relu(self.conv(x_BCHW) + x_BCHW)


class TinyAutoencoder(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Both halves in the place of diffusers' AutoencoderKL. Its latents have no spread."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        width: int = 64,
        latent_channels: int = 4,
        downscale: int = 8,
        blocks_per_stage_encoder: Sequence[int] = (1, 3, 3, 3),
        blocks_per_stage_decoder: Sequence[int] = (3, 3, 3, 1),
        midblock_groupnorm_pool: bool = False,
        pool_channels: int = 0,
        pool_groups: int = 1,
        scaling_factor: float = 1.0,
        force_upcast: bool = False,
    ) -> None:
        super().__init__()
        stages = len(blocks_per_stage_encoder), len(blocks_per_stage_decoder)
        if any(2 ** (count - 1) != downscale for count in stages):
            raise ValueError(f"{stages[0]} and {stages[1]} stages do not make a latent of {downscale} pixels")
        self.register_to_config(block_out_channels=[width] * stages[0])
        self.encoder, self.decoder = NumberedEncoder(self.config), NumberedDecoder(self.config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **more: Any) -> Any:
        """By a configuration of the repository's, which may note more than is asked here."""
        asked = signature(cls.__init__).parameters
        kept = {key: config[key] for key in config if key in asked or key.startswith("_")}
        return super().from_config(kept, **more)

    def encode(self, pixels_B3HW: torch.Tensor, return_dict: bool = True) -> Any:
        """The latents' distribution, under `latent_dist`, of pixels of -1 to 1."""
        mean = self.encoder(pixels_B3HW)
        moments = torch.cat([mean, torch.full_like(mean, NO_SPREAD)], dim=1)
        latents = DiagonalGaussianDistribution(moments)
        return SimpleNamespace(latent_dist=latents) if return_dict else (latents,)

    def decode(self, latents_BCHW: torch.Tensor, return_dict: bool = True) -> Any:
        """Pixels of -1 to 1, under `sample`."""
        pixels = self.decoder(latents_BCHW)
        return SimpleNamespace(sample=pixels) if return_dict else (pixels,)
