"""A job that can be trained: a checked recipe with everything that training it needs; how hardware is set up
for it, how well it is used while that goes on, and what it will have cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from darkroom.bill import Bill
from darkroom.counting import counting
from darkroom.errors import is_out_of_memory
from darkroom.hardware import accelerator, machine
from darkroom.hardware.cards import mfu
from darkroom.recipe.rules import channels_last
from darkroom.recipe.sections import SamplePrompt, TrainSettings
from darkroom.train.contents import Contents
from darkroom.train.feed import Feed
from darkroom.train.memory import alike
from darkroom.train.ranks import ALONE, Ranks
from darkroom.train.scores import Scores
from darkroom.train.step import Step
from darkroom.train.tasks.diffusion import Task
from darkroom.train.tasks.dmd2 import DistributionMatching

if TYPE_CHECKING:
    from darkroom.recipe.recipe import Recipe

Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainingSetup:
    """A checked recipe with everything that training it needs."""

    recipe: Recipe
    task: Task
    step: Step
    feed: Feed
    device: torch.device
    rows: int  # pictures trained on
    environment: Mapping[str, Any]  # what bit-exactness depends on
    store: Mapping[str, Any]  # version, rows, contents and what is chosen, which the run pins
    base: Mapping[str, str]  # fingerprints of what is read of a base model, likewise
    heldout: dict[str, Tensor] | None
    scores: Scores | None
    calibration: list[dict[str, Tensor]]
    prompts: tuple[str | SamplePrompt, ...]
    notes: list[str]  # what was derived, and why
    ranks: Ranks = ALONE  # the processes that train together
    rows_of: Callable[[int], Sequence[int]] | None = None  # the store's rows that form global batch k
    flops: int | None = None  # of a picture's forward and backward pass, where counted beforehand

    @property
    def num_devices(self) -> int:
        """Devices that train together, a machine's whole CPU counting as one."""
        return devices_of(self.ranks, self.device)


def devices_of(ranks: Ranks, device: torch.device) -> int:
    """Devices of processes that train together, a machine's whole CPU counting as one."""
    return max(1, ranks.size if device.type != "cpu" else ranks.size // ranks.local_size)


@dataclass(frozen=True)
class Pinned:
    """What a run that goes on has settled before."""

    run: Path
    version: int | Sequence[int] | None = None  # of each store, where there are several
    rows: int | None = None
    micro_batch: int | None = None
    channels_last: bool | None = None  # where it was measured
    contents: Contents | None = None
    base: Mapping[str, str] | None = None
    chosen: str | None = None


COUNT_AFTER_S = 60.0  # counting takes seconds: not worth it in a run that is over before


def set_kernels(settings: TrainSettings, device: torch.device) -> None:
    """Let the card's libraries round and choose as a recipe says, for the rest of the process."""
    accelerator.round_float32(device, settings.tf32)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark


MOST_ROWS = 8  # of a pass that is timed: more change nothing in which layout is quicker
PASSES = 3
FEW_CONVOLUTIONS = 8
"""A transformer has one, at its input: its layout decides nothing."""


def chosen_layout(
    task: Task,
    settings: TrainSettings,
    pinned: Pinned,
    dtype: torch.dtype,
    one_row: Callable[[], Mapping[str, Tensor]],
    micro_batch: int,
    *,
    sharded: bool,
) -> tuple[bool, str]:
    """Whether convolutions are to lie channels last, and why where that was measured.

    Measured where the recipe leaves it open, on accelerators with memory of their own, of what is not
    compiled; elsewhere by the rule (`channels_last`). A run that goes on keeps what was measured before.
    `one_row` gives the inputs of one picture.
    """
    parts = list(task.modules.values())
    device = next(parts[0].parameters()).device
    usual = channels_last(settings.channels_last, device.type, sharded=sharded)
    convolutions = sum(isinstance(one, nn.Conv2d) for part in parts for one in part.modules())
    fixed = settings.channels_last != "auto" or sharded or settings.compile != "none"
    if fixed or not accelerator.kind_of(device).own_memory or convolutions < FEW_CONVOLUTIONS:
        return usual, ""
    if pinned.micro_batch is not None:  # there is a checkpoint; earlier ones say nothing of this
        before = pinned.channels_last
        return (usual, "") if before is None else (before, f"{LAYOUTS[before]}: as before")
    rows = min(micro_batch, MOST_ROWS)
    try:
        seconds = _layout_seconds(task, parts, alike(one_row(), rows * task.rows_a_picture), dtype)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        seconds = {}
    finally:
        for part in parts:
            part.zero_grad(set_to_none=True)
        lay_out(parts, innermost=False)
        accelerator.empty_cache()
    if not seconds:
        return usual, f"{LAYOUTS[usual]}: unmeasured, for memory ran out"
    innermost = seconds[True] <= seconds[False]
    ms = [f"{1e3 * seconds[layout]:.1f}" for layout in (innermost, not innermost)]
    return innermost, f"{LAYOUTS[innermost]}: {ms[0]} ms a pass of {rows} pictures, {ms[1]} the other way"


LAYOUTS = {True: "convolutions channels last", False: "convolutions channels first"}


def lay_out(parts: Iterable[nn.Module], *, innermost: bool) -> None:
    """Convolutions' weights with their channels innermost or outermost, in place; DoRA's factors stay as they
    are, for PEFT reads them as matrices."""
    for part in parts:
        part.to(memory_format=torch.channels_last if innermost else torch.contiguous_format)  # type: ignore[call-overload]
        for layer in part.modules() if innermost else ():
            if getattr(layer, "lora_magnitude_vector", None):
                for factors in (layer.lora_A, layer.lora_B):
                    factors.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def _layout_seconds(
    task: Task, parts: list[nn.Module], inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[bool, float]:
    """The quickest pass of each layout, in turns; the first of each, which chooses kernels, is left out."""
    seconds = dict.fromkeys(LAYOUTS, float("inf"))
    for turn in range(1 + PASSES):
        for innermost in seconds:
            lay_out(parts, innermost=innermost)
            taken = _pass_seconds(task, inputs, dtype)
            if turn:
                seconds[innermost] = min(seconds[innermost], taken)
    return seconds


def _pass_seconds(task: Task, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    """Forward and backward, computed in `dtype` whatever the weights are in as yet."""
    device = next(iter(inputs.values())).device
    half: AbstractContextManager[Any] = nullcontext()
    if dtype != torch.float32:
        half = torch.autocast(device.type, dtype=dtype)
    accelerator.synchronize(device)
    start = time.perf_counter()
    with half:
        loss = task.losses(inputs)["loss"].sum()
    torch.autograd.backward(loss)
    accelerator.synchronize(device)
    return time.perf_counter() - start


def flops_per_image(task: Task, inputs: Mapping[str, Tensor]) -> int:
    """FLOPs of one picture's forward and backward pass, counted on the task's own loss; of steps of several
    kinds the mean.
    """
    if not isinstance(task, DistributionMatching):
        return _counted_flops(task, inputs)
    found = 0.0
    for k, share in task.turns.items():
        task.begin(k)  # the next step says anew which it is
        found += share * _counted_flops(task, inputs)
    return round(found)


def _counted_flops(task: Task, inputs: Mapping[str, Tensor]) -> int:
    one = {name: tensor[: task.rows_a_picture] for name, tensor in inputs.items()}
    plainly: Any = torch.compiler.set_stance
    with plainly("force_eager"), counting(*task.modules.values(), *task.frozen) as counter:
        loss = task.losses(counter.fake(one))["loss"]
        torch.autograd.backward(loss.sum())
        return counter.result().flops


def utilisation(
    flops: int, images_per_s: float, device: torch.device, precision: str, num_devices: int
) -> float | None:
    """Model FLOPs utilisation of all devices together; None for hardware that is not known."""
    here = machine()
    if device.type != "cpu":
        name, units = here.devices[device.index or 0].name, num_devices
    else:
        name, units = here.cpu_class, max(1, round(here.cores * num_devices))
    return mfu(flops, images_per_s, name, precision, num_devices=units)


def projected(bill: Bill, done: int, before: int, steps: int, prior: Bill | None) -> dict[str, Any]:
    """Dollars and kWh so far, and at the end if it goes on as in this session.

    `before` steps were made in earlier sessions; `prior` is the bill of these and of loading.
    """
    found: dict[str, Any] = {"memory_bytes": bill.peak_memory_bytes}
    here = max(done - before, 1)
    for name in ("usd", "kwh"):
        so_far = getattr(bill, name)
        if so_far is None:
            continue
        session = so_far - ((prior and getattr(prior, name)) or 0.0)
        found[name] = so_far
        found[f"{name}_projected"] = so_far + session / here * (steps - done)
    return found
