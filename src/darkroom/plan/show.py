"""Plans as lines for a terminal and as plain values for machines, and how sure they are.

The 80 % intervals of time, memory and money have widths (spread.csv, by kind of work) that are fitted on what
the published tables say of constants that saw none of their rows, so that four rows of five lie inside. They
are independent of each other, so their squares add up, each weighed by its kind's share of the time. Money
and energy are as wide as the time that they follow from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from darkroom.bill import format_number
from darkroom.hardware.cards import NVIDIA, find_card, read_rows
from darkroom.plan.jobs import Plan
from darkroom.plan.roofline import HERE

if TYPE_CHECKING:
    from darkroom.plan.jobs import Where
    from darkroom.plan.roofline import Software

KINDS = ("compute", "memory_bound", "launch", "communication", "data")
TRIED = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell")  # chips that a published row tells of
SLOWER = ("latency_s", "usd_per_image", "usd_per_month")  # grow with the time; rates shrink
FASTER = ("steps_per_s",)
REST = 2.0  # phases besides the training: disks and hosts differ, and nobody has published any


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


def _intervals_to_dict(found: Mapping[str, Interval]) -> dict[str, Any]:
    """As `--json` gives them."""
    return {name: {"low": low, "high": high} for name, (low, high) in found.items()}


OFFERS = 4  # shown of a plan
Interval = tuple[float, float]
PARTS = ("compute", "memory_bound", "launch", "communication", "data")


def to_dict(plan: Plan) -> dict[str, Any]:
    """Every number of a plan."""
    values = {**asdict(plan), "peak_bytes": plan.peak_bytes, "kept": plan.kept}
    return {**values, "intervals": _intervals_to_dict(plan.intervals)}


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
