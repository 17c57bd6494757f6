"""What `darkroom.train`'s loop costs over the bare step: forward, backward, optimiser.

The loop runs as it is, with its loader, metrics and bill. At the border of every chunk of steps, when it asks
for the next batch, the bare step takes its turn on the same model and a batch of the same size: what disturbs
the machine disturbs both. Held-out losses, samples and checkpoints are what a recipe asks for, and left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from darkroom.errors import InputError
from darkroom.hardware.machine import environment
from darkroom.hardware.meters import PeakMemory
from darkroom.measure.timing import Measurement, Timing, measurement, synchronise
from darkroom.recipe.recipe import read_recipe
from darkroom.recipe.rules import own_rate
from darkroom.run import Run
from darkroom.train.jobs import Pinned, TrainingSetup, flops_per_image
from darkroom.train.setup import make_job
from darkroom.train.step import Step, micro_batches, num_rows
from darkroom.train.tracking import NoTracker
from darkroom.train.trainer import Trainer

BARE, STEP, LOOP = "bare step", "step", "training loop"


def bench_train(
    file: Path,
    overrides: Sequence[str] = (),
    *,
    repeats: int = 7,
    warmup: int = 1,
    chunk: int | None = None,
) -> list[Measurement]:
    """Rows for the bare step (forward, backward, optimiser), the whole step of a recipe's file (with
    clipping, averaging and the rate's schedule) and the training loop: seconds of a step, in chunks of
    `chunk` steps (`train.log_every` unless given) that take turns. Ratios are to the bare step.

    Nothing is kept: the run is made in a temporary folder. Raises what training the recipe would raise.
    """
    if repeats < 1 or warmup < 0:
        raise InputError(f"repeats={repeats}, warmup={warmup}", allowed="repeats >= 1, warmup >= 0")
    recipe = read_recipe(file, overrides)
    optim, chunk = recipe.optim, chunk or recipe.train.log_every
    steps = chunk * (warmup + repeats) + 1
    # Without what is not the loop, and, of AdamW's scale, at a rate that leaves the weights as they are.
    others = own_rate(recipe.task, optim.name, scales=optim.scale_parameter)
    changes = {
        "train": recipe.train.model_copy(update={"steps": steps}),
        "optim": optim.model_copy(update={"lr": optim.lr if others else 1e-9, "warmup_steps": 0}),
        "checkpoint": recipe.checkpoint.model_copy(update={"every": steps + 1}),
        "sample": recipe.sample.model_copy(update={"every": 0, "prompts": ()}),
        "evaluate": recipe.evaluate.model_copy(update={"every": 0}),
    }
    recipe = recipe.model_copy(update=changes)
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-", ignore_cleanup_errors=True) as folder:
        job = make_job(recipe, Pinned(Path(folder)))
        turns = _Turns(job, chunk, warmup + repeats)
        peak = PeakMemory(str(job.device))
        run = Run.create(Path(folder) / "run", recipe.dump(), environment())
        with suppress(_Measured):
            Trainer(replace(job, feed=turns.feed), run, tracker=NoTracker(), say=lambda _: None).train()
        settings = {
            "task": recipe.task,
            "model": recipe.model.base,
            "resolution": recipe.data.resolution,
            "encode": recipe.data.encode,
            "global_batch": recipe.train.global_batch,
        }
        return _rows(settings, job, turns, warmup, peak.bytes())


class _Measured(Exception):
    """All turns were taken; what the loop would do at its end is not wanted."""


class _Turns:
    """A feed of batches that, between two chunks of the loop's steps, runs and times the bare ones."""

    def __init__(self, job: TrainingSetup, chunk: int, rounds: int) -> None:
        self.seconds: dict[str, list[float]] = {BARE: [], STEP: [], LOOP: []}
        self._job, self.chunk, self._rounds = job, chunk, rounds
        self.inputs: dict[str, Tensor] = {}

    @contextmanager
    def feed(self, k: int) -> Iterator[Iterator[Any]]:
        yield self._batches()

    def _batches(self) -> Iterator[Any]:
        """The loop's batches; no loader reads ahead while the bare steps are timed."""
        job, device = self._job, str(self._job.device)
        with job.feed(0) as batches:
            self.inputs = job.task.inputs(next(batches), job.device)
        for i in range(self._rounds):
            self.seconds[BARE].append(self._time(lambda: bare_step(job.step, self.inputs)))
            self.seconds[STEP].append(self._time(lambda: job.step(0, self.inputs)))
            with job.feed(i * self.chunk) as batches:
                columns = next(batches)
                synchronise(device)
                start = time.perf_counter()
                yield columns
                for _ in range(self.chunk - 1):
                    yield next(batches)
                synchronise(device)
                self.seconds[LOOP].append((time.perf_counter() - start) / self.chunk)
        raise _Measured

    def _time(self, call: Callable[[], object]) -> float:
        """Seconds of one step, of a chunk of them."""
        device = str(self._job.device)
        synchronise(device)
        start = time.perf_counter()
        for _ in range(self.chunk):
            call()
        synchronise(device)
        return (time.perf_counter() - start) / self.chunk


def bare_step(step: Step, inputs: dict[str, Tensor]) -> None:
    """Forward, backward and optimiser, by micro-batch and in the step's precision, and nothing else."""
    rows = num_rows(inputs)
    for i, micro in enumerate(micro_batches(inputs, step.micro_batch)):
        loss = step.task.losses(micro)["loss"].sum() / rows
        step.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        step.weights.collect(first=i == 0)
    for inner in step.optimiser.inner:
        step.scaler.step(inner)
    step.scaler.update()
    step.weights.clear_gradients()
    step.weights.publish()


def _rows(
    settings: dict[str, Any], job: TrainingSetup, turns: _Turns, warmup: int, peak_bytes: int
) -> list[Measurement]:
    timings = {
        name: Timing(name, tuple(seconds[warmup:]), sum(seconds[:warmup]), None)
        for name, seconds in turns.seconds.items()
    }
    flops = flops_per_image(job.task, turns.inputs)
    measured = {
        **settings,
        "micro_batch": job.step.micro_batch,
        "parameters": sum(master.numel() for master in job.step.weights.masters.values()),
        "threads": torch.get_num_threads(),
    }
    return [
        measurement(
            "train",
            timing,
            baseline=timings[BARE],
            images=settings["global_batch"],
            steps=1,
            flops_per_image=flops,
            precision=job.environment["precision"],
            device=str(job.device),
            note=f"median of chunks of {turns.chunk} steps, in turns",
            settings=measured,
            peak_memory_bytes=peak_bytes,
        )
        for timing in timings.values()
    ]
