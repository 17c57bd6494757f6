"""Small real pictures, a tiny model, and a prepare on a cluster in a process of its own."""

from __future__ import annotations

import io
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from darkroom import models
from darkroom.cluster import prepare as cluster_prepare
from darkroom.cluster.encoders import Bounds
from darkroom.data.store import SCHEMA, Store

RESOLUTION, BATCH, BLOCK = 32, 4, 8
SMALL = "SMALL"


def tiny(seed: int = 0) -> models.Model:
    return models.create("tiny", seed=seed, parts=("vae", "text_encoder", "tokenizer"))


@cache
def picture(i: int, scale: int = 1) -> bytes:
    patches = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    width, height = (48, 40) if i % 3 else (40, 80)
    Image.fromarray(patches).resize((width * scale, height * scale)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def fill(store: Store, start: int, num: int, broken: tuple[int, ...] = (), scale: int = 1) -> None:
    numbers = range(start, start + num)
    kinds = 6 if scale > 1 else sys.maxsize  # large ones take long to draw
    content = {
        "id": [f"{i:032x}" for i in numbers],
        "picture": [b"no picture" if i in broken else picture(i % kinds, scale) for i in numbers],
        "caption": [f"a red circle, number {i}" for i in numbers],
        "width": [scale * (48 if i % 3 else 40) for i in numbers],
        "height": [scale * (40 if i % 3 else 80) for i in numbers],
        "format": ["PNG"] * num,
        "phash": list(numbers),
        "source": ["made"] * num,
        "key": [f"{i}.png" for i in numbers],
    }
    store.append(pa.table(content, schema=SCHEMA))


def made_store(path: Path, fragments: int, rows: int, scale: int = 1) -> Store:
    store = Store.create(path)
    for i in range(fragments):
        fill(store, i * rows, rows, scale=scale)
    return store


def prepared_columns(store: Store | str | Path) -> dict[str, dict[str, object]]:
    """Every prepared column's values by row id."""
    dataset = Store.open(store.path if isinstance(store, Store) else store).dataset
    names = [name for name in dataset.schema.names if name.startswith(("latents_", "text_"))]
    table = dataset.to_table(columns=["id", *names])
    return {name: dict(zip(table["id"].to_pylist(), table[name].to_pylist(), strict=True)) for name in names}


def on_ray(
    path: str | Path, address: str, bounds: Bounds, model: models.Model | None = None, **options: object
) -> cluster_prepare.ClusterReport:
    """Prepare in many small blocks, so that there are moments in between."""
    cluster_prepare.BLOCK_ROWS = BLOCK
    settings = {"resolution": RESOLUTION, "batch_rows": BATCH, "cpu_workers": 2, **options}
    return cluster_prepare.prepare_on_ray(path, model or tiny(), address=address, bounds=bounds, **settings)


if __name__ == "__main__":
    on_ray(sys.argv[1], sys.argv[2], Bounds(2, 2, SMALL))
