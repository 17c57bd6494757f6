"""What an adapter is: what it does to each layer, the base model that it was trained on, and block weights.

A layer has a LoRA, LoHa, LoKr, a difference or a rotation; with DoRA's magnitudes.

Block weights say how much of an adapter each block of the U-Net takes, in the order that A1111's users write.
A list names the blocks from the text encoders on: BASE, IN00 ... , M00, OUT00 ... (26 for SD 1 and 2, 20 for
SDXL), or only those with attention (17 and 12), where the others take nothing. Layers of no block, such as
the time embedding's, take all.

Shapes: O outputs, I inputs of the layer, r the rank, kh kw the kernel of a convolution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from darkroom.errors import ModelError

if TYPE_CHECKING:
    from darkroom.models.model import Model


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """LoRA (Hu et al. 2021): `weight + scale * up @ down`, where scale is alpha / rank.

    `down` is [r, I] or [r, I, kh, kw], `up` [O, r] or [O, r, 1, 1]. `magnitude` makes it a DoRA (Liu et al.
    2024): one number for each output [O], or for each input [1, I] as LyCORIS trains it by default.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float = 1.0
    magnitude: torch.Tensor | None = None
    bias = None
    """LoRA leaves a layer's bias as it is."""

    @property
    def rank(self) -> int:
        """Columns of `up`."""
        return int(self.down.shape[0])

    @property
    def alpha(self) -> float:
        """What kohya's files write: scale times rank."""
        return self.scale * self.rank

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by role."""
        given = {"down": self.down, "up": self.up}
        return given if self.magnitude is None else {**given, "magnitude": self.magnitude}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight it was made for."""
        return (int(self.up.shape[0]), *(int(n) for n in self.down.shape[1:]))

    def to(self, device: torch.device) -> Layer:
        """The same on a device."""
        magnitude = None if self.magnitude is None else self.magnitude.to(device)
        return replace(self, down=self.down.to(device), up=self.up.to(device), magnitude=magnitude)

    def delta(self) -> torch.Tensor:
        """What is added to the weight, in float32 (a DoRA's before its magnitudes)."""
        up, down = self.up.float().flatten(1), self.down.float().flatten(1)
        return (up @ down * self.scale).reshape(self.shape)

    def change(self, weight: torch.Tensor) -> torch.Tensor:
        """The difference that the layer makes to a float32 weight."""
        delta = self.delta().reshape(weight.shape)
        return delta if self.magnitude is None else _decomposed(weight, delta, self.magnitude) - weight


def magnitude_side(magnitude: torch.Tensor, shape: Sequence[int]) -> int | None:
    """The side of a weight that DoRA's magnitudes are of: 0 outputs, 1 inputs; None for neither."""
    if magnitude.shape[0] == magnitude.numel() == shape[0]:
        return 0
    return 1 if magnitude.shape[0] == 1 and magnitude.numel() == shape[1] else None


def _decomposed(weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """DoRA: the new weight's directions, with the magnitudes that were learned for them."""
    whole = weight + delta
    if magnitude_side(magnitude, whole.shape) == 0:
        across = (-1, *[1] * (whole.ndim - 1))
        norm = whole.flatten(1).norm(dim=1)
    else:
        across = (1, -1, *[1] * (whole.ndim - 2))
        norm = whole.transpose(0, 1).flatten(1).norm(dim=1)
    ratio = (magnitude.float().flatten() / norm).reshape(across)
    return torch.mul(whole, ratio)


@dataclass(frozen=True, eq=False, repr=False)
class Factors:
    """What is no plain low rank, in LyCORIS' names.

    LoHa (a Hadamard product of two low ranks), LoKr (a Kronecker product), full (the whole difference, with
    the bias's), norm (a normalisation's, with its bias's), oft (a rotation of the outputs in blocks), boft
    (several such, of outputs in other orders), both perhaps with a factor for each output behind it, or ia3
    (a factor for each output, or with `on_input` for each input).
    """

    kind: str
    parts: Mapping[str, torch.Tensor]
    scale: float = 1.0
    magnitude: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """The inner dimension of the factors; 0 where all are whole."""
        return factors_rank(self.parts)

    @property
    def alpha(self) -> float:
        """Scale times rank."""
        return self.scale * max(1, self.rank)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by LyCORIS' names."""
        given = dict(self.parts)
        return given if self.magnitude is None else {**given, "magnitude": self.magnitude}

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of what is added, a kernel's sides kept or flattened; None where the parts do not fit.

        Of a rotation and of factors it is the number of outputs alone, or (0, inputs).
        """
        if self.kind == "ia3":
            count = self.parts["ia3"].numel()
            return (0, count) if self.on_input else (count,)
        if self.kind in ("oft", "boft"):
            return self._turned()
        if self.kind in ("full", "norm"):
            shape = tuple(self.parts["diff" if self.kind == "full" else "w_norm"].shape)
            known = (2, 4) if self.kind == "full" else (1,)
            whole = self.bias is None or tuple(self.bias.shape) == shape[:1]
            return shape if len(shape) in known and whole else None
        parts = {role.split("_", 1)[1]: tuple(tensor.shape) for role, tensor in self.parts.items()}
        one, two = (_low_rank_shape(parts, name) for name in ("w1", "w2"))
        if one is None or two is None or not math.prod(one) * math.prod(two):
            return None
        if self.kind == "loha":
            return one if one == two else None
        return None if len(one) != 2 else (one[0] * two[0], one[1] * two[1], *two[2:])

    def _turned(self) -> tuple[int, ...] | None:
        """How many outputs a rotation is of."""
        blocks, rescale = self.parts["oft_blocks"].shape, self.parts.get("rescale")
        if self.kind == "oft":
            fits, outputs = len(blocks) == 3 and blocks[1] == blocks[2], blocks[0] * blocks[1]
        else:
            halves = blocks[2] % 2 == 0 and blocks[1] % 2 ** (blocks[0] - 1) == 0
            fits, outputs = blocks[2] == blocks[3] and halves, blocks[1] * blocks[2]
        whole = rescale is None or rescale.shape[:1].numel() == rescale.numel() == outputs
        return (outputs,) if fits and whole else None

    @property
    def bias(self) -> torch.Tensor | None:
        """What is added to the layer's bias [O]."""
        return self.parts.get("diff_b", self.parts.get("b_norm"))

    def delta(self) -> torch.Tensor:
        """What is added to the weight, in float32; a rotation adds nothing that is the same for all."""
        if self.kind in ("full", "norm"):
            return self.parts["diff" if self.kind == "full" else "w_norm"].float()
        parts = {role.split("_", 1)[1]: tensor.float() for role, tensor in self.parts.items()}
        if self.kind == "loha":
            one = _low_rank(parts["w1_a"], parts["w1_b"], parts.get("t1"))
            return one * _low_rank(parts["w2_a"], parts["w2_b"], parts.get("t2")) * self.scale
        one = parts["w1"] if "w1" in parts else parts["w1_a"] @ parts["w1_b"]
        two = parts["w2"] if "w2" in parts else _low_rank(parts["w2_a"], parts["w2_b"], parts.get("t2"))
        one = one.reshape(*one.shape, *[1] * (two.ndim - one.ndim))
        return torch.kron(one, two.contiguous()) * self.scale  # kron takes views of both

    @property
    def on_input(self) -> bool:
        """Whether IA3's factors are of the inputs."""
        return "on_input" in self.parts and bool(self.parts["on_input"].flatten()[0])

    @property
    def gain(self) -> torch.Tensor | None:
        """How much is added of the layer's own outputs [O], where that is all that the layer does."""
        return self.parts["ia3"].float().flatten() if self.kind == "ia3" and not self.on_input else None

    def to(self, device: torch.device) -> Factors:
        """The same on a device."""
        magnitude = None if self.magnitude is None else self.magnitude.to(device)
        return replace(self, parts={k: t.to(device) for k, t in self.parts.items()}, magnitude=magnitude)

    def change(self, weight: torch.Tensor) -> torch.Tensor:
        """The difference that the layer makes to a float32 weight."""
        if self.kind in ("oft", "boft"):
            turned = (rotated if self.kind == "oft" else _butterfly)(self.parts["oft_blocks"], weight)
            if "rescale" in self.parts:
                turned = turned * self.parts["rescale"].float().reshape(-1, *[1] * (weight.ndim - 1))
            return turned - weight
        if self.kind == "ia3":
            across = (1, -1, *[1] * (weight.ndim - 2)) if self.on_input else (-1, *[1] * (weight.ndim - 1))
            return weight * self.parts["ia3"].float().reshape(across)
        delta = self.delta().reshape(weight.shape)
        return delta if self.magnitude is None else _decomposed(weight, delta, self.magnitude) - weight


def rotated(blocks: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight [O, ...] whose outputs are rotated in blocks [O / n, n, n].

    Cayley's map makes an orthogonal matrix of a skew one: R = (I + Q)(I - Q)^-1 (Qiu et al. 2023). Rows are
    turned by R's transpose, as LyCORIS and ComfyUI do it.
    """
    turn = _cayley(blocks)
    grouped = weight.reshape(blocks.shape[0], blocks.shape[1], -1)
    return torch.bmm(turn.transpose(1, 2), grouped).reshape(weight.shape)


def _cayley(blocks: torch.Tensor) -> torch.Tensor:
    skew = blocks.float() - blocks.float().transpose(-1, -2)
    one = torch.eye(blocks.shape[-1], device=blocks.device)
    # 1 minus a skew matrix has an inverse, whatever is in it: `inv` would wait for a card to say so.
    return torch.Tensor((one + skew) @ torch.linalg.inv_ex(one - skew).inverse)


def _butterfly(blocks: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight [O, ...] whose outputs are rotated by `blocks` [m, O / n, n, n] one after the other.

    Before the i-th rotation outputs that lie n / 2 * 2**i apart are brought together (BOFT: Liu et al. 2024),
    as LyCORIS does it.
    """
    outputs = weight.flatten(1)
    side = blocks.shape[2]
    for i, turn in enumerate(_cayley(blocks)):
        apart = 2**i * side // 2
        near = (
            outputs.reshape(-1, 2, apart, outputs.shape[1])
            .transpose(1, 2)
            .reshape(-1, side, weight[0].numel())
        )
        turned = torch.bmm(turn, near).reshape(-1, apart, 2, outputs.shape[1])
        outputs = turned.transpose(1, 2).reshape(outputs.shape)
    return outputs.reshape(weight.shape)


def _low_rank(a: torch.Tensor, b: torch.Tensor, core: torch.Tensor | None) -> torch.Tensor:
    """`a @ b`, or with a core of the kernel's size between them (Tucker)."""
    if core is None:
        return a @ b
    return torch.einsum("rs...,ro,si->oi...", core, a, b)


def _low_rank_shape(parts: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...] | None:
    """The shape of a factor, given whole, as `a @ b`, or with a core between; None where it has none."""
    if name in parts:
        return parts[name] if len(parts[name]) in (2, 4) else None
    a, b, core = parts[f"{name}_a"], parts[f"{name}_b"], parts.get(f"t{name[1]}")
    if len(a) != 2 or len(b) != 2:
        return None
    if core is None:
        return (a[0], b[1]) if a[1] == b[0] else None
    return (a[1], b[1], *core[2:]) if len(core) == 4 and core[:2] == (a[0], b[0]) else None


def factors_rank(parts: Mapping[str, torch.Tensor]) -> int:
    """The inner dimension of LoHa's or LoKr's factors; the side of a rotation's blocks."""
    if "oft_blocks" in parts:
        return int(parts["oft_blocks"].shape[-1])
    for name in ("hada_w1_b", "lokr_w1_b", "lokr_w2_b"):
        if name in parts:
            return int(parts[name].shape[0])
    return 0


def fold_middle(down: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    """LyCORIS' Tucker form (1x1 down, then the kernel) as one down of the kernel's size: the same map."""
    folded = torch.einsum("rshw,si->rihw", middle.float(), down.float().flatten(1))
    return folded.to(down.dtype) if down.dtype in (torch.float32, torch.float64) else folded


def scale_of(alpha: float, rank: int, *, rank_stabilised: bool = False) -> float:
    """alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023)."""
    return alpha / (math.sqrt(rank) if rank_stabilised else max(1, rank))


ARCHITECTURES = {
    "sd15": "stable-diffusion-v1",
    "sd2": "stable-diffusion-v2-512",
    "sd2-v": "stable-diffusion-v2-768-v",
    "sdxl": "stable-diffusion-xl-v1-base",
}
KOHYA_BASES = {"sd15": "sd_v1", "sd2": "sd_v2", "sd2-v": "sd_v2_v", "sdxl": "sdxl_base_v1-0"}
TEXT_WIDTHS = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
"""The width of the text that a U-Net listens to, which tells the families apart."""


def base_of(layers: Mapping[str, Layer | Factors], metadata: Mapping[str, str]) -> str | None:
    """The family an adapter looks made for: by its widths first, then by what its header says."""
    if any(name.startswith("unet.blocks.") for name in layers):
        return "dit"
    for name, layer in layers.items():
        if isinstance(layer, Layer) and name.endswith(("attn2.to_k", "attn2.to_v")):
            by_width = TEXT_WIDTHS.get(int(layer.down.shape[1]))
            return "sd2-v" if by_width == "sd2" and _named_family(metadata) == "sd2-v" else by_width
    if any(name.startswith("text_encoder_2.") for name in layers):
        return "sdxl"
    if (family := _named_family(metadata)) is not None:
        return family
    widths = {int(layer.down.shape[1]) for layer in layers.values() if isinstance(layer, Layer)}
    named = any(len(name.split(".")) > 2 for name in layers)
    return None if named or not widths else next((f for w, f in TEXT_WIDTHS.items() if w in widths), None)


def _named_family(metadata: Mapping[str, str]) -> str | None:
    """The family that a header names, in ModelSpec's words or in kohya's."""
    architecture = metadata.get("modelspec.architecture", "").partition("/")[0]
    version = metadata.get("ss_base_model_version", "")
    for family in ARCHITECTURES:
        if architecture == ARCHITECTURES[family] or (not architecture and version == KOHYA_BASES[family]):
            return family
    return None


@dataclass(frozen=True, eq=False, repr=False)
class Adapter:
    """What was learned on top of a model, by layer.

    `layers` are keyed by `unet.<module path>`, `text_encoder.<..>`, `text_encoder_2.<..>`; `text_model.` at
    the start of a text encoder's path may be there or not. `metadata` is the file's own; `kind` is lora,
    dora, loha or lokr, or several joined by '+'. `notes` tell what is in the file and not in the adapter.
    `sha256` is that of the file.
    """

    name: str
    layers: Mapping[str, Layer | Factors]
    metadata: Mapping[str, str] = field(default_factory=dict)
    kind: str = "lora"
    layout: str = ""
    sha256: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max((layer.rank for layer in self.layers.values()), default=0)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a model that it changes."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.layers))

    @property
    def num_parameters(self) -> int:
        """Numbers in all its tensors."""
        return sum(t.numel() for layer in self.layers.values() for t in layer.tensors.values())

    @property
    def base(self) -> str | None:
        """The family that it looks made for, by the width of the text that its layers listen to."""
        return base_of(self.layers, self.metadata)

    @property
    def numbered(self) -> bool:
        """Whether its layers are known by number only, as in the oldest files; `fit` finds which they are."""
        return any(name.rpartition(".")[2].isdigit() and name.count(".") == 1 for name in self.layers)


Blocks = tuple[float, ...]
"""Weights of blocks as a user gave them; () is 1 for all."""
BASE, MIDDLE = "BASE", "M00"
MAX_BLOCKS = 64
INSIDE = re.compile(r"unet\.(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.")


def names_of(model: Model) -> tuple[list[str], list[str]]:
    """The names of all blocks of a model, and of those with attention."""
    unet: Any = model.unet
    if not hasattr(unet, "down_blocks"):
        raise ModelError("block weights with a transformer", allowed="U-Nets")
    deep = _deep(model)
    attentive, everything = [BASE], [BASE]
    for kind, blocks in (("IN", unet.down_blocks), ("OUT", unet.up_blocks)):
        for i in range(len(blocks) * (1 + deep)):
            name = f"{kind}{i:02}"
            everything.append(name)
            level, at = divmod(i - 1 if kind == "IN" else i, 1 + deep)
            if i - (kind == "IN") >= 0 and at < len(getattr(blocks[level], "attentions", ())):
                attentive.append(name)
        if kind == "IN":
            everything.append(MIDDLE)
            attentive.append(MIDDLE)
    return everything, attentive


def _deep(model: Model) -> int:
    """Residual blocks of a level on the way down."""
    unet: Any = model.unet
    return len(unet.down_blocks[0].resnets)


def by_layer(model: Model, blocks: Sequence[float]) -> Callable[[str], float]:
    """How much a layer takes, by its path. ModelError for a number of weights that is not a list's."""
    if not blocks:
        return lambda path: 1.0
    lists = names_of(model)
    names = next((one for one in lists if len(one) == len(blocks)), None)
    if names is None:
        raise ModelError(
            f"{len(blocks)} block weights",
            allowed=" or ".join(f"{len(one)} ({', '.join(one)})" for one in lists[::-1]),
        )
    weights = dict.fromkeys(lists[0], 0.0) | dict(zip(names, blocks, strict=True))
    deep = _deep(model)
    return lambda path: weights.get(block_of(path, deep), 1.0)


def block_of(path: str, deep: int) -> str:
    """The block of a layer, where a level has so many residual blocks on the way down; '' for none."""
    if path.startswith("text_encoder"):
        return BASE
    if path.startswith("unet.mid_block."):
        return MIDDLE
    if path == "unet.conv_in":
        return "IN00"
    found = INSIDE.match(path)
    if found is None:
        return ""
    level = int(found[2]) * (1 + deep)
    at = deep if found[3].endswith("samplers") else int(found[4])
    return f"IN{1 + level + at:02}" if found[1] == "down" else f"OUT{level + at:02}"


# ---- as the bank holds it

MAX_WEIGHT = 100.0


@dataclass(frozen=True, eq=False, repr=False)
class Change:
    """What an adapter does to a layer, cast and on the device."""

    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None
    """down [r, I] and up [r, O] with its scale"""
    gain: torch.Tensor | None = None
    """[O], of the layer's own output without its bias"""
    delta: torch.Tensor | None = None
    """Added to the weight, in its shape"""
    bias: torch.Tensor | None = None
    """Added to the bias [O], where there is a delta"""

    @classmethod
    def of(cls, layer: Layer | Factors, weight: torch.Tensor, factor: float, place: torch.device) -> Change:
        """The smallest form of a fitted layer's change of a weight, times a factor, in float32.

        `place` is where what needs the weight is computed.
        """
        if isinstance(layer, Layer):
            up_rO, down_rI = (layer.up.float() * layer.scale).flatten(1).T, layer.down.float().flatten(1)
            if layer.magnitude is None:
                return cls((down_rI, factor * up_rO))
            if magnitude_side(layer.magnitude, layer.shape) == 0:
                whole = weight.to(place, torch.float32) + layer.delta().reshape(weight.shape).to(place)
                ratio = layer.magnitude.float().flatten().to(place) / whole.flatten(1).norm(dim=1)
                return cls((down_rI, factor * up_rO.to(place) * ratio), factor * (ratio - 1))
        elif (gain := layer.gain) is not None:
            return cls(gain=factor * gain)
        delta = factor * layer.to(place).change(weight.to(place, torch.float32))
        return cls(delta=delta, bias=None if layer.bias is None else factor * layer.bias.float())

    def cast(self, place: torch.device, dtype: torch.dtype) -> Change:
        """In a weight's type, where its layer computes, in memory of its own.

        Where nothing is cast `down` would be the file's own, mapped: it could not be replaced on Windows, and
        written over elsewhere it ends the process.
        """

        def moved(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
            return tensor.to(place, dtype, copy=copy).contiguous()

        return Change(
            None if self.low_rank is None else (moved(self.low_rank[0], copy=True), moved(self.low_rank[1])),
            None if self.gain is None else moved(self.gain),
            None if self.delta is None else moved(self.delta),
            None if self.bias is None else moved(self.bias),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All there are."""
        return [one for one in (*(self.low_rank or ()), self.gain, self.delta, self.bias) if one is not None]


def low_rank_of(adapter: Adapter) -> int:
    """The largest rank of what is added as a product of two matrices; 0 where nothing is."""
    return max((layer.rank for layer in adapter.layers.values() if isinstance(layer, Layer)), default=0)


def check_weight(weight: float, name: str = "an adapter") -> float:
    """A weight that is a number within reason, else a ModelError."""
    if not abs(weight) <= MAX_WEIGHT:  # also NaN
        raise ModelError(f"weight {weight} of {name}", allowed=f"-{MAX_WEIGHT:g} to {MAX_WEIGHT:g}")
    return weight
