"""Recipes for the quickstart's own model: it learns a word (laptop) or to draw in four steps (four-steps)."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from darkroom import cli, models
from darkroom.quickstart import TOY, quickstart
from darkroom.quickstart.shapes import draw, scenes
from darkroom.recipe import read_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
RECIPE = RECIPES / "laptop.yaml"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    return int(left.value.code or 0)


def test_a_folder_replaces_the_quickstarts_pictures():
    mine = read_recipe(RECIPE, ["data.instance=photos/", "data.filter=null"])
    assert mine.data.store is None
    assert mine.data.prompts == ("a zog",)
    assert read_recipe(RECIPE).data.store == "quickstart/pictures.lance"


@pytest.mark.nightly
def test_the_quickstarts_model_learns_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart("quickstart", scale=TOY, quiet=True)
    short = [
        "train.steps=4",
        "train.global_batch=2",
        "checkpoint.every=2",
        "sample.every=4",
        "sample.steps=1",
    ]
    assert run("train", str(RECIPE), *short) == 0
    adapter = models.read_adapter(Path("runs/laptop/adapter.safetensors"))
    assert any(bool(layer.up.any()) for layer in adapter.layers.values())
    model = "quickstart/runs/pretrain/model"
    words = ["generate", model, "a zog", "--steps", "2", "--seed", "3"]
    assert run(*words, "--out", "before") == 0
    assert run(*words, "--adapter", "zog=runs/laptop/adapter.safetensors", "--out", "after") == 0
    before, after = (Image.open(next(Path(name).glob("*.png"))).tobytes() for name in ("before", "after"))
    assert before != after
    folder = Path("photos")
    folder.mkdir()
    for i, scene in enumerate(scenes(3)):
        draw(scene, 48).save(folder / f"{i}.png")
    assert (
        run("train", str(RECIPE), "data.instance=photos/", "data.filter=null", *short, "--out", "runs/mine")
        == 0
    )


@pytest.mark.nightly
def test_the_quickstarts_model_learns_to_draw_in_four_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart("quickstart", scale=TOY, quiet=True)
    short = ["train.steps=4", "train.global_batch=2", "checkpoint.every=2", "sample.every=4"]
    assert run("train", str(RECIPES / "four-steps.yaml"), *short) == 0
    taught, made = "quickstart/runs/pretrain/model", "runs/four-steps/model"
    weights = [models.load(folder).unet.state_dict() for folder in (taught, made)]
    assert any(not weights[0][name].equal(one) for name, one in weights[1].items())
    said = ["--steps", "4", "--guidance", "1", "--solver", "lcm"]
    drawn = {}
    for name, more in {"unasked": [], "said": said, "fewer": ["--steps", "2"]}.items():
        asked = ["a red star on a blue background", "--seed", "3", *more, "--out", name]
        assert run("generate", made, *asked) == 0
        drawn[name] = Image.open(next(Path(name).glob("*.png"))).tobytes()
    assert drawn["unasked"] == drawn["said"] != drawn["fewer"]
