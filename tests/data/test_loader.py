"""The loader gives the order's batches, whoever reads and however; and says so when it cannot."""

from __future__ import annotations

import base64
import gc
import itertools
import json
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from material import encoded, noise_picture, rows

from darkroom.data import blocks
from darkroom.data.blocks import Block
from darkroom.data.draws import Purpose, noise, uniform
from darkroom.data.images import decode, resize_crop, to_tensor
from darkroom.data.loader import Batch, Loader, ReadSettings
from darkroom.data.order import BucketOrder, Order, OrderSettings, Rows
from darkroom.data.store import Store
from darkroom.errors import ColumnError, InputError, LoaderError

LATENTS, TEXT = "latents_64_0123abcd", "text_0123abcd"
LATENTS_TYPE = pa.struct([("moments", pa.large_binary()), ("height", pa.int16()), ("width", pa.int16())])
TEXT_TYPE = pa.struct(
    [
        ("states", pa.large_binary()),
        ("length", pa.int16()),
        ("width", pa.int32()),
        ("pooled", pa.large_binary()),
    ]
)
SMALL = OrderSettings(block_rows=8, window_blocks=4)
EMPTY = np.arange(6, dtype=np.float16).reshape(3, 2)


def moments_of(i: int, size: tuple[int, int] = (2, 3)) -> np.ndarray:
    return (np.arange(2 * 4 * size[0] * size[1]) % 7 + i).astype(np.float16).reshape(2, 4, *size)


def text_of(i: int) -> np.ndarray:
    return np.full((3, 2), i, dtype=np.float16)


def latents_array(sizes: dict[int, tuple[int, int]]) -> pa.Array:
    return pa.array(
        [
            {"moments": moments_of(i, size).tobytes(), "height": size[0], "width": size[1]}
            for i, size in sizes.items()
        ],
        LATENTS_TYPE,
    )


def add_rows(store: Store, start: int, num: int, sizes: dict[int, tuple[int, int]] | None = None) -> None:
    table = rows(num, start)
    sizes = sizes or dict.fromkeys(range(start, start + num), (2, 3))
    text = [
        {"states": text_of(i).tobytes(), "length": 3, "width": 2, "pooled": None}
        for i in range(start, start + num)
    ]
    store.append(
        table.append_column(store.dataset.schema.field(LATENTS), latents_array(sizes)).append_column(
            store.dataset.schema.field(TEXT), pa.array(text, TEXT_TYPE)
        )
    )


def prepared_fields() -> list[pa.Field]:
    empty = json.dumps({"text": {"data": base64.b64encode(EMPTY.tobytes()).decode(), "shape": [3, 2]}})
    return [pa.field(LATENTS, LATENTS_TYPE), pa.field(TEXT, TEXT_TYPE, metadata={"darkroom.empty": empty})]


@pytest.fixture
def prepared(tmp_path: Path) -> Store:
    """150 rows in three fragments with latents and text."""
    store = Store.create(tmp_path / "prepared.lance")
    store.add_columns(prepared_fields())
    for start in (0, 50, 100):
        add_rows(store, start, 50)
    return store


@pytest.fixture
def pictured(tmp_path: Path) -> Store:
    """20 real pictures of two shapes."""
    store = Store.create(tmp_path / "pictured.lance")
    table = rows(20)
    files = [encoded(noise_picture(i, (24, 20) if i < 12 else (20, 40))) for i in range(20)]
    store.append(table.set_column(1, table.schema.field("picture"), pa.array(files, pa.large_binary())))
    return store


def everything(**changes: object) -> ReadSettings:
    asked = {
        "latents": LATENTS,
        "text": TEXT,
        "caption": True,
        "columns": ("phash",),
        "caption_dropout": 0.3,
        "draws": ("noise", "posterior", "u", "offset"),
        "seed": 5,
    }
    return ReadSettings(**(asked | changes))


def read(
    store: Store, order: Order | BucketOrder, settings: ReadSettings, count: int, **options: object
) -> list[Batch]:
    with Loader(store, order, read=settings, **options) as loader:
        return list(itertools.islice(loader, count))


def assert_same(one: Batch, other: Batch) -> None:
    assert one.k == other.k
    assert one.columns.keys() == other.columns.keys()
    for name, value in one.columns.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def joined(parts: list[Batch]) -> Batch:
    columns = {
        name: torch.cat([p[name] for p in parts])
        if isinstance(value, torch.Tensor)
        else [item for p in parts for item in p[name]]
        for name, value in parts[0].columns.items()
    }
    return Batch(parts[0].k, parts[0].epochs_B, parts[0].positions_B, columns)


def test_a_batch_holds_its_rows_values(prepared: Store) -> None:
    order = Order(150, seed=1, global_batch=32, settings=SMALL)
    for batch in read(prepared, order, everything(), 12):
        expected = order.batch(batch.k)
        assert (batch.positions_B == expected.positions_B).all()
        assert batch["phash"].tolist() == batch.positions_B.tolist()
        moments = np.stack([moments_of(i) for i in batch.positions_B])
        assert batch["moments"].dtype == torch.float16
        assert np.array_equal(batch["moments"].numpy(), moments)
        dropped = uniform(5, batch.epochs_B, batch.positions_B, Purpose.DROPOUT) < 0.3
        assert batch["dropped"].tolist() == dropped.tolist()
        for i, (position, drop) in enumerate(zip(batch.positions_B, dropped, strict=True)):
            assert batch["caption"][i] == ("" if drop else f"caption {position}")
            assert np.array_equal(batch["text"][i].numpy(), EMPTY if drop else text_of(position))
        assert np.array_equal(batch["noise"].numpy(), noise(5, batch.epochs_B, batch.positions_B, (4, 2, 3)))
        assert batch["offset"].shape == (32, 4, 1, 1)
        assert batch["u"].min() >= 0
        assert batch["u"].max() < 1
        assert not torch.equal(batch["noise"], batch["posterior"])
    assert 0 < sum(uniform(5, expected.epochs_B, expected.positions_B, Purpose.DROPOUT) < 0.3) < 32


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_together_read_the_one_rank_batch(prepared: Store, world_size: int) -> None:
    order = Order(150, seed=1, global_batch=32, settings=SMALL)
    whole = read(prepared, order, everything(), 7)
    shares = [
        read(prepared, order, everything(), 7, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for k in range(7):
        assert_same(whole[k], joined([share[k] for share in shares]))


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 1, "ahead": 1},
        {"workers": 5, "ahead": 9},
        {"memory_bytes": 1},  # rows are read one by one
        {"memory_bytes": 20_000},  # windows of blocks, and old blocks let go
        {"memory_bytes": 20_000, "workers": 4, "ahead": 1},
    ],
)
def test_workers_and_memory_change_nothing(prepared: Store, options: dict[str, int]) -> None:
    order = Order(150, seed=1, global_batch=20, settings=SMALL)
    plain = read(prepared, order, everything(), 20)
    for one, other in zip(plain, read(prepared, order, everything(), 20, **options), strict=True):
        assert_same(one, other)


def test_restarting_at_any_batch_goes_on_alike(prepared: Store) -> None:
    order = Order(150, seed=1, global_batch=40, settings=SMALL)
    run = read(prepared, order, everything(), 9)
    for k in (1, 3, 4, 8):  # batch 3 crosses the epoch's end
        assert_same(read(prepared, order, everything(), 1, start=k)[0], run[k])
    other = read(prepared, Order(150, seed=2, global_batch=40, settings=SMALL), everything(), 1)[0]
    assert (other.positions_B != run[0].positions_B).any()


def test_rows_and_columns_that_come_later_do_not_disturb_a_pinned_run(prepared: Store) -> None:
    prepared.pin("run")
    version = prepared.version
    order = Order(prepared.fragments, seed=1, global_batch=32, settings=SMALL)
    before = read(prepared, order, everything(), 8)
    add_rows(prepared, 150, 30)
    prepared.add_columns([pa.field("later", pa.int64())])
    again = Store.open(prepared.path, version=version)
    order = Order(again.fragments, seed=1, global_batch=32, settings=SMALL)
    for one, other in zip(before, read(again, order, everything(), 8), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("open_at_once", [0, 2, 3, 128])
def test_deleted_rows_and_filters_are_read_by_position(
    prepared: Store, monkeypatch: pytest.MonkeyPatch, open_at_once: int
) -> None:
    monkeypatch.setattr(blocks, "SESSIONS", open_at_once)
    prepared.dataset.delete("phash IN (0, 7, 51, 149)")
    prepared.refresh()
    chosen = prepared.select("phash >= 40 AND phash < 120")
    order = Order(Rows.of(chosen), seed=0, global_batch=79, settings=SMALL)
    batch = read(prepared, order, everything(), 1)[0]
    assert batch["phash"].tolist() == [i for i in range(40, 120) if i != 51]
    assert np.array_equal(batch["moments"][-1].numpy(), moments_of(119))


def test_an_end_stops_the_loader(prepared: Store) -> None:
    order = Order(150, seed=0, global_batch=50)
    loader = Loader(prepared, order, read=everything(), start=2, end=5)
    assert [batch.k for batch in loader] == [2, 3, 4]
    assert loader.batches == 3
    with pytest.raises(StopIteration):
        next(loader)


def test_pictures_are_decoded_cut_and_mirrored(pictured: Store) -> None:
    order = Order(20, seed=0, global_batch=10)
    settings = ReadSettings(pixels=16, flip=True, draws=("noise", "posterior"), latent_factor=4, seed=3)
    for batch in read(pictured, order, settings, 4):
        flips = uniform(3, batch.epochs_B, batch.positions_B, Purpose.FLIP) < 0.5
        assert batch["pixels"].shape == (10, 3, 16, 16)
        assert batch["noise"].shape == (10, 4, 4, 4)
        for i, position in enumerate(batch.positions_B):
            picture = decode(pictured.take([position], ["picture"])["picture"][0].as_py())
            assert torch.equal(batch["pixels"][i], to_tensor(resize_crop(picture, 16, flip=bool(flips[i]))))


def test_decoding_once_or_each_time_is_the_same(pictured: Store) -> None:
    order = Order(20, seed=0, global_batch=10)
    settings = ReadSettings(pixels=16, flip=True)
    kept, anew = read(pictured, order, settings, 5), read(pictured, order, settings, 5, memory_bytes=60_000)
    for one, other in zip(kept, anew, strict=True):
        assert_same(one, other)


def test_random_crops_follow_the_row_and_epoch(pictured: Store) -> None:
    order = Order(20, seed=0, global_batch=20)
    settings = ReadSettings(pixels=16, crop="random")
    first, second = read(pictured, order, settings, 2)
    assert_same(first, read(pictured, order, settings, 1, workers=1)[0])
    assert (first["pixels"] != second["pixels"]).any(dim=(1, 2, 3)).sum() >= 15


def test_buckets_read_pictures_and_latents_of_one_size(pictured: Store, tmp_path: Path) -> None:
    order = BucketOrder({(24, 16): np.arange(12), (16, 32): np.arange(12, 20)}, seed=0, global_batch=4)
    sizes = {batch["pixels"].shape for batch in read(pictured, order, ReadSettings(pixels=16), 10)}
    assert sizes == {(4, 3, 16, 24), (4, 3, 32, 16)}

    store = Store.create(tmp_path / "mixed.lance")
    store.add_columns(prepared_fields())
    add_rows(store, 0, 20, {i: (2, 3) if i < 12 else (4, 2) for i in range(20)})
    shapes = {batch["moments"].shape for batch in read(store, order, everything(), 10)}
    assert shapes == {(4, 2, 4, 2, 3), (4, 2, 4, 4, 2)}
    with pytest.raises(InputError, match=r"data\.buckets=true"):
        read(store, Order(20, seed=0, global_batch=16), everything(), 3)


def test_a_missing_column_is_told_at_once(prepared: Store) -> None:
    with pytest.raises(ColumnError, match="no column latents_512_ffffffff"):
        Loader(
            prepared, Order(150, seed=0, global_batch=8), read=ReadSettings(latents="latents_512_ffffffff")
        )


def test_rows_not_yet_prepared_are_told(prepared: Store) -> None:
    prepared.append(rows(10, 150))
    order = Order(160, seed=0, global_batch=160)
    with pytest.raises(ColumnError, match=r"null in latents_64.*darkroom prepare"):
        read(prepared, order, everything(), 1)


def test_an_undecodable_picture_is_an_error_at_next(store: Store) -> None:
    with (
        Loader(store, Order(50, seed=0, global_batch=8), read=ReadSettings(pixels=16)) as loader,
        pytest.raises(LoaderError, match="cannot be decoded"),
    ):
        next(loader)
    with pytest.raises(LoaderError, match="closed"):
        next(loader)


class StuckOrder(Order):
    """Stands still at one batch, as a dead network disk does."""

    def __init__(self, stuck_at: int, release: threading.Event) -> None:
        super().__init__(150, seed=0, global_batch=10)
        self._stuck_at, self._release = stuck_at, release

    def batch(self, k: int):
        if k == self._stuck_at:
            self._release.wait(30)
        return super().batch(k)


def test_a_stall_is_an_error_and_closing_does_not_hang(prepared: Store) -> None:
    release = threading.Event()
    loader = Loader(
        prepared, StuckOrder(3, release), read=everything(), workers=1, ahead=1, timeout_s=0.3, memory_bytes=1
    )
    assert [next(loader).k for _ in range(3)] == [0, 1, 2]
    began = time.perf_counter()
    with pytest.raises(LoaderError, match=r"no batch for 0\.3 s \(batch 3\)"):
        next(loader)
    loader.close()
    assert time.perf_counter() - began < 6
    release.set()


def test_closing_releases_what_was_read_without_garbage_collection(prepared: Store) -> None:
    loader = Loader(prepared, Order(150, seed=0, global_batch=10), read=everything(), workers=1)
    next(loader)
    kept = [weakref.ref(one) for one in list(loader._cache._blocks.values()) if isinstance(one, Block)]
    gc.disable()
    try:
        assert kept
        assert all(one() is not None for one in kept)
        assert loader.memory_bytes > 0
        loader.close()
        assert loader.memory_bytes == 0
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_closing_while_another_thread_waits_wakes_it(prepared: Store) -> None:
    release = threading.Event()
    loader = Loader(prepared, StuckOrder(2, release), read=everything(), workers=1, ahead=1, memory_bytes=1)
    next(loader), next(loader)
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            next(loader)
        except BaseException as error:
            heard.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    threading.Timer(0.2, release.set).start()
    loader.close()
    waiting.join(5)
    assert not waiting.is_alive()
    assert not heard or isinstance(heard[0], LoaderError)


def test_reading_runs_ahead_and_waiting_is_counted(prepared: Store) -> None:
    order = Order(150, seed=0, global_batch=10)
    with Loader(prepared, order, read=everything(), ahead=3) as loader:
        next(loader)
        time.sleep(0.3)
        ready = [next(loader).wait_s for _ in range(3)]
        assert max(ready) < 0.05
        assert loader.wait_s >= sum(ready)
        assert loader.memory_bytes > 0


def test_memory_stays_within_its_limit(prepared: Store) -> None:
    """8-row windows of 4 blocks: the cache never holds more than it may, and serves all rows."""
    order = Order(150, seed=0, global_batch=10, settings=SMALL)
    with Loader(
        prepared, order, read=ReadSettings(latents=LATENTS), memory_bytes=12_000, workers=1
    ) as loader:
        held = []
        for _ in itertools.islice(loader, 45):
            held.append(loader.memory_bytes)
    assert max(held) <= 12_000
    assert max(held) > 2_000
