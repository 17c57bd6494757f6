"""Kill, fill up and lock out whatever writes, and see what was lost. Resumable; ends with a table.

    python benchmarks/chaos.py --work chaos/ --minutes 30      # again until it exits with 0
    python benchmarks/chaos.py --work chaos/ --only import     # one group

`import`, `prepare`, `delete` and `export` are run under strace, which sends SIGKILL at the n-th system call
that writes, renames, flushes or removes, for n spread over all such calls; the same command then runs again,
and its result has to be that of an undisturbed run. `disk-full` and `read-only` run them on a small tmpfs.
Training, servers (also on a PostgreSQL that is restarted, and with clocks that go back), Ray clusters and
simulated servers are the affair of kill_matrix.py, serve_kills.py, cluster/kills.py and simulation.py, which
are called with their share of points. `--work` keeps what was done (`points.json`).

Exit codes: 0 all points survived, 1 something was lost, 3 points are left for another go.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
DARKROOM = (sys.executable, "-c", "from darkroom.cli.application import main; main()")
WRITES = (
    "write,pwrite64,rename,renameat,renameat2,fsync,fdatasync,unlink,unlinkat,link,linkat,ftruncate,mkdir"
)
POINTS = {"import": 30, "prepare": 30, "delete": 20, "export": 20}
SCRIPTS = {
    "training": (50, ("kill_matrix.py", "--rounds", "50", "--ranks", "2", "--out", "{work}/training.json")),
    "servers": (50, ("serve_kills.py", "{model}", "--rounds", "50", "--out", "{work}/servers.json")),
    "database": (
        20,
        ("serve_kills.py", "{model}", "--rounds", "20", "--database", "--out", "{work}/db.json"),
    ),
    "clock": (20, ("serve_kills.py", "{model}", "--rounds", "20", "--clock")),
    "cluster": (11, ("cluster/kills.py", "--rounds", "11", "--calm", "1", "--out", "{work}/cluster.csv")),
    "simulation": (1000, ("../tests/serve/simulation.py", "0:1000")),
}
PICTURES, SIDE, FULL_BYTES = 60, 32, 300_000


@dataclass
class Point:
    """One disturbance, and what was left."""

    group: str
    what: str
    survived: bool
    lost: str
    wall_s: float


def run(*words: object, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A command of darkroom, perhaps under another program."""
    told = [*under, *DARKROOM, *map(str, words)]
    return subprocess.run(told, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


class Bench:
    """What the verbs work on: pictures, a store, a model; made once."""

    def __init__(self, work: Path) -> None:
        self.work, self.pictures = work, work / "pictures"
        self.model, self.store = work / "model", work / "whole.lance"
        if not self.pictures.is_dir():
            self._make()

    def _make(self) -> None:
        draw, part = np.random.default_rng(0), self.work / "pictures.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for i in range(PICTURES):
            Image.fromarray(draw.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(part / f"{i}.png")
            (part / f"{i}.txt").write_text(f"picture {i}")
        for words in (("import", part, self.store), ("export", "tiny", "--to", self.model)):
            if (made := run(*words)).returncode:
                raise SystemExit(made.stderr)
        part.rename(self.pictures)

    def fresh(self, group: str, folder: Path) -> tuple[object, ...]:
        """A folder in which a verb begins, and its words."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        store = folder / "a.lance"
        if group == "import":
            return "import", self.pictures, store
        if group == "export":
            return "export", self.model, "--to", folder / "model"
        shutil.copytree(self.store, store)
        if group == "delete":
            return "delete", store, "--source", source_of(self.store)
        return "prepare", store, "--model", self.model, "--resolution", SIDE

    def state(self, group: str, folder: Path) -> str:
        """What a verb left, in a form that is the same for the same content; an error's first line."""
        if group == "export":
            files = sorted((folder / "model").rglob("*.safetensors"))
            return " ".join(hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files)
        found = run("verify", folder / "a.lance", "--json")
        if found.returncode:
            return (found.stdout or found.stderr).strip().replace("\n", " ")[:300]
        told = json.loads(found.stdout)
        seen = run("inspect", folder / "a.lance", "--json")
        columns = json.loads(seen.stdout).get("columns") if seen.returncode == 0 else seen.stderr[:100]
        return f"{told['rows']} rows, {told['hashed']} hashed, {columns}"


def source_of(store: Path) -> str:
    """The source of the store's first row."""
    import lance

    return str(lance.dataset(str(store)).to_table(columns=["source"], limit=1)["source"][0].as_py())


def kill(bench: Bench, group: str, number: int, of: int, calls: int, whole: str) -> Point:
    """SIGKILL at one of the writing calls; then the same command again."""
    at, begun = max(1, calls * (number + 1) // (of + 1)), time.monotonic()
    folder = bench.work / f"{group}-killed"
    words = bench.fresh(group, folder)
    inject = f"inject={WRITES}:signal=SIGKILL:when={at}"
    run(*words, under=("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={WRITES}", "-e", inject))
    again = run(*words)
    # What was done before the kill may be all there is to do: then the verb says so.
    left = bench.state(group, folder)
    lost = "" if left == whole else f"{left} (again: {again.returncode} {again.stderr.strip()[:200]})"
    return Point(group, f"SIGKILL at call {at} of {calls}", not lost, lost, time.monotonic() - begun)


def calls_of(bench: Bench, group: str) -> tuple[int, str]:
    """How many writing calls the busiest thread of an undisturbed run makes, and what it leaves."""
    folder, trace = bench.work / f"{group}-whole", bench.work / f"{group}.trace"
    words = bench.fresh(group, folder)
    made = run(*words, under=("strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={WRITES}"))
    if made.returncode:
        raise SystemExit(f"{group}: {made.stderr}")
    threads: dict[str, int] = {}
    for line in trace.read_text(errors="replace").splitlines():
        thread = line.partition(" ")[0]
        threads[thread] = threads.get(thread, 0) + 1
    return max(threads.values()), bench.state(group, folder)


def on_tmpfs(bench: Bench, group: str, option: str, whole: str) -> Point:
    """On a file system that is full, or read-only; then on one that is not."""
    begun, folder = time.monotonic(), bench.work / f"{group}-{option}"
    folder.mkdir(exist_ok=True)
    size = FULL_BYTES if option == "disk-full" else 1 << 28
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        inside = folder / "in"
        words = bench.fresh(group, inside)
        if option == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        failed = run(*words)
        subprocess.run(["mount", "-o", f"remount,rw,size={1 << 28}", folder], check=True)
        again = run(*words)
        left = bench.state(group, inside)
        lost = "" if left == whole else f"{left} (again: {again.returncode} {again.stderr.strip()[:200]})"
        if "Traceback" in failed.stderr:
            lost += " a traceback"
        return Point(
            option, f"{group}: exit code {failed.returncode}", not lost, lost, time.monotonic() - begun
        )
    finally:
        subprocess.run(["umount", folder], check=False)


def script(name: str, bench: Bench) -> Point:
    """All points of another script."""
    points, words = SCRIPTS[name]
    told = [word.format(work=bench.work, model=bench.model) for word in words]
    begun = time.monotonic()
    made = subprocess.run([sys.executable, HERE / told[0], *told[1:]], capture_output=True, text=True)
    lost = "" if made.returncode == 0 else (made.stdout + made.stderr).strip()[-300:]
    return Point(name, f"{points} points", not lost, lost, time.monotonic() - begun)


def planned(bench: Bench, only: str | None) -> list[tuple[str, Callable[[], Point]]]:
    """Every point by its name."""
    plan: list[tuple[str, Callable[[], Point]]] = []
    known: dict[str, tuple[int, str]] = {}

    def whole(group: str) -> tuple[int, str]:
        if group not in known:
            known[group] = calls_of(bench, group)
        return known[group]

    for group, count in POINTS.items():
        for i in range(count):
            plan.append((f"{group} {i}", lambda g=group, i=i, n=count: kill(bench, g, i, n, *whole(g))))
        for option in ("disk-full", "read-only"):
            if group in ("import", "export"):
                plan.append(
                    (f"{option} {group}", lambda g=group, o=option: on_tmpfs(bench, g, o, whole(g)[1]))
                )
    plan += [(name, lambda name=name: script(name, bench)) for name in SCRIPTS]
    return [one for one in plan if only is None or one[0].split()[0] == only]


def table(points: dict[str, dict[str, object]]) -> str:
    """A line a group, and one for each loss."""
    groups: dict[str, list[dict[str, object]]] = {}
    for point in points.values():
        groups.setdefault(str(point["group"]), []).append(point)
    lines = ["| group | points | survived |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {len(all_)} | {sum(bool(p['survived']) for p in all_)} |"
        for name, all_ in groups.items()
    ]
    lost = [f"lost: {p['group']}, {p['what']}: {p['lost']}" for p in points.values() if not p["survived"]]
    return "\n".join([*lines, *lost])


def main() -> int:
    """Go on where the last go ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("chaos"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--only", default=None)
    told = parser.parse_args()
    if shutil.which("strace") is None:
        raise SystemExit("no strace here: apt-get install strace")
    end, notes = time.monotonic() + told.minutes * 60, told.work / "points.json"
    told.work.mkdir(parents=True, exist_ok=True)
    points: dict[str, dict[str, object]] = json.loads(notes.read_text()) if notes.is_file() else {}
    bench = Bench(told.work.resolve())
    left = [(name, call) for name, call in planned(bench, told.only) if name not in points]
    for name, call in left:
        if time.monotonic() > end:
            print(table(points))
            return 3
        points[name] = asdict(call())
        beside = notes.with_suffix(".part")
        beside.write_text(json.dumps(points, indent=1))
        beside.replace(notes)
        print(f"{name}: {'survived' if points[name]['survived'] else points[name]['lost']}", flush=True)
    print(table(points))
    return 0 if all(point["survived"] for point in points.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
