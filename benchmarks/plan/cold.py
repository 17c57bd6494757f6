"""Processor seconds of a first plan, with nothing kept from before: cold.csv beside this file.

    python benchmarks/plan/cold.py            all cases, three times each: about ten minutes of one core
    python benchmarks/plan/cold.py NAME       those whose name holds NAME; other rows stay

Each case is a `darkroom plan` in a process of its own with an empty cache. Counted are the processor seconds
of that process (wait4, user and system): they hardly depend on what else the machine does. `warm` is the same
command once more, with what the first one kept. The goal is 20 s; exits with 1 where one takes more.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILE = HERE / "cold.csv"
COLUMNS = ("case", "cpu_s", "most_s", "warm_s", "wall_s", "repeats", "command", "date")
REPEATS, GOAL_S = 3, 20.0
CASES = {
    "SD 1.5 LoRA": ("recipes/sd15-lora.yaml", "--gpu", "A100-80"),
    "SDXL LoRA": ("recipes/sdxl-dreambooth-lora.yaml", "--gpu", "L40S"),
    "SD 1.5 LoRA, on a CPU": ("recipes/sd15-lora.yaml", "--gpu", "CPU AVX2"),
    "SD 1.5 pictures": ("generate", "--model", "sd15", "--size", "512x512", "--gpu", "A10G"),
    "SDXL pictures": ("generate", "--model", "sdxl", "--size", "1024x1024", "--gpu", "L40S"),
    "SD 1.5 LoRA, advised": ("recipes/sd15-lora.yaml", "--gpu", "all", "--advise"),
    "pretraining, advised": ("recipes/sd15-256.yaml", "--gpu", "all", "--advise"),
    "a missing file": ("nowhere.yaml", "--gpu", "T4"),
    "a card that is not known": ("generate", "--model", "sd15", "--gpu", "RTX 9999"),
    "a model that is not known": ("generate", "--model", "nowhere", "--gpu", "T4"),
}


def main(asked: list[str]) -> int:
    """Measure the cases asked for; 1 where one takes more than the goal."""
    over = False
    for case, command in CASES.items():
        if asked and asked[0] not in case:
            continue
        row = measured(case, command)
        over |= float(row["most_s"]) > GOAL_S
        print(
            f"{case:<28} {row['cpu_s']:>6} CPU-s, at most {row['most_s']}; warm {row['warm_s']}", flush=True
        )
        write(row)
    return int(over)


def measured(case: str, command: tuple[str, ...]) -> dict[str, Any]:
    """A case's row."""
    cold, warm, walls = [], [], []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory(prefix="darkroom-cold-") as cache:
            began = time.monotonic()
            cold.append(used_s(command, cache))
            walls.append(time.monotonic() - began)
            warm.append(used_s(command, cache))
    return {
        "case": case,
        "cpu_s": f"{median(cold):.1f}",
        "most_s": f"{max(cold):.1f}",
        "warm_s": f"{median(warm):.1f}",
        "wall_s": f"{median(walls):.1f}",
        "repeats": REPEATS,
        "command": f"darkroom plan {' '.join(command)}",
        "date": date.today().isoformat(),
    }


def used_s(command: tuple[str, ...], cache: str) -> float:
    """Processor seconds of one command."""
    process = subprocess.Popen(
        [sys.executable, "-m", "darkroom", "plan", *command],
        cwd=ROOT,
        env={**os.environ, "DARKROOM_CACHE": cache},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):
        raise SystemExit(f"darkroom plan {' '.join(command)}: exit code {process.returncode}")
    return used.ru_utime + used.ru_stime


def write(row: dict[str, Any]) -> None:
    """Put a row into the file, in the place of an older one of the same case."""
    rows = list(csv.DictReader(FILE.open(newline=""))) if FILE.is_file() else []
    kept = [one for one in rows if one["case"] != row["case"]]
    with FILE.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, row])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
