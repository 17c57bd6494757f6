"""`Optimisation`, one by name; and `Applied`: a model with some in place, and how the torch backend gets it.

The model that was given is never changed. What an optimisation changes is a look-alike of the module: the
same structure anew, around the same weights. Letting go of it undoes everything, and a model used twice
keeps nothing of the first use.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import nn

from darkroom.hardware.accelerator import capability, used_here
from darkroom.models.adapters.bank import take_rows
from darkroom.models.model import cast_opened
from darkroom.sample.denoise import Unet
from darkroom.sample.pictures import check_wanted, decode, decode_pixels, encode, free_on_card

if TYPE_CHECKING:
    from darkroom.models.model import Model


# ---- what was made of a model

Wrap = Callable[[Unet], Unet]
CallOf = Callable[[Any], Unet]
"""Makes the loop's call of a U-Net, or of what is called like one: `unet_call` of the torch backend."""


@dataclass(frozen=True)
class Choice:
    """A name as it was asked for, with what stood behind its colon."""

    name: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


@dataclass(repr=False)
class Applied:
    """What optimisations made of a model. Optimisations fill it in; the torch backend takes it from here."""

    model: Model
    """Starts as the given model; holds look-alikes of the modules that were changed."""
    device: torch.device
    """Where the work is done; with offloading, not where the weights lie."""
    choices: tuple[Choice, ...] = ()
    dtype: torch.dtype | None = None
    """What is computed in, where that is not the weights' own type."""
    notes: list[str] = field(default_factory=list)
    """What it costs the pictures: for a user and for the pictures' parameters."""
    reasons: list[str] = field(default_factory=list)
    """Why `auto` chose what it did."""
    callee: Any = None
    """What stands for the U-Net where it is called, compiled for example; None is the U-Net itself."""
    inner: list[Wrap] = field(default_factory=list)
    """Around each call of the U-Net."""
    outer: Callable[[Applied, CallOf], Unet] | None = None
    """Makes the whole call instead: captured, traced, or with features kept between steps."""
    max_decode_pixels: int | None = None
    """At a time; None: by the device's free memory."""
    tile_pixels: int | None = None
    tiny_vae: Any = None
    guidance_interval: tuple[float, float] | None = None
    """Noise levels between which guidance is on: above the first, up to the second."""
    rows_a_call: int | None = None
    """U-Net rows at most in one call; the rest follow in further calls."""
    times_s: dict[str, float] = field(default_factory=dict)
    _own: set[str] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        """The optimisations in place, as they can be asked for again."""
        return tuple(map(str, self.choices))

    def own(self, part: str) -> Any:
        """The `unet` or `vae` to change: a look-alike, made at the first request."""
        if part not in self._own:
            self.model = replace(self.model, **{part: look_alike(getattr(self.model, part))})
            self._own.add(part)
        return getattr(self.model, part)

    def own_text_encoders(self) -> list[nn.Module]:
        """The text encoders to change."""
        if "text_encoders" not in self._own:
            self.model = replace(self.model, text_encoders=[look_alike(m) for m in self.model.text_encoders])
            self._own.add("text_encoders")
        return self.model.text_encoders

    def own_all(self) -> dict[str, nn.Module]:
        """Every part with weights, to change, by its folder's name."""
        for part in ("unet", "vae"):
            self.own(part)
        self.own_text_encoders()
        return self.model.modules

    def cast(self, dtype: torch.dtype) -> None:
        """Weights in another type: copies of those that are not in it yet, or cast as they are needed."""
        if any(choice.name == "offload_mmap" for choice in self.choices):
            self.dtype = dtype
            return
        if all(p.dtype == dtype for m in self.model.modules.values() for p in m.parameters()):
            return
        for module in self.own_all().values():
            if self.model.in_files:
                cast_opened(module, dtype)
            else:
                nn.Module.to(module, dtype)

    def unet(self, call_of: CallOf) -> Unet:
        """The U-Net as the denoising loop calls it, with everything around it."""
        return self.outer(self, call_of) if self.outer else self.plain(call_of)

    def plain(self, call_of: CallOf, callee: Any = None) -> Unet:
        """One call of the U-Net or of what is called like it, with what stands around each call."""
        called = (callee, self.callee, self.model.unet)
        call = call_of(next(one for one in called if one is not None))
        for wrap in self.inner:
            call = wrap(call)
        return call if self.rows_a_call is None else _in_parts(call, self.rows_a_call)

    def decode(self, latents_BCHW: torch.Tensor) -> list[Image.Image]:
        """Latents to pictures, sliced, tiled or by the tiny decoder as chosen."""
        front = self.tiny_vae or VaeFront(self.model.vae, self.device, self.tile_pixels)
        return decode(front, latents_BCHW, max_pixels=self._decode_pixels())

    def _decode_pixels(self) -> int:
        return self.max_decode_pixels or decode_pixels(free_on_card(self.device))

    def encode(self, pixels_B3HW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels of -1 to 1 to the latents' mean and standard deviation, sliced and tiled as chosen."""
        front = VaeFront(self.model.vae, self.device, self.tile_pixels)
        rows = max(1, self._decode_pixels() // (pixels_B3HW.shape[-2] * pixels_B3HW.shape[-1]))
        means, stds = zip(*(encode(front, some) for some in torch.split(pixels_B3HW, rows)), strict=True)
        return torch.cat(means), torch.cat(stds)


def look_alike(module: Any) -> Any:
    """The same structure anew around the same weights: no memory is taken, and what is done to one (another
    processor, type, place) is not seen by the other. Values written in place are seen by both.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for tensor in table.values():
                if tensor is not None:
                    memo[id(tensor)] = _same_values(tensor)
        memo |= {id(held): held for held in vars(part).values() if _belongs_to_a_bank(held)}
    return copy.deepcopy(module, memo)


def _belongs_to_a_bank(held: object) -> bool:
    """An adapter bank goes on serving the look-alike: its slots and what it tells its layers are shared."""
    return isinstance(held, torch.Tensor) or type(held).__module__ == "darkroom.models.adapters.bank"


def _same_values(tensor: torch.Tensor) -> torch.Tensor:
    shared = tensor.detach()
    return nn.Parameter(shared, requires_grad=False) if isinstance(tensor, nn.Parameter) else shared


def _in_parts(call: Unet, rows: int) -> Unet:
    """A U-Net that takes at most so many rows at a time: less memory, the same numbers."""

    def split(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The call in parts of at most `rows` rows; the outputs are joined."""
        parts = []
        for start in range(0, len(x), rows):
            some = slice(start, start + rows)
            more = take_rows(added, some, range(len(x))[some])
            parts.append(call(x[some], t[some], text[some], more))
        return torch.cat(parts)

    return split


LOSSLESS, STATED, LOSSY, OTHER = "lossless", "stated", "lossy", "another model"
KINDS = {
    LOSSLESS: "the same picture but for rounding: within 2/255 in float32",
    STATED: "the same picture but for the rounding of a shorter number",
    LOSSY: "another picture of the same; the benches say how far off",
    OTHER: "another model's picture",
}


@dataclass(frozen=True)
class ComputeTarget:
    """What an optimisation is asked to work on."""

    device: torch.device
    dtype: torch.dtype
    """Of the U-Net's weights as they were given."""
    is_dit: bool = False
    """Whether a diffusion transformer stands in the U-Net's place."""

    @property
    def on_cuda(self) -> bool:
        """Whether it is a CUDA or ROCm card."""
        return self.device.type == "cuda"

    @property
    def capability(self) -> tuple[int, int]:
        """Of the NVIDIA card: (8, 0) is Ampere, (8, 9) Ada, (9, 0) Hopper; (0, 0) elsewhere."""
        return capability(self.device)


@dataclass(frozen=True)
class Optimisation:
    """One optimisation: what it is, where it works, what excludes it, and how it is put in place."""

    name: str
    kind: str
    says: str
    """What it does, in a few words."""
    apply: Callable[[Applied, str], None]
    """Puts it in place; the text is what stood behind the colon. InputError for a wrong one."""
    lacks: Callable[[ComputeTarget], str | None] = lambda place: None
    """Why it cannot work there; None where it can."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """What it excludes, and why. One side of a pair is enough."""
    argument: str = ""
    """How its argument is written; empty where it takes none."""
    needs_unet: bool = False
    """Whether it is of a U-Net's own parts, which a diffusion transformer does not have."""


def needs_cuda(what: str) -> Callable[[ComputeTarget], str | None]:
    """For optimisations that only a CUDA (or ROCm) device can do."""
    return lambda place: None if place.on_cuda else f"{what}; this is {place.device.type}"


# ---- the VAE
#
# The VAE in less memory: in tiles that overlap and blend, on another device than its weights, or a tiny one.
#
# Shapes: B pictures, C channels, H W rows and columns of what goes in.

TILE_PIXELS = 512
OVERLAP = 0.25
"""Share of a tile's side that it has in common with its neighbour, at least."""


class VaeFront:
    """A VAE as `pictures.decode` and `encode` call it, on `device`, in tiles where they are asked for.

    `tile_pixels` is the side of a tile in pixels of the picture; nothing larger goes through the VAE at once.
    """

    def __init__(self, vae: Any, device: torch.device, tile_pixels: int | None = None) -> None:
        self._vae, self._device = vae, device
        self.config = vae.config
        self._factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self._tile = None if tile_pixels is None else max(2, tile_pixels // self._factor)

    def parameters(self) -> Iterator[torch.Tensor]:
        """One tensor that says where and in which type latents are wanted."""
        yield torch.empty(0, device=self._device, dtype=next(self._vae.parameters()).dtype)

    def to(self, dtype: torch.dtype) -> None:
        """Another type for the weights. Those in the old one are freed here, perhaps by another thread's
        stream than they were made on, before they have been read."""
        used_here(*self._vae.parameters())
        nn.Module.to(self._vae, dtype)  # diffusers' own `to` warns of nothing

    def decode(self, latents_BCHW: torch.Tensor) -> Any:
        """Pixels of -1 to 1, under `sample`."""
        if not self._needs_tiles(latents_BCHW, self._tile):
            return self._vae.decode(latents_BCHW)
        assert self._tile is not None
        pixels = in_tiles(lambda z: self._vae.decode(z).sample, latents_BCHW, self._tile, up=self._factor)
        return SimpleNamespace(sample=pixels)

    def encode(self, pixels_B3HW: torch.Tensor) -> Any:
        """The latents' distribution, under `latent_dist`."""
        from darkroom.models.parts import DiagonalGaussianDistribution

        tile = None if self._tile is None else self._tile * self._factor
        if not self._needs_tiles(pixels_B3HW, tile):
            return self._vae.encode(pixels_B3HW)
        assert tile is not None
        moments = in_tiles(
            lambda x: self._vae.encode(x).latent_dist.parameters, pixels_B3HW, tile, down=self._factor
        )
        return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(moments))

    @staticmethod
    def _needs_tiles(x_BCHW: torch.Tensor, tile: int | None) -> bool:
        return tile is not None and max(x_BCHW.shape[-2:]) > tile


def in_tiles(
    run: Callable[[torch.Tensor], torch.Tensor],
    x_BCHW: torch.Tensor,
    tile: int,
    *,
    up: int = 1,
    down: int = 1,
    overlap: float = OVERLAP,
) -> torch.Tensor:
    """Run something that scales sides by up / down over square tiles, and blend them where they overlap.

    All tiles are whole: the last ends at the border, so that none is a sliver. The weight of a tile falls
    linearly to its inner borders. Memory is that of one tile, and the result in float32.
    """
    rows, columns = (_starts(side, tile, overlap, down) for side in x_BCHW.shape[-2:])
    height, width = (min(tile, side) for side in x_BCHW.shape[-2:])
    out: torch.Tensor | None = None
    weights = [
        _weights([_scaled(s, up, down) for s in starts], _scaled(span, up, down), x_BCHW.device)
        for starts, span in ((rows, height), (columns, width))
    ]
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            check_wanted()
            done = run(x_BCHW[..., top : top + height, left : left + width])
            if out is None:
                size = [_scaled(side, up, down) for side in x_BCHW.shape[-2:]]
                out = torch.zeros((*done.shape[:2], *size), device=done.device, dtype=torch.float32)
            y, x = _scaled(top, up, down), _scaled(left, up, down)
            place = out[..., y : y + done.shape[-2], x : x + done.shape[-1]]
            place.addcmul_(done.float(), weights[0][i][:, None] * weights[1][j])
            del done
    assert out is not None
    return out


def _scaled(length: int, up: int, down: int) -> int:
    return length * up // down


def _starts(side: int, tile: int, overlap: float, unit: int) -> list[int]:
    """Where tiles begin: evenly, the first at 0, the last to end at the border, on multiples of `unit`."""
    if side <= tile:
        return [0]
    count = math.ceil((side - overlap * tile) / (tile - overlap * tile))
    return [round(i * (side - tile) / (count - 1) / unit) * unit for i in range(count)]


def _weights(starts: list[int], span: int, device: torch.device) -> list[torch.Tensor]:
    """Of each tile along one side: 1, falling to a neighbour over what they share; together 1 everywhere."""
    total = torch.zeros(starts[-1] + span, device=device)
    weights = []
    for i, start in enumerate(starts):
        weight = torch.ones(span, device=device)
        if i > 0 and (shared := starts[i - 1] + span - start) > 0:
            weight[:shared] *= _ramp(shared, device)
        if i + 1 < len(starts) and (shared := start + span - starts[i + 1]) > 0:
            weight[span - shared :] *= _ramp(shared, device).flip(0)
        weights.append(weight)
        total[start : start + span] += weight
    return [weight / total[start : start + span] for start, weight in zip(starts, weights, strict=True)]


def _ramp(length: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(length, device=device) + 0.5) / length
