"""Fit the efficiencies of src/darkroom/plan/efficiency.csv on the published tables, and say how sure they
are.

    python benchmarks/plan/fit.py           writes efficiency.csv, spread.csv, left_out.json and
                                            left_out_spread.json; a line a table
    python benchmarks/plan/fit.py spread    only the widths (spread.csv and left_out_spread.json)

Least squares on the logarithm of predicted over published, with a weak pull towards the guesses
(guesses.csv); each table weighs alike, however many rows it has. Then once more without each table: what
those constants say of its rows is the proof, and its errors are what the intervals of a plan are made of.
Needs scipy (extra dev).
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize

from darkroom.plan import roofline, show
from darkroom.plan.roofline import Efficiency
from darkroom.proof import published
from darkroom.proof.tables import PublishedTable, PublishedValue

PULL = 0.03
ROWS = 8  # of each table, evenly taken
STARTS = 12  # of the search for widths
SCALE = 0.1  # errors far beyond count less
Key = tuple[str, str]
ROOT = Path(__file__).parents[2]
GUESSES = list(csv.DictReader(Path(__file__).with_name("guesses.csv").open()))
KEYS: list[Key] = [(row["name"], row["applies_to"]) for row in GUESSES]


def fit(tables: Sequence[PublishedTable], start: Efficiency | None = None) -> Efficiency:
    """The efficiencies that the tables' rows want, from the guesses to where nothing improves."""
    known = roofline.efficiency()
    guess = np.log([float(row["value"]) for row in GUESSES])
    most = np.log([float(row["most"]) for row in GUESSES]) - 1e-6
    taken = [(row, 3 / math.sqrt(len(found))) for found in map(rows_of, tables) for row in found]
    weights = np.array([weight for _, weight in taken])

    def at(x: np.ndarray) -> Efficiency:
        return known.with_values({key: math.exp(value) for key, value in zip(KEYS, x, strict=True)})

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = np.array([log_error(row, at(x)) for row, _ in taken])
        robust = np.sign(errors) * SCALE * np.sqrt(2 * np.sqrt(1 + (errors / SCALE) ** 2) - 2)
        return np.concatenate([weights * robust, PULL * (x - guess)])

    begin = guess if start is None else np.log([start.values[key] for key in KEYS])
    found = least_squares(
        residuals, np.minimum(begin, most), bounds=(guess - 3, most), diff_step=1e-3, ftol=1e-4, xtol=1e-4
    )
    assert found.status > 0, found.message
    return at(found.x)


def rows_of(table: PublishedTable) -> list[PublishedValue]:
    """The rows that the fit sees: as many of each table, and of the one that repeats machines one a card."""
    rows = [row for row in published.counted(table) if not row.case.startswith("CPU ")]
    if table.name.startswith("MLPerf"):
        rows = list({row.case[:4] + row.case.partition(": ")[2]: row for row in reversed(rows)}.values())
    return [rows[round(i * (len(rows) - 1) / (ROWS - 1))] for i in range(ROWS)] if len(rows) > ROWS else rows


def log_error(row: PublishedValue, known: Efficiency) -> float:
    """The logarithm of predicted over published."""
    return math.log(row.predict(known) / row.published)


def main() -> None:
    """Fit, leave one table out at a time, and write everything."""
    tables = [published.table(name) for name in published.RESTS_ON]
    seen = [one for one in tables if published.RESTS_ON[one.name] == one.name]
    best = fit(seen)
    write_constants(best)
    say = partial(print, flush=True)
    left_out: dict[str, Any] = {}
    for one in tables:
        out = published.RESTS_ON[one.name]
        stranger = fit([other for other in seen if other.name != out], best) if out else best
        left_out[one.name] = [[*key, float(f"{stranger.values[key]:.4g}")] for key in KEYS]
        say(f"{one.name:52} unseen {_told(one, stranger)}, seen {published.median_error(one, best):.1%}")
    published.LEFT_OUT.write_text(json.dumps(left_out, indent=None, separators=(",", ":")) + "\n")


def widths() -> None:
    """Fit the widths of intervals on the errors that constants have which saw none of a table's rows."""
    roofline.efficiency.cache_clear()
    published.unseen.cache_clear()
    errors = {}
    for name in published.RESTS_ON:
        known = published.unseen(name)
        errors[name] = [measured(row, known) for row in published.counted(published.table(name))]
    write_spread(errors)


def _told(one: PublishedTable, known: Efficiency) -> str:
    verdict = "holds" if published.holds(one, known) else "does NOT hold"
    return f"{published.median_error(one, known):6.1%} of {len(published.counted(one)):3} rows  {verdict}"


# ---- how sure


def measured(row: PublishedValue, known: Efficiency) -> tuple[float, dict[str, float]]:
    """A row's error, and of how much of its time each kind of work is."""
    return log_error(row, known), published.shares(row, known)


def write_spread(errors: Mapping[str, Sequence[tuple[float, dict[str, float]]]]) -> None:
    """Fit the widths of spread.csv on unseen errors, and say how they do on tables that they have not
    seen.
    """
    found = spread_of(errors)
    told, left_out = {}, {}
    for name, rows in errors.items():
        others = spread_of({other: value for other, value in errors.items() if other != name})
        left_out[name] = {kind: float(f"{width:.3g}") for kind, width in others.items()}
        told[name] = sum(abs(error) <= show.half_width(others, shares) for error, shares in rows) / len(rows)
        print(f"{name:52} {told[name]:.0%} of {len(rows)} rows inside 80 %")
    print(f"all tables alike: {sum(told.values()) / len(told):.0%}")
    published.LEFT_OUT_SPREAD.write_text(json.dumps(left_out, indent=None, separators=(",", ":")) + "\n")
    file = ROOT / "src" / "darkroom" / "plan" / "spread.csv"
    rows = list(csv.DictReader(file.open()))
    for row in rows:
        if row["name"] in found:
            row["value"] = f"{found[row['name']]:.3g}"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def spread_of(errors: Mapping[str, Sequence[tuple[float, dict[str, float]]]]) -> dict[str, float]:
    """Half widths by kind of work with the lowest interval score (Gneiting & Raftery 2007) at 80 %: a width
    costs what it is, a row outside ten times its distance; each table weighs alike.
    """
    names = ("any", *published.MOVED)

    def score(x: np.ndarray) -> float:
        widths = dict(zip(names, np.exp(x).tolist(), strict=True))
        total = 0.0
        for rows in errors.values():
            half = [show.half_width(widths, shares) for _, shares in rows]
            total += sum(
                2 * h + 10 * max(0.0, abs(error) - h) for (error, _), h in zip(rows, half, strict=True)
            ) / len(rows)
        return total + 0.02 * float(np.sum((x - math.log(0.15)) ** 2))

    # The score has several valleys: the lowest that is found from a dozen places.
    starts = math.log(0.15) + np.random.default_rng(0).normal(0.0, 0.7, (STARTS, len(names)))
    options = {"maxiter": 2000, "xatol": 1e-3, "fatol": 1e-5}
    found = [minimize(score, start, method="Nelder-Mead", options=options) for start in starts]
    best = min(found, key=lambda one: float(one.fun))
    return dict(zip(names, np.exp(best.x).tolist(), strict=True))


def write_constants(best: Efficiency) -> None:
    """Put the fitted values into efficiency.csv."""
    file = roofline.HERE / "efficiency.csv"
    rows = list(csv.DictReader(file.open()))
    for row in rows:
        row["value"] = f"{best.values[row['name'], row['applies_to']]:.4g}"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    if sys.argv[1:] != ["spread"]:
        main()
    widths()
