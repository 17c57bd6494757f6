"""What running on every system costs on Linux: import, loader and step of two commits, side by side.

    python benchmarks/portability.py --out benchmarks/portability.csv

The commit before what differs by system moved to `hardware/system.py`, and the one that is checked out, run
by this interpreter and its packages. Each round runs `darkroom bench import`, `loader` and `train` with
both; they take turns in beginning, so that a machine that slows down slows both. A row is a case: each
side's median over the rounds, the spread of its rounds (half the range over the median), their ratio, and
whether that is within noise: nearer to 1 than the larger spread, or than 2 %.

Each benchmark has a control: a case of the same libraries' calls in the same process, which is as slow as
the machine is then (a scan by Lance alone, decoding alone, the bare step). `to_control` is the ratio of a
case's time over its control's, the median of the rounds. `cpu_ratio` is of the processor seconds of the whole
command: it counts what was computed, and not what the machine let wait. A case is slower where its ratio is
beyond noise and so is that to its control; a control, where the processor seconds grew too.

The step is that of the quickstart's model: `--run` names a quickstart's folder, without it one is made.
`--only loader` measures one of the three. About 6 minutes a round on two cores.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "03d3ad9"  # its child 78b757b brings hardware/system.py
LEAST = 0.02
CONTROLS = {"import": "read and decode only", "loader": "plain scan", "train": "bare step"}
CPU = "processor seconds"
Times = dict[tuple[str, str], dict[str, list[float]]]  # of a benchmark's case: seconds by side


def darkroom(source: Path, *words: object) -> float:
    """Run a commit's command; the processor seconds that it took, with those of its processes."""
    environ = {"GOMP_SPINCOUNT": "10000", **os.environ, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "darkroom", *map(str, words)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(
    sides: dict[str, Path], run: Path | None, rounds: int, work: Path, only: list[str] | None = None
) -> Times:
    """Both sides of every round, each benchmark in turn."""
    commands: dict[str, tuple[object, ...]] = {
        "import": ("bench", "import"),
        "loader": ("bench", "loader"),
    }
    if run is not None:
        recipe = run / "runs" / "pretrain" / "recipe.yaml"
        commands["train"] = ("bench", "train", recipe, "train.log_every=20")
    times: Times = {}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name, words in commands.items():
            if only and name not in only:
                continue
            for side in order:
                out = work / f"{name}-{side}-{number}.csv"
                cpu = times.setdefault((name, CPU), {one: [] for one in sides})
                cpu[side].append(darkroom(sides[side], *words, "--out", out))
                with out.open(encoding="utf-8", newline="") as file:
                    for row in csv.DictReader(file):
                        case = times.setdefault((name, row["case"]), {one: [] for one in sides})
                        case[side].append(float(row["median_s"]))
            print(f"round {number + 1} of {rounds}: {name}", flush=True)
    return times


def spread(seconds: list[float]) -> float:
    return (max(seconds) - min(seconds)) / 2 / statistics.median(seconds)


def ratio_of(sides: dict[str, list[float]]) -> float:
    return statistics.median(sides["after"]) / statistics.median(sides["before"])


def ratio_to(control: dict[str, list[float]], sides: dict[str, list[float]]) -> float:
    """How much slower a case became than its control did, which ran in the same processes."""
    rounds = zip(sides["before"], control["before"], sides["after"], control["after"], strict=True)
    return statistics.median((after / its) / (before / old) for before, old, after, its in rounds)


def rows(times: Times) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for (benchmark, case), sides in times.items():
        before, after = sides["before"], sides["after"]
        if case == CPU or not before or not after:  # a case that only one of them has
            continue
        ratio, cpu_ratio = ratio_of(sides), ratio_of(times[benchmark, CPU])
        is_control = case == CONTROLS[benchmark]
        to_control = 1.0 if is_control else ratio_to(times[benchmark, CONTROLS[benchmark]], sides)
        noise = max(spread(before), spread(after), LEAST)
        second = cpu_ratio - 1 > LEAST if is_control else to_control - 1 > noise
        found.append(
            {
                "benchmark": benchmark,
                "case": case,
                "before_s": f"{statistics.median(before):.6g}",
                "after_s": f"{statistics.median(after):.6g}",
                "ratio": f"{ratio:.4f}",
                "spread_before": f"{spread(before):.4f}",
                "spread_after": f"{spread(after):.4f}",
                "to_control": "" if is_control else f"{to_control:.4f}",
                "cpu_ratio": f"{cpu_ratio:.4f}",
                "rounds": len(before),
                "within_noise": abs(ratio - 1) <= noise,
                "slower": ratio - 1 > noise and second,
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=sorted(CONTROLS), help="again for more")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "portability.csv")
    told = parser.parse_args()
    git = ("git", "-C", str(ROOT), "worktree")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        before = work / "before"
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), told.before], check=True)
        try:
            run = told.run
            if run is None and "train" in (told.only or CONTROLS):
                # By the older code: the newer reads its recipe, not always the other way round.
                run = work / "quickstart"
                darkroom(before, "quickstart", "--out", run)
            sides = {"before": before, "after": ROOT}
            times = measure(sides, run and run.resolve(), told.rounds, work, told.only)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    found = rows(times)
    told.out.parent.mkdir(parents=True, exist_ok=True)
    with told.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    for row in found:
        print("  ".join(str(value) for value in row.values()))
    return int(any(row["slower"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
