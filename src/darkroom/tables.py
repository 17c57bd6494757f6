"""Tidy tables: one CSV, one row a finding, its columns the fields of a pydantic model.

A table is replaced whole when rows are added, so that a reader never sees half of one.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from darkroom.errors import InputError, first_fault
from darkroom.hardware.system import write_atomically

Row = TypeVar("Row", bound=BaseModel)


def append_rows(path: Path, kind: type[Row], rows: Iterable[Row], *, digits: int = 6) -> Path:
    """Add rows, numbers with `digits` significant ones; InputError where the file is another table."""
    columns = tuple(kind.model_fields)
    before = check_table(path, kind)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not before:
        writer.writerow(columns)
    writer.writerows([_cell(getattr(row, name), digits) for name in columns] for row in rows)
    separator = "" if before.endswith("\n") or not before else "\n"
    write_atomically(path, before + separator + text.getvalue(), durable=True)
    return path


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a table; InputError where there is none."""
    if not path.is_file():
        raise InputError(f"no file '{path}'")
    dicts = [name for name, field in kind.model_fields.items() if "dict" in str(field.annotation)]
    found = []
    reader = csv.DictReader(io.StringIO(_text(path, kind)), strict=True)
    try:
        for cells in reader:
            if None in cells or None in cells.values():
                raise ValueError("another number of cells than the first line")
            values = {name: text for name, text in cells.items() if text}
            values |= {name: json.loads(cells[name] or "{}") for name in dicts}
            found.append(kind.model_validate(values))
    except (csv.Error, ValueError, RecursionError) as error:
        raise InputError(
            f"'{path}', line {reader.reader.line_num}, is no row of {_name(kind)}: {_reason(error)}"
        ) from error
    return found


def _name(kind: type[BaseModel]) -> str:
    return f"{kind.__name__.lower()}s"


def _reason(error: Exception) -> str:
    """Why, in one line."""
    if isinstance(error, ValidationError):
        return first_fault(error.errors())
    return " ".join(str(error).split())[:200]


def check_table(path: Path, kind: type[Row]) -> str:
    """What stands in the file, empty where there is none; InputError unless rows can be added to it."""
    if path.is_dir():
        raise InputError(f"'{path}' is a folder", mend="give the name of a CSV file")
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"'{path}' cannot be written: '{place}' takes no files", mend="choose another --out")
    return _text(path, kind) if path.exists() else ""


def _text(path: Path, kind: type[Row]) -> str:
    what = f"no table of {_name(kind)}"
    try:
        text = path.read_text(encoding="utf-8-sig")  # as Excel saves it
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is {what}", mend="write to a new file") from error
    header = tuple(text.split("\n", 1)[0].rstrip("\r").split(","))
    if text and header != tuple(kind.model_fields):
        raise InputError(
            f"'{path}' is {what}: it has the columns {', '.join(header)[:80]}", mend="write to a new file"
        )
    return text


def _cell(value: object, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
