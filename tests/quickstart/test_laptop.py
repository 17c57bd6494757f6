"""recipes/laptop.yaml: the quickstart's own model learns a word, from its own pictures or from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from darkroom import cli, models
from darkroom.quickstart import TOY, quickstart
from darkroom.quickstart.shapes import draw, scenes
from darkroom.recipe import read_recipe

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "laptop.yaml"


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
