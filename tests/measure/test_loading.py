"""The loader's benchmark measures what it says, at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from darkroom.data.loader import Loader, ReadSettings
from darkroom.data.order import Order
from darkroom.errors import InputError
from darkroom.measure.loading import COLUMN, RESIDENT, ROW_BYTES, SCAN, WINDOWS, bench_loader, make_store


def test_rows_compare_with_a_scan(tmp_path: Path) -> None:
    found = {row.case: row for row in bench_loader(rows=600, batch=64, repeats=5, folder=tmp_path)}
    assert set(found) == {SCAN, WINDOWS, RESIDENT}
    for row in found.values():
        assert row.repeats == 5
        assert row.p10_s is not None
        assert row.median_s is not None
        assert row.p90_s is not None
        assert row.p10_s <= row.median_s <= row.p90_s
        assert row.images_per_s == pytest.approx((600 if row.case == SCAN else 576) / row.median_s)
        assert "cache warm" in row.note
        assert 100 < int(row.note.split(" samples per CPU-second")[0]) < 2 * row.images_per_s * 50
    assert found[SCAN].ratio is None
    assert found[WINDOWS].ratio_to == found[RESIDENT].ratio_to == SCAN
    assert not list(tmp_path.iterdir())


def test_the_store_holds_rows_of_32_kb(tmp_path: Path) -> None:
    store = make_store(tmp_path / "made.lance", 100)
    assert (store.num_rows, ROW_BYTES) == (100, 32 * 1024)
    read = ReadSettings(latents=COLUMN.name, caption=True)
    with Loader(store, Order(100, seed=0, global_batch=10), read=read) as loader:
        batch = next(loader)
    assert batch["moments"].nbytes == 10 * ROW_BYTES
    assert batch["caption"][0].endswith(f"number {batch.positions_B[0]}")


def test_fewer_rows_than_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows=10, batch=64"):
        bench_loader(rows=10, batch=64, folder=tmp_path)
