"""Tables of measurements: a row that somebody damaged is named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from darkroom.errors import InputError
from darkroom.measure.timing import Measurement
from darkroom.run import append_rows, read_rows

ROW = Measurement(benchmark="train", case="a", settings={"batch": 4}, median_s=0.25)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return append_rows(tmp_path / "rows.csv", Measurement, [ROW, ROW])


def test_what_was_written_is_read(table: Path) -> None:
    assert read_rows(table, Measurement) == [ROW, ROW]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line + ",x", "another number of cells"),
        (lambda line: "train,a", "another number of cells"),
        (lambda line: line.replace('""batch""', "batch"), "property name"),
        (lambda line: line.replace("0.25", "long"), "median_s: must be a number"),
        (lambda line: line.replace("0.25", "-1"), "median_s: must be "),
        (lambda line: f'"{line}', "',' expected after"),
        (lambda line: "x" * 200_000, "field larger than"),
        (lambda line: line.replace('"{""batch"": 4}"', "[" * 50_000), "maximum recursion"),
    ],
    ids=["more", "fewer", "settings", "word", "negative", "quote", "long", "deep"],
)
def test_a_damaged_row_is_named(table: Path, change, said: str) -> None:
    header, first, second = table.read_text().splitlines()
    table.write_text("\n".join([header, first, change(second), ""]))
    with pytest.raises(
        InputError, match=rf"rows.csv', line [23], is no row of measurements: .*{said}"
    ) as error:
        read_rows(table, Measurement)
    assert "\n" not in str(error.value)


def test_another_table_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text('a,"b\nc",d\n1,2,3\n')
    with pytest.raises(InputError, match="it has the columns a") as error:
        read_rows(tmp_path / "other.csv", Measurement)
    assert "\n" not in str(error.value)
