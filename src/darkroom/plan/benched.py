"""What `darkroom bench batch` measured on this machine, beside the plan of the same pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from darkroom.hardware import find_card, machine
from darkroom.models import FAMILIES
from darkroom.options import parse_size
from darkroom.plan.ask import picture_profile
from darkroom.plan.jobs import GenerateJob, Where, plan_generating
from darkroom.plan.roofline import Software


class Row(Protocol):
    """What is read of a measurement (`darkroom.measure.Measurement`)."""

    @property
    def benchmark(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def median_s(self) -> float | None: ...
    @property
    def images_per_s(self) -> float | None: ...
    @property
    def machine(self) -> str: ...
    @property
    def device(self) -> str: ...


def factors(where: Where, rows: Iterable[Row]) -> list[float]:
    """Measured by planned images/s of every row that this machine's device measured."""
    own = [row for row in _own(where, rows) if row.images_per_s]
    return [(row.images_per_s or 0.0) / planned_rate(where, row) for row in own]


def _own(where: Where, rows: Iterable[Row]) -> Iterator[Row]:
    name = machine().name
    for row in rows:
        told = row.settings
        plain = told.get("backend", "torch") == "torch" and not told.get("autocast")
        own = row.machine == name and find_card(row.device) == where.card
        if row.benchmark == "batch" and own and plain and told.get("model") in FAMILIES:
            yield row


def planned_rate(where: Where, row: Row) -> float:
    """Images a second that the plan gives for a row's settings."""
    told = row.settings
    width, height = parse_size(told["size"])
    precision = told["precision"]
    # Half precisions move and hold the same bytes: one count serves both.
    counted = "bf16" if precision == "fp16" else precision
    profile = picture_profile(told["model"], width, height, told["guidance"] > 1, counted, "fused")
    batch = max(1, round((row.images_per_s or 0.0) * (row.median_s or 0.0)))
    job = GenerateJob("bench", batch, batch, told["steps"])
    software = Software(precision, channels_last=precision != "float32")  # as `auto` picks it
    return plan_generating(profile, job, where, software).images_per_s
