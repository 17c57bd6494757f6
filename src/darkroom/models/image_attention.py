"""Cross-attention that reads pictures after the text: of `image_prompt`, apart as it needs diffusers at once.

Importing diffusers takes two seconds, and `darkroom.models` is imported by what draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from darkroom.models.parts import AttnProcessor2_0


class KeysAndValues(Protocol):
    """What attention reads of an adapter: each layer's two projections of its tokens."""

    @property
    def layers(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]: ...


class ImageAttention(AttnProcessor2_0):  # type: ignore[misc]
    """Cross-attention to text, and to each installed adapter's tokens with the rows' strengths."""

    def __init__(self, index: int, adapters: Mapping[int, KeysAndValues]) -> None:
        super().__init__()
        self.index, self.adapters = index, adapters

    def __deepcopy__(self, memo: object) -> ImageAttention:
        return self  # the weights are read only, and shared by look-alikes of the U-Net

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        ip_hidden_states: Mapping[int, torch.Tensor] | None = None,
        ip_adapter_masks: Mapping[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[B, L, D] to [B, L, D]; tokens and strengths by the adapter's place."""
        if not ip_hidden_states or not ip_adapter_masks:
            out: torch.Tensor = super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, temb
            )
            return out

        def by_heads(x_BLD: torch.Tensor) -> torch.Tensor:
            rows, places, width = x_BLD.shape
            return x_BLD.view(rows, places, attn.heads, width // attn.heads).transpose(1, 2)

        q = by_heads(attn.to_q(hidden_states))
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        mixed = F.scaled_dot_product_attention(q, by_heads(attn.to_k(text)), by_heads(attn.to_v(text)))
        for place, tokens in ip_hidden_states.items():
            strength = ip_adapter_masks[place]
            keys, values = self.adapters[place].layers[self.index]
            seen = F.scaled_dot_product_attention(
                q, by_heads(F.linear(tokens, keys)), by_heads(F.linear(tokens, values))
            )
            mixed = mixed + seen * at_level(strength, q.shape[2])[:, None, :, None].to(seen.dtype)
        made: torch.Tensor = attn.to_out[0](mixed.transpose(1, 2).flatten(2))
        return made


def at_level(strength_Bhw: torch.Tensor, places: int) -> torch.Tensor:
    """Strengths for the places of a U-Net level [B, L], as diffusers resizes IP-Adapter masks."""
    height, width = strength_Bhw.shape[1:]
    if height == width == 1:
        return strength_Bhw[:, 0]
    rows = int(math.sqrt(places / (width / height)))
    rows += int(places % rows != 0)
    small = F.interpolate(strength_Bhw[None].float(), size=(rows, places // rows), mode="bicubic")[0]
    return small.flatten(1)
