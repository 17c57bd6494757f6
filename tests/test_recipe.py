"""Recipes: read, overridden, written back, and every kind of mistake told in one line."""

from __future__ import annotations

import pytest

from darkroom.errors import RecipeError
from darkroom.recipe import make_recipe, read_recipe

GOOD = """
task: pretrain
model: {base: tiny}
data: {store: pictures.lance, resolution: 64}
optim: {lr: 1e-4}
"""


@pytest.fixture
def recipe_file(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(GOOD)
    return file


def test_a_recipe_is_read_with_its_defaults(recipe_file):
    recipe = read_recipe(recipe_file)
    assert recipe.optim.lr == 1e-4  # PyYAML reads 1e-4 as text
    assert recipe.data.encode == "stored"
    assert recipe.train.global_batch == 64


def test_overrides_go_by_path_and_the_last_wins(recipe_file):
    recipe = read_recipe(
        recipe_file, ["optim.lr=2e-4", "train.steps=7", "train.ema.decay=0.9", "train.steps=8"]
    )
    assert (recipe.optim.lr, recipe.train.steps, recipe.train.ema.decay) == (2e-4, 8, 0.9)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("a photo of sks dog #1", "a photo of sks dog #1"),
        ("note: a dog, sitting", "note: a dog, sitting"),
        ("yes", "yes"),
        ("'quoted #1'", "quoted #1"),
        ("[a dog, a cat]", ("a dog", "a cat")),
        ("null", None),
        ("", None),
    ],
)
def test_prompts_are_taken_as_they_are_said(recipe_file, given, taken):
    assert read_recipe(recipe_file, [f"data.prompt={given}"]).data.prompt == taken


def test_a_resolved_recipe_reads_back_the_same(recipe_file, tmp_path):
    recipe = read_recipe(recipe_file, ["data.filter=width >= 64", "model.unet={layers_per_block: 2}"])
    (tmp_path / "resolved.yaml").write_text(recipe.dump())
    assert read_recipe(tmp_path / "resolved.yaml") == recipe
    assert read_recipe(tmp_path / "resolved.yaml", ["train.seed=1"]) != recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.steps=5", "trian: no such key; allowed: task, model.*did you mean 'train'"),
        ("train.step=5", "train.step: no such key; allowed: steps.*did you mean 'steps'"),
        ("train.ema.decya=0.5", "train.ema.decya: no such key.*did you mean 'decay'"),
        ("train.steps=many", "train.steps: 'many' was given; allowed: a valid integer"),
        ("train.steps=0", "train.steps: 0 was given; allowed: greater than 0"),
        ("task=trian", "task: 'trian' was given; allowed: 'autoencoder'"),
        ("data.resolution=100", "data.resolution: 100 was given; allowed: a multiple of 8"),
        ("data.store=null", "data.store: missing; say where the pictures are"),
        ("data.filter=[1]", "data.filter: .1. was given; allowed: a valid string"),
        ("train.steps", "train.steps: not an override; allowed: key=value"),
        ("task.steps=4", "task.steps: 'task' holds a value"),
        ("data.filter=[", "data.filter: not readable as YAML"),
    ],
)
def test_a_mistake_is_one_line_with_its_path(recipe_file, override, message):
    with pytest.raises(RecipeError, match=message) as caught:
        read_recipe(recipe_file, [override])
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(recipe_file):
    recipe_file.write_text("task: pretrain\nmodel: {base: tiny}\n")
    with pytest.raises(RecipeError, match="^data: missing; say it in .*job.yaml or as data=VALUE"):
        read_recipe(recipe_file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: pretrain\ntask: autoencoder\n", "the key 'task' is given twice"),
        ("- a\n", "not a recipe; allowed: a mapping of task"),
        ("task: [", "not readable as YAML"),
        ("", "not a recipe"),
    ],
)
def test_a_file_that_is_no_recipe(recipe_file, text, message):
    recipe_file.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        read_recipe(recipe_file)
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_the_nearest(recipe_file):
    with pytest.raises(RecipeError, match=r"no such recipe file; did you mean '.*job\.yaml'"):
        read_recipe(recipe_file.with_name("jop.yaml"))


def test_several_mistakes_are_counted():
    with pytest.raises(RecipeError, match="and 2 more in recipe"):
        make_recipe({"task": "pretrain", "model": {}, "data": {}, "optim": {"lr": -1}, "x": 1})


def test_the_callers_dictionary_is_left_alone():
    content = {"task": "pretrain", "model": {"base": "tiny"}, "data": {"store": "a"}}
    assert make_recipe(content, ["data.store=b", "train.steps=3"]).data.store == "b"
    assert content == {"task": "pretrain", "model": {"base": "tiny"}, "data": {"store": "a"}}
