"""What a user meets in the first minutes: a model that cannot be fetched, and SD 1.5 in 3 GB of memory.

    python benchmarks/first_minutes.py --out benchmarks/first-minutes.csv [--only hub]

Rows, whole processes timed from start to end:
- `hub`: `darkroom generate` with a hub id and no network; it must end with exit code 2 and one line.
- `memory`: SD 1.5's full size at 512 x 512 with random weights of one folder (--dtype), computed in the
  precision that the CPU takes by itself, with all memory and with --memory 3GB in turns. The ratio is of
  seconds; the peak is the process's largest resident set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darkroom.hardware.system import load_average
from darkroom.measure.timing import Measurement, Timing, append_csv, measurement

HUB_MODEL = "stable-diffusion-v1-5/stable-diffusion-v1-5"
NO_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}  # nothing listens there
LIMIT = "3GB"
MAKE_MODEL = """
import sys, torch
from darkroom import models
model = models.create("sd15", tokenizer=models.train_tokenizer([], vocab_size=514))
models.save(model.to(dtype=getattr(torch, sys.argv[1])), sys.argv[2])
"""


@dataclass(frozen=True)
class Ended:
    """One process: seconds, exit code, largest resident set in bytes, and what it printed."""

    wall_s: float
    code: int
    peak_bytes: int
    printed: str


def darkroom(*words: str, add: dict[str, str] | None = None) -> Ended:
    """Runs the command line in a process of its own."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "darkroom", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(add or {})},
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    return Ended(time.perf_counter() - begun, child.returncode, used.ru_maxrss * 1024, printed)


def row(case: str, ended: list[Ended], warm: Ended | None, note: str, **columns: Any) -> Measurement:
    timing = Timing(case, tuple(one.wall_s for one in ended), warm.wall_s if warm else 0.0, load_average())
    peak = max(one.peak_bytes for one in ended)
    return measurement("first-minutes", timing, note=note, peak_memory_bytes=peak, **columns)


def hub(rounds: int) -> list[Measurement]:
    """A hub id without a network."""
    with tempfile.TemporaryDirectory() as home:  # no cache either
        add = {**NO_NETWORK, "HF_HOME": home}
        ended = [darkroom("generate", HUB_MODEL, "a lighthouse", add=add) for _ in range(rounds + 1)]
    lines = ended[0].printed.strip().splitlines()
    if any(one.code != 2 for one in ended) or len(lines) != 1:
        sys.exit(f"exit codes {[one.code for one in ended]}, printed: {ended[0].printed}")
    return [row("hub id, no network", ended[1:], ended[0], lines[0], settings={"model": HUB_MODEL})]


def memory(rounds: int, steps: int, dtype: str) -> list[Measurement]:
    """SD 1.5's size at 512 x 512, with and without the limit."""
    settings = {"model": "sd15", "weights": dtype, "size": 512, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "sd15"
        # In a process of its own: a child's largest resident set counts its parent's at the fork.
        subprocess.run([sys.executable, "-c", MAKE_MODEL, dtype, str(model)], check=True)
        words = ["generate", str(model), "a lighthouse", "--size", "512", "--steps", str(steps)]
        words += ["--seed", "1", "--out", str(Path(folder) / "pictures")]
        cases = {"all memory": words, f"--memory {LIMIT}": [*words, "--memory", LIMIT]}
        ended: dict[str, list[Ended]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case, line in cases.items():
                ended[case].append(darkroom(*line))
                if ended[case][-1].code:
                    sys.exit(f"{case}: exit code {ended[case][-1].code}: {ended[case][-1].printed}")
                print(f"{case}: {ended[case][-1].wall_s:.1f} s", flush=True)
                print(ended[case][-1].printed, flush=True)
    plain, limited = (row(case, runs, None, "", steps=steps) for case, runs in ended.items())
    timings = [Timing("", tuple(one.wall_s for one in runs), 0.0, None) for runs in ended.values()]
    return [
        plain.model_copy(update={"settings": settings}),
        limited.model_copy(
            update={
                "settings": {**settings, "memory": LIMIT},
                "ratio": timings[1].ratio(timings[0]),
                "ratio_to": plain.case,
            }
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="of the weights")
    parser.add_argument("--only", choices=("hub", "memory"))
    args = parser.parse_args()
    if args.only != "memory":
        append_csv(args.out, hub(max(args.rounds, 5)))
    if args.only != "hub":
        append_csv(args.out, memory(args.rounds, args.steps, args.dtype))


if __name__ == "__main__":
    main()
