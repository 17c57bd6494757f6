"""The run folder: metrics that are whole, one process at a time, runs listed and compared."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from darkroom.bill import Bill
from darkroom.cli.application import app
from darkroom.errors import InputError
from darkroom.run import Run, compare, differences, is_free, list_runs, numbered_folder

RECIPE = {
    "task": "pretrain",
    "model": {"base": "tiny"},
    "train": {"steps": 3, "seed": 0},
    "optim": {"lr": 1e-4},
}


def make_run(path: Path, lr: float = 1e-4, steps: int = 3) -> Run:
    recipe = RECIPE | {"optim": {"lr": lr}}
    run = Run.create(path, yaml.safe_dump(recipe), {"threads": 2})
    run.log(*({"step": k, "loss": 1.0 / k + lr, "images_per_s": 10.0} for k in range(1, steps + 1)))
    return run


def test_metrics_are_appended_and_truncated_as_whole_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a full disk
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    run.truncate(2)
    assert [row["step"] for row in run.metrics()] == [1, 2]
    run.log({"step": 3, "loss": 0.1})
    assert run.metrics()[-1] == {"step": 3, "loss": 0.1}
    run.truncate(-1)
    assert run.metrics() == []


def test_numbers_come_back_to_the_bit_and_what_is_no_number_as_null(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", yaml.safe_dump(RECIPE), {})
    run.log({"step": 1, "loss": 0.1 + 0.2, "by": {"62": 1 / 3}})
    run.log({"step": 2, "loss": math.nan, "by": {"62": math.inf}})
    first, second = run.metrics()
    assert first["loss"] == 0.1 + 0.2
    assert first["by"]["62"] == 1 / 3
    assert (second["loss"], second["by"]["62"]) == (None, None)


def test_a_run_is_made_once_and_opened_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert Run.open(tmp_path / "run").recipe == RECIPE
    assert run.environment == {"threads": 2}
    run.add_session({"threads": 4})
    run.add_session({"threads": 8})
    assert run.environment == {"threads": 8, "sessions": [{"threads": 2}, {"threads": 4}]}
    with pytest.raises(InputError, match="is a run already"):
        make_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"no run at .*runs there: run"):
        Run.open(tmp_path / "rnu")


def test_one_process_trains_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert not run.is_running()
    with run.lock():
        assert run.is_running()
        with pytest.raises(InputError, match="being trained by another process"), Run(run.path).lock():
            pass
    assert not run.is_running()


def test_runs_are_listed_with_how_far_they_are(tmp_path: Path) -> None:
    make_run(tmp_path / "a").model.mkdir()
    make_run(tmp_path / "b", steps=2)
    Bill(wall_s=9.0, usd=0.5, device="cpu").save(tmp_path / "b" / "bill.json")
    with make_run(tmp_path / "c").lock():
        found = {Path(one.path).name: one for one in list_runs(tmp_path)}
    assert {name: (one.state, one.step, one.steps) for name, one in found.items()} == {
        "a": ("finished", 3, 3),
        "b": ("stopped", 2, 3),
        "c": ("running", 3, 3),
    }
    assert (found["b"].usd, found["b"].wall_s, found["a"].usd) == (0.5, 9.0, None)
    assert found["a"].loss == pytest.approx(1 / 3 + 1e-4)
    assert json.loads(json.dumps(found["a"].to_dict()))["task"] == "pretrain"
    assert [Path(one.path).name for one in list_runs(tmp_path / "a")] == ["a"]
    with pytest.raises(InputError, match="no folder"):
        list_runs(tmp_path / "nowhere")


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", lr=3e-4, steps=2)
    told = compare(tmp_path / "a", tmp_path / "b")
    assert told["settings"] == {"optim.lr": (1e-4, 3e-4)}
    assert told["metrics"]["step"] == (3, 2)
    assert told["bill"] == {}
    same = compare(tmp_path / "a", tmp_path / "a")
    assert (same["settings"], same["metrics"], same["bill"]) == ({}, {}, {})


def test_runs_side_by_side_are_flat_and_show_what_differs(tmp_path: Path) -> None:
    for name, loss in (("a", 0.5), ("b", 0.25)):
        make_run(tmp_path / name).log({"step": 4, "heldout_loss_by_timestep": {"62": loss, "937": 0.125}})
        bill = Bill(wall_s=9, device_hours=0.1, device="cpu", images=8, parts={"train": loss, "sample": 1.0})
        bill.save(tmp_path / name / "bill.json")
    told = compare(tmp_path / "a", tmp_path / "b")
    assert told["metrics"] == {"heldout_loss_by_timestep.62": (0.5, 0.25)}
    assert told["bill"] == {"parts.train": (0.5, 0.25)}
    shown = CliRunner().invoke(app, ["runs", "compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert shown.exit_code == 0
    lines = [line.split() for line in shown.output.splitlines()]
    assert lines == [
        ["settings:", "the", "same"],
        [],
        ["metrics:", str(tmp_path / "a"), str(tmp_path / "b")],
        ["heldout_loss_by_timestep.62", "0.5", "0.25"],
        [],
        ["bill:", str(tmp_path / "a"), str(tmp_path / "b")],
        ["parts.train", "0.5", "0.25"],
        [],
    ]


def test_a_folder_without_runs_is_told_and_somebodys_own_recipe_hides_none(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("task: pretrain\n")
    shown = CliRunner().invoke(app, ["runs", "--root", str(tmp_path)])
    assert (shown.exit_code, shown.output) == (0, f"no runs in '{tmp_path}'\n")
    make_run(tmp_path / "a")
    assert [one.path for one in list_runs(tmp_path)] == [str(tmp_path / "a")]


DAMAGE = ["", "[]", "5", '{"a": ', "[" * 50_000, "\0", '"x"', '{"step": "x"}']


@pytest.mark.parametrize("content", DAMAGE)
@pytest.mark.parametrize("name", ["bill.json", "environment.json", "plan.json", "metrics.jsonl"])
def test_a_damaged_file_of_a_run_is_named_in_one_line_and_hides_no_other_run(
    tmp_path: Path, name: str, content: str
) -> None:
    """As a failing disk leaves it, or somebody's editor."""
    make_run(tmp_path / "whole")
    run = make_run(tmp_path / "run")
    (run.path / name).write_text(content + "\n")
    read = {
        "bill.json": run.bill,
        "plan.json": run.plan,
        "environment.json": lambda: run.environment,
        "metrics.jsonl": run.metrics,
    }
    if name == "metrics.jsonl":
        assert read[name]() == []
    elif (name, content) != ("environment.json", DAMAGE[-1]):
        with pytest.raises(InputError, match=f"run/{name}' is damaged: .*; bring back a copy") as error:
            read[name]()
        assert "\n" not in str(error.value)
    there = {Path(one.path).name for one in list_runs(tmp_path)}
    assert there == ({"whole"} if name == "bill.json" else {"whole", "run"})


def test_a_run_without_its_environment_is_damaged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "environment.json").unlink()
    with pytest.raises(InputError, match="environment.json' is missing"):
        _ = run.environment


def test_differences_are_told_by_dotted_key() -> None:
    told = differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": {"f": None, "g": 1}})
    assert told == {"a.c": (2, 5), "d": (3, None), "e.g": (None, 1)}


def test_numbered_folders(tmp_path: Path) -> None:
    assert numbered_folder(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    assert numbered_folder(tmp_path / "run") == tmp_path / "run-2"
    (tmp_path / "run-2").mkdir()
    assert numbered_folder(tmp_path / "run-2") == tmp_path / "run-3"
    (tmp_path / "rates-lr-1e-5").mkdir()
    assert numbered_folder(tmp_path / "rates-lr-1e-5") == tmp_path / "rates-lr-1e-5-2"


def test_what_a_killed_process_left_is_cleared_and_no_hindrance(tmp_path: Path) -> None:
    unborn = tmp_path / "unborn"
    (unborn / "checkpoints").mkdir(parents=True)
    (unborn / ".recipe.yaml.123").write_text("half")
    assert is_free(unborn)
    assert is_free(tmp_path / "nothing")
    run = make_run(unborn)
    (run.path / ".model-abc").mkdir()
    (run.path / ".model-abc" / "unet").write_text("half")
    with run.lock():
        run.tidy()
        assert sorted(path.name for path in run.path.glob(".*")) == [".lock"]
    assert len(run.metrics()) == 3
    assert not is_free(run.path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("no run")
    assert not is_free(tmp_path / "mine")
