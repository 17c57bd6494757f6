"""Going on where a run stopped: what may differ from the session before, and what must be said about it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch

import darkroom
from darkroom import hardware
from darkroom.errors import RecipeError
from darkroom.run import differences
from darkroom.train.distributed.ranks import ALONE, Ranks

# These change what is watched, kept or how data is read ahead, never what is learned.
HARMLESS = (
    *(
        "checkpoint.*",
        "sample.*",
        "evaluate.*",
        "track.*",
        "budget.*",
        "train.log_every",
        "train.nonfinite_policy",
    ),
    *(
        "data.workers",
        "data.prefetch_batches",
        "data.store",
        "data.online.*",
        "parallel.timeout_s",
    ),  # a store that was moved: version and rows are checked
)
# These change the last bits of every number: allowed, and said.
INEXACT = ("train.precision", "train.micro_batch", "train.device", "train.channels_last", "parallel.*")


def check_changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """Notes on what changed in the recipe since the run's last session.

    Raises RecipeError that names every key whose change would make it another run.
    """
    changed = differences(before, now)
    changed = {key: pair for key, pair in changed.items() if not _matches(key, HARMLESS)}
    notes = []
    if steps := changed.pop("train.steps", None):
        notes.append(_note_on_steps(steps, now, step))
    for key in [key for key in changed if _matches(key, INEXACT)]:
        was, is_now = changed.pop(key)
        notes.append(f"{key} was {was} and is {is_now}: no longer bit-identical to an undisturbed run")
    if changed:
        changes_text = ", ".join(f"{key} (was {was}, is {is_now})" for key, (was, is_now) in changed.items())
        raise RecipeError(
            next(iter(changed)) if len(changed) == 1 else "recipe",
            f"the run here was started with other settings: {changes_text}",
            mend="change them back, or start a new run: --resume never, or another --out",
        )
    return notes


def _note_on_steps(steps: tuple[int, int], now: Mapping[str, Any], step: int) -> str:
    was, is_now = steps
    if is_now < step:
        raise RecipeError("train.steps", f"{is_now}, but {step} steps are made already")
    schedule = now["optim"]["lr_schedule"]
    shape = (
        "" if schedule == "constant" else f"; the rate's {schedule} decay is stretched over the new length"
    )
    return f"train.steps was {was} and is {is_now}{shape}"


def check_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of the machine and the software changed: numbers then agree to rounding, not to the bit."""
    return [
        f"{key} was {was} and is {is_now}: no longer bit-identical to an undisturbed run"
        for key, (was, is_now) in differences(before, now).items()
    ]


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(key, pattern) for pattern in patterns)


def exactness(device: torch.device, precision: str, micro_batch: int, ranks: Ranks = ALONE) -> dict[str, Any]:
    """What decides the last bits of every number, to be compared when a run goes on."""
    versions = hardware.versions(("torch", "diffusers", "transformers", "numpy"))
    here = hardware.machine()
    return {
        "darkroom": darkroom.__version__,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "micro_batch": micro_batch,
        "processes": ranks.size,
        "device": here.cpu if device.type == "cpu" else here.devices[device.index or 0].name,
        **versions,
    }
