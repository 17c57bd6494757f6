"""A model card says the sources and licences of the pictures, as the store has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from darkroom.cli.application import app
from darkroom.errors import InputError
from darkroom.recipe.sections import DataSettings
from darkroom.train.run import model_card


def pictures(folder: Path, count: int, seed: int) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(seed)
    for i in range(count):
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a picture")
    return folder


def test_sources_and_licences_go_from_the_store_into_the_card(tmp_path):
    store, run = tmp_path / "a.lance", CliRunner()
    for name, count, licence in (("cats", 3, "CC-BY-4.0"), ("dogs", 2, None)):
        told = ["import", str(pictures(tmp_path / name, count, count)), str(store)]
        told += [] if licence is None else ["--licence", licence]
        assert run.invoke(app, told).exit_code == 0
    card = model_card("pets", "pretrain", DataSettings(store=str(store)))
    assert "| a.lance | cats | 3 | CC-BY-4.0 |" in card
    assert "| a.lance | dogs | 2 | unknown |" in card
    assert yaml.safe_load(card.split("---")[1])["license"] == "other"
    again = run.invoke(app, ["import", str(tmp_path / "dogs"), str(store), "--licence", "CC-BY-4.0"])
    assert again.exit_code == 0
    card = model_card("pets", "pretrain", DataSettings(store=str(store)))
    assert yaml.safe_load(card.split("---")[1])["license"] == "cc-by-4.0"
    bad = run.invoke(app, ["import", str(tmp_path / "dogs"), str(store), "--licence", "a\nb"])
    assert isinstance(bad.exception, InputError)


@pytest.mark.parametrize(
    "data", [{"store": "gone.lance"}, {"folder": "photos"}, {"store": "/home/ada/secret/gone.lance"}]
)
def test_what_cannot_be_looked_up_is_unknown(data):
    card = model_card("pets", "pretrain", DataSettings(**data))
    assert "unknown" in card
    assert ("gone.lance" in card) == ("store" in data)
    assert "secret" not in card
    assert yaml.safe_load(card.split("---")[1])["license"] == "other"
