"""Rows kept in files are the store's own, whatever happens to the files; and what they save is saved."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from material import rows
from test_loader import (  # the rows that the loader is tested with
    LATENTS,
    SMALL,
    add_rows,
    assert_same,
    everything,
    latents_array,
    moments_of,
    pictured,
    prepared,
    prepared_fields,
)

from darkroom.data import row_files
from darkroom.data.loader import Batch, Loader, ReadSettings
from darkroom.data.order import Order, OrderSettings
from darkroom.data.row_files import FOLDER, UNREAD_DAYS, RowFiles
from darkroom.data.store import Store

__all__ = ["pictured", "prepared"]  # fixtures

BATCHES = 15  # an epoch of 150 rows


def batches(store: Store, files: RowFiles | None, **options: object) -> list[Batch]:
    order = Order(store.fragments, seed=3, global_batch=10, settings=SMALL)
    read = options.pop("read", everything())
    with Loader(store, order, read=read, files=files, **options) as loader:
        return list(itertools.islice(loader, BATCHES))


def kept(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*/*.rows"))


def assert_all_same(ones: list[Batch], others: list[Batch]) -> None:
    assert len(ones) == len(others) == BATCHES
    for one, other in zip(ones, others, strict=True):
        assert_same(one, other)


def without_rows(store: Store) -> Store:
    """The same store, opened, whose data files are gone."""
    opened = Store.open(store.path, version=store.version)
    shutil.rmtree(Path(store.path) / "data")
    return opened


ONE_BY_ONE = {"memory_bytes": 1}


@pytest.mark.parametrize("options", [{}, ONE_BY_ONE], ids=["in blocks", "row by row"])
def test_rows_are_the_same_and_come_from_files_the_next_time(
    prepared: Store, tmp_path: Path, options: dict[str, int]
) -> None:
    plain = batches(prepared, None)
    assert_all_same(batches(prepared, RowFiles(tmp_path / "rows"), **options), plain)
    assert len(kept(tmp_path / "rows")) == (151 if options else 19)  # rows and a block, or blocks of 8
    bare = without_rows(prepared)
    assert_all_same(batches(bare, RowFiles(tmp_path / "rows"), **options), plain)
    with pytest.raises(Exception, match=r"[Nn]ot found|No such file"):
        batches(bare, RowFiles(tmp_path / "others"), **options)


def test_pictures_are_kept_too(pictured: Store, tmp_path: Path) -> None:
    order = Order(20, seed=0, global_batch=20, settings=SMALL)
    read = ReadSettings(pixels=16, crop="random", flip=True, caption=True)

    def first(store: Store) -> Batch:
        with Loader(store, order, read=read, files=RowFiles(tmp_path / "rows")) as loader:
            return next(loader)

    before = first(pictured)
    assert_same(first(without_rows(pictured)), before)


def test_rows_that_changed_are_read_anew(prepared: Store, tmp_path: Path) -> None:
    """Deleted rows, and other rows in a store of the same name and version."""
    batches(prepared, RowFiles(tmp_path / "rows"))
    prepared.dataset.delete("phash = 60")
    prepared.refresh()
    found = batches(prepared, RowFiles(tmp_path / "rows"))
    assert_all_same(found, batches(prepared, None))
    assert 60 not in np.concatenate([batch["phash"].numpy() for batch in found[:14]])
    number = prepared.version

    shutil.rmtree(prepared.path)
    other = Store.create(prepared.path)
    other.add_columns(prepared_fields())
    for start in (500, 550, 600):
        add_rows(other, start, 50)
    other.dataset.delete("phash = 560")
    other.refresh()
    assert other.version == number
    found = batches(other, RowFiles(tmp_path / "rows"))
    assert_all_same(found, batches(other, None))
    assert min(batch["phash"].min() for batch in found) >= 500


def test_latents_made_anew_are_read_anew(prepared: Store, tmp_path: Path) -> None:
    read = everything(text=None, caption_dropout=0.0)
    before = batches(prepared, RowFiles(tmp_path / "rows"), read=read)
    prepared.dataset.drop_columns([LATENTS])
    prepared.refresh()
    values = latents_array({i + 1000: (2, 3) for i in range(150)})
    with_ids = pa.table({"phash": pa.array(range(150), pa.int64()), LATENTS: values})
    prepared.dataset.merge(with_ids, "phash")
    prepared.refresh()
    found = batches(prepared, RowFiles(tmp_path / "rows"), read=read)
    assert_all_same(found, batches(prepared, None, read=read))
    assert found[0]["moments"].float().mean() > before[0]["moments"].float().mean() + 900


def test_a_column_that_takes_anothers_name_is_read_anew(tmp_path: Path) -> None:
    """Its files are the same; both kinds of renaming, with the rows that were kept under the name before."""
    store = Store.create(tmp_path / "scanned.lance")
    store.add_columns(
        [pa.field("one", pa.int64()), pa.field("two", pa.int64()), pa.field("three", pa.int64())]
    )
    numbers = [pa.array(range(start, start + 20), pa.int64()) for start in (0, 100, 200)]
    table = rows(20)
    for name, values in zip(("one", "two", "three"), numbers, strict=True):
        table = table.append_column(name, values)
    store.append(table)

    def first() -> int:
        order = Order(store.fragments, seed=0, global_batch=20, settings=OrderSettings(shuffle=False))
        with Loader(store, order, read=ReadSettings(columns=("one",)), files=RowFiles(tmp_path)) as loader:
            return int(next(loader)["one"][0])

    assert first() == 0
    store.dataset.alter_columns({"path": "one", "name": "zero"})
    store.refresh()
    store.dataset.alter_columns({"path": "two", "name": "one"})
    store.refresh()
    assert first() == 100
    store.dataset.drop_columns(["one"])
    store.refresh()
    store.dataset.alter_columns({"path": "three", "name": "one"})
    store.refresh()
    assert first() == 200


def swapped(data: bytearray) -> bytes:
    """Two words that differ have each other's place."""
    middle = len(data) // 16 * 8
    other = next(
        at for at in range(middle + 8, len(data) - 8, 8) if data[at : at + 8] != data[middle : middle + 8]
    )
    data[middle : middle + 8], data[other : other + 8] = data[other : other + 8], data[middle : middle + 8]
    return bytes(data)


def flipped(data: bytearray) -> bytes:
    """A bit of a row's latents is another one."""
    data[next(at for i in range(150) if (at := data.find(moments_of(i).tobytes())) > 0)] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        swapped,
        lambda data: bytes(data[: len(data) // 2]),
        lambda data: bytes(data[:-8]),
        lambda data: bytes(len(data)),
        lambda data: bytes(data[:-4096]) + bytes(4096) if len(data) > 8192 else bytes(data[:-8]) + bytes(8),
        lambda _: b"",
        lambda _: b"12345678",
    ],
    ids=["bit", "swapped", "half", "no sum", "zeros", "zeros at the end", "empty", "short"],
)
def test_damaged_files_are_replaced(
    prepared: Store, tmp_path: Path, damage: Callable[[bytearray], bytes]
) -> None:
    plain = batches(prepared, RowFiles(tmp_path / "rows"))
    whole = [path.read_bytes() for path in kept(tmp_path / "rows")]
    for path in kept(tmp_path / "rows"):
        path.write_bytes(damage(bytearray(path.read_bytes())))
    assert_all_same(batches(prepared, RowFiles(tmp_path / "rows")), plain)
    assert [path.read_bytes() for path in kept(tmp_path / "rows")] == whole


def test_without_the_sum_a_flipped_bit_would_be_trained_on(
    prepared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = batches(prepared, RowFiles(tmp_path / "rows"))
    for path in kept(tmp_path / "rows"):
        path.write_bytes(flipped(bytearray(path.read_bytes())))
    monkeypatch.setattr(row_files, "_is_whole", lambda _: True)
    with pytest.raises(AssertionError):
        assert_all_same(batches(prepared, RowFiles(tmp_path / "rows")), plain)


@pytest.mark.parametrize("options", [{}, ONE_BY_ONE], ids=["in blocks", "row by row"])
def test_a_full_folder_takes_no_more_and_says_so_once(
    prepared: Store, tmp_path: Path, options: dict[str, int]
) -> None:
    batches(prepared, RowFiles(tmp_path / "all"))
    size = kept(tmp_path / "all")[0].stat().st_size
    said: list[str] = []
    files = RowFiles(tmp_path / "rows", limit_bytes=5 * size, say=said.append)
    plain = batches(prepared, None)
    assert_all_same(batches(prepared, files, **options), plain)
    assert len(said) == 1
    assert "is full" in said[0]
    held = kept(tmp_path / "rows")
    assert 3 <= len(held) < 10
    assert sum(path.stat().st_size for path in held) <= 5 * size
    again = RowFiles(tmp_path / "rows", limit_bytes=5 * size)
    assert again.used_bytes == sum(path.stat().st_size for path in held)
    assert_all_same(batches(prepared, again, **options), plain)
    assert sum(path.stat().st_size for path in kept(tmp_path / "rows")) <= 5 * size


def test_a_disk_that_runs_full_loses_nothing(
    prepared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    files = RowFiles(tmp_path / "rows", say=said.append)
    monkeypatch.setattr(row_files, "FREE_SHARE", 1.0)  # as if all but nothing were taken
    assert_all_same(batches(prepared, files), batches(prepared, None))
    assert len(said) == 1
    assert not kept(tmp_path / "rows")


@pytest.mark.parametrize("options", [{}, ONE_BY_ONE], ids=["in blocks", "row by row"])
def test_a_folder_may_be_deleted_while_it_is_used(
    prepared: Store, tmp_path: Path, options: dict[str, int]
) -> None:
    plain, over = batches(prepared, None), threading.Event()

    def deleting() -> None:
        while not over.is_set():
            shutil.rmtree(tmp_path / "rows", ignore_errors=True)

    thread = threading.Thread(target=deleting)
    files = RowFiles(tmp_path / "rows", limit_bytes=10_000_000)
    thread.start()
    try:
        for _ in range(3):
            assert_all_same(batches(prepared, files, **options), plain)
    finally:
        over.set()
        thread.join()


def test_a_file_damaged_after_it_was_read_is_not_trusted(prepared: Store, tmp_path: Path) -> None:
    files = RowFiles(tmp_path / "rows")
    plain = batches(prepared, files)
    batches(prepared, files)
    for path in kept(tmp_path / "rows"):
        path.write_bytes(b"")
    assert_all_same(batches(prepared, files), plain)


def test_a_folder_that_takes_no_files_is_said_once(prepared: Store, tmp_path: Path) -> None:
    said: list[str] = []
    files = RowFiles(tmp_path / "rows", say=said.append)
    shutil.rmtree(files.folder)
    files.folder.write_text("")
    assert_all_same(batches(prepared, files), batches(prepared, None))
    assert len(said) == 1
    assert "takes no more files" in said[0]


def test_processes_together_stay_near_the_limit(prepared: Store, tmp_path: Path) -> None:
    batches(prepared, RowFiles(tmp_path / "all"))
    names, tables = zip(
        *((path.stem, RowFiles(tmp_path / "all").get(path.stem)) for path in kept(tmp_path / "all")),
        strict=True,
    )
    size = kept(tmp_path / "all")[0].stat().st_size
    processes = [RowFiles(tmp_path / "rows", limit_bytes=1000 * size) for _ in range(8)]
    for i in range(2000):
        name = f"{i:04x}" * 16
        processes[i % 8].keep(name, tables[i % len(names)])
    held = sum(path.stat().st_size for path in kept(tmp_path / "rows"))
    assert 900 * size < held <= 1080 * size


def test_what_was_long_unread_is_removed_and_nothing_else(prepared: Store, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    batches(prepared, RowFiles(folder))
    old, *fresh = kept(folder)
    killed = old.with_name(old.name + ".0123abcd")
    others = [folder / "photo.rows", folder / FOLDER / "notes.txt", old.parent / "notes.rows"]
    for path in (killed, *others):
        path.write_bytes(b"mine")
    past = time.time() - (UNREAD_DAYS + 1) * 86400
    for path in (old, killed, *others):
        os.utime(path, (past, past))
    RowFiles(folder)
    assert kept(folder) == sorted([*fresh, old.parent / "notes.rows"])
    assert not killed.exists()
    assert all(path.exists() for path in others)


def test_what_is_read_counts_as_read(prepared: Store, tmp_path: Path) -> None:
    batches(prepared, RowFiles(tmp_path / "rows"))
    nearly = time.time() - (UNREAD_DAYS - 1) * 86400
    for path in kept(tmp_path / "rows"):
        os.utime(path, (nearly, nearly))
    batches(prepared, RowFiles(tmp_path / "rows"))
    assert all(time.time() - path.stat().st_mtime < 3600 for path in kept(tmp_path / "rows"))


def test_loaders_share_a_folder_at_the_same_time(prepared: Store, tmp_path: Path) -> None:
    plain = batches(prepared, None)
    found: list[list[Batch]] = []

    def one() -> None:
        found.append(batches(Store.open(prepared.path), RowFiles(tmp_path / "rows"), workers=3))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for some in found:
        assert_all_same(some, plain)
    assert len(kept(tmp_path / "rows")) == len(list((tmp_path / "rows").rglob("*.rows*")))


def test_where_no_folder_can_be_it_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RowFiles(tmp_path / "file" / "rows")


class Requests(logging.Handler):
    """Counts what an S3 server is asked for."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.reads = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.reads += "GET" in record.getMessage() and "/data/" in record.getMessage()


@pytest.fixture
def s3_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """An S3 server with a bucket, which Lance finds by the environment."""
    pytest.importorskip("moto", reason="moto[server] is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=True)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ENDPOINT": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bucket")
    counted, log = Requests(), logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(counted)
    yield counted
    log.removeHandler(counted)
    log.setLevel(level)
    server.stop()


def test_a_store_on_s3_is_downloaded_once(s3_reads: Requests, tmp_path: Path) -> None:
    store = Store.create("s3://bucket/pictures.lance")
    store.add_columns([pa.field("scan", pa.large_binary())])
    scans = pa.array([np.random.default_rng(i).bytes(200_000) for i in range(64)], pa.large_binary())
    store.append(rows(64).append_column("scan", scans))
    read = ReadSettings(caption=True, columns=("scan",))

    def reads(files: RowFiles | None) -> int:
        before = s3_reads.reads
        opened = Store.open(store.path)
        order = Order(opened.fragments, seed=0, global_batch=16, settings=SMALL)
        with Loader(opened, order, read=read, files=files, memory_bytes=1) as loader:
            found = [caption for batch in itertools.islice(loader, 4) for caption in batch["caption"]]
        assert len(set(found)) == 64
        return s3_reads.reads - before

    first, again, without = reads(RowFiles(tmp_path)), reads(RowFiles(tmp_path)), reads(None)
    assert first >= 4
    assert without >= 4
    assert again == 0
