"""Machines that do not see a folder are named before any work.

A node whose processes find nothing at a hidden path stands in for a machine that does not mount it: os.stat
is replaced where they start.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_material import SMALL, made_store, on_ray
from test_cluster_train import recipe, trained

import warm
from cluster.conftest import NODE
from darkroom.cluster.connect import check_nodes
from darkroom.cluster.encoders import Bounds
from darkroom.data.store import Store
from darkroom.errors import StoreError

__all__ = ["recipe"]  # the fixture

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("ray")]
APART = "APART"
HIDDEN, STUCK = "DARKROOM_TEST_HIDDEN", "DARKROOM_TEST_STUCK"
SITE = f"""
import os, time

seen, hidden, stuck = os.stat, os.environ.get("{HIDDEN}"), os.environ.get("{STUCK}")

def stat(path, *arguments, **named):
    if not isinstance(path, int) and os.fsdecode(path).startswith(hidden):
        time.sleep(3600 if stuck else 0)
        raise FileNotFoundError(2, "nothing is mounted", path)
    return seen(path, *arguments, **named)

if hidden:
    os.stat = stat
"""

ONLINE = """
task: pretrain
model: {{base: tiny}}
data: {{store: {store}, resolution: 16, encode: online}}
train: {{steps: 2, global_batch: 2, micro_batch: 2, precision: float32}}
"""

AddNode = Callable[..., Any]


@pytest.fixture
def add_node(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddNode]:
    """Adds a node, of which nothing that begins with `hidden` is seen; gone after the test."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    paths = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", paths)  # a command's, which its workers get too
    added = []

    def add(hidden: str = "", *, stuck: str = "", **node: Any) -> Any:
        told = {"PYTHONPATH": paths, HIDDEN: hidden, STUCK: stuck}
        added.append(cluster.add_node(**{**NODE, **node}, env_vars=told))
        cluster.wait_for_nodes()
        return added[-1]

    yield add
    for node in added:
        cluster.remove_node(node)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return made_store(tmp_path / "pictures.lance", 2, 8)


def taken(node: Any) -> Any:
    """An actor that takes all CPUs of a node."""
    import ray

    class Taken:
        def ping(self) -> bool:
            return True

    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    actor = ray.remote(Taken).options(num_cpus=NODE["num_cpus"], scheduling_strategy=there).remote()
    assert ray.get(actor.ping.remote(), timeout=120)
    return actor


def test_a_node_that_does_not_see_the_store_is_told_before_any_work(cluster, add_node, store) -> None:
    """Also where its CPUs are taken, so that no block would have come there for now."""
    import ray

    held = taken(add_node(hidden=store.path))
    told = f"{store.path} is not on the machine {socket.gethostname()}; keep the store in a folder that every"
    with pytest.raises(StoreError, match=told):
        on_ray(store.path, cluster.address, Bounds(1, 1, SMALL))
    asked = ["--resolution", "32", "--engine", "ray", "--ray-address", cluster.address]
    command = [sys.executable, "-m", "darkroom", "prepare", store.path, "--model", "tiny", *asked]
    done = warm.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"darkroom: {told}")
    assert "Traceback" not in done.stderr
    assert not list(Path(store.path).glob("_prepare/*"))
    ray.kill(held)


def test_a_node_that_does_not_answer_is_not_waited_for(cluster, add_node, store) -> None:
    said: list[str] = []
    check_nodes(store.path, said.append)
    assert said == []  # all see it
    add_node(hidden=store.path, stuck="yes")
    host, began = socket.gethostname(), time.monotonic()
    check_nodes(store.path, said.append, answer_s=4)
    assert time.monotonic() - began < 12
    assert said == [f"the machine {host} did not tell within 4 s whether {store.path} is there"]


def test_a_node_that_reads_for_an_online_feed_must_see_the_store(
    cluster, add_node, store, tmp_path: Path
) -> None:
    """Though it neither trains nor encodes."""
    recipe, out = tmp_path / "online.yaml", tmp_path / "run"
    recipe.write_text(ONLINE.format(store=store.path))
    add_node(hidden=store.path)
    said = trained(recipe, out, "--engine", "ray", "--ray-address", cluster.address, code=2)
    told = f"darkroom: {store.path} is not on the machine {socket.gethostname()}; keep the store in a folder"
    assert said.strip().splitlines()[-1].startswith(told)
    assert "Traceback" not in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "mend"),
    [
        (
            ["phases=[{resolution: 16, samples: 16}, {resolution: 16, samples: 16}]", "checkpoint.url=URL"],
            "a phase starts from the model that the one before left there: choose a folder that they share",
        ),
        ([], "choose a folder that they share, or set checkpoint.url"),
    ],
    ids=["phases", "alone"],
)
def test_workers_that_do_not_share_the_run_are_refused(
    cluster, add_node, recipe, tmp_path: Path, more: list[str], mend: str
) -> None:
    """With phases also where checkpoints go to an address: a phase starts from the run's folder."""
    out, node = tmp_path / "runs" / "big", {"num_cpus": 1, "resources": {f"accelerator_type:{APART}": 1}}
    add_node(**node)
    add_node(hidden=f"{out.parent}/", **node)
    place = ["--engine", "ray", "--ray-address", cluster.address, "--accelerator", APART, "--workers", "2"]
    changed = [one.replace("URL", f"file://{tmp_path}/bucket") for one in more]
    said = trained(recipe, out, *changed, *place, "--max-failures", "0", code=2)
    last = said.strip().splitlines()[-1]
    assert last == (
        f"darkroom: --out {out} is not one folder for all machines: 1 of 2 workers do not see it; {mend}"
    )
    assert "Traceback" not in said
    assert not out.exists()
    assert not (tmp_path / "bucket").exists()
