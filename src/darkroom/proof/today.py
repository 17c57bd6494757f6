"""The same work with darkroom's own software on the same card, planned with an 80 % interval.

Only where the task is the same: half precision against half precision, a pre-training step on stored latents
against one, one LoRA step against one (darkroom has stored latents and text beforehand, the published script
encoded them at each step, which the page says). Where the published run did something else (single precision,
pre-training with encoders at each step, a job's start) there is no such figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from darkroom.plan.intervals import half_width, spread
from darkroom.plan.jobs import Where, step_seconds
from darkroom.plan.roofline import Efficiency, Software, efficiency
from darkroom.proof import tables as t
from darkroom.proof.peers import OthersStep, others_profile, picture_profile
from darkroom.proof.published import shares
from darkroom.proof.published_pictures import pictures_s, steps_s
from darkroom.proof.published_training import Pretraining, images_s, micro_that_fits
from darkroom.proof.rows import Predict, PublishedValue, card, constant

HALF = Software("fp16")  # as darkroom draws: channels last, fused attention


def figure(table: str, case: str, published: float) -> dict[str, float]:
    """`today`, `today_low` and `today_high` of a cell; nothing where the work is another."""
    for name, pattern, make in FIGURES:
        match = re.fullmatch(pattern, case) if name in table else None
        if match is None:
            continue
        predict = make(**match.groupdict())
        if predict is None:
            return {}
        known = efficiency()
        value = predict(known)
        half = half_width(spread(), shares(PublishedValue(case, published, predict), known))
        if "memory" in table:
            half = spread()["memory gpu"]
        return {
            "today": value,
            "today_low": value * math.exp(-half),
            "today_high": value * math.exp(half),
        }
    return {}


def _batch(name: str, batch: str) -> Predict:
    return pictures_s(picture_profile("bf16", "fused"), name, HALF, int(batch), 50)


def _memory(name: str, batch: str) -> Predict:
    return constant(sum(picture_profile("bf16", "fused").memory(int(batch)).values()) / 1e9)


def _steps(name: str, batch: str = "1", family: str = "sd15", side: str = "512") -> Predict:
    return steps_s(picture_profile("bf16", "fused", family, int(side)), name, HALF, int(batch))


def _picture(name: str, family: str, side: str, steps: str) -> Predict:
    profile = picture_profile("bf16", "fused", family, int(side))
    return pictures_s(profile, name, HALF, 1, int(steps))


def _four(name: str, steps: str) -> Predict:
    return pictures_s(picture_profile("bf16", "fused"), name, HALF, 4, int(steps))


def _lora(batch: str, side: str = "512", rank: str = "8") -> Predict:
    """A LoRA step on latents and text that were encoded once."""
    profile = others_profile(OthersStep("sd15", int(side), int(rank), checkpointing=True))
    kernels = tuple(kernel for kernel in profile.kernels if kernel.stage != "inputs")
    stored = replace(profile, kernels=kernels)

    def rate(known: Efficiency) -> float:
        where = Where(card("A100-SXM4-40GB"), known=known)
        return 1 / step_seconds(stored, where, HALF, micro=int(batch), rows=int(batch)).total

    return rate


def _own_run(name: str, count: int, side: int, global_batch: int, network: str) -> Pretraining:
    """darkroom's own pre-training: stored latents, channels last, gradients summed once a step."""
    micro = min(micro_that_fits(name, side, "ddp", count), global_batch // count)
    return Pretraining(name, count, side, micro, global_batch, network, channels_last=True)


def _anyscale(count: str, name: str, side: str) -> Predict:
    run = _own_run(name, int(count), int(side), 4096, "EFA 400 Gbit")
    return lambda known: images_s(run, known)


def _mosaic(count: str, side: str) -> Predict:
    run = _own_run("A100-SXM4-40GB", int(count), int(side), 2048, "RoCE 1600 Gbit")
    return lambda known: images_s(run, known)


def _mlperf(name: str, batch: str) -> Predict:
    run = _own_run(name, 8, 512, int(batch), "EFA 400 Gbit")
    return lambda known: images_s(run, known)


def _total(unit: str) -> Predict:
    runs = {side: _own_run("A100-SXM4-80GB", 32, side, 4096, "EFA 400 Gbit") for side in t.ANYSCALE_SAMPLES}
    each = t.ANYSCALE_TOTAL_USD / t.ANYSCALE_TOTAL_A100_HOURS if unit == "USD" else 1.0

    def hours(known: Efficiency) -> float:
        taken = sum(t.ANYSCALE_SAMPLES[side] / images_s(run, known) for side, run in runs.items())
        return each * 32 * taken / 3600

    return hours


FIGURES: tuple[tuple[str, str, Callable[..., Predict | None]], ...] = (
    ("latency (Lambda)", r"(?P<name>.+), half, batch (?P<batch>\d+)", _batch),
    ("memory (Lambda)", r"(?P<name>.+), half, batch (?P<batch>\d+)", _memory),
    ("torch 2", r"(?P<name>.+), batch (?P<batch>\d+), (?:eager|graphs)", _steps),
    ("ladder and steps", r"(?P<name>.+), (?:plain|fused) attention", _steps),
    ("measured elsewhere", r"(?P<name>[^,]+), (?P<family>\w+) (?P<side>\d+) px, (?:eager|compile)", _steps),
    (
        "measured elsewhere",
        r"(?P<name>[^,]+), (?P<family>\w+) (?P<side>\d+) px, (?P<steps>\d+) steps, .+",
        _picture,
    ),
    ("training speed and cost", r"batch (?P<batch>\d+), (?P<side>512) px", _lora),
    ("training speed and cost", r"LoRA (?P<rank>\d+), batch (?P<batch>\d+), 512 px", _lora),
    ("serving (Vertex)", r"(?P<name>.+), (?:plain|optimised) \((?P<steps>\d+) steps\)", _four),
    ("images/s (Anyscale)", r"(?P<count>\d+) (?P<name>A100-SXM4-\d+GB), (?P<side>\d+) px, .+", _anyscale),
    ("images/s (MosaicML)", r"(?P<count>\d+) A100, (?P<side>\d+) px, pre-encoded", _mosaic),
    ("phases and total", r"total (?:A100-)?(?P<unit>hours|USD), from counts", _total),
    ("MLPerf SD 2", r".+: 8 (?P<name>.+), batch (?P<batch>\d+)", _mlperf),
)


def cell(table: str, row: dict[str, Any]) -> dict[str, float]:
    """The figure of a row of the proof."""
    return figure(table, row["case"], row["published"])
