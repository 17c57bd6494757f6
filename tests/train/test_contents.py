"""A run goes on with the pictures and the base that it was started with, and with no others."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
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
from darkroom.recipe.sections import ModelSettings
from darkroom.run import Run
from darkroom.train.contents import base_of, contents_of, sampled
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


class Killed(Exception):
    """A run is over after the checkpoint under way."""


def go(recipe: Recipe, run: Path, until: int | None = None) -> list[str]:
    """Train, as if killed after a step where one is given; what was said."""
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if until is not None and line.startswith(f"step {until}/"):
            raise Killed

    try:
        train(recipe, out=run, console=hear)
    except Killed:
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
    assert sorted(pinned) == ["files", "pictures", "rows"]


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


def scored(folder: Path, path: Path, *, first: bool) -> None:
    """A store of twelve pictures, of which a filter on `score` chooses the first or the last six."""
    lines = [
        json.dumps({"file_name": f"{i:02d}.png", "text": f"picture {i}", "score": int((i < 6) == first)})
        for i in range(12)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    shutil.rmtree(path, ignore_errors=True)
    store_of(folder, path)


def test_other_rows_chosen_by_the_same_filter_are_refused(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    """The same pictures and captions, scored anew: it went on with the others without a word."""
    folder, store = paint(tmp_path / "in"), tmp_path / "a.lance"
    recipe = recipe_of("pretrain", *STEPS, f"data.store={store}", "data.filter=score = 1")
    scored(folder, store, first=True)
    go(recipe, tmp_path / "run", until=3)
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    scored(folder, store, first=False)
    with pytest.raises(InputError, match="data.filter: 'score = 1' chooses other rows .*--resume never"):
        go(recipe, tmp_path / "run")
    scored(folder, store, first=True)
    assert "going on after step 2 of 4" in go(recipe, tmp_path / "kept")


def test_other_bytes_under_the_same_ids_are_other_contents(tmp_path: Path) -> None:
    """Written by hand, as no verb does it."""
    store = Store.open(store_of(paint(tmp_path / "in"), tmp_path / "a.lance"))
    (before,) = contents_of(store, None)
    rows = store.take(range(12), store.dataset.schema.names)
    at = rows.schema.get_field_index("picture")

    def written(name: str, order: list[int]) -> Store:
        made = Store.create(tmp_path / name)
        made.append(rows.set_column(at, rows.schema.field(at), rows["picture"].take(pa.array(order))))
        return made

    same = written("same.lance", list(range(12)))
    assert contents_of(same, [before])[0]["pictures"] == before["pictures"]
    swapped = written("swapped.lance", list(range(11, -1, -1)))
    (found,) = contents_of(swapped, None)
    assert found["rows"] == before["rows"]
    with pytest.raises(InputError, match=OTHER):
        contents_of(swapped, [before])


def with_masks(store: Path, grey: int) -> None:
    png = io.BytesIO()
    Image.new("L", (16, 16), grey).save(png, "PNG")
    values = pa.array([png.getvalue()] * 12, pa.large_binary())
    opened = Store.open(store)
    opened.change(lambda dataset: dataset.add_columns(pa.table({"where": values}).to_reader()))


@pytest.mark.parametrize("grey", [255, 64])
def test_other_masks_of_the_same_pictures_are_refused(
    recipe_of: MakeRecipe, tmp_path: Path, grey: int
) -> None:
    """A store made anew with the same pictures, captions and sizes, and with other masks."""
    folder, store = paint(tmp_path / "in"), tmp_path / "a.lance"
    recipe = recipe_of("pretrain", *STEPS, f"data.store={store}", "data.mask=where")
    with_masks(store_of(folder, store), 255)
    go(recipe, tmp_path / "run", until=3)
    shutil.rmtree(store)
    with_masks(store_of(folder, store), grey)
    if grey == 255:
        assert "going on after step 2 of 4" in go(recipe, tmp_path / "run")
        return
    with pytest.raises(InputError, match="data.store: .* has other values of 'where' .*--resume never"):
        go(recipe, tmp_path / "run")


@pytest.mark.parametrize("named", ["3_cats", "5_cats"])
def test_folders_that_say_another_number_of_repeats_are_refused(
    base: Path, tmp_path: Path, named: str
) -> None:
    """The run's own store is lost, its folder renamed: how often a picture comes is in its key alone."""
    folder, own = tmp_path / "in", tmp_path / "run" / "data"
    paint(folder / "3_cats", count=6)
    paint(folder / "dogs", count=6, colours=1)
    recipe = recipe_for("lora", base, folder, "train.steps=4", "checkpoint.every=2", "data.repeats=folders")
    go(recipe, tmp_path / "run", until=3)
    shutil.rmtree(own)
    (folder / "3_cats").rename(folder / named)
    if named == "3_cats":
        assert "going on after step 2 of 4" in go(recipe, tmp_path / "run")
        return
    with pytest.raises(InputError, match="has other values of 'key' .*--resume never"):
        go(recipe, tmp_path / "run")


def test_captions_that_were_replaced_in_place_are_other_contents(tmp_path: Path) -> None:
    """Lance writes a changed column into files of its own: those of the ids stay as they were."""
    store = Store.open(store_of(paint(tmp_path / "in"), tmp_path / "a.lance"))
    (before,) = contents_of(store, None)
    ids = store.take(range(12), ["id"])["id"].to_pylist()
    store.add_columns([pa.field("score", pa.float32())])
    store.set_by_id("source", dict.fromkeys(ids, "elsewhere"))
    assert contents_of(store, [before]) == [before]
    store.set_by_id("caption", {id_: f"another {i}" for i, id_ in enumerate(ids)})
    with pytest.raises(InputError, match=OTHER):
        contents_of(store, [before])


def test_other_class_pictures_are_refused(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    paint(tmp_path / "photos", count=3)
    paint(tmp_path / "class", count=2, colours=7)
    more = (
        "data.class_prompt=a dog",
        f"data.class_images={tmp_path / 'class'}",
        "data.num_class_images=2",
        "train.global_batch=2",
        "data.encode=inline",
    )
    recipe = recipe_for("dreambooth-lora", tmp_path / "base", tmp_path / "photos", *STEPS, *more)
    go(recipe, tmp_path / "run", until=3)
    kept = tmp_path / "run" / "data" / "class.lance"
    kept.rename(tmp_path / "class.lance")  # lost: the folder is read again
    (tmp_path / "class").rename(tmp_path / "first")
    paint(tmp_path / "class", count=2, colours=8)
    with pytest.raises(InputError, match="data.class_images: in '.*class' the set of pictures .* another"):
        go(recipe, tmp_path / "run")
    shutil.rmtree(kept)
    (tmp_path / "class.lance").rename(kept)
    assert "going on after step 2 of 4" in go(recipe, tmp_path / "run")


def configured(file: str, **values: object) -> Callable[[Path], None]:
    """The same weights under another configuration."""

    def change(base: Path) -> None:
        path = base / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def resaved(base: Path) -> None:
    """As another version writes it: what changes no number, and a key that was not there."""
    configured("unet/config.json", _diffusers_version="9.9", new_key=1)(base)
    configured("text_encoder/config.json", transformers_version="9.9", torch_dtype="float16")(base)


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
        (configured("scheduler/scheduler_config.json", prediction_type="v_prediction"), "noise schedule"),
        (configured("scheduler/scheduler_config.json", beta_end=0.02), "noise schedule"),
        (
            configured("text_encoder/config.json", hidden_act="gelu"),
            "text_encoder .*hidden_act.",
        ),
        (configured("unet/config.json", norm_eps=1e-3), "unet configuration .norm_eps."),
        (configured("vae/config.json", norm_num_groups=2), "vae configuration .norm_num_groups."),
        (resaved, None),
    ],
    ids=[
        *("unet", "vae", "text", "scaling", "the same in halves"),
        *("prediction", "betas", "activation", "eps", "groups", "the same saved anew"),
    ],
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


def test_a_tokenizer_of_few_words_is_looked_at_without_a_remark(caplog, monkeypatch):
    """The text that shows its merges is longer than it takes; what transformers says of that is not heard."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    short = models.train_tokenizer(["a dog"], vocab_size=520, model_max_length=8)
    model = models.create("tiny", tokenizer=short)
    assert "splitting into tokens" in base_of("lora", ModelSettings(base="somewhere"), model)
    assert "Token indices" not in caplog.text
    short("the same text without that, longer than eight of its tokens")
    assert "Token indices" in caplog.text
