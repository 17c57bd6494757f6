"""Optimisers in their papers' formulas of which no step reads anything back from the device.

PyTorch lacks Lion and CAME. Its Adafactor reads two numbers a weight back at each step, and so does
prodigyopt's Prodigy: a card would idle 1,400 times a step of SD 1.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Groups = list[dict[str, Any]]
SQUARE_EPS, INSTABILITY_EPS = 1e-30, 1e-16  # CAME's paper's
LARGEST_UPDATE = 1.0


class _ByParameter(torch.optim.Optimizer):
    """Steps one parameter after the other."""

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, param.grad


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


class CAME(_ByParameter):
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


class Adafactor(_ByParameter):
    """Factored squares, and steps relative to a weight's size (Shazeer & Stern 2018, algorithm 4).

    Numbers and state are those of `torch.optim.Adafactor`. `eps` are the floor of the squares' mean, and the
    least size that a weight counts with.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-2,
        eps: tuple[float, float] = (1e-18, 1e-3),
        beta2_decay: float = -0.8,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "beta2_decay": beta2_decay, "weight_decay": weight_decay}
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every weight that has a gradient."""
        for group, param, grad in self._with_gradients():
            state, (floor, least) = self.state[param], group["eps"]
            if not state:
                state |= _adafactor_state(param)
            state["step"] = t = float(state["step"]) + 1  # PyTorch's own left a tensor in older checkpoints
            fresh, rate = t ** group["beta2_decay"], min(group["lr"], t**-0.5)
            size = _rms(param).clamp_(min=least).mul_(rate)
            if group["weight_decay"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])
            if param.ndim > 1:
                row, column = state["row_var"], state["col_var"]
                row.lerp_(_mean_square(grad, -1), fresh)
                column.lerp_(_mean_square(grad, -2), fresh)
                square = (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=floor))
            else:
                square = state["variance"].lerp_(grad.square(), fresh).clone()
            update = square.clamp_(min=floor * floor).rsqrt_().mul_(grad)
            param.addcmul_(update, size.div_((_rms(update) / LARGEST_UPDATE).clamp_(min=1.0)), value=-1.0)


def _adafactor_state(param: Tensor) -> dict[str, Any]:
    if param.ndim < 2:
        return {"step": 0.0, "variance": torch.zeros_like(param)}
    rows, columns = (*param.shape[:-1], 1), (*param.shape[:-2], 1, param.shape[-1])
    return {"step": 0.0, "row_var": param.new_zeros(rows), "col_var": param.new_zeros(columns)}


def _mean_square(tensor: Tensor, side: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=side, keepdim=True)
    return norm.square_().div_(tensor.shape[side])


class Prodigy(_ByParameter):
    """AdamW at a rate that is found from how far weights are from their start (Mishchenko & Defazio 2023).

    Numbers are those of prodigyopt's 1.1 with `decouple` and without a bound of growth. `lr` is a factor of
    the rate found, one for all groups; a group at 0 stands still. `safeguard_warmup` keeps a warm-up's small
    factors out of the estimate. The rate, `d`, stays on the device, in the first parameter's state.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
    ) -> None:
        numbers: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        numbers |= {"d0": d0, "d_coef": d_coef, "use_bias_correction": use_bias_correction}
        super().__init__(params, {**numbers, "safeguard_warmup": safeguard_warmup, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take the gradients in, find the rate, move."""
        first, lr = self.param_groups[0], max(group["lr"] for group in self.param_groups)
        moving = [(group, param, grad) for group, param, grad in self._with_gradients() if group["lr"] > 0]
        if not moving:
            return
        found = self._found(first["params"][0], first)
        (beta1, beta2), k = first["betas"], first["k"] + 1
        corrected = math.sqrt(1 - beta2**k) / (1 - beta1**k) if first["use_bias_correction"] else 1.0
        d = found["d"].clone()
        moved, size = self._taken_in(moving, d, lr * corrected)
        found["d_numerator"].mul_(math.sqrt(beta2)).add_(moved)
        found["d"].copy_(torch.maximum(d, first["d_coef"] * found["d_numerator"] / size).where(size > 0, d))
        rate = (d * (lr * corrected)).where(size > 0, 0.0)  # no gradient so far, no step
        for group, param, _ in moving:
            state = self.state[param]
            if group["weight_decay"]:
                param.addcmul_(param, rate, value=-group["weight_decay"])
            steepness = state["exp_avg_sq"].sqrt().add_(found["d"] * group["eps"])
            param.addcmul_(state["exp_avg"] / steepness, rate, value=-1.0)
        for group in self.param_groups:
            group["k"] = k

    def _found(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Where the rate is kept; of a checkpoint of prodigyopt's, whose groups have it, taken from there."""
        state: dict[str, Any] = self.state[param]
        for name, value in {"d": group["d0"], "d_numerator": 0.0}.items():
            if name not in state:
                state[name] = torch.full((), group.get(name, value), dtype=param.dtype, device=param.device)
        return state

    def _taken_in(
        self, moving: list[tuple[dict[str, Any], Tensor, Tensor]], d: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """Take gradients in; returns how far they pull back to the start, and how large the sums are."""
        moved, sizes = [], []
        for group, param, grad in moving:
            state, (beta1, beta2) = self.state[param], group["betas"]
            if "s" not in state:
                state |= {name: torch.zeros_like(param) for name in ("s", "exp_avg", "exp_avg_sq")}
                state["p0"] = param.detach().clone()
            elif state["s"].shape != param.shape:  # prodigyopt's are flat, and one zero stands for many
                state["s"] = state["s"].reshape(param.shape)
                state["p0"] = state["p0"].expand(param.numel()).reshape(param.shape)
            share = d / group["d0"]
            moved.append(share * d * factor * ((state["p0"] - param) * grad).sum())
            scaled = grad * d
            state["exp_avg"].mul_(beta1).add_(scaled, alpha=1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
            step = share * d * (1.0 if group["safeguard_warmup"] else factor)
            state["s"].mul_(math.sqrt(beta2)).addcmul_(grad, step)
            sizes.append(torch.linalg.vector_norm(state["s"], 1))
        return torch.stack(moved).sum(), torch.stack(sizes).sum()
