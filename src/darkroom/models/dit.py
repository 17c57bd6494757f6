"""`DiT`: a small diffusion transformer that is called as a diffusers U-Net is.

A patch of latents is a token (Peebles & Xie 2023). Text comes by cross-attention, and one map from the
timestep to shifts, scales and gates is shared by all blocks, each of which adds a table of its own
(adaLN-single, Chen et al. 2023, PixArt-alpha). Normalisation is by root mean square, of queries and keys too
(Esser et al. 2024), the feed-forward part is SwiGLU (Shazeer 2020), and positions are turned into queries and
keys in two dimensions (rotary, Su et al. 2021), so that any number of tokens of any aspect goes through.

Shapes: B rows, C H W latents, h w patches, N = h * w tokens, K tokens kept by routing, D width, E heads,
F numbers of a head, L text tokens, T text width, M numbers of the modulation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.models.parts import ConfigMixin, ModelMixin, Transformer2DModelOutput, register_to_config

TIME_NUMBERS = 256  # sines and cosines of a timestep
MOST_PERIOD = 10_000.0
GATES = 6  # shift, scale and gate, of attention and of the feed-forward part

Rotation = tuple[Tensor, Tensor]


class DiT(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Latents, timesteps and text states in; what the objective asks for out, of the latents' shape.

    Its configuration has the names that a U-Net's has where they mean the same. A picture spans `extent`
    positions a side on average, whatever its number of tokens is.
    """

    _supports_gradient_checkpointing = True
    _repeated_blocks = ("DiTBlock",)
    _no_split_modules = ("DiTBlock",)

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        sample_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        out_channels: int = 4,
        num_layers: int = 12,
        num_attention_heads: int = 12,
        attention_head_dim: int = 64,
        cross_attention_dim: int = 768,
        mlp_ratio: float = 8 / 3,
        rope_theta: float = 100.0,
        extent: float = 16.0,
        addition_embed_type: None = None,
        time_cond_proj_dim: None = None,
    ) -> None:
        super().__init__()
        if attention_head_dim % 4:
            raise ValueError(
                f"attention_head_dim {attention_head_dim} is no multiple of 4 (rows and columns)"
            )
        width = num_attention_heads * attention_head_dim
        self.patch_in = nn.Linear(in_channels * patch_size**2, width)
        self.time_in = _Mlp(TIME_NUMBERS, width)
        self.modulation = nn.Linear(width, GATES * width)
        self.text_in = _Mlp(cross_attention_dim, width)
        hidden = 8 * math.ceil(width * mlp_ratio / 8)
        self.blocks = nn.ModuleList(DiTBlock(width, num_attention_heads, hidden) for _ in range(num_layers))
        self.out_table = nn.Parameter(torch.zeros(2, width))
        self.patch_out = nn.Linear(width, out_channels * patch_size**2)
        self.gradient_checkpointing = False
        self._start()

    def _start(self) -> None:
        """Blocks begin as the identity and the output as zero (adaLN-Zero, Peebles & Xie 2023)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        blocks: list[Any] = list(self.blocks)
        for layer in (self.modulation, self.patch_out, *(block.attn2.to_out[0] for block in blocks)):
            nn.init.zeros_(layer.weight)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        timestep_cond: None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        return_dict: bool = True,
        keep_BK: Tensor | None = None,
        route: tuple[int, int] | None = None,
        tap: int | None = None,
    ) -> Any:
        """Predict for latents [B, C, H, W] at timesteps [B] (or one), given text states [B, L, T].

        In training, blocks from `route[0]` to before `route[1]` may see the tokens `keep_BK` alone: the rest
        pass them by and join again behind (TREAD, Krause et al. 2025). With `tap` the answer is followed by
        the tokens [B, N or K, D] that leave that block. A tuple unless `return_dict`.
        """
        side = self.config.patch_size
        if sample.shape[-2] % side or sample.shape[-1] % side:
            raise ValueError(f"latents of {tuple(sample.shape[-2:])}: sides must be multiples of {side}")
        rows, columns = sample.shape[-2] // side, sample.shape[-1] // side
        x_BND = self.patch_in(patches(sample, side))
        times_B = timestep.expand(len(sample)) if timestep.ndim else timestep.repeat(len(sample))
        time_BD = self.time_in(waves(times_B).to(x_BND.dtype))
        given = self.modulation(F.silu(time_BD)).unflatten(-1, (GATES, -1))
        text_BLD = self.text_in(encoder_hidden_states)
        turns = self._turns(rows, columns, sample.device)
        x_BND, tapped = self._through(x_BND, text_BLD, given, turns, keep_BK, route, tap)
        shift_BD, scale_BD = (self.out_table + time_BD[:, None]).unbind(1)
        x_BND = modulated(x_BND, shift_BD, scale_BD)
        out_BCHW = pictures(self.patch_out(x_BND), rows, columns, side)
        if return_dict:
            return Transformer2DModelOutput(sample=out_BCHW)
        return (out_BCHW,) if tap is None else (out_BCHW, tapped)

    def _through(
        self,
        x_BND: Tensor,
        text_BLD: Tensor,
        given: Tensor,
        turns: Rotation,
        keep_BK: Tensor | None,
        route: tuple[int, int] | None,
        tap: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens through all blocks, and those that left block `tap`."""
        first, last = (-1, -1) if keep_BK is None or route is None else route
        whole, all_turns, tapped = x_BND, turns, None
        for i, block in enumerate(self.blocks):
            if i == first and keep_BK is not None:
                whole, all_turns = x_BND, turns
                x_BND, turns = taken(whole, keep_BK), _turns_of(turns, keep_BK)
            if i == last and keep_BK is not None:
                x_BND, turns = put_back(whole, keep_BK, x_BND), all_turns
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x_BND = self._gradient_checkpointing_func(block, x_BND, text_BLD, given, turns)
            else:
                x_BND = block(x_BND, text_BLD, given, turns)
            if i == tap:
                tapped = x_BND
        if last == len(self.blocks) and keep_BK is not None:
            x_BND = put_back(whole, keep_BK, x_BND)
        return x_BND, tapped

    def _turns(self, rows: int, columns: int, device: torch.device) -> Rotation:
        """Cosine and sine [1, 1, N, F / 2] of each token's place, measured from the picture's centre.

        Tokens of a larger picture stand nearer to each other, so that a model goes on at a larger size with
        what it knows of composition.
        """
        config = self.config
        apart = config.extent / math.sqrt(rows * columns)
        numbers = config.attention_head_dim // 4
        speeds = config.rope_theta ** (-torch.arange(numbers, device=device, dtype=torch.float32) / numbers)
        down, across = (
            (torch.arange(n, device=device, dtype=torch.float32) - (n - 1) / 2) * apart
            for n in (rows, columns)
        )
        places_N2 = torch.cartesian_prod(down, across)
        angles = (places_N2[:, :, None] * speeds).flatten(1)[None, None]
        return angles.cos(), angles.sin()


class DiTBlock(nn.Module):
    """Self-attention, cross-attention to the text, and a feed-forward part."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(GATES, width))
        self.attn1 = _Attention(width, heads)
        self.norm2 = nn.RMSNorm(width, eps=1e-6)
        self.attn2 = _Attention(width, heads)
        self.ff = _SwiGlu(width, hidden)

    def forward(self, x_BND: Tensor, text_BLD: Tensor, given: Tensor, turns: Rotation) -> Tensor:
        """`given` are the timestep's six vectors [B, 6, D]; this block adds its own to them."""
        shift, scale, gate, shift_ff, scale_ff, gate_ff = (given + self.table).unbind(1)
        x_BND = x_BND + gate[:, None] * self.attn1(modulated(x_BND, shift, scale), None, turns)
        x_BND = x_BND + self.attn2(self.norm2(x_BND), text_BLD, None)
        out_BND: Tensor = x_BND + gate_ff[:, None] * self.ff(modulated(x_BND, shift_ff, scale_ff))
        return out_BND


class _Attention(nn.Module):
    """Attention of tokens to themselves or to text; queries and keys have length one before their scale."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])
        self.norm_q = nn.RMSNorm(width // heads, eps=1e-6)
        self.norm_k = nn.RMSNorm(width // heads, eps=1e-6)

    def forward(self, x_BND: Tensor, text_BLD: Tensor | None, turns: Rotation | None) -> Tensor:
        """Attention from [B, N, D] to the text [B, L, D], or to itself without one; returns [B, N, D]."""
        seen = x_BND if text_BLD is None else text_BLD
        q, k, v = (
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, source in ((self.to_q, x_BND), (self.to_k, seen), (self.to_v, seen))
        )
        q, k = self.norm_q(q), self.norm_k(k)
        if turns is not None:
            q, k = turned(q, turns), turned(k, turns)
        out_BEND = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.to_out[0](out_BEND.transpose(1, 2).flatten(2))
        return out


class _SwiGlu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class _Mlp(nn.Module):
    """Two layers from one width to another."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(given, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(F.silu(self.first(x)))
        return out


def patches(x_BCHW: Tensor, side: int) -> Tensor:
    """Latents as tokens [B, N, C * side * side], row by row."""
    B, C, H, W = x_BCHW.shape
    cut = x_BCHW.reshape(B, C, H // side, side, W // side, side).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(B, (H // side) * (W // side), C * side * side)


def pictures(x_BNP: Tensor, rows: int, columns: int, side: int) -> Tensor:
    """Tokens back to latents [B, C, H, W]: the inverse of `patches`."""
    x = x_BNP.reshape(len(x_BNP), rows, columns, -1, side, side).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(len(x_BNP), -1, rows * side, columns * side)


def waves(times_B: Tensor) -> Tensor:
    """Cosines and sines [B, 256] of timesteps, float32 (Vaswani et al. 2017)."""
    half = TIME_NUMBERS // 2
    steps = torch.arange(half, device=times_B.device, dtype=torch.float32)
    angles = times_B.float()[:, None] * torch.exp(steps * (-math.log(MOST_PERIOD) / half))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def modulated(x_BND: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Tensor:
    """Tokens divided by their root mean square, scaled and shifted row by row."""
    normal = F.rms_norm(x_BND, x_BND.shape[-1:], eps=1e-6)
    return torch.addcmul(shift_BD[:, None], normal, 1 + scale_BD[:, None])


def turned(x_BENF: Tensor, turns: Rotation) -> Tensor:
    """Queries or keys with each pair of numbers turned by its token's angle, in float32."""
    cos, sin = turns
    a, b = x_BENF.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x_BENF.dtype)


def _turns_of(turns: Rotation, keep_BK: Tensor) -> Rotation:
    """The angles of the tokens that are kept, row by row."""
    cos, sin = (turn[0, 0][keep_BK][:, None] for turn in turns)
    return cos, sin


def taken(x_BND: Tensor, keep_BK: Tensor) -> Tensor:
    """The tokens of these numbers [B, K, D]."""
    return x_BND.gather(1, keep_BK[..., None].expand(-1, -1, x_BND.shape[-1]))


def put_back(whole_BND: Tensor, keep_BK: Tensor, x_BKD: Tensor) -> Tensor:
    """All tokens, those of these numbers replaced."""
    return whole_BND.scatter(1, keep_BK[..., None].expand(-1, -1, whole_BND.shape[-1]), x_BKD)
