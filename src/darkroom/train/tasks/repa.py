"""What makes a diffusion transformer learn with less work: tokens routed past its blocks, and alignment.

Routing: the middle blocks see a share of the tokens alone, and the rest join again behind them (TREAD, Krause
et al. 2025); where they join no block any more and have no loss, that is deferred masking (MicroDiT, Sehwag
et al. 2024). Alignment: what an early block makes of the noisy picture is drawn towards what a frozen network
sees in the clean one (REPA, Yu et al. 2025). Both are of training alone: sampling and held-out loss see every
token, and the model that is written is as one trained without.

Shapes: B rows, N = h * w tokens, K of them kept, D width, C H W latents, F numbers of a feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.errors import RecipeError
from darkroom.hardware.accelerator import new_tensor
from darkroom.models.dit import taken
from darkroom.models.model import Model
from darkroom.recipe.sections import AlignSettings, RoutingSettings

if TYPE_CHECKING:
    from darkroom.evaluate.extractors import Extractor


SEEN_PIXELS = 2**22  # at a time, by the extractor
GOLDEN, A, B = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's, as int64


class Projector(nn.Module):
    """Tokens to features, by two hidden layers; in training alone."""

    def __init__(self, width: int, hidden: int, features: int) -> None:
        super().__init__()
        widths = (width, hidden, hidden, features)
        linear = [nn.Linear(given, out) for given, out in pairwise(widths)]
        self.layers = nn.Sequential(linear[0], nn.SiLU(), linear[1], nn.SiLU(), linear[2])

    def forward(self, x_BND: Tensor) -> Tensor:
        """Hidden states [B, N, D] to features [B, N, F]."""
        out_BNF: Tensor = self.layers(x_BND)
        return out_BNF

    def enable_gradient_checkpointing(self) -> None:
        """Asked of every trained part; here is nothing worth computing twice."""


@dataclass(frozen=True)
class RoutingAndAlignment:
    """Routing and alignment of one transformer.

    `route` is the first routed block and the first behind them, `tap` the block that is aligned, from 0.
    """

    routing: RoutingSettings
    route: tuple[int, int]
    patch: int
    align: AlignSettings
    tap: int | None = None
    projector: Projector | None = None
    extractor: Extractor | None = None

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is trained besides the model."""
        return {} if self.projector is None else {"projector": self.projector}

    def features(self, pixels_B3HW: Tensor, tokens: tuple[int, int]) -> Tensor:
        """What the extractor sees of pictures (bytes) at each token [B, N, F]."""
        assert self.extractor is not None
        rows = max(1, SEEN_PIXELS // (pixels_B3HW.shape[-1] * pixels_B3HW.shape[-2]))
        with torch.no_grad():
            found = [seen(self.extractor, some, tokens) for some in torch.split(pixels_B3HW, rows)]
        return torch.cat(found)

    @property
    def routes(self) -> bool:
        """Whether some tokens pass blocks by."""
        return self.routing.keep < 1

    def keep(self, bits_B: Tensor | None, tokens: int) -> Tensor | None:
        """The tokens [B, K] that are kept of each row, rising; None where all are."""
        if not self.routes:
            return None
        assert bits_B is not None
        return kept_tokens(bits_B, tokens, max(1, round(self.routing.keep * tokens)))

    def arguments(self, keep_BK: Tensor | None) -> dict[str, Any]:
        """The transformer's further conditions."""
        routed = {} if keep_BK is None else {"keep_BK": keep_BK, "route": self.route}
        return routed if self.tap is None else {**routed, "tap": self.tap}

    def mask(self, keep_BK: Tensor | None, tokens: tuple[int, int]) -> Tensor | None:
        """Ones [B, 1, H, W] where a loss of the kept tokens alone counts; None where all count."""
        if keep_BK is None or self.routing.loss == "all":
            return None
        flat_BN = torch.zeros(len(keep_BK), tokens[0] * tokens[1], device=keep_BK.device)
        grid_B1hw = flat_BN.scatter(1, keep_BK, 1.0).view(-1, 1, *tokens)
        return grid_B1hw.repeat_interleave(self.patch, 2).repeat_interleave(self.patch, 3)

    def distance(self, tapped: Tensor, features_BNF: Tensor, keep_BK: Tensor | None) -> Tensor:
        """1 - cosine between a block's tokens and the features, mean of each row [B].

        The tokens are the kept ones where the block is a routed one.
        """
        assert self.projector is not None
        assert self.tap is not None
        inside = self.route[0] <= self.tap < self.route[1]
        if keep_BK is not None and inside:
            features_BNF = taken(features_BNF, keep_BK)
        out_BNF = self.projector(tapped)
        return 1 - F.cosine_similarity(out_BNF.float(), features_BNF.float(), dim=-1).mean(dim=1)


def draw_bits(u_B: Tensor) -> Tensor:
    """The bits of each row's draw, int64 [B]: accelerators that take no float64 take them."""
    return u_B.double().view(torch.int64)


def kept_tokens(bits_B: Tensor, tokens: int, count: int) -> Tensor:
    """`count` of so many tokens [B, K] by chance, rising: a pure function of each row's draw.

    The tokens with the smallest hashes of (the draw's bits, the token's number) are kept, so that neither
    batch nor rank nor the noise decides.
    """
    numbers_N = torch.arange(tokens, device=bits_B.device)
    hashes_BN = _mixed(_mixed(bits_B[:, None]) ^ numbers_N)
    return hashes_BN.topk(count, dim=1, largest=False).indices.sort(dim=1).values


def _mixed(h: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) on int64, which wraps."""
    h = h + GOLDEN
    h = (h ^ _right(h, 30)) * A
    h = (h ^ _right(h, 27)) * B
    return h ^ _right(h, 31)


def _right(h: Tensor, bits: int) -> Tensor:
    """Shifted as an unsigned number."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def seen(extractor: Extractor, pixels_B3HW: Tensor, tokens: tuple[int, int]) -> Tensor:
    """The features [B, N, F] of pictures (bytes) at a grid of tokens.

    Of the extractor's maps the deepest that is no coarser than the tokens, else the deepest.
    """
    assert extractor.maps is not None
    preprocess = extractor.preprocess
    sides = preprocess.crop or preprocess.size or (preprocess.shortest,) * 2
    x = pixels_B3HW.float() / 255
    if None not in sides and tuple(sides) != tuple(x.shape[-2:]):
        x = F.interpolate(x, size=sides, mode="bicubic", antialias=True).clamp(0, 1)  # type: ignore[arg-type]
    mean, std = (new_tensor(value, x.device).view(3, 1, 1) for value in (preprocess.mean, preprocess.std))
    maps = extractor.maps((x - mean) / std)
    fine = [m for m in maps if m.shape[-2] >= tokens[0] and m.shape[-1] >= tokens[1]]
    chosen = (fine or maps)[-1]
    if tuple(chosen.shape[-2:]) != tokens:
        chosen = F.interpolate(chosen, size=tokens, mode="bilinear", antialias=True)
    return chosen.flatten(2).transpose(1, 2)


def make_extras(
    routing: RoutingSettings,
    align: AlignSettings,
    model: Model,
    device: torch.device,
    *,
    side: int,
    seed: int,
) -> RoutingAndAlignment | None:
    """Routing and alignment as asked; None where neither is. RecipeError for a U-Net.

    Pictures have so many pixels a side; the seed is that of the layers that are added.
    """
    if routing.keep == 1 and align.extractor is None:
        return None
    asked = "routing" if routing.keep < 1 else "align"
    if not model.is_dit:
        raise RecipeError(
            f"train.{asked}",
            "given, but the model has a U-Net",
            allowed="diffusion transformers (dit, tiny-dit)",
        )
    config: Any = model.unet.config  # type: ignore[union-attr]
    depth = int(config.num_layers)
    route = (routing.before, depth - routing.after)
    if routing.keep < 1 and route[0] >= route[1]:
        raise RecipeError(
            "train.routing",
            f"before {routing.before} and after {routing.after} leave none of {depth} blocks",
            allowed=f"together at most {depth - 1}",
        )
    if align.extractor is None:
        return RoutingAndAlignment(routing, route, int(config.patch_size), align)
    block = -(-depth // 3) if align.block is None else align.block
    if block > depth:
        raise RecipeError("train.align.block", f"{block} of {depth} blocks", allowed=f"1 to {depth}")
    tokens = side // model.vae_factor // int(config.patch_size)
    extractor, width = _opened(align.extractor, side, tokens, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inner = int(config.num_attention_heads) * int(config.attention_head_dim)
        projector = Projector(inner, align.hidden, width).to(device)
    return RoutingAndAlignment(routing, route, int(config.patch_size), align, block - 1, projector, extractor)


def _opened(where: str, side: int, tokens: int, device: torch.device) -> tuple[Extractor, int]:
    """The frozen network, and the numbers of its features for so many tokens a side."""
    from darkroom.evaluate.extractors import open_extractor

    extractor = open_extractor(where, device=device)
    if extractor.maps is None:
        raise RecipeError("train.align.extractor", f"'{where}' ({extractor.kind}) has no feature maps")
    extractor.module.requires_grad_(False)
    blank = torch.zeros(1, 3, side, side, dtype=torch.uint8, device=device)
    with torch.no_grad():
        return extractor, seen(extractor, blank, (tokens, tokens)).shape[-1]
