"""Lion and CAME, which PyTorch lacks, in their papers' formulas.

A step reads nothing back from the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Groups = list[dict[str, Any]]
SQUARE_EPS, INSTABILITY_EPS = 1e-30, 1e-16  # the paper's
LARGEST_UPDATE = 1.0


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated mean of the gradients (Chen et al. 2023, algorithm 2).

    One number of state a weight. `betas` are those of the update and of the mean.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Decay, move by the sign, take the gradient into the mean."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            grads: list[Tensor] = [param.grad for param in params]
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            means = [self.state[param]["exp_avg"] for param in params]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            updates = torch._foreach_lerp(means, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(params, updates, alpha=-lr)
            torch._foreach_lerp_(means, grads, 1 - beta2)


class CAME(torch.optim.Optimizer):
    """Adafactor's factored squares with a mean that trusts steady updates more (Luo et al. 2023).

    `betas` are those of the mean, the squares and the instability. As in the authors' code matrices and
    kernels are factored along their last two sides, biases and norms are not.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every weight that has a gradient."""
        for group, param, grad in self._with_gradients():
            beta1, beta2, beta3 = group["betas"]
            state = self.state[param]
            if not state:
                state |= _new_state(param)
            square = grad.square().add_(SQUARE_EPS)
            if param.ndim > 1:
                update = _factored(state, "sq", square, beta2).mul_(grad)
            else:
                update = state["exp_avg_sq"].lerp_(square, 1 - beta2).rsqrt().mul_(grad)
            update.div_((_rms(update) / LARGEST_UPDATE).clamp_(min=1.0))
            mean = state["exp_avg"].lerp_(update, 1 - beta1)
            if param.ndim > 1:
                instability = (update - mean).square_().add_(INSTABILITY_EPS)
                mean = _factored(state, "res", instability, beta3).mul_(mean)
            if group["weight_decay"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(mean, alpha=-group["lr"])

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, param.grad


def _new_state(param: Tensor) -> dict[str, Tensor]:
    state = {"exp_avg": torch.zeros_like(param)}
    if param.ndim < 2:
        return state | {"exp_avg_sq": torch.zeros_like(param)}
    rows, columns = param.shape[:-1], (*param.shape[:-2], param.shape[-1])
    for name in ("sq", "res"):
        state[f"exp_avg_{name}_row"] = param.new_zeros(rows)
        state[f"exp_avg_{name}_col"] = param.new_zeros(columns)
    return state


def _factored(state: dict[str, Tensor], name: str, square: Tensor, beta: float) -> Tensor:
    """Take a square into its factored mean; returns one over the root of that mean."""
    row, column = state[f"exp_avg_{name}_row"], state[f"exp_avg_{name}_col"]
    row.lerp_(square.mean(dim=-1), 1 - beta)
    column.lerp_(square.mean(dim=-2), 1 - beta)
    scaled = (row / row.mean(dim=-1, keepdim=True)).rsqrt_()
    return scaled[..., None] * column[..., None, :].rsqrt()


def _rms(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm / math.sqrt(tensor.numel())
