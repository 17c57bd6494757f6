"""kohya's ControlNet-LLLite: small networks in front of the U-Net's attention layers that see a picture.

Each steered layer has a network of its own. It encodes the picture once (`conditioning1`), and at every step
reads the layer's input next to that (`down`, `mid`) and adds to the input (`up`). Described by sd-scripts'
`docs/train_lllite_README.md`; published files steer queries, keys and values of self-attention and queries
of cross-attention. Here every row has its own picture and strength; a row without any has strength 0.

Shapes: B rows, L places of a level, I inputs of a layer, D channels that a layer's picture is encoded to, R
the networks' inner width, h w pixels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from darkroom.errors import ModelError
from darkroom.models.adapters.keys import layer_name
from darkroom.models.checked import FLOATS, check_complete

if TYPE_CHECKING:
    from darkroom.models.model import Model

LITE_PREFIX = "lllite_"
LITE, LITE_STRENGTH = "lite_picture", "lite_strength"
"""Names under which the U-Net gets encoded pictures [B, L, D...] of each resolution, and strengths [B]."""
STEERED = re.compile(r"(.+)\.(attn1\.to_[qkv]|attn2\.to_q)")
KINDS = "attn1.to_q, attn1.to_k, attn1.to_v, attn2.to_q"

Affine = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias."""


@dataclass(eq=False, repr=False)
class LiteLayer:
    """What stands in front of one layer."""

    encoder: list[Affine]
    """Convolutions whose stride is their kernel, a ReLU between them."""
    down: Affine
    mid: Affine
    up: Affine
    level: int = 0
    """Which of the encoded pictures it reads: those of its resolution."""
    start: int = 0
    """The first of its channels there."""

    @property
    def pixels(self) -> int:
        """Of the picture, along each side of a place."""
        product = 1
        for weight, _ in self.encoder:
            product *= weight.shape[-1]
        return product

    @property
    def channels(self) -> int:
        """That its picture is encoded to."""
        return int(self.encoder[-1][0].shape[0])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All its weights."""
        return [tensor for pair in (*self.encoder, self.down, self.mid, self.up) for tensor in pair]

    def moved(self, device: torch.device, dtype: torch.dtype) -> LiteLayer:
        """The same on a device and in a precision."""

        def to(pair: Affine) -> Affine:
            return pair[0].to(device, dtype), pair[1].to(device, dtype)

        down, mid, up = (to(pair) for pair in (self.down, self.mid, self.up))
        return LiteLayer([to(pair) for pair in self.encoder], down, mid, up, self.level, self.start)

    def encode(self, pixels_B3hw: torch.Tensor) -> torch.Tensor:
        """A picture of -1 to 1 at the layer's resolution, [B, L, D]."""
        x = pixels_B3hw
        for i, (weight, bias) in enumerate(self.encoder):
            x = F.conv2d(F.relu(x) if i else x, weight, bias, stride=weight.shape[-1])
        return x.flatten(2).transpose(1, 2)

    def change(self, x_BLI: torch.Tensor, levels: Sequence[torch.Tensor]) -> torch.Tensor:
        """What is added to the layer's input at strength 1; `levels` are the pictures by resolution."""
        picture_BLD = levels[self.level][..., self.start : self.start + self.channels]
        inner_BLR = F.relu(F.linear(x_BLI, *self.down))
        inner_BLR = F.relu(F.linear(torch.cat([picture_BLD, inner_BLR], dim=2), *self.mid))
        return F.linear(inner_BLR, *self.up)


@dataclass(eq=False, repr=False)
class ControlNetLite:
    """A ControlNet-LLLite that was read."""

    name: str
    layers: dict[str, LiteLayer]
    """By the path of the layer in the U-Net."""
    sha256: str

    kind: ClassVar[Literal["controlnet-lllite"]] = "controlnet-lllite"
    picture_channels = 3
    pools = False

    def __post_init__(self) -> None:
        starts = dict.fromkeys(sorted({layer.pixels for layer in self.layers.values()}), 0)
        order = list(starts)
        for layer in self.layers.values():
            layer.level, layer.start = order.index(layer.pixels), starts[layer.pixels]
            starts[layer.pixels] += layer.channels

    @property
    def size_unit(self) -> int:
        """What the sides of its picture must be multiples of, in pixels."""
        return max(layer.pixels for layer in self.layers.values())

    @property
    def weights(self) -> list[torch.Tensor]:
        """Of all its layers."""
        return [tensor for layer in self.layers.values() for tensor in layer.tensors]

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(weight.nbytes for weight in self.weights)

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """On a device and in a precision, in place."""
        self.layers = {path: layer.moved(device, dtype) for path, layer in self.layers.items()}

    def fit(self, model: Model) -> None:
        """ModelError unless its layers are those of this U-Net, in width and in pixels of a place."""
        model.needs_unet(f"{self.kind} '{self.name}'")
        unet: Any = model.unet
        known = dict(unet.named_modules())
        deepest = len(unet.config.block_out_channels) - 1
        for path, layer in self.layers.items():
            module = known.get(path)
            inputs, outputs = layer.down[0].shape[1], layer.up[0].shape[0]
            if module is None:
                raise self._foreign(model, f"it steers '{path}'", "the attention layers that it has")
            if not inputs == outputs == module.in_features:
                raise self._foreign(model, f"'{path}' of width {inputs}", f"{module.in_features}")
            pixels = model.vae_factor * 2 ** _level(path, deepest)
            if layer.pixels != pixels:
                raise self._foreign(model, f"'{path}' with {layer.pixels} pixels a place", f"{pixels}")

    def _foreign(self, model: Model, given: str, allowed: str) -> ModelError:
        return ModelError(
            f"{self.kind} '{self.name}' is for another model: {given}",
            allowed=f"{allowed}, as {model.family} has",
        )

    @torch.no_grad()
    def encode(self, pixels_B3hw: torch.Tensor) -> list[torch.Tensor]:
        """Pictures of 0 to 1 for all layers, one [B, L, D of its layers] a resolution, the finest first."""
        like = self.weights[0]
        pixels = pixels_B3hw.to(like.device, like.dtype) * 2 - 1
        found: dict[int, list[torch.Tensor]] = {}
        for layer in self.layers.values():
            found.setdefault(layer.level, []).append(layer.encode(pixels))
        return [torch.cat(found[level], dim=2) for level in sorted(found)]


def _level(path: str, deepest: int) -> int:
    """Of the U-Net's resolutions, the one that a layer works at; 0 is that of the latents."""
    block = re.match(r"(down|up)_blocks\.(\d+)", path)
    if block is None:
        return deepest
    return int(block[2]) if block[1] == "down" else deepest - int(block[2])


def is_lite(keys: Sequence[str]) -> bool:
    """Whether a file's tensors are a ControlNet-LLLite's."""
    return any(key.startswith(LITE_PREFIX) for key in keys)


def read_lite(
    path: Path, name: str, sha256: str, tensors: Mapping[str, torch.Tensor], types: Mapping[str, str]
) -> ControlNetLite:
    """From the tensors of a file; ModelError for layers that are not known or not whole."""
    check_complete(f"'{path}'", whole_numbers=[key for key, kind in types.items() if kind not in FLOATS])
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        stem, _, role = key.partition(".")
        # A copy, for the same reason as in `embeddings.read_embedding`.
        groups.setdefault(stem, {})[role] = tensor.to(torch.float32, copy=True)
    layers = {}
    for stem, parts in groups.items():
        found = layer_name(stem.replace(LITE_PREFIX, "lora_", 1)) if stem.startswith(LITE_PREFIX) else None
        place = "" if found is None else found.removeprefix("unet.")
        if not STEERED.fullmatch(place):
            raise ModelError(f"'{path}' steers '{stem[:100]}', which is not read", allowed=KINDS)
        layers[place] = _layer(path, stem, parts)
    return ControlNetLite(name, layers, sha256)


def _layer(path: Path, stem: str, parts: dict[str, torch.Tensor]) -> LiteLayer:
    """One layer's networks out of its tensors by role; ModelError where they do not fit one another."""
    count = max((int(n[1]) for role in parts if (n := re.match(r"conditioning1\.(\d)\.", role))), default=0)
    roles = [f"conditioning1.{i}" for i in range(0, count + 1, 2)] + ["down.0", "mid.0", "up.0"]
    wanted = {f"{role}.{what}" for role in roles for what in ("weight", "bias")}
    if wrong := wanted ^ parts.keys():
        what = "lacks" if min(wrong) in wanted else "has"
        raise ModelError(f"'{path}' is no ControlNet-LLLite that is known: it {what} '{stem}.{min(wrong)}'")
    *encoder, down, mid, up = [(parts[f"{role}.weight"], parts[f"{role}.bias"]) for role in roles]
    channels, fits = 3, True
    for weight, _ in encoder:
        fits &= weight.ndim == 4 and weight.shape[1] == channels and weight.shape[2] == weight.shape[3] > 0
        channels = weight.shape[0]
    linear = all(weight.ndim == 2 for weight, _ in (down, mid, up))
    fits &= linear and mid[0].shape[1] == channels + down[0].shape[0] and up[0].shape[1] == mid[0].shape[0]
    fits &= all(bias.shape == weight.shape[:1] for weight, bias in (*encoder, down, mid, up))
    if not fits:
        raise ModelError(f"'{path}' is no ControlNet-LLLite that is known: the shapes of '{stem}'")
    return LiteLayer(encoder, down, mid, up)
