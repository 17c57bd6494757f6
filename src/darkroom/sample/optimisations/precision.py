"""Optimisations of number formats and memory layout: tf32, fp16, bf16, autocast, channels_last."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from darkroom.errors import InputError
from darkroom.sample.denoise import Unet
from darkroom.sample.optimisations.applied import Applied
from darkroom.sample.optimisations.optimisation import ComputeTarget

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def within(call: Unet, surroundings: AbstractContextManager[object]) -> Unet:
    """A call with a context around it that can be entered again and again."""

    def inside(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        with surroundings:
            return call(x, t, text, added)

    return inside


class _Tf32:
    """TensorFloat-32 for matrix products and convolutions, and what was set before at the end."""

    def __enter__(self) -> None:
        self._before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self._before


def tf32(applied: Applied, argument: str) -> None:
    """Products of float32 rounded to 10 bits of mantissa, summed in float32."""
    applied.inner.append(lambda call: within(call, _Tf32()))


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
