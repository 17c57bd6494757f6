"""Batches that a cluster encodes are those of encode=inline, also in mid-epoch and when an encoder dies."""

from __future__ import annotations

import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_material import SMALL, made_store

from darkroom.cluster.feed import online
from darkroom.data import Store
from darkroom.errors import InputError, RecipeError
from darkroom.recipe import Recipe, make_recipe
from darkroom.train import train
from darkroom.train.feed import make_order
from darkroom.train.job import Pinned, make_job, select_rows
from darkroom.train.ranks import Ranks

pytestmark = pytest.mark.slow
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


def test_loss_and_rows_are_those_of_inline(cluster, store_path, tmp_path) -> None:
    inline = train(recipe_of(store_path, "inline"), out=tmp_path / "inline", console=lambda _: None)
    recipe, said = recipe_of(store_path, "online"), []
    with online(recipe, say=said.append) as feed:
        train(recipe, out=tmp_path / "online", feed=feed, console=lambda _: None)
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
    # In mid-epoch the same batches come; crops and flips are fresh in each epoch.
    for (rows, mine), (their_rows, theirs) in zip(later, plain[7:], strict=True):
        assert rows == their_rows
        assert torch.equal(mine["latents"], theirs["latents"])
    assert not torch.equal(plain[0][1]["latents"], plain[5][1]["latents"])
    assert said
    assert said[0].startswith("online encoding: cpu stage ")


def test_a_stopped_run_goes_on_to_the_same_weights(cluster, store_path, tmp_path) -> None:
    recipe = recipe_of(store_path, "online")
    with online(recipe) as feed:
        train(recipe, out=tmp_path / "whole", feed=feed, console=lambda _: None)

        class Cut:
            """The same feed, whose process ends before batch 6."""

            def bound(self, *arguments: Any) -> Any:
                whole = feed.bound(*arguments)

                @contextmanager
                def cut(k: int) -> Any:
                    with whole(k) as batches:
                        yield (batch for i, batch in enumerate(batches, k) if i < 6 or not _end())

                return cut

        def _end() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=tmp_path / "cut", feed=Cut(), console=lambda _: None)
        assert len(losses(tmp_path / "cut")) < STEPS
        train(recipe, out=tmp_path / "cut", feed=feed, console=lambda _: None)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_dead_encoders_blocks_are_asked_again(cluster, store_path, tmp_path) -> None:
    import ray

    recipe, said = recipe_of(store_path, "online", "train.steps=40"), []
    with online(recipe, say=said.append) as feed:
        job = make_job(recipe, Pinned(tmp_path / "a"), feed)
        with job.feed(0) as batches:
            found = [next(batches) for _ in range(3)]
            _, handle = ray.get(feed.keeper.state.remote(0, 0, {}, []))[0]
            os.kill(ray.get(handle.ping.remote()), signal.SIGKILL)
            found += [next(batches) for _ in range(37)]
    inline = make_job(recipe_of(store_path, "inline", "train.steps=40"), Pinned(tmp_path / "b"))
    device = torch.device("cpu")
    with inline.feed(0) as batches:
        for mine, theirs in zip(found, batches, strict=True):
            latents = (job.task.inputs(columns, device)["latents"] for columns in (mine, theirs))
            assert torch.equal(*latents)
    assert "1 encoders were lost and replaced" in said


def test_ranks_share_a_batch_evenly(cluster, store_path, tmp_path) -> None:
    """Two ranks' shares, one after the other, are the batch of one."""
    recipe = recipe_of(store_path, "online")

    class Told(Ranks):
        def in_turn(self, work: Any) -> None:
            work()

    with online(recipe) as feed:
        job = make_job(recipe, Pinned(tmp_path / "a"), feed)
        store = Store.open(store_path)
        order = make_order(recipe, job.task, store, select_rows(store, recipe)[0])
        shares = []
        for rank in range(2):
            ranks = Told(rank, 2)
            with feed.bound(recipe, job.task, [store], order, torch.device("cpu"), ranks)(2) as batches:
                shares.append(next(batches))
        with job.feed(2) as batches:
            whole = next(batches)
    assert {len(share["moments"]) for share in shares} == {4}
    assert torch.equal(torch.cat([share["noise"] for share in shares]), whole["noise"])
    assert torch.allclose(
        torch.cat([share["moments"] for share in shares]).float(), whole["moments"].float(), atol=4e-3
    )


def test_what_cannot_be_is_told(cluster, store_path, tmp_path) -> None:
    with pytest.raises(RecipeError, match="online, but there is nobody to encode; train with --engine ray"):
        train(recipe_of(store_path, "online"), out=tmp_path / "run")
    with pytest.raises(RecipeError, match="online with the task autoencoder"):
        recipe_of(store_path, "online", "task=autoencoder")
    recipe = recipe_of(store_path, "online", "data.online.accelerator=H100")
    with pytest.raises(InputError, match="accelerator 'H100' is not in the cluster"), online(recipe):
        pass
    with pytest.raises(InputError, match="at least one more, to read and decode"):  # noqa: SIM117
        with online(recipe_of(store_path, "online"), reserved_cpus=8):
            pass
