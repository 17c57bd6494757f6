"""A run goes on with the pictures and the base that it was started with, and with no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from subjects import recipe_for

from darkroom import models
from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store
from darkroom.errors import InputError
from darkroom.recipe import Recipe
from darkroom.run import Run
from darkroom.train.contents import contents_of, sampled
from darkroom.train.run import train
from train.conftest import MakeRecipe

OTHER = "has other pictures or captions at version .* than the run was started with; .*--resume never"


def paint(folder: Path, *, colours: int = 0, caption: str = "picture", count: int = 12) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = np.random.default_rng([colours, i]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
        (folder / f"{i:02d}.txt").write_text(f"{caption} {i}")
    return folder


def store_of(folder: Path, path: Path) -> Path:
    import_pictures(folder, Store.create(path))
    return path


def go(recipe: Recipe, run: Path, until: int | None = None) -> list[str]:
    """Train, as if killed after a step where one is given; what was said."""
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if until is not None and line.startswith(f"step {until}/"):
            raise KeyboardInterrupt

    try:
        train(recipe, out=run, console=hear)
    except KeyboardInterrupt:
        assert until is not None
    return said


STEPS = ("train.steps=4", "checkpoint.every=2", "train.log_every=1", "train.ema.enabled=false")


@pytest.fixture(scope="module")
def begun(recipe_of: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a run of two steps on it."""
    folder = tmp_path_factory.mktemp("begun")
    store_of(paint(folder / "pictures"), folder / "a.lance")
    go(recipe_of("pretrain", *STEPS, f"data.store={folder / 'a.lance'}"), folder / "run", until=3)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("other pictures", OTHER),
        ("other captions", OTHER),
        ("another order", OTHER),
        ("the same again", None),
        ("a copy elsewhere", None),
    ],
)
def test_another_store_in_the_same_place_is_refused(
    begun: Path, recipe_of: MakeRecipe, tmp_path: Path, change: str, message: str | None
) -> None:
    """As many rows and the same version number, but others: it went on without a word."""
    shutil.copytree(begun / "run", tmp_path / "run")
    store = tmp_path / "b.lance"
    if change == "a copy elsewhere":
        shutil.copytree(begun / "a.lance", store)
    elif change == "another order":
        renamed = paint(tmp_path / "in")
        for ending in ("png", "txt"):
            (renamed / f"00.{ending}").rename(renamed / f"99.{ending}")
        store_of(renamed, store)
    else:
        colours, caption = change == "other pictures", "an" if change == "other captions" else "picture"
        store_of(paint(tmp_path / "in", colours=int(colours), caption=caption), store)
    was, now = Store.open(begun / "a.lance"), Store.open(store)
    assert (was.num_rows, was.version) == (now.num_rows, now.version)
    recipe = recipe_of("pretrain", *STEPS, f"data.store={store}")
    if message is None:
        assert "going on after step 2 of 4" in go(recipe, tmp_path / "run")
        assert Run.open(tmp_path / "run").metrics()[-1]["step"] == 4
        return
    before = json.loads((tmp_path / "run" / "environment.json").read_text())
    with pytest.raises(InputError, match=message) as caught:
        go(recipe, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert json.loads((tmp_path / "run" / "environment.json").read_text()) == before  # nothing is lost


def test_a_run_of_before_fingerprints_goes_on_and_pins_them(
    begun: Path, recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    shutil.copytree(begun / "run", tmp_path / "run")
    file = tmp_path / "run" / "environment.json"
    told = json.loads(file.read_text())
    (pinned,) = told["store"].pop("contents")
    file.write_text(json.dumps(told))
    go(recipe_of("pretrain", *STEPS, f"data.store={begun / 'a.lance'}"), tmp_path / "run")
    assert json.loads(file.read_text())["store"]["contents"] == [pinned]
    assert sorted(pinned) == ["files", "rows"]


def test_a_fingerprint_is_of_rows_and_not_of_how_they_lie(tmp_path: Path) -> None:
    store = Store.open(store_of(paint(tmp_path / "in"), tmp_path / "a.lance"))
    (whole,) = contents_of(store, None)
    shutil.copytree(tmp_path / "a.lance", tmp_path / "copy.lance")
    assert contents_of(Store.open(tmp_path / "copy.lance"), None) == [whole]
    split = Store.create(tmp_path / "split.lance")
    rows = store.take(range(12), store.dataset.schema.names)
    for start, count in ((0, 5), (5, 4), (9, 3)):
        split.append(rows.slice(start, count))
    assert split.num_rows == 12
    (cut,) = contents_of(split, None)
    assert cut["rows"] == whole["rows"]
    assert cut["files"] != whole["files"]
    store.delete(ids=[rows["id"][3].as_py()])
    (fewer,) = contents_of(store, None)
    assert fewer["rows"] != whole["rows"]
    assert fewer["files"] != whole["files"]


def spoil(part: str) -> Callable[[Path], None]:
    """Other weights in a part of a model folder, as fine-tuning leaves them."""

    def change(base: Path) -> None:
        (file,) = (base / part).glob("*.safetensors")
        held = {name: value * 1.001 for name, value in load_file(file).items()}
        save_file(held, file, metadata={"format": "pt"})

    return change


def scaled(base: Path) -> None:
    file = base / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"scaling_factor": 0.5}))


def in_halves(base: Path) -> None:
    """The same weights in other files."""
    model = models.load(base)
    assert model.vae is not None
    shutil.rmtree(base / "vae")
    model.vae.save_pretrained(str(base / "vae"), max_shard_size="100KB")
    assert len(list((base / "vae").glob("*.safetensors"))) > 1


@pytest.fixture(scope="module")
def adapter_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    shutil.copytree(base, folder / "base")
    paint(folder / "photos", count=3)
    go(adapter_recipe(folder), folder / "run", until=3)
    return folder


def adapter_recipe(folder: Path) -> Recipe:
    return recipe_for("lora", folder / "base", folder / "photos", "data.encode=inline", *STEPS)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (spoil("unet"), "unet"),
        (spoil("vae"), "vae"),
        (spoil("text_encoder"), "text_encoder"),
        (scaled, "scaling of latents"),
        (in_halves, None),
    ],
    ids=["unet", "vae", "text", "scaling", "the same in halves"],
)
def test_another_base_in_the_same_place_is_refused(
    adapter_run: Path, change: Callable[[Path], None], part: str | None
) -> None:
    """An adapter is of the base that it was begun on."""
    kept = adapter_run / "kept"
    shutil.copytree(adapter_run / "base", kept / "base")
    shutil.copytree(adapter_run / "run", kept / "run")
    try:
        change(adapter_run / "base")
        if part is None:
            assert "going on after step 2 of 4" in go(adapter_recipe(adapter_run), adapter_run / "run")
            return
        message = f"^model.base: in '.*base' the {part} is another than the run was started with; .*never"
        with pytest.raises(InputError, match=message):
            go(adapter_recipe(adapter_run), adapter_run / "run")
    finally:
        for name in ("base", "run"):
            shutil.rmtree(adapter_run / name)
            (kept / name).rename(adapter_run / name)
        kept.rmdir()


def test_weights_are_told_apart_wherever_they_differ() -> None:
    """In names, shapes, and at the start, the middle and the end of a tensor."""
    linear = torch.nn.Linear(100, 100)
    before = sampled(linear)
    assert sampled(linear) == before
    for place in ((0, 0), (50, 0), (99, 99)):
        with torch.no_grad():
            linear.weight[place] += 1
        assert sampled(linear) != before
        with torch.no_grad():
            linear.weight[place] -= 1
    assert sampled(torch.nn.Sequential(linear)) != before
