"""How many rows fit into memory at once: the micro-batch, where a recipe leaves it to us.

First an estimate from what autograd keeps of one row, then, on a GPU, a trial: forward and backward passes of
more rows while they find memory, of fewer where they do not. What is learned is the same whichever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from darkroom.errors import RecipeError
from darkroom.train.ranks import Ranks
from darkroom.train.step import Step, TrainSettings, micro_batches
from darkroom.train.tasks import Task

if TYPE_CHECKING:
    from darkroom.recipe import Recipe

# Gradients, the backward pass's temporaries and the allocator come on top of what autograd keeps.
MARGIN = 1.6
SHARE = 0.6  # of the free memory
MOST_TRIALS = 6
ESTIMATED = "estimated, "


class NotOneFits(RecipeError):
    """Not even one picture's forward and backward pass finds memory."""


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
    told = f"{ESTIMATED}{row_bytes / 2**20:,.0f} MiB a row, {free_bytes / 2**30:,.1f} GiB to use"
    return max(fitting), told


def tried_micro_batch(
    fits: Callable[[int], bool], sizes: Sequence[int], estimate: int
) -> tuple[int | None, str]:
    """The largest of the ascending `sizes` that fits, tried from the estimate on; None where none does.

    Up while it fits, else down; at most `MOST_TRIALS` upwards, since each is a whole pass.
    """
    at = sizes.index(estimate)
    if fits(sizes[at]):
        for larger in sizes[at + 1 : at + 1 + MOST_TRIALS]:
            if not fits(larger):
                return sizes[at], f"found by trial: {larger} ran out of memory"
            at += 1
        return sizes[at], "found by trial"
    for smaller in reversed(sizes[:at]):
        if fits(smaller):
            return smaller, f"found by trial: {sizes[sizes.index(smaller) + 1]} ran out of memory"
    return None, "not one row fits"


def try_micro_batches(
    step: Step, task: Task, recipe: Recipe, inputs: Mapping[str, Tensor], ranks: Ranks
) -> tuple[int, str]:
    """The largest micro-batch that every rank finds memory for, by trial from the estimate, and why it; the
    step has it then. `inputs` are one row's. RecipeError where not one picture fits.
    """
    if recipe.optim.fused_backward:
        return step.micro_batch, "all at once, for optim.fused_backward"
    sizes = divisors(recipe.train.global_batch // ranks.size)
    each, estimate = task.rows_a_picture, step.micro_batch
    found, told = tried_micro_batch(lambda size: step.fits(alike(inputs, size * each)), sizes, estimate)
    micro = ranks.smallest(found or 0)
    if not micro:
        raise NotOneFits(
            "train.micro_batch",
            "auto, but not one picture's forward and backward pass finds memory",
            mend="set train.gradient_checkpointing=true, or a smaller data.resolution",
        )
    step.set_micro_batch(micro)
    return micro, told if micro == found else "what fits on every rank, found by trial"


def alike(inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """So many rows of inputs, the first over and over: what a trial is made with."""
    return {name: tensor[:1].repeat(rows, *(1,) * (tensor.dim() - 1)) for name, tensor in inputs.items()}


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
