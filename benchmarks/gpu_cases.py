"""The worker of benchmarks/gpu.py: makes the cases that it is told, each row on the disk at once.

Says BEGIN NAME and END HOW on its standard output, and FULL where the time left is too short for the next.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import torch

from darkroom import models
from darkroom.errors import InputError
from darkroom.hardware import machine
from darkroom.hardware.meters import PeakMemory
from darkroom.libraries import quiet
from darkroom.measure.optimisations import DEVICE_LOST, Workload, bench_optimisations, free_memory, why_not
from darkroom.measure.pretraining import SwitchedStep, bench_pretraining
from darkroom.measure.timing import Measurement, Timing, append_csv, measurement, synchronise
from darkroom.models.tokenizer import tokenizer_or_stand_in

BENCHMARK = "gpu-case"
HALF = {"cuda": ("fp16", torch.float16), "cpu": ("bf16", torch.bfloat16)}
FAST = "bf16,channels_last,fused_adamw"
TINY_UNET = {
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "layers_per_block": 1,
}
TINY = {"unet": TINY_UNET, "vae": {"block_out_channels": [8, 16, 16]}}
LOG = logging.getLogger("darkroom.benchmarks")
Rows = Iterator[Measurement]


@dataclass
class Lab:
    """The device, and the models that lie on it."""

    device: str
    tiny: bool
    out: Path
    _models: dict[str, models.Model] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def half(self) -> str:
        return HALF["cuda" if self.on_cuda else "cpu"][0]

    def model(self, family: str, precision: str = "") -> models.Model:
        """Random weights, made on the device; one model at a time stays."""
        name = f"{family} {precision or self.half}"
        if name not in self._models:
            self._models.clear()
            free_memory(self.device)
            if self.tiny:
                model = models.create("tiny", device=self.device, overrides=TINY)
            else:
                stand_in = tokenizer_or_stand_in()
                model = models.create(family, device=self.device, tokenizer=stand_in)
            with quiet():
                model.to(self.device, models.precision(precision or self.half))
            self._models[name] = model
        return self._models[name]

    def drawing(self, family: str, side: int, precision: str = "", **more: Any) -> Workload:
        """A picture job on such a model."""
        side = 32 if self.tiny else side
        told = {"steps": 3 if self.tiny else 30, "guidance": 7.5, **more}
        if "prompts" in told:
            told["prompts"] = [f"a photograph of a horse, {n}" for n in range(told["prompts"])]
        return Workload(self.model(family, precision), (side, side), **told)

    def forget(self) -> None:
        """Nothing of earlier cases stays on the device."""
        self._models.clear()
        torch.compiler.reset()
        free_memory(self.device)

    def row(self, benchmark: str, case: str, seconds: Iterable[float] = (), **more: Any) -> Measurement:
        """A row of seconds, or of none where something was only tried."""
        told, place = tuple(seconds), {"machine": machine().name, "device": self.device}
        if not told:
            return Measurement(benchmark=benchmark, case=case, **place, **more)
        return measurement(benchmark, Timing(case, told, 0.0, None), device=self.device, **more)


def timed(lab: Lab, call: Callable[[], object], repeats: int = 5, warmup: int = 2) -> list[float]:
    """Seconds of each repeat, the device waited for."""
    found = []
    for number in range(warmup + repeats):
        synchronise(lab.device)
        start = time.perf_counter()
        call()
        synchronise(lab.device)
        if number >= warmup:
            found.append(time.perf_counter() - start)
    return found


def tried(lab: Lab, benchmark: str, paths: dict[str, Callable[[], object]]) -> Rows:
    """A row for each path: how long it took once, or why it failed."""
    for name, path in paths.items():
        start = time.perf_counter()
        try:
            found = path()
            synchronise(lab.device)
            said = found if isinstance(found, dict) else {}
            yield lab.row(benchmark, name, [time.perf_counter() - start], note="works", settings=said)
        except DEVICE_LOST:
            raise
        except Exception as error:
            yield lab.row(benchmark, name, note=why_not(error, name))
            del error
        free_memory(lab.device)


def contained(lab: Lab, benchmark: str, case: str, measure: Callable[..., Measurement], *given: Any) -> Rows:
    """One row of several: where it fails it says why, and the others follow."""
    try:
        yield measure(*given)
    except DEVICE_LOST:
        raise
    except Exception as error:
        yield lab.row(benchmark, case, note=why_not(error, case))
        del error
    free_memory(lab.device)


# ---- every path once


def smoke(lab: Lab) -> Rows:
    """On a tiny model whatever the device: what breaks, in seconds."""
    paths = {**_training_paths(lab), **_drawing_paths(lab)}
    yield from tried(lab, "gpu-smoke", {name: path for name, path in paths.items() if name != COMPILES})


COMPILES = "train bf16 adamw8bit"
"""torchao compiles its step on a card."""


def _training_paths(lab: Lab) -> dict[str, Callable[[], object]]:
    from darkroom.recipe.sections import OptimSettings, TrainSettings
    from darkroom.train.precision import DTYPES
    from darkroom.train.step import Step, make_weights

    def step(precision: str, family: str = "tiny", micro: int = 2, optim: Any = None, **train: Any) -> Any:
        unet = TINY_UNET if family == "tiny" else {"num_layers": 2}
        switched = SwitchedStep(family, 32, "plain", lab.device, unet)
        if train.pop("checkpointing", False):
            switched.unet.enable_gradient_checkpointing()
        switched.step = Step(
            switched.task,
            make_weights({"unet": switched.unet}, DTYPES[precision]),  # type: ignore[index]
            train=TrainSettings(steps=10, global_batch=4, micro_batch=micro, **train),
            optim=OptimSettings(lr=1e-4, **(optim or {})),
            micro_batch=micro,
        )
        inputs = switched.inputs(4)
        losses = [float(switched.step(k, inputs).losses["loss"]) for k in range(3)]
        if not all(loss == loss for loss in losses):
            raise ValueError(f"losses {losses}")
        return {"losses": losses}

    precisions = ("float32", "bf16", "fp16") if lab.on_cuda else ("float32", "bf16")
    paths: dict[str, Callable[[], object]] = {
        f"train {name} {family}": lambda name=name, family=family: step(name, family)  # type: ignore[misc]
        for name in precisions
        for family in ("tiny", "tiny-dit")
    }
    for name in get_args(OptimSettings.model_fields["name"].annotation):
        paths[f"train bf16 {name}"] = lambda name=name: step("bf16", optim={"name": name})  # type: ignore[misc]
    paths["train bf16 checkpointing"] = lambda: step("bf16", checkpointing=True)
    paths["train bf16 one micro-batch"] = lambda: step("bf16", micro=4)
    paths["train bf16 fused_backward"] = lambda: step(
        "bf16", micro=4, optim={"fused_backward": True, "clip_norm": None}
    )
    paths["train bf16 skip"] = lambda: step("bf16", nonfinite_policy="skip")
    paths["train float32 as on the CPU"] = lambda: _steps_as_on_the_cpu(lab)
    return paths


NEAR = 0.01
"""Relative: other kernels sum in other orders."""


def _steps_as_on_the_cpu(lab: Lab) -> dict[str, Any]:
    """Losses and gradients of the same weights and inputs on both; where they part, gradients are wrong."""
    here, there = (SwitchedStep("tiny", 32, "plain", device, TINY_UNET) for device in (lab.device, "cpu"))
    there.step.weights.load({name: value.cpu() for name, value in here.step.weights.masters.items()})
    inputs = here.inputs(4)
    on_cpu = {name: value.cpu() for name, value in inputs.items()}
    told: dict[str, Any] = {"loss": [], "grad_norm": []}
    for k in range(3):
        one, other = here.step(k, inputs), there.step(k, on_cpu)
        pairs = {
            "loss": (float(one.losses["loss"]), float(other.losses["loss"])),
            "grad_norm": (float(one.grad_norm), float(other.grad_norm)),
        }
        for name, (found, expected) in pairs.items():
            told[name].append([found, expected])
            if not abs(found - expected) <= NEAR * abs(expected):
                raise ValueError(f"{name} of step {k}: {found} here, {expected} on the CPU")
    return told


def _drawing_paths(lab: Lab) -> dict[str, Callable[[], object]]:
    from darkroom.sample.choice import SOLVERS

    def draw(names: str, precision: str = lab.half, **settings: Any) -> Any:
        model = lab.model("tiny" if lab.tiny else "sd15", precision)
        drawing = Workload(model, (32, 32) if lab.tiny else (128, 128), steps=3)
        backend = drawing.open(names)
        pictures = drawing.run(backend, num=2, **settings)
        return {"in_place": ",".join(backend.optimised), "pictures": len(pictures)}

    names = (
        "none",
        "auto",
        "channels_last",
        "fused_qkv",
        "fused_norm",
        "attention_slicing",
        "vae_slicing",
        "vae_tiling:64",
    )
    names += ("guidance_interval", "feature_cache", "offload_model", "offload_group")
    names += ("offload_sequential", "int8", "fp8")
    paths: dict[str, Callable[[], object]] = {
        f"draw {name}": lambda name=name: draw(name)  # type: ignore[misc]
        for name in names
    }
    paths |= {f"draw {solver}": lambda solver=solver: draw("auto", solver=solver) for solver in SOLVERS}  # type: ignore[misc]
    paths["draw float32"] = lambda: draw("auto", "float32")
    paths["draw bf16"] = lambda: draw("auto", "bf16")
    paths["draw float32 as on the CPU"] = lambda: _pictures_as_on_the_cpu(lab)
    if lab.on_cuda:
        paths["draw fused_norm as without"] = lambda: _pictures_with_fused_norm(lab)
    paths["draw with a LoRA and a ControlNet"] = lambda: _steered(lab)
    paths["serve mixed rounds"] = lambda: _rounds(lab)
    return paths


def _steered(lab: Lab) -> dict[str, Any]:
    """A LoRA and a ControlNet of random weights from their files, each of which changes the picture."""
    import diffusers
    from PIL import Image

    from darkroom.measure.pipeline_server import make_adapters
    from darkroom.sample import Control, generate

    model, side = lab.model("tiny" if lab.tiny else "sd15"), 32 if lab.tiny else 128
    described: Any = model.unet
    channels = (16, 32, 96, 256)[: model.vae_factor.bit_length()]
    net = diffusers.ControlNetModel.from_unet(described, conditioning_embedding_out_channels=channels)
    for weight in net.parameters():
        weight.data.add_(0.02 * torch.randn_like(weight))

    def draw(**more: Any) -> Any:
        told = {"seed": 1, "steps": 3, "size": (side, side), "notice": lambda _: None}
        return generate(model, "a red circle", **told, **more)[0].image

    with tempfile.TemporaryDirectory() as place, quiet():
        folder = Path(place)
        net.save_pretrained(str(folder / "net"))
        [name] = make_adapters(model, folder, 1, seed=0)
        adapters = {name: folder / f"{name}.safetensors"}
        control = Control(folder / "net", Image.linear_gradient("L").convert("RGB"))
        plain, adapted = draw(), draw(adapters=adapters)
        both = draw(adapters=adapters, controls=[control])
    told = {"lora": _difference(plain, adapted), "net": _difference(adapted, both)}
    if not min(told.values()) > 0:
        raise ValueError(f"levels that each changed: {told}")
    return told


ALIKE = 0.25
"""Share of the levels between two seeds that pictures of one seed may differ by in the mean."""


def _difference(one: Any, other: Any) -> float:
    from PIL import ImageChops, ImageStat

    return max(ImageStat.Stat(ImageChops.difference(one, other)).mean)


def _pictures_as_on_the_cpu(lab: Lab) -> dict[str, Any]:
    """The same pictures of the same weights on both."""
    from darkroom.sample import generate

    model = models.create("tiny", overrides=TINY if lab.tiny else None)
    prompts, told = ["a horse", "a red circle"], {"steps": 4, "size": (32, 32), "notice": lambda _: None}
    on_cpu = generate(model, prompts, **told)  # type: ignore[arg-type]
    others = generate(model, prompts, seed=9, **told)  # type: ignore[arg-type]
    found = generate(model.to(lab.device), prompts, **told)  # type: ignore[arg-type]
    far = max(_difference(a.image, b.image) for a, b in zip(found, on_cpu, strict=True))
    seeds = min(_difference(a.image, b.image) for a, b in zip(others, on_cpu, strict=True))
    if not far <= ALIKE * seeds:
        raise ValueError(f"{far:.1f} levels between here and the CPU, {seeds:.1f} between two seeds")
    return {"levels": far, "levels_between_seeds": seeds}


LOSSLESS_LEVELS = 2.0
"""Of 255, in the mean of a picture: what an optimisation that calls itself lossless may move in float32."""


def _pictures_with_fused_norm(lab: Lab) -> dict[str, Any]:
    """Pictures in float32 with the kernels of `fused_norm` and with PyTorch's own operations."""
    levels: dict[str, Any] = {}
    for family in ("tiny",) if lab.tiny else ("sd15", "sd2"):
        drawing = lab.drawing(family, 256, "float32", steps=4, prompts=3)
        plain, fused, other = (
            drawing.run(drawing.open(names), seed=seed)
            for names, seed in (("fused_attention", 0), ("fused_norm", 0), ("fused_attention", 9))
        )
        far = max(_difference(a.image, b.image) for a, b in zip(plain, fused, strict=True))
        seeds = min(_difference(a.image, b.image) for a, b in zip(plain, other, strict=True))
        levels[family], levels[f"{family}, two seeds"] = far, seeds
        if far > LOSSLESS_LEVELS or seeds <= LOSSLESS_LEVELS:
            raise ValueError(f"{far:.2f} levels with fused_norm, {seeds:.1f} between two seeds")
    return levels


def _rounds(lab: Lab) -> dict[str, Any]:
    """The server's engine with rows that join and leave: what `darkroom serve` runs, without HTTP.

    Each picture is compared with the lone one: what one stream hands to another too early shows here.
    """
    from darkroom.sample import generate
    from darkroom.serve.engine.batch import places_for
    from darkroom.serve.engine.loop import Engine
    from darkroom.serve.engine.runner import settings_of, shape_of
    from darkroom.serve.engine.tickets import EngineJob
    from darkroom.serve.metrics import Metrics
    from darkroom.serve.request import PictureRequest

    over: dict[str, BaseException | None] = {}

    class Ends:
        def began(self, work: EngineJob) -> None: ...
        def drawn(self, work: EngineJob, index: int) -> None: ...
        def made(self, work: EngineJob) -> None:
            over[work.uid] = None

        def failed(self, work: EngineJob, error: BaseException) -> None:
            over[work.uid] = error

    drawing = lab.drawing("tiny" if lab.tiny else "sd15", 64)
    backend, draw = drawing.open("fused_attention,lean"), random.Random(0)
    model = backend.model or drawing.model
    unit = 16 if lab.tiny else 64
    engine = Engine(model, backend, capacity=8, metrics=Metrics(), places=places_for(backend.device, 1, 1))
    engine.start()
    works: list[EngineJob] = []
    try:
        for i in range(12):
            side = unit * draw.choice((1, 2))
            request = PictureRequest(
                prompt=draw.choice(("a horse", "a red circle")),
                seed=i,
                steps=draw.randint(1, 6),
                width=side,
                height=unit,
            )
            works.append(EngineJob(str(i), "key", request, shape_of(model, request), Ends()))
            engine.submit(works[-1])
        end = time.monotonic() + 60
        while len(over) < 12 and engine.trouble is None and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        engine.stop()
    if engine.trouble or len(over) < 12:
        raise RuntimeError(engine.trouble or f"{len(over)} of 12 pictures in a minute")
    for error in over.values():
        if error is not None:
            raise error

    def lone(request: PictureRequest, seed: int) -> Any:
        told = settings_of(request).model_dump(exclude={"num"}) | {"seed": seed}
        return generate(model, request.prompt, backend=backend, notice=lambda _: None, **told)[0].image

    pairs = [(work.pictures[0].image, lone(work.request, work.request.seed or 0)) for work in works]
    far = max(_difference(*pair) for pair in pairs)
    seeds = min(_difference(one, lone(w.request, 99)) for (_, one), w in zip(pairs, works, strict=True))
    if far > ALIKE * seeds:
        raise ValueError(f"{far:.1f} levels from lone pictures, {seeds:.1f} between two seeds")
    return {"pictures": len(over), "step_s": engine.step_s, "levels": far, "levels_between_seeds": seeds}


def smoke_compile(lab: Lab) -> Rows:
    """What compiles and captures, with the graph breaks and recompiles that sizes bring."""
    from torch._dynamo.utils import counters

    def draw(names: str) -> dict[str, Any]:
        torch.compiler.reset()
        counters.clear()
        drawing = Workload(
            lab.model("tiny" if lab.tiny else "sd15"), (32, 32) if lab.tiny else (128, 128), steps=2
        )
        backend = drawing.open(names)
        unit = drawing.size[0]
        sizes = ((unit, unit), (2 * unit, unit), (unit, 2 * unit))
        for size in sizes[:1] if lab.tiny else sizes:  # a CPU compiles each for half a minute
            for num in (1,) if lab.tiny else (1, 2):
                drawing.run(backend, num=num, size=size)
        return {
            "graphs": counters["stats"].get("unique_graphs", 0),
            "graph_breaks": sum(counters["graph_break"].values()),
            "recompiles": sum(counters["recompiles"].values()),
        }

    def train(case: str) -> dict[str, Any]:
        torch.compiler.reset()
        counters.clear()
        switched = SwitchedStep("tiny", 32, case, lab.device, TINY_UNET)
        for k in range(3):
            switched.step(k, switched.inputs(2))
        return {
            "graphs": counters["stats"].get("unique_graphs", 0),
            "graph_breaks": sum(counters["graph_break"].values()),
        }

    names = ["compile_regional", "compile"]
    if lab.on_cuda:
        names = ["cuda_graphs", *names, "compile_regional,cuda_graphs", "compile,cuda_graphs"]
    paths: dict[str, Callable[[], object]] = {f"draw {n}": lambda n=n: draw(n) for n in names}  # type: ignore[misc]
    for case in (f"{FAST},compile", f"{FAST},compile_regional"):
        paths[f"train {case}"] = lambda case=case: train(case)  # type: ignore[misc]
    yield from tried(lab, "gpu-smoke", paths | {COMPILES: _training_paths(lab)[COMPILES]})


# ---- the device by itself


def card(lab: Lab) -> Rows:
    """What it reaches in the operations that U-Nets are made of; a share of the peak where that is known.

    Convolutions in both layouts and attention by each kernel are what decides `channels_last` and whether
    PyTorch's own choice of a kernel stands.
    """
    dtype = HALF["cuda" if lab.on_cuda else "cpu"][1]
    side = 256 if lab.tiny else 8192
    a = torch.randn(side, side, device=lab.device, dtype=dtype)
    big = torch.randn(2**20 if lab.tiny else 2**28, device=lab.device)
    calls: dict[str, tuple[Callable[[], object], float, str]] = {
        "product": (lambda: a @ a, 2.0 * side**3, "FLOP/s"),
        "bandwidth": (lambda: big.mul_(1.0), 8.0 * big.numel(), "bytes/s"),
        "launch": (lambda: [a[:1, :1].mul_(1.0) for _ in range(1000)], 1000.0, "kernels/s"),
        **_convolutions(lab, dtype),
    }

    def rate_of(name: str) -> Measurement:
        call, work, unit = calls[name]
        seconds = timed(lab, call)
        rate = {"rate": work / min(seconds), "unit": unit, "dtype": str(dtype)}
        return lab.row("gpu-card", name, seconds, settings=rate)

    for name in calls:
        yield from contained(lab, "gpu-card", name, rate_of, name)
    yield from _attentions(lab, dtype)


def _convolutions(lab: Lab, dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], float, str]]:
    """Forward and backward in both layouts, as in a training step."""
    rows, channels = (1, 64) if lab.tiny else (16, 640)
    work, found = 6.0 * rows * channels**2 * 9 * 32 * 32, {}
    for layout in (torch.contiguous_format, torch.channels_last):
        module = torch.nn.Conv2d(channels, channels, 3, padding=1, device=lab.device, dtype=dtype)
        x = torch.randn(rows, channels, 32, 32, device=lab.device, dtype=dtype)
        x = x.to(memory_format=layout).requires_grad_()
        module.to(memory_format=layout)  # type: ignore[call-overload]
        name = "convolution, channels last" if layout is torch.channels_last else "convolution"

        def call(module: Any = module, x: torch.Tensor = x) -> None:
            module(x).sum().backward()

        found[name] = (call, work, "FLOP/s")
    return found


NO_KERNEL = ("No viable backend", "No available kernel")
"""What PyTorch says where a kernel does not take a shape, or is not of the device."""


def _attentions(lab: Lab, dtype: torch.dtype) -> Rows:
    """PyTorch's own choice against each kernel, at SD 1.5's, SD 2's and SDXL's heads and places."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "as PyTorch chooses": None,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    rows = 1 if lab.tiny else 8
    for heads, places, width in ((8, 4096, 40), (5, 4096, 64), (10, 4096, 64), (8, 1024, 80)):
        length = 64 if lab.tiny else places
        q = torch.randn(rows, heads, length, width, device=lab.device, dtype=dtype, requires_grad=True)

        def both(q: torch.Tensor = q) -> None:
            torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()  # type: ignore[no-untyped-call]

        def forward(q: torch.Tensor = q) -> None:
            with torch.no_grad():
                torch.nn.functional.scaled_dot_product_attention(q, q, q)

        for (name, kernel), (call, pass_flops, also) in product(
            kernels.items(), ((both, 14.0, ""), (forward, 4.0, ", forward"))
        ):
            case = f"attention {heads} x {length} x {width}, {name}{also}"
            try:
                with nullcontext() if kernel is None else sdpa_kernel(kernel):
                    seconds = timed(lab, call)
            except DEVICE_LOST:
                raise
            except Exception as error:  # a kernel that does not take this shape, or is not of this device
                none = any(words in str(error) for words in NO_KERNEL)
                note = f"cannot: {error}".partition("\n")[0] if none else why_not(error, case)
                yield lab.row("gpu-card", case, note=note)
                continue
            rate = {"rate": pass_flops * rows * heads * length**2 * width / min(seconds), "unit": "FLOP/s"}
            yield lab.row("gpu-card", case, seconds, settings=rate | {"dtype": str(dtype)})


# ---- pictures


def optimisations(family: str, side: int, cases: tuple[str, ...], **more: Any) -> Callable[[Lab], Rows]:
    """Optimisations against the plain model, in turns with it."""

    def run(lab: Lab) -> Rows:
        wanted = [case for case in cases if lab.on_cuda or "cuda" not in case]
        yield from bench_optimisations(lab.drawing(family, side, **more), cases=wanted or ["auto"], repeats=3)

    return run


def batches(family: str, side: int, most: int, steps: int) -> Callable[[Lab], Rows]:
    """Larger and larger batches, in half precision and captured; the share of the dense rate is in `mfu`."""

    def run(lab: Lab) -> Rows:
        drawing = lab.drawing(family, side, steps=2 if lab.tiny else steps)
        flops, batch = drawing.flops_per_image(), 1
        backend = drawing.open("auto,cuda_graphs" if lab.on_cuda else "auto")
        while batch <= (2 if lab.tiny else most):
            peak = PeakMemory(lab.device)
            try:
                seconds = timed(lab, lambda n=batch: drawing.run(backend, num=n), repeats=3, warmup=1)  # type: ignore[misc]
            except DEVICE_LOST:
                raise
            except Exception as error:
                note = why_not(error, f"{family}, batch {batch},")
                yield lab.row(
                    "batch", f"{family} {lab.half}", note=note, settings=drawing.settings(batch=batch)
                )
                return
            yield lab.row(
                "batch", f"{family} {lab.half}", seconds, images=batch, steps=drawing.steps,
                flops_per_image=flops, precision=lab.half,
                peak_memory_bytes=peak.bytes(), settings=drawing.settings(batch=batch),
                note="end to end: text, steps, decoding",
            )  # fmt: skip
            batch *= 2

    return run


# ---- training


def pretrain(family: str, side: int, *cases: str, batch: int | str = "auto") -> Callable[[Lab], Rows]:
    """The bare step on synthetic latents, EMA on."""

    def run(lab: Lab) -> Rows:
        told: dict[str, Any] = {"resolution": side, "batch": batch}
        if lab.tiny:
            told = {"resolution": 32, "batch": 2, "unet": TINY_UNET}
        yield from bench_pretraining(
            "tiny" if lab.tiny else family, cases=cases, repeats=5, device=lab.device, say=LOG.warning, **told
        )

    return run


def resume(lab: Lab) -> Rows:
    """Whether three steps after a saved state are an unbroken run's, bit by bit, and what that costs."""
    family, side, rows = ("tiny", 32, 2) if lab.tiny else ("sd15", 512, 8)
    unet = TINY_UNET if lab.tiny else {}

    def made() -> SwitchedStep:
        return SwitchedStep(family, side, FAST, lab.device, unet)

    with deterministic():
        one = made()
        inputs = one.inputs(rows)
        for k in range(3):
            one.step(k, inputs)
        kept = _state(one)
        for k in range(3, 6):
            one.step(k, inputs)
        two = made()
        _restore(two, kept)
        for k in range(3, 6):
            two.step(k, inputs)
        pairs = zip(one.step.weights.masters.values(), two.step.weights.masters.values(), strict=True)
        exact = all(torch.equal(a, b) for a, b in pairs)
        moved = any(not torch.equal(kept["weights"][n].to(w), w) for n, w in one.step.weights.masters.items())
        slow = timed(lab, lambda: two.step(7, inputs))
    quick = timed(lab, lambda: two.step(8, inputs))
    note = "six steps against three, saved, and three more" if moved else "the weights did not move: no proof"
    told = {"model": family, "resolution": side, "batch": rows, "bit_exact": exact, "moved": moved}
    free = Timing("default kernels", tuple(quick), 0.0, None)
    yield measurement("resume", free, device=lab.device, images=rows, settings=told, precision="bf16")
    yield measurement(
        "resume", Timing("deterministic kernels", tuple(slow), 0.0, None), baseline=free, device=lab.device,
        images=rows, settings=told, precision="bf16", note=note,
    )  # fmt: skip


def _state(switched: SwitchedStep) -> dict[str, dict[str, torch.Tensor]]:
    from darkroom.train.optim import optimiser_tensors

    masters = switched.step.weights.masters
    found = {"weights": masters, "optimiser": optimiser_tensors(switched.step.optimiser, masters)}
    return {
        kind: {name: value.detach().to("cpu", copy=True) for name, value in some.items()}
        for kind, some in {**found, "ema": switched.step.ema.state()}.items()
    }


def _restore(switched: SwitchedStep, kept: dict[str, dict[str, torch.Tensor]]) -> None:
    from darkroom.train.optim import restore_optimiser

    switched.step.weights.load(kept["weights"])
    switched.step.ema.restore(kept["ema"])
    restore_optimiser(switched.step.optimiser, switched.step.weights.masters, kept["optimiser"])


@contextmanager
def deterministic() -> Iterator[None]:
    """With the kernels that give the same numbers each time."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---- where it goes


def profile(lab: Lab) -> Rows:
    """The kernels that take the time, as tables beside the rows."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if lab.on_cuda else [])]
    family, side, rows = ("tiny", 32, 2) if lab.tiny else ("sd2", 512, 16)
    switched = SwitchedStep(family, side, FAST, lab.device, TINY_UNET if lab.tiny else {})
    inputs = switched.inputs(rows)
    drawing = lab.drawing("sd15", 512, steps=3, prompts=1 if lab.tiny else 8)
    jobs: dict[str, Callable[[], object]] = {"train": lambda: switched.step(0, inputs)}
    for names in ("none", "auto"):
        backend = drawing.open(names)
        jobs[f"draw-{names.replace(',', '-')}"] = lambda backend=backend: drawing.run(backend)  # type: ignore[misc]

    def tabled(name: str) -> Measurement:
        job = jobs[name]
        job()
        synchronise(lab.device)
        start = time.perf_counter()
        with profiled(activities=kinds) as seen:
            job()
            synchronise(lab.device)
        order = "self_cuda_time_total" if lab.on_cuda else "self_cpu_time_total"
        place = lab.out.with_name(f"{lab.out.stem}-profile-{name}.txt")
        place.write_text(
            seen.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90), "utf-8"
        )
        seconds = [time.perf_counter() - start]
        return lab.row("gpu-profile", name, seconds, note=f"{place.name}; profiling slows it")

    for name in jobs:
        yield from contained(lab, "gpu-profile", name, tabled, name)


def memory(lab: Lab) -> Rows:
    """Peaks that were planned against those that the allocator saw."""
    side, rows = (32, 2) if lab.tiny else (512, 8)
    base: dict[str, Any] = {"base": "tiny", "unet": TINY_UNET} if lab.tiny else {"base": "sd2"}
    data = {"store": "x", "resolution": side}
    half = {"precision": "bf16", "global_batch": rows, "micro_batch": rows, "device": lab.device}
    checkpointed = {**half, "gradient_checkpointing": True}
    jobs = {
        "pretrain": {"task": "pretrain", "model": base, "data": data, "train": half},
        "pretrain, checkpointed": {"task": "pretrain", "model": base, "data": data, "train": checkpointed},
        "lora": {"task": "lora", "model": base, "data": data, "train": half, "adapter": {"rank": 8}},
    }  # fmt: skip
    for name, content in jobs.items():
        lab.forget()
        yield from contained(lab, "gpu-memory", name, _planned, lab, name, content, rows)


STORES = ("lance", "lance.file", "pyarrow", "pyarrow.compute", "pyarrow.parquet", "zstandard")


def stand_in_for_stores() -> None:
    """A job's setup imports what stores are read with, 130 MB of wheels that no case needs."""
    for name in STORES:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = MagicMock()


def _planned(lab: Lab, name: str, content: dict[str, Any], rows: int) -> Measurement:
    stand_in_for_stores()
    from darkroom.plan.ask import ask_recipe_object, plans
    from darkroom.plan.targets import Target, encodes
    from darkroom.plan.tracing import outline
    from darkroom.plan.training import _columns, _NoStore, _without_files, reads_text
    from darkroom.recipe import make_recipe
    from darkroom.train import model as build
    from darkroom.train import setup

    recipe, device = make_recipe(content), torch.device(lab.device)
    (plan,) = plans(ask_recipe_object(recipe), Target(gpu="here"))
    parts = ("unet", "vae", "text_encoder")
    before, peak = _used(lab), PeakMemory(lab.device)
    data, side = recipe.data, recipe.data.resolution
    overrides = build.family_changes(recipe.task, recipe.model, side, None)
    model = models.create(recipe.model.base, parts=parts, overrides=overrides, device=lab.device)
    model.tokenizers = outline(recipe.task, recipe.model, recipe.objective, side).tokenizers
    changes = _without_files(data, recipe.train, recipe.model, recipe.adapter)
    task: Any = setup.make_task(recipe.model_copy(update=changes), model, _NoStore(), device)
    task._encode = None
    if lab.on_cuda and recipe.frozen_text:  # as a run does
        setup.halve_text(model, torch.bfloat16)
    step = setup.bare_step(
        task, train=recipe.train, optim=recipe.optim, micro_batch=rows, dtype=torch.bfloat16
    )
    inline, text = encodes(recipe.task, data), reads_text(data, task)
    columns = {
        key: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for key, value in _columns(side, model, task, inline=inline, text=text)(rows).items()
    }
    peak.reset()
    for k in range(3):
        step(k, task.inputs(columns, device))
    synchronise(lab.device)
    measured, held = peak.bytes() - before, _reserved(lab)
    if measured <= 0:  # of a CPU's resident set, where the cases before held more
        return lab.row("gpu-memory", name, note="cannot: the process held as much before")
    told = {
        "planned_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "reserved_bytes": held,
        "error": plan.peak_bytes / measured - 1,
        "kinds": dict(plan.memory_bytes),
        "batch": rows,
    }
    note = "planned with the driver's and libraries' share; measured: what tensors took at the peak"
    return lab.row("gpu-memory", name, settings=told, peak_memory_bytes=measured, note=note)


def _used(lab: Lab) -> int:
    from darkroom.hardware.meters import resident_bytes

    return torch.cuda.memory_allocated() if lab.on_cuda else resident_bytes()


def _reserved(lab: Lab) -> int | None:
    return torch.cuda.max_memory_reserved() if lab.on_cuda else None


def serve(lab: Lab) -> Rows:
    """A mixed trace through `darkroom serve` and through plain servers, over real processes."""
    from darkroom.measure.serving import ServeBench, bench_serve

    free = shutil.disk_usage(tempfile.gettempdir()).free
    if not lab.tiny and free < 16 * 2**30:
        raise InputError(f"{free / 2**30:.0f} GiB free in {tempfile.gettempdir()}", allowed="16 GiB or more")
    with tempfile.TemporaryDirectory(prefix="darkroom-gpu-") as folder:
        models.save(lab.model("sd15"), Path(folder) / "model")
        lab.forget()
        asked = ServeBench(
            str(Path(folder) / "model"),
            adapters=1 if lab.tiny else 4,
            seconds=1.0 if lab.tiny else 20.0,
            rounds=1,
            loads=(1.0,),
            device=lab.device,
        )
        yield from bench_serve(asked, LOG.warning)


CASES: dict[str, Callable[[Lab], Rows]] = {
    "smoke": smoke,
    "card": card,
    "sd15-b1": optimisations("sd15", 512, ("auto",)),
    "sd15-b1-graphs": optimisations("sd15", 512, ("fused_qkv,cuda_graphs", "auto,cuda_graphs")),
    "sd2-train": pretrain("sd2", 512, FAST),
    "sd15-batch": batches("sd15", 512, 64, 20),
    "sdxl-batch": batches("sdxl", 1024, 8, 20),
    "smoke-compile": smoke_compile,
    "profile": profile,
    "sd15-b8": optimisations(
        "sd15", 512,
        (
            "auto", "fused_qkv,lean", "fused_norm", "cuda_graphs", "auto,cuda_graphs",
            "channels_last,compile_regional",
        ),
        steps=10, prompts=8,
    ),
    "sd2-train-compile": pretrain("sd2", 512, FAST, "bf16,fused_adamw", f"{FAST},compile_regional", batch=32),
    "sd15-b1-compile": optimisations(
        "sd15", 512, ("channels_last,compile_regional,cuda_graphs", "channels_last,compile_regional")
    ),
    "sd2-train-whole": pretrain("sd2", 512, FAST, f"{FAST},compile", batch=32),
    "memory": memory,
    "resume": resume,
    "sdxl-compile": optimisations("sdxl", 1024, ("auto", "channels_last,compile_regional"), steps=20),
    "sd15-switches": optimisations(
        "sd15", 512,
        (
            "channels_last", "fused_qkv", "lean", "attention_slicing", "vae_slicing", "guidance_interval",
            "feature_cache", "fp8", "int8", "offload_model", "offload_group",
        ),
        steps=20,
    ),
    "sd2-train-256": pretrain("sd2", 256, FAST, "bf16,fused_adamw", f"{FAST},checkpointing"),
    "serve": serve,
}  # fmt: skip


def make(name: str, lab: Lab) -> str:
    """One case, its rows written as they come; how it ended."""
    start, rows, failed, how = time.perf_counter(), 0, 0, "done"
    try:
        for row in CASES[name](lab):
            append_csv(lab.out, [row])
            rows, failed = rows + 1, failed + row.note.startswith("failed")
    except DEVICE_LOST as error:
        how = f"failed: the device is lost: {error}"
        raise
    except Exception as error:
        how = why_not(error, name)
    finally:
        seconds = time.perf_counter() - start
        made = f"{rows} rows, {failed} failed," if failed else f"{rows} rows"
        told = f"{how}; {made} in {seconds:.0f} s"
        append_csv(lab.out, [lab.row(BENCHMARK, name, [seconds] if how == "done" else [], note=told)])
    return told


def main() -> None:
    """Cases in turn, as the argument says."""
    from gpu import end_with_parent

    began = time.monotonic()
    if hasattr(os, "setsid") and os.getpid() != os.getpgid(0):
        os.setsid()  # so that the servers which a case starts end with it
    end_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    told = json.loads(sys.argv[1])
    models.device(told["device"])  # as the commands choose it: float32 is not rounded
    lab = Lab(told["device"], told["tiny"], Path(told["out"]))
    first = True
    for name, about_s in told["cases"]:
        left_s = told["seconds"] - (time.monotonic() - began)
        if not first and about_s > left_s and not lab.tiny:
            print("FULL", flush=True)
            return
        first = False
        print(f"BEGIN {name}", flush=True)
        how = make(name, lab)
        lab.forget()
        gc.collect()
        print(f"END {how}", flush=True)


if __name__ == "__main__":
    main()
