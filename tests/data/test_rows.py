"""Types of the source's own columns: the narrowest that holds everything, and nothing lost on the way."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from darkroom.data.images import Facts
from darkroom.data.importers.source import ExtraColumns, PassedPicture, plain, type_of, widened
from darkroom.data.store import SCHEMA


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([1, None, 2], pa.int64()),
        ([1, 0.5], pa.float64()),
        ([True, None], pa.bool_()),
        ([True, 1], pa.string()),
        (["a", 1], pa.string()),
        ([["a"], []], pa.list_(pa.string())),
        ([[1], [0.5], None], pa.list_(pa.float64())),
        ([["a"], [1]], pa.list_(pa.string())),
        ([["a"], "a"], pa.string()),
        ([None], pa.null()),
    ],
)
def test_the_narrowest_type_is_found(values, type_):
    assert type_of(values) == type_


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (2**63, str(2**63)),
        (-(2**63), -(2**63)),
        (Decimal("1.5"), 1.5),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, 4), "2026-01-02T03:04:00"),
        (np.float32(0.5), 0.5),
        (b"raw", None),
        ({"ü": [1]}, '{"ü": [1]}'),
        ([[1], 2], "[[1], 2]"),
        ((1, 2), [1, 2]),
    ],
)
def test_odd_values_become_plain(value, told):
    assert plain(value) == told


def row(**extras: object) -> PassedPicture:
    return PassedPicture("0" * 32, b"", "", Facts(1, 1, "PNG", 0), "k", extras)


def test_a_narrower_column_of_the_store_is_widened_and_a_wider_one_is_kept():
    schema = pa.schema(
        [*SCHEMA, pa.field("f", pa.float32()), pa.field("i", pa.int32()), pa.field("s", pa.string())]
    )
    arrays, needed = ExtraColumns(schema).columns([row(f=1, i=2, s=3, new=[])])
    assert needed == {"i": pa.int64(), "new": pa.list_(pa.string())}
    assert {name: (str(a.type), a.to_pylist()) for name, a in arrays.items()} == {
        "f": ("float", [1.0]), "i": ("int64", [2]), "s": ("string", ["3"]),
        "new": ("list<item: string>", [[]]),
    }  # fmt: skip


def test_names_that_clash_stay_apart():
    extras = ExtraColumns(SCHEMA)
    arrays, _ = extras.columns([row(**{"a.b": 1, "a_b": 2, "id": 3, "source_id": 4, "": 5})])
    assert {name: a.to_pylist() for name, a in arrays.items()} == {
        "a_b": [1], "a_b_2": [2], "source_id": [3], "source_id_2": [4], "unnamed": [5],
    }  # fmt: skip


def test_widening_keeps_every_value():
    assert widened(pa.array([1, None]), pa.float64()).to_pylist() == [1.0, None]
    assert widened(pa.array([True, None]), pa.string()).to_pylist() == ["true", None]
    assert widened(pa.array(["a"]), pa.string()).to_pylist() == ["a"]
    assert json.loads(widened(pa.array([[1, 2]]), pa.string())[0].as_py()) == [1, 2]
    assert widened(pa.array([[1], None, []]), pa.list_(pa.string())).to_pylist() == [["1"], None, []]
