"""Every kind of source gives the same rows; what is wrong in it is set aside with its reason."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from material import encoded, noise_picture
from typer.testing import CliRunner

from darkroom.cli.application import app
from darkroom.data.images import pictures_below
from darkroom.data.importers.folder import FolderSource
from darkroom.data.importers.job import find_kind, import_pictures
from darkroom.data.importers.shards import MdsSource
from darkroom.data.importers.source import Columns, Sample
from darkroom.data.store import Store
from darkroom.errors import InputError
from faults import disk_full, no_more_files

PICTURES = {f"{i:03d}": encoded(noise_picture(i)) for i in range(6)}
CAPTIONS = {name: f"picture {name}" for name in PICTURES}
SCORES = {name: i / 4 for i, name in enumerate(PICTURES)}


def folder_with(path: Path, metadata: str) -> Path:
    """A folder of pictures with a metadata file, or a text beside each."""
    path.mkdir(parents=True)
    for name, data in PICTURES.items():
        (path / f"{name}.png").write_bytes(data)
    entries = [{"file_name": f"{n}.png", "text": CAPTIONS[n], "score": SCORES[n]} for n in PICTURES]
    if metadata.endswith(".csv"):
        with (path / metadata).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["file_name", "text", "score"])
            writer.writeheader()
            writer.writerows(entries)
    elif metadata:
        (path / metadata).write_text("\n".join(map(json.dumps, entries)))
    else:
        for name, caption in CAPTIONS.items():
            (path / f"{name}.txt").write_text(f"{caption}\n")
    return path


def zip_of(folder: Path, to: Path, method: int = zipfile.ZIP_DEFLATED) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(to, "w", method) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    return to


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def webdataset(path: Path, mode: str = "w") -> Path:
    """Two tars as img2dataset writes them, with its Parquet and statistics beside."""
    path.mkdir(parents=True)
    names = list(PICTURES)
    for number, part in enumerate((names[:4], names[4:])):
        ending = "tar.gz" if "gz" in mode else "tar"
        with tarfile.open(path / f"{number:05d}.{ending}", mode) as archive:
            for name in part:
                told = {
                    "caption": CAPTIONS[name], "score": SCORES[name], "url": f"https://a.example/{name}",
                    "key": name, "status": "success", "error_message": None, "width": 24, "height": 20,
                    "original_width": 24, "original_height": 20, "exif": "{}",
                }  # fmt: skip
                add(archive, f"{name}.jpg", PICTURES[name])
                add(archive, f"{name}.json", json.dumps(told).encode())
                add(archive, f"{name}.txt", CAPTIONS[name].encode())
        (path / f"{number:05d}_stats.json").write_text(json.dumps({"count": len(part)}))
        pq.write_table(pa.table({"url": part, "caption": part}), path / f"{number:05d}.parquet")
    return path


def parquet(path: Path, layout: str) -> Path:
    path.mkdir(parents=True)
    names = list(PICTURES)
    for number, part in enumerate((names[:4], names[4:])):
        image: pa.Array
        if layout == "bytes":
            image = pa.array([PICTURES[n] for n in part])
        elif layout == "hub":
            image = pa.array([{"bytes": PICTURES[n], "path": f"{n}.png"} for n in part])
        else:
            (path / "files").mkdir(exist_ok=True)
            for n in part:
                (path / "files" / f"{n}.png").write_bytes(PICTURES[n])
            image = pa.array([f"files/{n}.png" for n in part])
            if layout == "hub-paths":
                image = pa.array(
                    [{"bytes": None, "path": f"files/{n}.png"} for n in part],
                    pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
                )
        table = pa.table(
            {
                "file_name" if layout == "paths" else "image": image,
                "text": [CAPTIONS[n] for n in part],
                "score": [SCORES[n] for n in part],
                "embedding_bytes": [b"\0\1"] * len(part),
            }
        )
        (path / "data").mkdir(exist_ok=True)
        target = path if "paths" in layout else path / "data"
        pq.write_table(table, target / f"train-{number:05d}-of-00002.parquet")
    return path


def mds_shard(samples: list[dict[str, bytes]], columns: dict[str, tuple[str, int | None]]) -> bytes:
    """A shard by the format's description: count, offsets, settings, samples."""
    body = []
    for sample in samples:
        head = b"".join(struct.pack("<I", len(sample[n])) for n, (_, size) in columns.items() if size is None)
        body.append(head + b"".join(sample[n] for n in columns))
    config = json.dumps({"format": "mds", "column_names": list(columns)}).encode()
    at = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = [at := at + length for length in [0, *map(len, body)]]
    return struct.pack(f"<I{len(offsets)}I", len(samples), *offsets) + config + b"".join(body)


MDS_COLUMNS = {
    "caption": ("str", None),
    "jpg": ("bytes", None),
    "latents": ("bytes", None),
    "n": ("int", 8),
    "score": ("float64", 8),
    "tags": ("json", None),
}


def mds(path: Path, packing: str = "") -> Path:
    """Two shards in a folder with an index, as MosaicML Streaming's writer leaves them."""
    path.mkdir(parents=True)
    names, shards = list(PICTURES), []
    pack = {"zstd": zstandard.ZstdCompressor().compress, "gz": gzip.compress}.get(packing)
    for number, part in enumerate((names[:4], names[4:])):
        samples = [
            {
                "caption": CAPTIONS[n].encode(), "jpg": PICTURES[n], "latents": b"\0" * 64,
                "n": struct.pack("<q", int(n)), "score": struct.pack("<d", SCORES[n]),
                "tags": json.dumps(["a", n]).encode(),
            }
            for n in part
        ]  # fmt: skip
        raw = mds_shard(samples, MDS_COLUMNS)
        name = f"shard.{number:05d}.mds"
        packed = pack(raw) if pack else None
        (path / (f"{name}.{packing}" if packing else name)).write_bytes(packed or raw)
        shards.append(
            {
                "column_encodings": [e for e, _ in MDS_COLUMNS.values()],
                "column_names": list(MDS_COLUMNS),
                "column_sizes": [size for _, size in MDS_COLUMNS.values()],
                "compression": packing + ":3" if packing == "zstd" else packing or None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
                "samples": len(part),
                "size_limit": 67108864,
                "version": 2,
                "zip_data": {"basename": f"{name}.{packing}", "bytes": len(packed), "hashes": {}}
                if packed
                else None,
            }
        )
    (path / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return path


SOURCES = {
    "jsonl": lambda p: folder_with(p, "metadata.jsonl"),
    "captions": lambda p: folder_with(p, "captions.jsonl"),
    "csv": lambda p: folder_with(p, "metadata.csv"),
    "txt": lambda p: folder_with(p, ""),
    "zip": lambda p: zip_of(folder_with(p, "metadata.jsonl"), p.parent / "a.zip"),
    "zip-csv-stored": lambda p: zip_of(
        folder_with(p, "captions.csv"), p.parent / "a.zip", zipfile.ZIP_STORED
    ),
    "zip-txt": lambda p: zip_of(folder_with(p, ""), p.parent / "a.zip"),
    "webdataset": webdataset,
    "webdataset-gz": lambda p: webdataset(p, "w:gz"),
    "parquet-bytes": lambda p: parquet(p, "bytes"),
    "parquet-hub": lambda p: parquet(p, "hub"),
    "parquet-paths": lambda p: parquet(p, "paths"),
    "parquet-hub-paths": lambda p: parquet(p, "hub-paths"),
    "mds": mds,
    "mds-zstd": lambda p: mds(p, "zstd"),
    "mds-gz": lambda p: mds(p, "gz"),
}


def rows_of(path: str | Path, columns: list[str]) -> list[dict]:
    store = Store.open(path)
    return store.take(store.select(None), columns).to_pylist()


@pytest.mark.parametrize("made", SOURCES)
def test_every_kind_of_source_gives_the_same_rows(tmp_path, made):
    report = import_pictures(SOURCES[made](tmp_path / "source"), tmp_path / "s.lance")
    assert (report.added, report.doubles, report.rejected) == (6, 0, {})
    rows = rows_of(tmp_path / "s.lance", ["picture", "caption", "width", "height", "format"])
    assert [row["picture"] for row in rows] == list(PICTURES.values())
    assert [row["caption"] for row in rows] == list(CAPTIONS.values())
    assert {(row["width"], row["height"], row["format"]) for row in rows} == {(24, 20, "PNG")}
    if "txt" not in made:
        assert [r["score"] for r in rows_of(tmp_path / "s.lance", ["score"])] == list(SCORES.values())
    again = import_pictures(
        tmp_path / "source" if "zip" not in made else next(tmp_path.rglob("a.zip")), tmp_path / "s.lance"
    )
    assert (again.added, again.doubles, again.num_rows) == (0, 6, 6)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        ("jsonl", "folder"),
        ("zip", "folder"),
        ("webdataset", "webdataset"),
        ("parquet-hub", "parquet"),
        ("mds", "mds"),
    ],
)
def test_the_kind_is_found(tmp_path, made, kind):
    assert find_kind(SOURCES[made](tmp_path / "source")) == kind


def test_parquet_beside_pictures_is_taken_only_where_it_has_pictures(tmp_path):
    source = folder_with(tmp_path / "set" / "train", "metadata.jsonl").parent
    pq.write_table(pa.table({"n": [1, 2]}), source / "notes.parquet")
    assert find_kind(source) == "folder"
    assert find_kind(parquet(tmp_path / "p", "paths")) == "parquet"
    (tmp_path / "only").mkdir()
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "only" / "notes.parquet")
    with pytest.raises(InputError, match="no image column found in notes.parquet"):
        import_pictures(tmp_path / "only", tmp_path / "s.lance")


def test_several_zips_keep_their_names_apart(tmp_path):
    folder = folder_with(tmp_path / "pictures", "")
    for name in ("a.zip", "b.ZIP"):
        zip_of(folder, tmp_path / "set" / name)
    (folder / "000.txt").write_text("another caption")
    zip_of(folder, tmp_path / "set" / "b.ZIP")
    report = import_pictures(tmp_path / "set", tmp_path / "s.lance")
    assert (report.added, report.doubles) == (7, 5)
    keys = [row["key"] for row in rows_of(tmp_path / "s.lance", ["key"])]
    assert keys[0] == "a.zip/000.png"
    assert keys[-1] == "b.ZIP/000.png"


def test_what_is_no_source_is_told(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        import_pictures(tmp_path / "none", tmp_path / "s.lance")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no pictures in"):
        import_pictures(tmp_path / "empty", tmp_path / "s.lance")
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(InputError, match="is no source; allowed: a folder"):
        import_pictures(tmp_path / "a.docx", tmp_path / "s.lance")
    (tmp_path / "torn.zip").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(InputError, match="no whole zip archive"):
        import_pictures(tmp_path / "torn.zip", tmp_path / "s.lance")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="no Parquet file"):
        import_pictures(tmp_path / "torn.parquet", tmp_path / "s.lance")
    with pytest.raises(InputError, match="kind 'lmdb'; allowed: auto, folder"):
        import_pictures(tmp_path, tmp_path / "s.lance", kind="lmdb")
    assert not (tmp_path / "s.lance").exists(), "a mistake makes no store"


@pytest.mark.parametrize("made", ["jsonl", "parquet-bytes", "mds"])
def test_columns_are_named_by_the_user_or_told(tmp_path, made):
    source = SOURCES[made](tmp_path / "source")
    named = {"jsonl": "text", "parquet-bytes": "text", "mds": "caption"}[made]
    with pytest.raises(InputError, match=f"no caption column '{named}s'; .*did you mean {named}"):
        import_pictures(source, tmp_path / "s.lance", caption_column=named + "s")
    with pytest.raises(InputError, match="no image column 'imag'"):
        import_pictures(source, tmp_path / "s.lance", image_column="imag")
    report = import_pictures(source, tmp_path / "s.lance", caption_column="score")
    assert report.added == 6
    captions = {row["caption"] for row in rows_of(tmp_path / "s.lance", ["caption"])}
    assert captions == {str(score) for score in SCORES.values()}


def test_a_source_without_captions_says_which_columns_it_has(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": list(PICTURES.values()), "label": [1] * 6}), path)
    with pytest.raises(InputError, match="no caption column found in a.parquet, which has image, label"):
        import_pictures(path, tmp_path / "s.lance")


def test_a_folder_with_a_zip_beside_its_captions(tmp_path):
    """The layout of the emoji set: notes and licences are no pictures, and no rejects."""
    folder = folder_with(tmp_path / "pictures", "")
    for text in folder.glob("*.txt"):
        text.unlink()
    source = tmp_path / "set"
    zip_of(folder, source / "images.zip", zipfile.ZIP_STORED)
    entries = [{"file_name": f"{n}.png", "text": CAPTIONS[n], "tags": ["a"], "group": "g"} for n in PICTURES]
    (source / "captions.jsonl").write_text("\n".join(map(json.dumps, entries)))
    for name in ("LICENSE", "README.md", ".hidden.png", "LICENSE-captions"):
        (source / name).write_text("x")
    report = import_pictures(source, tmp_path / "s.lance")
    assert (report.kind, report.added, report.rejected) == ("folder", 6, {})
    assert rows_of(tmp_path / "s.lance", ["key", "tags", "group"])[2] == {
        "key": "002.png", "tags": ["a"], "group": "g",
    }  # fmt: skip


def test_metadata_in_subfolders_and_paths_that_lead_out(tmp_path):
    source = folder_with(tmp_path / "set" / "train", "metadata.jsonl").parent
    (tmp_path / "secret.png").write_bytes(encoded(noise_picture(99)))
    with (source / "train" / "metadata.jsonl").open("a") as file:
        for name in ("../../secret.png", str(tmp_path / "secret.png"), "gone.png"):
            file.write("\n" + json.dumps({"file_name": name, "text": "x"}))
        file.write('\n{"file_name": "000.png", "text": \n[1, 2]\n')
    (source / "loose.png").write_bytes(encoded(noise_picture(50)))
    (source / "noted.png").write_bytes(encoded(noise_picture(51)))
    (source / "noted.txt").write_text("  a note\n of two lines ")
    report = import_pictures(source, tmp_path / "s.lance")
    assert report.added == 7
    assert report.rejected == {"no-picture": 3, "bad-metadata": 2, "no-caption": 1}
    assert rows_of(tmp_path / "s.lance", ["caption", "key"])[-1] == {
        "caption": "a note of two lines", "key": "noted.png",
    }  # fmt: skip


def test_a_picture_with_several_captions_is_several_rows(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(PICTURES["001"])
    (tmp_path / "a" / "metadata.jsonl").write_text(
        json.dumps({"image": "x.png", "captions": ["one", "two", " "]})
    )
    import_pictures(tmp_path / "a", tmp_path / "s.lance")
    assert [row["caption"] for row in rows_of(tmp_path / "s.lance", ["caption"])] == ["one", "two"]


def test_masks_are_no_pictures(tmp_path):
    """NAME.mask.png belongs to NAME, in folders, zips and tars."""
    names = {"a.mask.png": "000", "a.png": "001", "in/b.MASK.PNG": "002", "in/b.png": "003"}
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True)
    for name, picture in names.items():
        (folder / name).write_bytes(PICTURES[picture])
    with tarfile.open(tmp_path / "made.tar", "w") as archive:
        for name, picture in names.items():
            add(archive, name.lower(), PICTURES[picture])
    for i, source in enumerate((folder, zip_of(folder, tmp_path / "made.zip"), tmp_path / "made.tar")):
        store = tmp_path / f"{i}.lance"
        import_pictures(source, store, on_missing_caption="keep")
        assert {row["picture"] for row in rows_of(store, ["picture"])} == {PICTURES["001"], PICTURES["003"]}
    assert [path.name for path in pictures_below(folder)] == ["a.png", "b.png"]


def test_what_img2dataset_writes_comes_along(tmp_path):
    report = import_pictures(webdataset(tmp_path / "w"), tmp_path / "s.lance")
    row = rows_of(tmp_path / "s.lance", ["url", "status", "source_width", "source_key", "key", "exif"])[5]
    assert row == {
        "url": "https://a.example/005", "status": "success", "source_width": 24, "source_key": "005",
        "key": "00001.tar:005", "exif": "{}",
    }  # fmt: skip
    assert report.renamed == {"key": "source_key", "width": "source_width", "height": "source_height"}


def test_broken_webdataset_samples_are_set_aside(tmp_path):
    path = tmp_path / "w.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "no_picture.txt", b"x")
        add(archive, "bad_json.png", PICTURES["001"])
        add(archive, "bad_json.json", b"{")
        add(archive, "dir/no_caption.png", PICTURES["002"])
        add(archive, "from_json.PNG", PICTURES["003"])
        add(archive, "from_json.json", b'{"prompt": "told in JSON", "n": 1}')
        add(archive, "many.png", PICTURES["004"])
        add(archive, "many.cls", b"7")
        add(archive, "many.txt", b"text \xff wins")
        add(archive, "many.json", b'{"caption": "other"}')
        add(archive, "many.npy", b"12")
    report = import_pictures(path, tmp_path / "s.lance", caption_encoding="cp1252")
    assert report.rejected == {"no-picture": 1, "bad-metadata": 1, "no-caption": 1}
    rows = rows_of(tmp_path / "s.lance", ["caption", "key", "n", "cls", "source_caption"])
    assert rows == [
        {"caption": "told in JSON", "key": "from_json", "n": 1, "cls": None, "source_caption": None},
        {"caption": "text ÿ wins", "key": "many", "n": None, "cls": 7, "source_caption": "other"},
    ]
    assert report.left_out == ["npy"]


def test_a_torn_part_costs_only_its_rest(tmp_path):
    source = webdataset(tmp_path / "w")
    data = (source / "00000.tar").read_bytes()
    (source / "00000.tar").write_bytes(data[: 512 * 7 + 100])
    report = import_pictures(source, tmp_path / "s.lance")
    assert report.rejected["torn-part"] == 1
    assert 2 <= report.added < 5  # the sample before the tear may have had more files
    (source / "00000.tar").write_bytes(data)
    assert import_pictures(source, tmp_path / "s.lance").num_rows == 6, "a mended part is read anew"


def test_damaged_mds_shards_are_set_aside(tmp_path):
    source = mds(tmp_path / "m", "zstd")
    whole = (source / "shard.00000.mds.zstd").read_bytes()
    for damage, reason in ((whole[:-20], "torn-part"), (b"\0" * len(whole), "torn-part")):
        (source / "shard.00000.mds.zstd").write_bytes(damage)
        report = import_pictures(source, tmp_path / f"s{len(damage)}.lance")
        assert (report.added, report.rejected) == (2, {reason: 1})
    (source / "shard.00000.mds.zstd").unlink()
    assert import_pictures(source, tmp_path / "t.lance").rejected == {"torn-part": 1}


def test_a_machine_that_fails_sets_nothing_aside(tmp_path):
    """A full disk where a shard is unpacked, and no more open files: the import ends, and can be repeated."""
    shards = MdsSource(mds(tmp_path / "m", "zstd"), Columns())
    with disk_full(512), pytest.raises(OSError, match="File too large"):
        list(shards.items(set()))
    assert sum(isinstance(item, Sample) for item in shards.items(set())) == 6

    folder = FolderSource(folder_with(tmp_path / "f", "txt"), Columns())
    items = folder.items(set())
    next(items)
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        list(items)
    assert sum(isinstance(item, Sample) for item in folder.items(set())) == 6


def test_an_mds_index_cannot_lead_out(tmp_path):
    source = mds(tmp_path / "m")
    (source / "shard.00000.mds").rename(tmp_path / "shard.00000.mds")
    index = json.loads((source / "index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = "../shard.00000.mds"
    (source / "index.json").write_text(json.dumps(index))
    assert import_pictures(source, tmp_path / "s.lance").rejected == {"torn-part": 1}
    index["shards"][0]["format"] = "jsonl"
    (source / "index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="shards of jsonl 2"):
        import_pictures(source, tmp_path / "s.lance", kind="mds")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"column_encodings": ["str"]}, "of different lengths"),
        (
            {"column_names": ["image"] * 3, "column_encodings": ["png"] * 3, "column_sizes": [None] * 3},
            "twice",
        ),
        ({"samples": -1}, "samples: must be at least 0"),
        ({"raw_data": {"basename": 5}}, "raw_data.basename: must be text"),
    ],
)
def test_an_mds_index_at_odds_with_itself_is_refused(tmp_path, change, said):
    source = mds(tmp_path / "m")
    index = json.loads((source / "index.json").read_text())
    index["shards"][0] |= change
    (source / "index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=f"no index of MDS shards: .*{said}"):
        import_pictures(source, tmp_path / "s.lance")


def test_binary_columns_are_left_out_and_named(tmp_path):
    assert import_pictures(mds(tmp_path / "m"), tmp_path / "m.lance").left_out == ["latents"]
    assert import_pictures(parquet(tmp_path / "p", "hub"), tmp_path / "p.lance").left_out == [
        "embedding_bytes"
    ]


def test_paths_in_parquet_stay_inside(tmp_path):
    source = parquet(tmp_path / "p", "paths")
    table = pq.read_table(source / "train-00000-of-00002.parquet")
    (tmp_path / "secret.png").write_bytes(PICTURES["000"])
    paths = pa.array(["../secret.png", str(tmp_path / "secret.png"), None, "files/003.png"])
    pq.write_table(table.set_column(0, "file_name", paths), source / "train-00000-of-00002.parquet")
    report = import_pictures(source, tmp_path / "s.lance")
    assert (report.added, report.rejected) == (3, {"no-picture": 3})


def test_a_source_in_which_nothing_is_a_picture_leaves_no_store(tmp_path):
    """Or one that inspect tells of, where there were pictures that could not be used."""
    tarfile.open(tmp_path / "a.tar", "w").close()
    pq.write_table(
        pa.table({"image": pa.array([], pa.binary()), "text": pa.array([], pa.string())}),
        tmp_path / "a.parquet",
    )
    for name in ("a.tar", "a.parquet"):
        with pytest.raises(InputError, match=f"no pictures in .*{name}; no store was made"):
            import_pictures(tmp_path / name, tmp_path / "store")
        assert not (tmp_path / "store").exists()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "a.png").write_bytes(b"torn")
    (tmp_path / "torn" / "a.txt").write_text("torn")
    assert import_pictures(tmp_path / "torn", tmp_path / "store").rejected == {"undecodable": 1}
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "store"), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert (told["rows"], told["set_aside"], told["contact_sheet"]) == (0, {"undecodable": 1}, None)
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "store")]).exit_code == 0
    Store.create(tmp_path / "mine.lance")
    assert import_pictures(tmp_path / "a.tar", tmp_path / "mine.lance").added == 0
    assert Store.open(tmp_path / "mine.lance").num_rows == 0, "the control: a store that was there stays"


def test_pictures_of_two_sources_come_back_with_the_second_when_the_first_is_deleted(tmp_path):
    """They were doubles when it was read; a tar that was read to its end is not read again otherwise."""
    for name in ("first", "second", "third"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            for key, data in list(PICTURES.items())[: 3 if name != "third" else 0]:
                add(archive, f"{key}.png", data)
                add(archive, f"{key}.txt", CAPTIONS[key].encode())
            add(archive, f"{name}.png", encoded(noise_picture(len(name) * 7)))
            add(archive, f"{name}.txt", name.encode())
        import_pictures(tmp_path / f"{name}.tar", tmp_path / "s.lance")
    store = Store.open(tmp_path / "s.lance")
    assert store.sources() == {"first.tar": 4, "second.tar": 1, "third.tar": 1}
    store.delete(source="first.tar")
    again = import_pictures(tmp_path / "second.tar", tmp_path / "s.lance")
    assert (again.added, again.doubles, again.num_rows) == (3, 1, 5)
