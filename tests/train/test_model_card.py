"""A model card says which pictures were trained on, of which sources and licences, and no place of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from subjects import recipe_for
from typer.testing import CliRunner

from darkroom import models
from darkroom.cli.application import app
from darkroom.data.store import Store
from darkroom.errors import InputError
from darkroom.recipe.sections import DataSettings, StoreWeight
from darkroom.train.exports import TrainingData
from darkroom.train.run import train


def pictures(folder: Path, count: int, seed: int) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(seed)
    for i in range(count):
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a picture")
    return folder


def imported(folder: Path, store: Path, *more: str) -> None:
    result = CliRunner().invoke(app, ["import", str(folder), str(store), *more])
    assert result.exit_code == 0, result.output


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three pictures of a known licence, and two of which nobody noted one."""
    store = tmp_path / "a.lance"
    imported(pictures(tmp_path / "cats", 3, 3), store, "--licence", "CC-BY-4.0")
    imported(pictures(tmp_path / "dogs", 2, 2), store)
    return store


def card(data: DataSettings, noted: dict[str, object] | None = None) -> str:
    return "\n".join(TrainingData.of(data, Path("no run"), noted or {}).lines())


def licence(data: DataSettings) -> str | None:
    return TrainingData.of(data, Path("no run"), {}).licence


def test_sources_and_licences_go_from_the_store_into_the_card(pets: Path, tmp_path: Path) -> None:
    data = DataSettings(store=str(pets))
    assert "| a.lance | cats | 3 | CC-BY-4.0 |\n| a.lance | dogs | 2 | unknown |" in card(data)
    assert "| CC-BY-4.0 | 3 |\n| unknown | 2 |" in card(data)
    assert licence(data) is None
    imported(tmp_path / "dogs", pets, "--licence", "CC-BY-4.0")
    assert licence(data) == "CC-BY-4.0"
    assert "| CC-BY-4.0 | 5 |" in card(data)
    assert "unknown" not in card(data)
    bad = CliRunner().invoke(app, ["import", str(tmp_path / "dogs"), str(pets), "--licence", "a\nb"])
    assert isinstance(bad.exception, InputError)


def test_a_filter_and_the_version_that_was_trained_on_decide_what_counts(pets: Path, tmp_path: Path) -> None:
    store = Store.open(pets)
    store.pin("a run")
    noted = {"version": store.version, "rows": 5}
    imported(pictures(tmp_path / "birds", 4, 4), pets, "--licence", "CC0-1.0")
    imported(tmp_path / "dogs", pets, "--licence", "MIT | Expat")  # known since
    data = DataSettings(store=str(pets))
    then, now = card(data, noted), card(data)
    assert "birds" not in then
    assert r"| a.lance | dogs | 2 | MIT \| Expat |" in then
    assert "| a.lance | birds | 4 | CC0-1.0 |" in now  # without the version all would count
    store.unpin("a run")
    Store.open(pets).compact()
    assert "A version that was trained on is gone" in card(data, noted)
    assert "is gone" not in now + then
    only = data.model_copy(update={"filter": "source = 'cats'"})
    assert licence(only) == "CC-BY-4.0"
    assert "dogs" not in card(only)


@pytest.mark.parametrize("column", ["license", "licence", "rights"])
def test_pictures_that_say_their_own_licence_count_under_it(tmp_path: Path, column: str) -> None:
    """A licence in the metadata goes before the source's; a column of another name (the control) is none."""
    folder, store = pictures(tmp_path / "mixed", 5, 5), tmp_path / "b.lance"
    own = ["CC0-1.0", "CC0-1.0", "/home/ada/LICENSE", "", None]
    rows = [
        {"file_name": f"{i}.png", "text": "a picture", **({} if one is None else {column: one})}
        for i, one in enumerate(own)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    imported(folder, store, "--licence", "CC-BY-4.0")
    imported(pictures(tmp_path / "others", 2, 6), store)
    text = card(DataSettings(store=str(store)))
    if column == "rights":
        assert "| b.lance | mixed | 5 | CC-BY-4.0 |" in text
        return
    for count, licence_said in ((2, "CC0-1.0"), (1, "LICENSE"), (2, "CC-BY-4.0")):
        assert f"| b.lance | mixed | {count} | {licence_said} |" in text
        assert f"| {licence_said} | {count} |" in text
    assert "| b.lance | others | 2 | unknown |" in text
    assert "ada" not in text
    only = DataSettings(store=str(store), filter=f"{column} = 'CC0-1.0'")
    assert licence(only) == "CC0-1.0"


@pytest.mark.parametrize(
    "data", [{"store": "gone.lance"}, {"folder": "/photos"}, {"store": "/home/ada/secret/gone.lance"}]
)
def test_what_cannot_be_looked_up_is_unknown(data: dict[str, str]) -> None:
    text = card(DataSettings(**data))
    assert "| unknown | unknown |" in text
    assert "| unknown | 0 and more |" in text
    assert ("gone.lance" in text) == ("store" in data)
    assert "secret" not in text
    assert "/photos" not in text
    assert licence(DataSettings(**data)) is None
    assert "| unknown | 7 |" in card(DataSettings(**data), {"version": 1, "rows": 7})


def test_several_stores_count_each_and_one_that_is_gone_hides_none(pets: Path) -> None:
    stores = [StoreWeight(store=str(pets), weight=1), StoreWeight(store="gone.lance", weight=1)]
    text = card(DataSettings(stores=tuple(stores)), {"version": [Store.open(pets).version, 3], "rows": 9})
    assert "| CC-BY-4.0 | 3 |\n| unknown | 2 and more |" in text


def test_no_card_names_a_private_place(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"/home/ada/photos": 1, r"C:\Users\ada\more": 1, "trips/rome": 1}
    monkeypatch.setattr(Store, "sources", lambda *_: places)
    monkeypatch.setattr(Store, "licences", lambda _: {"trips/rome": "file:///home/ada/LICENSE.txt"})
    text = card(DataSettings(store=str(pets)))
    assert "ada" not in text
    assert str(pets.parent) not in text
    for name in ("photos", "more", "trips/rome"):  # a source may have its folder's name
        assert f"| a.lance | {name} | 1 |" in text
    monkeypatch.setattr(Store, "licences", lambda _: {"trips/rome": "https://example.org/licence"})
    assert "https://example.org/licence" in card(DataSettings(store=str(pets)))


def test_the_folders_of_a_run_and_of_export_have_the_card(pets: Path, base: Path, tmp_path: Path) -> None:
    recipe = recipe_for("finetune", base, pets, "train.steps=1", "sample.steps=1")
    data = recipe.data.model_copy(update={"folder": None, "store": str(pets), "encode": "inline"})
    recipe = recipe.model_copy(update={"data": data})
    run = train(recipe, out=tmp_path / "mine", console=lambda _: None).run
    imported(pictures(tmp_path / "later", 4, 4), pets)
    folder, again = tmp_path / "out", tmp_path / "again"
    for source, to in ((run, folder), (folder, again)):
        result = CliRunner().invoke(app, ["export", str(source), "--to", str(to)])
        assert result.exit_code == 0, result.output
    cards = {
        name: (path / "README.md").read_text()
        for name, path in {"mine": run / "model", "out": folder}.items()
    }
    for name, text in cards.items():
        head = yaml.safe_load(text.split("---")[1])
        assert head["license"] == "other"
        assert f"# {name}\n" in text
        assert "| a.lance | cats | 3 | CC-BY-4.0 |\n| a.lance | dogs | 2 | unknown |" in text
        assert "later" not in text  # which came after the run had begun
        assert str(tmp_path) not in text
        assert str(base) not in text
    assert (again / "README.md").read_text() == cards["out"]
    assert models.load(again).name == "again"
