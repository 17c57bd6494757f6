"""Kill what a job on a Ray cluster is made of, at random moments, and look what is lost.

    python benchmarks/cluster/kills.py --rounds 33 --out benchmarks/cluster/kills.csv

Three jobs on a real cluster of several raylets on this machine: preparing columns (offline), training that is
fed by encoders on other nodes (online), and training from a store (train). In each round SIGKILL goes to one
training worker, encoder, task process, node (its raylet) or driver, at a moment drawn from the job's middle;
a killed node is replaced after three seconds, a killed driver's command is given again. Told are whether the
result is that of an undisturbed job to the bit, and the seconds and steps that were lost. A file that holds
some rounds already is gone on with, so that the rounds may be made in pieces.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from PIL import Image
from pydantic import BaseModel, Field

from darkroom.run import append_rows, read_rows

SMALL, TRAIN = "SMALL", "TRAIN"
MB = 1024**2
ENCODING: dict[str, Any] = {"num_cpus": 3, "resources": {f"accelerator_type:{SMALL}": 1}}
TRAINING: dict[str, Any] = {"num_cpus": 1, "resources": {f"accelerator_type:{TRAIN}": 1}}
COMMON: dict[str, Any] = {"num_gpus": 0, "object_store_memory": 100 * MB}
ROUNDS = (
    *(("offline", victim) for victim in ("encoder", "task", "node", "driver")),
    *(("online", victim) for victim in ("worker", "encoder", "node", "driver")),
    *(("train", victim) for victim in ("worker", "node", "driver")),
)
TITLES = {
    "worker": (b"RayTrainWorker",),
    "encoder": (b"BlockEncoder", b"OnlineEncoder"),
    "task": (b"cut_block", b"join_parts", b"read_rows"),
}
VAE = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
SIDE, EVERY = 16, 10
LIMIT_S = 400.0


class Round(BaseModel):
    """A row: one job, killed once."""

    round: int
    job: str
    victim: str
    at_s: float = Field(description="after the job's first progress, when SIGKILL was sent")
    finished: bool
    equal: bool = Field(description="to the bit, to the undisturbed job's result")
    wall_s: float
    calm_s: float = Field(description="median of the undisturbed jobs of this call")
    lost_s: float = Field(description="wall less calm")
    lost_steps: int | None = Field(None, description="steps that were made again; none of preparing")
    seed: int
    date: str
    note: str


# ---- the jobs


def fill(path: Path, fragments: int, rows: int, side: int) -> str:
    """A store of pictures of noise."""
    from darkroom.data.store import SCHEMA, Store

    store = Store.create(path)
    for number in range(fragments):
        keys = range(number * rows, (number + 1) * rows)
        content = {
            "id": [f"{i:032x}" for i in keys],
            "picture": [_png(i, side) for i in keys],
            "caption": [f"noise number {i}" for i in keys],
            "width": [side] * rows,
            "height": [side] * rows,
            "format": ["PNG"] * rows,
            "phash": list(keys),
            "source": ["made"] * rows,
            "key": [f"{i}.png" for i in keys],
        }
        store.append(pa.table(content, schema=SCHEMA))
    return str(path)


def _png(number: int, side: int) -> bytes:
    file = io.BytesIO()
    draws = np.random.default_rng(number)
    Image.fromarray(draws.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


class Jobs:
    """What is run: its command, where its result is, and how far it is."""

    def __init__(self, place: Path, address: str, *, steps: int, rows: int) -> None:
        self.place, self.address, self.steps, self.rows = place, address, steps, rows
        self.store = fill(place / "pictures.lance", 2, 24, SIDE)
        for encode in ("inline", "online"):
            (place / f"{encode}.yaml").write_text(yaml.safe_dump(self._recipe(encode)))

    def _recipe(self, encode: str) -> dict[str, Any]:
        online = {"encoders": 2, "accelerator": SMALL, "cpu_workers": 2}
        data = {"store": self.store, "resolution": SIDE, "encode": encode, "crop": "random", "flip": True}
        return {
            "task": "pretrain",
            "model": {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT},
            "data": {**data, **({"online": online} if encode == "online" else {})},
            "optim": {"lr": 2e-3},
            "parallel": {"mode": "ddp", "devices": 2},
            "train": {
                "steps": self.steps,
                "global_batch": 8,
                "micro_batch": 4,
                "precision": "float32",
                "log_every": 1,
            },
            "checkpoint": {"every": EVERY},
        }

    def command(self, job: str, out: Path) -> list[str]:
        if job == "offline":
            if not out.exists():
                fill(out, 6, self.rows // 6, 48)
            return [sys.executable, "-u", __file__, "--inside", str(out), self.address]
        recipe = self.place / ("online.yaml" if job == "online" else "inline.yaml")
        flags = ["--engine", "ray", "--ray-address", self.address, "--accelerator", TRAIN]
        return [sys.executable, "-u", "-m", "darkroom", "train", str(recipe), *flags, "--out", str(out)]

    def began(self, job: str, out: Path) -> bool:
        """Whether there is something to lose."""
        if job == "offline":
            return any(out.glob("_prepare/*.parts/*/*.arrow"))
        return any((out / "checkpoints").glob("step-*/manifest.json"))

    def result(self, job: str, out: Path) -> str:
        """A hash of all that was made."""
        made = hashlib.sha256()
        if job == "offline":
            from darkroom.data.store import Store

            dataset = Store.open(out).dataset
            names = sorted(name for name in dataset.schema.names if name.startswith(("latents_", "text_")))
            assert len(names) == 2, names
            for row in dataset.to_table(columns=["id", *names]).to_pylist():
                made.update(repr(sorted(row.items())).encode())
        else:
            from safetensors.torch import load_file

            files = sorted((out / "model").rglob("*.safetensors"))
            assert len(files) >= 2, files
            for file in files:
                for name, tensor in sorted(load_file(file).items()):
                    made.update(name.encode() + tensor.numpy().tobytes())
        return made.hexdigest()


def inside(store: str, address: str) -> None:
    """Preparing, in many small blocks so that there are moments in between."""
    from darkroom import models
    from darkroom.cluster import prepare as cluster_prepare
    from darkroom.cluster.encoders import Bounds

    cluster_prepare.BLOCK_ROWS = 8
    model = models.create("tiny", seed=0, parts=("vae", "text_encoder", "tokenizer"))
    cluster_prepare.prepare_on_ray(
        store,
        model,
        address=address,
        bounds=Bounds(2, 2, SMALL),
        resolution=32,
        batch_rows=4,
        text=True,
        cpu_workers=2,
    )


# ---- the cluster


class Nodes:
    """A real cluster: a head for drivers, two nodes that encode, two that train."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        system = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": system, **COMMON}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.kinds = {self.add(kind): kind for kind in (ENCODING, ENCODING, TRAINING, TRAINING)}
        self.cluster.wait_for_nodes()

    def add(self, kind: dict[str, Any]) -> Any:
        return self.cluster.add_node(**kind, **COMMON)

    def processes(self, victim: str) -> list[int]:
        """The processes of a kind that this cluster's raylets started."""
        raylets = {self.raylet(node) for node in (*self.kinds, self.cluster.head_node)}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                title = (folder / "cmdline").read_bytes()
                if parent in raylets and any(part in title for part in TITLES[victim]):
                    found.append(int(folder.name))
        return sorted(found)

    def raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def kill_node(self, job: str, draws: random.Random) -> None:
        """SIGKILL to the raylet of a node that has work, and another node after a while."""
        kind = TRAINING if job == "train" else draws.choice([ENCODING, TRAINING])
        kind = ENCODING if job == "offline" else kind
        node = draws.choice([one for one, its in self.kinds.items() if its is kind])
        os.kill(self.raylet(node), signal.SIGKILL)
        time.sleep(3)
        self.cluster.remove_node(node, allow_graceful=False)
        del self.kinds[node]
        self.kinds[self.add(kind)] = kind

    def close(self) -> None:
        self.cluster.shutdown()


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        ) as driver,
    ):
        try:
            yield driver
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)


def calm(jobs: Jobs, job: str, out: Path) -> tuple[float, float, str]:
    """Seconds of an undisturbed job, of them those after its first progress, and what it made."""
    began = first = time.monotonic()
    log = out.with_suffix(".log")
    with started(jobs.command(job, out), log) as driver:
        while driver.poll() is None:
            if first == began and jobs.began(job, out):
                first = time.monotonic()
            time.sleep(0.05)
        if driver.returncode:
            raise RuntimeError(f"an undisturbed {job} job failed: {log.read_text()[-2000:]}")
    end = time.monotonic()
    return end - began, end - first, jobs.result(job, out)


def disturbed(
    nodes: Nodes, jobs: Jobs, job: str, victim: str, out: Path, middle_s: float, draws: random.Random
) -> tuple[float, float, bool, bool]:
    """One job, killed once: its seconds, when it was killed, whether it came to its end, and whether it was
    killed at all before that."""
    command, log = jobs.command(job, out), out.with_suffix(".log")
    began, at_s = time.monotonic(), draws.uniform(0.0, 0.8 * middle_s)
    killed, due = False, float("inf")
    while time.monotonic() - began < LIMIT_S:
        with started(command, log) as driver:
            while not killed and driver.poll() is None and time.monotonic() - began < LIMIT_S:
                if due == float("inf") and jobs.began(job, out):
                    due = time.monotonic() + at_s
                if time.monotonic() >= due:
                    killed = _kill(nodes, job, victim, driver, draws)
                time.sleep(0.02)
            with suppress(subprocess.TimeoutExpired):
                driver.wait(max(1.0, LIMIT_S - (time.monotonic() - began)))
            if driver.returncode == 0:
                return time.monotonic() - began, at_s, True, killed
            if victim != "driver":
                break
    return time.monotonic() - began, at_s, False, killed


def _kill(nodes: Nodes, job: str, victim: str, driver: Any, draws: random.Random) -> bool:
    """Whether there was one to kill."""
    if victim == "driver":
        driver.kill()
        return True
    if victim == "node":
        nodes.kill_node(job, draws)
        return True
    found = nodes.processes(victim)
    if found:
        os.kill(draws.choice(found), signal.SIGKILL)
    return bool(found)


def steps_again(log: Path) -> int:
    """Steps that the console told more than once."""
    numbers = re.findall(r"step +(\d+)/", log.read_text())
    return len(numbers) - len(set(numbers))


# ---- the rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=33)
    parser.add_argument("--steps", type=int, default=300, help="of a training job")
    parser.add_argument("--rows", type=int, default=1200, help="of a store that is prepared")
    parser.add_argument("--calm", type=int, default=2, help="undisturbed jobs of each kind, first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within-s", type=float, default=float("inf"), help="begin no round after this")
    parser.add_argument("--only", choices=["offline", "online", "train"], nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(*given.inside)
        return
    done = {row.round for row in read_rows(given.out, Round)} if given.out and given.out.exists() else set()
    asked = [(number, *ROUNDS[number % len(ROUNDS)]) for number in range(given.rounds)]
    todo = [(n, job, victim) for n, job, victim in asked if n not in done and job in (given.only or job)]
    if todo:
        run(todo, given)


def run(todo: list[tuple[int, str, str]], given: Any) -> None:
    """These rounds, on one cluster."""
    began, nodes = time.monotonic(), Nodes()
    with tempfile.TemporaryDirectory(prefix="darkroom-kills-") as folder:
        try:
            place = Path(folder)
            jobs = Jobs(place, nodes.cluster.address, steps=given.steps, rows=given.rows)
            known: dict[str, list[tuple[float, float, str]]] = {}
            for number, job, victim in todo:
                if time.monotonic() - began > given.within_s:
                    break
                if job not in known:
                    known[job] = [calm(jobs, job, place / f"calm-{job}-{i}") for i in range(given.calm)]
                    assert len({made for *_, made in known[job]}) == 1, f"calm {job} jobs differ"
                    print(f"calm {job}: " + ", ".join(f"{one[0]:.1f} s" for one in known[job]), flush=True)
                row = one_round(number, job, victim, known[job], nodes, jobs, given.seed)
                end = "finished" if row.finished else "NOT FINISHED"
                bits = "same bits" if row.equal else "OTHER BITS"
                print(
                    f"round {row.round}: {row.victim} of {row.job} after {row.at_s:.1f} s: {end}, {bits}, "
                    f"{row.lost_s:.1f} s and {row.lost_steps} steps lost",
                    flush=True,
                )
                if given.out:
                    append_rows(given.out, Round, [row])
        finally:
            nodes.close()


def one_round(
    number: int, job: str, victim: str, known: list[Any], nodes: Nodes, jobs: Jobs, seed: int
) -> Round:
    draws = random.Random(f"{seed} {number}")
    calm_s, middle_s = (statistics.median(one[i] for one in known) for i in (0, 1))
    for again in range(5):  # a job that is quicker than the undisturbed one may end before it is killed
        out = jobs.place / f"round-{number}-{again}"
        wall_s, at_s, finished, killed = disturbed(nodes, jobs, job, victim, out, middle_s, draws)
        if killed or not finished:
            break
        middle_s /= 2
    finished = finished and killed
    log = out.with_suffix(".log")
    equal = finished and jobs.result(job, out) == known[0][2]
    if not equal:
        print(log.read_text()[-3000:], flush=True)
    return Round(
        round=number,
        job=job,
        victim=victim,
        at_s=at_s,
        finished=finished,
        equal=equal,
        wall_s=wall_s,
        calm_s=calm_s,
        lost_s=wall_s - calm_s,
        lost_steps=None if job == "offline" else steps_again(log),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        note=f"load average {os.getloadavg()[0]:.1f}",
    )


if __name__ == "__main__":
    main()
