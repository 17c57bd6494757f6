"""This machine, measured within a minute: what share of its rated peaks it reaches, by class of operation.

The shares are kept in the user's cache and used for plans of this machine from then on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from darkroom.plan.cache import cache_folder

if TYPE_CHECKING:
    import torch

    from darkroom.hardware.cards import Card

BUDGET_S = 6.0  # for each of the measurements
FEWEST = 5


@dataclass(frozen=True)
class Measured:
    """One measurement: its rate, and what share of the rated peak that is."""

    name: str
    rate: float
    unit: str
    share: float


def calibration_file() -> Path:
    """Where the measurements of this machine are kept."""
    return cache_folder() / "calibration.json"


def calibration(card: str) -> dict[tuple[str, str], float]:
    """Efficiencies measured on this machine for a card, to replace the fitted ones; empty if none were."""
    with suppress(OSError, ValueError):
        content = json.loads(calibration_file().read_text(encoding="utf-8"))
        return {(name, card): float(value) for name, value in content.get(card, {}).items()}
    return {}


def calibrate(say: Callable[[str], None] = lambda _: None) -> list[Measured]:
    """Measure matrix products, convolution, attention, memory bandwidth and launches, and keep the shares."""
    import torch

    from darkroom.plan.ask import Target, here
    from darkroom.plan.roofline import Roofline, Software

    where = here(Target())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = "bf16" if "bf16" in where.card.flops else "float32"
    roofline = Roofline(where.card, Software(precision=precision), cores=where.cores)
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[precision]
    peak = roofline.peak()[0]
    bandwidth = where.card.bandwidth_bytes_s * (where.cores if where.card.unit == "core" else 1)
    found = []
    for name, (call, work) in _work(device, dtype).items():
        seconds = _seconds(call, device)
        say(f"{name}: {seconds * 1e3:.3g} ms")
        if name == "kernel_s":
            found.append(Measured(name, seconds / work, "s a kernel", seconds / work))
        elif name == "bandwidth":
            found.append(Measured(name, work / seconds, "bytes/s", work / seconds / bandwidth))
        else:
            found.append(Measured(name, work / seconds, f"FLOP/s, {precision}", work / seconds / peak))
    _keep(where.card, found, device)
    return found


def _work(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Any], float]]:
    """Calls of the size that SD 1.5 makes at 512 px, with their FLOPs or bytes (or number, for launches)."""
    import torch
    import torch.nn.functional as F

    batch = 16 if device.type == "cuda" else 1
    a = torch.randn(4096 * batch, 320, device=device, dtype=dtype)
    b = torch.randn(2560, 320, device=device, dtype=dtype)
    x = torch.randn(batch, 640, 32, 32, device=device, dtype=dtype)
    w = torch.randn(640, 640, 3, 3, device=device, dtype=dtype)
    if device.type == "cuda":
        x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
    attention_type = dtype if device.type == "cuda" else torch.float32  # as training on a CPU attends
    q = torch.randn(batch, 8, 1024, 80, device=device, dtype=attention_type)
    big = torch.randn(2**26 if device.type == "cuda" else 2**24, device=device)
    small = torch.randn(16, device=device)
    return {
        "matmul": (lambda: F.linear(a, b), 2.0 * a.shape[0] * 320 * 2560),
        "conv": (lambda: F.conv2d(x, w, padding=1), 2.0 * batch * 640 * 640 * 9 * 32 * 32),
        "attention": (lambda: F.scaled_dot_product_attention(q, q, q), 4.0 * batch * 8 * 1024 * 1024 * 80),
        "bandwidth": (lambda: big * 2.0, 8.0 * big.numel()),
        "kernel_s": (lambda: [small + 1 for _ in range(100)], 100.0),
    }


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of several calls, after two that are left out."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    once()
    taken: list[float] = []
    start = time.perf_counter()
    while len(taken) < FEWEST or (time.perf_counter() - start < BUDGET_S / 3 and len(taken) < 200):
        taken.append(once())
    return median(taken)


def _keep(card: Card, found: list[Measured], device: torch.device) -> None:
    shares = {one.name: one.share for one in found}
    if device.type == "cuda":
        # On a GPU matrix products and attention are kept relative to convolutions.
        shares["matmul"] /= shares["conv"]
        shares["attention"] /= shares["conv"]
        shares.pop("kernel_s")
    file = calibration_file()
    content: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
    content[card.name] = shares
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
