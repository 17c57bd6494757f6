"""Kill a training job again and again, and look whether anything was lost.

    python benchmarks/kill_matrix.py --rounds 100 --ranks 2 --out benchmarks/kill-matrix.json

One job trains undisturbed; another, the same, is started again and again, and SIGKILL goes to one of its
processes or to all of them at a random moment of its start, its steps or its saves, until it is finished in
spite of it; then comes the next, until there were so many kills. Now and then the newest checkpoint is
damaged in between. Told are failed resumes, whether the weights are the same to the bit, steps made more than
once, and seconds lost. Gloo on the CPU, a model of a few thousand weights, pictures of this script's own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from safetensors.torch import load_file

from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.train.checkpoint import checkpoints, step_of

Popen = subprocess.Popen
"""What starts a job; tests put one here that has the imports done."""
SIDE, PICTURES = 16, 44
EARLY, STARTING_S = 0.2, 10.0  # the share of kills that come while a job starts, and how long that may take
UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
VAE = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def make_store(folder: Path) -> Path:
    """Pictures of random colours with captions, imported."""
    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    draws = np.random.default_rng(0)
    for i in range(PICTURES):
        Image.fromarray(draws.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(pictures / f"{i}.png")
        (pictures / f"{i}.txt").write_text(f"picture {i}")
    store = Store.create(folder / "pictures.lance")
    import_pictures(pictures, store)
    return folder / "pictures.lance"


def write_recipe(folder: Path, store: Path, *, steps: int, every: int, mode: str, ranks: int) -> Path:
    """A tiny pre-training that saves often."""
    content = {
        "task": "pretrain",
        "model": {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT},
        "data": {"store": str(store), "resolution": SIDE, "encode": "inline", "caption_dropout": 0.1},
        "optim": {"lr": 2e-3, "warmup_steps": 5},
        "train": {
            "steps": steps,
            "global_batch": 8,
            "micro_batch": 2,
            "precision": "float32",
            "log_every": 5,
            "ema": {"decay": 0.9},
        },
        "parallel": {"mode": mode if ranks > 1 else "none", "devices": ranks, "timeout_s": 60},
        "checkpoint": {"every": every},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(recipe: Path, out: Path) -> subprocess.Popen[bytes]:
    """The job as a user starts it, its output beside the run."""
    command = [sys.executable, "-m", "darkroom", "train", str(recipe), "--out", str(out)]
    with out.with_suffix(".log").open("ab") as log:
        return Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def family(pid: int) -> list[int]:
    """The processes under a process, which train; the process itself where there are none."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(each) for each in text.split()] or [pid]


def kill(job: subprocess.Popen[bytes], everyone: bool, choice: random.Random) -> None:
    """SIGKILL to one process that trains, or to all and the one that started them."""
    victims = family(job.pid)
    if not everyone and victims:
        victims = [choice.choice(victims)]
    for victim in victims + ([job.pid] if everyone else []):
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue


def steps_made(run: Path) -> int:
    """The last step in the metrics."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


def damage_newest(run: Path, choice: random.Random) -> bool:
    """Change one byte of the newest checkpoint, where there is one before it."""
    there = checkpoints(run / "checkpoints")
    if len(there) < 2:
        return False
    file = choice.choice(sorted(there[-1].glob("*.safetensors")))
    content = bytearray(file.read_bytes())
    if not content:
        return False
    content[choice.randrange(len(content))] ^= 1
    file.write_bytes(bytes(content))
    return True


def same_bits(one: Path, other: Path) -> bool:
    """Whether two runs' models are the same to the bit."""
    files = sorted(file.relative_to(one) for file in one.rglob("*.safetensors"))
    for file in files:
        a, b = load_file(one / file), load_file(other / file)
        if a.keys() != b.keys() or not all(np.array_equal(a[name].numpy(), b[name].numpy()) for name in a):
            return False
    return bool(files)


@dataclass
class Found:
    """What came of the kills so far."""

    kills: int = 0
    damaged: int = 0
    failed: int = 0
    repeated: int = 0
    jobs: int = 0
    same_bits: bool = True


def wait_for_moment(
    job: subprocess.Popen[bytes], run: Path, within_s: float, choice: random.Random
) -> int | None:
    """Wait for a random moment: while the job starts, or up to `within_s` after its first new step.

    Returns the job's exit code where it ended before.
    """
    made = run / "metrics.jsonl"
    before = made.stat().st_mtime_ns if made.exists() else 0
    started = time.monotonic()
    early_s = choice.uniform(0, STARTING_S) if choice.random() < EARLY else None
    moment = None if early_s is None else started + early_s
    while moment is None or time.monotonic() < moment:
        if job.poll() is not None:
            return job.returncode
        if moment is None and made.exists() and made.stat().st_mtime_ns != before:
            moment = time.monotonic() + choice.uniform(0, within_s)
        time.sleep(0.01)
    return None


def kill_until_finished(
    recipe: Path, run: Path, found: Found, *, rounds: int, within_s: float, choice: random.Random
) -> None:
    """Kill one job at random moments until it is finished in spite of it, or `rounds` kills were made."""
    while not found.failed:
        job = start(recipe, run)
        code = job.wait() if found.kills >= rounds else wait_for_moment(job, run, within_s, choice)
        if code is None:
            kill(job, choice.random() < 0.5, choice)
            found.kills += 1
            job.wait(180)
        kept = checkpoints(run / "checkpoints")
        found.repeated += max(0, steps_made(run) - (step_of(kept[-1]) if kept else 0))
        if code is not None:
            found.failed += code != 0
            return
        found.damaged += choice.random() < 0.2 and damage_newest(run, choice)


def kill_matrix(
    folder: Path, *, rounds: int, ranks: int, mode: str, steps: int, every: int, seed: int, within_s: float
) -> dict[str, Any]:
    """Kill jobs `rounds` times, each until it is finished, and say what came of it."""
    choice, found = random.Random(seed), Found()
    recipe = write_recipe(folder, make_store(folder), steps=steps, every=every, mode=mode, ranks=ranks)
    began = time.monotonic()
    if start(recipe, folder / "undisturbed").wait():
        raise SystemExit((folder / "undisturbed.log").read_text())
    undisturbed_s = time.monotonic() - began
    began = time.monotonic()
    while found.kills < rounds and not found.failed:
        found.jobs += 1
        run = folder / f"killed-{found.jobs}"
        kill_until_finished(recipe, run, found, rounds=rounds, within_s=within_s, choice=choice)
        found.same_bits &= not found.failed and same_bits(folder / "undisturbed" / "model", run / "model")
        print(f"job {found.jobs}: {found.kills} kills, same bits: {found.same_bits}", file=sys.stderr)
    return {
        "kills": found.kills,
        "jobs": found.jobs,
        "ranks": ranks,
        "mode": mode,
        "steps": steps,
        "checkpoints_damaged": found.damaged,
        "failed_resumes": found.failed,
        "same_bits": found.same_bits,
        "steps_repeated": found.repeated,
        "seconds_undisturbed": round(undisturbed_s, 1),
        "seconds_lost": round(time.monotonic() - began - found.jobs * undisturbed_s, 1),
        "log": (folder / f"killed-{found.jobs}.log").read_text()[-2000:] if found.failed else "",
    }


def main() -> None:
    """Read the command line, run, print, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="kills")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train together")
    parser.add_argument("--mode", choices=("ddp", "fsdp"), default="fsdp")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=3.0, help="seconds after the first step for a kill")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the result")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="darkroom-kill-") as folder:
        found = kill_matrix(
            Path(folder),
            rounds=given.rounds,
            ranks=given.ranks,
            mode=given.mode,
            steps=given.steps,
            every=given.every,
            seed=given.seed,
            within_s=given.within,
        )
    print(json.dumps(found, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(found["failed_resumes"] or not found["same_bits"]))


if __name__ == "__main__":
    main()
