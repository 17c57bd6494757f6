"""Long fuzzing of what reads strangers' files, resumable: how many inputs each reader was given so far.

    python benchmarks/fuzz.py --minutes 60                 # goes on where the last go ended
    python benchmarks/fuzz.py --minutes 10 --only zip tar

The targets of tests/fuzz/targets.py take turns of `--slice` CPU-seconds, the one that had least so far first,
each turn in a process of its own with another seed, at most `MOST_BYTES` of memory and `MOST_S` CPU-seconds
an input. Where Atheris is installed (`pip install atheris`, CPython 3.11 to 3.13) coverage guides the inputs:
those that reach new branches are kept in `--corpus` and changed further. Elsewhere they are mutations of the
seeds and of what tests/fuzz/grown has of earlier goes; `--pack` refreshes that from `--corpus`.

Counts are added to the rows of `--rows`, benchmarks/fuzz.csv: all executions, and those guided by coverage.
An input that crashes, hangs or takes too much is written to `--found`, and its target rests until the file is
moved to tests/fuzz/corpus/TARGET, where it stays a test once it is mended.

Exit codes: 0 nothing that is not mended, 1 something is.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "fuzz"))

try:
    import atheris
except ImportError:
    atheris = None
MEASURED = ("darkroom", "yaml", "tarfile", "PIL")
"""Packages whose branches guide the inputs."""
with contextlib.ExitStack() as imports:
    if atheris is not None:
        imports.enter_context(contextlib.redirect_stderr(io.StringIO()))  # a line a module
        imports.enter_context(atheris.instrument_imports(include=MEASURED))
    importlib.import_module("targets")
from targets import GROWN, MOST_S, TARGETS, check, corpus, inputs, packed  # noqa: E402

SLICE_S, MOST_BYTES, GOAL = 20.0, 4 * 2**30, 10_000_000
MOST_ALARMS = 30
"""Of `MOST_S` seconds each, during one input: a reader that waits uses no CPU-seconds."""
MOST_INPUT = 2**22
"""Bytes of an input, at most."""
PACKED_INPUT, PACKED = 2048, 2**16
"""Bytes that an input of tests/fuzz/grown has at most, and those of a target together."""
FIRST_SEED = 1000  # those before are the tests'
TMPFS = "/dev/shm" if Path("/dev/shm").is_dir() else None  # readers of files would wait for a disk


@dataclass
class Row:
    """What one target was given so far."""

    target: str
    executions: int = 0
    guided: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    seeds: int = 0
    found: int = 0


class Shared:
    """What a turn's process and its parent both see: how many inputs are done, and the one under way."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16 + MOST_INPUT)
        self._done = 0

    def begin(self, content: bytes) -> None:
        """The process is about to read it."""
        self._memory[8 : 16 + len(content)] = struct.pack("<q", len(content)) + content

    def end(self) -> None:
        """It was read, or refused by name."""
        self._done += 1
        self._memory[:8] = struct.pack("<q", self._done)

    @property
    def done(self) -> int:
        """Inputs read."""
        return int.from_bytes(self._memory[:8], "little")

    @property
    def latest(self) -> bytes:
        """The input that was begun last."""
        return self._memory[16 : 16 + int.from_bytes(self._memory[8:16], "little")]


@dataclass(frozen=True)
class Turn:
    """What came of one."""

    executions: int
    cpu_s: float
    too_much: bytes | None
    """The input that was."""


def read(rows: Path) -> dict[str, Row]:
    """Of all targets, those that are new too."""
    found = {name: Row(name) for name in TARGETS}
    if rows.exists():
        with rows.open(newline="") as file:
            for line in csv.DictReader(file):
                counts = {
                    name: int(line.get(name) or 0) for name in ("executions", "guided", "seeds", "found")
                }
                spent = {name: float(line.get(name) or 0) for name in ("seconds", "cpu_s")}
                found[line["target"]] = Row(line["target"], **counts, **spent)  # type: ignore[arg-type]
    return found


def write(rows: Path, all_rows: dict[str, Row]) -> None:
    """To a temporary file, then renamed: a go that is killed loses one turn at most."""
    part = rows.with_suffix(".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, [one.name for one in fields(Row)], lineterminator="\n")
        table.writeheader()
        for name in sorted(all_rows):
            row = all_rows[name]
            table.writerow(asdict(row) | {"seconds": round(row.seconds, 1), "cpu_s": round(row.cpu_s, 1)})
    part.replace(rows)


def turn(name: str, seed: int, slice_s: float, grown: Path | None = None) -> Turn:
    """Inputs of a seed, read in a process of its own; guided by coverage where there is a folder to grow."""
    shared = Shared()
    child = os.fork()
    if child == 0:
        _turn(name, seed, slice_s, shared, grown)
    try:
        _, status, usage = os.wait4(child, 0)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    too_much = shared.latest if status != 0 else None
    return Turn(shared.done, usage.ru_utime + usage.ru_stime, too_much)


def _turn(name: str, seed: int, slice_s: float, shared: Shared, grown: Path | None) -> NoReturn:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
            reads = _reader(name, slice_s, shared, Path(folder))
            if grown is None:
                for content in inputs(name, seed, packed(name)):
                    if len(content) <= MOST_INPUT and not reads(content):
                        break
            else:
                _grow(name, seed, reads, Path(folder) / "seeds", grown)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _reader(name: str, slice_s: float, shared: Shared, folder: Path) -> Any:
    """Checks one input; False once the turn's CPU-seconds are used."""
    end_s, alarms, begun_s = time.process_time() + slice_s, 0, 0.0

    def alarmed(*_: object) -> None:
        nonlocal alarms
        alarms += 1
        if alarms > MOST_ALARMS or time.process_time() - begun_s > MOST_S:
            raise TimeoutError(f"{name}: over {MOST_S:g} s")

    def reads(content: bytes) -> bool:
        nonlocal alarms, begun_s
        shared.begin(content)
        alarms, begun_s = 0, time.process_time()
        check(name, content, folder)
        shared.end()
        return time.process_time() < end_s

    signal.signal(signal.SIGALRM, alarmed)
    signal.setitimer(signal.ITIMER_REAL, MOST_S, MOST_S)
    return reads


def _grow(name: str, seed: int, reads: Any, seeds: Path, grown: Path) -> None:
    """Atheris' turn: new inputs from those that reached most. It ends the process when something is found."""
    seeds.mkdir()
    grown.mkdir(parents=True, exist_ok=True)
    for i, content in enumerate([*TARGETS[name].seeds(), *corpus(name), *packed(name)]):
        (seeds / str(i)).write_bytes(content)
    words = [f"-seed={seed}", "-timeout=0", "-rss_limit_mb=0", "-print_final_stats=0"]
    words += ["-verbosity=0", "-max_len=16384", f"-artifact_prefix={seeds}/", str(grown), str(seeds)]

    def one(content: bytes) -> None:
        if not reads(content):
            os._exit(0)

    atheris.Setup([sys.argv[0], *words], one)
    atheris.Fuzz()


def pack(grown: Path) -> None:
    """The smallest inputs of a folder as tests/fuzz/grown keeps them, the same bytes for the same inputs."""
    GROWN.mkdir(exist_ok=True)
    for name in TARGETS:
        contents = sorted(
            {*packed(name), *(file.read_bytes() for file in (grown / name).glob("*"))},
            key=lambda content: (len(content), content),
        )
        if not contents:
            continue
        with zipfile.ZipFile(GROWN / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for i, content in enumerate(_fitting(contents)):
                archive.writestr(zipfile.ZipInfo(f"{i:04}"), content, zipfile.ZIP_DEFLATED)


def _fitting(contents: list[bytes]) -> Iterator[bytes]:
    left = PACKED
    for content in contents:
        left -= len(content)
        if left < 0 or len(content) > PACKED_INPUT:
            return
        yield content


def go(
    rows: Path,
    found: Path,
    minutes: float,
    only: list[str],
    slice_s: float = SLICE_S,
    grown: Path | None = None,
) -> int:
    """Turns until the time is over or every target rests; how many inputs wait to be mended."""
    all_rows, end = read(rows), time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        chosen = [row for row in all_rows.values() if row.target in (only or TARGETS)]
        awake = [row for row in chosen if not list(found.glob(f"{row.target}-*"))]
        if not awake:
            break
        row = min(awake, key=lambda row: row.cpu_s)
        begun, seed = time.monotonic(), FIRST_SEED + row.seeds
        came = turn(row.target, seed, slice_s, None if grown is None else grown / row.target)
        row.executions, row.seeds = row.executions + came.executions, row.seeds + 1
        row.guided += came.executions if grown is not None else 0
        row.seconds, row.cpu_s = row.seconds + time.monotonic() - begun, row.cpu_s + came.cpu_s
        if came.too_much is not None:
            row.found += 1
            found.mkdir(parents=True, exist_ok=True)
            file = found / f"{row.target}-{seed}-{came.executions}"
            file.write_bytes(came.too_much)
            print(f"{row.target}: input {came.executions} of seed {seed}, written to {file}", flush=True)
        write(rows, all_rows)
    for row in all_rows.values():
        rate = row.executions / row.cpu_s if row.cpu_s else 0
        print(f"{row.target:12} {row.executions:11,} inputs  {row.cpu_s:8.0f} CPU-s  {rate:6.0f} a CPU-s")
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
    parser.add_argument("--corpus", type=Path, default=Path("fuzz-corpus"))
    parser.add_argument("--slice", type=float, default=SLICE_S, help="CPU-seconds of a turn")
    parser.add_argument("--plain", action="store_true", help="mutations, though Atheris is installed")
    parser.add_argument("--pack", action="store_true", help="only put the corpus into tests/fuzz/grown")
    chosen = parser.parse_args()
    if chosen.pack:
        pack(chosen.corpus)
        return
    grown = None if atheris is None or chosen.plain else chosen.corpus
    sys.exit(1 if go(chosen.rows, chosen.found, chosen.minutes, chosen.only, chosen.slice, grown) else 0)


if __name__ == "__main__":
    main()
