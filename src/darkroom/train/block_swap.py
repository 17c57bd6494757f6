"""The last blocks of a frozen U-Net or transformer rest in main memory and come to the device ahead of use.

`train.blocks_to_swap` says how many. A resting layer is one whose weight is made anew for each pass (see
`memory`): when its forward or backward pass asks for it, its whole block is brought to the device and the
block after it, in the way the pass goes, begins to be copied. Two resting blocks are on the device at a time:
the one at work and the next. A pass turns at the last block and comes back, so neither is copied twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from darkroom.errors import RecipeError
from darkroom.hardware import accelerator
from darkroom.hardware.copy_ahead import CopyAhead, Tensors
from darkroom.models.compiling import blocks_in_order
from darkroom.train.memory import Conv2dMadeAnew, LinearMadeAnew, MadeAnew, Packed, can_be_made_anew


class Resting(MadeAnew):
    """A layer whose weight is in main memory, as its parameter."""

    kept_as = "weight"

    @property
    def weight(self) -> Tensor:
        """The weight on the device."""
        return self.present()

    def made(self, dtype: torch.dtype) -> Tensor:
        return self.present().to(dtype)


class RestingLinear(Resting, LinearMadeAnew):  # type: ignore[override]
    """A linear layer whose weight rests."""


class RestingConv2d(Resting, Conv2dMadeAnew):  # type: ignore[override]
    """A convolution whose weight rests."""


_RESTING: dict[type[nn.Module], type[Resting]] = {nn.Linear: RestingLinear, nn.Conv2d: RestingConv2d}
SWAP = "_block_swap"
"""Where a U-Net keeps its `BlockSwap`."""


class BlockSwap:
    """Blocks, each the layers that rest, in the order of a forward pass; one thread at a time asks."""

    def __init__(self, blocks: Sequence[Sequence[MadeAnew]], device: torch.device) -> None:
        self.blocks = blocks
        self._of = {layer: i for i, layers in enumerate(blocks) for layer in layers}
        self._copies = CopyAhead(device)
        self._at = 0
        self._here: Tensors = {}
        """What is on the device of the block at work, by where it rests."""

    @property
    def resting(self) -> list[Tensor]:
        """The tensors in main memory."""
        return [home for i in range(len(self.blocks)) for home in self._homes(i)]

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of each block that rest."""
        return [sum(home.nbytes for home in self._homes(i)) for i in range(len(self.blocks))]

    @property
    def saved_bytes(self) -> int:
        """Bytes that the device need not hold: all but those of the two blocks that are there."""
        sizes = self.block_bytes
        return sum(sizes) - max(one + other for one, other in pairwise(sizes))

    @property
    def copied_bytes(self) -> int:
        """Bytes that a forward and a backward pass copy: each block twice, the ends, where it turns, once."""
        sizes = self.block_bytes
        return 2 * sum(sizes) - sizes[0] - sizes[-1]

    def bring(self, layer: nn.Module) -> Tensor:
        """A resting layer's tensor on the device, and the next block's on their way."""
        assert isinstance(layer, MadeAnew)
        home = layer.table[layer.kept_as]
        if home not in self._here:
            i = self._of[layer]
            following = self._following(i)
            self._here = {}  # the block before goes first, then the one after comes
            self._here = self._copies.arrive(self._homes(i)[0], self._waiting(i))
            self._copies.send(self._homes(following)[0], self._waiting(following))
            self._at = i
        return self._here[home]

    def pin(self) -> None:
        """Let the device read what rests by itself. Call it when layouts and types are as they stay."""
        self._here = {}
        for layer in self._of:
            home = layer.table[layer.kept_as]
            pinned = accelerator.pinned(home, self._copies.device)
            if pinned is not home:
                layer.table[layer.kept_as] = _still(pinned) if isinstance(home, nn.Parameter) else pinned

    def _following(self, i: int) -> int:
        """The block after block i the way that the pass goes, which turns at both ends."""
        step = -1 if i < self._at else 1
        return i + step if 0 <= i + step < len(self.blocks) else i - step

    def _homes(self, i: int) -> list[Tensor]:
        return [layer.table[layer.kept_as] for layer in self.blocks[i]]

    def _waiting(self, i: int) -> Tensors:
        return {home: home for home in self._homes(i)}


def swap_blocks(unet: nn.Module, number: int, device: torch.device) -> None:
    """Let the frozen weights of a U-Net's last blocks rest in main memory and move all else to the device.

    RecipeError where it has fewer blocks.
    """
    blocks = blocks_in_order(unet)
    if number > len(blocks):
        raise RecipeError(
            "train.blocks_to_swap", f"{number}, but the model has {len(blocks)} blocks", allowed="as many"
        )
    chosen = [[layer for layer in block.modules() if _can_rest(layer)] for block in blocks[-number:]]
    layers = [[_rest(layer) for layer in some] for some in chosen]
    swap = BlockSwap(layers, device)
    for some in layers:
        for layer in some:
            layer.bring = swap.bring
    setattr(unet, SWAP, swap)
    homes = [(layer, layer.table[layer.kept_as]) for some in layers for layer in some]
    for layer, _ in homes:
        layer.table[layer.kept_as] = None  # which no move sees
    nn.Module.to(unet, device)
    for layer, home in homes:
        at_home = home.detach().to("cpu")
        layer.table[layer.kept_as] = _still(at_home) if isinstance(home, nn.Parameter) else at_home


def swap_of(module: nn.Module) -> BlockSwap | None:
    """What `swap_blocks` made of a module; None where it was not called."""
    found: BlockSwap | None = getattr(module, SWAP, None)
    return found


def swap_notes(number: int, device: torch.device) -> list[str]:
    """A note where blocks are to rest, but main memory is the device's own."""
    if not number or accelerator.kind_of(device).own_memory:
        return []
    return [f"train.blocks_to_swap saves nothing on {device.type}, which has no memory of its own"]


def _can_rest(layer: nn.Module) -> bool:
    return isinstance(layer, Packed) or can_be_made_anew(layer)


def _rest(layer: nn.Module) -> MadeAnew:
    """The layer as one whose weight rests; one of bits already makes it anew."""
    if not isinstance(layer, MadeAnew):
        layer.__class__ = _RESTING[type(layer)]
    assert isinstance(layer, MadeAnew)
    return layer


def _still(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
