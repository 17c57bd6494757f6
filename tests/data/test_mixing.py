"""Several stores mixed by weight: exact shares in any window, whole epochs of each, the same for every k."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from darkroom.data.importers import import_pictures
from darkroom.data.mixing import Dealer, MixedBucketOrder, MixedOrder, MixedRows, MixedStore, shares_of
from darkroom.data.order import OrderSettings, Rows
from darkroom.data.store import Store
from darkroom.errors import InputError

SMALL = OrderSettings(block_rows=4, window_blocks=2)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.7, 0.2, 0.1), (1000, 1, 2.5)])
@pytest.mark.parametrize("each", [1, 8, 100])
def test_dealing_keeps_shares_in_any_window(weights, each):
    shares = shares_of(weights)
    dealer = Dealer(shares, each, seed=5)
    quotas = np.array([dealer.quota(k) for k in range(3000)])
    assert (quotas.sum(axis=1) == each).all()
    assert (quotas >= 0).all()
    exact = np.array([float(share) for share in shares]) * each
    assert (np.abs(quotas - exact) < 1 + 1e-9).all()  # each deal: rounded up or down
    sums = np.concatenate([np.zeros((1, len(shares))), np.cumsum(quotas, axis=0)])
    for length in (10, 100, 1000):
        windows = sums[length:] - sums[:-length]
        assert np.abs(windows - exact * length).max() < 4
    for k in (0, 1, 17, 2999):
        assert (dealer.before(k) == sums[k]).all()


def test_far_on_the_counts_are_those_of_all_deals_before():
    dealer = Dealer(shares_of([3, 2, 1]), 7, seed=1)
    far = 200_000  # beyond three chunks
    assert (dealer.before(far + 1) - dealer.before(far) == dealer.quota(far)).all()
    assert dealer.before(far).sum() == 7 * far
    assert (Dealer(shares_of([3, 2, 1]), 7, seed=1).before(far) == dealer.before(far)).all()
    assert (Dealer(shares_of([3, 2, 1]), 7, seed=2).quota(far) >= 0).all()


def test_weights_must_be_above_zero():
    assert shares_of([0.1, 0.2]) == [Fraction(1, 3), Fraction(2, 3)]
    for wrong in ([1, 0], [-1, 2], []):
        with pytest.raises(InputError, match="above 0"):
            shares_of(wrong)


def order(weights=(3, 1), **more) -> MixedOrder:
    given = {"offsets": [0, 50], "seed": 3, "global_batch": 8, "settings": SMALL}
    return MixedOrder([Rows.of(50), Rows.of(21)], weights, **(given | more))


def test_each_store_comes_round_whole_in_its_own_epochs():
    mixed = order()
    seen: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for k in range(100):
        batch = mixed.batch(k)
        assert len(batch) == 8
        assert (np.diff(batch.positions_B) >= 0).all()
        for epoch, position in zip(batch.epochs_B.tolist(), batch.positions_B.tolist(), strict=True):
            seen[int(position >= 50)].append((epoch, position))
    assert [len(seen[s]) for s in (0, 1)] == pytest.approx([600, 200], abs=3)
    for s, (first, rows) in enumerate([(0, 50), (50, 21)]):
        whole = [sorted(p for e, p in seen[s] if e == epoch) for epoch in range(len(seen[s]) // rows)]
        assert all(epoch == list(range(first, first + rows)) for epoch in whole)
        assert len(whole) > 8
    other = [order(seed=4).batch(k).positions_B.tolist() for k in range(5)]
    assert other != [mixed.batch(k).positions_B.tolist() for k in range(5)]


def test_batches_do_not_depend_on_who_asks_and_ranks_share_them():
    mixed, anew = order(), order()
    for k in (40, 3, 99, 0):
        batch, again = mixed.batch(k), anew.batch(k)
        assert (batch.positions_B == again.positions_B).all()
        assert (batch.epochs_B == again.epochs_B).all()
        shares = [batch.rank(rank, 4).positions_B for rank in range(4)]
        assert (np.concatenate(shares) == batch.positions_B).all()
        assert (mixed.positions(batch.indices_B) == batch.positions_B).all()
        for index in batch.indices_B.tolist():
            first, count = mixed.block(int(mixed.block_of(np.array([index]))[0]))
            assert first <= index < first + count


def test_buckets_hold_one_size_and_the_weights():
    square, wide, high = (64, 64), (96, 48), (48, 96)
    first = {square: np.arange(0, 30), wide: np.arange(30, 40)}
    second = {square: np.arange(0, 5), high: np.arange(5, 20)}
    sizes = {**dict.fromkeys(range(30), square), **dict.fromkeys(range(30, 40), wide)}
    sizes |= {**{40 + p: square for p in range(5)}, **{40 + p: high for p in range(5, 20)}}

    def counted(weights):
        mixed = MixedBucketOrder(
            [first, second], weights, offsets=[0, 40], seed=2, global_batch=4, settings=SMALL
        )
        stores = np.zeros(2)
        batches: dict[tuple[int, int], int] = {}
        for k in range(2000):
            batch = mixed.batch(k)
            assert {sizes[p] for p in batch.positions_B.tolist()} == {batch.size}
            assert (mixed.positions(batch.indices_B) == batch.positions_B).all()
            stores += np.bincount(batch.positions_B >= 40, minlength=2)
            batches[batch.size] = batches.get(batch.size, 0) + 1
        return stores / stores.sum(), batches

    stores, batches = counted([1, 3])
    assert stores == pytest.approx([0.25, 0.75], abs=0.005)
    assert batches[wide] == pytest.approx(2000 * 0.25 * 10 / 40, abs=5)
    assert batches[high] == pytest.approx(2000 * 0.75 * 15 / 20, abs=5)
    assert counted([1, 1])[0] == pytest.approx([0.5, 0.5], abs=0.005)


@pytest.fixture
def stores(tmp_path) -> list[Store]:
    made = []
    for name, count in (("a", 7), ("b", 4)):
        (tmp_path / name).mkdir()
        for i in range(count):
            Image.new("RGB", (16, 16), (i, i, i)).save(tmp_path / name / f"{i}.png")
            (tmp_path / name / f"{i}.txt").write_text(f"{name}{i}")
        store = Store.create(tmp_path / f"{name}.lance")
        import_pictures(tmp_path / name, store)
        made.append(store)
    return made


def test_stores_read_as_one(stores):
    mixed = MixedStore(stores)
    assert mixed.num_rows == 11
    wanted = [10, 0, 7, 6, 0, 9]
    captions = [
        one
        for store in stores
        for one in store.take(range(store.num_rows), ["caption"])["caption"].to_pylist()
    ]
    assert mixed.take(wanted, ["caption"])["caption"].to_pylist() == [captions[i] for i in wanted]
    assert mixed.take([], ["caption"]).num_rows == 0
    found = mixed.take(mixed.select("caption LIKE 'b%'"), ["caption"])["caption"].to_pylist()
    assert sorted(found) == ["b0", "b1", "b2", "b3"]
    assert [fragment.offset for fragment in mixed.fragments] == [0, 7]


def test_held_out_rows_are_of_each_store():
    rows = MixedRows.over([Rows.of(100), Rows.of(40)], [0, 100])
    train, held = rows.split(0.1)
    assert (len(train), len(held)) == (126, 14)
    kept, out = (set(part.positions(np.arange(len(part))).tolist()) for part in (train, held))
    assert kept | out == set(range(140))
    assert not kept & out
    assert sum(p >= 100 for p in out) == 4
    assert len(rows.split(14)[1]) == 14
