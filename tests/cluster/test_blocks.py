"""What holds a job's blocks: encoders that are lost, fragments cut when their turn comes, a store that is
not everywhere. No cluster is started."""

from __future__ import annotations

import errno
import fcntl
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from cluster_material import made_store

from darkroom.cluster import encoders, prepare
from darkroom.cluster.connect import Capacity
from darkroom.cluster.encoders import (
    Bounds,
    Encoder,
    Keeper,
    Pool,
    RankStatus,
    SharedPool,
    Use,
    check_room,
    on_one_machine,
)
from darkroom.cluster.feed import share_of
from darkroom.cluster.prepare import Ask, _Fragments, _Sized, cut_block, parts_folder
from darkroom.data.versions import vanished
from darkroom.errors import DarkroomError, InputError, StoreError
from darkroom.prepare.job import Notes
from darkroom.train.ranks import Ranks


class Held(Pool):
    """A pool whose encoders are numbers."""

    def __init__(self, count: int) -> None:
        self.bounds, self.encoders = Bounds(count, count), {}
        self.lost = self._lost_in_a_row = self._next = 0
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        self.encoders[self._next] = Encoder(self._next, None)
        self._next += 1

    def poll(self, waiting: int) -> None: ...


class Asked:
    """A keeper that is called at once, where a rank calls its actor."""

    def __init__(self, keeper: Keeper) -> None:
        self.state = SimpleNamespace(remote=keeper.state)


def test_lost_encoders_end_a_job_only_where_no_block_is_made_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoders, "MOST_LOST", 3)
    keeper = Keeper(Bounds(1, 1), None)
    keeper._pool = Held(1)
    rank: Any = SharedPool(Asked(keeper), 0, Bounds(1, 1), Use(1))
    for number in range(8):  # one after the other, each after a block
        rank.made()
        rank._dead = [number]
        rank.tell(0)
    assert keeper._pool.lost == 8
    keeper.state(0, RankStatus(made=1, dead=[8, 9, 10]))
    with pytest.raises(DarkroomError, match="4 encoders died one after the other"):
        keeper.state(0, RankStatus(dead=[11]))


def test_all_cpu_tasks_are_shared_out() -> None:
    shares = [share_of(13, Ranks(rank, 8)) for rank in range(8)]
    assert (sum(shares), max(shares) - min(shares)) == (13, 1)
    assert [share_of(2, Ranks(rank, 4)) for rank in range(4)] == [1, 1, 1, 1]


def test_encoders_are_counted_node_by_node() -> None:
    with pytest.raises(InputError, match="1 encoders of 4 CPUs each: the nodes fit 0 .* 2 CPUs"):
        check_room(Bounds(1, 1, fraction=4), [{"CPU": 2.0}] * 4)
    check_room(Bounds(4, 4, fraction=0.5), [{"GPU": 1.0}, {"GPU": 1.0}])
    with pytest.raises(InputError, match="5 encoders of 0.5 GPUs each: the nodes fit 4"):
        check_room(Bounds(5, 5, fraction=0.5), [{"GPU": 1.0}, {"GPU": 1.0}])
    room = Capacity(((2, 0), (7, 2), (4, 8)))
    assert (room.holds(1, 0), room.holds(3, 0), room.holds(1, 1), room.holds(4, 1)) == (13, 3, 6, 2)


def test_cpus_of_one_machine_that_do_not_go_round_are_shared() -> None:
    def shared(bounds: Bounds, *cpus: float, reserved: float = 1) -> Bounds:
        return on_one_machine(bounds, [{"CPU": each} for each in cpus], reserved)

    for fraction in (0.5, 1):
        assert shared(Bounds(1, 1, fraction=fraction), 2).shares
    assert shared(Bounds(1, 8), 2) == Bounds(1, 2, shares=True)
    assert shared(Bounds(1, 1), 1).shares
    plain = Bounds(1, 1)
    assert shared(plain, 3) == plain  # one each
    assert shared(plain, 2, reserved=0) == plain
    assert shared(plain, 2, 2) == plain  # nodes may be added
    assert shared(Bounds(4, 4), 2) == Bounds(4, 4)
    assert shared(Bounds(1, 1, "T4"), 2) == Bounds(1, 1, "T4")
    assert on_one_machine(plain, [{"CPU": 2, "GPU": 1}], 1) == plain
    with pytest.raises(InputError, match="4 encoders of 1 CPUs each: the nodes fit 1"):
        check_room(shared(Bounds(4, 4), 2), [{"CPU": 2}])


def test_the_cpu_stage_follows_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[dict[str, float]] = [{"CPU": 4.0}]
    monkeypatch.setattr(prepare, "resources_of_nodes", lambda: nodes)
    monkeypatch.setattr(prepare, "options_of", lambda bounds: {"num_gpus": 0})
    use, sized = Use(1), _Sized(Bounds(1, 4))
    sized.fit(use, 1)
    assert use.cpu_workers == 3
    nodes.append({"CPU": 8.0})
    sized.fit(use, 3)
    assert use.cpu_workers == 9
    replace(sized, said=2).fit(use, 3)
    assert use.cpu_workers == 2
    nodes.clear()
    sized.fit(use, 0)
    assert use.cpu_workers == 1
    replace(sized, grows=True).fit(use, 0)  # an autoscaler sees what waits
    assert use.cpu_workers == 9


def test_fragments_are_cut_when_their_turn_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "BLOCK_ROWS", 4)
    store = made_store(tmp_path / "s.lance", 3, 10)
    store.add_columns([pa.field("made", pa.struct([("value", pa.int32())]))])
    column: Any = SimpleNamespace(name="made", source="picture", ready_bytes=1, batch_rows=4)
    work: Any = SimpleNamespace(
        store=store, column=column, folder=tmp_path / "notes" / "made", numbers=[0, 2]
    )
    cut: list[int] = []
    real = prepare.block_rows
    monkeypatch.setattr(prepare, "block_rows", lambda column: cut.append(1) or real(column))
    fragments = _Fragments(work)
    assert cut == []  # at 62 million blocks a list of them would be 30 GB
    first = fragments.find(0)
    assert [(ask.first, ask.count) for ask in first.asks] == [(0, 4), (4, 4), (8, 2)]
    root = parts_folder(work.folder)
    for name in (Path(first.folder).name, "0-of-another-size", "1-not-asked-for", "odd"):
        (root / name).mkdir(parents=True)
    assert len(cut) == 1
    assert _Fragments(work).find(7) is None
    assert [path.name for path in root.iterdir()] == [Path(first.folder).name]


def test_a_store_that_a_machine_does_not_see_is_named_with_the_machine(tmp_path: Path) -> None:
    ask = Ask(str(tmp_path / "gone.lance"), 1, 0, 0, 1, False, "part")
    with pytest.raises(StoreError) as caught:
        cut_block(ask, None)
    assert str(caught.value).startswith(
        f"{tmp_path}/gone.lance is not on the machine {socket.gethostname()};"
    )
    assert not vanished(caught.value)  # nothing that looking again would mend


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.EWOULDBLOCK, "another process is preparing made"), (errno.ENOSYS, "has no file locks")],
)
def test_a_file_system_without_locks_is_not_taken_for_another_process(
    number: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=told), Notes(str(tmp_path), "made"):
        pass
