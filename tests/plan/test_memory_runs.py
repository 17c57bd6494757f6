"""benchmarks/plan/memory_runs.py: its cases are recipes that train, each another one."""

from __future__ import annotations

import json

import pytest

from darkroom.errors import RecipeError
from darkroom.recipe import make_recipe
from scripts import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("benchmarks/plan/memory_runs.py")


def test_every_case_is_a_recipe_of_its_own(script, tmp_path, monkeypatch):
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    recipes = [case.recipe for case in script.CASES if case.recipe]
    for recipe in recipes:
        made = make_recipe(recipe)
        assert (made.train.steps, made.train.device) == (2, "cpu")
    assert len({json.dumps(recipe, sort_keys=True) for recipe in recipes}) == len(recipes)
    assert len({case.name for case in script.CASES}) == len(script.CASES)
    with pytest.raises(RecipeError):
        make_recipe(recipes[0] | {"optim": {"fused_backward": True, "clip_norm": 1.0}})


def test_the_table_of_sd15_has_a_row_for_every_setting_that_changes_its_memory(script):
    recipes = [case.recipe for case in script.CASES if case.recipe.get("model", {}).get("base") == "sd15"]
    assert {one["model"].get("base_precision") for one in recipes} == {None, "fp8", "int8", "nf4"}
    assert {one["train"].get("gradient_checkpointing", False) for one in recipes} == {True, False}
    assert {one.get("optim", {}).get("name", "adamw") for one in recipes} >= {
        "adamw",
        "adamw8bit",
        "adafactor",
        "lion",
    }
    fused = [one for one in recipes if one.get("optim", {}).get("fused_backward")]
    assert {one["task"] for one in fused} == {"finetune"}
    assert {one["train"]["precision"] for one in recipes} == {"float32", "bf16"}
