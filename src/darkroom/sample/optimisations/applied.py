"""`Optimisation`, one by name; and `Applied`: a model with some in place, and how the torch backend gets it.

The model that was given is never changed. What an optimisation changes is a look-alike of the module: the
same structure anew, around the same weights. Letting go of it undoes everything, and a model used twice
keeps nothing of the first use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import nn

from darkroom.hardware.accelerator import capability
from darkroom.libraries import quiet
from darkroom.models.adapters.bank import take_rows
from darkroom.models.model import cast_opened
from darkroom.sample.denoise import Unet
from darkroom.sample.optimisations.vae import VaeFront
from darkroom.sample.pictures import decode, decode_pixels, encode, free_on_card

if TYPE_CHECKING:
    from darkroom.models.model import Model

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
        with quiet():
            for module in self.own_all().values():
                if self.model.in_files:
                    cast_opened(module, dtype)
                else:
                    module.to(dtype)

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
