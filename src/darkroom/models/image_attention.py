"""Attention that nets work in: `image_prompt`'s and `lllite`'s, apart as it needs diffusers at once.

Importing diffusers takes two seconds, and `darkroom.models` is imported by what draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from darkroom.models.parts import AttnProcessor2_0

Lites = Sequence[tuple[int, torch.Tensor, Sequence[torch.Tensor]]]
"""ControlNet-LLLites of a call, in the order in which they work: place, strengths [B], encoded pictures."""


class ImageAttention(AttnProcessor2_0):  # type: ignore[misc]
    """Self- or cross-attention whose inputs LLLites change, and which reads IP-Adapters' tokens besides text.

    `path` is the attention's in the U-Net, `index` its number among the cross-attentions; `nets` are the
    IP-Adapters and LLLites by place, which may change between calls.
    """

    def __init__(self, path: str, index: int, nets: Mapping[int, Any]) -> None:
        super().__init__()
        self.path, self.index, self.nets = path, index, nets

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
        lites: Lites = (),
    ) -> torch.Tensor:
        """[B, L, D] to [B, L, D]; tokens and strengths by the adapter's place."""
        own = encoder_hidden_states is None
        tokens = {} if own or not ip_hidden_states or not ip_adapter_masks else ip_hidden_states
        if not (tokens or lites):
            out: torch.Tensor = super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, temb
            )
            return out

        def by_heads(x_BLD: torch.Tensor) -> torch.Tensor:
            rows, places, width = x_BLD.shape
            return x_BLD.view(rows, places, attn.heads, width // attn.heads).transpose(1, 2)

        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q = by_heads(attn.to_q(self._steered("to_q", hidden_states, lites)))
        k = by_heads(attn.to_k(self._steered("to_k", text, lites)))
        v = by_heads(attn.to_v(self._steered("to_v", text, lites)))
        mixed = F.scaled_dot_product_attention(q, k, v)
        for place, image in tokens.items():
            assert ip_adapter_masks is not None
            strength = ip_adapter_masks[place]
            keys, values = self.nets[place].layers[self.index]
            seen = F.scaled_dot_product_attention(
                q, by_heads(F.linear(image, keys)), by_heads(F.linear(image, values))
            )
            mixed = mixed + seen * at_level(strength, q.shape[2])[:, None, :, None].to(seen.dtype)
        made: torch.Tensor = attn.to_out[0](mixed.transpose(1, 2).flatten(2))
        return made

    def _steered(self, part: str, x_BLI: torch.Tensor, lites: Lites) -> torch.Tensor:
        """What a layer of the attention reads: each LLLite sees what those before it have made of it."""
        for place, strength_B, levels in lites:
            layer = self.nets[place].layers.get(f"{self.path}.{part}")
            if layer is not None:
                x_BLI = x_BLI + layer.change(x_BLI, levels) * strength_B[:, None, None].to(x_BLI.dtype)
        return x_BLI


def at_level(strength_Bhw: torch.Tensor, places: int) -> torch.Tensor:
    """Strengths for the places of a U-Net level [B, L], as diffusers resizes IP-Adapter masks."""
    height, width = strength_Bhw.shape[1:]
    if height == width == 1:
        return strength_Bhw[:, 0]
    rows = int(math.sqrt(places / (width / height)))
    rows += int(places % rows != 0)
    small = F.interpolate(strength_Bhw[None].float(), size=(rows, places // rows), mode="bicubic")[0]
    return small.flatten(1)
