"""Rows by bucket, found when asked for: the same as a list of all of them, without the list."""

from __future__ import annotations

import importlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from darkroom.data.images import buckets, nearest_bucket
from darkroom.data.mixing import BucketIndex, Sorter, listed_buckets
from darkroom.data.order import BucketOrder, OrderSettings, Rows
from darkroom.data.store import SCHEMA, Store

# The package has a function of the module's name.
bucket_rows = importlib.import_module("darkroom.data.mixing")

ALLOWED = buckets(64, step=8)
SMALL = OrderSettings(block_rows=8, window_blocks=4)


def rows_of(start: int, num: int) -> pa.Table:
    draws = np.random.default_rng(start)
    numbers = range(start, start + num)
    return pa.table(
        {
            "id": [f"{i:032x}" for i in numbers],
            "picture": [b"x"] * num,
            "caption": ["c"] * num,
            "width": draws.integers(20, 90, num),
            "height": draws.integers(20, 90, num),
            "format": ["PNG"] * num,
            "phash": list(numbers),
            "source": ["made"] * num,
            "key": [f"{i}.png" for i in numbers],
        },
        schema=SCHEMA,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "pictures.lance")
    for i, num in enumerate((300, 1, 211, 77)):
        made.append(rows_of(1000 * i, num))
    return made


def listed(store: Store, positions: np.ndarray) -> dict[tuple[int, int], list[int]]:
    """The plain way: every row's bucket, one by one."""
    found: dict[tuple[int, int], list[int]] = {}
    sizes = store.take(positions, ["width", "height"]).to_pylist()
    for position, row in zip(positions.tolist(), sizes, strict=True):
        found.setdefault(nearest_bucket(row["width"], row["height"], ALLOWED), []).append(position)
    return found


@pytest.mark.parametrize("holdout", [0, 0.1, 13])
def test_the_order_is_that_of_a_list(store: Store, holdout: float) -> None:
    rows = Rows.of(store.num_rows).split(holdout)[0]
    expected = listed(store, rows.positions(np.arange(len(rows))))
    found = BucketIndex(store, ALLOWED, rows).buckets()
    assert {size: r.positions(np.arange(len(r))).tolist() for size, r in found.items()} == expected
    assert len(expected) == len(ALLOWED) == 5
    plain = {size: np.array(positions) for size, positions in expected.items()}
    lazy, eager = (BucketOrder(b, seed=3, global_batch=16, settings=SMALL) for b in (found, plain))
    other = BucketOrder(plain, seed=4, global_batch=16, settings=SMALL)
    for k in (0, 1, 17, 80, 333):
        mine, theirs = lazy.batch(k), eager.batch(k)
        assert mine.size == theirs.size
        assert mine.positions_B.tolist() == theirs.positions_B.tolist()
        assert mine.epochs_B.tolist() == theirs.epochs_B.tolist()
    assert any(lazy.batch(k).positions_B.tolist() != other.batch(k).positions_B.tolist() for k in range(5))


def test_a_selection_is_sorted_alike(store: Store) -> None:
    chosen = store.select("width >= 40")
    found = listed_buckets(store, ALLOWED, chosen)
    assert {size: positions.tolist() for size, positions in found.items()} == listed(store, chosen)


def test_deleted_rows_and_joined_fragments_are_counted_anew(store: Store) -> None:
    BucketIndex(store, ALLOWED, Rows.of(store.num_rows))
    store.delete(ids=[f"{i:032x}" for i in (3, 4, 2005)])
    store.compact(rows_per_fragment=250)
    found = BucketIndex(store, ALLOWED, Rows.of(store.num_rows)).buckets()
    everything = np.arange(store.num_rows)
    assert {s: r.positions(np.arange(len(r))).tolist() for s, r in found.items()} == listed(store, everything)


def test_counts_are_joined_in_one_file_and_new_fragments_added(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(bucket_rows, "JOIN_AT", 2)
    rows = Rows.of(store.num_rows)
    before = {size: len(r) for size, r in BucketIndex(store, ALLOWED, rows).buckets().items()}
    assert len(list((Path(store.path) / "_shapes").glob("buckets-*.arrow"))) == 1
    asked: list[int] = []
    shapes_of = store.shapes_of
    monkeypatch.setattr(store, "shapes_of", lambda number: asked.append(number) or shapes_of(number))
    again = {size: len(r) for size, r in BucketIndex(store, ALLOWED, rows).buckets().items()}
    assert again == before
    assert asked == []
    store.append(rows_of(5000, 50))
    grown = BucketIndex(store, ALLOWED, Rows.of(store.num_rows)).buckets()
    assert asked == [4]
    assert sum(len(r) for r in grown.values()) == store.num_rows
    other = BucketIndex(store, buckets(64, step=32), Rows.of(store.num_rows)).buckets()
    assert len(asked) == 1 + 5  # other buckets have a file of their own
    assert Counter(asked)[4] == 2
    assert set(other) <= set(buckets(64, step=32))


def test_a_damaged_file_of_counts_is_counted_anew(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(bucket_rows, "JOIN_AT", 2)
    rows = Rows.of(store.num_rows)
    before = {size: len(r) for size, r in BucketIndex(store, ALLOWED, rows).buckets().items()}
    [joined] = (Path(store.path) / "_shapes").glob("buckets-*.arrow")
    for damage in (b"", b"no table", joined.read_bytes()[:200]):
        joined.write_bytes(damage)
        assert {size: len(r) for size, r in BucketIndex(store, ALLOWED, rows).buckets().items()} == before
        assert len(joined.read_bytes()) > 200


def test_sizes_are_sorted_as_one_by_one() -> None:
    draws = np.random.default_rng(0).integers(10, 3000, (2, 4000))
    sorter = Sorter(ALLOWED)
    for part in np.array_split(draws, 7, axis=1):
        found = [ALLOWED[code] for code in sorter.codes(*part).tolist()]
        assert found == [nearest_bucket(w, h, ALLOWED) for w, h in part.T.tolist()]


def test_counts_are_noted_at_an_address_too(store: Store, monkeypatch) -> None:
    """As where a store lies in an object store: nothing but the joined file is known."""
    monkeypatch.setattr(bucket_rows, "JOIN_AT", 2)
    rows = Rows.of(store.num_rows)
    before = {size: len(r) for size, r in BucketIndex(store, ALLOWED, rows).buckets().items()}
    there = Store(store.dataset, f"file://{store.path}")
    monkeypatch.setattr(there, "shapes_of", lambda _: pytest.fail("was not found"))
    assert {size: len(r) for size, r in BucketIndex(there, ALLOWED, rows).buckets().items()} == before
    [joined] = (Path(store.path) / "_shapes").glob("buckets-*.arrow")
    joined.unlink()
    other = Store(store.dataset, f"file://{store.path}")
    assert {size: len(r) for size, r in BucketIndex(other, ALLOWED, rows).buckets().items()} == before
    assert joined.is_file()


def test_what_was_read_is_forgotten_and_read_again(store: Store, monkeypatch) -> None:
    index = BucketIndex(store, ALLOWED, Rows.of(store.num_rows))
    whole = {size: r.positions(np.arange(len(r))).tolist() for size, r in index.buckets().items()}
    monkeypatch.setattr(bucket_rows, "CODES_BYTES", 250)
    tight = BucketIndex(store, ALLOWED, Rows.of(store.num_rows))
    with ThreadPoolExecutor(4) as pool:
        found = dict(
            pool.map(lambda item: (item[0], item[1].positions(np.arange(len(item[1]))).tolist()),
                     list(tight.buckets().items()) * 5)
        )  # fmt: skip
    assert found == whole
    assert sum(codes.nbytes for codes in tight._held.values()) == tight._held_bytes <= 300
