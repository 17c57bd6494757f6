"""Optimisations of attention: fused, fused projections, sliced; and blocks without lookups (`make_lean`).

Of each attention diffusers asks the signature of its processor at every call, of each block a dozen settings
that never change, and it multiplies and divides by ones. On a small U-Net that takes longer than the rest.
What `make_lean` leaves are the same operations in the same order, so the numbers are the same to the bit. And
where the very same text comes step after step, its keys and values are those of the step before.

Shapes: B rows, L tokens or places, D width, H heads.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from darkroom.errors import InputError
from darkroom.models.adapters.bank import Banked
from darkroom.models.parts import (
    Attention,
    AttnProcessor2_0,
    BasicTransformerBlock,
    FeedForward,
    FusedAttnProcessor2_0,
    ResnetBlock2D,
)
from darkroom.sample.optimisations.applied import Applied

KEPT_ROWS = 16
"""Rows of a call whose text's keys and values are kept; of more they would cost more memory than time."""


def make_lean(unet: nn.Module) -> None:
    """Change the class of every attention and block that is one of the plain kind; others stay."""
    unet.eval()
    for module in unet.modules():
        found = PLAIN.get(type(module))
        if found is not None and found[0](module):
            module.__class__ = found[1]


_PLAIN = object()
"""Of a layer that does nothing but its product."""


def _deciding(layer: nn.Module) -> object | None:
    """What decides about a layer's output next to what comes in, the same object as long as it is the same;
    None where that is not known. In an adapter bank it is what the bank keeps for the rows' adapters."""
    if not isinstance(layer, Banked):
        return _PLAIN if type(layer) is nn.Linear else None
    call = layer.bank_rows.call
    if call.slots_BK is None:
        return _PLAIN
    return None if torch.compiler.is_compiling() else call.kept


def _reference(decides: object) -> Callable[[], object | None]:
    """How it is asked for later without keeping a batch's matrices alive."""
    return (lambda: _PLAIN) if decides is _PLAIN else weakref.ref(decides)


def _is_plain_attention(module: Any) -> bool:
    fused = module.fused_projections
    return (
        type(module.processor) is (FusedAttnProcessor2_0 if fused else AttnProcessor2_0)
        and all(one is None for one in (module.spatial_norm, module.group_norm, module.norm_q, module.norm_k))
        and not module.norm_cross
        and not module.residual_connection
        and module.rescale_output_factor == 1
    )


def _is_plain_block(module: Any) -> bool:
    return (
        module.norm_type == "layer_norm"
        and module.pos_embed is None
        and module._chunk_size is None
        and module.attn2 is not None
        and not module.only_cross_attention
    )


def _is_plain_feed_forward(module: Any) -> bool:
    kinds = [type(one) for one in module.net]
    return kinds[1:] in ([nn.Dropout, nn.Linear], [nn.Dropout, nn.Linear, nn.Dropout])


def is_plain_resnet(module: Any) -> bool:
    """Whether a residual block does what nearly all do, but that a VAE's knows no time."""
    usual = "default" if module.time_emb_proj is not None else "group"
    return (
        module.upsample is None
        and module.downsample is None
        and module.time_embedding_norm in ("default", usual)
        and not module.skip_time_act
        and module.output_scale_factor == 1
        and type(module.nonlinearity) is nn.SiLU
    )


class LeanAttention(Attention):  # type: ignore[misc]
    """Self- or cross-attention by SDPA, and nothing else."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """[B, L, D] to [B, L, D]; whatever is not plain goes diffusers' own way."""
        if attention_mask is not None or more:
            out: torch.Tensor = super().forward(hidden_states, encoder_hidden_states, attention_mask, **more)
            return out
        if encoder_hidden_states is None:
            q, k, v = self._own_three(hidden_states)
        else:
            q = self._by_heads(self.to_q(hidden_states))
            k, v = self._of_text(encoder_hidden_states)
        mixed_BHLd = F.scaled_dot_product_attention(q, k, v)
        made: torch.Tensor = self.to_out[0](mixed_BHLd.transpose(1, 2).flatten(2))
        return made

    def _own_three(self, x_BLD: torch.Tensor) -> list[torch.Tensor]:
        if self.fused_projections:
            return [self._by_heads(part) for part in self.to_qkv(x_BLD).chunk(3, dim=-1)]
        return [self._by_heads(layer(x_BLD)) for layer in (self.to_q, self.to_k, self.to_v)]

    def _of_text(self, text_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The text's keys and values, [B, H, L, D / H]; the last call's for the same tensor."""
        decides = self._decides(text_BLD)
        if decides is None:
            return self._keys_and_values(text_BLD)
        held = self.__dict__.get("_held")
        if (
            held is None
            or held[0]() is not text_BLD
            or held[1] != text_BLD._version
            or held[2]() is not decides
        ):
            found = self._keys_and_values(text_BLD)
            # Past nn.Module's own bookkeeping: a state dict must not know of it.
            this = weakref.ref(text_BLD), text_BLD._version, _reference(decides)
            held = self.__dict__["_held"] = (*this, *found)
        return held[3], held[4]

    def _decides(self, text_BLD: torch.Tensor) -> object | None:
        """What decides next to the text, as an adapter's rows may change under the same text; None where
        nothing may be kept."""
        if len(text_BLD) > KEPT_ROWS or text_BLD.is_inference() or torch.is_grad_enabled():
            return None
        layers = (self.to_kv,) if self.fused_projections else (self.to_k, self.to_v)
        first, *others = map(_deciding, layers)
        return first if all(one is first for one in others) else None

    def _keys_and_values(self, text_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fused_projections:
            k, v = self.to_kv(text_BLD).chunk(2, dim=-1)
        else:
            k, v = self.to_k(text_BLD), self.to_v(text_BLD)
        return self._by_heads(k), self._by_heads(v)

    def _by_heads(self, x_BLD: torch.Tensor) -> torch.Tensor:
        rows, length, width = x_BLD.shape
        return x_BLD.view(rows, length, self.heads, width // self.heads).transpose(1, 2)


class LeanBlock(BasicTransformerBlock):  # type: ignore[misc]
    """Self-attention, cross-attention and feed-forward, each behind its norm and added to what came in."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: torch.Tensor | None = None,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[B, L, D] to [B, L, D]; whatever is not plain goes diffusers' own way."""
        if attention_mask is not None or encoder_attention_mask is not None or cross_attention_kwargs:
            out: torch.Tensor = super().forward(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                timestep,
                cross_attention_kwargs,
                class_labels,
                added_cond_kwargs,
            )
            return out
        x = self.attn1(self.norm1(hidden_states)) + hidden_states
        x = self.attn2(self.norm2(x), encoder_hidden_states) + x
        made: torch.Tensor = self.ff(self.norm3(x)) + x
        return made


class LeanFeedForward(FeedForward):  # type: ignore[misc]
    """The two layers without the dropout between and behind them."""

    def forward(self, hidden_states: torch.Tensor, *more: Any, **also: Any) -> torch.Tensor:
        """[B, L, D] to [B, L, D]"""
        out: torch.Tensor = self.net[2](self.net[0](hidden_states))
        return out


class LeanResnet(ResnetBlock2D):  # type: ignore[misc]
    """Two convolutions behind their norms, the time between them, added to what came in."""

    def forward(
        self, input_tensor: torch.Tensor, temb: torch.Tensor, *more: Any, **also: Any
    ) -> torch.Tensor:
        """[B, C, H, W] and the time's vector [B, T] to [B, O, H, W]"""
        x = self.conv1(F.silu(self.norm1(input_tensor)))
        x = x + self.time_emb_proj(F.silu(temb))[:, :, None, None]
        out: torch.Tensor = self.conv2(F.silu(self.norm2(x)))
        stays = input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)
        return stays + out


PLAIN: dict[type[nn.Module], tuple[Callable[[Any], bool], type[nn.Module]]] = {
    Attention: (_is_plain_attention, LeanAttention),
    BasicTransformerBlock: (_is_plain_block, LeanBlock),
    FeedForward: (_is_plain_feed_forward, LeanFeedForward),
    ResnetBlock2D: (lambda m: m.time_emb_proj is not None and is_plain_resnet(m), LeanResnet),
}
"""What diffusers' class must be like to be replaced, and by which."""


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

    make_lean(applied.own("unet"))
