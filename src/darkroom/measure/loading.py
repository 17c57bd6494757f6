"""How quickly batches of prepared latents are read, shuffled, against a plain scan of the same store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from darkroom.data.loader import Loader, ReadSettings
from darkroom.data.order import Order
from darkroom.data.store import SCHEMA, Store
from darkroom.errors import InputError
from darkroom.measure.timing import Measurement, interleave, measurement
from darkroom.models.latents import LatentScaling
from darkroom.prepare.columns import latents_field

IDENTITY = "0" * 64
COLUMN = latents_field(512, IDENTITY, scaling=LatentScaling(), crop="centre", precision="float32")
SHAPE = (2, 2, 64, 64)  # moments of 32 KB: as many bytes as one latent of 4x64x64 in float16
ROW_BYTES = 2 * int(np.prod(SHAPE))
CHUNK_ROWS = 4096
SCAN, WINDOWS, RESIDENT = "plain scan", "loader, from the store", "loader, all in memory"


def bench_loader(
    *,
    rows: int = 20_000,
    batch: int = 256,
    repeats: int = 7,
    workers: int = 2,
    memory_bytes: int = 1 << 30,
    folder: str | Path | None = None,
) -> list[Measurement]:
    """Rows for one shuffled epoch of float16 moments of 32 KB with captions, in turns with a sequential scan.

    The scan hands out Arrow batches of the same columns and makes no tensors of them. One loader starts anew
    at every repeat and reads windows of the store; its start-up counts. Another keeps the store in memory and
    was warmed by a whole epoch; it may begin a repeat with `ahead` batches ready. The file cache of the
    operating system is warm throughout: this times the software, not the disk. The store (32 KB a row) lies
    in `folder` meanwhile, or in the system's temporary folder.
    """
    if batch < 1 or rows < batch or repeats < 1:
        raise InputError(f"rows={rows}, batch={batch}, repeats={repeats}", allowed="rows >= batch >= 1")
    batches = rows // batch
    settings = {"rows": rows, "batch": batch, "row_bytes": ROW_BYTES, "workers": workers}
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        store = make_store(Path(place) / "pictures.lance", rows)
        order = Order(store.fragments, seed=0, global_batch=batch)
        read = ReadSettings(latents=COLUMN.name, caption=True)

        def from_the_store() -> int:
            with Loader(
                store, order, read=read, end=batches, workers=workers, memory_bytes=memory_bytes
            ) as fresh:
                return sum(len(one) for one in fresh)

        enough = max(memory_bytes, 3 * rows * ROW_BYTES)
        with Loader(store, order, read=read, workers=workers, memory_bytes=enough) as kept:
            cases: dict[str, Callable[[], object]] = {
                SCAN: lambda: sum(len(one) for one in store.scan(["caption", COLUMN.name], batch_rows=batch)),
                WINDOWS: from_the_store,
                RESIDENT: lambda: sum(len(one) for one in islice(kept, batches)),
            }
            timings = interleave(cases, repeats=repeats)
    note = "file cache warm; the scan makes no tensors"
    return [
        measurement(
            "loader",
            timing,
            images=rows if name == SCAN else batches * batch,
            baseline=None if name == SCAN else timings[SCAN],
            settings=settings,
            note=note,
        )
        for name, timing in timings.items()
    ]


def make_store(path: Path, rows: int) -> Store:
    """A store of random moments; the pictures are one byte each and are not read."""
    store = Store.create(path)
    store.add_columns([COLUMN])
    rng = np.random.default_rng(0)
    for chunk in _chunks(rng, rows):
        store.append(chunk)
    return store


def _chunks(rng: np.random.Generator, rows: int) -> Iterator[pa.Table]:
    for start in range(0, rows, CHUNK_ROWS):
        numbers = range(start, min(start + CHUNK_ROWS, rows))
        count = len(numbers)
        values = rng.integers(0, 256, count * ROW_BYTES, dtype=np.uint8)
        offsets = np.arange(count + 1, dtype=np.int64) * ROW_BYTES
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        moments = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers)
        side = pa.array(np.full(count, SHAPE[2], dtype=np.int16))
        content = {
            "id": [f"{i:032x}" for i in numbers],
            "picture": [b"-"] * count,
            "caption": [f"a red circle on a blue background, number {i}" for i in numbers],
            "width": [512] * count,
            "height": [512] * count,
            "format": ["PNG"] * count,
            "phash": list(numbers),
            "source": ["made"] * count,
            "key": [str(i) for i in numbers],
        }
        latents = pa.StructArray.from_arrays([moments, side, side], fields=list(COLUMN.type))
        yield pa.table(content, schema=SCHEMA).append_column(COLUMN, latents)
