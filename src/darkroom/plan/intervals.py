"""How sure a plan is: 80 % intervals of time, memory and money.

The widths (spread.csv, by kind of work) are fitted on what the published tables say of constants that saw
none of their rows, so that four rows of five lie inside. They are independent of each other, so their squares
add up, each weighed by its kind's share of the time. Money and energy are as wide as the time that they
follow from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from darkroom.bill import format_number
from darkroom.hardware.cards import read_rows
from darkroom.plan.roofline import HERE

if TYPE_CHECKING:
    from darkroom.plan.jobs import Plan, Where
    from darkroom.plan.roofline import Software

KINDS = ("compute", "memory_bound", "launch", "communication", "data")
TRIED = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell")  # chips that a published row tells of
SLOWER = ("latency_s", "usd_per_image", "usd_per_month")  # grow with the time; rates shrink
FASTER = ("steps_per_s",)
REST = 2.0  # phases besides the training: disks and hosts differ, and nobody has published any

Interval = tuple[float, float]


@cache
def spread() -> dict[str, float]:
    """Half widths of 80 % intervals in logarithms (spread.csv)."""
    return {row["name"]: float(row["value"]) for row in read_rows(HERE / "spread.csv")}


def half_width(widths: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """Half the width of a time's interval in logarithms, from each kind of work's share of it."""
    parts = [widths["any"], *(share * widths[kind] for kind, share in shares.items())]
    return math.sqrt(sum(part * part for part in parts))


def time_width(step_s: Mapping[str, float], where: Where, software: Software) -> float:
    """Half the width of a plan's time in logarithms."""
    widths = spread()
    total = step_s["total"] or 1.0
    shares = {kind: step_s[kind] / total for kind in KINDS if step_s.get(kind)}
    card = where.card
    if where.calibrated:
        more = [widths["calibrated"]]
        shares = {kind: share for kind, share in shares.items() if kind in ("communication", "data")}
        return math.sqrt(sum(part**2 for part in (*more, *(s * widths[k] for k, s in shares.items()))))
    more = [half_width(widths, shares)]
    if card.kind == "cpu":
        more.append(widths["cpu"])
    elif card.architecture not in TRIED:
        more.append(widths["untried card"])
    if software.untried:
        more.append(widths["untried format"])
    return math.sqrt(sum(part**2 for part in more))


def memory_width(where: Where) -> float:
    """Half the width of a peak's interval in logarithms."""
    return spread()["memory cpu" if where.card.kind == "cpu" else "memory gpu"]


def around(value: float, half: float) -> Interval:
    """The interval around a value."""
    return value * math.exp(-half), value * math.exp(half)


def _whole_job(plan: Plan, half: float) -> Interval:
    """Factors around a whole job's time: what is not training may take half or twice as long."""
    train_s = plan.phases_s.get("train")
    total_s = sum(plan.phases_s.values())
    if train_s is None or not total_s:
        return around(1.0, half)
    low, high = around(train_s, half)
    rest = total_s - train_s
    return (low + rest / REST) / total_s, (high + rest * REST) / total_s


def with_intervals(plan: Plan, where: Where, software: Software) -> Plan:
    """The plan with the 80 % interval of each of its figures; those that it has already are kept."""
    half, memory = time_width(plan.step_s, where, software), memory_width(where)
    low, high = _whole_job(plan, half)

    def whole(value: float) -> Interval:
        return value * low, value * high

    found: dict[str, Interval] = {
        "step_s": around(plan.step_s["total"], half),
        "images_per_s": around(plan.images_per_s, half),
        "hours": whole(plan.hours),
        "device_hours": whole(plan.cost.device_hours),
        "kwh": whole(plan.cost.kwh),
        "mfu": around(plan.mfu, half),
        "peak_bytes": around(plan.peak_bytes, memory),
    }
    for name, taken_s in plan.phases_s.items():
        found[f"phases_s.{name}"] = around(taken_s, half if name == "train" else math.log(REST))
    for name in ("usd", "usd_spot"):
        value = getattr(plan.cost, name)
        if value is not None:
            found[name] = whole(value)
    for name in (*SLOWER, *FASTER):
        value = plan.extra.get(name)
        if value is not None:
            found[name] = around(value, half)
    notes = (*plan.notes, *_close(plan, where, found["peak_bytes"]))
    found |= plan.intervals
    low_kwh, high_kwh = found["kwh"]
    a_kwh = plan.cost.kg_co2e / plan.cost.kwh if plan.cost.kwh else 0.0
    found["kg_co2e"] = (low_kwh * a_kwh, high_kwh * a_kwh)
    ends = [end / plan.cost.device_hours for end in found["device_hours"]] if plan.offers else []
    offers = tuple(
        {**one, **dict(zip(("usd_low", "usd_high"), (one["usd"] * end for end in ends), strict=True))}
        for one in plan.offers
    )
    return replace(plan, notes=notes, offers=offers, intervals=found)


def _close(plan: Plan, where: Where, peak: Interval) -> Iterator[str]:
    """Where memory is so close that whether it fits is not sure."""
    usable = where.total_bytes if where.card.kind == "cpu" else where.usable_bytes
    if usable is None or not peak[0] < usable < peak[1]:
        return
    if plan.fits and plan.peak_bytes <= usable:
        yield f"close: it may take more than the {format_number(usable / 1e9)} GB there are"
    elif not plan.fits and plan.peak_bytes > usable:
        yield f"close: it may fit into the {format_number(usable / 1e9)} GB after all"


def to_dict(found: Mapping[str, Interval]) -> dict[str, Any]:
    """As `--json` gives them."""
    return {name: {"low": low, "high": high} for name, (low, high) in found.items()}
