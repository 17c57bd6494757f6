"""Predicted against published, row by row: the plan's proof."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darkroom.plan.published import TABLES, as_dict, holds, median_error, table
from darkroom.plan.roofline import Efficiency, efficiency

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
    left_out = json.loads(LEFT_OUT.read_text()) if LEFT_OUT.is_file() else {}
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
