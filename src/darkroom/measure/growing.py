"""A table of measurements that grows as they are made, so that a job cut short goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from darkroom.errors import InputError
from darkroom.measure.timing import Measurement, append_csv, read_csv


class Growing:
    """Rows in the order they were made; in a file, or without one in memory alone."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.rows = read_csv(file) if file is not None and file.is_file() else []

    def find(self, benchmark: str, case: str) -> Measurement | None:
        """The row that stands there already."""
        return next((row for row in self.rows if (row.benchmark, row.case) == (benchmark, case)), None)

    def add(self, row: Measurement) -> Measurement:
        """Keep a row, at once, unless its case has one; returns the one that is kept."""
        there = self.find(row.benchmark, row.case)
        if there is not None:
            return there
        self.rows.append(row)
        if self.file is not None:
            append_csv(self.file, [row])
        return row


def check_same(file: Path, table: Path, asked: Mapping[str, Any]) -> None:
    """Note what was asked beside its table. InputError where other rows than these are in the table."""
    told = json.loads(json.dumps(asked, default=str))
    if not table.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    other = [key for key, value in told.items() if before.get(key) != value]
    if other:
        raise InputError(
            f"'{table}' was measured with another {other[0]} ({before.get(other[0], 'not noted')})",
            mend="choose another --out, or say the same as before to go on",
        )
