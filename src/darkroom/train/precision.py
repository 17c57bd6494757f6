"""The precision that training computes in: how it is chosen, and modules that are cast to it."""

from __future__ import annotations

import typing
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from darkroom import models
from darkroom.errors import RecipeError
from darkroom.hardware import accelerator
from darkroom.recipe.sections import Precision

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MANY_KEYS = 1024
"""Attention over this many keys or more is the quicker one in bf16."""


def choose_precision(asked: Precision | Literal["auto"], device: torch.device) -> tuple[Precision, str]:
    """The precision to compute in, and why; RecipeError for float16 where it does not train."""
    if asked == "fp16" and device.type == "cpu":
        raise RecipeError(
            "train.precision", "fp16 on a CPU, about five times slower than float32", mend="use bf16 or auto"
        )
    name, why = models.choose_precision(asked, device)
    if name == "fp16" and not accelerator.kind_of(device).scaler:
        needs = "PyTorch's gradient scaler needs float64"
        if asked == "auto":
            return "float32", f"{why}, and for fp16 {needs}"
        raise RecipeError("train.precision", f"fp16 on {device.type}: {needs}", mend="use bf16 or auto")
    return typing.cast(Precision, name), why


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module in place; diffusers' own `to` would warn of an empty list of layers to leave alone."""
    nn.Module.to(module, dtype)


def attend_in_float32(module: nn.Module) -> None:
    """Let a module's attention products of few keys run in float32, all else in the module's precision.

    torch 2.13's bf16 attention on CPU has a backward pass 2 to 7 times slower than the float32 one at up to
    256 keys; from 1,024 on it is the quicker one, by a third.
    """
    from darkroom.models.parts import Attention, AttnProcessor2_0, PreTrainedModel

    class Float32Attention(AttnProcessor2_0):  # type: ignore[misc]
        # The names of its parameters count: diffusers leaves out, with a warning, what is not among them.
        def __call__(
            self,
            attn: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor | None = None,
            attention_mask: Tensor | None = None,
            temb: Tensor | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            given = (attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            with _Float32Product():
                out: Tensor = super().__call__(*given, *args, **kwargs)
            return out

    if isinstance(module, PreTrainedModel):
        module.set_attn_implementation(_register_float32_attention())
    for part in module.modules():
        if isinstance(part, Attention):
            part.set_processor(Float32Attention())


def _register_float32_attention() -> str:
    """Tell transformers of the attention in float32; returns the name it knows it by."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return out.to(query.dtype), None

    name = "sdpa_float32"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)  # without it the mask, causal in CLIP, is left out
    return name


class _Float32Product(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention or args[1].shape[-2] >= MANY_KEYS:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        return func(*(arg.float() for arg in args), **(kwargs or {})).to(dtype)
