"""Order is a pure function: the same batches whoever asks, and every row once an epoch."""

from __future__ import annotations

import hashlib
import math
import time
import tracemalloc
import warnings
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from darkroom.data.draws import Purpose, uniform
from darkroom.data.order import BatchRows, BucketOrder, Order, OrderSettings, Rows, permute
from darkroom.errors import InputError

SMALL = OrderSettings(block_rows=8, window_blocks=4)

PERMUTED = [[0], [1, 0], [1, 0, 2], [3, 0, 2, 1], [0, 4, 2, 1, 3]]
ORDERS = ["78623eb891304706", "83f6985206922b4d", "bfca55e6c9bf4dd1"]
BUCKETS = "687ce1d25d0af4dd"
IN_TURN = "7eb1abd618f36893"


def stream(order: Order | BucketOrder, num_batches: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    batches = [order.batch(k) for k in range(start, start + num_batches)]
    return np.concatenate([b.epochs_B for b in batches]), np.concatenate([b.positions_B for b in batches])


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000, 4097])
def test_permute_is_a_bijection_with_an_inverse(size: int) -> None:
    index = np.arange(size)
    shuffled = permute(index, size, 7, 3)
    assert sorted(shuffled.tolist()) == list(range(size))
    assert (permute(shuffled, size, 7, 3, inverse=True) == index).all()
    if size >= 64:
        assert (permute(index, size, 7, 4) != shuffled).mean() > 0.9  # another key is another order


def test_permute_spreads_evenly() -> None:
    """Where the first and last of 50 end up over 2000 keys: chi-square of 49 degrees of freedom stays below
    90."""
    for item in (0, 49):
        places = [int(permute(np.array([item]), 50, key)[0]) for key in range(2000)]
        counts = np.bincount(places, minlength=50)
        assert ((counts - 40) ** 2 / 40).sum() < 90


@pytest.mark.parametrize("num_rows", [1, 7, 32, 33, 64, 1000, 3007])
@pytest.mark.parametrize("global_batch", [1, 8, 300])
def test_every_row_once_an_epoch_and_no_batch_short(num_rows: int, global_batch: int) -> None:
    order = Order(num_rows, seed=3, global_batch=global_batch, settings=SMALL)
    epochs, positions = stream(order, -(-2 * num_rows // global_batch))
    assert len(positions) % global_batch == 0
    for epoch in (0, 1):
        assert sorted(positions[epochs == epoch].tolist()) == list(range(num_rows))


def test_a_batch_across_the_epochs_end_is_filled_from_the_next() -> None:
    order = Order(100, seed=0, global_batch=30, settings=SMALL)
    crossing = order.batch(3)  # items 90 to 120
    assert Counter(crossing.epochs_B.tolist()) == {0: 10, 1: 20}
    assert (np.diff(crossing.positions_B) >= 0).all()
    assert order.batches_per_epoch == pytest.approx(100 / 30)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_together_are_the_one_rank_batch(world_size: int) -> None:
    order = Order(1003, seed=5, global_batch=48)
    for k in (0, 20, 21, 99):
        whole = order.batch(k)
        parts = [whole.rank(r, world_size) for r in range(world_size)]
        assert (np.concatenate([p.positions_B for p in parts]) == whole.positions_B).all()
        assert (np.concatenate([p.epochs_B for p in parts]) == whole.epochs_B).all()
        assert {len(p) for p in parts} == {48 // world_size}


def test_ranks_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(InputError, match="10 over 4 ranks"):
        Order(100, seed=0, global_batch=10).batch(0).rank(1, 4)


def test_batch_k_needs_no_history() -> None:
    """A fresh order asked for batch 77 alone gives what a run from the start gave."""
    ran = Order(5000, seed=9, global_batch=128, settings=SMALL)
    for k in range(78):
        last = ran.batch(k)
    alone = Order(5000, seed=9, global_batch=128, settings=SMALL).batch(77)
    assert (alone.positions_B == last.positions_B).all()
    other_seed = Order(5000, seed=10, global_batch=128, settings=SMALL).batch(77)
    assert (other_seed.positions_B != last.positions_B).mean() > 0.9


def test_epochs_differ_and_are_well_shuffled() -> None:
    order = Order(4096, seed=1, global_batch=4096)
    items = [order.items(epoch * 4096, 4096)[1] for epoch in range(2)]
    assert (items[0] == items[1]).mean() < 0.01
    for served in items:
        assert abs(np.corrcoef(served, np.arange(4096))[0, 1]) < 0.08
    plain = Order(4096, seed=1, global_batch=4096, settings=OrderSettings(shuffle=False))
    assert (plain.batch(0).positions_B == np.arange(4096)).all()


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_batch_spreads_over_every_draw(purpose: Purpose) -> None:
    """Rows must not come sorted by a number drawn for them: a batch would have one timestep."""
    count, batch = 3200, 32

    def spread(order: Order) -> float:
        batches = [order.batch(k) for k in range(count // batch)]
        drawn = [uniform(3, b.epochs_B, b.positions_B, purpose).std() for b in batches]
        return float(np.min(drawn))

    assert spread(Order(count, seed=3, global_batch=batch)) > 0.15
    by_draw = np.argsort(uniform(3, np.zeros(count, np.int64), np.arange(count), purpose))
    assert uniform(3, np.zeros(batch, np.int64), by_draw[:batch], purpose).std() < 0.01  # what it would be


def test_windows_keep_reads_together() -> None:
    """A window of 4 blocks of 8 rows: 32 items in a row of the stream touch 4 or 5 blocks, not 32."""
    order = Order(8 * 1000, seed=2, global_batch=32, settings=SMALL)
    touched = [len(np.unique(order.block_of(order.batch(k).indices_B))) for k in range(200)]
    assert max(touched) <= 5
    far = Order(8 * 1000, seed=2, global_batch=32, settings=OrderSettings(block_rows=8, window_blocks=1000))
    assert len(np.unique(far.block_of(far.batch(0).indices_B))) > 25


def test_a_ranks_slice_touches_its_share_of_the_window() -> None:
    order = Order(200_000, seed=2, global_batch=512)
    blocks = [
        np.unique(order.block_of(order.batch(k).rank(3, 8).indices_B)) for k in range(16)
    ]  # one window: 8192 rows, 16 batches, 128 blocks
    assert len(np.unique(np.concatenate(blocks))) < 40


def test_rows_appended_later_do_not_change_a_pinned_run() -> None:
    fragments = [SimpleNamespace(num_rows=600), SimpleNamespace(num_rows=403)]
    pinned = Order(fragments, seed=4, global_batch=64)
    assert (pinned.batch(9).positions_B == Order(1003, seed=4, global_batch=64).batch(9).positions_B).all()
    grown = Order([*fragments, SimpleNamespace(num_rows=100)], seed=4, global_batch=64)
    assert (grown.batch(9).positions_B != pinned.batch(9).positions_B).any()


def test_two_billion_rows_start_at_once() -> None:
    tracemalloc.start()
    began = time.perf_counter()
    fragments = [SimpleNamespace(num_rows=1_000_000)] * 2000
    train, held = Rows.of(fragments).split(0.001)
    order = Order(train, seed=1, global_batch=2048)
    early, late = order.batch(0), order.batch(2_500_000)
    wall_s, peak_bytes = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert wall_s < 2
    assert peak_bytes < 16 << 20
    assert set(early.epochs_B.tolist()) == {0}
    assert set(late.epochs_B.tolist()) == {2}
    assert len(held) == 2_000_000
    assert late.positions_B.max() < 2_000_000_000
    assert np.unique(late.positions_B // 64).size < 300  # still read in runs of neighbours


@pytest.mark.parametrize("holdout", [0.1, 0.03, 7, 1, 50, 0.5])
@pytest.mark.parametrize("total", [100, 101, 149, 197, 1999])
def test_holdout_is_disjoint_and_complete(holdout: float, total: int) -> None:
    train, held = Rows.of(total).split(holdout)
    train_positions, held_positions = (r.positions(np.arange(len(r))) for r in (train, held))
    assert (np.diff(train_positions) > 0).all()
    assert sorted([*train_positions, *held_positions]) == list(range(total))
    if isinstance(holdout, int):
        assert len(held) == holdout
    else:
        assert abs(len(held) - total * holdout) < 1 + total * 0.005


def test_held_out_rows_never_come_up_in_training() -> None:
    train, held = Rows.of(1000).split(0.05)
    _, positions = stream(Order(train, seed=0, global_batch=100), 30)
    assert not set(positions.tolist()) & set(held.positions(np.arange(len(held))).tolist())
    assert len(set(positions.tolist())) == 950


def test_a_held_out_fraction_stays_held_out_when_the_store_grows() -> None:
    small, large = (Rows.of(n).split(0.01)[1] for n in (5000, 9050))
    kept = small.positions(np.arange(len(small)))
    assert (large.positions(np.arange(len(large)))[: len(kept)] == kept).all()


def test_holdout_and_filter_compose() -> None:
    selected = np.arange(3, 3000, 7)
    train, held = Rows.of(selected).split(20)
    both = np.concatenate([train.positions(np.arange(len(train))), held.positions(np.arange(len(held)))])
    assert sorted(both.tolist()) == selected.tolist()
    order = Order(train, seed=0, global_batch=len(train))
    assert order.batch(0).positions_B.tolist() == train.positions(np.arange(len(train))).tolist()


@pytest.mark.parametrize("holdout", [0.9, 80, -1, -0.1, 2.5, -5.0, math.nan, math.inf])
def test_an_impossible_holdout_is_refused(holdout: float) -> None:
    allowed = "a fraction" if holdout > 0 else "0 or more"
    with pytest.raises(InputError, match=f"holdout .*allowed: {allowed}"):
        Rows.of(100).split(holdout)


def test_empty_and_doubled_selections_are_refused() -> None:
    with pytest.raises(InputError, match="no row"):
        Order(np.array([], dtype=np.int64), seed=0, global_batch=4)
    for wrong in (np.array([1, 1, 2]), np.array([[1, 2], [3, 4]]), np.array(3)):
        with pytest.raises(InputError, match="without doubles"):
            Order(wrong, seed=0, global_batch=4)


def bucketed(**changes: int) -> BucketOrder:
    buckets = {(64, 64): np.arange(1000), (32, 64): np.arange(1000, 1100), (64, 32): np.arange(1100, 1110)}
    return BucketOrder(buckets, **{"seed": 0, "global_batch": 32, **changes}, settings=SMALL)


def test_a_bucket_batch_holds_one_bucket_in_its_share() -> None:
    order = bucketed()
    batches = [order.batch(k) for k in range(1110)]  # 32 rounds
    of_size = {(64, 64): (0, 1000), (32, 64): (1000, 1100), (64, 32): (1100, 1110)}
    for batch in batches:
        first, end = of_size[batch.size or (0, 0)]
        assert ((batch.positions_B >= first) & (batch.positions_B < end)).all()
        assert len(batch) == 32
        assert (order.positions(batch.indices_B) == batch.positions_B).all()
    counts = Counter(batch.size for batch in batches)
    assert counts[(64, 64)] == pytest.approx(1000, abs=4)
    assert counts[(32, 64)] == pytest.approx(100, abs=4)
    assert counts[(64, 32)] == pytest.approx(10, abs=2)


def test_bucket_streams_serve_every_row_and_need_no_history() -> None:
    order = bucketed()
    square = [b for b in (order.batch(k) for k in range(80)) if b.size == (64, 64)]
    epochs = np.concatenate([b.epochs_B for b in square])
    positions = np.concatenate([b.positions_B for b in square])
    assert sorted(positions[epochs == 0].tolist()) == list(range(1000))
    again: BatchRows = bucketed().batch(333)
    assert (again.positions_B == order.batch(333).positions_B).all()
    assert again.size == order.batch(333).size
    assert (bucketed(seed=1).batch(333).positions_B != again.positions_B).any()


def test_blocks_of_buckets_are_whole() -> None:
    order = bucketed()
    for number in range(140):
        first, count = order.block(number)
        assert 1 <= count <= 8
        assert (order.block_of(np.arange(first, first + count)) == number).all()
    assert order.block(12) == (96, 4)  # the last of (32, 64)
    assert order.block(13) == (100, 8)  # the first of (64, 32)
    assert order.block(14) == (108, 2)


def digest(batches: list[BatchRows]) -> str:
    """Of epochs and positions of batches."""
    content = hashlib.sha256()
    for batch in batches:
        content.update(np.stack([batch.epochs_B, batch.positions_B]).astype("<i8").tobytes())
    return content.hexdigest()[:16]


def test_the_order_is_the_same_in_every_version() -> None:
    """A run that began years ago goes on with the same batches. These digests never change."""
    usual = Order(20_000, seed=5, global_batch=48)
    small = Order(Rows.of(1003).split(0.05)[0], seed=5, global_batch=48, settings=SMALL)
    large = Order(3_000_000_000, seed=5, global_batch=48)
    assert [digest([order.batch(k) for k in range(0, 900, 9)]) for order in (usual, small, large)] == ORDERS
    assert digest([bucketed().batch(k) for k in range(200)]) == BUCKETS
    assert [permute(np.arange(size), size, 7).tolist() for size in range(1, 6)] == PERMUTED
    plain = OrderSettings(shuffle=False, block_rows=8)
    in_turn = BucketOrder(
        {(8, 8): np.arange(90), (8, 16): np.arange(90, 200)}, seed=5, global_batch=9, settings=plain
    )
    assert digest([in_turn.batch(k) for k in range(200)]) == IN_TURN


def test_what_a_rows_side_holds_is_what_it_gives() -> None:
    everywhere = np.arange(1100)
    for total, holdout in [
        (1000, 0.05),
        (1003, 0.05),
        (1003, 7),
        (149, 50),
        (1000, 0.5),
        (1001, 0),
        (5, 0.001),
    ]:
        train, held = Rows.of(total).split(holdout)
        for rows in (train, held):
            given = set(rows.positions(np.arange(len(rows))).tolist())
            assert set(everywhere[:total][rows.holds(everywhere[:total])].tolist()) == given
        assert (train.others(), held.others()) == (held, train)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train.holds(everywhere)
    assert Rows.of(1000).holds(everywhere).all()
    assert not Rows.of(1000).others().holds(everywhere).any()
    assert len(Rows.of(1000).others()) == 0


def test_the_least_that_there_can_be() -> None:
    """One row, one a batch, one a block, one block a window; half of the rows held out; none of less."""
    one = OrderSettings(block_rows=1, window_blocks=1)
    order = Order(1, seed=0, global_batch=1, settings=one)
    assert [(int(b.epochs_B[0]), int(b.positions_B[0])) for b in map(order.batch, range(3))] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    assert [len(side) for side in Rows.of(2).split(0.5)] == [1, 1]
    assert [len(side) for side in Rows.of(2).split(1)] == [1, 1]
    assert [len(side) for side in Rows.of(100).split(50)] == [50, 50]
    assert Rows.of(7).split(0)[0] == Rows.of(7)
    for given in (1.5, 3.0001, -1.0):
        with pytest.raises(InputError, match="allowed"):
            Rows.of(100).split(given)
    assert [len(side) for side in Rows.of(100).split(2.0)] == [98, 2]
    assert [len(side) for side in Rows.of(100).split(1.0)] == [99, 1]
    assert Rows.of([SimpleNamespace(num_rows=7)]) == Rows.of(7)
    for given in ({"block_rows": 0}, {"window_blocks": 0}):
        with pytest.raises(ValueError, match="greater than 0"):
            OrderSettings(**given)
    with pytest.raises(InputError, match="1 or more"):
        Order(5, seed=0, global_batch=0)
    assert OrderSettings() == OrderSettings(shuffle=True, block_rows=64, window_blocks=128)


def test_blocks_and_counts_of_one_order() -> None:
    order = Order(100, seed=0, global_batch=30, settings=SMALL)
    assert [order.block(n) for n in (0, 1, 12)] == [(0, 8), (8, 8), (96, 4)]
    assert order.block_of(np.array([0, 7, 8, 99])).tolist() == [0, 0, 1, 12]
    assert (order.num_rows, order.block_rows, order.window_rows) == (100, 8, 32)
    buckets = bucketed()
    assert (buckets.num_rows, buckets.batches_per_round, buckets.window_rows) == (1110, 35, 32 + 32 + 10)
    assert buckets.batches_per_epoch == pytest.approx(1110 / 32)
    assert buckets.batch(3).k == 3
