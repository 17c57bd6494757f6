"""Frozen weights in 8 or 4 bits, and layers that compute with them.

A layer makes its weight in the precision of computation for the forward pass and again for the backward pass;
in between its bits alone are held. (torchao's tensors would keep the weight that was made until then, and
are of linear layers alone: half of SD 1.5's U-Net are convolutions.)
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.hardware.memory import drop_file_pages, file_mappings, give_back
from darkroom.models.tensor_file import is_mapped

BLOCKS = re.compile(r"(down_blocks|mid_block|up_blocks|blocks)\.")
LEAST_WEIGHTS = 1024  # a smaller layer is not worth it
BLOCK = 64  # weights of nf4 that share a scale, as in QLoRA's paper
LARGEST_FP8 = 448.0  # of float8_e4m3fn
LARGEST_INT8 = 127.0
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen values of QLoRA's 4-bit NormalFloat (Dettmers et al. 2023, appendix E)."""


def pack(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A weight as bytes and float32 scales, of fp8 and int8 one a row (output), of nf4 one for 64 weights."""
    values = weight.detach().float()
    values = values.reshape(-1, BLOCK) if kind == "nf4" else values.flatten(1)
    largest = values.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
    if kind == "nf4":
        levels = torch.tensor(NF4, device=weight.device)
        codes = torch.bucketize(values / largest, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        return codes[:, ::2] << 4 | codes[:, 1::2], largest
    if kind == "int8":
        scales = largest / LARGEST_INT8
        return (values / scales).round_().to(torch.int8).view(torch.uint8), scales
    scales = largest / LARGEST_FP8
    codes = (values / scales).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def unpack(
    codes: Tensor,
    scales: Tensor,
    kind: str,
    shape: torch.Size,
    dtype: torch.dtype,
    levels: Tensor | None = None,
) -> Tensor:
    """The weight of these bytes and scales; `levels` are nf4's values, if they are on the device."""
    if kind == "nf4":
        levels = torch.tensor(NF4, device=codes.device) if levels is None else levels
        both = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(1)
        values = levels[both.int()]
    elif kind == "int8":
        values = codes.view(torch.int8).float()
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    return (values * scales).to(dtype).view(shape)


class _Packed(nn.Module):
    """What the two layers share: `codes`; `scales` and `levels` as bits of int32, which no cast changes."""

    kind: str
    shape: torch.Size
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor
    levels: Tensor

    @property
    def num_weights(self) -> int:
        """Weights that are held as bits."""
        return math.prod(self.shape)

    @property
    def weight(self) -> Tensor:
        """The weight, made anew."""
        return self.made(self.dtype)

    def made(self, dtype: torch.dtype) -> Tensor:
        """The weight in a precision."""
        levels = self.levels.view(torch.float32) if self.kind == "nf4" else None
        return unpack(self.codes, self.scales.view(torch.float32), self.kind, self.shape, dtype, levels)


class PackedLinear(_Packed, nn.Linear):  # type: ignore[override]
    """A linear layer whose weight is bits."""

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = _Linear.apply(input, self.codes, self)  # type: ignore[no-untyped-call]
        return made


class PackedConv2d(_Packed, nn.Conv2d):  # type: ignore[override]
    """A convolution whose weight is bits. It keeps no input for the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = _Conv2d.apply(input, self.codes, self)  # type: ignore[no-untyped-call]
        return made

    @property
    def given(self) -> tuple[Any, ...]:
        """How it convolves, as PyTorch's functions take it."""
        return self.stride, self.padding, self.dilation, self.groups


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, codes: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(input, layer.made(input.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ ctx.layer.made(grad.dtype), None, None


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, codes: Tensor, layer: PackedConv2d) -> Tensor:
        ctx.layer, ctx.size, ctx.stride = layer, input.size(), input.stride()
        return F.conv2d(input, layer.made(input.dtype), layer.bias, *layer.given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input alone: packed weights are frozen."""
        layer: PackedConv2d = ctx.layer
        stride, padding, dilation, groups = layer.given
        # The input's shape and layout are looked at, never its numbers.
        blank = grad.new_empty_strided(ctx.size, ctx.stride)
        weight, wanted = layer.made(grad.dtype), [True, False, False]
        made = torch.ops.aten.convolution_backward(
            grad, blank, weight, None, stride, padding, dilation, False, [0, 0], groups, wanted
        )
        return made[0], None, None


_PACKED: dict[type[nn.Module], type[_Packed]] = {nn.Linear: PackedLinear, nn.Conv2d: PackedConv2d}


def pack_layers(module: nn.Module, kind: str) -> int:
    """Hold the frozen layers of a U-Net's blocks in 8 or 4 bits, in place; returns how many layers.

    Adapter layers, biases, norms, and what lies before and after the blocks stay as they are.
    """
    files, number = file_mappings(), 0
    for name, layer in module.named_modules():
        if not BLOCKS.match(name) or not _can_be_packed(layer, kind):
            continue
        weight: Tensor = layer._parameters.pop("weight")
        layer.__class__ = _PACKED[type(layer)]
        assert isinstance(layer, _Packed)
        layer.kind, layer.shape, layer.dtype = kind, weight.shape, weight.dtype
        codes, scales = pack(weight, kind)
        layer.register_buffer("codes", codes, persistent=False)
        layer.register_buffer("scales", scales.view(torch.int32), persistent=False)
        if kind == "nf4":
            levels = torch.tensor(NF4, device=weight.device)
            layer.register_buffer("levels", levels.view(torch.int32), persistent=False)
        if type(weight.data) is Tensor and is_mapped(weight, files):
            drop_file_pages(weight.data_ptr(), weight.nbytes)
        number += 1
    give_back()
    return number


def _can_be_packed(layer: nn.Module, kind: str) -> bool:
    if type(layer) not in _PACKED or any(param.requires_grad for param in layer.parameters(recurse=False)):
        return False
    if isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        return False
    weight = layer._parameters["weight"]
    assert weight is not None
    number = weight.numel()
    return number >= LEAST_WEIGHTS and (kind != "nf4" or number % BLOCK == 0)


def packed_weights(module: nn.Module) -> int:
    """Weights of a module that are held as bits, which are no parameters."""
    return sum(part.num_weights for part in module.modules() if isinstance(part, _Packed))
