"""How much quicker the loader is than what it feeds, for each recipe of pre-training.

    python benchmarks/pretrain/loader_rate.py --gpu H200 --out results.csv

For each recipe a store of random moments and text states of the recipe's own shapes is read as `darkroom
train` reads it, shuffled, from the file cache, by one process of this machine. Beside it stands the planned
rate of one card, so the ratio says how many cards one such process could keep busy. Text states are most of a
row's bytes; the second row of each recipe reads captions instead, for a text encoder beside the U-Net.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from darkroom import models
from darkroom.data.loader import Loader, ReadSettings
from darkroom.data.order import Order
from darkroom.data.store import SCHEMA, Store
from darkroom.measure.timing import Timing, append_csv, measurement
from darkroom.prepare.columns import latents_field, text_field
from darkroom.recipe import read_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
FAMILY = {
    "sd15-256": "sd15",
    "sd2-base-256": "sd2",
    "sd2-base-512": "sd2",
    "sd2-v-768": "sd2-v",
    "sdxl-256": "sdxl",
}
TOKENS, BATCH, BYTES, CHUNK = 77, 64, 1 << 30, 256
IDENTITY = "0" * 64


def shapes(family: str, resolution: int) -> tuple[int, int, int]:
    """Side of the latents, width of the text states, and of the pooled ones (0 where there are none)."""
    spec = models.FAMILIES[family]
    side = resolution // 2 ** (len(spec.vae["block_out_channels"]) - 1)
    widths = [one["hidden_size"] for one in spec.text_encoders]
    return side, sum(widths), widths[-1] if len(widths) > 1 else 0


def fill(path: Path, rows: int, shape: tuple[int, int, int], resolution: int) -> tuple[Store, list[str]]:
    """A store of random numbers in the columns that preparing makes."""
    fields = [
        latents_field(
            resolution, IDENTITY, scaling=models.LatentScaling(), crop="centre", precision="float32"
        ),
        text_field(IDENTITY, empty="", precision="float32"),
    ]
    store = Store.create(path)
    store.add_columns(fields)
    for table in _chunks(rows, shape, fields):
        store.append(table)
    return store, [field.name for field in fields]


def _chunks(rows: int, shape: tuple[int, int, int], fields: list[pa.Field]) -> Iterator[pa.Table]:
    side, width, pooled = shape
    draws = np.random.default_rng(0)

    def noise(*size: int) -> list[bytes]:
        values = draws.integers(0, 2**14, (CHUNK, *size), dtype=np.uint16)  # small, finite float16
        return [row.tobytes() for row in values]

    for start in range(0, rows, CHUNK):
        numbers = range(start, start + CHUNK)
        made = {
            fields[0].name: {
                "moments": noise(2, 4, side, side),
                "height": [side] * CHUNK,
                "width": [side] * CHUNK,
            },
            fields[1].name: {
                "states": noise(TOKENS, width),
                "length": [TOKENS] * CHUNK,
                "width": [width] * CHUNK,
                "pooled": noise(pooled) if pooled else [None] * CHUNK,
            },
        }
        content: dict[str, Any] = {
            "id": [f"{i:032x}" for i in numbers],
            "picture": [b"-"] * CHUNK,
            "caption": [f"picture {i}" for i in numbers],
            "width": [8 * side] * CHUNK,
            "height": [8 * side] * CHUNK,
            "format": ["PNG"] * CHUNK,
            "phash": list(numbers),
            "source": ["made"] * CHUNK,
            "key": [str(i) for i in numbers],
        }
        table = pa.table(content, schema=SCHEMA)
        for field in fields:
            parts = [pa.array(made[field.name][one.name], one.type) for one in field.type]
            table = table.append_column(field, pa.StructArray.from_arrays(parts, fields=list(field.type)))
        yield table


def planned(recipe: Path, family: str, text: str, gpu: str) -> float:
    """Images/s of one card."""
    alone = [f"model.base={family}", f"data.text={text}", "parallel.devices=1", "parallel.mode=none"]
    command = [sys.executable, "-m", "darkroom", "plan", str(recipe), *alone, "--gpu", gpu, "--json"]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(told.stdout)["plans"][0]["images_per_s"])


def main() -> None:
    """Read the command line, run, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--recipes", nargs="+", default=list(FAMILY), choices=FAMILY)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=BYTES, help="of a store")
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    given = parser.parse_args()
    rows = []
    for name in given.recipes:
        for row in both_rows(name, given):
            rows.append(row)
            print(f"{row.case}: {row.images_per_s:,.0f} images/s read, {row.ratio:.0f} of one {given.gpu}'s")
    if given.out is not None:
        append_csv(given.out, rows)


def both_rows(name: str, given: Any) -> Iterator[Any]:
    """The rows of one recipe: with stored text states, and with captions."""
    resolution = int(read_recipe(RECIPES / f"{name}.yaml").data.resolution)
    shape = shapes(FAMILY[name], resolution)
    text_bytes = 2 * (TOKENS * shape[1] + shape[2])
    row_bytes = 2 * 8 * shape[0] ** 2 + text_bytes
    number = max(2, given.bytes // row_bytes // CHUNK) * CHUNK
    with tempfile.TemporaryDirectory(prefix="darkroom-rate-") as folder:
        store, (latents, states) = fill(Path(folder) / "pictures.lance", number, shape, resolution)
        for text, read in (
            ("stored", ReadSettings(latents=latents, text=states)),
            ("inline", ReadSettings(latents=latents, caption=True)),
        ):
            rate = planned(RECIPES / f"{name}.yaml", FAMILY[name], text, given.gpu)
            seconds = [_read(store, read, number, given.workers) for _ in range(given.repeats + 1)]
            told = {
                "row_bytes": row_bytes - (text_bytes if text == "inline" else 0),
                "rows": number,
                "batch": BATCH,
                "workers": given.workers,
                "planned_images_per_s": round(rate, 1),
                "planned_on": given.gpu,
            }
            row = measurement(
                "pretrain-loader-rate",
                Timing(f"{name}, text {text}", tuple(seconds[1:]), seconds[0] * number, os.getloadavg()[0]),
                images=1,
                settings=told,
                note="seconds a row, with the loader's start; file cache warm; the card's rate is planned",
            )
            times = (row.images_per_s or 0.0) / rate
            yield row.model_copy(update={"ratio": times, "ratio_to": f"one {given.gpu}, planned"})


def _read(store: Store, read: ReadSettings, number: int, workers: int) -> float:
    """Seconds a row of one shuffled epoch."""
    order = Order(store.fragments, seed=0, global_batch=BATCH)
    start = time.perf_counter()
    with Loader(store, order, read=read, end=number // BATCH, workers=workers) as batches:
        rows = sum(len(batch) for batch in batches)
    return (time.perf_counter() - start) / rows


if __name__ == "__main__":
    main()
