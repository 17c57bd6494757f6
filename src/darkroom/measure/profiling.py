"""Where one training iteration's time goes, and its memory: load, encode, forward, backward, communication,
optimiser.

The step is the one that trains. Its parts are known by the calls it makes: losses are the forward pass, what
follows up to `exchange` is the backward pass, `exchange` itself the wait for other ranks, and the rest is the
optimiser with clipping, casting and averaging. The device is waited for at each border, so what would overlap
stands one after the other: the parts are true, their sum is more than a step that nobody looks at, whose time
stands next to them.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from darkroom import models
from darkroom.errors import InputError
from darkroom.hardware.accelerator import allocated_bytes
from darkroom.hardware.meters import has_statistics, resident_bytes
from darkroom.measure.timing import Measurement, Timing, measurement, synchronise
from darkroom.measure.training import LADDER, SwitchedStep
from darkroom.train.distributed.ranks import Ranks
from darkroom.train.jobs import TrainingSetup
from darkroom.train.step import Step

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
