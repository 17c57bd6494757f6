"""What a save costs the step that makes it, and how long a job takes from its start to its first new step.

    python benchmarks/pretrain/saving.py --out results.csv

A state of about 100 MB (6.3 M weights in float32 with AdamW's moments and the average). Steps are timed from
one request for a batch to the next: those that save, those right after, and the others of the same rounds.
Then the job is started again and again as a user starts it, and goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported
from darkroom.hardware.machine import environment
from darkroom.measure.timing import Measurement, Timing, append_csv, measurement
from darkroom.recipe import make_recipe
from darkroom.run import Run
from darkroom.train.checkpoint import checkpoints
from darkroom.train.jobs import Pinned
from darkroom.train.setup import make_job
from darkroom.train.tracking import NoTracker
from darkroom.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from material import content, make_base, make_store, write_recipe

CHANNELS = (48, 96, 128)
NORMAL, SAVES, AFTER = "normal step", "step that saves", "step after it"


def recipe_of(base: Path, store: Path, given: Any) -> dict[str, Any]:
    """A job that saves every so many steps and writes its metrics every one."""
    settings = {"global_batch": given.batch, "micro_batch": given.batch, "precision": given.precision}
    made = content(base, store, steps=10**6, log_every=1, device="cpu", **settings)
    made["train"]["ema"] = {"decay": 0.999}
    made["checkpoint"] = {"every": given.every, "background": not given.foreground}
    return made


def steps_of(made: dict[str, Any], folder: Path, given: Any) -> dict[str, list[float]]:
    """Seconds of steps by kind, one of each for every save: the median of those that are neither."""
    steps = given.every * (given.rounds + 1) + 2  # the first save is not counted
    job = make_job(make_recipe(made), Pinned(folder / "run"))
    marks: list[float] = []

    @contextmanager
    def feed(k: int) -> Iterator[Iterator[Any]]:
        with job.feed(k) as batches:
            yield marked(batches)

    def marked(batches: Iterator[Any]) -> Iterator[Any]:
        while len(marks) <= steps:
            marks.append(time.perf_counter())
            yield next(batches)
        raise _Over

    run = Run.create(folder / "run", job.recipe.dump(), environment())
    with suppress(_Over):
        Trainer(replace(job, feed=feed), run, tracker=NoTracker(), say=lambda _: None).train()
    taken = [after - before for before, after in pairwise(marks)]
    found: dict[str, list[float]] = {NORMAL: [], SAVES: [], AFTER: []}
    for save in range(2 * given.every - 1, steps - 1, given.every):  # step k saves at its end: index k - 1
        found[SAVES].append(taken[save])
        found[AFTER].append(taken[save + 1])
        found[NORMAL].append(statistics.median(taken[save - given.every + 3 : save]))
    return found


class _Over(Exception):
    """All steps were timed."""


def restart_s(recipe: Path, run: Path) -> float:
    """Seconds from starting the command to the line of its first step."""
    command = [sys.executable, "-m", "darkroom", "train", str(recipe), "--out", str(run)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        try:
            if not any(line.startswith("step ") for line in job.stdout):
                raise SystemExit("the job ended before its first step")
            return time.perf_counter() - began
        finally:
            job.kill()


def state_bytes(run: Path) -> int:
    """What the newest checkpoint takes on the disk."""
    return sum(file.stat().st_size for file in checkpoints(run / "checkpoints")[-1].iterdir())


def main() -> None:
    """Read the command line, run, print, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=8, help="steps between saves")
    parser.add_argument("--rounds", type=int, default=7, help="saves and restarts that are timed")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--foreground", action="store_true", help="write within the step, for comparison")
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS, help="of the U-Net's levels")
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-") as temporary:
        folder = Path(temporary)
        base = make_base(folder, tuple(given.channels))
        store = make_store(folder, base, given.pictures)
        made = recipe_of(base, store, given)
        found = steps_of(made, folder, given)
        size = state_bytes(folder / "run")
        recipe = write_recipe(folder / "recipe.yaml", made)
        starts = [restart_s(recipe, folder / "run") for _ in range(given.rounds)]
    timings = {name: Timing(name, tuple(seconds), 0.0, load) for name, seconds in found.items()}
    settings = {
        "state_bytes": size,
        "batch": given.batch,
        "precision": given.precision,
        "every": given.every,
        "background": not given.foreground,
    }
    rows = [
        measurement("pretrain-saving", timing, baseline=timings[NORMAL], settings=settings, steps=1)
        for timing in timings.values()
    ]
    rows.append(_restarts(starts, settings, load))
    for row in rows:
        ratio = "" if row.ratio is None else f" ({row.ratio:.3f})"
        print(f"{row.case}: {row.median_s:.4g} s{ratio}, a state of {size / 1e6:.0f} MB")
    if given.out is not None:
        append_csv(given.out, rows)


def _restarts(seconds: list[float], settings: dict[str, Any], load: float) -> Measurement:
    timing = Timing("restart to the first step", tuple(seconds), 0.0, load)
    return measurement(
        "pretrain-saving", timing, settings=settings, note="python's start and imports included"
    )


if __name__ == "__main__":
    main()
