"""`darkroom bench train`: what the loop of `darkroom.train` costs over the bare step (forward, backward,
optimiser); and where one iteration's time goes.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from darkroom import models
from darkroom.errors import InputError
from darkroom.hardware.accelerator import allocated_bytes
from darkroom.hardware.machine import environment
from darkroom.hardware.meters import PeakMemory, has_statistics, resident_bytes
from darkroom.measure.pretraining import LADDER, SwitchedStep
from darkroom.measure.timing import Measurement, Timing, measurement, synchronise
from darkroom.recipe.recipe import read_recipe
from darkroom.recipe.rules import own_rate
from darkroom.run import Run
from darkroom.train.jobs import Pinned, TrainingSetup, flops_per_image
from darkroom.train.ranks import Ranks
from darkroom.train.setup import make_job
from darkroom.train.step import Step, micro_batches, num_rows
from darkroom.train.tracking import NoTracker
from darkroom.train.trainer import Trainer

# ---- the loop over the bare step
#
# The loop runs as it is, with its loader, metrics and bill. At the border of every chunk of steps, when it
# asks for the next batch, the bare step takes its turn on the same model and a batch of the same size: what
# disturbs the machine disturbs both. Held-out losses, samples and checkpoints are what a recipe asks for, and
# left out.

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


# ---- where one training iteration's time goes, and its memory: load, encode, forward, backward,
# communication, optimiser
#
# The step is the one that trains. Its parts are known by the calls it makes: losses are the forward pass,
# what follows up to `exchange` is the backward pass, `exchange` itself the wait for other ranks, and the rest
# is the optimiser with clipping, casting and averaging. The device is waited for at each border, so what
# would overlap stands one after the other: the parts are true, their sum is more than a step that nobody
# looks at, whose time stands next to them.

PARTS = ("load", "encode", "forward", "backward", "communication", "optimiser")
WHOLE = "iteration"
SAMPLE_S = 0.002  # between two looks at the memory
WARMUP = 2


@dataclass(frozen=True)
class Span:
    """A part of an iteration, in seconds from its start."""

    part: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Iteration:
    """One iteration's spans in order, and (seconds, bytes in use) while it ran."""

    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """When its last span ended."""
        return self.spans[-1].end_s

    def of(self, part: str) -> float:
        """Seconds of all spans of a part."""
        return sum(span.end_s - span.start_s for span in self.spans if span.part == part)


@dataclass(frozen=True)
class IterationProfile:
    """What was profiled, and every iteration of it."""

    name: str
    device: str
    images: int
    iterations: tuple[Iteration, ...]
    unwatched_s: tuple[float, ...]
    """Iterations that nobody looked at, in turns with the others."""
    settings: Mapping[str, Any]

    @property
    def typical(self) -> Iteration:
        """The iteration of median length, which is drawn."""
        return sorted(self.iterations, key=lambda one: one.seconds)[len(self.iterations) // 2]

    def rows(self) -> list[Measurement]:
        """A row for each part and for the whole; ratios are shares of the iteration."""
        whole = Timing(WHOLE, tuple(one.seconds for one in self.iterations), 0.0, None)
        timings = [
            Timing(part, tuple(one.of(part) for one in self.iterations), 0.0, None)
            for part in PARTS
            if any(span.part == part for one in self.iterations for span in one.spans)
        ]
        unwatched = Timing("iteration, not looked at", self.unwatched_s, 0.0, None)
        peak = max(one.peak_bytes for one in self.iterations)
        settings = {"name": self.name, **self.settings}
        return [
            measurement(
                "train-profile",
                timing,
                baseline=whole,
                images=self.images if timing.name in (WHOLE, unwatched.name) else None,
                device=self.device,
                settings=settings,
                peak_memory_bytes=peak,
                note="the device waited for at each border" if timing is not unwatched else "",
            )
            for timing in (whole, *timings, unwatched)
        ]


class _Watched:
    """Notes spans and memory of what runs within `iteration`."""

    def __init__(self, device: str) -> None:
        self._device, self._began, self._at = device, 0.0, 0.0
        self._part, self._spans = "", list[Span]()

    def enter(self, part: str) -> None:
        """From here on it is this part; nothing where it is the same as before."""
        if part == self._part:
            return
        synchronise(self._device)
        now = time.perf_counter() - self._began
        if self._part:
            self._spans.append(Span(self._part, self._at, now))
        self._part, self._at = part, now

    def iteration(self, run: Callable[[], None]) -> Iteration:
        """Run once, looked at."""
        self._part, self._spans = "", []
        memory: list[tuple[float, int]] = []
        over = threading.Event()
        self._began = time.perf_counter()

        def sample() -> None:
            while not over.is_set():
                memory.append((time.perf_counter() - self._began, _in_use(self._device)))
                over.wait(SAMPLE_S)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            self._began = time.perf_counter()
            run()
            self.enter("end")
        finally:
            over.set()
            thread.join()
        return Iteration(tuple(self._spans), tuple(memory), max(used for _, used in memory))


def _in_use(device: str) -> int:
    return allocated_bytes(device) if has_statistics(device) else resident_bytes()


@contextmanager
def _watching(step: Step, enter: Callable[[str], None], ranks: Ranks) -> Iterator[None]:
    """Within, the step's own calls tell where it is."""
    task, weights = step.task, step.weights
    losses, exchange = task.losses, weights.exchange

    def seen_losses(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        enter("forward")
        found = losses(inputs)
        enter("backward")
        return found

    def seen_exchange() -> None:
        if ranks.size > 1:
            enter("communication")
        exchange()
        enter("optimiser")

    vars(task)["losses"], vars(weights)["exchange"] = seen_losses, seen_exchange
    try:
        yield
    finally:  # the class's own are seen again
        del vars(task)["losses"], vars(weights)["exchange"]


def profile_job(job: TrainingSetup, *, repeats: int = 7) -> IterationProfile | None:
    """Profile a job's iteration with its loader, encoders and step; nothing is kept.

    Of several processes that train together all take part, and rank 0 has the result.
    """
    recipe, ranks = job.recipe, job.ranks
    with job.feed(0) as batches:
        found = _profiled(job.step, _loading(job, batches), ranks, str(job.device), repeats)
    if not ranks.first:
        return None
    settings = {
        "resolution": recipe.data.resolution,
        "encode": recipe.data.encode,
        "global_batch": recipe.train.global_batch,
        "micro_batch": job.step.micro_batch,
        "precision": job.environment["precision"],
        "parallel": recipe.parallel.mode,
        "processes": ranks.size,
    }
    name = f"{recipe.task} of {recipe.model.base}"
    return IterationProfile(name, str(job.device), recipe.train.global_batch, *found, settings)


Inputs = Callable[[Callable[[str], None]], Mapping[str, Tensor]]


def _loading(job: TrainingSetup, batches: Iterator[Any]) -> Inputs:
    def inputs(enter: Callable[[str], None]) -> Mapping[str, Tensor]:
        enter("load")
        columns = next(batches)
        enter("encode")
        return job.task.inputs(columns, job.device)

    return inputs


def profile_family(
    family: str,
    *,
    resolution: int | None = None,
    batch: int = 1,
    case: str | None = None,
    repeats: int = 7,
    device: str = "auto",
    unet: Mapping[str, Any] | None = None,
) -> IterationProfile:
    """Profile the bare step of a family on synthetic latents; `case` as `bench_pretraining` takes it."""
    if family not in models.FAMILIES:
        raise InputError(f"--model {family}", allowed=", ".join(models.FAMILIES))
    place = str(models.device(device))
    case = case or (LADDER[3] if place.startswith("cuda") else LADDER[0])
    side = resolution or models.FAMILIES[family].vae.get("sample_size", 512)
    switched = SwitchedStep(family, side, case, place, unet or {})
    inputs = switched.inputs(batch)
    found = _profiled(switched.step, lambda enter: inputs, Ranks(), place, repeats)
    settings = {"resolution": side, "batch": batch, "case": case, "precision": switched.precision}
    return IterationProfile(f"{family}, {case}", place, batch, *found, settings)


def _profiled(
    step: Step, inputs: Inputs, ranks: Ranks, device: str, repeats: int
) -> tuple[tuple[Iteration, ...], tuple[float, ...]]:
    """Iterations that are looked at, in turns with some that are not."""
    watched, k = _Watched(device), 0

    def iteration(enter: Callable[[str], None]) -> None:
        nonlocal k
        step(k, inputs(enter))
        k += 1

    looked: list[Iteration] = []
    plain: list[float] = []
    for number in range(WARMUP + repeats):
        ranks.barrier()
        with _watching(step, watched.enter, ranks):
            one = watched.iteration(lambda: iteration(watched.enter))
        ranks.barrier()
        synchronise(device)
        began = time.perf_counter()
        iteration(lambda part: None)
        synchronise(device)
        if number >= WARMUP:
            looked.append(one)
            plain.append(time.perf_counter() - began)
    return tuple(looked), tuple(plain)


def shares(profile: IterationProfile) -> Sequence[tuple[str, float]]:
    """Each part's share of the iteration, by medians."""
    whole = statistics.median(one.seconds for one in profile.iterations)
    return [
        (part, statistics.median(one.of(part) for one in profile.iterations) / whole)
        for part in PARTS
        if any(one.of(part) for one in profile.iterations)
    ]
