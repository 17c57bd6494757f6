"""What a store holds, in numbers and as a contact sheet."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from material import encoded, noise_picture
from PIL import Image

from darkroom.data.importers.job import import_pictures
from darkroom.data.inspect import contact_sheet, describe, mark_doubles
from darkroom.data.store import Store
from darkroom.errors import StoreError

CAPTIONS = ["one", "two words", "Ünïcödé — 写真", "a caption that is so long " * 20, "one"]
SIZES = [(64, 64), (128, 64), (40, 120), (300, 30), (64, 64)]


@pytest.fixture
def filled(tmp_path) -> Store:
    folder = tmp_path / "a"
    folder.mkdir()
    entries = []
    for number, (caption, size) in enumerate(zip(CAPTIONS, SIZES, strict=True)):
        (folder / f"{number}.png").write_bytes(encoded(noise_picture(number, size)))
        entries.append({"file_name": f"{number}.png", "text": caption, "tags": ["x"]})
    (folder / "gone.png").write_bytes(b"torn")
    entries.append({"file_name": "gone.png", "text": "x"})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, entries)))
    import_pictures(folder, tmp_path / "pictures.lance")
    return Store.open(tmp_path / "pictures.lance")


def test_describe_counts_right(filled):
    told = describe(filled)
    assert (told["rows"], told["fragments"], told["version"]) == (5, 1, filled.version)
    assert told["sources"] == {"a": 5}
    assert told["formats"] == {"PNG": 5}
    assert told["sizes"] == {"64 x 64": 2, "128 x 64": 1, "40 x 120": 1, "300 x 30": 1}
    assert told["aspect_ratios"] == {"under 1:2": 1, "square": 2, "over 2:1": 2}
    assert told["shortest_side_px"] == {"least": 30, "median": 64, "p95": 64, "most": 64}
    assert told["captions"]["distinct"] == 4
    assert told["captions"]["empty"] == 0
    assert told["captions"]["words"] == {"least": 1, "median": 2, "p95": 120, "most": 120}
    assert told["captions"]["characters"]["most"] == len(CAPTIONS[3].strip())
    assert told["doubles"] == {"of_one_hash": 0}
    assert told["set_aside"] == {"undecodable": 1}
    assert told["columns"]["tags"] == "list of string"
    assert told["disk_bytes"] > sum(len(p) for p in filled.take(range(5), ["picture"])["picture"].to_pylist())
    json.dumps(told)


def test_describe_says_what_made_a_prepared_column(filled):
    noted = {"kind": "latents", "encoder": "ab" * 32, "resolution": "64", "precision": "float32"}
    type_ = pa.struct([("moments", pa.large_binary()), ("height", pa.int16()), ("width", pa.int16())])
    field = pa.field("latents_64_abababab", type_, metadata={f"darkroom.{k}": v for k, v in noted.items()})
    filled.add_columns([field])
    told = describe(filled)["columns"]["latents_64_abababab"]
    assert told == "latents at 64 px, 0 of 5 rows, by encoder abababababababab in float32"


def test_describe_knows_marks_pins_and_deletions(filled):
    filled.pin("run")
    mark_doubles(filled)
    filled.delete(ids=[filled.take([0], ["id"])["id"][0].as_py()])
    told = describe(filled)
    assert told["doubles"]["marked"] == 0
    assert list(told["pinned_versions"]) == ["run"]
    assert (told["deleted_ids"], told["rows"]) == (1, 4)


def test_an_empty_store_is_described(tmp_path):
    told = describe(Store.create(tmp_path / "s.lance"))
    assert (told["rows"], told["sizes"], told["captions"]["words"]) == (0, {}, {})


def test_the_contact_sheet_shows_the_pictures(filled, tmp_path):
    path = contact_sheet(filled, tmp_path / "out" / "sheet.png")
    sheet = Image.open(path)
    assert sheet.format == "PNG"
    assert sheet.width == 1600
    pixels = np.asarray(sheet.convert("RGB")).astype(int)
    paper = pixels[2, 2]
    coloured = (abs(pixels - paper).max(axis=2) > 30).mean()
    assert coloured > 0.15
    again = contact_sheet(filled, tmp_path / "again.png")
    assert again.read_bytes() == path.read_bytes(), "the same store gives the same sheet"
    few = contact_sheet(filled, tmp_path / "few.png", filter="width = 64")
    assert few.read_bytes() != path.read_bytes()
    assert not list(tmp_path.rglob(".*.png"))


def test_a_sheet_of_nothing_is_told(filled, tmp_path):
    with pytest.raises(StoreError, match="no pictures to show"):
        contact_sheet(filled, tmp_path / "a.png", filter="width > 5000")
    assert not (tmp_path / "a.png").exists()


def test_a_contact_sheet_is_written_over_no_file_of_another_kind(tmp_path):
    store = Store.create(tmp_path / "s.lance")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="notes.txt' is there already, and is no PNG"):
        contact_sheet(store, tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(StoreError, match="has no pictures to show"):
        contact_sheet(store, tmp_path / "sheet.png")
