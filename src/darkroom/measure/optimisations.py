"""`darkroom bench optimisations`: each one, and sensible stacks, against the plain model. And `darkroom bench
precision`: the same noise through two precisions, as runs and as one run's intermediates.

A published comparison of precisions takes the intermediates of one 100-step run for runs of fewer steps. They
are not the same: a run of 5 steps ends in a picture, the fifth of 100 steps is nearly all noise. Both are
measured here.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from darkroom.errors import DarkroomError, InputError, is_out_of_memory
from darkroom.hardware import accelerator
from darkroom.measure.drawing import Metered, StepTimer, Workload
from darkroom.measure.timing import Measurement, Timing, interleave, measurement, peak_memory, synchronise
from darkroom.picture_settings import MAX_STEPS, GenerateSettings
from darkroom.sample import denoise, optimisations
from darkroom.sample.backends.backend import Backend
from darkroom.sample.generate import Generation
from darkroom.sample.likeness import likeness
from darkroom.sample.pictures import Picture

PLAIN = "plain"
"""The model as it is: `none` of `sample.optimisations`."""
STACKS = {
    "cpu": ("auto", "bf16,auto", "bf16,auto,guidance_interval", "bf16,auto,guidance_interval,feature_cache"),
    "cuda": (
        "auto",
        "bf16,auto",
        "bf16,auto,cuda_graphs",
        "bf16,auto,compile",
        "bf16,auto,compile,cuda_graphs",
        "bf16,auto,cuda_graphs,guidance_interval",
    ),
}
LOG = logging.getLogger("darkroom.measure")
DEVICE_LOST: Any = getattr(torch, "AcceleratorError", ())
"""After this the process's device answers nothing any more."""
LEFT_OUT = ("lcm", "tiny_vae")
"""Need files of their own; named as `tiny_vae:FOLDER` they are measured."""
STARTS = ("compile", "compile_regional", "cuda_graphs", "trace")
"""Whose first picture takes longer, so that a second opening is measured too."""


@dataclass(frozen=True)
class Start:
    """How long it took from nothing to the first picture."""

    backend: Backend
    pictures: list[Picture]
    seconds: float


def default_cases(device: str) -> tuple[str, ...]:
    """Every optimisation that needs no file of its own, then the stacks that make sense on a device."""
    singles = tuple(name for name in optimisations.OPTIMISATIONS if name not in LEFT_OUT)
    return (*singles, *STACKS["cuda" if device.startswith("cuda") else "cpu"])


def bench_optimisations(
    drawing: Workload,
    *,
    cases: Sequence[str] = (),
    repeats: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Measurement]:
    """Rows for each case, as they come: latency end to end and its ratio to the plain model's, in turns with
    it; steps/s of the loop, peak memory, energy, cost; how far the pictures are from the plain ones. What
    cannot work on the device, ran out of memory or failed is a row that says so, and the next case follows.
    Cold and warm starts are rows of `optimisations-start`.
    """
    if repeats < 1:
        raise InputError(f"repeats {repeats}", allowed="1 or more")
    for names in cases:
        optimisations.parse(names)  # a misspelt name is refused before anything is measured
    return _optimisation_rows(drawing, cases or default_cases(drawing.device), repeats, say)


def _optimisation_rows(
    drawing: Workload, cases: Sequence[str], repeats: int, say: Callable[[str], None]
) -> Iterator[Measurement]:
    device = drawing.device
    plain = _start(drawing, "none", device)
    flops = drawing.flops_per_image()
    yield _plain_row(drawing, plain, repeats, flops)
    for names in cases:
        say(f"optimisations: {names}")
        try:
            yield from _case(drawing, names, plain, repeats, flops)
        except DEVICE_LOST:
            raise
        except Exception as error:
            yield _without(drawing, names, why_not(error, names))
        free_memory(device)


def _start(drawing: Workload, names: str, device: str) -> Start:
    """Open and draw once, from nothing."""
    synchronise(device)
    begin = time.perf_counter()
    backend = drawing.open(names)
    pictures = drawing.run(backend)
    synchronise(device)
    return Start(backend, pictures, time.perf_counter() - begin)


def _plain_row(drawing: Workload, plain: Start, repeats: int, flops: int) -> Measurement:
    watch = StepTimer(drawing.device)
    run = Metered(lambda: drawing.run(plain.backend, watch=watch), drawing.device)
    timing = interleave({PLAIN: run}, repeats=repeats, warmup=0, device=drawing.device)[PLAIN]
    _, peak = peak_memory(run, drawing.device)
    return _row(drawing, PLAIN, timing, None, run, watch, peak, {}, flops, plain.seconds)


def _case(drawing: Workload, names: str, plain: Start, repeats: int, flops: int) -> list[Measurement]:
    device = drawing.device
    cold = _start(drawing, names, device)
    watch = StepTimer(device)
    run = Metered(lambda: drawing.run(cold.backend, watch=watch), device)
    turns: dict[str, Callable[[], object]] = {PLAIN: lambda: drawing.run(plain.backend), names: run}
    timings = interleave(turns, repeats=repeats, warmup=0, device=device)
    with _off_the_card(drawing, names):
        _, peak = peak_memory(run, device)
    likely = likeness([p.image for p in cold.pictures], [p.image for p in plain.pictures])
    lossy = any(
        optimisations.OPTIMISATIONS[_name(one)].kind == optimisations.LOSSY for one in cold.backend.optimised
    )
    rows = [
        _row(
            drawing, names, timings[names], timings[PLAIN], run, watch, peak,
            rounded(likely) | {"in_place": ",".join(cold.backend.optimised)},
            None if lossy else flops, cold.seconds,
        )
    ]  # fmt: skip
    if any(_name(one) in STARTS for one in cold.backend.optimised):
        rows += _starts(drawing, names, cold)
    return rows


@contextmanager
def _off_the_card(drawing: Workload, names: str) -> Iterator[None]:
    """The plain model off the card while the memory of one that is offloaded is measured."""
    moves, device = "offload_" in names, drawing.device
    if moves:
        drawing.model.to("cpu")
        free_memory(device)
    try:
        yield
    finally:
        if moves:
            drawing.model.to(device)


def _starts(drawing: Workload, names: str, cold: Start) -> list[Measurement]:
    """The first picture from nothing, and again with compiled code on disk but none in the process."""
    torch._dynamo.reset()
    warm = _start(drawing, names, drawing.device)
    return [
        measurement(
            "optimisations-start",
            Timing(f"{names}, {kind}", (start.seconds,), 0.0, None),
            device=drawing.device,
            settings=drawing.settings(start=kind),
            note="opening and one picture, once; cold may find code of earlier processes on disk",
        )
        for kind, start in (("cold", cold), ("warm", warm))
    ]


def _row(
    drawing: Workload,
    name: str,
    timing: Timing,
    plain: Timing | None,
    run: Metered,
    watch: StepTimer,
    peak: int,
    more: dict[str, Any],
    flops: int | None,
    first_s: float,
) -> Measurement:
    return measurement(
        "optimisations",
        timing,
        baseline=plain,
        images=len(drawing.prompts),
        flops_per_image=flops,
        precision=_precision(name, drawing),
        device=drawing.device,
        note=f"end to end; steps/s of the loop alone; energy by {run.source}",
        settings=drawing.settings(**more),
        peak_memory_bytes=peak,
        energy_j=run.median_j(timing.repeats),
        steps_per_s=statistics.median(watch.rates) if watch.rates else None,
        warmup_s=first_s,
    )


def _without(drawing: Workload, names: str, note: str) -> Measurement:
    """A row for what was not measured, and why."""
    from darkroom.hardware import machine

    here = machine()
    return Measurement(
        benchmark="optimisations",
        case=names,
        settings=drawing.settings(),
        machine=here.name,
        device=drawing.device,
        note=note,
    )


def why_not(error: Exception, case: str) -> str:
    """What a row says of a case that gave no numbers. A bug's trace is logged."""
    if isinstance(error, DarkroomError):
        return f"cannot: {error}"
    first = (str(error).strip().splitlines() or [""])[0][:200]
    if is_out_of_memory(error):
        return f"out of memory: {first}"
    LOG.error("%s failed", case, exc_info=error)
    return f"failed: {type(error).__name__}: {first}"


def rounded(likely: dict[str, float]) -> dict[str, float | str]:
    """Likeness in few digits; equal pictures have no PSNR, which JSON cannot say as a number."""
    return {name: "inf" if math.isinf(value) else float(f"{value:.5g}") for name, value in likely.items()}


def _name(choice: str) -> str:
    return choice.partition(":")[0]


def _precision(names: str, drawing: Workload) -> str:
    parts = {_name(part) for part in names.split(",")}
    return next((name for name in ("fp16", "bf16", "tf32") if name in parts), drawing.precision)


def free_memory(device: str) -> None:
    """Free what is not held any more, on the card too."""
    gc.collect()
    accelerator.empty_cache()


STEPS = (5, 10, 20, 30, 50, 75, 100)
RUNS, INTERMEDIATES, APART = "runs", "intermediates", "runs against intermediates"


def parse_steps(text: str) -> list[int]:
    """Numbers of steps from '5,10,20', in order. InputError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_STEPS for part in parts):
        raise InputError(
            f"steps '{text}'", allowed=f"numbers of 1 to {MAX_STEPS} with commas, such as 5,10,20"
        )
    return sorted({int(part) for part in parts})


@dataclass(frozen=True)
class PicturePair:
    """Two pictures after so many steps, and how alike they are."""

    series: str
    steps: int
    first: Image.Image
    second: Image.Image
    likeness: dict[str, float]


@dataclass(frozen=True)
class Precisions:
    """A comparison: the pairs of every series, and the rows."""

    names: tuple[str, str]
    pairs: list[PicturePair]
    rows: list[Measurement]

    def series(self, name: str) -> list[PicturePair]:
        """The pairs of one series, by steps."""
        return [pair for pair in self.pairs if pair.series == name]


def compare_precisions(
    drawing: Workload,
    *,
    against: str = "bf16",
    steps: Sequence[int] = STEPS,
    repeats: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> Precisions:
    """Compare the model's own precision with another (`bf16`, `fp16`, `tf32`, `autocast`, any optimisation).

    Three series by steps: whole runs of n steps in both precisions; what both have after n steps of the
    longest run; and, in the model's own precision, the run of n steps against those intermediates.
    """
    wanted = sorted(set(steps))
    if not wanted or wanted[0] < 1 or repeats < 1:
        raise InputError(f"steps {list(steps)}, repeats {repeats}", allowed="1 or more of each")
    backends = (drawing.open("none"), drawing.open(against))
    names = (drawing.precision, against)
    longest = [_intermediates(drawing, backend, wanted) for backend in backends]
    pairs: list[PicturePair] = []
    rows: list[Measurement] = []
    for count in wanted:
        say(f"precision: {count} steps")
        runs = [drawing.run(backend, steps=count)[0].image for backend in backends]
        pairs += [
            _pair(RUNS, count, runs[1], runs[0]),
            _pair(INTERMEDIATES, count, longest[1][count], longest[0][count]),
            _pair(APART, count, runs[0], longest[0][count]),
        ]
        timings = interleave(
            {name: _job(drawing, b, count) for name, b in zip(names, backends, strict=True)},
            repeats=repeats,
            warmup=0,
            device=drawing.device,
        )
        rows += _rows(drawing, names, count, timings, pairs[-3:])
    return Precisions(names, pairs, rows)


def _job(drawing: Workload, backend: Backend, count: int) -> Callable[[], object]:
    return lambda: drawing.run(backend, steps=count)


def _intermediates(drawing: Workload, backend: Backend, steps: Sequence[int]) -> dict[int, Image.Image]:
    """The pictures decoded from the latents of one run of the most steps, after each number of steps."""
    settings = GenerateSettings.of(
        seed=drawing.seed,
        size=drawing.size,
        steps=max(steps),
        guidance=drawing.guidance,
        solver=drawing.solver,
    )
    job = Generation(drawing.model, list(drawing.prompts[:1]), settings, backend)
    found = {}
    for state in denoise(backend.unet, [job.row(0)]):
        if state.index + 1 in steps:
            found[state.index + 1] = backend.decode(state.latents_BCHW)[0]
    return found


def _pair(series: str, steps: int, first: Image.Image, second: Image.Image) -> PicturePair:
    return PicturePair(series, steps, first, second, likeness([first], [second]))


def _rows(
    drawing: Workload,
    names: tuple[str, str],
    count: int,
    timings: dict[str, Timing],
    pairs: Sequence[PicturePair],
) -> list[Measurement]:
    own, other = names
    by_series = {pair.series: pair for pair in pairs}
    rows = []
    for name, series, base in ((own, APART, None), (other, RUNS, timings[own])):
        settings = drawing.settings(series=series, against=other, **rounded(by_series[series].likeness))
        rows.append(
            measurement(
                "precision", timings[name], baseline=base, images=1, device=drawing.device,
                precision=name if name in ("bf16", "fp16") else drawing.precision,
                settings=settings | {"steps": count},
                note=f"likeness: {series}",
            )
        )  # fmt: skip
    settings = drawing.settings(
        series=INTERMEDIATES, against=other, **rounded(by_series[INTERMEDIATES].likeness)
    )
    like = rows[-1]
    rows.append(
        Measurement(
            benchmark="precision",
            case=INTERMEDIATES,
            settings=settings | {"steps": count},
            machine=like.machine,
            device=like.device,
            versions=like.versions,
            commit=like.commit,
            date=like.date,
            note="likeness after so many steps of the longest run; not timed",
        )
    )
    return rows
