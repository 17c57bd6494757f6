"""Would conformal intervals cover single tables more evenly? Each table's coverage under three ways.

    python benchmarks/plan/conformal.py        half a minute; prints a line a table

`now` are the widths in use (fitted on the other tables). `conformal` scales them by the 80 % quantile of the
other tables' scores, error over half width, each table weighing alike (conformal prediction over
tables, Vovk et al. 2005). `by kind` does so within rows whose time is mostly of one kind of work. All are of
errors under constants that had not seen the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from darkroom.proof import published

LEVEL = 0.8
LEAST_TABLES = 3  # for a quantile of one kind of work


def scores(name: str) -> tuple[NDArray[np.float64], list[str]]:
    """Of a table's counted rows: error over half width, and the kind of work that most of their time is."""
    known = published.unseen(name)
    rows = [row for row in published.counted(published.table(name)) if row.at_least is None]
    errors = [abs(np.log(row.predict(known) / row.published)) for row in rows]
    halves = [published.half(name, row, known) for row in rows]
    kinds = [max(found := published.shares(row, known), key=found.__getitem__) for row in rows]
    return np.array(errors) / np.array(halves), kinds


def quantile(groups: list[NDArray[np.float64]]) -> float:
    """The level's quantile of all scores, each group weighing alike."""
    values = np.concatenate(groups)
    weights = np.concatenate([np.full(len(group), 1 / len(group)) for group in groups])
    order = np.argsort(values)
    place = np.searchsorted(weights[order].cumsum() / weights.sum(), LEVEL)
    return float(values[order][min(place, len(values) - 1)])


def main() -> None:
    """Print every table's coverage, then mean, extremes and spread."""
    found = {name: scores(name) for name in published.RESTS_ON}
    rows = []
    for name, (own, kinds) in found.items():
        others = [value for other, value in found.items() if other != name]
        whole = quantile([values for values, _ in others])
        limits = []
        for kind in kinds:
            alike = [values[np.array(of) == kind] for values, of in others if kind in of]
            limits.append(quantile(alike) if len(alike) >= LEAST_TABLES else whole)
        rows.append((np.mean(own <= 1), np.mean(own <= whole), np.mean(own <= np.array(limits))))
        print(f"{name:<40} {len(own):>3} rows  " + "  ".join(f"{share:>5.0%}" for share in rows[-1]))
    table = np.array(rows)
    for label, of in (("mean", np.mean), ("least", np.min), ("most", np.max), ("standard deviation", np.std)):
        print(f"{label:<50} " + "  ".join(f"{share:>5.1%}" for share in of(table, axis=0)))


if __name__ == "__main__":
    main()
