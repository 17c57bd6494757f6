"""The import benchmark at toy size: its rows say what was run, and its input is what it claims to be."""

from __future__ import annotations

import pyarrow as pa
import pytest

from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store
from darkroom.errors import InputError
from darkroom.measure.loading import SOURCES, bench_import, make_source


@pytest.mark.parametrize(
    ("kind", "read_as", "files"),
    [
        ("zip", "folder", {"images.zip", "captions.jsonl"}),
        ("webdataset", "webdataset", {"00000.tar", "00001.tar"}),
        ("parquet", "parquet", {"00000.parquet", "00001.parquet"}),
    ],
)
def test_the_input_has_no_doubles_and_all_of_it_comes_in(tmp_path, kind, read_as, files):
    source = make_source(tmp_path / "s", 1100, 16, "WEBP", kind)
    assert {file.name for file in source.iterdir()} == files
    report = import_pictures(source, tmp_path / "s.lance")
    assert (report.kind, report.added, report.doubles, report.rejected) == (read_as, 1100, 0, {})
    store = Store.open(tmp_path / "s.lance")
    assert store.shapes() == [{(16, 16): 1100}]
    rows = pa.concat_tables(map(pa.table, store.scan(["picture", "caption", "score"]))).to_pylist()
    assert [row["caption"] for row in rows] == [f"picture number {i}" for i in range(1100)]
    assert [row["score"] for row in rows] == list(range(1100))
    with SOURCES[kind].parts(source) as parts:
        plain = [picture for part in parts for picture in part()]
    assert plain == [row["picture"] for row in rows], "the plain reader reads the same pictures"
    assert len(set(plain)) == 512


def test_other_kinds_are_refused(tmp_path):
    with pytest.raises(InputError, match="kind 'rar'; allowed: zip, webdataset, parquet"):
        bench_import(kind="rar", folder=tmp_path)


@pytest.mark.parametrize("kind", list(SOURCES))
def test_rows_of_the_benchmark(tmp_path, kind):
    found = bench_import(kind=kind, pictures=60, size=16, format="JPEG", repeats=2, folder=tmp_path)
    rows = {row.case: row for row in found}
    assert set(rows) == {"read and decode only", "import", "import, 4 times as many"}
    row = rows["import"]
    assert (row.ratio_to, row.repeats) == ("read and decode only", 2)
    assert row.images_per_s is not None
    assert row.median_s is not None
    assert abs(row.images_per_s * row.median_s - 60) < 1e-6
    assert (row.settings["kind"], row.settings["pictures"]) == (kind, 60)
    assert " pictures per CPU-second" in row.note
    assert rows["import, 4 times as many"].settings["pictures"] == 240
    assert row.peak_memory_bytes is not None
    assert not list(tmp_path.iterdir()), "nothing is left behind"
