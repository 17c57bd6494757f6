"""Every published table with what the plan says of it, how it was read, and whether it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from darkroom.plan.roofline import FITTED, Efficiency, efficiency
from darkroom.plan.show import half_width, spread
from darkroom.proof.published_runs import (
    anyscale_costs,
    anyscale_rates,
    anyscale_total,
    diffusers_ladder,
    engines_elsewhere,
    lambda_latency,
    lambda_memory,
    mlperf,
    mosaic_costs,
    mosaic_days,
    mosaic_rates,
    tensorrt,
    torch2,
    vertex_largest,
    vertex_lora,
    vertex_memory,
    vertex_serving,
    vertex_speed,
)
from darkroom.proof.tables import PublishedTable, PublishedValue

B_READING = (
    "reading B for every row: prior preservation doubles the batch, VAE and text encoder in float32, AdamW "
    "of torch 2.0"
)
SPEED_READING = (
    "captioned flowers, so no prior preservation; float32 VAE and text encoder at each step; steps/s with "
    "the script's memory tracing, costs without"
)

TABLES: dict[str, tuple[float, bool, Callable[[], Iterator[PublishedValue]], str]] = {
    "LoRA parameters and files (Vertex)": (0.03, False, vertex_lora, "queries and values of the U-Net"),
    "peak VRAM (Vertex)": (0.20, False, vertex_memory, B_READING),
    "largest batch (Vertex)": (1.0, False, vertex_largest, B_READING),
    "training speed and cost (Vertex)": (0.15, True, vertex_speed, SPEED_READING),
    "serving (Vertex)": (
        0.15,
        True,
        vertex_serving,
        "fp16, sliced attention as fused: a slice's scores stay in the cache; four pictures at once",
    ),
    "images/s (Anyscale)": (
        0.15,
        True,
        anyscale_rates,
        "micro-batches 128 and 32 on 80 GB, else the largest power of two that fits; summed each time",
    ),
    "costs from their rates (Anyscale)": (0.10, False, anyscale_costs, ""),
    "phases and total from counts (Anyscale)": (
        0.20,
        False,
        anyscale_total,
        "32 A100-80: phase 1 by DDP on the fast network, the whole run by FSDP and compile; A10G encode each "
        "sample once, beforehand or meanwhile",
    ),
    "days (MosaicML)": (0.0012, False, mosaic_days, "their rates, which they printed rounded"),
    "costs (MosaicML)": (0.03, False, mosaic_costs, "USD 2 an A100-hour"),
    "images/s (MosaicML)": (
        0.15,
        True,
        mosaic_rates,
        "micro-batch 4 inline with float32 encoders, and 16 pre-encoded",
    ),
    "latency (Lambda)": (0.20, True, lambda_latency, "attention of 2022; half under autocast"),
    "memory (Lambda)": (0.15, True, lambda_memory, "attention of 2022; half under autocast"),
    "ladder and steps/s (diffusers)": (0.25, True, diffusers_ladder, "one picture of 512 px"),
    "torch 2 steps/s (diffusers)": (
        0.25,
        True,
        torch2,
        "channels last; graphs are compile's reduce-overhead",
    ),
    "measured elsewhere (diffusers)": (
        0.25,
        True,
        engines_elsewhere,
        "one guided picture in half precision, fused attention",
    ),
    "TensorRT and fp8 (MLPerf and others)": (
        0.25,
        True,
        tensorrt,
        "TensorRT as CUDA graphs of fused kernels; MLPerf's in batches of 8",
    ),
    "MLPerf SD 2, eight cards": (
        0.20,
        False,
        mlperf,
        "half throughout, channels last, CUDA graphs since v4.0",
    ),
}


ANYSCALE = "images/s (Anyscale)"
TIMED = (
    *("training speed and cost (Vertex)", "serving (Vertex)", ANYSCALE, "images/s (MosaicML)"),
    *("latency (Lambda)", "ladder and steps/s (diffusers)", "torch 2 steps/s (diffusers)"),
    *("measured elsewhere (diffusers)", "MLPerf SD 2, eight cards"),
)
# Tables whose predictions rest on fitted constants, and the table that is left out for each; '' where the fit
# never sees it.
RESTS_ON = {
    **{name: name for name in TIMED},
    "phases and total from counts (Anyscale)": ANYSCALE,
    "TensorRT and fp8 (MLPerf and others)": "",
}
MEMORY = ("peak VRAM (Vertex)", "memory (Lambda)")
LEFT_OUT = Path(__file__).with_name("left_out.json")
LEFT_OUT_SPREAD = Path(__file__).with_name("left_out_spread.json")


@cache
def unseen(name: str) -> Efficiency:
    """The constants for a table: those that saw none of its rows (left_out.json, written by fit.py)."""
    values = json.loads(LEFT_OUT.read_text(encoding="utf-8")).get(name, [])
    return efficiency().with_values({(key, where): value for key, where, value in values})


@cache
def unseen_spread(name: str) -> dict[str, float]:
    """The widths of intervals for a table: fitted on the other tables' errors (left_out_spread.json)."""
    found: dict[str, dict[str, float]] = json.loads(LEFT_OUT_SPREAD.read_text(encoding="utf-8"))
    return {**spread(), **found.get(name, {})}


def table(name: str) -> PublishedTable:
    """One table, its rows counted."""
    limit, by_median, rows, reading = TABLES[name]
    return PublishedTable(name, limit, tuple(rows()), by_median, reading)


def error(row: PublishedValue, known: Efficiency) -> float:
    """How far the prediction is off, as a share of what was published."""
    predicted = row.predict(known)
    if row.at_least is not None:
        return min(0.0, predicted / row.at_least - 1)
    return predicted / row.published - 1 if row.published else float(predicted != 0)


def counted(found: PublishedTable) -> list[PublishedValue]:
    """The rows that the proof counts: what was neither read for the table's own script nor follows from
    another.
    """
    return [row for row in found.rows if not row.derived and not row.fitted]


def holds(found: PublishedTable, known: Efficiency) -> bool:
    """Whether a table's counted rows are within its tolerance."""
    left = counted(found)
    if found.name.startswith("largest batch"):
        return all(_near(row, known) for row in left)
    if found.by_median:
        return median_error(found, known) <= found.limit
    return all(abs(error(row, known)) <= _limit(row, found) + 1e-12 for row in left)


def median_error(found: PublishedTable, known: Efficiency) -> float:
    """The median of the counted rows' errors."""
    return median(abs(error(row, known)) for row in counted(found))


def _limit(row: PublishedValue, found: PublishedTable) -> float:
    return found.limit if row.limit is None else row.limit


def _near(row: PublishedValue, known: Efficiency) -> bool:
    """The same power of two or its neighbour; none is none."""
    predicted = row.predict(known)
    if not row.published or not predicted:
        return predicted <= 1 and row.published <= 1
    return 0.5 <= predicted / row.published <= 2


def _as_dict(row: PublishedValue, known: Efficiency) -> dict[str, Any]:
    """A row as `--json` gives it."""
    values: dict[str, Any] = {
        "case": row.case,
        "published": row.published,
        "predicted": row.predict(known),
        "error": error(row, known),
        "fitted": row.fitted,
        "unit": row.unit,
    }
    if row.plain is not None:
        values["plain_reading"] = row.plain(known)
    if row.at_least is not None:
        values["at_least"] = row.at_least
    if row.derived:
        values["derived"] = True
    if row.note:
        values["note"] = row.note
    return values


@dataclass(frozen=True)
class Validation:
    """Every table with its rows, as constants predict them that saw none of its rows."""

    tables: tuple[dict[str, Any], ...]

    @property
    def holding(self) -> int:
        """Tables within their tolerance."""
        return sum(found["holds"] for found in self.tables)

    def timed(self) -> list[dict[str, Any]]:
        """The tables that rest on fitted constants."""
        return [found for found in self.tables if found["table"] in RESTS_ON]

    @property
    def inside(self) -> float:
        """Share of rows inside their 80 % interval, each table alike."""
        return fmean(found["inside"] for found in self.timed())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        timed = self.timed()
        return {
            "holding": self.holding,
            "holding_unseen": sum(found["holds"] for found in timed),
            "rest_on_the_fit": len(timed),
            "median_error_unseen": median(found["median_error"] for found in timed),
            "inside_80": self.inside,
            "constants_fitted": FITTED,
            "tables": list(self.tables),
        }

    def lines(self) -> Iterator[str]:
        """For a terminal: how it stands, then every row by name, errors not hidden."""
        timed = self.timed()
        yield (
            f"{sum(found['holds'] for found in timed)} of the {len(timed)} tables that rest on fitted "
            f"constants hold where these saw none of their rows; {FITTED} constants are fitted"
        )
        yield f"{self.holding} of all {len(self.tables)} tables hold"
        least, *_, most = sorted(found["inside"] for found in timed)
        yield (
            f"{self.inside:.0%} of unseen rows lie inside their 80 % interval, each table alike; of single "
            f"tables {least:.0%} to {most:.0%}"
        )
        for found in timed:
            covered = f"{found['inside']:.0%} of {found['inside_of']} rows inside 80 %"
            message = f"median error {found['median_error']:.1%}, {covered}"
            verdict = "holds" if found["holds"] else "does NOT hold"
            yield f"  {found['table']:<42} {message}, {verdict}; seen {found['seen_error']:.1%}"
        for found in (one for one in self.tables if one["table"] in MEMORY):
            covered = f"{found['inside']:.0%} of {found['inside_of']} rows inside 80 %"
            yield f"  {found['table']:<42} {covered}, of memory"
        yield ""
        for found in self.tables:
            verdict = "holds" if found["holds"] else "does NOT hold"
            kind = "median" if found["by_median"] else "each"
            bound = f"{kind} within {found['limit']:.2g}"
            yield f"{found['table']}: {verdict} ({bound}; {error_text(found)})"
            if found["reading"]:
                yield f"  reading: {found['reading']}"
            width = max(len(row["case"]) for row in found["rows"])
            for row in found["rows"]:
                yield _line(row, width)
            yield ""


def error_text(found: Mapping[str, Any]) -> str:
    """A table's error, and whether constants had seen it."""
    if found["seen_error"] is None:
        return f"median error {found['median_error']:.1%}, nothing of it is fitted"
    unseen, seen = f"{found['median_error']:.1%}", f"{found['seen_error']:.1%}"
    return f"median error {unseen} by constants that saw none of its rows, {seen} by those in use"


def _line(row: Mapping[str, Any], width: int) -> str:
    numbers = f"{row['published']:>12,.6g}  {row['predicted']:>12,.6g}  {row['error']:>+7.1%}"
    text = f"  {row['case']:<{width}}  {numbers}"
    marks = ["read for the table's own script: not counted"] if row["fitted"] else []
    if row.get("derived"):
        marks.append("follows from another row: not counted")
    if "plain_reading" in row:
        marks.append(f"plain reading {row['plain_reading']:.3g}")
    if "at_least" in row:
        marks.append(f"the card's ceiling: at least {row['at_least']:g}")
    if "note" in row:
        marks.append(row["note"])
    return f"{text} {row['unit']}" + (f"  ({'; '.join(marks)})" if marks else "")


def validate(known: Efficiency | None = None, say: Callable[[str], None] = lambda _: None) -> Validation:
    """Predict every published table: by constants that saw none of its rows, or all by given ones."""
    found = []
    for name in TABLES:
        one = table(name)
        own = known or (unseen(name) if name in RESTS_ON else efficiency())
        entry = {
            "table": name,
            "holds": holds(one, own),
            "limit": one.limit,
            "by_median": one.by_median,
            "reading": one.reading,
            "median_error": median_error(one, own),
            "seen_error": median_error(one, known or efficiency()) if name in RESTS_ON else None,
            "rows": [_as_dict(row, own) for row in one.rows],
        }
        if name in (*RESTS_ON, *MEMORY):
            entry["inside"], entry["inside_of"] = inside(one, own), len(_timed_rows(one))
        found.append(entry)
    return Validation(tuple(found))


# ---- how sure: an interval of a published row, as of a plan

# Constants that one kind of work's time follows, and by how much they are moved.
MOVED = {
    "compute": (("conv", "plain_cores"), 1.1),
    "memory_bound": (("bandwidth", "cache"), 1.1),
    "launch": (("host_s",), 0.9),
    "communication": (("network",), 1.1),
}


def shares(row: PublishedValue, known: Efficiency) -> dict[str, float]:
    """Of how much of a row's time each kind of work is: how far it moves with that work's constants."""
    value, found = row.predict(known), {}
    for kind, (names, factor) in MOVED.items():
        changed = {key: old * factor for key, old in known.values.items() if key[0] in names}
        moved = abs(math.log(row.predict(known.with_values(changed)) / value))
        found[kind] = min(1.0, moved / abs(math.log(factor)))
    return found


def inside(found: PublishedTable, known: Efficiency) -> float:
    """Share of a table's counted rows inside their 80 % interval, of time or of memory."""
    return fmean(
        abs(math.log(row.predict(known) / row.published)) <= half(found.name, row, known)
        for row in _timed_rows(found)
    )


def _timed_rows(found: PublishedTable) -> list[PublishedValue]:
    return [row for row in counted(found) if row.at_least is None]


def half(table: str, row: PublishedValue, known: Efficiency) -> float:
    """Half the width of a row's interval in logarithms, by widths fitted on the other tables."""
    widths = unseen_spread(table)
    if table in MEMORY:
        return widths["memory gpu"]
    own = half_width(widths, shares(row, known))
    return math.hypot(own, widths["untried format"]) if table.startswith("TensorRT") else own
