"""How well the hardware is used while a run goes on, and what it will have cost at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from darkroom.bill import Bill
from darkroom.counting import counting
from darkroom.hardware import accelerator, machine
from darkroom.hardware.cards import mfu
from darkroom.recipe.sections import TrainSettings
from darkroom.train.tasks.diffusion import Task
from darkroom.train.tasks.dmd2 import DistributionMatching

COUNT_AFTER_S = 60.0  # counting takes seconds: not worth it in a run that is over before


def set_kernels(settings: TrainSettings, device: torch.device) -> None:
    """Let the card's libraries round and choose as a recipe says, for the rest of the process."""
    accelerator.round_float32(device, settings.tf32)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark


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
