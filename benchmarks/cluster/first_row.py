"""How long until a local Ray's training writes its first row, and a cluster that is not there is named.

    python benchmarks/cluster/first_row.py --rounds 3

One JSON line for each of: `local` (no Ray), `ray` (a Ray that darkroom starts), `closed` (a port of this
machine where nobody listens) and `silent` (one where connections are taken and nothing is answered). `wall_s`
is from the start of the process to the first row of metrics.jsonl, or to its end where there is no cluster;
`cpu_s` is what all processes used that were started meanwhile, Ray's among them. Nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from PIL import Image

RECIPE = """task: pretrain
model: {base: tiny}
data: {store: pictures.lance, resolution: 32, encode: inline}
train: {steps: 3, global_batch: 4, micro_batch: 4}
"""
DARKROOM = (sys.executable, "-m", "darkroom")
LOOK_S = 0.05


def prepared(folder: Path) -> Path:
    """A store of 16 pictures and a recipe of three steps."""
    (folder / "pictures").mkdir()
    for i in range(16):
        Image.effect_noise((32, 32), 80).convert("RGB").save(folder / "pictures" / f"{i}.png")
        (folder / "pictures" / f"{i}.txt").write_text("noise")
    subprocess.run([*DARKROOM, "import", "pictures", "pictures.lance"], cwd=folder, check=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    return recipe


def cpu_without(before: set[int]) -> float:
    """CPU-seconds of all processes that are there now and were not before."""
    spent = 0.0
    for process in psutil.process_iter(["cpu_times"]):
        if process.pid not in before and process.info["cpu_times"] is not None:
            spent += sum(process.info["cpu_times"][:2])
    return spent


def first_row(recipe: Path, out: Path, *more: str) -> tuple[float, float]:
    """Wall and CPU-seconds until there is a row; the run then goes on to its end."""
    before, start_s = set(psutil.pids()), time.time()
    words = [*DARKROOM, "train", str(recipe), "--out", str(out), *more]
    process = subprocess.Popen(words, cwd=recipe.parent, stdout=subprocess.DEVNULL)
    rows = out / "metrics.jsonl"
    while not (rows.exists() and rows.stat().st_size) and process.poll() is None:
        time.sleep(LOOK_S)
    found = time.time() - start_s, cpu_without(before)
    if process.wait():
        raise SystemExit(f"training ended with {process.returncode}")
    return found


@contextmanager
def nobody() -> Iterator[dict[str, str]]:
    """Addresses of this machine where no cluster is, by the case's name; theirs alone while it lasts."""
    with socket.socket() as closed, socket.socket() as silent:
        for one in (closed, silent):
            one.bind(("127.0.0.1", 0))
        silent.listen(socket.SOMAXCONN)  # the system takes connections, and nobody reads from them
        yield {
            name: f"127.0.0.1:{one.getsockname()[1]}"
            for name, one in (("closed", closed), ("silent", silent))
        }


def named(recipe: Path, out: Path, address: str) -> tuple[float, float]:
    """The same until a cluster that is not there is named, with exit code 2."""
    start_s, before = time.time(), sum(os.times()[2:4])
    words = [*DARKROOM, "train", str(recipe), "--out", str(out), "--engine", "ray", "--ray-address", address]
    ended = subprocess.run(words, cwd=recipe.parent, capture_output=True, check=False)
    if ended.returncode != 2:
        raise SystemExit(f"exit code {ended.returncode}: {ended.stderr.decode()[-500:]}")
    return time.time() - start_s, sum(os.times()[2:4]) - before


def cases(recipe: Path, out: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    """One round."""
    yield "local", first_row(recipe, out / "local")
    yield "ray", first_row(recipe, out / "ray", "--engine", "ray", "--ray-address", "local")
    with nobody() as addresses:
        for name, address in addresses.items():
            yield name, named(recipe, out / "none", address)


def main() -> None:
    """Medians over rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    seen: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        recipe = prepared(Path(folder))
        for i in range(chosen.rounds):
            for name, found in cases(recipe, Path(folder) / f"round-{i}"):
                seen.setdefault(name, []).append(found)
    for name, all_found in seen.items():
        wall_s, cpu_s = (round(statistics.median(column), 1) for column in zip(*all_found, strict=True))
        rows = {"benchmark": "first-row", "case": name, "rounds": len(all_found), "wall_s": wall_s}
        print(json.dumps({**rows, "cpu_s": cpu_s, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
