"""Shuffled batches of latents from a store against litdata's from the same rows, per second of a processor.

    pip install litdata                  # in an environment of its own, beside darkroom
    python benchmarks/against_litdata.py --out FILE.csv [--rows 20000] [--batch 256] [--repeats 7]

The rows are those of `darkroom bench loader`: float16 moments of 32 KB with a caption. litdata keeps them in
chunks of 64 MB and hands out shuffled batches in this process (`num_workers=0`: no
batch is copied between processes), darkroom on its two threads; each is opened anew for every epoch,
and the file cache is warm. In turns; the note has what each samples in a second of all its processor time,
and a baseline is litdata's seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import litdata
import numpy as np

from darkroom.data.loader import Loader, ReadSettings
from darkroom.data.order import Order
from darkroom.data.store import Store
from darkroom.measure.loading import COLUMN, ROW_BYTES, SHAPE, CpuTime, make_store
from darkroom.measure.timing import append_csv, interleave, measurement

DARKROOM, LITDATA = "darkroom, from the store", "litdata, in its process"


def rows_of(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a store as litdata keeps them."""
    columns = ["caption", COLUMN.name]
    for batch in Store.open(path).scan(columns, batch_rows=256):
        captions, latents = (batch.column(name).to_pylist() for name in columns)
        for caption, latent in zip(captions, latents, strict=True):
            moments = np.frombuffer(latent["moments"], dtype=np.float16).reshape(SHAPE)
            yield {"moments": moments, "caption": caption}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FILE.csv")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="where the rows lie meanwhile; 64 KB a row")
    asked = parser.parse_args()
    batches = asked.rows // asked.batch
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        store = make_store(Path(place) / "pictures.lance", asked.rows)
        chunks = Path(place) / "chunks"
        litdata.optimize(
            fn=rows_of, inputs=[store.path], output_dir=str(chunks), chunk_bytes="64MB", num_workers=1
        )
        order = Order(store.fragments, seed=0, global_batch=asked.batch)
        read = ReadSettings(latents=COLUMN.name, caption=True)

        def darkroom() -> int:
            with Loader(store, order, read=read, end=batches, workers=2) as loader:
                return sum(len(one) for one in loader)

        def peer() -> int:
            data = litdata.StreamingDataset(str(chunks), shuffle=True, seed=0, drop_last=True)
            loader = litdata.StreamingDataLoader(data, batch_size=asked.batch, num_workers=0, drop_last=True)
            return sum(len(one["moments"]) for one in loader)

        calls: dict[str, Callable[[], int]] = {LITDATA: peer, DARKROOM: darkroom}
        found = {name: call() for name, call in calls.items()}
        if set(found.values()) != {batches * asked.batch}:
            raise SystemExit(f"an epoch should have {batches * asked.batch} rows: {found}")
        cpu = {name: CpuTime(call) for name, call in calls.items()}
        timings = interleave(cpu, repeats=asked.repeats)
    settings = {"rows": asked.rows, "batch": asked.batch, "row_bytes": ROW_BYTES}
    append_csv(
        asked.out,
        [
            measurement(
                "loader-litdata",
                timing,
                images=batches * asked.batch,
                baseline=None if name == LITDATA else timings[LITDATA],
                settings=settings | {"litdata": litdata.__version__},
                note=f"{cpu[name].rate(asked.repeats):.0f} samples per CPU-second; file cache warm",
            )
            for name, timing in timings.items()
        ],
    )
    for name in calls:
        print(f"{name}: {cpu[name].rate(asked.repeats):,.0f} samples per CPU-second")


if __name__ == "__main__":
    main()
