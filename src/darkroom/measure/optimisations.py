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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from darkroom.counting import counting
from darkroom.errors import DarkroomError, InputError, is_out_of_memory
from darkroom.hardware import accelerator, machine
from darkroom.hardware.cards import find_card
from darkroom.hardware.meters import EnergyMeter
from darkroom.measure.timing import Measurement, Timing, interleave, measurement, peak_memory, synchronise
from darkroom.picture_settings import MAX_STEPS, GenerateSettings
from darkroom.sample import denoise, generate, optimisations
from darkroom.sample.backends import open_backend
from darkroom.sample.backends.backend import Backend
from darkroom.sample.generate import Generation
from darkroom.sample.likeness import likeness
from darkroom.sample.pictures import DECODE_PICTURES, Picture, decode_pixels, free_on_card

if TYPE_CHECKING:
    from darkroom.models.model import Model


# ---- what the benchmarks of `generate` share: one settled picture job, its clock, energy and work

PROMPTS = ("a photo of an astronaut riding a horse", "a red circle and a blue square on a green background")
PRECISIONS = {torch.float32: "float32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Workload:
    """A picture job as every case of a benchmark does it. Written out in each row's settings."""

    model: Model
    size: tuple[int, int]
    steps: int = 20
    guidance: float = 7.5
    solver: str = "ddim"
    seed: int = 0
    prompts: Sequence[str] = PROMPTS[:1]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps {self.steps}", allowed="1 or more")

    @property
    def device(self) -> str:
        """Where the work is done."""
        return str(self.model.unet.device)  # type: ignore[union-attr]

    @property
    def precision(self) -> str:
        """Of the model's weights as they were given."""
        return PRECISIONS[self.model.unet.dtype]  # type: ignore[union-attr]

    def settings(self, **more: Any) -> dict[str, Any]:
        """What a row says of the job."""
        width, height = self.size
        pixels = decode_pixels(free_on_card(torch.device(self.device)))
        at_once = max(1, min(DECODE_PICTURES, pixels // (width * height)))
        return {
            "model": self.model.family,
            "size": f"{width}x{height}",
            "steps": self.steps,
            "solver": self.solver,
            "guidance": self.guidance,
            "pictures_a_decode": at_once,
            "threads": torch.get_num_threads(),
            **more,
        }

    def open(self, names: str, backend: str = "torch") -> Backend:
        """The model with optimisations in place."""
        return open_backend(backend, self.model, optimise=names, notice=lambda _: None)

    def run(
        self, backend: Backend, *, num: int = 1, watch: StepTimer | None = None, **changes: Any
    ) -> list[Picture]:
        """End to end: text, steps, pictures."""
        settings: dict[str, Any] = {
            "size": self.size,
            "steps": self.steps,
            "guidance": self.guidance,
            "solver": self.solver,
            "seed": self.seed,
        } | changes
        return generate(
            self.model,
            list(self.prompts),
            num=num,
            batch_rows=num * len(self.prompts),
            backend=backend,
            progress=watch,
            notice=lambda _: None,
            **settings,
        )

    def flops_per_image(self) -> int:
        """Of all U-Net calls and the decoder, as the plain job does them; 2 FLOP a multiply-add."""
        unet, vae = self.model.unet, self.model.vae
        rows = 2 if self.guidance > 1 else 1
        given = _meta_inputs(self.model, self.size)
        with counting(unet) as counter, torch.no_grad():
            x, t, text, added = counter.fake(given)
            unet(x, t, encoder_hidden_states=text, added_cond_kwargs=added or None)  # type: ignore[misc]
            step = counter.result().flops
        latents = given[0][:, : self.model.latent_channels].clone()
        with counting(vae) as counter, torch.no_grad():
            vae.decode(counter.fake(latents))  # type: ignore[union-attr]
            return rows * self.steps * step + counter.result().flops


def _meta_inputs(model: Model, size: tuple[int, int]) -> tuple[Any, ...]:
    config: Any = model.unet.config  # type: ignore[union-attr]
    dtype = model.unet.dtype  # type: ignore[union-attr]
    sides = (size[1] // model.vae_factor, size[0] // model.vae_factor)
    added: dict[str, torch.Tensor] = {}
    if model.is_sdxl:
        pooled = int(config.projection_class_embeddings_input_dim) - 6 * int(config.addition_time_embed_dim)
        added = {
            "text_embeds": torch.empty(1, pooled, dtype=dtype, device="meta"),
            "time_ids": torch.empty(1, 6, device="meta"),
        }
    x = torch.empty(1, int(config.in_channels), *sides, dtype=dtype, device="meta")
    text = torch.empty(1, 77, int(config.cross_attention_dim), dtype=dtype, device="meta")
    return x, torch.empty(1, device="meta"), text, added


@dataclass
class StepTimer:
    """Times the steps of runs, from the end of the first step to the end of the last, device synchronised."""

    device: str
    rates: list[float] = field(default_factory=list)
    """Steps a second of each run; a run of one step has none."""
    _first: tuple[int, float] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._first is not None and done != total:
            return
        synchronise(self.device)
        now = time.perf_counter()
        if self._first is None:
            self._first = (done, now)
        if done == total:
            steps = round(total / self._first[0]) - 1
            if steps:
                self.rates.append(steps / (now - self._first[1]))
            self._first = None


class Metered:
    """A call that notes the joules of each time it is called."""

    def __init__(self, call: Callable[[], object], device: str) -> None:
        here = machine()
        on_card = bool(here.devices) and not device.startswith("cpu")
        card = find_card(here.devices[0].name if on_card else here.cpu_class)
        units = 1 if on_card else max(1, round(here.usable_cores))
        self._call = call
        self._meter = EnergyMeter(device, power_w=card.power_w if card else None, num_devices=units)
        self.joules: list[float] = []

    def __call__(self) -> None:
        before = self._meter.joules()
        self._call()
        self.joules.append(self._meter.joules() - before)

    def median_j(self, repeats: int) -> float | None:
        """Of the latest `repeats` calls; None where nothing is known of the device's power."""
        some = sorted(self.joules[-repeats:])
        return some[len(some) // 2] if some and self.source != "unknown" else None

    @property
    def source(self) -> str:
        """Where the joules come from."""
        return self._meter.source


# ---- optimisations one by one, and stacked

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
STARTS = ("compile", "compile_regional", "cuda_graphs")
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
