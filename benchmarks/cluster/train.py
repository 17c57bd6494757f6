"""What Ray costs a training job: the same two workers started by torchrun and by Ray, by turns.

    python benchmarks/cluster/train.py --rounds 5 --out benchmarks/cluster/train.csv

A step's seconds are the median of a run's steps after the first quarter; a row's repeats are the runs. The
seconds that starting takes (until the first step's line) are rows of their own. Ray is one of this machine
alone, started by the command, as `--ray-address local` does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from kills import SIDE, TEXT, VAE, fill

from darkroom.measure.timing import Timing, append_csv, measurement

BATCH = 8
UNET = {
    "block_out_channels": [32, 64],
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "layers_per_block": 2,
}


def recipe(place: Path, steps: int) -> Path:
    """A small job whose steps take tens of milliseconds on a core."""
    content = {
        "task": "pretrain",
        "model": {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT},
        "data": {"store": fill(place / "pictures.lance", 1, 64, 2 * SIDE), "resolution": 2 * SIDE},
        "optim": {"lr": 1e-4},
        "parallel": {"mode": "ddp", "devices": 2},
        "train": {
            "steps": steps,
            "global_batch": BATCH,
            "micro_batch": BATCH // 2,
            "precision": "float32",
            "log_every": 1,
        },
        "checkpoint": {"every": steps},
    }
    content["data"]["encode"] = "inline"
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def timed(path: Path, out: Path, *engine: str) -> tuple[float, float]:
    """Seconds of a step, and of starting, of one run."""
    command = [sys.executable, "-u", "-m", "darkroom", "train", str(path), "--out", str(out), *engine]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began, first = time.monotonic(), None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as run:
        said = []
        for line in run.stdout or ():
            said.append(line)
            if first is None and re.search(r"step +\d+/", line):
                first = time.monotonic() - began
    if run.returncode or first is None:
        raise RuntimeError("".join(said)[-2000:])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [row["images_per_s"] for row in rows if "images_per_s" in row]
    return BATCH / statistics.median(rates[len(rates) // 4 :]), first


ENGINES = {"torchrun": ("--engine", "torchrun"), "ray": ("--engine", "ray", "--ray-address", "local")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    steps: dict[str, list[float]] = {name: [] for name in ENGINES}
    starts: dict[str, list[float]] = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory(prefix="darkroom-train-") as folder:
        path = recipe(Path(folder), given.steps)
        for number in range(given.rounds):
            for name, engine in list(ENGINES.items())[:: 1 if number % 2 else -1]:
                step_s, start_s = timed(path, Path(folder) / f"{name}-{number}", *engine)
                steps[name].append(step_s)
                starts[name].append(start_s)
                print(
                    f"round {number}, {name}: {1000 * step_s:.1f} ms a step, {start_s:.1f} s to start",
                    flush=True,
                )
    load = os.getloadavg()[0]
    settings = {"workers": 2, "steps": given.steps, "global_batch": BATCH, "threads": 1}
    rows = []
    for what, found, count in (("step", steps, BATCH), ("start", starts, None)):
        timings = {
            name: Timing(f"{what}, {name}", tuple(values), 0.0, load) for name, values in found.items()
        }
        for name, timing in timings.items():
            base = timings["torchrun"] if name == "ray" else None
            told = {**settings, "runs_s": [round(value, 4) for value in found[name]]}
            rows.append(measurement("ray-train", timing, baseline=base, images=count, settings=told))
    for row in rows:
        print(f"{row.case}: {row.median_s:.4f} s" + (f", {row.ratio:.3f} of torchrun's" if row.ratio else ""))
    if given.out:
        append_csv(given.out, rows)


if __name__ == "__main__":
    main()
