"""How many rows fit into memory at once: the micro-batch, where a recipe leaves it to us."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch
from torch import Tensor

from darkroom.errors import RecipeError
from darkroom.train.step import TrainSettings, micro_batches
from darkroom.train.tasks import Task

# Gradients, the backward pass's temporaries and the allocator come on top of what autograd keeps.
MARGIN = 1.6
SHARE = 0.6  # of the free memory


def check_micro_batch(settings: TrainSettings) -> None:
    """RecipeError unless the global batch is made of whole micro-batches."""
    micro, batch = settings.micro_batch, settings.global_batch
    if micro == "auto" or (0 < micro <= batch and batch % micro == 0):
        return
    fitting = sorted(divisors(batch), key=lambda d: abs(d - micro))[:3]
    raise RecipeError(
        "train.micro_batch",
        f"{micro} does not divide train.global_batch {batch}",
        allowed=", ".join(map(str, sorted(fitting))) + " or auto",
    )


def choose_micro_batch(
    settings: TrainSettings,
    task: Task,
    inputs: Mapping[str, Tensor],
    device: torch.device,
    share: int | None = None,
) -> tuple[int, str]:
    """Rows of a forward pass, and why so many. `inputs` are those of at least one row; `share` is what one
    process has of a global batch, all of it unless said.
    """
    if settings.micro_batch != "auto":
        return settings.micro_batch, "asked for"
    batch = share or settings.global_batch
    row_bytes = activation_bytes(task, next(micro_batches(inputs, 1))) * MARGIN * task.rows_a_picture
    free_bytes = free_memory_bytes(device) * SHARE
    fitting = [size for size in divisors(batch) if size * row_bytes <= free_bytes] or [1]
    told = f"{row_bytes / 2**20:,.0f} MiB a row, {free_bytes / 2**30:,.1f} GiB to use"
    return max(fitting), told


def activation_bytes(task: Task, inputs: Mapping[str, Tensor]) -> int:
    """What autograd keeps of one forward pass, weights apart, by running it."""
    weights = {
        p.untyped_storage().data_ptr() for module in task.modules.values() for p in module.parameters()
    }
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no later tensor takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        task.losses(inputs)
    return sum(kept.values())


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
