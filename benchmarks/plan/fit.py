"""Fit the efficiencies of src/darkroom/plan/efficiency.csv on the published rows that are marked as fitted.

    python benchmarks/plan/fit.py            writes efficiency.csv and left_out.json, prints a line a table

Least squares on the logarithm of predicted over published, with a weak pull towards the first guesses below,
so that what no row tells stays physical. Then once more without each table: its error is that of a stranger.
Needs scipy (the extra dev).
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from darkroom.plan import published, roofline, validate
from darkroom.plan.roofline import Efficiency

PULL = 0.15
FREE = ("conv", "matmul", "attention", "plain_cores", "bandwidth", "kernel_s", "tile_s", "host_s",
        "host_factor", "fusion_bytes", "fusion_kernels", "network", "overlap", "script_s", "start_s",
        "beside", "contention")  # fmt: skip
FIXED_FOR = ("CPU", "CDNA 3", "new server")
SHARES = (
    "conv",
    "plain_cores",
    "bandwidth",
    "network",
    "overlap",
    "fusion_bytes",
    "fusion_kernels",
    "beside",
    "contention",
)


def free_keys() -> list[tuple[str, str]]:
    """What is fitted; CPU shares are measured, and no row tells of MI300X."""
    values = roofline.efficiency().values
    return [key for key in values if key[0] in FREE and key[1] not in FIXED_FOR]


def fit(
    tables: list[published.Table],
    keys: list[tuple[str, str]],
    evaluations: int = 12,
    begin: Efficiency | None = None,
) -> Efficiency:
    """The efficiencies that the tables' fitted rows want; the search begins at the guesses, or where said."""
    start = roofline.efficiency()
    guess = np.log([GUESSES[key] for key in keys])
    first = guess if begin is None else np.log([begin.values[key] for key in keys])
    rows = [row for table in tables for row in table.rows if row.fitted and row.predict]
    upper = np.log([1.0 if key[0] in SHARES and key[1] != "Ada" else 20 * GUESSES[key] for key in keys])

    def known(x: np.ndarray) -> Efficiency:
        return start.with_values({key: float(np.exp(value)) for key, value in zip(keys, x, strict=True)})

    def residuals(x: np.ndarray) -> np.ndarray:
        at = known(x)
        errors = [math.log(row.predict(at) / row.published) for row in rows]
        return np.concatenate([errors, PULL * (x - guess)])

    found = least_squares(
        residuals, np.clip(first, guess - 3 + 1e-6, upper - 1e-6), bounds=(guess - 3, upper), loss="soft_l1",
        f_scale=0.2, diff_step=1e-3, max_nfev=evaluations,
    )  # fmt: skip
    return known(found.x)


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
    left_out = {}
    for one in tables:
        if any(row.fitted for row in one.rows):
            stranger = fit([other for other in tables if other is not one], keys, 4, best)
            left_out[one.name] = median(abs(published.error(row, stranger)) for row in one.rows)
    validate.LEFT_OUT.write_text(json.dumps(left_out, indent=1) + "\n")
    for one in tables:
        left = [abs(published.error(row, best)) for row in one.rows if not row.fitted]
        told = f"{median(left):6.1%} of {len(left):3} predicted rows"
        stranger_error = left_out.get(one.name, math.nan)
        verdict = "holds" if published.holds(one, best) else "does NOT hold"
        print(f"{one.name:42} {told}  left out {stranger_error:6.1%}  {verdict}")


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
