"""`darkroom bench train`: what the loop of `darkroom.train` costs over the bare step (forward, backward,
optimiser); and with `--model` the bare step of a whole family on synthetic latents, switch by switch.
And where one iteration's time goes.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from darkroom import models
from darkroom.counting import counting
from darkroom.errors import InputError
from darkroom.hardware import accelerator, machine
from darkroom.hardware.accelerator import allocated_bytes
from darkroom.hardware.machine import environment
from darkroom.hardware.meters import PeakMemory, has_statistics, resident_bytes
from darkroom.measure.optimisations import DEVICE_LOST, why_not
from darkroom.measure.timing import Measurement, Timing, measurement, synchronise
from darkroom.models.compiling import compile_blocks, compile_whole
from darkroom.recipe.recipe import read_recipe
from darkroom.recipe.rules import own_rate
from darkroom.recipe.sections import OptimSettings, TrainSettings
from darkroom.run import Run
from darkroom.train.jobs import Pinned, TrainingSetup, flops_per_image
from darkroom.train.objective import FlowObjective, Objective, make_objective
from darkroom.train.optim import Optimiser
from darkroom.train.precision import DTYPES
from darkroom.train.ranks import Ranks
from darkroom.train.setup import make_job
from darkroom.train.step import Step, make_weights, micro_batches, num_rows
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


# ---- a whole family's step
#
# No store, no encoders and no loader: moments and text are random numbers on the device, as prepared columns
# would give them. What is timed is `train.Step` with clipping off and averaging on, as the recipes pre-train.

SWITCHES = ("bf16", "channels_last", "fused_adamw", "compile", "compile_regional", "checkpointing")
LADDER: tuple[str, ...] = ("plain", "bf16", "bf16,channels_last", "bf16,channels_last,fused_adamw")
LADDER += ("bf16,channels_last,fused_adamw,compile", "bf16,channels_last,fused_adamw,checkpointing")
MOST_ROWS = 512
TOKENS = 77
GAIN = 1.03  # a doubled batch must bring at least so much to be worth its memory

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Loss:
    """The diffusion loss of a U-Net on given latents and text."""

    unet: Any
    objective: Objective | FlowObjective

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The objective's loss of each row [B], by diffusers' U-Net called as it is."""
        t_b = inputs["t"]
        latents, noise, dtype = inputs["latents"], inputs["noise"], self.unet.dtype
        added = {key: inputs[name] for key, name in _ADDED.items() if name in inputs}
        out = self.unet(
            self.objective.add_noise(latents, noise, t_b).to(dtype),
            t_b,
            encoder_hidden_states=inputs["text"].to(dtype),
            added_cond_kwargs={key: value.to(dtype) for key, value in added.items()} or None,
            return_dict=False,
        )[0]
        return {"loss": self.objective.loss(out, self.objective.target(latents, noise, t_b), t_b)}


_ADDED = {"text_embeds": "pooled", "time_ids": "time_ids"}


class SwitchedStep:
    """One case: a fresh model and step with its switches."""

    def __init__(self, family: str, resolution: int, case: str, device: str, unet: Mapping[str, Any]) -> None:
        switches = set() if case == "plain" else set(case.split(","))
        denoiser = models.FAMILIES[family].denoiser
        model = models.create(
            family, parts=("unet",), device=device, overrides={denoiser: dict(unet)} if unet else None
        )
        assert model.unet is not None
        self.unet, self.resolution, self.device = model.unet, resolution, device
        self.factor = 2 ** (len(models.FAMILIES[family].vae["block_out_channels"]) - 1)
        self.precision: Literal["float32", "bf16"] = "bf16" if "bf16" in switches else "float32"
        self.unet.train().requires_grad_(True)
        if "channels_last" in switches:
            self.unet.to(memory_format=torch.channels_last)
        if "checkpointing" in switches:
            self.unet.enable_gradient_checkpointing()
        self.task = _Loss(self.unet, make_objective(model.scheduler, device=device))
        self.step = Step(
            self.task,
            make_weights({"unet": self.unet}, DTYPES[self.precision]),
            train=TrainSettings(steps=10**6, global_batch=1),
            optim=OptimSettings(clip_norm=None, lr=1e-6),
            micro_batch=MOST_ROWS,
        )
        if "fused_adamw" not in switches:
            groups = [
                {k: group[k] for k in ("params", "lr", "weight_decay", "peak_lr", "rate")}
                for group in self.step.optimiser.param_groups
            ]
            plain = torch.optim.AdamW(groups, foreach=True)
            self.step.optimiser = Optimiser([plain])
        if "compile" in switches:
            compile_whole(self.unet)
        if "compile_regional" in switches:
            compile_blocks(self.unet)

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """Random latents and text of so many pictures."""
        config, side = self.unet.config, self.resolution // self.factor
        made = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(rows, *shape, device=self.device, generator=made)

        width = config.cross_attention_dim
        found = {
            "latents": normal(config.in_channels, side, side),
            "noise": normal(config.in_channels, side, side),
            "t": self.task.objective.timesteps(torch.rand(rows, dtype=torch.float64)).to(self.device),
            "text": normal(TOKENS, width if isinstance(width, int) else width[0]),
        }
        if config.get("addition_embed_type") == "text_time":
            time_width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            found["pooled"] = normal(time_width)
            sizes = [self.resolution, self.resolution, 0, 0, self.resolution, self.resolution]
            found["time_ids"] = torch.tensor([sizes] * rows, device=self.device, dtype=torch.float32)
        return found

    def seconds(self, inputs: Mapping[str, Tensor], k: int) -> float:
        """Of one step."""
        synchronise(self.device)
        start = time.perf_counter()
        self.step(k, inputs)
        synchronise(self.device)
        return time.perf_counter() - start


def bench_pretraining(
    family: str,
    *,
    resolution: int | None = None,
    batch: int | Literal["auto"] = "auto",
    cases: Sequence[str] = (),
    repeats: int = 7,
    warmup: int = 3,
    device: str = "auto",
    unet: Mapping[str, Any] | None = None,
    say: Say = lambda _: None,
) -> Iterator[Measurement]:
    """A row for each case, as they come: images/s, MFU, peak memory, and the time against the first case's.

    A case is `plain` or switches with commas. `batch` auto: doubled until memory ends or it brings nothing;
    what compiles takes the batch of the case before, for each size is compiled anew, in minutes.
    `unet` changes the family's U-Net. A case that finds no memory or fails is a row that says so.
    InputError names what is unknown.
    """
    if family not in models.FAMILIES:
        raise InputError(f"--model {family}", allowed=", ".join(models.FAMILIES))
    cases = tuple(cases) or LADDER
    unknown = [name for case in cases for name in case.split(",") if name not in (*SWITCHES, "plain")]
    if unknown:
        raise InputError(f"case '{unknown[0]}'", allowed=f"plain, or of {', '.join(SWITCHES)} with commas")
    place = str(models.device(device))
    side = resolution or models.FAMILIES[family].vae.get("sample_size", 512)
    asked = _Asked(family, side, place, unet or {}, batch, repeats, warmup)
    return _pretraining_rows(asked, cases, say)


@dataclass(frozen=True)
class _Asked:
    """What every case of a benchmark shares."""

    family: str
    resolution: int
    device: str
    unet: Mapping[str, Any]
    batch: int | Literal["auto"]
    repeats: int
    warmup: int


def _pretraining_rows(asked: _Asked, cases: Sequence[str], say: Say) -> Iterator[Measurement]:
    first: Timing | None = None
    flops = taken = 0
    for case in cases:
        compiles = {"compile", "compile_regional"} & set(case.split(","))
        now = replace(asked, batch=taken) if taken and compiles and asked.batch == "auto" else asked
        try:
            row, timing, flops = _case(now, case, first, flops)
            taken = int(row.settings["batch"])
        except DEVICE_LOST:
            raise
        except Exception as error:
            settings = {"model": asked.family, "resolution": asked.resolution}
            here = machine().name
            note = why_not(error, case)
            row = Measurement(benchmark="pretrain", case=case, settings=settings, machine=here, note=note)
            timing = None
        _forget()
        first = first or timing
        say(_line(row))
        yield row


def _case(asked: _Asked, case: str, first: Timing | None, flops: int) -> tuple[Measurement, Timing, int]:
    """Its row and timing, and FLOPs a picture, which are counted where no case before did."""
    bench = SwitchedStep(asked.family, asked.resolution, case, asked.device, asked.unet)
    found, taken, peak = _time(bench, case, asked.batch, asked.repeats, asked.warmup)
    timing = Timing(case, tuple(s / taken for s in found.seconds), found.warmup_s, found.load_average)
    flops = flops or _flops_of_family(bench)
    return _row(bench, timing, first or timing, asked.family, taken, peak, flops), timing, flops


def _line(row: Measurement) -> str:
    if row.median_s is None:
        return f"{row.case}: {row.note}"
    share = "" if row.mfu is None else f", MFU {100 * row.mfu:.1f} %"
    peak = (row.peak_memory_bytes or 0) / 2**30
    batch = row.settings["batch"]
    return f"{row.case}: {row.images_per_s:,.2f} images/s at {batch} a step{share}, {peak:.1f} GiB"


def _time(
    bench: SwitchedStep, case: str, batch: int | Literal["auto"], repeats: int, warmup: int
) -> tuple[Timing, int, int]:
    started = time.perf_counter()
    rows = _largest(bench) if batch == "auto" else batch
    inputs = bench.inputs(rows)
    for i in range(warmup):
        bench.seconds(inputs, i)
    warm_s = time.perf_counter() - started
    peak = PeakMemory(bench.device)
    seconds = tuple(bench.seconds(inputs, warmup + i) for i in range(repeats))
    return Timing(case, seconds, warm_s, None), rows, peak.bytes()


def _largest(bench: SwitchedStep) -> int:
    """Doubled while it fits and makes a picture cheaper."""
    rows, best_s = 1, float("inf")
    while rows <= MOST_ROWS:
        try:
            inputs = bench.inputs(rows)
            bench.seconds(inputs, 0)
            each_s = bench.seconds(inputs, 1) / rows
        except torch.OutOfMemoryError:
            break
        if each_s * GAIN > best_s:
            return rows // 2
        best_s, rows = each_s, rows * 2
    _forget()
    return max(1, rows // 2)


def _forget() -> None:
    gc.collect()
    accelerator.empty_cache()


def _flops_of_family(bench: SwitchedStep) -> int:
    """FLOPs of one picture's forward and backward pass, attention included."""
    plainly: Any = torch.compiler.set_stance
    with plainly("force_eager"), counting(bench.unet) as counter:
        loss = bench.task.losses(counter.fake(bench.inputs(1)))["loss"]
        torch.autograd.backward(loss.sum())
        return counter.result().flops


def _row(
    bench: SwitchedStep, timing: Timing, first: Timing, family: str, rows: int, peak: int, flops: int
) -> Measurement:
    return measurement(
        "pretrain",
        timing,
        baseline=first,
        images=1,
        steps=1 / rows,
        flops_per_image=flops,
        precision=bench.precision,
        device=bench.device,
        note="seconds of one picture; synthetic latents and text; cases one after the other; EMA on",
        settings={
            "model": family,
            "resolution": bench.resolution,
            "batch": rows,
            "precision": bench.precision,
            "parameters": sum(master.numel() for master in bench.step.weights.masters.values()),
            "threads": torch.get_num_threads(),
        },
        peak_memory_bytes=peak,
    )


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
