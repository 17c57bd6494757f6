"""Steps that go wrong: seen late, told with their rows, stopped at, left out, or gone back from."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from darkroom.errors import DarkroomError, RecipeError, Stopped
from darkroom.hardware import machine
from darkroom.hardware.prices import price
from darkroom.train.jobs import Pinned
from darkroom.train.run import train
from darkroom.train.setup import make_job

BAD = 5  # the step, from 1, whose batch is spoiled


def spoiled_feed(recipe, where: Path, times: int = 100):
    """The recipe's own batches, with no numbers in the noise of one of them."""
    job = make_job(recipe, Pinned(where))
    left = [times]

    @contextmanager
    def feed(k: int):
        with job.feed(k) as batches:

            def each():
                for i, columns in enumerate(batches, k + 1):
                    if i == BAD and left[0]:
                        left[0] -= 1
                        columns["noise"][0] = torch.nan
                    yield columns

            yield each()

    return feed


def run_with(recipe_of, tmp_path: Path, policy: str, name: str = "run", *more: str, **extra):
    recipe = recipe_of(
        "pretrain", f"train.nonfinite_policy={policy}", "train.steps=8", "checkpoint.every=2", *more
    )
    said: list[str] = []
    feed = spoiled_feed(recipe, tmp_path / "job", **extra)
    try:
        train(recipe, out=tmp_path / name, feed=feed, console=said.append)
    finally:
        told = tmp_path / name / "odd_batches.jsonl"
        notes = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    return said, notes, {row["step"]: row.get("loss") for row in rows}


def test_stops_and_says_which_rows(recipe_of, tmp_path):
    with pytest.raises(DarkroomError, match="loss of step 5 is nan; the checkpoint of step 4 is kept"):
        run_with(recipe_of, tmp_path, "stop")
    [note] = [json.loads(line) for line in (tmp_path / "run" / "odd_batches.jsonl").read_text().splitlines()]
    assert (note["step"], note["done"], note["loss"]) == (BAD, "stop", "nan")


def test_skip_leaves_the_weights_as_they_are(recipe_of, tmp_path):
    said, notes, losses = run_with(recipe_of, tmp_path, "skip")
    assert any("1 steps left out" in line for line in said)
    assert [note["step"] for note in notes] == [BAD]
    assert losses[BAD] is None
    assert all(losses[step] is not None for step in (6, 7, 8))


def test_rollback_goes_on_without_the_batch(recipe_of, tmp_path):
    said, notes, losses = run_with(recipe_of, tmp_path, "rollback")
    assert any("going on after step 4" in line for line in said)
    assert [(note["step"], note["to"], note["done"]) for note in notes] == [(BAD, 4, "rollback")]
    assert sorted(losses) == [1, 2, 3, 4, 6, 7, 8]
    skipped = run_with(recipe_of, tmp_path, "skip", "other")[2]
    assert [losses[step] for step in (6, 7)] == [skipped[step] for step in (6, 7)]  # the same weights


def test_the_rows_are_those_of_the_batch(recipe_of, tmp_path):
    recipe = recipe_of("pretrain", "train.spike_norm=1e-9", "train.steps=2")
    with pytest.raises(DarkroomError, match="grad_norm of step 1"):
        train(recipe, out=tmp_path / "run", console=lambda _: None)
    note = json.loads((tmp_path / "run" / "odd_batches.jsonl").read_text().splitlines()[0])
    job = make_job(recipe, Pinned(tmp_path / "job"))
    assert job.rows_of is not None
    assert note["rows"] == job.rows_of(0)
    assert len(set(note["rows"])) == recipe.train.global_batch
    assert note["rows"] != job.rows_of(1)


def test_metrics_tell_memory_cost_and_what_it_will_come_to(recipe_of, tmp_path):
    train(recipe_of("pretrain"), out=tmp_path / "run", console=lambda _: None)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [row for row in rows if "memory_bytes" in row]
    assert told
    assert all(row["memory_bytes"] > 2**20 for row in told)
    if price(machine().cpu_class) is None:  # nobody in the table rents out such a CPU: no money is made up
        assert not any("usd" in row or "usd_projected" in row for row in rows)
        return
    assert all(row["usd_projected"] >= row["usd"] > 0 for row in told)
    assert told[-1]["usd_projected"] == told[-1]["usd"]


def test_a_deadline_stops_with_the_state_saved(recipe_of, tmp_path):
    with pytest.raises(Stopped, match=r"budget.deadline 2020-01-01"):
        train(
            recipe_of("pretrain", "budget.deadline=2020-01-01T00:00"),
            out=tmp_path / "run",
            console=lambda _: None,
        )


def test_skip_wants_an_optimiser_that_can(recipe_of):
    with pytest.raises(RecipeError, match="train.nonfinite_policy: skip with optim.name=muon"):
        recipe_of("pretrain", "train.nonfinite_policy=skip", "optim.name=muon")
