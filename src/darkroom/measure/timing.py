"""Timing that can be believed, and the tidy table it goes into.

Warm-up is left out and reported apart, both sides of a comparison take turns in one run, the device is
synchronised around every call, and a row says what it ran on and with which versions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import InputError
from darkroom.hardware import accelerator, machine
from darkroom.hardware.cards import mfu
from darkroom.hardware.machine import git_commit, versions
from darkroom.hardware.meters import PeakMemory
from darkroom.hardware.prices import price
from darkroom.hardware.system import load_average
from darkroom.run import append_rows, read_rows

T = TypeVar("T")


class Measurement(BaseModel):
    """One row of a table of measurements; what does not apply is left empty."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: str = Field(description="which benchmark: train, loader, import, ...")
    case: str = Field(description="what was run, unique with its settings within the benchmark")
    settings: dict[str, Any] = Field(default={}, description="what the case was run with")
    ratio: float | None = Field(default=None, description="median over the rounds of this time by ratio_to's")
    ratio_to: str | None = Field(default=None, description="the case that ratio compares with")
    median_s: float | None = Field(default=None, ge=0, description="median seconds of one repeat")
    p10_s: float | None = Field(default=None, ge=0, description="10th percentile of the repeats")
    p90_s: float | None = Field(default=None, ge=0, description="90th percentile of the repeats")
    repeats: int | None = Field(default=None, ge=1, description="timed repeats, without warm-up")
    images_per_s: float | None = Field(default=None, ge=0, description="pictures a second at the median")
    steps_per_s: float | None = Field(default=None, ge=0, description="steps a second at the median")
    mfu: float | None = Field(
        default=None, ge=0, description="model FLOPs utilisation; 2 FLOP a multiply-add"
    )
    peak_memory_bytes: int | None = Field(default=None, ge=0, description="resident set or CUDA allocator")
    energy_j: float | None = Field(default=None, ge=0, description="joules of one repeat")
    usd_per_image: float | None = Field(default=None, ge=0, description="at the price that note dates")
    warmup_s: float | None = Field(default=None, ge=0, description="seconds of warm-up, not in the times")
    machine: str = Field(default="", description="processor, cores, memory, cards")
    device: str = Field(default="", description="what the work ran on")
    num_devices: int = Field(default=1, ge=1, description="how many of them")
    versions: dict[str, str] = Field(default={}, description="of the packages that matter")
    commit: str = Field(default="", description="of the working directory; + where files differed")
    date: str = Field(default="", description="when, UTC")
    note: str = Field(default="", description="load average, price date, what else must be known")


COLUMNS = tuple(Measurement.model_fields)


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat of one case, in the order they ran."""

    name: str
    seconds: tuple[float, ...]
    warmup_s: float
    load_average: float | None  # runnable tasks in the minute before, by the operating system

    @property
    def median_s(self) -> float:
        """Seconds, the median of all repeats."""
        return statistics.median(self.seconds)

    @property
    def p10_s(self) -> float:
        """Seconds that a tenth of the repeats stay under."""
        return _percentile(self.seconds, 0.1)

    @property
    def p90_s(self) -> float:
        """Seconds that nine tenths stay under."""
        return _percentile(self.seconds, 0.9)

    @property
    def repeats(self) -> int:
        """How many were timed."""
        return len(self.seconds)

    def ratio(self, to: Timing) -> float:
        """Median over the rounds of this time by the other's: what disturbs a round disturbs both sides."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.seconds, to.seconds, strict=True))


def interleave(
    cases: Mapping[str, Callable[[], object]], *, repeats: int = 7, warmup: int = 1, device: str = "cpu"
) -> dict[str, Timing]:
    """Time callables in turns (A B A B ...) after `warmup` untimed calls of each.

    `device` is synchronised before each clock is read.
    """
    if repeats < 1 or warmup < 0 or not cases:
        raise InputError(
            f"{len(cases)} cases, repeats={repeats}, warmup={warmup}",
            allowed="at least one case, repeats >= 1, warmup >= 0",
        )
    load = load_average()
    warm = {name: sum(_timed(call, device) for _ in range(warmup)) for name, call in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, call in cases.items():
            seconds[name].append(_timed(call, device))
    return {name: Timing(name, tuple(seconds[name]), warm[name], load) for name in cases}


def synchronise(device: str = "cpu") -> None:
    """Wait until a device has done what it was given; nothing to wait for on a CPU."""
    if device != "cpu":
        accelerator.synchronize(device)


def peak_memory(call: Callable[[], T], device: str = "cpu") -> tuple[T, int]:
    """What a call returns and the highest memory use while it ran, in bytes, reset before.

    On a CPU that is the whole process's resident set, the interpreter and libraries included.
    """
    peak = PeakMemory(device)
    result = call()
    synchronise(device)
    return result, peak.bytes()


def measurement(
    benchmark: str,
    timing: Timing,
    *,
    baseline: Timing | None = None,
    images: float | None = None,
    steps: float | None = None,
    flops_per_image: float | None = None,
    precision: str = "float32",
    device: str = "cpu",
    note: str = "",
    **columns: Any,
) -> Measurement:
    """A row from a timing: rates from `images` and `steps` a repeat, MFU, cost, and where it ran.

    `columns` are further columns as they are (settings, peak_memory_bytes, energy_j, ...).
    """
    here = machine()
    on_gpu = bool(here.devices) and not device.startswith("cpu")
    name = here.devices[int(device.partition(":")[2] or 0)].name if on_gpu else here.cpu_class
    units = 1 if on_gpu else here.usable_cores
    rate = images / timing.median_s if images else None
    offer = price(name)
    usd = offer.usd_per_device_hour * units / 3600 / rate if offer and rate else None
    dated = f"price as of {offer.as_of}" if offer and usd else ""
    load = f"load average {timing.load_average:.2f}" if timing.load_average is not None else ""
    used = mfu(flops_per_image, rate / units, name, precision) if flops_per_image and rate else None
    values: dict[str, Any] = {
        "benchmark": benchmark,
        "case": timing.name,
        "ratio": timing.ratio(baseline) if baseline else None,
        "ratio_to": baseline.name if baseline else None,
        "median_s": timing.median_s,
        "p10_s": timing.p10_s,
        "p90_s": timing.p90_s,
        "repeats": timing.repeats,
        "images_per_s": rate,
        "steps_per_s": steps / timing.median_s if steps else None,
        "mfu": used,
        "usd_per_image": usd,
        "warmup_s": timing.warmup_s,
        "machine": here.name,
        "device": name,
        "versions": versions(("torch", "diffusers", "pylance", "numpy")),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "note": "; ".join(filter(None, (note, load, dated))),
    }
    return Measurement(**values | columns)


def append_csv(path: Path | str, rows: Iterable[Measurement]) -> Path:
    """Add rows to a table, which is replaced whole; InputError where the file has other columns."""
    return append_rows(Path(path), Measurement, rows)


def read_csv(path: Path | str) -> list[Measurement]:
    """The rows of a table. Raises InputError where it is not one."""
    return read_rows(Path(path), Measurement)


def _timed(call: Callable[[], object], device: str) -> float:
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _commit() -> str:
    found = git_commit()
    return "" if found is None else found["commit"][:12] + ("+" if found["changed"] else "")
