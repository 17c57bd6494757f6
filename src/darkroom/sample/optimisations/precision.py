"""Optimisations of number formats and memory: tf32, fp16, bf16, autocast, channels_last, int8,
fp8, VAE slices and tiles.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from darkroom.errors import InputError, MissingExtra
from darkroom.hardware.accelerator import RoundedFloat32
from darkroom.sample.denoise import Unet
from darkroom.sample.optimisations.applied import TILE_PIXELS, Applied, ComputeTarget

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def within(call: Unet, surroundings: AbstractContextManager[object]) -> Unet:
    """A call with a context around it that can be entered again and again."""

    def inside(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        with surroundings:
            return call(x, t, text, added)

    return inside


def tf32(applied: Applied, argument: str) -> None:
    """Products of float32 rounded to 10 bits of mantissa, summed in float32."""
    applied.inner.append(lambda call: within(call, RoundedFloat32()))


def lacks_tf32(place: ComputeTarget) -> str | None:
    """TF32 is of Ampere and later, and for float32 models."""
    if place.capability < (8, 0):
        return "TF32 is of NVIDIA cards since Ampere"
    return None if place.dtype == torch.float32 else "TF32 is for models in float32"


def fp16(applied: Applied, argument: str) -> None:
    """Weights and activations in float16."""
    applied.cast(torch.float16)


def lacks_fp16(place: ComputeTarget) -> str | None:
    """CPUs emulate it."""
    return "float16 on a CPU is about five times slower than float32: use bf16" if _on_cpu(place) else None


def bf16(applied: Applied, argument: str) -> None:
    """Weights and activations in bfloat16."""
    applied.cast(torch.bfloat16)


def lacks_bf16(place: ComputeTarget) -> str | None:
    """Cards before Ampere emulate it."""
    if place.on_cuda and place.capability < (8, 0) and torch.version.hip is None:
        return "this card has no bfloat16: use fp16"
    return None


def autocast(applied: Applied, argument: str) -> None:
    """PyTorch casts at every operation; kept only to show what that costs."""
    name = argument or ("fp16" if applied.device.type == "cuda" else "bf16")
    if name not in AUTOCAST_TYPES:
        raise InputError(f"autocast:{argument}", allowed=", ".join(AUTOCAST_TYPES))
    if name == "fp16" and applied.device.type == "cpu":
        raise InputError("autocast:fp16 on a CPU", mend="use autocast:bf16")
    kind, dtype = applied.device.type, AUTOCAST_TYPES[name]
    applied.inner.append(lambda call: _autocast(call, kind, dtype))


def _autocast(call: Unet, kind: str, dtype: torch.dtype) -> Unet:
    def inside(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        with torch.autocast(kind, dtype=dtype):
            return call(x, t, text, added)

    return inside


def channels_last(applied: Applied, argument: str) -> None:
    """Convolutions' weights with channels innermost, as tensor cores read them."""
    for part in ("unet", "vae"):
        applied.own(part).to(memory_format=torch.channels_last)


def _on_cpu(place: ComputeTarget) -> bool:
    return place.device.type == "cpu"


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
