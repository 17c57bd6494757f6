"""Runs that end where the held-out loss stands still, and what they leave: the best weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from subjects import recipe_for

from darkroom.run import Run
from darkroom.train import evaluation as looking
from darkroom.train.run import export, train


def test_training_ends_where_the_heldout_loss_stands_still(base: Path, photos: Path, tmp_path: Path) -> None:
    overrides = (
        "optim.lr=0.5",
        "train.steps=60",
        "evaluate.every=2",
        "evaluate.patience=3",
        "data.holdout=1",
    )
    said: list[str] = []
    recipe = recipe_for("lora", base, photos, *overrides, "optim.clip_norm=null")
    result = train(recipe, out=tmp_path / "run", console=said.append)
    assert 6 <= result.steps < 60
    assert any("has not got better for 3 evaluations" in line for line in said)
    assert json.loads((tmp_path / "run" / "ended.json").read_text()) == {"step": result.steps}
    rows = [row["heldout_loss"] for row in Run.open(result.run).metrics() if "heldout_loss" in row]
    assert min(rows) == rows[-4] == result.heldout_loss
    again: list[str] = []
    train(recipe, out=tmp_path / "run", console=again.append)
    assert again == [f"'{tmp_path / 'run'}' is finished: it ended early, after step {result.steps}"]


def test_the_best_weights_are_the_results(
    base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run that was killed and went on, long after the best evaluation's checkpoint is gone."""
    losses: Iterator[float] = iter(())

    def heldout(*_: Any) -> dict[str, Any]:
        return {"heldout_loss": next(losses)}

    monkeypatch.setattr(looking, "heldout_metrics", heldout)
    asked = ("train.steps=60", "evaluate.every=2", "evaluate.patience=3", "data.holdout=1")
    recipe = recipe_for("lora", base, photos, *asked, "checkpoint.every=2", "checkpoint.keep=9")
    losses, said = iter((5.0, 4.0, 3.0, 6.0, 7.0, 8.0)), []
    whole = train(recipe, out=tmp_path / "whole", console=said.append)
    assert (whole.steps, whole.results_step, whole.heldout_loss) == (10, 4, 3.0)
    assert "the results are the weights after step 4, of the best held-out loss" in said
    assert [row["best_step"] for row in Run.open(whole.run).metrics() if "best_step" in row][-2:] == [4, 4]
    left = load_file(whole.outputs[0])
    fourth = load_file(export(whole.run, tmp_path / "4.safetensors", checkpoint=4))
    newest = load_file(export(whole.run, tmp_path / "newest.safetensors"))
    last = load_file(export(whole.run, tmp_path / "10.safetensors", checkpoint=10))
    assert all(torch.equal(left[name], fourth[name]) for name in fourth)
    assert all(torch.equal(left[name], newest[name]) for name in newest)
    assert any(not torch.equal(left[name], last[name]) for name in last)

    few = recipe_for("lora", base, photos, *asked, "checkpoint.every=3", "checkpoint.keep=1")
    losses = iter((5.0, 4.0, 3.0, 6.0))
    with pytest.raises(StopIteration):
        train(few, out=tmp_path / "killed", console=lambda _: None)  # at its fifth evaluation
    losses = iter((7.0, 8.0))
    again = train(few, out=tmp_path / "killed", console=lambda _: None)
    assert (again.steps, again.results_step) == (10, 4)
    killed = load_file(again.outputs[0])
    assert all(torch.equal(left[name], killed[name]) for name in left)
