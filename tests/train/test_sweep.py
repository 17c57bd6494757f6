"""Sweeps and budgets: several runs under one budget, and what stops them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from darkroom import cli
from darkroom.errors import InputError, RecipeError, Stopped
from darkroom.recipe import Recipe, read_sweep
from darkroom.run import Run, compare
from darkroom.train import run as sweeps
from darkroom.train.run import run_names, sweep, train
from darkroom.train.trainer import TrainResult
from train.conftest import MakeRecipe


def recipe_file(recipe_of: MakeRecipe, folder: Path, *overrides: str) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(recipe_of("pretrain", *overrides).model_dump(mode="json")))
    return file


def test_values_with_commas_are_recipes_but_texts_are_not(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    file = recipe_file(recipe_of, tmp_path)
    with pytest.raises(RecipeError, match="train.seed: not readable as YAML: '010'"):
        read_sweep(file, ["train.seed=010,5"])
    found = read_sweep(file, ["optim.lr=1e-5,5e-5,1e-4", "train.seed=0,1", "train.steps=3"])
    assert [settings for settings, _ in found][:3] == [
        {"optim.lr": "1e-5", "train.seed": 0},
        {"optim.lr": "1e-5", "train.seed": 1},
        {"optim.lr": "5e-5", "train.seed": 0},
    ]
    assert {(r.optim.lr, r.train.seed, r.train.steps) for _, r in found} == {
        (lr, seed, 3) for lr in (1e-5, 5e-5, 1e-4) for seed in (0, 1)
    }
    one = read_sweep(file, ["data.filter=a,b", "sample.prompts=[a dog, a cat]", "track={tensorboard: false}"])
    assert len(one) == 1


def test_a_sweep_from_the_command_line(recipe_of: MakeRecipe, tmp_path: Path, capsys) -> None:
    file, out = recipe_file(recipe_of, tmp_path, "train.steps=2"), tmp_path / "rates"
    arguments = ["train", str(file), "optim.lr=1e-3,2e-3", "train.seed=5", "--out", str(out), "--json"]
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 0
    told = json.loads(capsys.readouterr().out)
    runs = [out / "rates-lr-1e-3", out / "rates-lr-2e-3"]
    assert [run["run"] for run in told] == [str(run) for run in runs]
    assert [(run["settings"], run["failure"]) for run in told] == [
        ({"optim.lr": "1e-3"}, ""),
        ({"optim.lr": "2e-3"}, ""),
    ]
    assert [Run.open(run).recipe["optim"]["lr"] for run in runs] == [1e-3, 2e-3]
    third = train(recipe_of("pretrain", "train.steps=2", "optim.lr=4e-3"), out=tmp_path / "c", console=print)
    side_by_side = compare(*runs, third.run)
    assert side_by_side["settings"]["optim.lr"] == (1e-3, 2e-3, 4e-3)
    assert len(side_by_side["metrics"]["loss"]) == 3
    with pytest.raises(SystemExit) as left:
        cli.main(["runs", "compare", *map(str, runs), str(third.run)])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert ["optim.lr", "0.001", "0.002", "0.004"] in [line.split() for line in shown.splitlines()]
    assert "{" not in shown


def test_a_run_that_diverges_or_finds_no_memory_is_noted_and_the_others_are_made(
    recipe_of: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = recipe_file(recipe_of, tmp_path, "train.steps=3"), tmp_path / "rates"
    whole = sweeps.train

    def short_of_memory(recipe: Recipe, **given: Any) -> TrainResult:
        if recipe.optim.lr == 3e-3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(recipe, **given)

    monkeypatch.setattr(sweeps, "train", short_of_memory)

    def swept(rates: str) -> tuple[int, str, list[dict[str, Any]]]:
        arguments = [
            "train",
            str(file),
            f"optim.lr={rates}",
            "train.nonfinite_policy=stop",
            "optim.clip_norm=null",
        ]
        with pytest.raises(SystemExit) as left:
            cli.main([*arguments, "--out", str(out), "--json"])
        printed = capsys.readouterr()
        return left.value.code, printed.err, json.loads(printed.out)

    code, said, told = swept("10,3e-3,1e-3")
    assert code == 0
    assert [one["failure"].partition(" of step")[0] for one in told] == ["the loss", "out of memory", ""]
    assert "warning: rates-lr-3e-3: out of memory" in said
    assert [Path(one["run"]).name for one in told] == ["rates-lr-10", "rates-lr-3e-3", "rates-lr-1e-3"]
    assert Run.open(told[2]["run"]).outputs == [out / "rates-lr-1e-3" / "model"]
    assert Run.open(told[0]["run"]).recipe["optim"]["lr"] == 10
    # Without the bad value the others are where they were.
    assert swept("2e-3,1e-3")[1].count("is finished") == 1
    code, said, told = swept("10,3e-3")
    assert code == 1
    assert said.endswith("darkroom: none of 2 runs got to its end\n")


def test_names_of_a_sweeps_runs(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    one = [{"optim.lr": "1e-5", "train.seed": 3}, {"optim.lr": 0.5, "train.seed": True}]
    assert run_names(one) == ["lr-1e-5_seed-3", "lr-0.5_seed-true"]
    assert run_names([{"model.seed": 1, "train.seed": 2}]) == ["model.seed-1_train.seed-2"]
    long = run_names([{"model.base": end * 150} for end in "ab"])
    assert [len(name) for name in long] == [100, 100]
    assert len(set(run_names([{"model.base": "a" * 150 + end} for end in "ab"]))) == 2
    # On Windows and macOS the first two would be one folder's.
    alike = run_names([{"word": text} for text in ("Dog", "dog", "cat")])
    assert len({name.casefold() for name in alike}) == 3
    assert alike[2] == "word-cat"
    file = recipe_file(recipe_of, tmp_path)
    with pytest.raises(InputError, match=r"the sweep has lr-1e-5 twice"):
        sweep(file, ["optim.lr=1e-5,1e-5"], out=tmp_path / "s")


def test_a_mistake_in_one_run_is_found_before_the_first_begins(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    file, out = recipe_file(recipe_of, tmp_path), tmp_path / "s"
    with pytest.raises(RecipeError, match="optim.warmup_steps: 900 is more than train.steps"):
        sweep(file, ["optim.warmup_steps=0,900"], out=out, console=lambda _: None)
    assert not out.exists()


def test_a_budget_stops_with_the_state_saved_and_more_goes_on(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    little, out = ("budget.hours=1e-9", "train.steps=4"), tmp_path / "run"
    with pytest.raises(Stopped, match="budget.hours 1e-09 is spent"):
        train(recipe_of("pretrain", *little), out=out, console=lambda _: None)
    assert not Run.open(out).outputs
    result = train(recipe_of("pretrain", "budget.hours=5", "train.steps=4"), out=out, console=lambda _: None)
    assert result.steps == 4
    dollars = recipe_of("pretrain", "budget.usd=1e-9", "train.steps=4")
    if result.bill.usd is not None:
        with pytest.raises(Stopped, match="budget.usd 1e-09"):
            train(dollars, out=tmp_path / "dollars", console=lambda _: None)


def test_a_sweeps_budget_is_that_of_all_its_runs(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    file = recipe_file(recipe_of, tmp_path, "train.steps=2")
    rates = "optim.lr=1e-3,2e-3"
    results = sweep(file, [rates], out=tmp_path / "s", console=lambda _: None)
    used_h = results[0].bill.wall_s / 3600
    # What the first run used is more than there is: the second is not begun.
    with pytest.raises(Stopped, match="is spent"):
        sweep(file, [rates, f"budget.hours={used_h / 2}"], out=tmp_path / "s", console=lambda _: None)
