"""Shuffled batches of latents from a store against litdata's from the same rows, per second of a processor.

    pip install litdata                  # in an environment of its own, beside darkroom
    python benchmarks/against_litdata.py --out FILE.csv [--rows 60000] [--batch 256] [--repeats 4]

The rows are those of `darkroom bench loader`: float16 moments of 32 KB with a caption. litdata keeps them in
chunks of 64 MB and hands out shuffled batches in this process (`num_workers=0`: no batch is copied between
processes), darkroom on its two threads, once from the store each time and once with `data.cache`, where the
first epoch writes the rows into files that later ones map. As in a training each is opened once for several
epochs; the first, in which memory is new to the process, is the row's warm-up (`--cold`: each epoch is opened
anew, and that memory counts). 60,000 rows take 2 GB, three times what the loader keeps: of 20,000 it keeps
nearly all from one epoch to the next. The file cache is warm. In turns; the note has what each samples in a
second of all its processor time, and a baseline is litdata's seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import litdata
import numpy as np

from darkroom.data.loader import Loader, ReadSettings
from darkroom.data.order import Order
from darkroom.data.row_files import RowFiles
from darkroom.data.store import Store
from darkroom.hardware.system import load_average
from darkroom.measure.loading import COLUMN, ROW_BYTES, SHAPE, make_store
from darkroom.measure.timing import Timing, append_csv, measurement

DARKROOM, LITDATA = "darkroom, from the store", "litdata, in its process"
CACHED = "darkroom, with data.cache"


def rows_of(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a store as litdata keeps them."""
    columns = ["caption", COLUMN.name]
    for batch in Store.open(path).scan(columns, batch_rows=256):
        captions, latents = (batch.column(name).to_pylist() for name in columns)
        for caption, latent in zip(captions, latents, strict=True):
            moments = np.frombuffer(latent["moments"], dtype=np.float16).reshape(SHAPE)
            yield {"moments": moments, "caption": caption}


@dataclass(frozen=True)
class Repeat:
    """Seconds of an epoch on a clock and of all processors, and of the epoch before on a clock."""

    wall_s: float
    cpu_s: float
    first_s: float


def repeated(opened: Callable[[], Generator[int, None, None]], epochs: int, drawn: int, cold: bool) -> Repeat:
    """Draws a first epoch and then `epochs` that are timed; cold, only those, opening included."""
    began = time.perf_counter()
    counts = opened()
    counted = [] if cold else [next(counts)]
    first_s = time.perf_counter() - began
    began, began_cpu = time.perf_counter(), time.process_time()
    counted += [next(counts) for _ in range(epochs)]
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    counts.close()
    if set(counted) != {drawn}:
        raise SystemExit(f"an epoch should have {drawn} rows: {counted}")
    return Repeat(wall_s / epochs, cpu_s / epochs, first_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FILE.csv")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2, help="timed in a repeat, after one that is not")
    parser.add_argument("--cold", action="store_true", help="open both anew for every epoch")
    parser.add_argument("--folder", help="where the rows lie meanwhile; 96 KB a row")
    asked = parser.parse_args()
    batches = asked.rows // asked.batch
    drawn = batches * asked.batch
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        store = make_store(Path(place) / "pictures.lance", asked.rows)
        chunks = Path(place) / "chunks"
        litdata.optimize(
            fn=rows_of, inputs=[store.path], output_dir=str(chunks), chunk_bytes="64MB", num_workers=1
        )
        order = Order(store.fragments, seed=0, global_batch=asked.batch)
        read = ReadSettings(latents=COLUMN.name, caption=True)

        def darkroom(files: RowFiles | None = None) -> Generator[int, None, None]:
            with Loader(store, order, read=read, workers=2, files=files) as loader:
                while True:
                    yield sum(len(one) for one in islice(loader, batches))

        def peer() -> Generator[int, None, None]:
            data = litdata.StreamingDataset(str(chunks), shuffle=True, seed=0, drop_last=True)
            loader = litdata.StreamingDataLoader(data, batch_size=asked.batch, num_workers=0, drop_last=True)
            while True:
                yield sum(len(one["moments"]) for one in loader)

        def cached() -> Generator[int, None, None]:
            return darkroom(RowFiles(Path(place) / "rows"))

        epochs = {LITDATA: peer, DARKROOM: darkroom, CACHED: cached}
        found: dict[str, list[Repeat]] = {name: [] for name in epochs}
        load = load_average()
        for _ in range(asked.repeats):
            for name, opened in epochs.items():
                found[name].append(repeated(opened, 1 if asked.cold else asked.epochs, drawn, asked.cold))
    timings = {
        name: Timing(name, tuple(one.wall_s for one in runs), runs[0].first_s, load)
        for name, runs in found.items()
    }
    rates = {name: drawn / statistics.median(one.cpu_s for one in runs) for name, runs in found.items()}
    settings = {
        "rows": asked.rows,
        "batch": asked.batch,
        "row_bytes": ROW_BYTES,
        "litdata": litdata.__version__,
        "epochs": 1 if asked.cold else asked.epochs,
        "opened": "for each epoch" if asked.cold else "once",
    }
    rows = [
        measurement(
            "loader-litdata",
            timing,
            images=drawn,
            baseline=None if name == LITDATA else timings[LITDATA],
            settings=settings,
            note=f"{rates[name]:.0f} samples per CPU-second; seconds of an epoch; file cache warm",
        )
        for name, timing in timings.items()
    ]
    append_csv(asked.out, rows)
    for name, rate in rates.items():
        print(f"{name}: {rate:,.0f} samples per CPU-second")


if __name__ == "__main__":
    main()
