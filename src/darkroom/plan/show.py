"""Plans as lines for a terminal and as plain values for machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from darkroom.bill import format_number
from darkroom.hardware.cards import NVIDIA, find_card
from darkroom.plan import intervals
from darkroom.plan.jobs import Plan

OFFERS = 4  # shown of a plan
Interval = tuple[float, float]
PARTS = ("compute", "memory_bound", "launch", "communication", "data")


def to_dict(plan: Plan) -> dict[str, Any]:
    """Every number of a plan."""
    values = {**asdict(plan), "peak_bytes": plan.peak_bytes, "kept": plan.kept}
    return {**values, "intervals": intervals.to_dict(plan.intervals)}


def lines(plan: Plan) -> Iterator[str]:
    """One plan in full."""
    many = f"{plan.count} x " if plan.count > 1 else ""
    yield f"{plan.job} on {many}{plan.device}: {'fits' if plan.fits else 'does NOT fit'}"
    for label, text in _facts(plan):
        yield f"  {label:<12} {text}"
    for note in (*plan.notes, *plan.over):
        yield f"  {'note':<12} {note}"


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    total, trained = plan.parameters["total"], plan.parameters["trained"]
    share = f"; trained {trained:,} ({format_number(100 * trained / total, 2)} %)" if trained else ""
    yield "parameters", f"{total:,}{share}"
    yield "arithmetic", f"{flops(plan.flops_an_image)} an image, {flops(plan.flops_a_step)} a step"
    yield (
        "batch",
        ", ".join(f"{name} {number:,}" for name, number in plan.batch.items()) + f"; {plan.precision}",
    )
    if plan.machine:
        yield "machines", plan.machine
    spread = plan.intervals.get
    yield "memory", f"{gb(plan.peak_bytes, spread('peak_bytes'))} at the peak{_room(plan)}"
    held = [f"{kind} {gb(size)}" for kind, size in plan.memory_bytes.items() if size >= 5e6]
    if held:
        yield "", ", ".join(held)
    if plan.largest_micro_batch is not None:
        yield "", f"largest batch at once: {plan.largest_micro_batch:,}"
    total_s = plan.step_s["total"]
    parts = [
        f"{name.replace('_', '-')} {100 * plan.step_s[name] / total_s:.0f} %"
        for name in PARTS
        if plan.step_s[name] > 0.005 * total_s
    ]
    each = "step" if trained else "batch"
    yield "time", f"{seconds(total_s, spread('step_s'))} a {each}: {', '.join(parts)}"
    rate = f"{plan.images_per_s:,.3g}{between(spread('images_per_s'))} images/s"
    yield "speed", f"{rate}, {100 * plan.mfu:.0f} % of the peak rate"
    yield from _extra(plan)
    yield "takes", f"{hours(plan.hours, spread('hours'))}, {plan.cost.device_hours:,.3g} device-hours"
    if len(plan.phases_s) > 1:
        yield "", ", ".join(f"{name} {hours(s / 3600)}" for name, s in plan.phases_s.items())
    yield "costs", _money(plan)
    if plan.cost.reserved_years:
        years = "a year" if plan.cost.reserved_years == 1 else f"{plan.cost.reserved_years} years"
        yield "", f"reserved: {usd(plan.cost.committed_usd)} for {years} of its machines, used or not"
    if len(plan.offers) > 1:
        yield "", f"offers: {'; '.join(map(_offer, plan.offers[:OFFERS]))}{_more(plan)}"
    yield (
        "energy",
        f"{plan.cost.kwh:,.3g} kWh, {plan.cost.kg_co2e:,.3g} kg CO2e (rated power, building included)",
    )
    sizes = [f"{name} {gb(size)}" for name, size in plan.sizes_bytes.items() if size]
    if sizes:
        yield "on disk", ", ".join(sizes)
    if plan.storage is not None:
        kept = plan.storage
        yield "", f"{usd(kept.usd_per_month)} a month, {usd(kept.usd_out)} to move out once; {kept.price}"


def _room(plan: Plan) -> str:
    total, usable = plan.device_memory_bytes, plan.usable_memory_bytes
    if not total or not usable:
        return ""
    if "process" in plan.memory_bytes:  # a CPU's: counted in the peak
        return f" of {gb(total)}"
    card = find_card(plan.device)
    driver = "CUDA" if card is None or card.architecture in NVIDIA else "the driver"
    return f" of {gb(total)}, {gb(total - usable)} of it for {driver} and fragments"


def _extra(plan: Plan) -> Iterator[tuple[str, str]]:
    labels = {
        "data_hidden_s": "reading meanwhile, hidden: {} s a step",
        "latency_s": "{}{} s for a batch",
        "steps_per_s": "{}{} denoising steps/s",
        "latency_p50_s": "half within {}{} s",
        "latency_p95_s": "95 of 100 within {}{} s",
        "latency_p99_s": "99 of 100 within {}{} s",
        "capacity_images_per_s": "capacity {}{} images/s",
        "busy": "{:.0%}{} busy",
        "usd_per_image": "USD {:.2g}{} an image",
        "usd_per_month": "USD {:,.0f}{} a month",
        "devices": "{}{} devices",
        "batch": "batches of {}{}",
    }
    found = [
        labels[key].format(
            value if "{:" in labels[key] else format_number(value), between(plan.intervals.get(key))
        )
        for key, value in plan.extra.items()
        if key in labels and value is not None
    ]
    for i in range(0, len(found), 4):
        yield "", ", ".join(found[i : i + 4])


def _offer(offer: Mapping[str, Any]) -> str:
    spot = "" if offer["usd_spot"] is None else f" (spot {usd(offer['usd_spot']).removeprefix('USD ')})"
    return f"{offer['provider']} {offer['instance']} {usd(offer['usd'])}{spot}"


def _more(plan: Plan) -> str:
    left = len(plan.offers) - OFFERS
    return f"; {left} more with --json" if left > 0 else ""


def _money(plan: Plan) -> str:
    cost = plan.cost
    if cost.usd is None:
        return "no price known: say --price USD for an hour of one device"
    spread = plan.intervals.get
    spot = "" if cost.usd_spot is None else f", {usd(cost.usd_spot, spread('usd_spot'))} spot"
    old = " (OLD: read it again)" if cost.price_is_old else ""
    kind = "spot: it may be taken away" if cost.at_spot else f"on demand{spot}"
    if cost.reserved_years:
        kind = "reserved"
    return f"{usd(cost.usd, spread('usd'))} {kind}; {cost.price}{old}"


def comparison(found: Sequence[Plan]) -> list[dict[str, Any]]:
    """Plans side by side, a row each."""
    return [
        {
            "device": plan.device,
            "count": plan.count,
            "fits": "yes" if plan.fits else "no",
            "batch": plan.batch.get("micro", plan.batch.get("batch", 0)),
            "memory": gb(plan.peak_bytes),
            "images/s": f"{plan.images_per_s:,.3g}",
            "MFU": f"{100 * plan.mfu:.0f} %",
            "time": hours(plan.hours, plan.intervals.get("hours")),
            "device-h": f"{plan.cost.device_hours:,.3g}",
            "USD": "-"
            if plan.cost.usd is None
            else usd(plan.cost.usd, plan.intervals.get("usd")).removeprefix("USD "),
            "spot": "-" if plan.cost.usd_spot is None else usd(plan.cost.usd_spot).removeprefix("USD "),
            "kWh": f"{plan.cost.kwh:,.3g}",
            "note": "; ".join((*plan.notes, *plan.over)),
        }
        for plan in found
    ]


def together(found: Sequence[Plan], *, sure: bool = False) -> str:
    """What plans take one after the other; with `sure` its interval, as if all are off the same way."""
    spent = [plan.cost.usd for plan in found if plan.cost.usd is not None]
    money = usd(sum(spent)) if len(spent) == len(found) else "no price known"
    device_hours = sum(plan.cost.device_hours for plan in found)
    spread = tuple(sum(plan.intervals["hours"][i] for plan in found) for i in (0, 1)) if sure else None
    took = hours(sum(plan.hours for plan in found), spread)  # type: ignore[arg-type]
    return f"together: {took}, {device_hours:,.3g} device-hours, {money}"


def price_lines(found: Iterable[Plan]) -> Iterator[str]:
    """The dates of the prices behind a comparison, and a warning where one is old."""
    dates = sorted({plan.cost.price_as_of for plan in found if plan.cost.price_as_of})
    if dates:
        yield f"prices as of {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "")
    if any(plan.cost.price_is_old for plan in found):
        yield "some prices are older than 90 days: read them again, or say --price"


def gb(size: float | None, interval: Interval | None = None) -> str:
    """Decimal gigabytes, as cards are sold; megabytes below a tenth."""
    size = size or 0.0
    divisor, unit = (1e12, "TB") if size >= 1e12 else (1e9, "GB") if size >= 1e8 else (1e6, "MB")
    return f"{size / divisor:,.3g} {unit}{between(interval, divisor)}"


def flops(number: float) -> str:
    """'2.41 TFLOP'."""
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e6:.3g} MFLOP"


def seconds(number: float, interval: Interval | None = None) -> str:
    """'12 ms', '3.4 s (2.9 to 3.9)'."""
    divisor, unit = (1e-3, "ms") if number < 1 else (1.0, "s")
    return f"{number / divisor:.3g} {unit}{between(interval, divisor)}"


def hours(number: float, interval: Interval | None = None) -> str:
    """'35 s', '12 min', '3.5 h', '3.8 days (3.2 to 4.6)', '73,000 days'."""
    divisor, unit = (
        (1 / 3600, "s") if number < 1 / 60 else (1 / 60, "min") if number < 1
        else (1.0, "h") if number < 72 else (24.0, "days")
    )  # fmt: skip
    return f"{format_number(number / divisor)} {unit}{between(interval, divisor)}"


def usd(number: float, interval: Interval | None = None) -> str:
    """'USD 12.30 (10 to 15)', 'USD 1,234', 'USD 0.0034'."""
    amount = f"{number:,.0f}" if number >= 1000 else f"{number:.2f}"
    if 0 < number < 1:
        amount = f"{number:.2g}"
    return f"USD {amount}{between(interval)}"


def between(interval: Interval | None, divisor: float = 1.0) -> str:
    """' (3.2 to 4.6)': two digits are all that an interval is good for."""
    return (
        "" if interval is None else f" ({_short(interval[0] / divisor)} to {_short(interval[1] / divisor)})"
    )


def _short(number: float) -> str:
    return f"{number:.2g}" if number < 100 else f"{float(f'{number:.2g}'):,.0f}"
