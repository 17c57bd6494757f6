"""Start a job on a store of two billion rows: seconds and memory until the first batch is known.

    python benchmarks/cluster/two_billion.py --out benchmarks/cluster/two-billion.csv

The store is a real one in all that starting touches: a manifest of as many fragments as two billion rows
have, each with a data file and a note of its pictures' sizes of its own. The files are hard links to 64 that
differ (ids, captions and pictures are one byte), so the disk holds one gigabyte and not two hundred
thousand. Every case is timed in fresh processes, from opening the store to the rows of a batch; importing
Python packages is not in the seconds but is in the memory, the highest resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from darkroom.data import mixing as bucket_rows
from darkroom.data.images import buckets
from darkroom.data.order import BucketOrder, Order, Rows
from darkroom.data.store import ROWS_PER_FRAGMENT, SCHEMA, Store
from darkroom.measure.timing import Timing, append_csv, measurement

TWO_BILLION = 2_000_000_000
ORIGINALS = 64
BATCH, RESOLUTION, STEP = 2048, 512, 64
HELD = 5_000
SHORT_SIDE = 512


def synthetic(path: Path, fragments: int) -> Store:
    """A store of so many whole fragments."""
    store = Store.create(path)
    for i in range(min(ORIGINALS, fragments)):
        store.append(_rows(i))
    originals = [fragment.metadata.files[0] for fragment in store.dataset.get_fragments()]
    more = []
    for i in range(len(originals), fragments):
        file = originals[i % len(originals)]
        name = f"{i:08d}{file.path}"
        os.link(path / "data" / file.path, path / "data" / name)
        note = Path(file.path).stem
        os.link(path / "_shapes" / f"{note}.json", path / "_shapes" / f"{Path(name).stem}.json")
        same = {key: value for key, value in vars(file).items() if key != "_path"}
        file = lance.fragment.DataFile(name, **same)
        more.append(lance.FragmentMetadata(id=i, files=[file], physical_rows=ROWS_PER_FRAGMENT))
    if more:
        append = lance.LanceOperation.Append(more)
        lance.LanceDataset.commit(str(path), append, read_version=store.version)
    return Store.open(path)


def _rows(number: int) -> pa.Table:
    """A fragment's rows: the short side is 512, ratios spread as on the web, most between 2:3 and 3:2."""
    draws = np.random.default_rng(number)
    ratio = np.exp(np.clip(draws.normal(0, 0.35, ROWS_PER_FRAGMENT), -1, 1))
    width = np.where(ratio > 1, SHORT_SIDE * ratio, SHORT_SIDE).astype(int)
    height = np.where(ratio > 1, SHORT_SIDE, SHORT_SIDE / ratio).astype(int)
    same = {name: ["x"] * ROWS_PER_FRAGMENT for name in ("id", "caption", "format", "source", "key")}
    content = {**same, "picture": [b"x"] * ROWS_PER_FRAGMENT, "width": width, "height": height}
    return pa.table({**content, "phash": np.arange(ROWS_PER_FRAGMENT)}, schema=SCHEMA)


# ---- what is timed, each in a process of its own


def opened(store: Store) -> None:
    assert store.num_rows == len(store.fragments) * ROWS_PER_FRAGMENT


def ordered(store: Store) -> None:
    order = Order(Rows.of(store.num_rows), seed=0, global_batch=BATCH)
    for k in (0, int(2.5 * order.batches_per_epoch)):
        assert len(order.batch(k)) == BATCH


def bucketed(store: Store, held: int = 0) -> None:
    rows = Rows.of(store.num_rows).split(held)[0]
    found = bucket_rows.BucketIndex(store, buckets(RESOLUTION, step=STEP), rows).buckets()
    order = BucketOrder(found, seed=0, global_batch=BATCH)
    assert order.num_rows == store.num_rows - held
    for k in (0, int(2.5 * order.batches_per_epoch)):
        assert len(order.batch(k)) == BATCH


def counted(store: Store) -> None:
    """The first job with these buckets: the notes of all fragments are joined."""
    for joined in (Path(store.path) / "_shapes").glob("buckets-*"):
        joined.unlink()
    bucket_rows.BucketIndex(store, buckets(RESOLUTION, step=STEP), Rows.of(store.num_rows))


def read(store: Store) -> None:
    """64 neighbouring rows' captions, where the reading of rows has not been opened before."""
    middle = store.num_rows // 2
    assert store.take(np.arange(middle, middle + 64), ["caption"]).num_rows == 64


CASES: dict[str, Callable[[Store], None]] = {
    "open the store": opened,
    "open, order": ordered,
    "join the counts of buckets, once": counted,
    "open, order in buckets": bucketed,
    "open, order in buckets, rows held out": lambda store: bucketed(store, HELD),
    "open, read a block": read,
}


def inside(path: str, case: str) -> dict[str, float]:
    """One case in this process."""
    began = time.perf_counter()
    CASES[case](Store.open(path))
    wall_s = time.perf_counter() - began
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return {"wall_s": wall_s, "peak_bytes": int(peak.split()[1]) * 1024}


def fresh(path: Path, case: str) -> dict[str, float]:
    made = subprocess.run(
        [sys.executable, __file__, "--inside", str(path), "--case", case], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    found: dict[str, float] = json.loads(made.stdout)
    return found


def rows_of(path: Path, fragments: int, repeats: int) -> list[Any]:
    """One measurement a case."""
    made = synthetic(path, fragments)
    manifest = max(file.stat().st_size for file in (path / "_versions").glob("*.manifest"))
    settings = {
        "fragments": fragments,
        "rows": made.num_rows,
        "manifest_bytes": manifest,
        "global_batch": BATCH,
    }
    rows = []
    for case in CASES:
        runs = [fresh(path, case) for _ in range(1 if "once" in case else repeats)]
        timing = Timing(case, tuple(run["wall_s"] for run in runs), 0.0, os.getloadavg()[0])
        peak = int(max(run["peak_bytes"] for run in runs))
        more = {"held": HELD} if "held" in case else {}
        rows.append(
            measurement("two-billion", timing, settings=settings | more, peak_memory_bytes=peak, note=NOTE)
        )
        print(f"{fragments} fragments, {case}: {timing.median_s:.2f} s, {peak / 2**20:.0f} MiB", flush=True)
    return rows


NOTE = "fresh processes, pages of the files in memory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    full = -(-TWO_BILLION // ROWS_PER_FRAGMENT)
    parser.add_argument("--fragments", type=int, nargs="+", default=[1000, 10_000, full])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the stores are put meanwhile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(inside(given.inside, given.case)))
        return
    for fragments in given.fragments:
        with tempfile.TemporaryDirectory(dir=given.folder) as place:
            rows = rows_of(Path(place) / "pictures.lance", fragments, given.repeats)
        if given.out:
            append_csv(given.out, rows)


if __name__ == "__main__":
    main()
