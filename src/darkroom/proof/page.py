"""One page and one CSV: every published cell, the plan's retelling of it, and darkroom today, with prices.

Three figures that must not be taken for each other: what was published then; what the plan says of that very
run (its error is the plan's); and what darkroom does of the same work on the same card, measured here or
planned.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import darkroom
from darkroom.errors import InputError
from darkroom.hardware import machine
from darkroom.hardware.cards import find_card
from darkroom.hardware.prices import price
from darkroom.measure.timing import Measurement, read_csv
from darkroom.proof import tables as t
from darkroom.proof import today
from darkroom.proof.drawings import KEY, five_plots
from darkroom.proof.published import told_error, validate
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
    target.write_text(_page(proof, cells, paths), encoding="utf-8")
    return target, table


def five_cells(proof: Mapping[str, Any], rows: Sequence[Measurement] = ()) -> Iterator[dict[str, Any]]:
    """Every cell of every published table with darkroom's figure, its mark and today's prices."""
    for found in proof["tables"]:
        system = _system_of(found["table"])
        for row in found["rows"]:
            taken = measured(found["table"], row["case"], rows)
            planned = today.cell(found["table"], row)
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
    header = ["case", "published then", "retold", "error", "darkroom today", "unit", "note"]
    if priced:
        header += ["published at today's price"]
        yield _prices(cells)
    rows = [_line(cell, priced) for cell in cells]
    yield html.table(header, rows, frozenset((1, 2, 3, 4, 7)))


def _verdict(found: Mapping[str, Any]) -> str:
    kind = "the median" if found["by_median"] else "each cell"
    message = f"{kind} within {_bound(found)}; {told_error(found)}"
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
        cell["case"], number(cell["published"]), number(cell["retold"]), f"{cell['error']:+.1%}",
        _own(cell), cell["unit"], unbroken("; ".join(_remarks(cell))),
    ]  # fmt: skip
    if not priced:
        return line
    return [*line, number(cell["published_at_todays_price"]) if "price_as_of" in cell else ""]


def _own(cell: Mapping[str, Any]) -> str:
    """darkroom's own figure: with its interval, or where it was measured."""
    if "today" not in cell:
        return ""
    if cell["today_how"] != PLANNED:
        return html.Marked(f"{number(cell['today'])} {cell['today_how']}")
    return f"{cell['today']:.3g} ({cell['today_low']:.2g} to {cell['today_high']:.2g})"


def unbroken(text: str) -> str:
    """On one line where it is short: a table scrolls sideways, and a word a line reads badly."""
    return text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) <= 70 else text


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
