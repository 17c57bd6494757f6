"""One page and one CSV: every published cell, the plan's retelling of it, and darkroom today, with prices.

Three figures that must not be taken for each other: what was published then; what the plan says of that very
run (its error is the plan's); and what darkroom does of the same work on the same card, measured here or
planned.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import darkroom
from darkroom.errors import InputError
from darkroom.hardware import machine
from darkroom.hardware.cards import find_card
from darkroom.hardware.prices import price
from darkroom.hardware.system import write_atomically
from darkroom.measure.timing import Measurement, read_csv
from darkroom.plan.jobs import Where, step_seconds
from darkroom.plan.roofline import Efficiency, Software, efficiency
from darkroom.plan.show import between, half_width, spread
from darkroom.proof import tables as t
from darkroom.proof.drawings import KEY, five_plots
from darkroom.proof.published import error_text, shares, validate
from darkroom.proof.published_runs import Pretraining, images_s, micro_that_fits, pictures_s, steps_s
from darkroom.proof.tables import (
    OthersStep,
    Predict,
    PublishedValue,
    card,
    constant,
    others_profile,
    picture_profile,
)
from darkroom.report import html
from darkroom.report.measurements import measurement_sections

SYSTEMS = {
    "Vertex": "Vertex Model Garden: fine-tune and serve SD 1.5 (Google, 2023)",
    "Anyscale": "Ray pre-training of SD 2 (Anyscale, 2024)",
    "Lambda": "Lambda's inference benchmark (2022)",
    "MosaicML": "MosaicML: SD 2 base from scratch (2023)",
    "diffusers": "diffusers, memory and speed (2023)",
    "MLPerf": "Beside the five: MLPerf Training, SD 2 (2024 and 2025)",
}
COLUMNS = (
    "system", "table", "case", "unit", "published", "retold", "error", "counted", "table_holds",
    "today", "today_low", "today_high", "today_how", "published_at_todays_price", "usd_per_hour_then",
    "usd_per_hour_now", "price_as_of",
)  # fmt: skip
PLANNED = "planned"
Part = tuple[str, float, float]  # a card, its published USD an hour, its share of the cost


def write_five_systems(
    out: Path | str, sources: Sequence[Path | str] = (), *, proof: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write the page and next to it its CSV. `sources` are CSVs of measurements.

    `proof` is what `plan.validate` gives as plain values; it is made anew where it is not given. A cell that
    a row of `sources` measured (same card, work, batch, precision) shows that figure. Raises InputError for a
    source that is no CSV of measurements.
    """
    paths = [_checked(Path(source)) for source in sources]
    rows = [row for path in paths for row in read_csv(path)]
    if proof is None:
        proof = validate().to_dict()
    cells = list(five_cells(proof, rows))
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    table = target.with_suffix(".csv")
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)
    write_atomically(target, _page(proof, cells, paths))
    return target, table


def five_cells(proof: Mapping[str, Any], rows: Sequence[Measurement] = ()) -> Iterator[dict[str, Any]]:
    """Every cell of every published table with darkroom's figure, its mark and today's prices."""
    for found in proof["tables"]:
        system = _system_of(found["table"])
        for row in found["rows"]:
            taken = measured(found["table"], row["case"], rows)
            planned = _planned_cell(found["table"], row)
            own = {"today": taken[0], "today_how": taken[1]} if taken else planned
            yield {
                **row,
                "system": system,
                "table": found["table"],
                "retold": row["predicted"],
                "counted": not row["fitted"] and not row.get("derived"),
                "table_holds": found["holds"],
                **({"today_how": PLANNED} if planned else {}),
                **own,
                **_prices_today(found["table"], row),
            }


def _system_of(table: str) -> str:
    """Whose table it is."""
    return next(name for name in SYSTEMS if name in table)


# ---- measured cells

_CELLS = (
    ("latency (Lambda)", r"(?P<card>.+), (?P<precision>\w+), batch (?P<batch>\d+)"),
    ("memory (Lambda)", r"(?P<card>.+), (?P<precision>\w+), batch (?P<batch>\d+)"),
    ("images/s (MosaicML)", r"(?P<count>\d+) A100, (?P<side>\d+) px, pre-encoded"),
)
_PRECISIONS = {"single": ("float32",), "half": ("fp16", "bf16")}


def measured(table: str, case: str, rows: Sequence[Measurement]) -> tuple[float, str] | None:
    """The figure of a measured row that did a cell's work on its card, and where; None without one."""
    for name, pattern in _CELLS:
        match = re.fullmatch(pattern, case) if name == table else None
        if match is None:
            continue
        for row in rows:
            value = _drawn(table, match, row) if "Lambda" in table else _trained(match, row)
            if value is not None:
                return value, where(row)
    return None


def _drawn(table: str, match: re.Match[str], row: Measurement) -> float | None:
    settings = row.settings
    same = (
        row.benchmark == "batch"
        and settings.get("model") == "sd15"
        and settings.get("size") == "512x512"
        and settings.get("steps") == 50
        and settings.get("batch") == int(match["batch"])
        and settings.get("precision") in _PRECISIONS[match["precision"]]
        and _card_of(row) == match["card"]
    )
    if not same:
        return None
    if "latency" in table:  # a repeat goes over several prompts: a batch's seconds follow from the rate
        return int(match["batch"]) / row.images_per_s if row.images_per_s else None
    return None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e9


def _trained(match: re.Match[str], row: Measurement) -> float | None:
    settings = row.settings
    same = (
        row.benchmark == "train"
        and settings.get("model") == "sd2"
        and settings.get("resolution") == int(match["side"])
        and row.num_devices == int(match["count"])
        and _card_of(row) == "A100-SXM4-40GB"
    )
    return row.images_per_s if same else None


def _card_of(row: Measurement) -> str:
    """The card a row was measured on as hardware.csv has it; what the row says where it has none."""
    for text in (row.device, *row.machine.split(", ")):
        card = find_card(re.sub(r"^\d+ ?x ", "", text)) if text else None
        if card is not None:
            return card.name
    return row.device or "an unnamed device"


def where(row: Measurement) -> str:
    """'measured here', or on which card."""
    return "measured here" if row.machine == machine().name else f"measured on {_card_of(row)}"


# ---- prices


def _prices_today(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A dollar row at today's prices; nothing for other rows."""
    parts = price_parts(table, row["case"]) if row["unit"] == "USD" else ()
    offers = [price(card) for card, _, _ in parts]
    if not parts or any(offer is None for offer in offers):
        return {}
    pairs = [(then, offer, share) for (_, then, share), offer in zip(parts, offers, strict=True) if offer]
    factor = sum(share * offer.usd_per_device_hour / then for then, offer, share in pairs)
    return {
        "published_at_todays_price": row["published"] * factor,
        "usd_per_hour_then": " + ".join(f"{then:.4g}" for then, _, _ in pairs),
        "usd_per_hour_now": " + ".join(f"{offer.usd_per_device_hour:.4g}" for _, offer, _ in pairs),
        "price_as_of": min(offer.as_of for _, offer, _ in pairs).isoformat(),
        "cards": " + ".join(card for card, _, _ in parts),
    }


def price_parts(table: str, case: str) -> tuple[Part, ...]:
    """What a cost paid for: cards, the published price of an hour of one, and their shares of it."""
    if "MosaicML" in table:
        return (("A100-SXM4-40GB", t.MOSAIC_USD_PER_HOUR, 1.0),)
    if "Vertex" in table:
        card = next((name for name in t.VERTEX_USD_PER_HOUR if name in case), "A100-SXM4-40GB")
        return ((card, t.VERTEX_USD_PER_HOUR[card], 1.0),)
    if case.startswith("total"):
        return (("A100-SXM4-80GB", t.ANYSCALE_TOTAL_USD / t.ANYSCALE_TOTAL_A100_HOURS, 1.0),)
    return _phase_1(case.split()[2].rstrip(","))


def _phase_1(kind: str) -> tuple[Part, ...]:
    """The training machines, and the small cards that encode beforehand (offline) or meanwhile (online)."""
    _, hours, usd, small = t.ANYSCALE_PHASE_1[kind]
    encoding = t.ANYSCALE_ENCODING_USD if kind == "offline" else hours * small * t.ANYSCALE_A10G_USD
    share = encoding / (usd + (t.ANYSCALE_ENCODING_USD if kind == "offline" else 0))
    large = ("A100-SXM4-80GB", t.ANYSCALE_MACHINE_USD / 8, 1 - share)
    return (large, ("A10G", t.ANYSCALE_A10G_USD, share)) if share else (large,)


# ---- the page


def _page(proof: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> str:
    now = datetime.now(UTC)
    body = [
        _figures(proof, cells),
        _note(
            "Published then: what the system's own report says. Retold: what darkroom's plan says of that "
            "very run, by constants that saw no row of its table; its error is the plan's, and says nothing "
            "of how quick darkroom is. darkroom today: the same task with darkroom on the same card, "
            "measured where it says so, else planned with the interval that holds four of five; empty where "
            "the work is another. Costs stand at the published price of an hour, and at today's."
        ),
        KEY,
        *(_system(name, proof, cells) for name in SYSTEMS),
        *(part for path in paths for part in measurement_sections(path)),
        "" if paths else html.section("Measured", _note("No tables of measurements were given.")),
    ]
    return html.page(
        "Five published systems, and darkroom",
        f"{len(proof['tables'])} tables, {len(cells)} cells, {now.day} {now:%B %Y}",
        "\n".join(body),
        f"Written by darkroom {darkroom.__version__} on {now:%Y-%m-%d %H:%M} UTC. "
        "One file; nothing is loaded from elsewhere.",
    )


def _figures(proof: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    tables = proof["tables"]
    holding = sum(found["holds"] for found in tables)
    timed = [found for found in tables if found["seen_error"] is not None]
    taken = [cell for cell in cells if cell.get("today_how", PLANNED) != PLANNED]
    planned = [cell for cell in cells if cell.get("today_how") == PLANNED]
    dates = sorted({cell["price_as_of"] for cell in cells if "price_as_of" in cell})
    return html.cards(
        [
            (
                "median error, unseen",
                f"{median(found['median_error'] for found in timed):.1%}",
                "of the tables' medians, by constants that saw none of their rows",
            ),
            (
                "rows inside 80 %",
                f"{fmean(found['inside'] for found in timed):.0%}",
                "of unseen rows, each table alike",
            ),
            ("darkroom today", f"{len(taken)} measured", f"and {len(planned)} planned, with intervals"),
            ("prices as of", dates[0] if dates else "none", "the oldest that is used here"),
        ],
        [("tables that hold", f"{holding} of {len(tables)}", "unseen, each within its own bound")],
    )


def _system(name: str, proof: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    own = [cell for cell in cells if cell["system"] == name]
    parts = [html.grid(five_plots(name, own))]
    for found in proof["tables"]:
        if _system_of(found["table"]) == name:
            parts += _table_of(found, [cell for cell in own if cell["table"] == found["table"]])
    return html.section(SYSTEMS[name], *parts)


def _table_of(found: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f'<h3 style="margin: 22px 0 2px">{html.escape(found["table"])}</h3>'
    yield _verdict(found)
    if found["reading"]:
        yield _note(f"Reading: {found['reading']}.")
    priced = any("price_as_of" in cell for cell in cells)
    header = ["case", "published then", "retold", "error", "darkroom today", "unit"]
    if priced:
        header += ["at today's price"]
        yield _prices(cells)
    rows = [_line(cell, priced) for cell in cells]
    header += ["note"]
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    figures = frozenset(new for new, i in enumerate(used) if i in (1, 2, 3, 4, *((6,) if priced else ())))
    yield html.table([header[i] for i in used], [[row[i] for i in used] for row in rows], figures)


def _verdict(found: Mapping[str, Any]) -> str:
    kind = "the median" if found["by_median"] else "each cell"
    message = f"{kind} within {_bound(found)}; {error_text(found)}"
    if found["holds"]:
        return _note(f"Holds: {message}.")
    words = html.escape(f"Misses its bound: {message}.")
    return f'<p class="note"><strong style="color: var(--accent)">{words}</strong></p>'


def _bound(found: Mapping[str, Any]) -> str:
    if found["table"].startswith("largest batch"):
        return "one power of two"
    return f"{found['limit']:.2%}".replace(".00%", "%")


def _line(cell: Mapping[str, Any], priced: bool) -> list[Any]:
    line = [
        cell["case"], number(cell["published"]), number(cell["retold"]), _error(cell["error"]),
        _own(cell), cell["unit"],
    ]  # fmt: skip
    if priced:
        line.append(number(cell["published_at_todays_price"]) if "price_as_of" in cell else "")
    return [*line, unbroken("; ".join(_remarks(cell)))]


def _error(error: float) -> str:
    """'+4.2%', never '-0.0%'."""
    return f"{round(error, 3) + 0.0:+.1%}"


def _own(cell: Mapping[str, Any]) -> str:
    """darkroom's own figure: with its interval, or where it was measured."""
    if "today" not in cell:
        return ""
    if cell["today_how"] != PLANNED:
        return html.Marked(f"{number(cell['today'])} {cell['today_how']}")
    return number(float(f"{cell['today']:.3g}")) + between((cell["today_low"], cell["today_high"]))


def unbroken(text: str) -> str:
    """On one line where it is short: a word a line reads badly."""
    return text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) <= 30 else text


def _remarks(cell: Mapping[str, Any]) -> Iterator[str]:
    if cell["fitted"]:
        yield "read for the table's own script, not counted"
    if cell.get("derived"):
        yield "follows from another cell, not counted"
    if "plain_reading" in cell:
        yield f"plain reading {number(cell['plain_reading'])}"
    if "note" in cell:
        yield cell["note"]
    if "at_least" in cell:
        yield f"the card is full, at least {cell['at_least']:g} counts"


def _prices(cells: Sequence[Mapping[str, Any]]) -> str:
    """The price of an hour of each card, as published and as of a date."""
    prices = {
        f"{cell['cards']} {cell['usd_per_hour_then']} then, {cell['usd_per_hour_now']} "
        f"as of {cell['price_as_of']}"
        for cell in cells
        if "price_as_of" in cell
    }
    return _note(f"USD an hour of one card: {'; '.join(sorted(prices))}.")


def number(value: float) -> str:
    """'398,592', '12.6', '0.0008'."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _note(text: str) -> str:
    return f'<p class="note" style="margin-top: 8px">{html.escape(text)}</p>'


def _checked(path: Path) -> Path:
    if path.suffix.lower() != ".csv" or not path.is_file():
        raise InputError(f"'{path}' with --five-systems", allowed="CSVs of measurements")
    return path


# ---- the same work with darkroom's own software on the same card, planned with an 80 % interval
#
# Only where the task is the same: half precision against half precision, a pre-training step on stored
# latents against one, one LoRA step against one (darkroom has stored latents and text beforehand, the
# published script encoded them at each step, which the page says). Where the published run did something
# else (single precision, pre-training with encoders at each step, a job's start) there is no such figure.

HALF = Software("fp16")  # as darkroom draws: channels last, fused attention


def _planned_figure(table: str, case: str, published: float) -> dict[str, float]:
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


def _planned_cell(table: str, row: dict[str, Any]) -> dict[str, float]:
    """The figure of a row of the proof."""
    return _planned_figure(table, row["case"], row["published"])
