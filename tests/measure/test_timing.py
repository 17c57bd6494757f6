"""Timing: turns are taken, warm-up is apart, ratios are right; the table holds what it was given."""

from __future__ import annotations

import time

import numpy as np
import pytest

from darkroom.errors import InputError
from darkroom.hardware.prices import price
from darkroom.measure.timing import (
    COLUMNS,
    Measurement,
    Timing,
    append_csv,
    interleave,
    measurement,
    peak_memory,
    read_csv,
)

DESIGN_COLUMNS = (
    "benchmark, case, settings, ratio, ratio_to, median_s, p10_s, p90_s, repeats, images_per_s, "
    "steps_per_s, mfu, peak_memory_bytes, energy_j, usd_per_image, warmup_s, machine, device, num_devices, "
    "versions, commit, date, note"
)


def test_the_columns_are_the_designs():
    assert ", ".join(COLUMNS) == DESIGN_COLUMNS


def test_cases_take_turns_after_their_warm_up():
    calls: list[str] = []
    found = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=2)
    assert calls == ["a", "a", "b", "b"] + ["a", "b"] * 3
    assert list(found) == ["a", "b"]
    assert found["a"].repeats == 3


def test_times_and_ratios_are_right():
    found = interleave({"short": lambda: time.sleep(0.03), "long": lambda: time.sleep(0.12)}, repeats=5)
    assert 0.03 <= found["short"].median_s < 0.1
    assert 2.0 < found["long"].ratio(found["short"]) < 6.0
    assert 0.12 <= found["long"].warmup_s < 1.0


def test_the_ratio_is_of_rounds_so_that_a_slow_phase_does_not_count():
    a = Timing("a", (1.0, 1.0, 10.0, 10.0, 10.0), 0.0, None)
    b = Timing("b", (1.1, 1.1, 11.0, 11.0, 1.1), 0.0, None)
    assert b.ratio(a) == pytest.approx(1.1)
    with pytest.raises(ValueError):
        b.ratio(Timing("c", (1.0,), 0.0, None))


def test_percentiles_are_those_of_numpy():
    seconds = tuple(np.random.default_rng(0).random(17))
    timing = Timing("a", seconds, 0.0, None)
    assert timing.p10_s == pytest.approx(np.percentile(seconds, 10))
    assert timing.p90_s == pytest.approx(np.percentile(seconds, 90))
    assert timing.median_s == pytest.approx(np.median(seconds))
    one = Timing("a", (2.0,), 0.0, None)
    assert (one.p10_s, one.median_s, one.p90_s) == (2.0, 2.0, 2.0)


def test_nothing_to_time_is_refused():
    with pytest.raises(InputError, match="repeats"):
        interleave({"a": lambda: None}, repeats=0)
    with pytest.raises(InputError):
        interleave({})


def test_peak_memory_of_a_call():
    _, small = peak_memory(lambda: None)
    result, large = peak_memory(lambda: np.ones(20 * 2**20).sum())
    assert result == 20 * 2**20
    assert large >= small + 140 * 2**20


def test_a_row_has_rates_cost_and_origin():
    base = Timing("plain", (0.2, 0.2, 0.2), 0.3, 1.5)
    row = measurement(
        "loader",
        Timing("ours", (0.1, 0.1, 0.1), 0.2, 1.5),
        baseline=base,
        images=50,
        steps=1,
        flops_per_image=1e9,
        settings={"batch": 50},
        note="a note",
    )
    assert (row.images_per_s, row.steps_per_s, row.ratio, row.ratio_to) == (500.0, 10.0, 0.5, "plain")
    assert row.mfu is not None
    assert row.mfu > 0
    assert row.machine
    assert row.device.startswith("CPU")
    assert "torch" in row.versions
    # No one rents out every kind of CPU: without an offer a row has no cost, and says none.
    offer = price(row.device)
    assert (row.usd_per_image is not None) == (offer is not None) == ("price as of" in row.note)
    assert row.note.startswith("a note; load average 1.50")
    assert row.usd_per_image is None or 0 < row.usd_per_image < 1e-4


def test_a_table_grows_and_reads_back_equal(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    one = Measurement(
        benchmark="train", case="a, with a comma", settings={"batch": 8, "name": 'a "b"'}, ratio=1.5
    )
    two = Measurement(
        benchmark="train", case="b", median_s=0.25, repeats=7, versions={"torch": "2.13"}, note="ä"
    )
    append_csv(path, [one])
    append_csv(path, [two, two])
    assert path.read_text().splitlines()[0] == DESIGN_COLUMNS.replace(", ", ",")
    assert read_csv(path) == [one, two, two]
    assert [file.name for file in path.parent.iterdir()] == ["rows.csv"]


def test_a_file_with_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"it has the columns a, b; write to a new file"):
        append_csv(path, [Measurement(benchmark="x", case="y")])
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(InputError):
        read_csv(path)
    with pytest.raises(InputError, match="no file"):
        read_csv(tmp_path / "nowhere.csv")
