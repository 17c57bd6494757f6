"""Every published table with what the plan says of it, how it was read, and whether it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from darkroom.plan.roofline import Efficiency, efficiency
from darkroom.proof.published_pictures import (
    diffusers_ladder,
    engines_elsewhere,
    lambda_latency,
    lambda_memory,
    torch2,
)
from darkroom.proof.published_training import (
    anyscale_costs,
    anyscale_rates,
    anyscale_total,
    mlperf,
    mosaic_costs,
    mosaic_days,
    mosaic_rates,
)
from darkroom.proof.published_vertex import (
    vertex_largest,
    vertex_lora,
    vertex_memory,
    vertex_serving,
    vertex_speed,
)
from darkroom.proof.rows import Row, Table

B_READING = (
    "reading B for every row: prior preservation doubles the batch, VAE and text encoder in float32, AdamW "
    "of torch 2.0"
)
SPEED_READING = (
    "captioned flowers, so no prior preservation; float32 VAE and text encoder at each step; steps/s with "
    "the script's memory tracing, costs without"
)

TABLES: dict[str, tuple[float, bool, Callable[[], Iterator[Row]], str]] = {
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
        "sample once, beforehand or beside",
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
    "MLPerf SD 2, eight cards": (
        0.20,
        False,
        mlperf,
        "half throughout, channels last, CUDA graphs since v4.0",
    ),
}


def table(name: str) -> Table:
    """One table, its rows counted."""
    limit, by_median, rows, reading = TABLES[name]
    return Table(name, limit, tuple(rows()), by_median, reading)


def error(row: Row, known: Efficiency) -> float:
    """How far the prediction is off, as a share of what was published."""
    predicted = row.predict(known)
    if row.at_least is not None:
        return min(0.0, predicted / row.at_least - 1)
    return predicted / row.published - 1 if row.published else float(predicted != 0)


def counted(found: Table, *, unseen: bool = False) -> list[Row]:
    """The rows that the proof counts: what was not fitted, all where the fit saw none of the table."""
    return [row for row in found.rows if not row.derived and (unseen or not row.fitted)]


def holds(found: Table, known: Efficiency, *, unseen: bool = False) -> bool:
    """Whether a table's counted rows are within its tolerance."""
    left = counted(found, unseen=unseen)
    if found.name.startswith("largest batch"):
        return all(_near(row, known) for row in left)
    if found.by_median:
        return median_error(found, known, unseen=unseen) <= found.limit
    return all(abs(error(row, known)) <= _limit(row, found) + 1e-12 for row in left)


def median_error(found: Table, known: Efficiency, *, unseen: bool = False) -> float:
    """The median of the counted rows' errors."""
    return median(abs(error(row, known)) for row in counted(found, unseen=unseen))


def _limit(row: Row, found: Table) -> float:
    return found.limit if row.limit is None else row.limit


def _near(row: Row, known: Efficiency) -> bool:
    """The same power of two or its neighbour; none is none."""
    predicted = row.predict(known)
    if not row.published or not predicted:
        return predicted <= 1 and row.published <= 1
    return 0.5 <= predicted / row.published <= 2


def as_dict(row: Row, known: Efficiency) -> dict[str, Any]:
    """A row as `--json` gives it."""
    told: dict[str, Any] = {
        "case": row.case,
        "published": row.published,
        "predicted": row.predict(known),
        "error": error(row, known),
        "fitted": row.fitted,
        "unit": row.unit,
    }
    if row.plain is not None:
        told["plain_reading"] = row.plain(known)
    if row.at_least is not None:
        told["at_least"] = row.at_least
    if row.derived:
        told["derived"] = True
    if row.note:
        told["note"] = row.note
    return told


LEFT_OUT = Path(__file__).with_name("left_out.json")


@dataclass(frozen=True)
class Validation:
    """Every table with its rows, and what the fit says without each table."""

    tables: tuple[dict[str, Any], ...]

    @property
    def holding(self) -> int:
        """Tables within their tolerance."""
        return sum(found["holds"] for found in self.tables)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {"holding": self.holding, "tables": list(self.tables)}

    def lines(self) -> Iterator[str]:
        """For a terminal: every row by name, errors not hidden."""
        for found in self.tables:
            verdict = "holds" if found["holds"] else "does NOT hold"
            kind = "median" if found["by_median"] else "each"
            yield f"{found['table']}: {verdict} ({kind} within {found['limit']:.2g}; {_errors(found)})"
            if found["reading"]:
                yield f"  reading: {found['reading']}"
            width = max(len(row["case"]) for row in found["rows"])
            for row in found["rows"]:
                yield _line(row, width)
            yield ""
        unseen = [found["left_out_holds"] for found in self.tables if found["left_out_holds"] is not None]
        yield f"{self.holding} of {len(self.tables)} tables hold"
        yield f"{sum(unseen)} of the {len(unseen)} that rest on the fit hold where it saw none of their rows"


def _errors(found: Mapping[str, Any]) -> str:
    told = f"median error of predicted rows {found['median_error']:.1%}"
    if found.get("left_out_error") is not None:
        verdict = "holds" if found["left_out_holds"] else "does NOT hold"
        told += f"; fitted without any row of it {found['left_out_error']:.1%}: {verdict}"
    return told


def _line(row: Mapping[str, Any], width: int) -> str:
    numbers = f"{row['published']:>12,.6g}  {row['predicted']:>12,.6g}  {row['error']:>+7.1%}"
    text = f"  {row['case']:<{width}}  {numbers}"
    marks = ["fitted"] if row["fitted"] else []
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
    """Predict every published table."""
    known = known or efficiency()
    left_out = json.loads(LEFT_OUT.read_text(encoding="utf-8")) if LEFT_OUT.is_file() else {}
    found = []
    for name in TABLES:
        one = table(name)
        unseen = left_out.get(name, {})
        found.append(
            {
                "table": name,
                "holds": holds(one, known),
                "limit": one.limit,
                "by_median": one.by_median,
                "reading": one.reading,
                "median_error": median_error(one, known),
                "left_out_error": unseen.get("median_error"),
                "left_out_holds": unseen.get("holds"),
                "rows": [as_dict(row, known) for row in one.rows],
            }
        )
    return Validation(tuple(found))
