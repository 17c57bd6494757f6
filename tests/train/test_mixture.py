"""Training on several stores: shares of the batches, resuming, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.run import Run
from darkroom.train.jobs import Pinned
from darkroom.train.run import train
from darkroom.train.setup import make_job

SILENT = {"console": lambda line: None}


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("second")
    (root / "pictures").mkdir()
    for i in range(10):
        Image.new("RGB", (24, 16) if i % 2 else (16, 16), (i * 20, 90, 10)).save(
            root / "pictures" / f"{i}.png"
        )
        (root / "pictures" / f"{i}.txt").write_text(f"shade {i}")
    store = Store.create(root / "second.lance")
    import_pictures(root / "pictures", store)
    return root / "second.lance"


@pytest.fixture
def mixed(recipe_of, store_path, second):
    def make(*more: str, weights=(1, 3)):
        stores = ", ".join(
            f"{{store: {path}, weight: {weight}}}"
            for path, weight in zip((store_path, second), weights, strict=True)
        )
        return recipe_of("pretrain", "data.store=null", f"data.stores=[{stores}]", *more)

    return make


@pytest.mark.parametrize("buckets", [False, True])
def test_batches_hold_the_weights(mixed, tmp_path, buckets):
    job = make_job(mixed(f"data.buckets={str(buckets).lower()}", "data.holdout=0.1"), Pinned(tmp_path))
    assert job.rows_of is not None
    positions = np.concatenate([job.rows_of(k) for k in range(400)])
    assert np.mean(positions >= 44) == pytest.approx(0.75, abs=0.01)
    with job.feed(3) as batches:
        columns = next(batches)
    assert len(columns["caption"]) == 8
    assert any(caption.startswith("shade") for caption in columns["caption"])


def test_a_mixed_run_goes_on_as_if_undisturbed(mixed, tmp_path):
    whole = train(mixed("train.steps=6"), out=tmp_path / "whole", **SILENT)
    train(mixed("train.steps=4"), out=tmp_path / "parts", **SILENT)
    parts = train(mixed("train.steps=6"), out=tmp_path / "parts", **SILENT)
    losses = [[row["loss"] for row in Run(one.run).metrics() if "loss" in row] for one in (whole, parts)]
    assert losses[0] == losses[1]
    assert isinstance(Run(parts.run).environment["store"]["version"], list)
    other = train(mixed("train.steps=6", weights=(3, 1)), out=tmp_path / "other", **SILENT)
    assert [row["loss"] for row in Run(other.run).metrics() if "loss" in row] != losses[0]
    with pytest.raises(RecipeError, match=r"^data.stores: the run here was started with other settings"):
        train(mixed("train.steps=8", weights=(3, 1)), out=tmp_path / "parts", **SILENT)


def test_what_cannot_be_mixed_is_refused(mixed, recipe_of, store_path, tmp_path):
    with pytest.raises(RecipeError, match="^data: store and stores are both given"):
        mixed(f"data.store={store_path}")
    with pytest.raises(RecipeError, match="is given twice; say it once, with one weight"):
        recipe_of(
            "pretrain", "data.store=null", f"data.stores=[{{store: {store_path}}}, {{store: {store_path}}}]"
        )
    with pytest.raises(RecipeError, match=r"^data.stores.1.weight: 0 was given; allowed: above 0"):
        mixed(weights=(1, 0))
    with pytest.raises(RecipeError, match="matches 'width > 20'"):
        train(mixed("data.filter=width > 20"), out=tmp_path / "run", **SILENT)
