"""A bit a row holds the same positions as an array of them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from test_buckets import rows_of

from darkroom.data.order import Order, Rows
from darkroom.data.store import Chosen, Store
from darkroom.errors import StoreError


@pytest.mark.parametrize(
    ("num_rows", "share"), [(1, 1.0), (4096, 0.5), (4097, 0.01), (100_000, 0.3), (9_000, 0.0)]
)
def test_positions_are_those_of_the_array(num_rows: int, share: float) -> None:
    draws = np.random.default_rng(0)
    positions = np.flatnonzero(draws.random(num_rows) < share)
    parts = np.array_split(draws.permutation(positions), 7)
    chosen = Chosen(num_rows, parts)
    assert len(chosen) == len(positions)
    assert chosen[np.arange(len(positions))].tolist() == positions.tolist()
    index = (
        draws.integers(0, max(1, len(positions)), (3, 5)) if len(positions) else np.zeros((0, 5), np.int64)
    )
    assert chosen[index].tolist() == positions[index].tolist()


def test_the_order_over_a_filter_is_the_same(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "pictures.lance")
    for i in range(3):
        store.append(rows_of(1000 * i, 400))
    store.delete(ids=[f"{i:032x}" for i in (5, 1007)])
    for wanted in ("width >= 60", "width >= 60 AND height < 50", "width > 1000"):
        positions, chosen = store.select(wanted), store.choose(wanted)
        assert chosen[np.arange(len(chosen))].tolist() == positions.tolist()
    plain, compact = (
        Rows.of(found).split(0.1)[0] for found in (store.select("width >= 60"), store.choose("width >= 60"))
    )
    for k in (0, 7, 100):
        mine, theirs = (Order(rows, seed=1, global_batch=16).batch(k) for rows in (compact, plain))
        assert mine.positions_B.tolist() == theirs.positions_B.tolist()
    other = Order(Rows.of(store.choose("width >= 40")).split(0.1)[0], seed=1, global_batch=16)
    assert other.batch(7).positions_B.tolist() != theirs.positions_B.tolist()
    with pytest.raises(StoreError, match="no column 'widht'"):
        store.choose("widht >= 60")


def test_a_row_costs_a_bit() -> None:
    tracemalloc.start()
    chosen = Chosen(
        40_000_000, (np.arange(start, start + 100_000, 2) for start in range(0, 40_000_000, 100_000))
    )
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(chosen) == 20_000_000
    assert held < 40_000_000 / 8 * 1.1
    assert chosen[np.array([19_999_999])].tolist() == [39_999_998]
