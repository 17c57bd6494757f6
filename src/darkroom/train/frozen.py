"""Frozen convolutions that keep no input for the backward pass.

Only the gradient of a convolution's weight needs its input; torch's own keeps it all the same, since one
operation computes the gradients of input, weight and bias. Of a frozen U-Net under a trained adapter that is
a third of what the residual blocks keep. Linear layers do without it by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenConv2d(nn.Conv2d):
    """A convolution that keeps its weight alone while that is not trained; the same numbers otherwise."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        if trained or not input.requires_grad or self.padding_mode != "zeros":
            kept: Tensor = super()._conv_forward(input, weight, bias)
            return kept
        given = (self.stride, self.padding, self.dilation, self.groups)
        made: Tensor = _WithoutInput.apply(input, weight, bias, given)  # type: ignore[no-untyped-call]
        return made


class _WithoutInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, given: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.given, ctx.size, ctx.stride = given, input.size(), input.stride()
        return F.conv2d(input, weight, bias, *given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.given
        # Its shape and layout are looked at, never its numbers.
        blank = grad.new_empty_strided(ctx.size, ctx.stride)
        made = torch.ops.aten.convolution_backward(
            grad, blank, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
        )
        return made[0], None, None, None


def forget_inputs(module: nn.Module) -> None:
    """Let the convolutions of a module whose weights are frozen keep no input, in place.

    Names, weights and results stay as they are. A convolution that is trained later is an ordinary one again.
    """
    for part in module.modules():
        plain = type(part) is nn.Conv2d and not isinstance(part.padding, str)
        if plain and not any(param.requires_grad for param in part.parameters()):
            part.__class__ = FrozenConv2d
