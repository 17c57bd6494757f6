"""Ranks that share little: a store that changes while they open it, machines that do not share the run."""

from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend

import warm
from darkroom.data.store import Store
from darkroom.errors import RecipeError, StoreError
from darkroom.run import Run
from darkroom.train import ranks
from darkroom.train import run as start
from darkroom.train.local_dataset import settled
from darkroom.train.run import train
from darkroom.train.setup import make_job

RANK = """
import json, os, sys
from pathlib import Path
rank = os.environ["RANK"]
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # a machine of its own, for all it knows
from darkroom.data.store import Store
from darkroom.recipe import make_recipe
from darkroom.train import run as start
made = start.make_job
def late(*args, **more):
    if rank == "1":
        store = Store.open(recipe.data.store)
        store.append(store.dataset.to_table())
    job = made(*args, **more)
    print(f"rank {rank} has {job.rows} rows at version {job.store['version']}", flush=True)
    return job
start.make_job = late
recipe = make_recipe(json.loads(sys.argv[1]))
start.train(recipe, out=Path(sys.argv[2]) / f"machine-{rank}" / "run")
"""


@pytest.fixture
def own_store(store_path: Path, tmp_path: Path) -> Store:
    """A copy of the small store that a test may change."""
    store = Store.create(tmp_path / "own.lance")
    store.append(Store.open(store_path).dataset.to_table())
    return store


def moved_on(store: Store) -> None:
    """Another process doubles the store's rows and drops every version that nobody has pinned."""
    other = Store.open(store.path)
    other.append(other.dataset.to_table())
    other.drop_old_versions()


def test_the_version_is_pinned_before_the_run_names_it(
    recipe_of, own_store, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = own_store.version

    def late(*args, **more):
        moved_on(own_store)
        return make_job(*args, **more)

    monkeypatch.setattr(start, "make_job", late)
    recipe = recipe_of("autoencoder", f"data.store={own_store.path}", "train.steps=2")
    train(recipe, out=tmp_path / "run", console=lambda _: None)
    noted = Run.open(tmp_path / "run").environment["store"]
    assert (noted["version"], noted["rows"]) == (version, 44)
    monkeypatch.undo()
    moved_on(own_store)
    more = recipe_of("autoencoder", f"data.store={own_store.path}", "train.steps=3")
    assert train(more, out=tmp_path / "run", console=lambda _: None).steps == 3


def test_a_version_that_is_dropped_before_it_is_pinned_is_left_for_a_newer_one(
    recipe_of, own_store, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin, began = Store.pin, own_store.version

    def late(self: Store, name: str) -> int:
        if self.version == began:
            moved_on(own_store)
        return pin(self, name)

    monkeypatch.setattr(Store, "pin", late)
    recipe = recipe_of("autoencoder", f"data.store={own_store.path}")
    version = settled(recipe.data, tmp_path / "run", None, print)
    own_store.refresh()
    assert version == own_store.version > began
    assert list(own_store.pins().values()) == [version]
    with pytest.raises(StoreError, match=f"has no version {began}"):
        settled(recipe.data, tmp_path / "run", began, print)


def test_a_run_that_cannot_be_leaves_no_pin(recipe_of, own_store, tmp_path) -> None:
    recipe = recipe_of("autoencoder", f"data.store={own_store.path}", "data.filter=width > 5000")
    with pytest.raises(RecipeError):
        train(recipe, out=tmp_path / "run", console=lambda _: None)
    own_store.refresh()
    assert own_store.pins() == {}


def apart(recipe, folder: Path) -> str:
    """What two ranks say that train, each with a folder of its own for the run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "--no-python", sys.executable, "-c", RANK]
    command += [json.dumps(recipe.model_dump(mode="json")), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run(command, capture_output=True, text=True, env=env, timeout=240, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_two_machines_agree_on_the_version_and_go_on_without_a_shared_folder(
    recipe_of, own_store, tmp_path
) -> None:
    version = own_store.version
    two = ("parallel.mode=ddp", "parallel.devices=2", "train.micro_batch=2", f"data.store={own_store.path}")
    two += (f"checkpoint.url=file://{tmp_path}/kept",)
    said = apart(recipe_of("pretrain", *two, "train.steps=2"), tmp_path)
    for rank in (0, 1):
        assert f"rank {rank} has 44 rows at version {version}" in said
    said = apart(recipe_of("pretrain", *two, "train.steps=4"), tmp_path)
    assert "going on after step 2 of 4" in said
    assert said.count(f"has 44 rows at version {version}") == 2
    rows = map(json.loads, (tmp_path / "machine-0" / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert not (tmp_path / "machine-1" / "run" / "recipe.yaml").exists()


def test_on_windows_ranks_meet_without_libuv(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's builds for Windows have none, and its launcher asks for it all the same."""

    rendezvous = importlib.import_module("torch.distributed.rendezvous")

    def met() -> list[bool]:
        """Of the launcher's store, of the one that it shares, of a rank's."""
        place = RendezvousParameters("c10d", "localhost:0", "run", 1, 1)
        shared = dist.TCPStore("localhost", 0, is_master=True, multi_tenant=True)
        own = rendezvous._create_c10d_store("localhost", shared.port, 1, 2, timedelta(seconds=20))
        own.set("rank", "1")
        assert shared.get("rank") == b"1"
        return [one.libuvBackend for one in (c10d_rendezvous_backend._create_tcp_store(place), shared, own)]

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for module in (c10d_rendezvous_backend, dist, rendezvous):
        monkeypatch.setattr(module, "TCPStore", module.TCPStore)  # put back at the end
    ranks.meet_without_libuv()
    assert met() == [True] * 3
    monkeypatch.setattr(ranks, "sys", SimpleNamespace(platform="win32"))
    ranks.meet_without_libuv()
    assert met() == [False] * 3


def test_a_process_that_windows_ended_is_lost_and_not_silent() -> None:
    """Its exit code is no signal's: an access violation had neither a message nor a name."""
    said = ranks._why({1: SimpleNamespace(exitcode=0xC0000005)})
    assert "rank 1 was lost: ended by error 0xc0000005 of Windows; the others were stopped" in str(said)
    told = ranks._why({1: SimpleNamespace(exitcode=2)})
    assert (str(told), told.exit_code) == ("", 2)
