"""The fair queue: shares of work between keys and sizes, priorities, places."""

from __future__ import annotations

import itertools
import random
import time
from types import SimpleNamespace

import pytest

from darkroom.serve.engine.tickets import (
    ENLARGE_COST,
    NET_COST,
    EngineJob,
    Entry,
    FairQueue,
    LoadLimit,
    PendingPicture,
    Shape,
    admitted_after,
    preview_steps,
)
from darkroom.serve.request import PictureRequest


def served(queue: FairQueue, count: int) -> list[Entry]:
    return [queue.take() for _ in range(count)]


def test_a_key_with_many_pictures_takes_turns_with_one_that_has_few():
    queue = FairQueue()
    for i in range(100):
        queue.push(Entry(i, "greedy", 64, 1.0))
    for i in range(5):
        queue.push(Entry(i, "modest", 64, 1.0))
    first = [entry.key for entry in served(queue, 10)]
    assert first.count("modest") == 5


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_looking_at_a_full_batch_gives_no_key_new_credit(looks):
    """Each look at which nothing fitted credited whose turn it was: its pictures were all served first."""
    queue, keys = FairQueue({"paid": 2}), ("a", "b", "paid")
    for i in range(60):
        for key in keys:
            queue.push(Entry(i, key, 64, 1.0))
    order = []
    for _ in range(60):
        assert all(queue.head(lambda _: False) is None for _ in range(looks))
        order.append(queue.take().key)
    assert [order.count(key) for key in keys] == [15, 15, 30]
    assert max(len(list(run)) for _, run in itertools.groupby(order)) <= 2


def test_keys_share_work_and_not_pictures():
    queue = FairQueue()
    for i in range(200):
        queue.push(Entry(i, "large", 512, 10.0))
        queue.push(Entry(i, "small", 64, 1.0))
    work = {"large": 0.0, "small": 0.0}
    while queue.count("small") and queue.count("large"):
        entry = queue.take()
        work[entry.key] += entry.cost
    assert abs(work["large"] - work["small"]) <= 2 * 10.0


def test_sizes_of_one_key_share_too_and_large_ones_are_not_starved():
    queue = FairQueue()
    for i in range(50):
        queue.push(Entry(i, "one", 64, 1.0))
    queue.push(Entry("big", "one", 512, 20.0))
    order = [entry.item for entry in served(queue, 51)]
    assert order.index("big") <= 21


def test_priority_is_among_ones_own():
    queue = FairQueue()
    for i in range(4):
        queue.push(Entry(f"a{i}", "a", 64, 1.0))
    for i in range(4):
        queue.push(Entry(f"b{i}", "b", 64, 1.0))
    queue.push(Entry("urgent", "b", 128, 1.0, priority=1))
    order = [entry.item for entry in served(queue, 9)]
    assert next(item for item in order if item[0] in "bu") == "urgent"
    assert order.index("a3") <= 7  # the other key lost no turn to it


def test_removing_leaves_counts_and_order_right():
    draw = random.Random(1)
    queue, entries = FairQueue(), []
    for i in range(300):
        entries.append(
            Entry(i, draw.choice("abc"), draw.choice((32, 64)), draw.uniform(1, 9), draw.randrange(3))
        )
        queue.push(entries[-1])
    gone = draw.sample(entries, 100)
    assert all(queue.remove(entry) for entry in gone)
    assert not queue.remove(gone[0])
    expected = queue.in_order()
    assert len(expected) == len(queue) == 200
    assert sum(queue.costs().values()) - sum(entry.cost for entry in expected) < 1e-6
    assert served(queue, 200) == expected
    assert queue.head() is None
    assert len(queue) == 0
    assert queue.costs() == {}


def test_removing_what_is_not_there_adds_nothing_and_asks_nobody_what_it_is():
    class Shy:
        def __repr__(self) -> str:
            raise AssertionError("a picture was put into words")

    queue = FairQueue()
    there, taken = Entry(Shy(), "a", 64, 1.0), Entry(Shy(), "a", 64, 1.0)
    for entry in (taken, there):
        queue.push(entry)
    assert queue.take() is taken
    for _ in range(2):
        assert not queue.remove(taken)
    assert not queue.remove(Entry(Shy(), "b", 32, 1.0))
    assert (len(queue), queue.count("b"), queue.costs()) == (1, 0, {"a": 1.0})
    assert queue.remove(there)
    with pytest.raises(AssertionError):  # the control: it would have been noticed
        repr(Shy())


def drawing(steps: int, size: int = 1, load: float = 1.0) -> PendingPicture:
    return PendingPicture(size, steps, 1.0, load)


def test_who_waits_is_admitted_when_those_before_have_taken_their_steps():
    """Two on their way of 4 and 6 steps, room for 2: rounds of two steps, each a second."""
    drawn, waiting = [drawing(4), drawing(6)], [drawing(2), drawing(9), drawing(1)]
    # 4 rounds of 2 = 8 s; then 2 rounds = 12 s, at which two end together; then both have room.
    assert admitted_after(drawn, waiting, 2.0, 3, 1.0) == [8.0, 12.0, 12.0]
    assert admitted_after(drawn, waiting, 2.0, 3, 4.0) == [2.0, 3.0, 3.0]
    assert admitted_after([], waiting, 3.0, 3, 1.0) == [0.0, 0.0, 0.0]


def test_another_size_does_not_wait_for_this_ones_room_and_a_large_one_leaves_some_to_others():
    drawn, waiting = [drawing(10)], [drawing(1), drawing(1, size=2), drawing(1, size=3, load=99.0)]
    assert admitted_after(drawn, waiting, 1.0, 3, 1.0) == [12.0, 0.0, 2.0]
    assert admitted_after(drawn, [drawing(1, size=2, load=99.0), drawing(1, size=2)], 1.0, 3, 1.0)[0] == 0.0


def test_turns_go_round_in_the_order_in_which_keys_came():
    queue = FairQueue()
    for key in "abcabcabc":
        queue.push(Entry(key, key, 64, 1.0))
    assert "".join(entry.key for entry in served(queue, 9)) == "abcabcabc"


def test_first_come_first_served_within_a_flow():
    queue = FairQueue()
    for i in range(10):
        queue.push(Entry(i, "a", 64, 1.0 + i % 3))
    assert [entry.item for entry in served(queue, 10)] == list(range(10))


def test_sizes_without_room_are_passed_over_and_lose_nothing():
    queue = FairQueue()
    for i in range(6):
        queue.push(Entry(f"a{i}", "a", (64, 128)[i % 2], 1.0))
        queue.push(Entry(f"b{i}", "b", 64, 1.0))
    only_128 = [queue.take(lambda entry: entry.size == 128).item for _ in range(3)]
    assert only_128 == ["a1", "a3", "a5"]
    assert queue.head(lambda entry: entry.size == 128) is None
    assert len(queue) == 9
    rest = [entry.item for entry in served(queue, 9)]
    assert sorted(rest) == ["a0", "a2", "a4", *(f"b{i}" for i in range(6))]
    assert [item for item in rest if item[0] == "a"] == ["a0", "a2", "a4"]


def test_lower_priority_goes_where_higher_finds_no_room():
    queue = FairQueue()
    queue.push(Entry("urgent", "a", 64, 1.0, priority=2))
    queue.push(Entry("other size", "a", 128, 1.0))
    assert queue.head().item == "urgent"
    assert queue.take(lambda entry: entry.size != 64).item == "other size"
    assert queue.head().item == "urgent"


def test_turns_that_found_no_room_are_saved_up_for_two_turns_at_most():
    queue = FairQueue()
    large = Entry("large", "third", 512, 10.0)
    queue.push(large)
    queue.remove(large)  # each turn is worth the largest cost seen
    for i in range(200):
        queue.push(Entry(i, "held up", 64, 1.0))
        queue.push(Entry(i, "other", 64, 1.0))
    for _ in range(12):
        for key in ("held up", "other"):
            assert queue.take(lambda entry, key=key: entry.key == key).key == key
    keys = [entry.key for entry in served(queue, 120)]
    runs = [len(list(run)) for key, run in itertools.groupby(keys) if key == "held up"]
    assert 10 < max(runs) <= 20


def test_a_keys_share_counts_its_work_so_many_times():
    queue = FairQueue({"paying": 3})
    for i in range(60):
        queue.push(Entry(i, "paying", 64, 1.0))
        queue.push(Entry(i, "other", 64, 1.0))
    assert [entry.key for entry in served(queue, 40)].count("paying") == 30


def test_loads_that_fill_the_room_exactly_fit_and_what_left_leaves_nothing():
    """Ten tenths are the room, however they are added up; a picture of no steps is there for a round."""
    tenths = [PendingPicture(1, 1, 1.0, 0.125) for _ in range(8)]
    assert admitted_after(tenths, [drawing(1, load=1.0)], 1.0, 2, 8.0) == [1.0]
    assert admitted_after([drawing(0)], [drawing(1)], 1.0, 2, 1.0) == [1.0]
    assert admitted_after([], [], 1.0, 2, 1.0) == []
    halves = [drawing(3, load=0.5), drawing(5, load=0.5)]
    assert admitted_after(halves, [drawing(1, load=0.5), drawing(1, load=1.0)], 1.0, 2, 1.0) == [6.0, 9.0]
    # One call's room is left to other sizes: of two calls this size has one, of three at most two.
    large = [drawing(4, size=1, load=2.0)]
    assert admitted_after(large, [drawing(1, size=2), drawing(1, size=2)], 2.0, 2, 1.0) == [0.0, 0.0]
    assert admitted_after(large, [drawing(1, size=2, load=2.0), drawing(1, size=3)], 2.0, 2, 1.0) == [
        0.0,
        2.0,
    ]


def test_turns_are_as_small_as_the_pictures_are():
    """Work of less than one is shared as evenly as any other."""
    queue = FairQueue()
    for i in range(20):
        queue.push(Entry(i, "a", 64, 0.125))
    for i in range(20):
        queue.push(Entry(i, "b", 64, 0.125))
    assert [entry.key for entry in served(queue, 8)] == ["a", "b"] * 4


def stepped_in_turn(drawn, waiting, capacity, calls):
    """When each of those waiting is admitted, written out step by step as the engine takes them: the size
    whose pictures had the least each is next, one step of all its pictures. A unit of work takes a second."""
    now_s, had, rows, left, loads = 0.0, {}, {}, list(enumerate(waiting)), {}
    times = [0.0] * len(waiting)

    def begin(one):
        had.setdefault(one.size, min(had.values(), default=0.0))
        rows.setdefault(one.size, []).append([one.steps, one])
        loads[one.size] = loads.get(one.size, 0.0) + one.load

    for one in drawn:
        begin(one)
    while left:
        limit = LoadLimit(loads, capacity, calls)
        while (first := next((at for at in left if limit.admits(at[1].size, at[1].load)), None)) is not None:
            left.remove(first)
            times[first[0]] = now_s
            begin(first[1])
        size = min(had, key=had.__getitem__)
        work = sum(one.step_work for _, one in rows[size])
        now_s, had[size] = now_s + work, had[size] + work / len(rows[size])
        for row in list(rows[size]):
            row[0] -= 1
            if row[0] <= 0:
                rows[size].remove(row)
                loads[size] -= row[1].load
        if not rows[size]:
            del rows[size], had[size], loads[size]
    return times


def test_a_small_picture_does_not_wait_for_as_many_steps_of_a_large_one():
    """Of 1024 and 256 pixels: 16 small steps in the time of a large one. With a small one 10 steps from its
    end the next was told to wait for 10 large ones, 170 s in place of 20."""
    large, small = PendingPicture(1024, 50, 16.0, 16.0), PendingPicture(256, 10, 1.0, 1.0)
    assert admitted_after([large, small], [small], 1.0, 20, 1.0) == [20.0]
    assert stepped_in_turn([large, small], [small], 1.0, 20)[0] == pytest.approx(20.0, abs=16.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_times_told_are_those_at_which_steps_in_turn_admit(seed):
    """To one and a half steps of all that may be there, as turns are no finer. Where all sizes were taken to
    step as often as each other, 18 of these were wrong by 240 s and more."""
    draw = random.Random(seed)
    sizes = {256: 1.0, 512: 4.0, 1024: 16.0}

    def some(count):
        drawn = (draw.choice(list(sizes)) for _ in range(count))
        return [PendingPicture(s, draw.randint(5, 60), sizes[s], sizes[s] / 2) for s in drawn]

    here, waiting = some(3), some(20)
    told = admitted_after(here, waiting, 8.0, 3, 1.0)
    truth = stepped_in_turn(here, waiting, 8.0, 3)
    assert max(truth) > 100
    assert told == pytest.approx(truth, abs=1.5 * 3 * 8 * 2)


def test_a_large_picture_that_waits_for_another_keeps_no_small_one_out():
    loads = {1024: 16.0}
    limit = LoadLimit(loads, 8.0, 3)
    assert not limit.admits(1024, 16.0)
    assert limit.admits(256, 0.5)
    waits = [PendingPicture(1024, 50, 16.0, 16.0), PendingPicture(256, 2, 0.5, 0.5)]
    assert admitted_after([PendingPicture(1024, 50, 16.0, 16.0)], waits, 8.0, 3, 1.0) == [801.0, 0.0]


@pytest.mark.parametrize(("lanes", "fits"), [(1, 8), (2, 16), (3, 16)])
def test_a_size_has_a_full_call_in_each_lane_and_leaves_one_for_the_others(lanes, fits):
    loads: dict[int, float] = {}
    limit = LoadLimit(loads, 8.0, 3, lanes)
    while limit.admits(512, 1.0):
        loads[512] = loads.get(512, 0.0) + 1.0
    assert loads == {512: fits}
    assert LoadLimit(loads, 8.0, 3, lanes).admits(256, 1.0)
    waiting = [PendingPicture(512, 10, 1.0, 1.0)] * (fits + 1)
    after_s = admitted_after([], waiting, 8.0, 3, 1.0, lanes)
    assert after_s[:-1] == [0.0] * fits
    assert after_s[-1] == 10.0 * fits


def test_a_picture_that_waits_for_a_large_one_keeps_its_place():
    """It will have to fit together with the small ones that are there, and with those let in before it."""
    limit = LoadLimit({1024: 10.0, 512: 4.0}, 8.0, 3)
    assert not limit.admits(768, 16.0)
    assert not limit.admits(256, 4.5)
    assert limit.admits(256, 4.0)
    assert LoadLimit({1024: 10.0, 512: 4.0}, 8.0, 3).admits(256, 4.5)  # none waits
    limit = LoadLimit({1024: 10.0, 512: 6.0}, 8.0, 3)
    assert not limit.admits(768, 12.0)  # small ones alone keep it out: none more until it is in
    assert not limit.admits(256, 0.5)


def test_a_shapes_work_is_pixels_steps_and_evaluations():
    larger = Shape(128, 64, 3, 1, enlarged_pixels=1000)
    shape = Shape(64, 32, 5, 2, larger, nets=2, calls_a_step=2)
    row = 2 * (1 + 2 * NET_COST)
    assert (shape.row_cost, shape.pixels, shape.solver_steps) == (row, 2048, 3)
    assert shape.load(512) == row * 4
    assert shape.cost == 2048 * 5 * row
    assert larger.cost == 128 * 64 * 3 + 1000 * ENLARGE_COST
    assert shape.whole_cost == shape.cost + larger.cost
    assert larger.whole_cost == larger.cost


def test_previews_are_spread_evenly_and_none_is_the_picture():
    assert preview_steps(3, 8) == {2: 0, 4: 1, 6: 2}
    assert preview_steps(2, 9) == {3: 0, 6: 1}
    assert preview_steps(0, 8) == {}
    assert set(preview_steps(9, 3)) == {1, 2}
    assert preview_steps(1, 1) == {}


def test_a_job_counts_the_steps_of_all_passes_of_all_pictures():
    request = PictureRequest(prompt="a", num=2)
    shape = Shape(16, 16, 5, 1, larger=Shape(32, 32, 3, 1))
    job = EngineJob("a", "key", request, shape, None)  # type: ignore[arg-type]
    assert (job.steps_done, job.steps_total) == (0, 16)
    first, second = job.tickets
    assert first.shape is shape
    assert first.has_another_pass
    first.earlier_steps = 5  # it waits for its second pass
    assert first.shape is shape.larger
    assert not first.has_another_pass
    assert (job.steps_done, second.step) == (5, 0)
    # PNDM's table has one step more than was asked for.
    tables = SimpleNamespace(table=range(6), hires=SimpleNamespace(table=range(4)))
    job.prepared = tables  # type: ignore[assignment]
    assert job.steps_total == 20
    tables.hires = None
    assert job.steps_total == 12


def test_a_jobs_phases_follow_one_another():
    request = PictureRequest(prompt="a")
    now = time.monotonic()
    job = EngineJob("a", "key", request, Shape(16, 16, 5, 1), None, accepted_s=now - 10)  # type: ignore[arg-type]
    (queued,) = job.phases().values()
    assert 10 <= queued < 60
    job.started_s, job.prepared_s = now - 7, now - 5
    over = list(job.phases().values())
    assert over[:2] == pytest.approx([3.0, 2.0])
    assert 5 <= over[2] < 60
