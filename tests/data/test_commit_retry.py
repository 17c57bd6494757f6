"""Writers beside each other, one of which drops the versions that the others began from."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import lance
import pytest
from material import rows

from darkroom.data.store import Store
from darkroom.errors import StoreError


def test_appends_beside_one_who_joins_fragments_lose_nothing(tmp_path):
    path = tmp_path / "pictures.lance"
    Store.create(path).append(rows(10))
    done = threading.Event()

    def append(start: int) -> None:
        mine = Store.open(path)
        for i in range(20):
            mine.append(rows(2, start + 2 * i))

    def again(work: Callable[[], object]) -> None:
        while not done.is_set():
            work()

    with ThreadPoolExecutor() as pool:
        others = [
            pool.submit(again, lambda: Store.open(path).compact()),
            pool.submit(again, lambda: Store.open(path)),
        ]
        appending = [pool.submit(append, 1000 * n) for n in (1, 2)]
        wait(appending)
        done.set()
    for one in (*appending, *others):
        one.result()
    store = Store.open(path)
    found = store.take(store.select(None), ["phash"])["phash"].to_pylist()
    assert sorted(found) == [*range(10), *range(1000, 1040), *range(2000, 2040)]


def test_no_version_is_dropped_while_another_commits(tmp_path):
    """A dropped version's number would be free again, and what commits under it would be below the newest."""
    store = Store.create(tmp_path / "pictures.lance")
    store.append(rows(3))
    other = Store.open(store.path)
    with ThreadPoolExecutor() as pool:

        def commit() -> lance.LanceDataset:
            dropping.append(pool.submit(other.drop_old_versions))
            assert not wait(dropping, timeout=0.5).done
            assert len(other.dataset.versions()) == 2
            return store.dataset

        dropping: list[Future[int]] = []
        store.commit(commit)
        assert dropping[0].result() > 0
    assert len(other.dataset.versions()) == 1


def test_where_commits_cannot_be_locked_out_young_versions_stay(tmp_path):
    store = Store.create(tmp_path / "pictures.lance")
    store.append(rows(3))
    at_address = Store.open(f"file://{store.path}")
    at_address.append(rows(3, 10))
    at_address.compact()
    store.refresh()
    assert len(store.dataset.versions()) == 5
    store.drop_old_versions()
    assert len(store.dataset.versions()) == 1, "the control: in a folder they go"


@pytest.fixture
def waits(monkeypatch) -> list[int]:
    """Each wait for other writers."""
    waited: list[int] = []
    for module in ("versions", "store"):
        monkeypatch.setattr(f"darkroom.data.{module}.wait", waited.append)
    return waited


def test_what_is_missing_is_told_at_once(tmp_path, waits):
    store = Store.create(tmp_path / "conflict" / "pictures.lance")
    store.append(rows(3))
    with pytest.raises(StoreError, match="no version 99"):
        Store.open(store.path, version=99)
    for name in ("data/none.lance", "conflict.lance"):
        with pytest.raises(StoreError, match="no picture store"):
            Store.open(tmp_path / name)
    with pytest.raises(OSError, match="broken"):
        store.patiently(lambda: broken(f"{tmp_path}/conflict is broken"))
    assert waits == []


def broken(text: str) -> None:
    raise OSError(text)


def test_what_the_newest_version_lacks_too_is_tried_once(tmp_path, waits):
    store = Store.create(tmp_path / "pictures.lance")
    store.append(rows(3))
    for file in (tmp_path / "pictures.lance" / "data").iterdir():
        file.unlink()
    tries = []

    def read() -> list[object]:
        tries.append(1)
        return list(store.scan(["id"]))

    with pytest.raises((OSError, ValueError), match="Not found"):
        store.patiently(read)
    assert (len(tries), len(waits)) == (1, 1)


def test_a_version_that_was_dropped_is_left_for_the_newest(tmp_path, waits):
    store = Store.create(tmp_path / "pictures.lance")
    store.append(rows(3))
    other = Store.open(store.path)
    other.append(rows(3, 10))
    other.compact()
    with pytest.raises((OSError, ValueError), match="Not found"):  # without patience
        list(store.scan(["id"]))
    counts = []

    def commit() -> lance.LanceDataset:
        counts.append(sum(batch.num_rows for batch in store.scan(["id"])))
        return store.dataset

    store.commit(commit)
    assert counts == [6]
    assert len(waits) == 1


def test_writers_who_are_never_quick_enough_give_up_in_a_line(tmp_path, waits):
    store = Store.create(tmp_path / "pictures.lance")
    with pytest.raises(StoreError, match="changed by others all the time"):
        store.patiently(lambda: store.patiently(lambda: broken("Commit conflict for version 3")))
    assert len(waits) == 40
