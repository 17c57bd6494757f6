"""The task extractor: it learns, goes on to the bit, says what it has seen, and tells real subjects apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.errors import InputError, RecipeError
from darkroom.evaluate import statistics
from darkroom.evaluate.extractors import open_extractor
from darkroom.evaluate.job import evaluate_folder
from darkroom.evaluate.pictures import FolderPictures, images
from darkroom.recipe import make_recipe, read_recipe
from darkroom.train.run import export, train
from darkroom.train.tasks.encoders import cut, matched, tinted

TONES = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220)}


@pytest.fixture(scope="module")
def tones(tmp_path_factory) -> Path:
    """A store of 36 pictures in three tones, with captions and a column that say which."""
    folder = tmp_path_factory.mktemp("tones") / "pictures"
    folder.mkdir()
    draws, lines = np.random.default_rng(0), []
    for i in range(36):
        name = list(TONES)[i % 3]
        coarse = np.clip(np.array(TONES[name]) + draws.normal(0, 40, (4, 4, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(coarse).resize((16, 16), Image.Resampling.BICUBIC).save(folder / f"{i:02d}.png")
        lines.append(json.dumps({"file_name": f"{i:02d}.png", "text": f"a {name} cloud", "tone": name}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    import_pictures(folder, folder.parent / "tones.lance")
    return folder.parent / "tones.lance"


def recipe_of(store: Path, *overrides: str, resolution: int = 16):
    network = {"width": 8, "levels": 2, "embedding": 32, "buckets": 128}
    content = {
        "task": "extractor",
        "data": {"store": str(store), "resolution": resolution, "crop": "random", "holdout": 6},
        "objective": {"extractor": {"network": network}},
        "train": {"steps": 40, "global_batch": 12, "precision": "float32"},
    }
    return make_recipe(content, overrides)


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def silent(_: str) -> None: ...


def test_captions_find_their_pictures(tones, tmp_path):
    result = train(recipe_of(tones), out=tmp_path / "run", console=silent)
    rows = rows_of(result.run)
    assert rows[-1]["loss"] < 0.8 * rows[1]["loss"]
    assert rows[-1]["heldout_loss"] < rows[0]["heldout_loss"]
    found = open_extractor(result.model)
    texts = found.texts([f"a {name} cloud" for name in TONES])
    flat = [Image.new("RGB", (16, 16), colour) for colour in TONES.values()]
    cosines = statistics.unit(found.pictures(flat)) @ statistics.unit(texts).T
    assert cosines.argmax(axis=1).tolist() == [0, 1, 2]


def test_a_classifier_learns_a_column(tones, tmp_path):
    overrides = ["objective.extractor.loss=classifier", "objective.extractor.label=tone"]
    result = train(recipe_of(tones, *overrides), out=tmp_path / "run", console=silent)
    assert rows_of(result.run)[-1]["heldout_accuracy"] > 0.9
    told = json.loads((result.model / "config.json").read_text())
    assert told["labels"] == ["blue", "green", "red"]
    assert not told["text"]
    with pytest.raises(InputError, match="reads no text"):
        open_extractor(result.model).texts(["a red cloud"])


def test_a_run_goes_on_to_the_bit(tones, tmp_path):
    whole = train(
        recipe_of(tones, "train.steps=6", "checkpoint.every=3"), out=tmp_path / "whole", console=silent
    )
    part = train(
        recipe_of(tones, "train.steps=6"),
        out=tmp_path / "part",
        resume=str(whole.run / "checkpoints" / "step-00000003"),
        console=silent,
    )
    other = train(recipe_of(tones, "train.steps=6", "train.seed=1"), out=tmp_path / "other", console=silent)
    weights = [load_file(str(one.model / "model.safetensors")) for one in (whole, part, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    folder = export(whole.run, tmp_path / "exported", checkpoint=6, say=silent)
    assert open_extractor(folder).sha256 == open_extractor(whole.model).sha256


def test_what_was_trained_on_is_noted_and_what_was_held_out_is_not(tones, tmp_path):
    result = train(recipe_of(tones, "train.steps=1"), out=tmp_path / "run", console=silent)
    seen = open_extractor(result.model).seen
    assert len(seen.bytes_N) == 30
    store = Store.open(tones)
    pictures = store.take(range(36), ["picture"])["picture"].to_pylist()
    folder = tmp_path / "all"
    folder.mkdir()
    for i, data in enumerate(pictures):
        (folder / f"{i:02d}.png").write_bytes(data)
    overlap = seen.overlap(FolderPictures.of(folder))
    assert (overlap.exact, overlap.of) == (30, 36)
    with pytest.raises(InputError, match="trained on"):
        evaluate_folder(folder, ["dino"], extractors={"all": result.model}, subject=folder)
    again = train(
        recipe_of(tones, "train.steps=1", f"model.base={result.model}", "data.filter=tone = 'red'"),
        out=tmp_path / "again",
        console=silent,
    )
    assert len(open_extractor(again.model).seen.bytes_N) >= 30


def test_without_captions_none_are_learned(tones, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    for i, data in enumerate(Store.open(tones).take(range(12), ["picture"])["picture"].to_pylist()):
        (folder / f"{i}.png").write_bytes(data)
    import_pictures(folder, tmp_path / "bare.lance", on_missing_caption="keep")
    recipe = recipe_of(tmp_path / "bare.lance", "train.steps=1", "train.global_batch=4", "data.holdout=0")
    assert open_extractor(train(recipe, out=tmp_path / "run", console=silent).model).read is None


def test_the_shipped_recipe_runs(tones, tmp_path):
    path = Path(__file__).resolve().parents[3] / "recipes" / "extractor.yaml"
    toy = [f"data.store={tones}", "data.resolution=32", "train.steps=2", "train.global_batch=4"]
    toy += ["optim.warmup_steps=0", "objective.extractor.network.width=8"]
    result = train(read_recipe(path, toy), out=tmp_path / "run", console=silent)
    assert open_extractor(result.model).texts(["a red cloud"]).shape == (1, 128)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.micro_batch=4", r"auto, or train.global_batch \(12\)"),
        ("train.gradient_checkpointing=true", "given with the task extractor"),
        ("data.buckets=true", "given with the task extractor"),
        ("data.resolution=8", None),
        ("model.base=tiny", "extractor, or an extractor's folder"),
        ("objective.extractor.loss=classifier", "name the store's column"),
        ("objective.extractor.network.levels=5", "64 or more"),
    ],
)
def test_what_cannot_be_is_refused(tones, tmp_path, override, told):
    if told is None:
        recipe = recipe_of(tones, override, "train.steps=1")
        assert train(recipe, out=tmp_path / "run", console=silent).steps == 1
        return
    with pytest.raises(RecipeError, match=told):
        train(recipe_of(tones, override, "train.steps=1"), out=tmp_path / "run", console=silent)
    assert not (tmp_path / "run" / "recipe.yaml").exists()


# ---- views and losses


def test_a_view_is_a_part_of_the_picture_and_mirrored_half_the_time():
    ramp = torch.arange(32.0).expand(64, 3, 32, 32)
    torch.manual_seed(0)
    views = cut(ramp, 0.5)
    rising = (views[:, 0, 0, -1] > views[:, 0, 0, 0]).float().mean()
    assert 0.3 < rising < 0.7
    spans = (views[:, 0, 0, -1] - views[:, 0, 0, 0]).abs()
    assert spans.min() > 0.45 * 31
    assert spans.max() < 31.5
    assert views.min() >= 0
    assert views.max() <= 31
    torch.manual_seed(0)
    assert torch.equal(cut(ramp, 0.5), views)
    assert torch.allclose(cut(ramp, 1.0).flip(-1), ramp) or cut(ramp, 1.0).shape == ramp.shape


def test_tinting_moves_colours_and_stays_in_range():
    grey = torch.full((16, 3, 4, 4), 128.0)
    torch.manual_seed(0)
    moved = tinted(grey, 0.3)
    assert (moved.mean(dim=(1, 2, 3)) - 128).abs().max() > 10
    assert torch.allclose(tinted(grey, 0.0), grey)
    assert tinted(grey * 2, 0.5).max() <= 255


def test_the_contrastive_loss_is_the_cross_entropy_of_pairs():
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    target = torch.arange(5)
    expected = 0.5 * (
        torch.nn.functional.cross_entropy(logits, target, reduction="none")
        + torch.nn.functional.cross_entropy(logits.T, target, reduction="none")
    )
    assert torch.allclose(matched(logits, torch.eye(5))["loss"], expected, atol=1e-6)
    alike = torch.eye(5)
    alike[0, 1] = alike[1, 0] = 1
    assert not torch.allclose(matched(logits, alike)["loss"], expected, atol=1e-3)
    assert matched(10 * torch.eye(5), torch.eye(5))["accuracy"].tolist() == [1.0] * 5


# ---- photographs


@pytest.mark.nightly
def test_it_tells_subjects_apart_that_it_never_saw(shared_data, tmp_path):
    photographs = shared_data / "dreambooth"
    for subject in ("dog2", "cat2", "teapot", "backpack"):
        import_pictures(photographs / subject, tmp_path / "photos.lance", on_missing_caption="keep")
    overrides = ["data.holdout=0", "train.global_batch=22", "train.ema.enabled=false"]
    overrides += ["objective.extractor.network.levels=3"]

    def margins(*more: str) -> dict[str, float]:
        recipe = recipe_of(tmp_path / "photos.lance", *overrides, *more, resolution=32)
        found = open_extractor(train(recipe, out=tmp_path / more[0], console=silent).model)
        new = ("dog", "dog6", "duck_toy")
        features = {name: found.pictures(images(FolderPictures.of(photographs / name))) for name in new}
        return {
            name: statistics.mean_cosine_within(features[name])
            - max(statistics.cosine_to_set(features[name], features[o]).mean() for o in new if o != name)
            for name in new
        }

    trained, untrained = margins("train.steps=50"), margins("train.steps=1")
    assert min(trained.values()) > 0
    assert np.mean(list(trained.values())) > 0.25
    assert np.mean(list(trained.values())) > 2 * np.mean(list(untrained.values()))
