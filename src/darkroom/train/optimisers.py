"""AdamW, its learning rate over the steps, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class OptimSettings(BaseModel):
    """The optimiser and its learning rate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["adamw"] = Field(default="adamw", description="AdamW (Loshchilov & Hutter 2019), fused")
    lr: float = Field(default=1e-4, gt=0, le=10, description="peak learning rate")
    text_encoder_lr: float | None = Field(
        default=None, gt=0, le=10, description="peak rate of the text encoder where it is trained; null: lr"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate rises from 0 to lr")
    decay: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="the rate after warm-up, until train.steps"
    )
    final_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="the last step's rate as a share of lr (cosine and linear)"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of the gradients")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean of their squares")
    eps: float = Field(default=1e-8, gt=0, description="keeps the division finite")
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        description="decoupled weight decay of matrices and kernels (not biases and norms)",
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest norm of all gradients together; null: no clipping"
    )


def lr_factor(k: int, steps: int, settings: OptimSettings) -> float:
    """The learning rate of step k (from 0) of `steps`, as a share of the peak.

    The rate of the first step is peak / warmup_steps, so that no step is idle.
    """
    if k < settings.warmup_steps:
        return (k + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return 1.0
    done = min((k - settings.warmup_steps) / max(steps - settings.warmup_steps, 1), 1.0)
    falling = 1 - done if settings.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.final_lr_ratio + (1 - settings.final_lr_ratio) * falling


def parameter_groups(
    params: Mapping[str, Tensor], rates: Mapping[str, float], weight_decay: float
) -> list[dict[str, Any]]:
    """AdamW's groups: each part's matrices and kernels with weight decay, its biases and norms without.

    `params` are named `<part>.<name>`; `rates` are peak learning rates by part.
    """
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, param in params.items():
        part, decays = name.split(".", 1)[0], param.ndim > 1
        decay = weight_decay if decays else 0.0
        new = {"params": [], "weight_decay": decay, "lr": rates[part], "peak_lr": rates[part]}
        groups.setdefault((part, decays), new)["params"].append(param)
    return list(groups.values())


def make_optimiser(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW over the groups, fused: one pass over memory on CPU and CUDA alike."""
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)


def set_lr(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's rate to its peak times `factor`."""
    for group in optimiser.param_groups:
        group["lr"] = group["peak_lr"] * factor


def gradient_norm(params: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together. It stays on the device: nothing waits for it."""
    norms = torch._foreach_norm([param.grad for param in params if param.grad is not None])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clipped_step(optimiser: torch.optim.Optimizer, norm: Tensor, max_norm: float | None) -> None:
    """One step with the gradients scaled down so that their norm is at most `max_norm`.

    The fused kernel divides by `grad_scale` as it reads the gradients, which saves a pass over them.
    """
    if max_norm is None:
        optimiser.step()
        return
    scaled: Any = optimiser
    scaled.grad_scale = (norm / max_norm).clamp_(min=1.0)
    try:
        optimiser.step()
    finally:
        del scaled.grad_scale


def optimiser_tensors(optimiser: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdamW's state by `<parameter>/exp_avg`, `/exp_avg_sq` and `/step`, to be saved."""
    return {
        f"{name}/{key}": value
        for name, param in params.items()
        for key, value in optimiser.state[param].items()
    }


def restore_optimiser(
    optimiser: torch.optim.Optimizer, params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Put a saved state back. Each tensor takes the memory layout of its parameter, as AdamW made it."""
    for name, param in params.items():
        if f"{name}/step" not in tensors:
            continue  # it never had a gradient
        state = optimiser.state[param]
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(param, memory_format=torch.preserve_format).detach()
            state[key].copy_(tensors[f"{name}/{key}"])
        state["step"] = tensors[f"{name}/step"].to(param.device, copy=True)
