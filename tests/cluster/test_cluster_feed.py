"""Batches that a cluster encodes are those of encode=inline, also in mid-epoch and when an encoder dies."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cluster_material import SMALL, fill, made_store
from safetensors.torch import load_file

import warm
from cluster.conftest import NODE
from darkroom.cluster import feed as cluster_feed
from darkroom.cluster.encoders import QUEUE, RankStatus
from darkroom.cluster.feed import online
from darkroom.cluster.train import Placement
from darkroom.cluster.train import train as train_on_ray
from darkroom.data.store import Store
from darkroom.errors import DarkroomError, InputError, RecipeError
from darkroom.recipe import Recipe, make_recipe
from darkroom.train.feed import make_order, select_rows
from darkroom.train.jobs import Pinned
from darkroom.train.ranks import Ranks
from darkroom.train.run import train
from darkroom.train.setup import make_job

pytestmark = pytest.mark.xdist_group("ray")
nightly = pytest.mark.nightly
VAE = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
STEPS = 12  # of 8 pictures: more than two epochs of 40


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(made_store(tmp_path_factory.mktemp("online") / "pictures.lance", 2, 20).path)


def recipe_of(store_path: str, encode: str, *overrides: str) -> Recipe:
    content = {
        "task": "pretrain",
        "model": {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT},
        "data": {
            "store": store_path,
            "resolution": 16,
            "encode": encode,
            "crop": "random",
            "flip": True,
            "caption_dropout": 0.2,
            "online": {"encoders": 2, "accelerator": SMALL, "cpu_workers": 2},
        },
        "train": {
            "steps": STEPS,
            "global_batch": 8,
            "micro_batch": 8,
            "precision": "float32",
            "log_every": 1,
            "ema": {"enabled": False},
        },
        "optim": {"lr": 2e-3},
        "checkpoint": {"every": 4},
    }
    return make_recipe(content, overrides)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, bytes]:
    """All trained numbers of a finished run, as bytes."""
    file = run / "model" / "unet" / "diffusion_pytorch_model.safetensors"
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def inputs_of(
    recipe: Recipe, out: Path, start: int, stop: int, feed: Any = None, ranks: Any = None
) -> list[Any]:
    """What the task makes of batches start to stop - 1, and which rows they hold."""
    job = make_job(recipe, Pinned(out), feed, ranks=ranks or Ranks())
    found = []
    with job.feed(start) as batches:
        for k in range(start, stop):
            found.append((job.rows_of(k), job.task.inputs(next(batches), torch.device("cpu"))))
    return found


@nightly
def test_one_machine_of_two_cpus_trains_encodes_and_decodes(laptop, store_path, tmp_path) -> None:
    """With captions encoded by the trainer nothing is rounded, so the weights are inline's to the bit."""
    alone = ("data.text=inline", "train.steps=6")
    inline = train(recipe_of(store_path, "inline", *alone), out=tmp_path / "inline", console=lambda _: None)
    said: list[str] = []
    recipe = recipe_of(store_path, "online", *alone, "data.online={encoders: 1}")
    place = Placement(laptop.address)
    train_on_ray(recipe, out=tmp_path / "online", placement=place, console=said.append)
    assert "reading, encoding and training share this machine's 2 CPUs" in said
    assert "online encoding: " in said[-1]
    assert all(int(share) <= 100 for share in re.findall(r"(\d+)%", said[-1]))
    assert losses(tmp_path / "online") == losses(inline.run)
    assert weights(tmp_path / "online") == weights(inline.run)
    other = recipe_of(store_path, "inline", *alone, "train.seed=1")
    train(other, out=tmp_path / "other", console=lambda _: None)
    assert weights(tmp_path / "other") != weights(inline.run)


@nightly
def test_loss_and_rows_are_those_of_inline(feed, store_path, tmp_path) -> None:
    inline = train(recipe_of(store_path, "inline"), out=tmp_path / "inline", console=lambda _: None)
    recipe = recipe_of(store_path, "online")
    train(recipe, out=tmp_path / "online", feed=feed, console=lambda _: None)
    assert "rows/s; cpu stage " in told(feed)[0]
    batches = inputs_of(recipe, tmp_path / "a", 0, STEPS, feed)
    later = inputs_of(recipe, tmp_path / "b", 7, STEPS, feed)
    expected = losses(inline.run)
    assert len(expected) == STEPS
    assert losses(tmp_path / "online") == pytest.approx(expected, abs=1e-3)
    other = train(recipe_of(store_path, "inline", "train.seed=1"), out=tmp_path / "x", console=lambda _: None)
    assert losses(other.run) != pytest.approx(expected, abs=1e-3)  # the control
    plain = inputs_of(recipe_of(store_path, "inline"), tmp_path / "c", 0, STEPS)
    for (rows, mine), (their_rows, theirs) in zip(batches, plain, strict=True):
        assert rows == their_rows
        assert torch.equal(mine["latents"], theirs["latents"])
        assert torch.equal(mine["noise"], theirs["noise"])
        assert torch.allclose(mine["text"].float(), theirs["text"], atol=4e-3)
    # In mid-epoch the same batches come.
    for (rows, mine), (their_rows, theirs) in zip(later, plain[7:], strict=True):
        assert rows == their_rows
        assert torch.equal(mine["latents"], theirs["latents"])


@pytest.fixture(scope="module")
def feed(cluster, store_path) -> Iterator[Any]:
    """Two encoders that all tests of this file share: the parts are the same."""
    with online(recipe_of(store_path, "online").data) as made:
        yield made


def told(feed: Any) -> list[str]:
    import ray

    return ray.get(feed.keeper.lines.remote())


@nightly
def test_crops_and_flips_are_fresh_in_each_epoch(feed, store_path, tmp_path) -> None:
    def changed(*overrides: str) -> int:
        """Of the 40 pictures, those that the second epoch shows in another way."""
        job = make_job(recipe_of(store_path, "online", *overrides), Pinned(tmp_path / "a"), feed)
        seen: list[dict[int, torch.Tensor]] = [{}, {}]
        with job.feed(0) as batches:
            for k in range(10):
                pairs = zip(job.rows_of(k), next(batches)["moments"].float(), strict=True)
                seen[k // 5].update(pairs)
        assert len(seen[0]) == len(seen[1]) == 40
        return sum(not torch.allclose(seen[0][row], seen[1][row], atol=4e-3) for row in seen[0])

    assert changed() >= 36
    assert changed("data.crop=centre", "data.flip=false") == 0


class Ended(Exception):
    """The feed broke; the checkpoint under way is still written."""


class Cut:
    """A feed whose process ends before batch 6, or that begins so many batches off."""

    def __init__(self, feed: Any, *, ends: bool = False, off: int = 0) -> None:
        self._feed, self._ends, self._off = feed, ends, off

    def bound(self, *arguments: Any) -> Any:
        whole = self._feed.bound(*arguments)

        @contextmanager
        def cut(k: int) -> Any:
            with whole(k + self._off) as batches:
                yield (self._checked(i, batch) for i, batch in enumerate(batches, k))

        return cut

    def _checked(self, i: int, batch: Any) -> Any:
        if self._ends and i == 6:
            raise Ended
        return batch


@nightly
def test_a_stopped_run_goes_on_to_the_same_weights(feed, store_path, tmp_path) -> None:
    """From the checkpoint of step 4, in the first epoch's middle; it ended at 6."""
    recipe = recipe_of(store_path, "online")
    train(recipe, out=tmp_path / "whole", feed=feed, console=lambda _: None)
    for name in ("cut", "control"):
        with pytest.raises(Ended):
            train(recipe, out=tmp_path / name, feed=Cut(feed, ends=True), console=lambda _: None)
        assert len(losses(tmp_path / name)) < STEPS
    train(recipe, out=tmp_path / "cut", feed=feed, console=lambda _: None)
    train(recipe, out=tmp_path / "control", feed=Cut(feed, off=-1), console=lambda _: None)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert weights(tmp_path / "control") != weights(tmp_path / "whole")


@nightly
def test_two_workers_one_of_them_killed_end_with_the_same_weights(cluster, store_path, tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(recipe_of(store_path, "online").model_dump(mode="json"))
    )

    def command(out: str) -> list[str]:
        job = [str(tmp_path / "recipe.yaml"), "parallel.mode=ddp", "train.steps=30"]
        job += ["parallel.devices=2", "train.micro_batch=4"]
        place = ["--engine", "ray", "--ray-address", cluster.address, "--out", str(tmp_path / out)]
        return [sys.executable, "-u", "-m", "darkroom", "train", *job, *place]

    settings = {"stdout": warm.PIPE, "stderr": warm.STDOUT, "text": True}
    with warm.Popen(command("killed"), **settings) as driver:
        checkpoints = tmp_path / "killed" / "checkpoints"
        until = time.monotonic() + 300
        while not list(checkpoints.glob("step-*/manifest.json")):
            assert driver.poll() is None, driver.stdout.read()
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(train_workers()[0], signal.SIGKILL)
        said, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, said
    assert "workers were lost and are started again" in said
    assert "online encoding: " in said
    calm = warm.run(command("calm"), timeout=300, **settings)
    assert calm.returncode == 0, calm.stdout
    assert weights(tmp_path / "killed") == weights(tmp_path / "calm")


def train_workers() -> list[int]:
    """Processes of the workers that train in this cluster now."""
    from ray._private.state import actors

    alive = [a for a in actors().values() if a["State"] == "ALIVE" and "TrainWorker" in a["ActorClassName"]]
    assert len(alive) == 2
    return [actor["Pid"] for actor in alive]


@nightly
def test_what_is_not_taken_is_not_made(feed, store_path, tmp_path) -> None:
    """A trainer that stands still holds up the encoders: so many batches lie ready, and no more."""
    recipe = recipe_of(store_path, "online", "train.steps=1000")
    job = make_job(recipe, Pinned(tmp_path / "a"), feed)
    with job.feed(0) as stream:
        next(stream)
        until = time.monotonic() + 30
        while stream.ready < stream.ahead:
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(1)
        assert stream.ready == stream.ahead == 8  # of one block: two an encoder, two a CPU task
        assert stream.stages.held == 0
        next(stream)
        time.sleep(1)
        assert stream.ready == stream.ahead


@nightly
def test_a_dead_encoders_blocks_are_asked_again(feed, store_path, tmp_path) -> None:
    import ray

    recipe = recipe_of(store_path, "online", "train.steps=40")
    job = make_job(recipe, Pinned(tmp_path / "a"), feed)
    with job.feed(0) as batches:
        found = [next(batches) for _ in range(3)]
        _, handle = ray.get(feed.keeper.state.remote(0, RankStatus()))[0]
        os.kill(ray.get(handle.ping.remote()), signal.SIGKILL)
        found += [next(batches) for _ in range(37)]
    inline = make_job(recipe_of(store_path, "inline", "train.steps=40"), Pinned(tmp_path / "b"))
    device = torch.device("cpu")
    with inline.feed(0) as batches:
        for mine, theirs in zip(found, batches, strict=True):
            latents = (job.task.inputs(columns, device)["latents"] for columns in (mine, theirs))
            assert torch.equal(*latents)
    [line] = [line for line in told(feed) if "lost" in line]
    assert line.startswith("1 encoders were lost and replaced, ")
    assert 1 <= int(line.split()[-4]) <= QUEUE  # what it had: one at work, one on the way


@nightly
def test_ranks_share_a_batch_evenly(feed, store_path, tmp_path) -> None:
    """Two ranks' shares, one after the other, are the batch of one."""
    recipe = recipe_of(store_path, "online")

    class NotWaiting(Ranks):
        def rank0_first(self, work: Any) -> None:
            work()

    job = make_job(recipe, Pinned(tmp_path / "a"), feed)
    store = Store.open(store_path)
    order = make_order(recipe.train, recipe.data, job.task, store, select_rows(store, recipe.data)[0])
    shares = []
    for rank in range(2):
        ranks = NotWaiting(rank, 2)
        with feed.bound(recipe.train, recipe.data, job.task, [store], order, torch.device("cpu"), ranks)(
            2
        ) as batches:
            shares.append(next(batches))
    with job.feed(2) as batches:
        whole = next(batches)
    assert {len(share["moments"]) for share in shares} == {4}
    assert torch.equal(torch.cat([share["noise"] for share in shares]), whole["noise"])
    assert torch.allclose(
        torch.cat([share["moments"] for share in shares]).float(), whole["moments"].float(), atol=4e-3
    )


@nightly
def test_buckets_are_cut_as_inline_cuts_them(feed, store_path, tmp_path) -> None:
    made = {}
    for encode in ("online", "inline"):
        recipe = recipe_of(store_path, encode, "data.buckets=true", "data.resolution=32")
        made[encode] = inputs_of(recipe, tmp_path / encode, 0, 6, feed if encode == "online" else None)
    shapes = {tuple(mine["latents"].shape) for _, mine in made["online"]}
    assert len(shapes) == 2
    for (rows, mine), (their_rows, theirs) in zip(made["online"], made["inline"], strict=True):
        assert rows == their_rows
        assert torch.equal(mine["latents"], theirs["latents"])


@nightly
def test_encoders_that_cannot_start_and_pictures_that_are_none(feed, store_path, tmp_path) -> None:
    class NoEncoder:
        def __init__(self, parts: Any) -> None:
            raise ValueError("no room for the weights")

        def ping(self) -> int:
            return 0

    recipe = recipe_of(store_path, "online")
    with online(recipe.data, encoder=NoEncoder) as broken:
        job = make_job(recipe, Pinned(tmp_path / "a"), broken)
        with (
            job.feed(0) as batches,
            pytest.raises(
                DarkroomError, match=r"no encoder could start: .*no room for the weights"
            ) as caught,
        ):
            next(batches)
    assert "\n" not in str(caught.value)
    store = Store.create(tmp_path / "broken.lance")
    fill(store, 0, 12, broken=(3,))
    said = {}
    for encode in ("inline", "online"):
        recipe = recipe_of(store.path, encode, "train.global_batch=12", "train.micro_batch=12")
        job = make_job(recipe, Pinned(tmp_path / encode), feed if encode == "online" else None)
        with job.feed(0) as batches, pytest.raises(DarkroomError) as caught:
            next(batches)
        said[encode] = type(caught.value), str(caught.value)
    assert said["online"] == said["inline"]


@nightly
def test_what_cannot_be_is_told(cluster, store_path, tmp_path) -> None:
    with pytest.raises(RecipeError, match="online, but there is nobody to encode; train with --engine ray"):
        train(recipe_of(store_path, "online"), out=tmp_path / "run")
    with pytest.raises(RecipeError, match="online with the task autoencoder"):
        recipe_of(store_path, "online", "task=autoencoder")
    recipe = recipe_of(store_path, "online", "data.online.accelerator=H100")
    with pytest.raises(InputError, match="accelerator 'H100' is not in the cluster"), online(recipe.data):
        pass
    with pytest.raises(InputError, match="at least one more, to read and decode"):  # noqa: SIM117
        with online(recipe_of(store_path, "online").data, reserved_cpus=8):
            pass


def all_taken() -> list[Any]:
    """Actors that take what CPUs the nodes of encoders have left."""
    import ray

    class Taken:
        pass

    kind = f"accelerator_type:{SMALL}"
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and kind in node["Resources"]]
    actors = [ray.remote(Taken).options(num_cpus=1, resources={kind: 0.001}).remote() for _ in range(6)]
    until = time.monotonic() + 120
    while any(ray._private.state.available_resources_per_node()[node].get("CPU") for node in nodes):
        assert time.monotonic() < until
        time.sleep(0.1)
    return actors


@nightly
def test_encoders_that_find_no_room_are_told_and_used_once_there_is_some(
    cluster, store_path, tmp_path, monkeypatch
) -> None:
    import ray

    monkeypatch.setattr(cluster_feed, "LOOK_S", 0.5)
    monkeypatch.setattr(cluster_feed, "SAID_EVERY_S", 3.0)
    recipe = recipe_of(store_path, "online", "data.online.encoders=1")
    said: list[tuple[float, str]] = []
    taken, began = all_taken(), time.monotonic()
    with (
        online(recipe.data, say=lambda line: said.append((time.monotonic(), line))) as made,
        make_job(recipe, Pinned(tmp_path / "a"), made).feed(0) as batches,
    ):
        while len(said) < 2 and time.monotonic() - began < 90:
            time.sleep(0.1)
        for actor in taken:
            ray.kill(actor)
        next(batches)
        count = len(said)
        time.sleep(4)
        assert len(said) == count  # nobody waits
    waits = "waiting for 1 of 1 encoders to start: each needs 1 CPUs on a node of type SMALL (2 up); free: "
    assert [line for _, line in said[:2]] == [f"{waits}0 of 6 CPUs"] * 2
    assert said[0][0] - began > 15  # that an encoder may take to start
    assert said[1][0] - said[0][0] >= 3


def encoders() -> dict[int, str]:
    """Processes of the encoders that live now, and their nodes."""
    from ray._private.state import actors

    alive = [a for a in actors().values() if (a["State"], a["ActorClassName"]) == ("ALIVE", "OnlineEncoder")]
    return {actor["Pid"]: actor["Address"]["NodeID"] for actor in alive}


@nightly
def test_all_nodes_with_encoders_are_lost_and_the_one_that_comes_is_used(
    cluster, feed, store_path, tmp_path
) -> None:
    recipe = recipe_of(store_path, "online", "train.steps=30")
    job = make_job(recipe, Pinned(tmp_path / "a"), feed)
    with job.feed(0) as batches:
        found = [next(batches) for _ in range(3)]
        before = encoders()
        assert len(before) == 2
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)
        for pid in before:  # a machine takes its processes with it; here they would live on for a while
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        new = cluster.add_node(**NODE)
        found += [next(batches) for _ in range(27)]
        assert set(encoders().values()) == {new.node_id}
    cluster.add_node(**NODE)
    inline = make_job(recipe_of(store_path, "inline", "train.steps=30"), Pinned(tmp_path / "b"))
    device = torch.device("cpu")
    with inline.feed(0) as batches:
        for mine, theirs in zip(found, batches, strict=True):
            latents = (job.task.inputs(columns, device)["latents"] for columns in (mine, theirs))
            assert torch.equal(*latents)
