"""`darkroom bench batch`: batch 1, 2, 4 ... until memory ends, by precision, autocast and backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from darkroom import options
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware import machine
from darkroom.hardware.meters import has_statistics
from darkroom.measure.optimisations import DEVICE_LOST, Metered, StepTimer, Workload, free_memory, why_not
from darkroom.measure.timing import Measurement, Timing, interleave, measurement, peak_memory
from darkroom.sample.backends.backend import Backend
from darkroom.sample.memory import CPU_MARGIN, Needs, count_needs

PRECISIONS = ("float32", "fp16", "bf16")
MOST = 256


@dataclass(frozen=True)
class PrecisionCase:
    """One column of the grid: what the weights are in, whether autocast is on, and what computes."""

    precision: str
    autocast: bool = False
    backend: str = "torch"

    @property
    def name(self) -> str:
        """As a row's case says it."""
        return f"{self.backend} {self.precision}{' autocast' if self.autocast else ''}"

    @property
    def names(self) -> str:
        """The optimisations to get there from float32."""
        parts = ["auto"] if self.backend in ("torch", "compile") else []
        parts += [self.precision] if self.precision != "float32" else []
        return ",".join([*parts, *(["autocast"] if self.autocast else [])]) or "none"


def default_kinds(device: str, backends: Sequence[str] = ("torch",)) -> list[PrecisionCase]:
    """Single, half and bf16 weights, with torch with and without autocast; of each backend what it can do on
    the device: no half on a CPU, where it is refused.
    """
    kind = device.partition(":")[0]
    return [
        PrecisionCase(name, autocast, backend)
        for backend in dict.fromkeys(("torch", *backends))
        for name in PRECISIONS
        if _can(backend, name, kind)
        for autocast in ((False, True) if backend == "torch" else (False,))
    ]


def _can(backend: str, precision: str, device: str) -> bool:
    try:
        options.check_pair(backend, precision, device)
    except InputError:
        # One row says why a backend that cannot be had here is missing.
        return precision == "float32"
    return True


def bench_batch(
    drawing: Workload,
    *,
    kinds: Sequence[PrecisionCase] = (),
    most: int = MOST,
    repeats: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Measurement]:
    """Rows for each batch size and kind, as they come, kinds in turns: latency, images/s, peak memory, joules
    and USD. A kind that runs out of memory or fails gets a row that says so and no larger batch. On a CPU,
    where the system would end the process, what is predicted not to fit is not run, and its row says that.
    """
    if repeats < 1 or most < 1:
        raise InputError(f"repeats {repeats}, most {most}", allowed="1 or more of each")
    return _batch_rows(drawing, kinds or default_kinds(drawing.device), most, repeats, say)


def _batch_rows(
    drawing: Workload, kinds: Sequence[PrecisionCase], most: int, repeats: int, say: Callable[[str], None]
) -> Iterator[Measurement]:
    opened: dict[PrecisionCase, Backend] = {}
    for kind in kinds:
        try:
            opened[kind] = drawing.open(kind.names, kind.backend)
        except DarkroomError as error:
            yield _without(drawing, kind, 1, f"cannot: {error}")
    needs = {
        kind: count_needs(backend.model or drawing.model, drawing.size) for kind, backend in opened.items()
    }
    batch = 1
    while opened and batch <= most:
        say(f"batch {batch}: {', '.join(kind.name for kind in opened)}")
        ready = {}
        for kind, backend in list(opened.items()):
            lack = _lack(drawing, kind, backend, needs[kind], batch)
            if lack:
                yield _without(drawing, kind, batch, lack)
                del opened[kind]
            else:
                ready[kind] = backend
        if ready:
            yield from _measured(drawing, ready, batch, repeats)
        batch *= 2


def _lack(drawing: Workload, kind: PrecisionCase, backend: Backend, needs: Needs, batch: int) -> str:
    """Why a batch does not fit; empty where it does. Running it once is also its warm-up."""
    device = drawing.device
    wanted = int(needs.unet((2 if drawing.guidance > 1 else 1) * batch) * CPU_MARGIN)
    if device == "cpu" and wanted > (free := machine().memory_available_bytes):
        return f"out of memory: {wanted / 1e9:.1f} GB predicted, {free / 1e9:.1f} GB free; not run"
    try:
        drawing.run(backend, num=batch)
    except DEVICE_LOST:
        raise
    except Exception as error:
        lack = why_not(error, f"{kind.name}, batch {batch},")
        del error
        free_memory(device)
        return lack
    return ""


def _measured(
    drawing: Workload, ready: dict[PrecisionCase, Backend], batch: int, repeats: int
) -> list[Measurement]:
    device = drawing.device
    watches = {kind: StepTimer(device) for kind in ready}
    runs = {
        kind: Metered(_job(drawing, backend, batch, watches[kind]), device) for kind, backend in ready.items()
    }
    timings = interleave(
        {kind.name: run for kind, run in runs.items()}, repeats=repeats, warmup=0, device=device
    )
    first = next(iter(timings.values()))
    peaks = {kind: peak_memory(run, device)[1] for kind, run in runs.items()}
    return [
        _row(drawing, kind, batch, timings[kind.name], first, runs[kind], watches[kind], peaks[kind])
        for kind in ready
    ]


def _job(drawing: Workload, backend: Backend, batch: int, watch: StepTimer) -> Callable[[], object]:
    return lambda: drawing.run(backend, num=batch, watch=watch)


def _row(
    drawing: Workload,
    kind: PrecisionCase,
    batch: int,
    timing: Timing,
    first: Timing,
    run: Metered,
    watch: StepTimer,
    peak: int,
) -> Measurement:
    rates = sorted(watch.rates)
    joules = run.median_j(timing.repeats)
    memory = (
        "allocator's peak" if has_statistics(drawing.device) else "resident peak, all kinds' weights in it"
    )
    return measurement(
        "batch",
        timing,
        baseline=None if timing is first else first,
        images=batch * len(drawing.prompts),
        precision=kind.precision,
        device=drawing.device,
        settings=_settings(drawing, kind, batch),
        note=f"end to end; memory: {memory}; energy an image by {run.source}",
        peak_memory_bytes=peak,
        energy_j=None if joules is None else joules / (batch * len(drawing.prompts)),
        steps_per_s=rates[len(rates) // 2] if rates else None,
    )


def _settings(drawing: Workload, kind: PrecisionCase, batch: int) -> dict[str, object]:
    grid = {"batch": batch, "precision": kind.precision, "autocast": kind.autocast, "backend": kind.backend}
    return drawing.settings(**grid)


def _without(drawing: Workload, kind: PrecisionCase, batch: int, note: str) -> Measurement:
    return Measurement(
        benchmark="batch",
        case=kind.name,
        settings=_settings(drawing, kind, batch),
        machine=machine().name,
        device=drawing.device,
        note=note,
    )
