"""Small real pictures, a tiny model, and a prepare to run in a process of its own."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from darkroom import models
from darkroom.data.store import SCHEMA, Store

RESOLUTION = 16


def tiny(seed: int = 0, overrides: Mapping[str, Any] | None = None) -> models.Model:
    parts = ("vae", "text_encoder", "tokenizer")
    return models.create("tiny", seed=seed, parts=parts, overrides=overrides or {})


def picture(i: int) -> bytes:
    patches = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(patches).resize((24, 20) if i % 3 else (20, 40)).save(file, "PNG")
    return file.getvalue()


def table(start: int, num: int, broken: Sequence[int] = ()) -> pa.Table:
    numbers = range(start, start + num)
    content = {
        "id": [f"{i:032x}" for i in numbers],
        "picture": [b"no picture" if i in broken else picture(i) for i in numbers],
        "caption": [f"a red circle, number {i}" for i in numbers],
        "width": [24 if i % 3 else 20 for i in numbers],
        "height": [20 if i % 3 else 40 for i in numbers],
        "format": ["PNG"] * num,
        "phash": list(numbers),
        "source": ["made"] * num,
        "key": [f"{i}.png" for i in numbers],
    }
    return pa.table(content, schema=SCHEMA)


def fill(store: Store, start: int, num: int, broken: Sequence[int] = ()) -> None:
    store.append(table(start, num, broken))


def prepare_until_killed(path: str, seed: int, most_s: float) -> None:
    """Prepare in forked processes, each killed after a random time, until one is left to finish.

    Forked from one process that has only imported what they need, so that the kills fall into the work.
    """
    import lance  # noqa: F401 - imported before the fork, never used there
    import transformers.models.clip.modeling_clip  # noqa: F401

    from darkroom.prepare import job

    job.COMMIT_EVERY_S = 0.1
    rng, kills, model = random.Random(seed), 0, tiny()
    while True:
        child = os.fork()
        if child == 0:
            job.prepare(path, model, resolution=RESOLUTION, text=True, batch_rows=4, device="cpu")
            os._exit(0)
        time.sleep(rng.uniform(0, most_s))
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        most_s *= 1.1  # on however busy a machine, one of them gets done
    print(kills)


def disturb(path: str, seed: int) -> None:
    """Import, delete and join fragments in another process while a prepare is at work."""
    rng, next_row = random.Random(seed), 1000
    print("ready", flush=True)
    for _ in range(12):
        fill(Store.open(path), next_row, 5)
        next_row += 5
        if rng.random() < 0.4:
            Store.open(path).delete(ids=[f"{rng.randrange(1000, next_row):032x}"])
        if rng.random() < 0.2:
            Store.open(path).compact(rows_per_fragment=20)
        time.sleep(rng.uniform(0, 0.1))


if __name__ == "__main__":
    {"kills": prepare_until_killed, "disturb": disturb}[sys.argv[1]](
        sys.argv[2], int(sys.argv[3]), *map(float, sys.argv[4:])
    )
