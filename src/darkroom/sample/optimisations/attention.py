"""Optimisations of attention: fused, fused projections, sliced, and the plain one to compare with."""

from __future__ import annotations

import importlib.util
from typing import Any

from darkroom.errors import InputError
from darkroom.sample.optimisations.applied import Applied


def fused_attention(applied: Applied, argument: str) -> None:
    """Attention in one kernel that never holds all scores: PyTorch's SDPA, or xformers'."""
    from darkroom.models.parts import AttnProcessor2_0

    if argument not in ("", "sdpa", "xformers"):
        raise InputError(f"fused_attention:{argument}", allowed="sdpa, xformers")
    if applied.model.is_dit:
        if argument == "xformers":
            raise InputError(
                "fused_attention:xformers with a diffusion transformer", mend="use fused_attention"
            )
        return  # it has no other
    if argument != "xformers":
        if any(not isinstance(p, AttnProcessor2_0) for p in applied.model.unet.attn_processors.values()):  # type: ignore[union-attr]
            applied.own("unet").set_attn_processor(AttnProcessor2_0())
        return
    if importlib.util.find_spec("xformers") is None:
        raise InputError("xformers is not installed", mend="pip install xformers")
    if applied.device.type == "cpu":
        raise InputError("fused_attention:xformers on a CPU", mend="use fused_attention")
    applied.own("unet").enable_xformers_memory_efficient_attention()


def unfused_attention(applied: Applied, argument: str) -> None:
    """Scores, softmax and weighted values one after the other."""
    from darkroom.models.parts import AttnProcessor

    applied.own("unet").set_attn_processor(AttnProcessor())


def fused_qkv(applied: Applied, argument: str) -> None:
    """Query, key and value of self-attention (key and value of cross-attention) in one product."""
    unet: Any = applied.own("unet")
    plain = all(type(m.to_q).__name__ == "Linear" for m in _attentions(unet))
    if not plain:
        raise InputError(
            "fused_qkv with adapters in the U-Net", mend="merge the adapter, or leave fused_qkv out"
        )
    unet.fuse_qkv_projections()


def _attentions(unet: Any) -> list[Any]:
    from darkroom.models.parts import Attention

    return [module for module in unet.modules() if isinstance(module, Attention)]


def attention_slicing(applied: Applied, argument: str) -> None:
    """Attention a few heads at a time; each slice holds its scores."""
    size: str | int = argument or "auto"
    if argument not in ("", "auto", "max"):
        if not argument.isdecimal() or int(argument) < 1:
            raise InputError(f"attention_slicing:{argument}", allowed="auto, max, or heads at a time")
        size = int(argument)
    try:
        applied.own("unet").set_attention_slice(size)
    except ValueError as error:
        raise InputError(f"attention_slicing:{argument}: {error}") from error


def lean(applied: Applied, argument: str) -> None:
    """Attention blocks without diffusers' checks at each call, and a text's keys and values made once."""
    from darkroom.sample.optimisations.lean import make_lean

    make_lean(applied.own("unet"))
