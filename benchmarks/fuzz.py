"""Long fuzzing of what reads strangers' files, resumable: how many inputs each reader was given so far.

    python benchmarks/fuzz.py --minutes 60                 # goes on where the last go ended
    python benchmarks/fuzz.py --minutes 10 --only zip tar

The targets of tests/fuzz/targets.py take turns of `SLICE_S` seconds, each turn in a process of its own with
another seed, at most `MOST_BYTES` of memory and `MOST_S` seconds an input. Counts are added to the rows of
`--rows`, benchmarks/fuzz.csv. An input that crashes, hangs or takes too much is written to `--found`, and its
target rests until the file is moved to tests/fuzz/corpus/TARGET, where it stays a test once it is mended.

Exit codes: 0 nothing that is not mended, 1 something is.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "fuzz"))

from targets import MOST_S, TARGETS, check, inputs  # noqa: E402

SLICE_S, MOST_BYTES, GOAL = 20.0, 4 * 2**30, 10_000_000
FIRST_SEED = 1000  # those before are the tests'


@dataclass
class Row:
    """What one target was given so far."""

    target: str
    executions: int = 0
    seconds: float = 0.0
    seeds: int = 0
    found: int = 0


def read(rows: Path) -> dict[str, Row]:
    """Of all targets, those that are new too."""
    found = {name: Row(name) for name in TARGETS}
    if rows.exists():
        with rows.open(newline="") as file:
            for line in csv.DictReader(file):
                executions, seeds, crashes = (int(line[name]) for name in ("executions", "seeds", "found"))
                seconds = float(line["seconds"])
                found[line["target"]] = Row(line["target"], executions, seconds, seeds, crashes)
    return found


def write(rows: Path, all_rows: dict[str, Row]) -> None:
    """Beside its place, then renamed: a go that is killed loses one turn at most."""
    part = rows.with_suffix(".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, [one.name for one in fields(Row)], lineterminator="\n")
        table.writeheader()
        for name in sorted(all_rows):
            table.writerow(asdict(all_rows[name]) | {"seconds": round(all_rows[name].seconds, 1)})
    part.replace(rows)


def turn(name: str, seed: int, slice_s: float) -> tuple[int, bool]:
    """How many inputs of a seed were read in a process of its own, and whether the next one was too much."""
    with mmap.mmap(-1, 8) as count:
        child = os.fork()
        if child == 0:
            _turn(name, seed, slice_s, count)
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        return struct.unpack("<q", count[:8])[0], status != 0


def _turn(name: str, seed: int, slice_s: float, count: mmap.mmap) -> NoReturn:
    def too_long(*_: object) -> None:
        raise TimeoutError(f"{name}: over {MOST_S:g} s")

    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        signal.signal(signal.SIGALRM, too_long)
        end = time.monotonic() + slice_s
        with tempfile.TemporaryDirectory() as folder:
            for number, content in enumerate(inputs(name, seed)):
                count[:8] = struct.pack("<q", number)
                signal.setitimer(signal.ITIMER_REAL, MOST_S, MOST_S)
                check(name, content, Path(folder))
                if time.monotonic() > end:
                    break
            signal.setitimer(signal.ITIMER_REAL, 0)
            count[:8] = struct.pack("<q", number + 1)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def go(rows: Path, found: Path, minutes: float, only: list[str], slice_s: float = SLICE_S) -> int:
    """Turns until the time is over or every target rests; how many inputs wait to be mended."""
    all_rows, end = read(rows), time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        chosen = [row for row in all_rows.values() if row.target in (only or TARGETS)]
        awake = [row for row in chosen if not list(found.glob(f"{row.target}-*"))]
        if not awake:
            break
        row = min(awake, key=lambda row: row.seconds)
        begun, seed = time.monotonic(), FIRST_SEED + row.seeds
        count, too_much = turn(row.target, seed, min(slice_s, max(0.1, end - begun)))
        row.executions, row.seeds = row.executions + count, row.seeds + 1
        row.seconds += time.monotonic() - begun
        if too_much:
            row.found += 1
            found.mkdir(parents=True, exist_ok=True)
            file = found / f"{row.target}-{seed}-{count}"
            file.write_bytes(next(itertools.islice(inputs(row.target, seed), count, None)))
            print(f"{row.target}: input {count} of seed {seed}, written to {file}", flush=True)
        write(rows, all_rows)
    for row in all_rows.values():
        rate = row.executions / row.seconds if row.seconds else 0
        print(f"{row.target:12} {row.executions:11,} inputs  {row.seconds:8.0f} s  {rate:7.0f} a second")
    whole = sum(row.executions for row in all_rows.values())
    print(f"{'all':12} {whole:11,} inputs, {whole / GOAL:.1%} of {GOAL:,}")
    return len(list(found.glob("*")))


def main() -> None:
    """Go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--only", nargs="*", choices=TARGETS, default=[])
    parser.add_argument("--rows", type=Path, default=HERE / "fuzz.csv")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"))
    told = parser.parse_args()
    sys.exit(1 if go(told.rows, told.found, told.minutes, told.only) else 0)


if __name__ == "__main__":
    main()
