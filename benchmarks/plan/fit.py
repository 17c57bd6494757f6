"""Fit the efficiencies of src/darkroom/plan/efficiency.csv on the published rows that are marked as fitted.

    python benchmarks/plan/fit.py            writes efficiency.csv and left_out.json, prints a line a table

Least squares on the logarithm of predicted over published, with a weak pull towards the first guesses below,
so that what no row tells stays physical. Then once more from the guesses without each table: all its rows are
then unseen, and left_out.json has their median error and whether the table holds. Needs scipy (extra dev).
"""

from __future__ import annotations

import csv
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from darkroom.plan import roofline
from darkroom.plan.roofline import Efficiency
from darkroom.proof import published
from darkroom.proof import published as validate
from darkroom.proof.rows import Row

PULL = 0.15
CONVERGED, MOST_EVALUATIONS = 1e-4, 200
RESTS_ON = {
    "phases and total from counts (Anyscale)": "images/s (Anyscale)"
}  # without fitted rows of its own
FREE = ("conv", "matmul", "attention", "plain_cores", "bandwidth", "cache", "kernel_s", "tile_s", "host_s",
        "host_factor", "fusion_bytes", "fusion_kernels", "network", "overlap", "script_s", "start_s",
        "beside", "contention")  # fmt: skip
FIXED_FOR = ("CPU", "CDNA 3", "new server")
SHARES = ("conv", "plain_cores", "bandwidth", "network", "overlap", "fusion_bytes", "fusion_kernels",
          "beside", "contention")  # fmt: skip
UPPER = {**dict.fromkeys(SHARES, 1.0), "cache": 5.0}  # caches move 2 to 5 times what their memory does


def free_keys() -> list[tuple[str, str]]:
    """What is fitted; CPU shares are measured, and no row tells of MI300X."""
    values = roofline.efficiency().values
    return [key for key in values if key[0] in FREE and key[1] not in FIXED_FOR]


def fit(
    tables: list[published.Table],
    keys: list[tuple[str, str]],
) -> Efficiency:
    """The efficiencies that the tables' fitted rows want, from the guesses to where nothing improves."""
    start = roofline.efficiency()
    guess = np.log([GUESSES[key] for key in keys])
    rows = fitted_rows(tables)
    upper = np.log([UPPER.get(key[0], 20 * GUESSES[key]) for key in keys])

    def known(x: np.ndarray) -> Efficiency:
        return start.with_values({key: float(np.exp(value)) for key, value in zip(keys, x, strict=True)})

    def residuals(x: np.ndarray) -> np.ndarray:
        at = known(x)
        errors = [math.log(row.predict(at) / row.published) for row in rows]
        return np.concatenate([errors, PULL * (x - guess)])

    found = least_squares(
        residuals, np.minimum(guess, upper - 1e-6), bounds=(guess - 3, upper), loss="soft_l1",
        f_scale=0.2, diff_step=1e-3, ftol=CONVERGED, xtol=CONVERGED, max_nfev=MOST_EVALUATIONS,
    )  # fmt: skip
    assert found.status > 0, found.message
    return known(found.x)


def fitted_rows(tables: list[published.Table]) -> list[Row]:
    """The rows that the fit sees."""
    return [row for table in tables for row in table.rows if row.fitted]


GUESSES = {
    (row["name"], row["applies_to"]): float(row["value"])
    for row in csv.DictReader(Path(__file__).with_name("guesses.csv").open())
}


def main() -> None:
    """Fit, leave one table out at a time, and write everything."""
    names = list(published.TABLES)
    tables = [published.table(name) for name in names]
    keys = free_keys()
    best = fit(tables, keys)
    write_csv(best)
    say_table = partial(print, flush=True)
    for one in tables:
        say_table(f"{one.name:52} {_told(one, best)}")
    left_out = {}
    for one in tables:
        without = RESTS_ON.get(one.name, one.name)
        if not fitted_rows([other for other in tables if other.name == without]):
            continue
        stranger = fit([other for other in tables if other.name != without], keys)
        say_table(f"{one.name:52} {_told(one, stranger, unseen=True)}, unseen")
        left_out[one.name] = {
            "median_error": round(published.median_error(one, stranger, unseen=True), 4),
            "holds": published.holds(one, stranger, unseen=True),
        }
    validate.LEFT_OUT.write_text(json.dumps(left_out, indent=1) + "\n")


def _told(one: published.Table, known: Efficiency, *, unseen: bool = False) -> str:
    error = published.median_error(one, known, unseen=unseen)
    verdict = "holds" if published.holds(one, known, unseen=unseen) else "does NOT hold"
    return f"{error:6.1%} of {len(published.counted(one, unseen=unseen)):3} rows  {verdict}"


def write_csv(best: Efficiency) -> None:
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
    main()
