"""Scores of drawn pictures while training goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from subjects import recipe_for

from darkroom import sample
from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.evaluate.job import evaluate_folder
from darkroom.evaluate.settings import SmallSettings
from darkroom.evaluate.small import SmallExtractor, TrainingHashes, save_small
from darkroom.models.folder import load
from darkroom.report.runs import write_report
from darkroom.run import Run
from darkroom.train.run import train

ASKED = ("data.holdout=8", "evaluate.every_images=16", "evaluate.num=8", "sample.steps=2")
SILENT = {"console": lambda line: None}


@pytest.fixture(scope="module")
def extractor(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("extractor")
    torch.manual_seed(3)
    settings = SmallSettings(width=8, levels=2, embedding=8, buckets=64)
    network, none = SmallExtractor(settings, resolution=16, text=True), np.zeros(0, np.int64)
    save_small(network, folder, TrainingHashes(none, none).tensors())
    return folder


def test_scores_come_by_pictures_and_can_be_taken_again(recipe_of, extractor, tmp_path):
    recipe = recipe_of("pretrain", *ASKED, f"evaluate.extractors={{all: {extractor}}}", "train.steps=5")
    result = train(recipe, out=tmp_path / "run", **SILENT)
    rows = {row["step"]: row for row in Run(result.run).metrics() if "scores" in row}
    assert list(rows) == [2, 4, 5]  # each 16 pictures of batches of 8, and at the end
    assert rows[2]["heldout_fid"] != rows[4]["heldout_fid"]
    assert result.bill.parts["evaluate"] > 0
    # The last ones again, from the model that was left, in other ways.
    store = Store.open(str(recipe.data.store))
    held = recipe_rows(recipe, store)
    table = store.take(held, ["caption", "picture"])
    model = load(result.model)
    drawn = {"seed": 0, "size": (16, 16), "steps": 2, "guidance": 7.5, "optimise": "none"}
    made = sample.generate(model, table["caption"].to_pylist(), **drawn)
    for kind in ("drawn", "held"):
        (tmp_path / kind).mkdir()
    for i, (one, data) in enumerate(zip(made, table["picture"].to_pylist(), strict=True)):
        one.image.save(tmp_path / "drawn" / f"{i}.png")
        (tmp_path / "held" / f"{i}.png").write_bytes(data)
        assert Image.open(tmp_path / "held" / f"{i}.png").size == (16, 16)
    again = evaluate_folder(
        tmp_path / "drawn",
        ["fid", "kid"],
        extractors={"all": str(extractor)},
        reference=tmp_path / "held",
        say=lambda line: None,
    )
    for score in again:
        assert rows[5][f"heldout_{score.metric}"] == pytest.approx(score.value, rel=1e-6)
        assert rows[5]["scores"][score.metric]["n"] == 8
    page = write_report([result.run], tmp_path / "report.html").read_text()
    assert "Held-out FID" in page
    assert "Held-out CLIP" in page


def test_a_subject_is_scored_by_the_recipes_prompt(base, photos, extractor, tmp_path, monkeypatch):
    drawn: list[str] = []

    def generate(model, prompts, **settings):
        drawn.extend([prompts] if isinstance(prompts, str) else prompts)
        return real(model, prompts, **settings)

    real = sample.generate
    monkeypatch.setattr(sample, "generate", generate)
    asked = ("data.holdout=2", "evaluate.every_images=1", "evaluate.num=2", "sample.steps=1", "train.steps=1")
    own = ("evaluate.scores=[fid,clip]", f"evaluate.extractors={{all: {extractor}}}")
    train(recipe_for("dreambooth-lora", base, photos, *asked, *own), out=tmp_path / "run", **SILENT)
    assert drawn == ["a photo of sks dog"] * 2


def test_pictures_without_captions_have_no_clip_score(recipe_of, photos, extractor, tmp_path):
    store = tmp_path / "bare.lance"
    import_pictures(photos, store, on_missing_caption="keep")
    asked = ("data.holdout=2", "evaluate.every_images=16", f"data.store={store}", "sample.steps=1")
    own = f"evaluate.extractors={{all: {extractor}}}"
    with pytest.raises(RecipeError, match="evaluate.scores: .clip., but 2 of 2 held-out pictures have no"):
        train(recipe_of("pretrain", *asked, own), out=tmp_path / "run", **SILENT)


def recipe_rows(recipe, store) -> np.ndarray:
    from darkroom.train.feed import select_rows

    held = select_rows(store, recipe.data)[1]
    return held.positions(np.arange(len(held)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "evaluate.extractors: no inception extractor, which the score 'fid' needs"),
        (("evaluate.extractors={inception: x}", "evaluate.scores=[kid,clip]"), "no clip extractor"),
        (("evaluate.scores=[drift]",), "evaluate.scores: 'drift'; allowed: fid, "),
        (("data.holdout=0",), "data.holdout: 0, but evaluate.every_images scores against held-out pictures"),
    ],
)
def test_what_is_missing_is_said_before_any_work(recipe_of, tmp_path, more, words):
    with pytest.raises(RecipeError, match=words.replace("(", "\\(")):
        train(recipe_of("pretrain", *ASKED, *more), out=tmp_path / "run", **SILENT)
    assert not (tmp_path / "run").exists()


def test_an_autoencoder_draws_nothing(recipe_of, tmp_path):
    for asked in ASKED[1:]:
        with pytest.raises(RecipeError, match=f"{asked.partition('=')[0]}: given with the task autoencoder"):
            train(recipe_of("autoencoder", ASKED[0], asked), out=tmp_path / "run", **SILENT)
