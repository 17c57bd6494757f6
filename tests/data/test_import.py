"""Importing: doubles, rejects, types of extra columns, progress, sources that move, writers beside it."""

from __future__ import annotations

import io
import json
import os
import threading
import unicodedata
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from material import encoded, noise_picture
from PIL import Image

from darkroom.data.importers.folder import FolderTree
from darkroom.data.importers.job import import_pictures, picture_id
from darkroom.data.store import Store
from darkroom.errors import InputError, StoreError


def make_folder(path: Path, entries: list[dict], *, start: int = 0) -> Path:
    """A folder with one new picture for each entry that names none."""
    path.mkdir(parents=True, exist_ok=True)
    for number, entry in enumerate(entries, start):
        if "file_name" not in entry:
            entry["file_name"] = f"{number:04d}.png"
            (path / entry["file_name"]).write_bytes(encoded(noise_picture(number)))
        entry.setdefault("text", f"picture {number}")
    with (path / "metadata.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)
    return path


def rows_of(path: str | Path, columns: list[str]) -> list[dict]:
    store = Store.open(path)
    return store.take(store.select(None), columns).to_pylist()


def rejected_lines(store: Path) -> list[dict]:
    return [json.loads(line) for line in (store / "rejected.jsonl").read_text().splitlines()]


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "pictures.lance"


def test_the_emoji_come_in_unchanged(shared_data, target):
    report = import_pictures(shared_data / "noto_emoji_64", target)
    assert (report.kind, report.added, report.rejected) == ("folder", 3582, {})
    store = Store.open(target)
    assert store.shapes() == [{(64, 64): 3582}]
    assert len(store.select("array_length(skin_tone) = 0")) == 1687
    row = store.take(store.select("caption = 'keycap #'"), ["group", "keywords", "key"]).to_pylist()[0]
    assert (row["group"], row["keywords"][1], row["key"]) == ("Symbols", "symbol", "emoji_u0023_20e3.webp")
    again = import_pictures(shared_data / "noto_emoji_64", target)
    assert (again.added, again.doubles, again.num_rows) == (0, 3582, 3582)


def test_photographs_come_in_with_their_captions(shared_data, tmp_path, target):
    for file in sorted((shared_data / "dreambooth" / "dog").iterdir()):
        (tmp_path / "dog").mkdir(exist_ok=True)
        (tmp_path / "dog" / file.name).write_bytes(file.read_bytes())
        (tmp_path / "dog" / file.name).with_suffix(".txt").write_text(f"a photo {file.stem}")
    report = import_pictures(tmp_path / "dog", target)
    assert report.added >= 4
    for row in rows_of(target, ["picture", "width", "height"]):
        from darkroom.data.images import decode

        assert decode(row["picture"]).size == (row["width"], row["height"])


def test_the_id_is_of_bytes_and_caption(tmp_path, target):
    import_pictures(make_folder(tmp_path / "a", [{"text": "x"}]), target)
    row = rows_of(target, ["id", "picture", "caption"])[0]
    assert row["id"] == picture_id(row["picture"], "x")
    assert len(row["id"]) == 32
    assert picture_id(b"a\0b", "c") != picture_id(b"a", "b\0c"[:2])


def test_doubles_are_counted_wherever_they_stand(tmp_path, target):
    source = make_folder(tmp_path / "a", [{} for _ in range(5)])
    (source / "copy.png").write_bytes((source / "0001.png").read_bytes())
    make_folder(source, [{"file_name": "copy.png", "text": "picture 1"}])
    make_folder(source, [{"file_name": "copy.png", "text": "another caption"}])
    report = import_pictures(source, target)
    assert (report.added, report.doubles) == (6, 1)


def test_only_what_is_new_is_added(tmp_path, target):
    source = make_folder(tmp_path / "a", [{} for _ in range(3)])
    import_pictures(source, target)
    version = Store.open(target).version
    again = import_pictures(source, target)
    assert (again.added, again.doubles) == (0, 3)
    assert Store.open(target).version == version, "nothing new makes no version"
    make_folder(source, [{} for _ in range(2)], start=3)
    grown = import_pictures(source, target)
    assert (grown.added, grown.doubles, grown.num_rows) == (2, 3, 5)
    source.rename(tmp_path / "b")
    moved = import_pictures(tmp_path / "b", target)
    assert (moved.added, moved.doubles, moved.num_rows) == (0, 5, 5)


BAD = {
    "torn.png": (encoded(noise_picture(1))[:150], "undecodable"),
    "text.jpg": (b"<html>", "undecodable"),
    "empty.png": (b"", "undecodable"),
    "small.png": (encoded(noise_picture(2, (12, 100))), "too-small"),
    "bomb.png": (encoded(Image.new("L", (2000, 2000))), "bomb"),
    "float.tiff": (encoded(Image.new("F", (32, 32)), "TIFF"), "unsupported"),
}


def test_bad_pictures_are_set_aside_once_with_their_reason(tmp_path, target):
    source = make_folder(tmp_path / "a", [{"text": "good"}, {"text": "  "}, {"text": None}])
    for name, (data, _) in BAD.items():
        (source / name).write_bytes(data)
        make_folder(source, [{"file_name": name, "text": name}])
    for _ in range(2):
        report = import_pictures(source, target, max_pixels=1_000_000)
        assert report.num_rows == 1
        assert report.rejected == {
            "undecodable": 3, "too-small": 1, "bomb": 1, "unsupported": 1, "no-caption": 2,
        }  # fmt: skip
    source.rename(tmp_path / "moved")
    import_pictures(tmp_path / "moved", target, max_pixels=1_000_000)
    lines = rejected_lines(target)
    told = {line["key"]: line["reason"] for line in lines}
    expected = {name: reason for name, (_, reason) in BAD.items()}
    assert told == expected | {"0001.png": "no-caption", "0002.png": "no-caption"}
    assert len(lines) == 8
    assert all(line["detail"] and line["source"] == "a" for line in lines)
    kept = import_pictures(tmp_path / "moved", target, on_missing_caption="keep")
    assert kept.added == 3, "two without caption, and the bomb is none by the default limit"
    assert sorted(r["caption"] for r in rows_of(target, ["caption"])) == ["", "", "bomb.png", "good"]


def test_a_torn_line_in_rejected_spoils_no_other(tmp_path, target):
    source = make_folder(tmp_path / "a", [{"text": "good"}, {"text": ""}])
    import_pictures(source, target)
    with (target / "rejected.jsonl").open("a") as file:
        file.write('{"torn": ')
    make_folder(source, [{"text": ""}], start=5)
    import_pictures(source, target)
    lines = (target / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in (lines[0], lines[2])] == ["0001.png", "0005.png"]


def test_types_of_extra_columns(tmp_path, target):
    entries = [
        {
            "n": 1,
            "f": 0.5,
            "nf": 1,
            "t": True,
            "s": "a",
            "tags": ["x"],
            "deep": {"a": [1]},
            "mixed": 1,
            "big": 2**70,
        },
        {
            "n": None,
            "f": 2,
            "nf": 0.5,
            "t": False,
            "s": "\ud83d",
            "tags": [],
            "deep": None,
            "mixed": "b",
            "big": 1,
        },
        {"n": -3, "f": None, "tags": None, "mixed": [1, "c"], "width": 5, "a.b": "dot", "_rowid": 3, "e": []},
    ]
    report = import_pictures(make_folder(tmp_path / "a", entries), target)
    types = {f.name: str(f.type) for f in Store.open(target).dataset.schema}
    assert {name: types[name] for name in ("n", "f", "nf", "t", "s", "mixed", "deep", "a_b", "big")} == {
        "n": "int64", "f": "double", "nf": "double", "t": "bool", "s": "string", "mixed": "string",
        "deep": "string", "a_b": "string", "big": "string",
    }  # fmt: skip
    assert types["tags"] == types["e"] == "list<item: string>"
    assert report.renamed == {"width": "source_width", "a.b": "a_b", "_rowid": "source_rowid"}
    rows = rows_of(target, ["n", "nf", "s", "tags", "deep", "mixed", "source_width", "width", "big"])
    assert [r["n"] for r in rows] == [1, None, -3]
    assert [r["nf"] for r in rows] == [1.0, 0.5, None]
    assert [r["s"] for r in rows] == ["a", "?", None]
    assert [r["tags"] for r in rows] == [["x"], [], None]
    assert [r["deep"] for r in rows] == ['{"a": [1]}', None, None]
    assert [r["mixed"] for r in rows] == ["1", "b", '[1, "c"]']
    assert [r["source_width"] for r in rows] == [None, None, 5]
    assert {r["width"] for r in rows} == {24}
    assert [r["big"] for r in rows] == [str(2**70), "1", None]


def test_types_widen_for_what_comes_later(tmp_path, target):
    first = make_folder(tmp_path / "a", [{"score": 1, "tag": 5, "flag": True, "tags": [1]}])
    import_pictures(first, target)
    second = make_folder(
        tmp_path / "b", [{"score": 0.5, "tag": "five", "flag": 2, "tags": ["x"], "new": 1.5}], start=1
    )
    report = import_pictures(second, target)
    assert set(report.widened) == {"score", "tag", "flag", "tags"}
    assert rows_of(target, ["caption", "score", "tag", "flag", "tags", "new"]) == [
        {"caption": "picture 0", "score": 1.0, "tag": "5", "flag": "true", "tags": ["1"], "new": None},
        {"caption": "picture 1", "score": 0.5, "tag": "five", "flag": "2", "tags": ["x"], "new": 1.5},
    ]
    third = make_folder(tmp_path / "c", [{"score": 7, "tag": 6, "new": 2}], start=2)
    assert import_pictures(third, target).widened == {}
    assert rows_of(target, ["score", "tag", "new"])[2] == {"score": 7.0, "tag": "6", "new": 2.0}


def test_a_filter_selects_by_the_sources_columns(tmp_path, target):
    entries = [{"score": i / 10, "tags": ["even"] if i % 2 == 0 else []} for i in range(10)]
    import_pictures(make_folder(tmp_path / "a", entries), target)
    store = Store.open(target)
    assert store.select("score >= 0.5 AND array_has(tags, 'even')").tolist() == [6, 8]
    with pytest.raises(StoreError, match="no column 'scor'.*did you mean score"):
        store.select("scor >= 0.5")


def test_prepared_columns_are_not_overwritten(tmp_path, target):
    import_pictures(make_folder(tmp_path / "a", [{}]), target)
    Store.open(target).add_columns(
        [pa.field("latents_64_ab", pa.binary(), metadata={"darkroom.kind": "latents"})]
    )
    report = import_pictures(make_folder(tmp_path / "b", [{"latents_64_ab": 5}], start=1), target)
    assert report.renamed == {"latents_64_ab": "source_latents_64_ab"}
    assert rows_of(target, ["latents_64_ab"])[1] == {"latents_64_ab": None}


def test_what_was_deleted_by_id_stays_out(tmp_path, target):
    source = make_folder(tmp_path / "a", [{} for _ in range(3)])
    import_pictures(source, target)
    store = Store.open(target)
    store.delete(ids=[rows_of(target, ["id"])[1]["id"]])
    report = import_pictures(source, target)
    assert (report.added, report.doubles, report.rejected) == (0, 2, {"deleted": 1})
    store.refresh()
    assert store.delete(source="a").rows == 2
    assert import_pictures(source, target).added == 2, "a source deleted whole may come in again"


def test_sources_keep_apart_names(tmp_path, target):
    import_pictures(make_folder(tmp_path / "x" / "train", [{}]), target)
    second = import_pictures(make_folder(tmp_path / "y" / "train", [{}], start=1), target)
    assert second.source == "y/train"
    assert Store.open(target).sources() == {"train": 1, "y/train": 1}
    (tmp_path / "x" / "train").rename(tmp_path / "z")
    (tmp_path / "w").mkdir()
    (tmp_path / "z").rename(tmp_path / "w" / "train")
    assert import_pictures(tmp_path / "w" / "train", target).source == "train", "it was moved"


def test_fragments_are_cut_by_rows_and_their_sizes_noted(tmp_path, target):
    source = make_folder(tmp_path / "a", [{} for _ in range(25)])
    import_pictures(source, target, rows_per_fragment=10)
    store = Store.open(target)
    assert [f.num_rows for f in store.fragments] == [10, 10, 5]
    assert len(list((target / "_shapes").iterdir())) == 3
    assert store.shapes() == [{(24, 20): 10}, {(24, 20): 10}, {(24, 20): 5}]
    assert [r["key"] for r in rows_of(target, ["key"])] == [f"{i:04d}.png" for i in range(25)]


@pytest.mark.parametrize("workers", [1, 5])
def test_rows_keep_the_sources_order_for_any_number_of_threads(tmp_path, target, workers):
    source = make_folder(tmp_path / "a", [{} for _ in range(300)])
    import_pictures(source, target, workers=workers)
    assert [r["key"] for r in rows_of(target, ["key"])] == [f"{i:04d}.png" for i in range(300)]


def test_progress_and_report(tmp_path, target):
    told: list[tuple[int, int | None]] = []
    source = make_folder(tmp_path / "a", [{} for _ in range(300)])
    report = import_pictures(source, target, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (300, 300)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert report.wall_s > 0
    assert report.pictures_per_s == pytest.approx(300 / report.wall_s)
    assert report.lines()[0] == f"300 pictures of a added to {target}, now of 300"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"background": "wite"}, "no colour 'wite'"),
        ({"on_missing_caption": "drop"}, "allowed: reject or keep"),
        ({"min_size": 0}, "min_size 0"),
        ({"max_pixels": 10**10}, "max_pixels 10000000000"),
    ],
)
def test_wrong_settings_are_told_before_anything_happens(tmp_path, target, settings, told):
    with pytest.raises(InputError, match=told):
        import_pictures(make_folder(tmp_path / "a", [{}]), target, **settings)
    assert not target.exists()


def test_two_imports_at_once_do_not_mix(tmp_path, target):
    source = make_folder(tmp_path / "a", [{} for _ in range(3)])
    import_pictures(source, target)
    refused: list[BaseException] = []

    def second(done: int, total: int | None) -> None:
        try:
            import_pictures(source, target)
        except StoreError as error:
            refused.append(error)

    make_folder(source, [{}], start=3)
    assert import_pictures(source, target, progress=second).added == 1
    assert "another import into" in str(refused[0])


def test_others_may_write_while_an_import_runs(tmp_path, target):
    """As `prepare` does: columns are added and filled while rows come in."""
    source = make_folder(tmp_path / "a", [{} for _ in range(600)])
    Store.create(target)
    stop, errors = threading.Event(), []

    def meddle() -> None:
        number = 0
        while not stop.is_set():
            try:
                Store.open(target).add_columns([pa.field(f"c{number}", pa.int32())])
                number += 1
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        report = import_pictures(source, target, rows_per_fragment=50)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert report.added == 600
    assert [r["key"] for r in rows_of(target, ["key"])] == [f"{i:04d}.png" for i in range(600)]
    assert "c0" in Store.open(target).columns()


def pack(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members:
            file.writestr(name, data)
    return path


def keys_of(target: Path) -> dict[str, str]:
    return {row["key"]: row["caption"] for row in rows_of(target, ["key", "caption"])}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_pictures_of_one_name_in_a_zip_all_come_in(tmp_path, target):
    """The second was called a double and dropped, though its bytes are others."""
    first, second, third = (encoded(noise_picture(i)) for i in range(3))
    members = [("a.png", first), ("a.txt", b"one"), ("b.png", third), ("b.txt", b"three")]
    source = pack(tmp_path / "in.zip", [*members, ("a.png", second), ("a.txt", b"two"), ("b.png", third)])
    report = import_pictures(source, target)
    assert keys_of(target) == {"a#1.png": "one", "a.png": "two", "b#1.png": "three"}
    assert (report.added, report.doubles, report.same_name) == (3, 1, 2)
    assert any("2 have the name of a later picture in the same zip" in line for line in report.lines())
    again = import_pictures(source, target)
    assert (again.added, again.doubles) == (0, 4)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_two_metadata_files_of_one_name_in_a_zip_the_last_holds(tmp_path, target):
    """The earlier one goes with the earlier pictures, and with what the last one does not list."""
    pictures = [encoded(noise_picture(i)) for i in range(3)]

    def lines(**captions: str) -> bytes:
        return b"\n".join(
            json.dumps({"file_name": f"{name}.png", "text": text}).encode() for name, text in captions.items()
        )

    source = pack(
        tmp_path / "in.zip",
        [
            ("a.png", pictures[0]),
            ("b.png", pictures[2]),
            ("metadata.jsonl", lines(a="old", b="b", c="gone")),
            ("a.png", pictures[1]),
            ("metadata.jsonl", lines(a="new")),
        ],
    )
    report = import_pictures(source, target)
    assert keys_of(target) == {"a.png": "new", "a#1.png": "old", "b.png": "b"}
    assert report.rejected == {}


def test_a_folder_and_its_zip_may_have_the_same_names(tmp_path, target):
    """What a metadata file of the folder lists hid the zip's picture of that name, uncounted."""
    folder = make_folder(tmp_path / "in", [{"file_name": "a.png", "text": "listed"}])
    (folder / "a.png").write_bytes(encoded(noise_picture(0)))
    pack(folder / "more.zip", [("a.png", encoded(noise_picture(1))), ("a.txt", b"in the zip")])
    assert import_pictures(folder, target).added == 2
    captions = [row["caption"] for row in rows_of(target, ["caption"])]
    assert captions == ["listed", "in the zip"]


def without_case(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Below a folder, names that differ in case or in how accents are written are one file's, as on macOS."""
    real_stat, real_open = os.stat, io.open

    def there(path: Any) -> Any:
        if not isinstance(path, str | Path) or not Path(path).is_relative_to(root):
            return path
        at = root
        for part in Path(path).relative_to(root).parts:
            at /= next((name for name in os.listdir(at) if one_form(name) == one_form(part)), part)
        return at

    monkeypatch.setattr(os, "stat", lambda path, **named: real_stat(there(path), **named))
    monkeypatch.setattr(io, "open", lambda path, *given, **named: real_open(there(path), *given, **named))


def one_form(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


@pytest.mark.parametrize("folds", [True, False])
def test_a_listed_picture_comes_once_where_case_does_not_count(tmp_path, target, monkeypatch, folds):
    """It came again as one that no metadata file lists, without its caption."""
    source = make_folder(tmp_path / "in", [{}, {}])
    (source / "0000.png").rename(source / "Img_0.PNG")
    lines = (source / "metadata.jsonl").read_text().replace("0000.png", "IMG_0.png")
    (source / "metadata.jsonl").write_text(lines)
    if folds:
        without_case(monkeypatch, source)
    report = import_pictures(source, target)
    rejected = {} if folds else {"no-caption": 1, "no-picture": 1}  # two names, for Linux
    assert (report.added, report.doubles, report.rejected) == (2 if folds else 1, 0, rejected)
    assert rows_of(target, ["key", "caption"])[0]["key"] == ("IMG_0.png" if folds else "0001.png")


@pytest.mark.parametrize(("listed", "packed"), [("NFC", "NFD"), ("NFD", "NFC"), ("NFC", "NFC")])
def test_accents_may_be_written_in_two_ways(tmp_path, target, listed, packed):
    """A zip made on macOS has them apart from their letters; what people type has them on them."""
    name, picture = "Café Zoë.png", encoded(noise_picture(1))
    line = json.dumps({"file_name": unicodedata.normalize(listed, name), "text": "a café"})
    members = [(unicodedata.normalize(packed, name), picture), ("metadata.jsonl", line.encode())]
    report = import_pictures(pack(tmp_path / "in.zip", members), target)
    assert (report.added, report.rejected) == (1, {})
    assert rows_of(target, ["caption"]) == [{"caption": "a café"}]


def test_the_root_of_a_drive_has_names_too():
    """Of D:\\ the first letter of each folder's name was lost: it ends in a separator already."""
    tree = FolderTree(Path("/"))
    assert all((Path("/") / name).exists() or os.path.islink(f"/{name}") for name in islice(tree.names(), 5))
