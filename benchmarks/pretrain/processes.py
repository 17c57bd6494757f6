"""Two processes of one thread against one process of two threads: images/s of the same training.

    python benchmarks/pretrain/processes.py --out results.csv

Jobs run one after the other in turns, each as `darkroom train` starts it; the rate is that of the run's own
metrics, the first window left out. Same global batch, same order, float32 gradients summed over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported
from darkroom.measure.timing import Measurement, Timing, append_csv, measurement

sys.path.insert(0, str(Path(__file__).parent))
from material import content, make_base, make_store, write_recipe


def seconds_of_a_step(recipe: Path, out: Path, threads: int, batch: int) -> float:
    command = [sys.executable, "-m", "darkroom", "train", str(recipe), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    windows = [row for row in rows if "usd" in row or "memory_bytes" in row][1:]  # the last row of each
    return statistics.median(batch / row["images_per_s"] for row in windows)


def compare(folder: Path, given: Any) -> list[Measurement]:
    """A row for each number of processes; each repeat of a timing is a job's median step."""
    base = make_base(folder, tuple(given.channels))
    store = make_store(folder, base, given.pictures)
    train = {
        "steps": given.steps,
        "global_batch": given.batch,
        "precision": given.precision,
        "log_every": given.window,
        "device": "cpu",
    }
    cases = {"1 process": (1, "none")} | {
        f"{given.processes} processes, {m}": (given.processes, m) for m in given.mode
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    load = os.getloadavg()[0]
    for number in range(given.rounds):
        for name, (count, mode) in cases.items():
            made = content(base, store, **train, micro_batch=given.batch // count)
            made["parallel"] = {"mode": mode, "devices": count}
            recipe = write_recipe(folder / "recipe.yaml", made)
            out = folder / f"{number} {name}"
            step_s = seconds_of_a_step(recipe, out, given.threads // count, given.batch)
            seconds[name].append(step_s)
            print(f"round {number + 1} {name}: {step_s:.4g} s a step", file=sys.stderr)
    timings = {name: Timing(name, tuple(each), 0.0, load) for name, each in seconds.items()}
    return [_row(given, timing, timings["1 process"], *cases[name]) for name, timing in timings.items()]


def _row(given: Any, timing: Timing, one: Timing, count: int, mode: str) -> Measurement:
    return measurement(
        "pretrain-processes",
        timing,
        baseline=one,
        images=given.batch,
        steps=1,
        precision=given.precision,
        settings={
            "processes": count,
            "mode": mode,
            "threads_each": given.threads // count,
            "batch": given.batch,
            "precision": given.precision,
            "throughput_ratio": round(1 / timing.ratio(one), 4),
        },
        note=f"a job a round, in turns; median step of windows of {given.window} steps",
    )


def main() -> None:
    """Read the command line, run, print, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of all processes together")
    parser.add_argument("--mode", choices=("ddp", "fsdp"), nargs="+", default=["ddp"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--window", type=int, default=4, help="steps that are timed together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--channels", type=int, nargs="+", default=[96, 192, 288], help="of the U-Net's levels"
    )
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-") as folder:
        rows = compare(Path(folder), given)
    for row in rows:
        print(
            f"{row.case}: {row.median_s:.4g} s a step, {row.settings['throughput_ratio']:.3f} of one process"
        )
    if given.out is not None:
        append_csv(given.out, rows)


if __name__ == "__main__":
    main()
