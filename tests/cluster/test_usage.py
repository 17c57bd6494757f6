"""What is said to hold a job up is what does."""

from __future__ import annotations

import pytest

from darkroom.cluster.encoders import ONLINE, PREPARE, BlockTimes, SettingNames, Use, together


def use_of(
    cpu_s: float,
    encode_s: float,
    *,
    read_s: float = 0.0,
    write_s: float = 0.0,
    slot_s: float = 0.0,
    words: SettingNames = PREPARE,
) -> Use:
    """Ten seconds of two encoders and four CPU tasks."""
    busy = BlockTimes(read_s, cpu_s, encode_s, write_s)
    use = Use(4, 6, words, wall_s=10, busy=busy, rows=100, blocks=10, encoder_s=20, slot_s=slot_s)
    use.begun = True
    return use


def told(*arguments: float, **settings: float) -> str:
    return use_of(*arguments, **settings).bottleneck()


def test_the_bottleneck_is_named_with_what_to_change() -> None:
    assert told(10, 19.8).endswith("encoding is the limit: raise --encoders above 2, or --fraction")
    assert told(39, 14).endswith("encoders 70%: encoders starve: raise --cpu-workers from 4 to 6")
    assert told(39, 10).endswith("from 4 to 8, which takes 2 more CPUs in the cluster")
    assert "encoders starve for reading the store: take faster storage, or raise" in told(5, 5, read_s=34)
    assert "writing encoded values is the limit" in told(5, 5, write_s=14)
    assert "neither is full: larger blocks" in told(10, 10)


def test_tasks_that_hold_their_place_without_work_wait_for_a_cpu() -> None:
    assert told(10, 10, slot_s=39).endswith("4 CPU tasks wait for a free CPU: add nodes with CPUs")
    assert "neither is full" in told(10, 10, slot_s=20)


def test_training_that_keeps_up_is_told_from_training_that_waits() -> None:
    use = use_of(10, 10, words=ONLINE)
    assert use.bottleneck().endswith("training is the limit, encoders keep up with it")
    use.waited_s = 4
    assert use.bottleneck().endswith(
        "neither is full, and training waits 40% of its time: raise data.prefetch_batches"
    )
    full = use_of(10, 19, words=ONLINE)
    assert "raise data.online.encoders above 2, or data.online.fraction" in full.bottleneck()


def test_a_stage_whose_places_change_is_busy_by_the_time_that_each_was_there() -> None:
    use = Use(2, begun=True)
    use.tick(5, 1, 0)
    use.cpu_workers = 6
    use.tick(5, 1, 0)
    use.add(BlockTimes(ready_s=20))
    assert use.shares()["cpu"] == pytest.approx(0.5)  # of 5 * 2 + 5 * 6


def test_ranks_that_share_encoders_fill_them_together() -> None:
    """Each of two ranks keeps two encoders half busy: both together all of them."""
    one = use_of(10, 9.5, words=ONLINE)
    assert one.shares()["encode"] == pytest.approx(0.475)
    both = together([one, one])
    assert both.shares() == pytest.approx({"cpu": 0.25, "encode": 0.95})
    assert both.rows_per_s() == pytest.approx(20)
    assert "encoding is the limit" in both.bottleneck()


def test_what_starts_up_is_not_counted() -> None:
    use = Use(4)
    use.tick(100, 0, 4)
    use.add(BlockTimes(ready_s=50))
    assert use.bottleneck() == "nothing was encoded yet"
    use.made(8)
    assert "too few blocks" in use.bottleneck()
    for _ in range(3):
        use.tick(1, 1, 4)
        use.add(BlockTimes(encode_s=0.95))
        use.made(8)
    assert use.rows_per_s() == 8
    assert use.shares() == pytest.approx({"cpu": 0, "encode": 0.95})
