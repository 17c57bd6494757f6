"""Predicted against published, every row named: predicted.csv and predicted.png beside this file.

    python benchmarks/plan/predicted.py

Each table is predicted by constants that saw none of its rows (left_out.json, written by fit.py). Rows that
were read for a table's own script are hollow and not counted; its heading has the median error of the others,
and the share of them inside their 80 % interval.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from darkroom.proof.published import validate

HERE = Path(__file__).parent
COLUMNS = (
    *("table", "case", "published", "predicted", "unit", "error", "fitted", "plain_reading", "at_least"),
    *("derived", "note", "table_limit", "table_by", "table_holds", "table_median_error"),
    *("table_seen_error", "table_inside"),
)
SHOWN = 0.8  # errors beyond are drawn at the edge, with their number


def rows(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a published value."""
    return [
        {
            **{key: row.get(key, "") for key in COLUMNS[1:11]},
            "table": table["table"],
            "predicted": f"{row['predicted']:.6g}",
            "error": f"{row['error']:.4f}",
            "table_limit": table["limit"],
            "table_by": "median" if table["by_median"] else "each row",
            "table_holds": table["holds"],
            "table_median_error": f"{table['median_error']:.4f}",
            "table_seen_error": "" if table["seen_error"] is None else f"{table['seen_error']:.4f}",
            "table_inside": f"{table['inside']:.2f}" if "inside" in table else "",
        }
        for table in tables
        for row in table["rows"]
    ]


def draw(tables: list[dict[str, Any]], file: Path) -> None:
    """A strip of errors a table, each row a point; the band is the table's tolerance."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [table for table in tables if any(row["error"] for row in table["rows"])]
    figure, axes = plt.subplots(figsize=(11, 0.62 * len(shown) + 1.6))
    for y, table in enumerate(reversed(shown)):
        limit = table["limit"]
        axes.barh(y, 2 * min(limit, SHOWN), left=-min(limit, SHOWN), height=0.7, color="#e8e4da", zorder=0)
        for i, row in enumerate(row for row in table["rows"] if not row.get("derived")):
            error = max(-SHOWN, min(SHOWN, row["error"]))
            place = y + 0.25 * math.sin(2.4 * i)  # apart, and the same at each drawing
            colour = "#b03a2e" if table["holds"] else "#555555"
            face = "none" if row["fitted"] else colour
            axes.plot(error, place, "o", ms=4, mec=colour, mfc=face, mew=0.8, alpha=0.8, zorder=2)
            if abs(row["error"]) > SHOWN:
                axes.annotate(
                    f"{row['error']:+.0%}", (error, place), xytext=(6 if error < 0 else -6, 0), fontsize=7,
                    textcoords="offset points", ha="left" if error < 0 else "right", va="center",
                )  # fmt: skip
        unseen = " unseen" if table["seen_error"] is not None else ""
        stranger = f"{unseen}, {table['inside']:.0%} inside" if "inside" in table else ""
        verdict = "" if table["holds"] else "  MISSES"
        by = "median" if table["by_median"] else "each"
        allowed = "a power of two" if limit >= 1 else f"{limit:.2g}"
        told = f"{by} within {allowed}: {table['median_error']:.1%}{stranger}{verdict}"
        axes.text(SHOWN * 1.03, y, told, va="center", fontsize=8)
    axes.axvline(0, color="#333333", lw=0.8, zorder=1)
    axes.set_yticks(range(len(shown)), [table["table"] for table in reversed(shown)], fontsize=9)
    axes.set_xlim(-SHOWN * 1.02, SHOWN * 1.02)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    axes.set_xlabel(
        "predicted over published, less one; hollow: read for its own script; band: the tolerance"
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    figure.subplots_adjust(left=0.25, right=0.7, top=0.98, bottom=0.1)
    figure.savefig(file, dpi=130)


def main() -> None:
    """Write both files."""
    tables = list(validate().tables)
    with (HERE / "predicted.csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(tables))
    draw(tables, HERE / "predicted.png")


if __name__ == "__main__":
    main()
