"""The set of ids agrees with a plain set, in memory and on disk, and does not forget while it is sorted."""

from __future__ import annotations

import threading

import numpy as np

from darkroom.data import sidecars as module
from darkroom.data.sidecars import SeenIds, short_id


def test_it_agrees_with_a_plain_set(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PENDING", 50)
    monkeypatch.setattr(module, "RUN", 1000)
    rng = np.random.default_rng(0)
    plain: set[int] = set()
    seen = SeenIds(tmp_path)
    for number in rng.integers(0, 6000, 8000).tolist():
        assert seen.add(number) == (number not in plain)
        plain.add(number)
    assert len(seen) == len(plain)
    asked = list(range(7000))
    assert seen.which(asked) == [number in plain for number in asked]
    assert list(tmp_path.iterdir()) == [], "its files have no name, so a kill leaves none"
    assert any(isinstance(run, np.memmap) for run in seen._runs)


def test_many_at_once():
    seen = SeenIds()
    seen.add_all(np.array([5, 3, 5, 2**64 - 1], np.uint64))
    assert [n in seen for n in (3, 5, 2**64 - 1, 4)] == [True, True, True, False]
    assert len(seen) == 3
    assert not seen.add(3)
    assert seen.which([]) == []


def test_an_id_is_never_lost_to_another_thread(monkeypatch):
    monkeypatch.setattr(module, "PENDING", 20)
    seen, added, lost = SeenIds(), [0], []

    def ask() -> None:
        while added[0] < 3_000:
            last = added[0]
            if last and last not in seen:
                lost.append(last)

    thread = threading.Thread(target=ask)
    thread.start()
    for number in range(1, 3_001):
        seen.add(number)
        added[0] = number
    thread.join()
    assert lost == []


def test_short_ids_differ():
    assert len({short_id(str(i)) for i in range(10_000)}) == 10_000
    assert 0 <= short_id("x") < 2**64
