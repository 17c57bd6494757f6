"""`darkroom bench train --model`: the bare step of a whole family on synthetic latents, switch by switch.

No store, no encoders and no loader: moments and text are random numbers on the device, as prepared columns
would give them. What is timed is `train.Step` with clipping off and averaging on, as the recipes pre-train.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from darkroom import models
from darkroom.counting import counting
from darkroom.errors import InputError
from darkroom.hardware import accelerator, machine
from darkroom.hardware.meters import PeakMemory
from darkroom.measure.optimisations import DEVICE_LOST, why_not
from darkroom.measure.timing import Measurement, Timing, measurement, synchronise
from darkroom.models.compiling import compile_blocks, compile_whole
from darkroom.recipe.sections import OptimSettings, TrainSettings
from darkroom.train.objective import FlowObjective, Objective, make_objective
from darkroom.train.optim import Optimiser
from darkroom.train.precision import DTYPES
from darkroom.train.step import Step, make_weights

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
    flops = flops or flops_per_image(bench)
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


def flops_per_image(bench: SwitchedStep) -> int:
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
