"""Saving the state of a run while it goes on: copied off the device, then written by a thread. And going on
where a run stopped: what may differ from the session before, and what must be said about it.

A save that fails (a full disk) leaves older checkpoints as they are, is logged, and is tried again when the
next one is due. The first one of a run must not fail: a place that cannot be written ends the run at once.
"""

from __future__ import annotations

import fnmatch
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import darkroom
from darkroom import hardware
from darkroom.errors import CheckpointError, RecipeError
from darkroom.hardware import accelerator
from darkroom.options import COPIED_BYTES
from darkroom.run import differences
from darkroom.train.checkpoint.format import Parts, Tensors
from darkroom.train.checkpoint.storage import CheckpointStorage, Kept, LocalPlace
from darkroom.train.distributed.ranks import ALONE, Ranks

Say = Callable[[str], None]


class Saver:
    """Writes checkpoints of one session, one at a time, behind the training loop."""

    def __init__(
        self, place: CheckpointStorage | Path, *, keep: int, ranks: Ranks, say: Say, background: bool = True
    ) -> None:
        """`place` is where checkpoints go: a folder, or an address."""
        self.place = LocalPlace(place) if isinstance(place, Path) else place
        self._keep, self._ranks, self._say = keep, ranks, say
        self._background = background
        if ranks.first:
            self.place.prepare()
        # By time, so that of two saves of one step the later one is found first.
        self._token: str = ranks.broadcast(lambda: f"{time.time_ns():x}-{os.urandom(3).hex()}")
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._proven = ranks.broadcast(
            lambda: bool(self.place.kept())
        )  # that a checkpoint can be written there
        self._tried = False
        self._pinned: dict[str, Tensor] = {}

    def save(self, step: int, tensors: Tensors, scalars: Mapping[str, Any], parts: Parts) -> None:
        """Save the state after `step` steps; returns when it is copied, while it is still being written; a
        large one in main memory when it is written.

        `tensors` are what this rank holds: all of each, or with `parts` its rows.
        """
        self._settle()
        mine = {kind: self._own(named, parts) for kind, named in tensors.items()}
        in_place = self._in_place(mine)
        copied = mine if in_place else {kind: self._copied(kind, named) for kind, named in mine.items()}
        for device in {tensor.device for named in mine.values() for tensor in named.values()}:
            accelerator.synchronize(device)
        self._tried = True
        if in_place or not self._background:
            self._write(step, copied, scalars, parts)
            self._settle()
            return
        self._thread = threading.Thread(
            target=self._write, args=(step, copied, scalars, parts), name="save", daemon=True
        )
        self._thread.start()

    def look(self) -> None:
        """Hear of what was written meanwhile, without waiting; CheckpointError where the first one failed."""
        if self._thread is not None and not self._thread.is_alive():
            self._settle()

    def newest(self) -> Kept | None:
        """The newest checkpoint that is there, where it can be seen."""
        try:
            return next(reversed(self.place.kept()), None)
        except Exception:  # an address that cannot be reached
            return None

    def finish(self) -> None:
        """Wait for what is being written; CheckpointError where it failed: nothing comes after it."""
        self._settle(last=True)

    def _settle(self, *, last: bool = False) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._failed = self._failed, None
        if error is None:
            self._proven = self._proven or self._tried
            return
        kept = self.newest()
        intact = f"the checkpoint of step {kept.step} is intact" if kept else "there is none before it"
        message = f"a checkpoint could not be written: {error}; {intact}"
        if last or not self._proven:
            raise CheckpointError(message) from error
        self._say(f"warning: {message}; training goes on, the next one is tried when it is due")

    def _own(self, named: Mapping[str, Tensor], parts: Parts) -> dict[str, Tensor]:
        """What this rank writes of what it holds."""
        ranks = self._ranks
        if not ranks.sharded:  # all hold all: share the work
            return {name: t for i, (name, t) in enumerate(named.items()) if i % ranks.size == ranks.rank}
        return {
            name: tensor
            for name, tensor in named.items()
            if tensor.dim() or parts[name.rpartition("/")[0]][0] == 0  # a number is the same for all rows
        }

    def _in_place(self, tensors: Tensors) -> bool:
        """Whether a state is written from where it is, before training goes on: on a CPU, into a folder."""
        held = [tensor for named in tensors.values() for tensor in named.values()]
        if not isinstance(self.place, LocalPlace) or any(tensor.device.type != "cpu" for tensor in held):
            return False
        return not self._background or sum(tensor.nbytes for tensor in held) > COPIED_BYTES

    def _copied(self, kind: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in the computer's memory; those of a GPU's tensors go where the last ones were."""
        return {name: self._copy(f"{kind}:{name}", tensor.detach()) for name, tensor in named.items()}

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        if not accelerator.kind_of(tensor.device).streams:
            return tensor.to("cpu", copy=True)
        held = self._pinned.get(key)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = self._pinned[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return held.copy_(tensor, non_blocking=True)

    def _write(self, step: int, tensors: Tensors, scalars: Mapping[str, Any], parts: Parts) -> None:
        ranks, place = self._ranks, self.place
        try:
            place.write_share(step, self._token, ranks.rank, ranks.size, tensors, parts)
            if ranks.first:
                place.complete(step, self._token, ranks.size, scalars, self._keep)
        except Exception as error:
            self._failed = error
            place.failed(step, self._token, ranks.rank)


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
        "train.blocks_to_swap",
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
