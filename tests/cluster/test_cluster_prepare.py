"""Preparing on a cluster gives the local engine's column to the bit, whatever dies meanwhile."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster_material import BATCH, RESOLUTION, SMALL, fill, made_store, on_ray, prepared_columns, tiny

import warm
from cluster.conftest import NODE
from darkroom import models
from darkroom.cluster import prepare as cluster_prepare
from darkroom.cluster.encoders import Bounds
from darkroom.data.store import Store
from darkroom.errors import ColumnError, InputError
from darkroom.prepare.job import prepare

pytestmark = pytest.mark.xdist_group("ray")
nightly = pytest.mark.nightly
FRAGMENTS, ROWS = 12, 48


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The columns that the local engine makes of the store that is prepared here."""
    store = made_store(tmp_path_factory.mktemp("calm") / "pictures.lance", FRAGMENTS, ROWS)
    prepare(store, tiny(), resolution=RESOLUTION, batch_rows=BATCH, text=True, device="cpu")
    return prepared_columns(store)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return made_store(tmp_path / "pictures.lance", FRAGMENTS, ROWS)


def when(seen: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Do something once in the middle of the work."""

    def wait() -> None:
        while not seen():
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def parts(store: Store) -> int:
    return len(list(Path(store.path).glob("_prepare/*.parts/*/*.arrow")))


def same(made: dict[str, Any], calm: dict[str, Any]) -> bool:
    """Whether the latents, all that was made, are the local engine's to the bit."""
    [(name, values)] = made.items()
    return values == calm[name]


def encoder_pids() -> dict[int, str]:
    """Processes of live encoder actors, and their nodes."""
    from ray._private.state import actors

    alive = [a for a in actors().values() if (a["State"], a["ActorClassName"]) == ("ALIVE", "BlockEncoder")]
    return {actor["Pid"]: actor["Address"]["NodeID"] for actor in alive}


def test_one_machine_makes_the_local_engines_column_to_the_bit(laptop, tmp_path: Path) -> None:
    """One encoder on one of its two CPUs, decoding on the other."""
    made = {name: made_store(tmp_path / f"{name}.lance", 2, 12) for name in ("local", "ray")}
    prepare(made["local"], tiny(), resolution=RESOLUTION, batch_rows=BATCH, device="cpu")
    report = on_ray(made["ray"].path, laptop.address, Bounds(1, 1))
    assert set(report.encoded.values()) == {24}
    assert "Ray cluster" in report.cluster
    assert same(prepared_columns(made["ray"]), prepared_columns(made["local"]))
    prepare(made["local"], tiny(seed=1), resolution=RESOLUTION, batch_rows=BATCH, device="cpu")  # the control
    one, other = prepared_columns(made["local"]).values()
    assert all(one[key] != other[key] for key in one)


@nightly
def test_the_column_is_the_local_engines_to_the_bit(cluster, calm, store) -> None:
    said: list[str] = []
    report = on_ray(store.path, cluster.address, Bounds(2, 2, SMALL), say=said.append, text=True)
    assert set(report.encoded.values()) == {FRAGMENTS * ROWS}
    assert len(calm) == 2
    assert prepared_columns(store) == calm
    assert "3 nodes" in said[0]
    assert 0 < report.stages["cpu"] <= 1
    assert 0 < report.stages["encode"] <= 1
    assert "encoders" in report.bottleneck
    assert not list(Path(store.path).glob("_prepare/*.parts/*"))
    again = on_ray(store.path, cluster.address, Bounds(1, 1, SMALL), text=True)
    assert set(again.encoded.values()) == {0}
    # The control: other weights, another column.
    prepare(store, tiny(seed=1), resolution=RESOLUTION, batch_rows=BATCH, device="cpu")
    [other] = prepared_columns(store).keys() - calm.keys()
    latents = next(values for name, values in calm.items() if name.startswith("latents_"))
    assert all(prepared_columns(store)[other][key] != value for key, value in latents.items())


@nightly
def test_deleted_and_broken_rows_and_half_made_columns(cluster, tmp_path: Path) -> None:
    """What the local engine has begun, the other ends, and the columns are those of either alone."""
    made = {}
    for name in ("local", "ray"):
        store = made_store(tmp_path / f"{name}.lance", 2, 20)
        fill(store, 40, 20, broken=(45,))
        store.dataset.delete("id = '00000000000000000000000000000003'")
        store = Store.open(store.path)
        if name == "local":
            first = prepare(store, tiny(), resolution=RESOLUTION, batch_rows=BATCH, device="cpu")
        else:
            first = on_ray(store.path, cluster.address, Bounds(1, 1, SMALL))
        fill(Store.open(store.path), 60, 10)
        Store.open(store.path).compact()
        second = prepare(store, tiny(), resolution=RESOLUTION, batch_rows=BATCH, device="cpu")
        made[name] = [first.unreadable, list(first.encoded.values()), list(second.encoded.values())]
        made[name].append(prepared_columns(store))
    assert made["ray"] == made["local"]
    assert made["local"][0] == [f"{45:032x}"]


@nightly
def test_a_killed_encoder_costs_only_its_blocks(cluster, calm, store) -> None:
    killed = []

    def kill() -> None:
        pid = sorted(encoder_pids())[0]
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    thread = when(lambda: parts(store) >= 3, kill)
    report = on_ray(store.path, cluster.address, Bounds(2, 2, SMALL))
    thread.join()
    assert len(killed) == 1
    assert report.encoders_lost == 1
    assert 1 <= report.blocks_repeated <= 2  # what it had: one at work, one on the way
    assert same(prepared_columns(store), calm)


@nightly
def test_with_all_encoders_nodes_dead_the_job_waits_and_uses_the_node_that_comes(
    cluster, calm, store
) -> None:
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(on_ray, store.path, cluster.address, Bounds(2, 2, SMALL))
        when(lambda: parts(store) >= 3, lambda: None).join(120)
        pids = encoder_pids()
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)
        for pid in pids:  # a machine takes its processes with it; here they would live on for a while
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(2)
        assert pids
        assert not work.done()
        new = cluster.add_node(**NODE)  # only the main thread may
        seen: set[str] = set()
        while not work.done():
            seen.update(encoder_pids().values())
            time.sleep(0.05)
    cluster.add_node(**NODE)
    report = work.result()
    assert report.encoders_lost >= len(pids)
    assert new.node_id in seen
    assert same(prepared_columns(store), calm)


@nightly
def test_a_killed_driver_goes_on_from_the_parts(cluster, calm, store) -> None:
    here = Path(__file__).parent / "cluster_material.py"
    command = [sys.executable, str(here), store.path, cluster.address]
    driver = warm.Popen(command, stdout=warm.DEVNULL, stderr=warm.PIPE)
    deadline = time.monotonic() + 120
    while parts(store) < 5:
        assert driver.poll() is None, driver.stderr.read().decode()[-800:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    time.sleep(1)
    kept = parts(store)
    report = on_ray(store.path, cluster.address, Bounds(2, 2, SMALL))
    assert kept >= 5
    assert same(prepared_columns(store), calm)
    latents = next(name for name in report.encoded if name.startswith("latents_"))
    assert report.encoded[latents] <= FRAGMENTS * ROWS
    assert not list(Path(store.path).glob("_prepare/*.parts/*"))


@nightly
def test_what_cannot_be_is_told_in_one_line(cluster, store) -> None:
    with pytest.raises(InputError, match="accelerator 'H100' is not in the cluster; allowed: SMALL"):
        on_ray(store.path, cluster.address, Bounds(1, 1, "H100"))
    with pytest.raises(InputError, match="20 encoders of 1 CPUs each: the nodes fit 6"):
        on_ray(store.path, cluster.address, Bounds(20, 20, SMALL))
    with pytest.raises(InputError, match="1 encoders of 4 CPUs each: .* 0 .*, the largest has 3 CPUs"):
        on_ray(store.path, cluster.address, Bounds(1, 1, SMALL, fraction=4))
    on_ray(store.path, cluster.address, Bounds(1, 1, SMALL))
    with pytest.raises(ColumnError, match="made with crop centre, not buckets-8"):
        on_ray(store.path, cluster.address, Bounds(1, 1, SMALL), bucket_step=8)


@pytest.mark.parametrize("given", ["0", "4:2", "x", "2:", "-1"])
def test_a_number_of_encoders_that_is_none(given: str) -> None:
    if given == "2:":
        assert Bounds.parsed(given) == Bounds(2, 2)
        return
    with pytest.raises(InputError, match="allowed: N, or MIN:MAX"):
        Bounds.parsed(given)


LINE = r"[\d,.]+ rows/s; cpu stage \d+% busy, encoders \d+%: (.*)"


def progress(said: list[str]) -> list[str]:
    """What the lines of progress say of the limit, but for the first blocks."""
    found = [re.fullmatch(LINE, line) for line in said]
    return [match[1] for match in found if match]


@nightly
def test_pictures_that_are_slow_to_decode_let_the_encoders_starve(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cluster_prepare, "SAY_EVERY_S", 0.5)
    store, said = made_store(tmp_path / "large.lance", 1, 320, scale=20), []
    report = on_ray(store.path, cluster.address, Bounds(2, 2, SMALL), cpu_workers=1, say=said.append)
    starving = re.fullmatch(r".*encoders starve: raise --cpu-workers from 1 to (\d+).*", report.bottleneck)
    assert starving, report.bottleneck
    assert int(starving[1]) >= 2
    assert report.stages["encode"] < 0.5
    assert "encoders starve: raise --cpu-workers" in progress(said)[-1]


@nightly
def test_encoders_that_are_slow_are_the_limit(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cluster_prepare, "SAY_EVERY_S", 0.5)
    heavy = {"block_out_channels": [64, 64], "layers_per_block": 2}
    model = models.create("tiny", overrides={"vae": heavy}, parts=("vae", "text_encoder", "tokenizer"))
    store, said = made_store(tmp_path / "small.lance", 1, 96), []
    report = on_ray(store.path, cluster.address, Bounds(1, 1, SMALL), model, say=said.append, resolution=64)
    assert "encoding is the limit: raise --encoders above 1, or --fraction" in report.bottleneck
    assert report.stages["cpu"] < 0.5 < report.stages["encode"]
    assert "encoding is the limit: raise --encoders above 1" in progress(said)[-1]
