"""The VAE in less memory: in tiles that overlap and blend, on another device than its weights, or a tiny one.

Shapes: B pictures, C channels, H W rows and columns of what goes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from darkroom.hardware.accelerator import used_here
from darkroom.sample.pictures import check_wanted

TILE_PIXELS = 512
OVERLAP = 0.25
"""Share of a tile's side that it has in common with its neighbour, at least."""


class VaeFront:
    """A VAE as `pictures.decode` and `encode` call it, on `device`, in tiles where they are asked for.

    `tile_pixels` is the side of a tile in pixels of the picture; nothing larger goes through the VAE at once.
    """

    def __init__(self, vae: Any, device: torch.device, tile_pixels: int | None = None) -> None:
        self._vae, self._device = vae, device
        self.config = vae.config
        self._factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self._tile = None if tile_pixels is None else max(2, tile_pixels // self._factor)

    def parameters(self) -> Iterator[torch.Tensor]:
        """One tensor that says where and in which type latents are wanted."""
        yield torch.empty(0, device=self._device, dtype=next(self._vae.parameters()).dtype)

    def to(self, dtype: torch.dtype) -> None:
        """Another type for the weights. Those in the old one are freed here, perhaps by another thread's
        stream than they were made on, before they have been read."""
        used_here(*self._vae.parameters())
        self._vae.to(dtype)

    def decode(self, latents_BCHW: torch.Tensor) -> Any:
        """Pixels of -1 to 1, under `sample`."""
        if not self._needs_tiles(latents_BCHW, self._tile):
            return self._vae.decode(latents_BCHW)
        assert self._tile is not None
        pixels = in_tiles(lambda z: self._vae.decode(z).sample, latents_BCHW, self._tile, up=self._factor)
        return SimpleNamespace(sample=pixels)

    def encode(self, pixels_B3HW: torch.Tensor) -> Any:
        """The latents' distribution, under `latent_dist`."""
        from darkroom.models.parts import DiagonalGaussianDistribution

        tile = None if self._tile is None else self._tile * self._factor
        if not self._needs_tiles(pixels_B3HW, tile):
            return self._vae.encode(pixels_B3HW)
        assert tile is not None
        moments = in_tiles(
            lambda x: self._vae.encode(x).latent_dist.parameters, pixels_B3HW, tile, down=self._factor
        )
        return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(moments))

    @staticmethod
    def _needs_tiles(x_BCHW: torch.Tensor, tile: int | None) -> bool:
        return tile is not None and max(x_BCHW.shape[-2:]) > tile


def in_tiles(
    run: Callable[[torch.Tensor], torch.Tensor],
    x_BCHW: torch.Tensor,
    tile: int,
    *,
    up: int = 1,
    down: int = 1,
    overlap: float = OVERLAP,
) -> torch.Tensor:
    """Run something that scales sides by up / down over square tiles, and blend them where they overlap.

    All tiles are whole: the last ends at the border, so that none is a sliver. The weight of a tile falls
    linearly to its inner borders. Memory is that of one tile, and the result in float32.
    """
    rows, columns = (_starts(side, tile, overlap, down) for side in x_BCHW.shape[-2:])
    height, width = (min(tile, side) for side in x_BCHW.shape[-2:])
    out: torch.Tensor | None = None
    weights = [
        _weights([_scaled(s, up, down) for s in starts], _scaled(span, up, down), x_BCHW.device)
        for starts, span in ((rows, height), (columns, width))
    ]
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            check_wanted()
            done = run(x_BCHW[..., top : top + height, left : left + width])
            if out is None:
                size = [_scaled(side, up, down) for side in x_BCHW.shape[-2:]]
                out = torch.zeros((*done.shape[:2], *size), device=done.device, dtype=torch.float32)
            y, x = _scaled(top, up, down), _scaled(left, up, down)
            place = out[..., y : y + done.shape[-2], x : x + done.shape[-1]]
            place.addcmul_(done.float(), weights[0][i][:, None] * weights[1][j])
            del done
    assert out is not None
    return out


def _scaled(length: int, up: int, down: int) -> int:
    return length * up // down


def _starts(side: int, tile: int, overlap: float, unit: int) -> list[int]:
    """Where tiles begin: evenly, the first at 0, the last to end at the border, on multiples of `unit`."""
    if side <= tile:
        return [0]
    count = math.ceil((side - overlap * tile) / (tile - overlap * tile))
    return [round(i * (side - tile) / (count - 1) / unit) * unit for i in range(count)]


def _weights(starts: list[int], span: int, device: torch.device) -> list[torch.Tensor]:
    """Of each tile along one side: 1, falling to a neighbour over what they share; together 1 everywhere."""
    total = torch.zeros(starts[-1] + span, device=device)
    weights = []
    for i, start in enumerate(starts):
        weight = torch.ones(span, device=device)
        if i > 0 and (shared := starts[i - 1] + span - start) > 0:
            weight[:shared] *= _ramp(shared, device)
        if i + 1 < len(starts) and (shared := start + span - starts[i + 1]) > 0:
            weight[span - shared :] *= _ramp(shared, device).flip(0)
        weights.append(weight)
        total[start : start + span] += weight
    return [weight / total[start : start + span] for start, weight in zip(starts, weights, strict=True)]


def _ramp(length: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(length, device=device) + 0.5) / length
