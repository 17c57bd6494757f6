"""The published tables as they were printed, with what is known of how each row was run, and what was run.

Sources: the five systems' own reports (Google's Vertex Model Garden benchmarking report, 2023; Anyscale's
pre-training posts, 2024; lambda-diffusers' benchmark.csv, October 2022; mosaicml/diffusion-benchmark and
mosaicml/diffusion READMEs, 2023; diffusers' pages on memory and speed, v0.16 and v0.20) and MLPerf Training
v4.0 to v5.0. A value marked chart was read off a chart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.counting import Counter, Trace
from darkroom.hardware.cards import Card, find_card
from darkroom.models.model import Model
from darkroom.models.outline import outlined
from darkroom.plan import targets
from darkroom.plan.counts import Kernels, Line, Moment, Profile, cached_profile
from darkroom.plan.roofline import Efficiency
from darkroom.plan.tracing import as_on_gpu, fakes, profile_of, tag_weights
from darkroom.prepare.columns import text_states
from darkroom.recipe.sections import AdapterSettings
from darkroom.train.tasks.lora import add_adapters

# rank: trained, total, MiB of the file (Vertex prints MB)
VERTEX_LORA = {
    4: (398_592, 859_919_556, 1.57),
    8: (797_184, 860_318_148, 3.09),
    16: (1_594_368, 861_115_332, 6.13),
    32: (3_188_736, 862_709_700, 12.21),
}

# rank (None: all weights), checkpointing, pictures, side, GB, read off a chart
VERTEX_MEMORY = (
    (None, False, 2, 512, 22.7, True),
    (None, False, 4, 512, 25.09, False),
    (None, False, 8, 512, 34.7, True),
    (None, False, 16, 512, 39.4, True),
    (None, False, 4, 256, 21.0, True),
    (None, False, 4, 1024, 39.4, True),
    (8, False, 4, 512, 14.45, False),
    (4, True, 4, 512, 9.98, False),
    (8, True, 2, 512, 7.2, True),
    (8, True, 4, 512, 9.98, False),
    (8, True, 8, 512, 15.4, True),
    (8, True, 16, 512, 26.0, True),
    (8, True, 32, 512, 39.4, True),
    (8, True, 4, 256, 6.1, True),
    (8, True, 4, 1024, 28.3, True),
    (8, True, 4, 2048, 39.4, True),
    (16, True, 4, 512, 9.99, False),
)
VERTEX_CEILING_GB, VERTEX_AT_LEAST_GB = 39.4, 34.0

# side: largest batch of LoRA with checkpointing
VERTEX_LARGEST = {
    "A100-SXM4-40GB": {256: 128, 512: 32, 1024: 8, 2048: 2},
    "V100-SXM2-16GB": {256: 32, 512: 8, 1024: 2, 2048: 0},
}

# pictures, side, steps/s: LoRA with checkpointing on one A100 of 40 GB
VERTEX_SPEED = (
    (2, 512, 1.24),
    (4, 512, 1.17),
    (8, 512, 1.14),
    (16, 512, 0.8696),
    (4, 256, 1.32),
    (4, 1024, 0.2494),
)
# rank: steps/s of batch 4 at 512 px, by the same script (rank 8 is above too, printed as 1.17)
VERTEX_RANK_SPEED = {4: 1.18, 8: 1.18, 16: 1.16}
VERTEX_USD_PER_HOUR = {"T4": 0.4025, "V100-SXM2-16GB": 2.852, "A100-SXM4-40GB": 4.2245}
# steps: USD, LoRA with checkpointing, batch 4 on the A100
VERTEX_STEPS_COST = {10: 0.06, 100: 0.12, 1000: 0.79}
# method, card, batch: USD of 800 / batch steps
VERTEX_BATCH_COST = {
    ("full", "A100-SXM4-40GB"): {1: 0.44, 2: 0.27, 4: 0.20, 8: 0.15},
    ("LoRA", "A100-SXM4-40GB"): {1: 0.36, 2: 0.23, 4: 0.17, 8: 0.13, 16: 0.15, 32: 0.19},
    ("LoRA", "V100-SXM2-16GB"): {1: 0.33, 2: 0.20, 4: 0.14, 8: 0.13},
}
# card: seconds of four pictures and USD of one; the plain container takes 50 steps, the other 25
VERTEX_SERVING = {
    "T4": ((28.6, 0.00080), (12.6, 0.00035)),
    "V100-SXM2-16GB": ((8.8, 0.00174), (4.1, 0.00081)),
    "A100-SXM4-40GB": ((4.2, 0.00123), (1.7, 0.00050)),
}

# side: images/s of 32 A100-80 with encoders inline, and with prepared latents and text
ANYSCALE_INLINE = {256: (2805, 4068), 512: (812, 1029)}
# rungs: DDP on TCP, DDP on the fast network, FSDP, FSDP and compile
ANYSCALE_LADDER = {
    ("A100-SXM4-40GB", 16, 256): (1075, 1269, 1925, 2910),
    ("A100-SXM4-40GB", 16, 512): (264, 474, 667, 805),
    ("A100-SXM4-80GB", 32, 256): (1573, 4068, 5014, 5908),
    ("A100-SXM4-80GB", 32, 512): (389, 1029, 1168, 1349),
}
ANYSCALE_MICRO = {256: 128, 512: 32}  # on the A100 of 80 GB
ANYSCALE_RUNGS = ("DDP TCP", "DDP fast", "FSDP", "FSDP compile")
ANYSCALE_SAMPLES = {256: 1_126_400_000, 512: 1_740_800_000}
ANYSCALE_MACHINES, ANYSCALE_MACHINE_USD, ANYSCALE_A10G_USD = 4, 40.96, 1.212
# images/s, hours, USD (offline: without its encoding), A10G next to them
ANYSCALE_PHASE_1 = {
    "inline": (2811, 111.3, 18_192, 0),
    "offline": (4068, 76.9, 14_753 - 2_183, 0),
    "online": (4075, 76.8, 16_275, 40),
}
ANYSCALE_ENCODING_USD = 2_183
ANYSCALE_TOTAL_A100_HOURS, ANYSCALE_TOTAL_USD = 13_165, 39_511

# GPUs: images/s, days, A100-hours, USD; 2.867 billion pictures at $2
MOSAIC_INLINE = {
    8: (128.2, 258.83, 49_696, 99_000),
    16: (254.0, 130.63, 50_166, 100_000),
    32: (485.7, 68.33, 52_470, 105_000),
    64: (912.2, 36.38, 55_875, 110_000),
    128: (1_618.4, 20.5, 62_987, 125_000),
    256: (2_589.4, 12.83, 78_735, 160_000),
}
MOSAIC_SAMPLES, MOSAIC_USD_PER_HOUR = 2.867e9, 2.0
# GPUs: images/s at 256 px and at 512 px, days, USD
MOSAIC_STORED = {
    8: (1_100, 290, 81.33, 31_230),
    16: (2_180, 585, 40.42, 31_043),
    32: (4_080, 1_195, 20.06, 30_805),
    64: (8_530, 2_340, 10.14, 31_146),
    128: (11_600, 4_590, 5.51, 33_874),
}

# card, precision: batch: seconds, GB reserved; 50 steps, attention's scores in memory
LAMBDA = {
    ("RTX 3090", "single"): {1: (7.96, 7.72), 2: (14.49, 11.0), 4: (27.94, 17.69)},
    ("RTX 3090", "half"): {1: (4.83, 4.54), 2: (8.42, 8.75), 4: (15.87, 15.36)},
    ("RTX A5500", "single"): {1: (8.55, 7.69), 2: (15.71, 11.0), 4: (30.51, 17.69)},
    ("RTX A5500", "half"): {1: (5.05, 4.58), 2: (9.37, 8.8), 4: (16.97, 15.33)},
    ("RTX 3080", "half"): {1: (5.59, 4.52)},
    ("A100-PCIE-80GB", "single"): {
        1: (6.39, 7.75),
        2: (11.12, 11.05),
        4: (20.18, 17.63),
        8: (38.88, 30.88),
        16: (76.92, 57.46),
    },
    ("A100-PCIE-80GB", "half"): {
        1: (3.74, 4.55),
        2: (5.72, 8.77),
        4: (10.04, 15.34),
        8: (18.68, 28.47),
        16: (36.67, 54.73),
        28: (63.88, 78.78),
    },
    ("RTX A6000", "single"): {1: (8.09, 7.75), 2: (14.86, 10.98), 4: (27.92, 17.62), 8: (53.95, 30.88)},
    ("RTX A6000", "half"): {
        1: (5.03, 4.53),
        2: (9.03, 8.79),
        4: (17.0, 15.34),
        8: (32.57, 28.51),
        16: (63.16, 46.11),
    },
    ("RTX 8000", "single"): {
        1: (12.3, 7.71),
        2: (24.42, 9.16),
        4: (42.56, 15.58),
        8: (76.96, 23.11),
        16: (152.55, 42.47),
    },
    ("RTX 8000", "half"): {
        1: (5.93, 4.52),
        2: (10.92, 7.02),
        4: (21.24, 12.39),
        8: (40.52, 20.98),
        16: (80.31, 38.18),
    },
}

# processor: class of hardware.csv, cores, seconds of one picture in single precision by PyTorch
LAMBDA_CPU = {
    "CPU i7-6850K": ("CPU AVX2", 6, 458.97),
    "CPU EPYC 7352": ("CPU AVX2", 24, 529.93),
}

# rung: seconds of one picture, 50 DDIM steps, TITAN RTX; precision, channels last, attention
DIFFUSERS_LADDER = {
    "fp32": (9.50, "float32", False, "plain", "eager"),
    "fp16": (3.61, "fp16", False, "plain", "eager"),
    "channels-last": (3.30, "fp16", True, "plain", "eager"),
    "traced U-Net": (3.21, "fp16", True, "plain", "traced"),
    "memory-efficient attention": (2.63, "fp16", True, "fused", "traced"),
}
# card: steps/s, plain and memory-efficient attention, one picture at 512 px
DIFFUSERS_STEPS = {
    "T4": (3.5, 5.5),
    "RTX 3060": (4.6, 7.8),
    "A10G": (8.88, 15.6),
    "RTX A6000": (11.7, 21.09),
    "TITAN RTX": (12.51, 18.22),
    "A100-SXM4-40GB": (18.6, 29.0),
    "A100-SXM4-80GB": (18.7, 29.5),
}
# card: steps/s without compile (torch 2.0) and with it (nightly), of 1, 4 and 16 pictures; fused attention
DIFFUSERS_TORCH2 = {
    "A100-SXM4-40GB": {1: (21.66, 49.74), 4: (11.6, 17.27), 16: (3.04, 4.68)},
    "V100-SXM2-16GB": {1: (18.99, 22.17), 4: (5.96, 6.86), 16: (1.66, 1.90)},
    "T4": {1: (6.9, 7.56), 4: (1.79, 1.99), 16: (1 / 2.34, 1 / 1.99)},
    "RTX 3090": {1: (22.56, 25.69), 4: (6.46, 7.3), 16: (1.7, 1.91)},
    "RTX 4090": {1: (40.5, 49.81), 4: (12.62, 15.59), 16: (3.17, 3.85)},
}

# card, family, side, engine, channels last: steps/s of one guided picture, plain PyTorch or compile.
# stable-fast's README (H100, RTX 4080, A100; torch 2.1), OneDiff's benchmarks (A800, here an A100 of 80 GB,
# 4090 and 3090; torch 2.3.1), diffusers' page on torch 2 (T4)
ENGINE_STEPS = {
    ("H100-SXM", "sd15", 512, "eager", False): 54.5,
    ("H100-SXM", "sd15", 512, "compile", False): 66.0,
    ("A100-SXM4-80GB", "sd15", 512, "eager", False): 35.6,
    ("A100-SXM4-80GB", "sd15", 512, "compile", False): 41.9,
    ("RTX 4090", "sd15", 512, "eager", False): 38.3,
    ("RTX 4080", "sd15", 512, "eager", False): 29.5,
    ("RTX 4080", "sd15", 512, "compile", False): 40.0,
    ("RTX 3090", "sd15", 512, "eager", False): 21.3,
    ("A100-SXM4-80GB", "sd2", 512, "eager", False): 37.5,
    ("A100-SXM4-80GB", "sd2", 768, "eager", False): 23.8,
    ("H100-SXM", "sdxl", 1024, "eager", False): 14.9,
    ("H100-SXM", "sdxl", 1024, "compile", False): 18.5,
    ("A100-SXM4-80GB", "sdxl", 1024, "eager", False): 8.7,
    ("A100-SXM4-80GB", "sdxl", 1024, "compile", False): 10.0,
    ("RTX 4090", "sdxl", 1024, "eager", False): 8.4,
    ("RTX 3090", "sdxl", 1024, "eager", False): 4.0,
    ("T4", "sdxl", 1024, "eager", False): 1.16,
}
# card, family, side, engine, channels last, steps: seconds of one picture from prompt to pixels. fal's
# stable-diffusion-benchmarks (A100 of 80 GB), the baselines of Stability's note on SDXL with TensorRT,
# PyTorch's post on SDXL
ENGINE_SECONDS = {
    ("A100-SXM4-80GB", "sd15", 512, "eager", False, 50): 1.604,
    ("A100-SXM4-80GB", "sd15", 512, "compile", False, 50): 1.354,
    ("A100-SXM4-80GB", "sd15", 512, "compile", True, 50): 1.058,
    ("A100-SXM4-80GB", "sdxl", 1024, "eager", False, 50): 5.93,
    ("A100-SXM4-80GB", "sdxl", 1024, "compile", False, 50): 5.22,
    ("A100-SXM4-80GB", "sdxl", 1024, "compile", True, 50): 5.14,
    ("A100-SXM4-80GB", "sdxl", 1024, "eager", False, 30): 3.31,
    ("A100-SXM4-80GB", "sdxl", 1024, "compile", True, 30): 2.54,
    ("H100-SXM", "sdxl", 1024, "eager", False, 30): 2.496,
    ("A10", "sdxl", 1024, "eager", False, 30): 9.399,
}

# card, family, side, batch, steps, format: seconds of a batch with TensorRT. fal's benchmarks, Stability's
# note on SDXL with TensorRT, OneDiff's benchmarks, and MLPerf Inference v4.1 and v5.1 (offline, fp8, one
# card's share)
TENSORRT = {
    ("A100-SXM4-80GB", "sd15", 512, 1, 50, ""): 0.819,
    ("A100-SXM4-80GB", "sdxl", 1024, 1, 50, ""): 4.10,
    ("RTX 3090", "sdxl", 1024, 1, 30, ""): 5.55,
    ("H100-SXM", "sdxl", 1024, 1, 30, ""): 1.471,
    ("H100-SXM", "sdxl", 1024, 8, 20, "fp8"): 8 / 2.04,
    ("H200", "sdxl", 1024, 8, 20, "fp8"): 8 / 2.18,
    ("B200", "sdxl", 1024, 8, 20, "fp8"): 8 / 4.04,
}
TENSORRT_STEPS = {("RTX 4080", "sd15", 512): 52.6}  # steps/s of one guided picture: stable-fast's README

# card: round, submitter and system, global batch, images/s of 8: the median of ten runs' logged rates.
# v3.1's software had no CUDA graphs: NVIDIA names them, full iterations, as what v4.0 brought.
MLPERF = {
    "H100-SXM": (
        ("v3.1 Dell XE9680", 512, 939),
        ("v4.1 NVIDIA Eos", 256, 1_099),
        ("v4.1 Dell XE9680", 256, 1_084),
        ("v4.1 Quanta D74H-7U", 256, 1_075),
        ("v4.1 Supermicro AS-4125GS", 256, 1_097),
        ("v4.1 Supermicro AS-8125GS", 256, 1_083),
        ("v4.1 Supermicro SYS-821GE", 256, 1_084),
    ),
    "H200": (
        ("v4.1 NVIDIA", 256, 1_116),
        ("v4.1 ASUSTeK ESC N8", 256, 1_155),
        ("v4.1 Dell XE9680", 256, 1_134),
        ("v4.1 GigaComputing G593", 256, 1_125),
        ("v4.1 Lenovo SR680a", 256, 1_160),
        ("v4.1 Lenovo SR685a", 256, 1_146),
        ("v4.1 Supermicro SYS-421GE", 256, 1_152),
        ("v5.0 ASUSTeK ESC N8", 256, 1_155),
        ("v5.0 Dell XE9680", 256, 1_156),
        ("v5.0 Dell XE9680L", 256, 1_147),
        ("v5.0 Google", 256, 1_121),
        ("v5.0 HPE Cray XD670", 512, 1_197),
        ("v5.0 QCT D74H-7U", 256, 1_139),
        ("v5.0 Supermicro AS-4125GS", 256, 1_151),
        ("v5.0 Supermicro SYS-821GE", 256, 1_146),
    ),
    "B200": (
        ("v4.1 NVIDIA preview", 256, 1_908),
        ("v5.0 NVIDIA Nyx", 256, 2_183),
        ("v5.0 Dell XE9680L", 256, 2_193),
        ("v5.0 GigaComputing G893", 256, 2_158),
        ("v5.0 Lenovo SR780a", 256, 2_159),
        ("v5.0 Oracle BM.GPU.B200.8", 256, 2_132),
        ("v5.0 Supermicro AS-A126GS", 256, 2_169),
        ("v5.0 Supermicro SYS-422GA", 256, 2_170),
        ("v5.0 Supermicro SYS-A21GE", 256, 2_143),
    ),
    "GB200": (("v5.0 NVIDIA Tyche", 256, 2_307),),
}


# ---- a published value with what the plan says of it, and a table of them
#
# A prediction is a function of the efficiencies, so that the fit (benchmarks/plan/fit.py) and the proof use
# the same code. `fitted` rows are those whose value the fit has seen; the proof counts the others alone, and
# of those none that another row's published value gives (`derived`).

Predict = Callable[[Efficiency], float]


@dataclass(frozen=True)
class PublishedValue:
    """One published value. `limit`: its own tolerance, where it is not the table's."""

    case: str
    published: float
    predict: Predict
    fitted: bool = False
    limit: float | None = None
    at_least: float | None = None  # a ceiling of the card: the prediction is to be at least this
    derived: bool = False  # another row's published value in another unit: shown, neither fitted nor counted
    note: str = ""  # what a reader should know of it
    plain: Predict | None = None  # the plain reading, shown next to it
    unit: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """A published table: all rows within `limit`, or their median where `by_median`."""

    name: str
    limit: float
    rows: tuple[PublishedValue, ...]
    by_median: bool = True
    reading: str = ""
    source: str = ""


def card(name: str) -> Card:
    """A card that the tables name."""
    found = find_card(name)
    assert found is not None, name
    return found


def constant(value: float) -> Predict:
    """What no efficiency changes."""
    return lambda _: value


def power_of_two(number: int) -> int:
    """The largest power of two that is not above a number; 0 of 0."""
    return 1 << (number.bit_length() - 1) if number else 0


# ---- peers: a U-Net's training step under autocast, and pictures with 2022's attention, as they ran
#
# Used only to predict their tables; a recipe's plan runs darkroom's own step. CUDA's autocast computes norms
# and softmax in float32, a CPU's does not, so that is put in here.

HALF = torch.bfloat16  # fp16 moves and holds the same bytes


def _count_others(step: OthersStep) -> Profile:
    """The counts of such a step, kept."""
    return cached_profile({"job": "others", **asdict(step)}, lambda: _profile_others(step))


def _profile_others(step: OthersStep) -> Profile:
    """Count such a step."""
    parts = ("unet", "vae", "text_encoder") if step.encodes else ("unet",)
    model = outlined(step.family, parts)
    unet: Any = model.unet
    for module in model.modules.values():
        module.requires_grad_(False)
    with fakes(*model.modules.values()) as counter:
        if step.rank is None:
            unet.requires_grad_(True)
        else:
            add_adapters(model, AdapterSettings(targets="qv", rank=step.rank))
        unet.train()
        if step.checkpointing:
            unet.enable_gradient_checkpointing()
        if step.encoders == "half":
            for name, module in model.modules.items():
                if name != "unet":
                    nn.Module.to(module, HALF)
        if step.pure_half:
            nn.Module.to(unet, HALF)
        as_on_gpu(model.modules.values())
        tag_weights(counter, model.modules.values())
        traces = _traces(counter, model, step)
        trained = sum(p.numel() for p in unet.parameters() if p.requires_grad)
        return profile_of(traces, (2, 3), parameters=model.num_parameters, trained=trained)


def _traces(counter: Counter, model: Model, step: OthersStep) -> tuple[Trace, Trace]:
    unet: Any = model.unet
    params = [param for param in unet.parameters() if param.requires_grad]
    optimiser = torch.optim.AdamW(params, foreach=True)
    average = [torch.empty_like(param) for param in params] if step.ema else []
    counter.tag(average, "ema")
    for param in params:
        param.grad = torch.zeros_like(param)
    optimiser.step()
    optimiser.zero_grad()
    for state in optimiser.state.values():
        counter.tag([value for value in state.values() if isinstance(value, Tensor)], "optimiser")
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: counter.tag([p.grad], "gradients"))

    def update() -> None:
        _adamw_of_torch_2_0(optimiser, params)
        optimiser.zero_grad()
        if average:
            torch._foreach_lerp_(average, [param.detach() for param in params], 0.001)

    first, second = (_trace(counter, model, step, rows, update) for rows in (2, 3))
    return first, second


@torch.no_grad()
def _adamw_of_torch_2_0(optimiser: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """The foreach step as torch 2.0 took it: two temporaries of the size of all parameters."""
    grads = [param.grad for param in params if param.grad is not None]
    states = [optimiser.state[param] for param in params]
    means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    torch._foreach_mul_(params, 0.99)
    torch._foreach_mul_(means, 0.9)
    torch._foreach_add_(means, grads, alpha=0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, grads, grads, 0.001)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, 1.0)
    denominators = torch._foreach_add(roots, 1e-8)
    torch._foreach_addcdiv_(params, means, denominators, -1e-4)


def _trace(counter: Counter, model: Model, step: OthersStep, rows: int, update: Callable[[], None]) -> Trace:
    unet: Any = model.unet
    counter.stage = "inputs"
    side = step.resolution
    pixels = counter.fake_tensor(torch.empty(rows, 3, side, side, device="meta"))
    width = int(unet.config.cross_attention_dim)
    stored = counter.fake_tensor(torch.empty(rows, 77, width, dtype=HALF, device="meta"))
    trace = counter.start_trace()
    latents, text = _encoded(model, step, pixels, stored, rows)
    counter.stage = "forward"
    with nullcontext() if step.pure_half else autocast():
        noise = torch.randn_like(latents)
        noisy = latents * 0.7 + noise * 0.7
        if step.pure_half:
            noisy, text = noisy.to(HALF), text.to(HALF)
        out = unet(noisy, torch.zeros(rows), encoder_hidden_states=text, return_dict=False)[0]
        loss = F.mse_loss(out.float(), noise.float())
    counter.stage = "backward"
    with _norms_of_cuda():
        loss.backward()  # type: ignore[no-untyped-call]
    del out
    counter.stage = "update"
    update()
    counter.stage, counter.trace = "", None
    return trace


def _encoded(
    model: Model, step: OthersStep, pixels: Tensor, stored: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    if not step.encodes:
        side = step.resolution // 8
        return torch.zeros(rows, 4, side, side), stored
    vae: Any = model.vae
    with torch.no_grad():
        given = vae.encode(pixels.to(vae.dtype)).latent_dist
        latents = given.mean + given.std * torch.randn_like(given.mean)
        del given
        ids = [torch.zeros(rows, t.model_max_length, dtype=torch.long) for t in model.tokenizers]
        text, _ = text_states(model.text_encoders, ids)
    return latents.float(), text


def _count_pictures_of_2022(precision: str, *, autocast: bool = True, softmax: str = "copied") -> Profile:
    """The counts of making pictures with the attention of diffusers in 2022, kept.

    Half precision is under autocast or pure. Its softmax takes half and gives float32 in one kernel
    ('fused'), while the allocator holds as much as if it were given a float32 copy ('copied', what Lambda's
    reserved bytes show).
    """
    key = {"job": "pictures of 2022", "precision": precision, "autocast": autocast, "softmax": softmax}
    return cached_profile(key, lambda: _run_pictures_of_2022(precision, autocast, softmax))


def _run_pictures_of_2022(precision: str, mixed: bool, softmax: str) -> Profile:
    from darkroom.plan.tracing import GenerateSpec, profile_generation

    half = precision != "float32"
    wide = half and mixed and softmax == "fused"
    spec = GenerateSpec(
        "sd15", 512, 512, precision="fp16" if wide else "bf16" if half else "float32", decode_pixels=None
    )
    with autocast(torch.float16 if wide else HALF) if half and mixed else nullcontext():
        return profile_generation(spec, prepare=partial(_attend_as_in_2022, wide=wide))


def _attend_as_in_2022(model: Model, wide: bool) -> None:
    """Unscaled scores, scaled scores and softmax are all in memory at once."""
    from diffusers.models.attention_processor import Attention, AttnProcessor

    class Processor(AttnProcessor):  # type: ignore[misc]
        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            attn.get_attention_scores = lambda q, k, mask=None: _scores(q, k, attn.scale, wide)
            out: Tensor = super().__call__(attn, hidden_states, *args, **kwargs)
            return out

    for part in (part for module in model.modules.values() for part in module.modules()):
        if isinstance(part, Attention):
            part.set_processor(Processor())


def _scores(query: Tensor, key: Tensor, scale: float, wide: bool) -> Tensor:
    scores = torch.bmm(query, key.transpose(-1, -2))
    scaled = scores * scale
    if wide and scaled.dtype == torch.float16:
        wide_probs: Tensor = torch.ops.aten._softmax(scaled, -1, True)
        return wide_probs.to(query.dtype)
    return F.softmax(scaled, dim=-1).to(query.dtype)


@contextmanager
def autocast(dtype: torch.dtype = HALF) -> Iterator[None]:
    """Half precision as CUDA's autocast has it."""
    with _norms_of_cuda(), torch.autocast("cpu", dtype=dtype):
        yield


@contextmanager
def _norms_of_cuda() -> Iterator[None]:
    """Where autocast is on, norms and softmax take and give float32; also where checkpointing runs again."""
    plain = {name: getattr(F, name) for name in ("group_norm", "layer_norm", "softmax")}

    def widened(call: Any) -> Any:
        """The call in float32 while autocast is on, as CUDA's autocast has it."""

        def wide(*args: Any, **kwargs: Any) -> Any:
            """The call with its tensors widened while autocast is on."""
            if not torch.is_autocast_enabled("cpu"):
                return call(*args, **kwargs)
            given = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
            named = {k: v.float() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
            return call(*given, **named)

        return wide

    for name, call in plain.items():
        setattr(F, name, widened(call))
    try:
        yield
    finally:
        for name, call in plain.items():
            setattr(F, name, call)


FILE = Path(__file__).with_name("published_counts.json")


@dataclass(frozen=True)
class OthersStep:
    """A training step as the diffusers and Composer scripts wrote it."""

    family: str
    resolution: int
    rank: int | None = None  # LoRA on queries and values; None: all weights
    checkpointing: bool = False
    encodes: bool = True  # VAE and text encoder at each step
    encoders: str = "float32"  # or half
    ema: bool = False
    pure_half: bool = False  # half-precision weights and no autocast


@cache
def others_profile(step: OthersStep) -> Profile:
    """A training step as the published scripts wrote it."""
    return _kept({"others": asdict(step)}, lambda: _count_others(step))


@cache
def pictures_of_2022(precision: str, *, autocast: bool = True, softmax: str = "copied") -> Profile:
    """Making pictures with the attention of 2022."""
    return _kept(
        {"pictures of 2022": [precision, autocast, softmax]},
        lambda: _count_pictures_of_2022(precision, autocast=autocast, softmax=softmax),
    )


@cache
def picture_profile(precision: str, attention: str, family: str = "sd15", side: int = 512) -> Profile:
    """Making square pictures, guided; the VAE decodes the whole batch at once."""
    key = {"pictures": [precision, attention, family, side]}
    return _kept(
        key, lambda: targets.picture_profile(family, side, side, True, precision, attention, whole=True)
    )


@cache
def preparing_profile(family: str, side: int, precision: str) -> Profile:
    """Encoding pictures and captions."""
    return _kept(
        {"preparing": [family, side, precision]},
        lambda: targets.preparing_profile(family, side, True, precision),
    )


def _kept(key: dict[str, Any], count: Callable[[], Profile]) -> Profile:
    found = _file().get(json.dumps(key, sort_keys=True))
    return unpacked(found) if found is not None else count()


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return content


def packed(profile: Profile) -> dict[str, Any]:
    """A profile in few characters."""
    return {
        "kernels": [[k.stage, k.kind, k.calls, *_pair(k.flops), *_pair(k.bytes)] for k in profile.kernels],
        "moments": [
            [m.stage, {kind: _pair(line) for kind, line in m.bytes.items()}] for m in profile.moments
        ],
        "parameters": profile.parameters,
        "trained": profile.trained,
        "chunks": profile.chunks,
    }


def _pair(line: Line) -> list[float]:
    return [round(line.fixed), round(line.row)]


def unpacked(content: dict[str, Any]) -> Profile:
    """A profile as `packed` made it."""
    kernels = tuple(
        Kernels(stage, kind, calls, Line(a, b), Line(c, d))
        for stage, kind, calls, a, b, c, d in content["kernels"]
    )
    moments = tuple(
        Moment(stage, {kind: Line(*pair) for kind, pair in held.items()})
        for stage, held in content["moments"]
    )
    plain = {name: content[name] for name in ("parameters", "trained", "chunks")}
    return Profile(kernels, moments, **plain)
