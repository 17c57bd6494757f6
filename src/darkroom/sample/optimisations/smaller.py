"""Optimisations that take less memory: VAE slices and tiles, int8, fp8."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import nn

from darkroom.errors import InputError, MissingExtra
from darkroom.sample.optimisations.applied import Applied
from darkroom.sample.optimisations.optimisation import ComputeTarget
from darkroom.sample.optimisations.vae import TILE_PIXELS

SMALLEST_TILE = 64
# Smaller linear layers gain nothing from int8 or fp8: turning numbers costs more than it saves.
WORTH_QUANTISING = 640 * 640
QUANTISED = ("dynamic", "weights")


def vae_slicing(applied: Applied, argument: str) -> None:
    """Pictures through the VAE one at a time."""
    applied.max_decode_pixels = 1


def vae_tiling(applied: Applied, argument: str) -> None:
    """Large pictures through the VAE in overlapping tiles that are blended."""
    tile = TILE_PIXELS
    if argument:
        if not argument.isdecimal() or int(argument) < SMALLEST_TILE or int(argument) % 8:
            raise InputError(
                f"vae_tiling:{argument}",
                allowed=f"a tile's side in pixels, {SMALLEST_TILE} or more, a multiple of 8",
            )
        tile = int(argument)
    applied.tile_pixels = tile
    applied.notes.append(f"vae_tiling: pictures with a side above {tile} px are decoded in blended tiles")


def int8(applied: Applied, argument: str) -> None:
    """Large linear layers in 8-bit integers: products too (dynamic), or the weights only."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    kinds = {"dynamic": Int8DynamicActivationInt8WeightConfig, "weights": Int8WeightOnlyConfig}
    _quantise(applied, "int8", argument, kinds)


def fp8(applied: Applied, argument: str) -> None:
    """Large linear layers in 8-bit floating point: products too (dynamic), or the weights only."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig

    kinds = {"dynamic": Float8DynamicActivationFloat8WeightConfig, "weights": Float8WeightOnlyConfig}
    _quantise(applied, "fp8", argument, kinds)


def _quantise(applied: Applied, name: str, argument: str, kinds: dict[str, Callable[[], Any]]) -> None:
    from torchao.quantization import quantize_

    if argument and argument not in QUANTISED:
        raise InputError(f"{name}:{argument}", allowed=", ".join(QUANTISED))
    unet = applied.own("unet")
    taken = [module for module in unet.modules() if _gains(module)]
    if not taken:
        raise InputError(
            f"{name}: no linear layer of the U-Net has {WORTH_QUANTISING:,} weights", mend="leave it out"
        )
    quantize_(unet, kinds[argument or "dynamic"](), filter_fn=lambda module, _: _gains(module))
    weights = sum(module.in_features * module.out_features for module in taken)
    share = weights / sum(p.numel() for p in unet.parameters())
    applied.notes.append(f"{name}: {len(taken)} linear layers, {share:.0%} of the U-Net's weights, in 8 bits")


def _gains(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.in_features * module.out_features >= WORTH_QUANTISING


def lacks_int8(place: ComputeTarget) -> str | None:
    """torchao, and a device whose int8 products PyTorch knows."""
    if place.device.type not in ("cpu", "cuda"):
        return "int8 works on CPUs and CUDA devices"
    return _lacks_torchao()


def lacks_fp8(place: ComputeTarget) -> str | None:
    """Cards since Ada have units for it."""
    if place.capability < (8, 9):
        return "fp8 needs an NVIDIA card with fp8 units: Ada, Hopper or later"
    return _lacks_torchao()


def _lacks_torchao() -> str | None:
    found = importlib.util.find_spec("torchao") is not None
    return None if found else str(MissingExtra("torchao", "quant"))
