"""Writers beside each other, one of which drops the versions that the others began from."""

import threading
from collections.abc import Callable

import lance
import pytest
from material import rows

from darkroom.data.races import patiently
from darkroom.data.store import Store


def test_appends_beside_one_who_joins_fragments_lose_nothing(tmp_path):
    path = tmp_path / "pictures.lance"
    Store.create(path).append(rows(10))
    errors: list[BaseException] = []
    done = threading.Event()

    def thread(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        made = threading.Thread(target=run)
        made.start()
        return made

    def append(start: int) -> None:
        mine = Store.open(path)
        for i in range(20):
            mine.append(rows(2, start + 2 * i))

    def again(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            while not done.is_set():
                work()

        return run

    appending = [thread(lambda n=n: append(1000 * n)) for n in (1, 2)]
    others = [thread(again(lambda: Store.open(path).compact())), thread(again(lambda: Store.open(path)))]
    for one in appending:
        one.join()
    done.set()
    for one in others:
        one.join()
    assert errors == []
    store = Store.open(path)
    found = store.take(store.select(None), ["phash"])["phash"].to_pylist()
    assert sorted(found) == [*range(10), *range(1000, 1040), *range(2000, 2040)]


def test_what_is_no_race_is_told_at_once(tmp_path):
    calls = []

    def open_nothing() -> lance.LanceDataset:
        calls.append(1)
        return lance.dataset(tmp_path / "data" / "none.lance")

    with pytest.raises(ValueError, match="not found"):
        patiently(open_nothing)
    assert len(calls) == 1


def test_a_version_that_was_dropped_is_tried_again(tmp_path):
    store = Store.create(tmp_path / "pictures.lance")
    store.append(rows(3))
    late = lance.dataset(store.path)
    store.append(rows(3, 10))
    store.drop_old_versions()
    tries = []

    def read() -> int:
        tries.append(1)
        return lance.dataset(store.path, version=late.version if len(tries) == 1 else None).count_rows()

    with pytest.raises((OSError, ValueError), match="not found"):  # without patience
        lance.dataset(store.path, version=late.version)
    assert patiently(read) == 6
    assert len(tries) == 2
