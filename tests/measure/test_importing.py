"""The import benchmark at toy size: its rows say what was run, and its input is what it claims to be."""

from __future__ import annotations

from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store
from darkroom.measure.loading import bench_import, make_source


def test_the_input_has_no_doubles_and_all_of_it_comes_in(tmp_path):
    source = make_source(tmp_path / "s", 700, 16, "WEBP")
    report = import_pictures(source, tmp_path / "s.lance")
    assert (report.added, report.doubles, report.rejected) == (700, 0, {})
    assert Store.open(tmp_path / "s.lance").shapes() == [{(16, 16): 700}]


def test_rows_of_the_benchmark(tmp_path):
    rows = {row.case: row for row in bench_import(pictures=60, size=16, repeats=2, folder=tmp_path)}
    assert set(rows) == {"read and decode only", "import", "import, 4 times as many"}
    row = rows["import"]
    assert (row.ratio_to, row.repeats) == ("read and decode only", 2)
    assert row.images_per_s is not None
    assert row.median_s is not None
    assert abs(row.images_per_s * row.median_s - 60) < 1e-6
    assert row.settings["pictures"] == 60
    assert rows["import, 4 times as many"].settings["pictures"] == 240
    assert row.peak_memory_bytes is not None
    assert not list(tmp_path.iterdir()), "nothing is left behind"
