"""Captions of any encoding come in as they were written or are set aside; what is no file is counted."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from material import encoded, noise_picture
from test_readers import mds_shard

from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store
from darkroom.data.texts import MAX_LINE_BYTES, TextError, TextLines, decode_text, readable
from darkroom.errors import InputError

GOOD = {
    "utf8": ("café 写真".encode(), "café 写真"),
    "mark": (b"\xef\xbb\xbfcaf\xc3\xa9 2", "café 2"),
    "cp1252": (b"caf\xe9 \x80 3", "café € 3"),
    "utf16": ("café 4".encode("utf-16"), "café 4"),
    "utf16be": (b"\xfe\xff" + "café 写 5".encode("utf-16-be"), "café 写 5"),
    "plain16": ("café 6".encode("utf-16-le"), "café 6"),
    "utf32": ("café 7".encode("utf-32"), "café 7"),
}
BAD = {
    "nul": b"a caption\0 with a NUL",
    "none": b"\x81\x8d\xff is in no encoding",
    "torn16": b"\xff\xfea\0b",
    "huge": b"x" * (1024**2 + 1),
}
CAPTIONS = {name: data for name, (data, _) in GOOD.items()} | BAD
PICTURES = {name: encoded(noise_picture(i)) for i, name in enumerate(CAPTIONS)}


def folder(path: Path) -> Path:
    path.mkdir()
    for name, data in CAPTIONS.items():
        (path / f"{name}.png").write_bytes(PICTURES[name])
        (path / f"{name}.txt").write_bytes(data)
    return path


def zipped(path: Path) -> Path:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in CAPTIONS.items():
            archive.writestr(f"{name}.png", PICTURES[name])
            archive.writestr(f"{name}.txt", data)
    return path.with_suffix(".zip")


def tarred(path: Path) -> Path:
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        for name, data in CAPTIONS.items():
            for ending, content in (("png", PICTURES[name]), ("txt", data)):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path.with_suffix(".tar")


def parquet(path: Path, *, as_text: bool) -> Path:
    captions = pa.array(list(CAPTIONS.values()), pa.binary())
    if as_text:  # as other writers do: Parquet takes any bytes for text
        captions = pa.StringArray.from_buffers(len(captions), *captions.buffers()[1:])
    pictures = pa.array([PICTURES[name] for name in CAPTIONS])
    pq.write_table(pa.table({"image": pictures, "text": captions}), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def mds(path: Path) -> Path:
    path.mkdir()
    columns = {"caption": ("str", None), "jpg": ("jpeg", None)}
    raw = mds_shard([{"caption": CAPTIONS[n], "jpg": PICTURES[n]} for n in CAPTIONS], columns)
    (path / "shard.00000.mds").write_bytes(raw)
    shard = {
        "column_encodings": ["str", "jpeg"], "column_names": list(columns), "column_sizes": [None, None],
        "compression": None, "format": "mds", "hashes": [], "samples": len(CAPTIONS), "version": 2,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}}, "zip_data": None,
    }  # fmt: skip
    (path / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    return path


SOURCES = {
    "folder": folder,
    "zip": zipped,
    "tar": tarred,
    "parquet": lambda path: parquet(path, as_text=True),
    "parquet-bytes": lambda path: parquet(path, as_text=False),
    "mds": mds,
}


def rejected(store: Path) -> list[dict]:
    return [json.loads(line) for line in (store / "rejected.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", SOURCES)
def test_captions_are_read_alike_from_every_kind_of_source(tmp_path, kind):
    report = import_pictures(
        SOURCES[kind](tmp_path / "source"), tmp_path / "s.lance", caption_encoding="cp1252"
    )
    store = Store.open(tmp_path / "s.lance")
    found = store.take(store.select(None), ["picture", "caption"]).to_pylist()
    assert {row["picture"]: row["caption"] for row in found} == {
        PICTURES[name]: text for name, (_, text) in GOOD.items()
    }
    assert report.rejected == {"bad-caption": len(BAD)}
    assert report.recoded == {"cp1252": 1, "utf-16": 3, "utf-32": 1}
    assert any("read 1 as cp1252, 3 as utf-16" in line for line in report.lines())
    told = [line["detail"] for line in rejected(tmp_path / "s.lance")]
    for reason in ("NUL", "neither UTF-8 nor UTF-16 nor cp1252", "no whole UTF-16", "1,048,577 bytes"):
        assert [reason in detail for detail in told].count(True) == 1, (reason, told)


ENTRIES = [("a.png", "café"), ("b.png", "写真"), ("c.png", "plain")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_metadata_files_of_any_encoding(tmp_path, name, encoding):
    source = tmp_path / "source"
    source.mkdir()
    for number, (file, _) in enumerate(ENTRIES):
        (source / file).write_bytes(PICTURES[list(PICTURES)[number]])
    if name.endswith("csv"):
        text = "file_name,text\r\n" + "".join(f"{file},{caption}\r\n" for file, caption in ENTRIES)
    else:
        lines = [{"file_name": f, "text": c} for f, c in ENTRIES]
        text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (source / name).write_bytes(text.encode(encoding))
    report = import_pictures(source, tmp_path / "s.lance")
    store = Store.open(tmp_path / "s.lance")
    assert store.take(range(3), ["caption"])["caption"].to_pylist() == [caption for _, caption in ENTRIES]
    assert report.recoded == ({"utf-16": 1} if "16" in encoding else {})


CYRILLIC = "кошка «Мурка» на столе"


@pytest.mark.parametrize("kind", [*SOURCES, "metadata.jsonl"])
def test_captions_of_an_unnamed_encoding_are_rejected_until_it_is_named(tmp_path, monkeypatch, kind):
    """cp1251 read as cp1252 is letters too, other ones."""
    captions = {"russian": CYRILLIC.encode("cp1251"), "plain": b"a cat"}
    if kind == "metadata.jsonl":
        source = tmp_path / "source"
        source.mkdir()
        lines = [b'{"file_name": "%s.png", "text": "%s"}' % (n.encode(), c) for n, c in captions.items()]
        (source / kind).write_bytes(b"\n".join(lines))
        for name in captions:
            (source / f"{name}.png").write_bytes(encoded(noise_picture(len(name))))
    else:
        monkeypatch.setattr(f"{__name__}.CAPTIONS", captions)
        pictures = {name: encoded(noise_picture(len(name))) for name in captions}
        monkeypatch.setattr(f"{__name__}.PICTURES", pictures)
        source = SOURCES[kind](tmp_path / "source")

    def stored() -> set[str]:
        store = Store.open(tmp_path / "s.lance")
        return set(store.take(store.select(None), ["caption"])["caption"].to_pylist())

    report = import_pictures(source, tmp_path / "s.lance")
    if kind == "metadata.jsonl":  # the line, and the picture that it may have named
        assert report.rejected == {"bad-metadata": 2}
    else:
        assert report.rejected == {"bad-caption": 1}
    assert stored() == {"a cat"}
    assert report.recoded == {}
    assert any("1 texts are not UTF-8" in line and "--caption-encoding" in line for line in report.lines())
    assert any("not UTF-8" in line["detail"] for line in rejected(tmp_path / "s.lance"))
    again = import_pictures(source, tmp_path / "s.lance", caption_encoding="windows-1251")
    assert (again.added, again.doubles, again.rejected) == (1, 1, {})
    assert again.recoded == {"cp1251": 1}
    assert stored() == {"a cat", CYRILLIC}


@pytest.mark.parametrize("name", ["nonsense", "rot13", "utf-16", "hex", "cp037", ""])
def test_what_is_no_encoding_of_captions_is_refused_before_anything_is_read(tmp_path, name):
    with pytest.raises(InputError, match="allowed: cp1252, cp1251"):
        import_pictures(folder(tmp_path / "source"), tmp_path / "s.lance", caption_encoding=name)
    assert not (tmp_path / "s.lance").exists()


def test_lines_that_are_no_text_hide_no_others(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in "abc":
        (source / f"{name}.png").write_bytes(encoded(noise_picture(ord(name))))
    lines = [
        b'{"file_name": "a.png", "text": "caf\xe9"}',
        b"\x81\xff",
        b'{"file_name": "b.png", "text": "b"}',
    ]
    surrogate = b'{"file_name": "c.png", "text": "half \\ud83d"}'
    (source / "metadata.jsonl").write_bytes(b"\n".join([*lines, surrogate, b"[" * 100_000]))
    report = import_pictures(source, tmp_path / "s.lance", caption_encoding="cp1252")
    store = Store.open(tmp_path / "s.lance")
    assert store.take([0, 1], ["caption"])["caption"].to_pylist() == ["café", "b"]
    assert report.rejected == {"bad-metadata": 2, "bad-caption": 1}
    assert {line["key"] for line in rejected(tmp_path / "s.lance")} == {
        "metadata.jsonl:2", "metadata.jsonl:5", "c.png",
    }  # fmt: skip


def test_a_line_without_end_is_not_kept_in_memory():
    pieces = [b"one\n", *[b"x" * 1024**2] * (MAX_LINE_BYTES // 1024**2 + 2), b"x\ntwo\n"]
    lines = TextLines(pieces, Counter())
    assert next(lines) == "one\n"
    with pytest.raises(TextError, match="a line of more than"):
        next(lines)
    assert list(lines) == ["two\n"]


def test_names_that_are_no_utf8_and_files_that_are_none(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    odd = os.fsencode(source) + b"/caf\xe9"
    with open(odd + b".png", "wb") as file:
        file.write(encoded(noise_picture(1)))
    with open(odd + b".txt", "wb") as file:
        file.write(b"odd")
    with open(odd + b"2.png", "wb") as file:
        file.write(b"torn")
    with open(odd + b"2.txt", "wb") as file:
        file.write(b"torn")
    (source / "good.png").write_bytes(encoded(noise_picture(2)))
    (source / "good.txt").write_text("good")
    os.mkfifo(source / "pipe.png")
    os.mkfifo(source / "metadata.jsonl")
    (source / "dangling.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "elsewhere").mkdir()
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    report = import_pictures(source, tmp_path / "s.lance")
    assert (report.added, report.rejected) == (2, {"no-file": 3, "bad-metadata": 1, "undecodable": 1})
    store = Store.open(tmp_path / "s.lance")
    rows = store.take(store.select(None), ["key", "caption"]).to_pylist()
    assert sorted((r["key"], r["caption"]) for r in rows) == [("caf\\xe9.png", "odd"), ("good.png", "good")]
    told = {line["key"]: line["detail"] for line in rejected(tmp_path / "s.lance")}
    assert told["pipe.png"] == "a fifo, no file"
    assert told["dangling.png"] == "a link that leads nowhere"
    assert told["linked"] == "a link to a folder, which is not followed"
    assert "caf\\xe92.png" in told
    again = import_pictures(source, tmp_path / "s.lance")
    assert (again.added, again.doubles, again.rejected) == (0, 2, report.rejected)


def test_a_caption_that_is_no_file_is_not_taken_for_none(tmp_path):
    """Also where pictures without a caption are kept: there the caption would be lost without a word."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pipe", "lost", "none"):
        (source / f"{name}.png").write_bytes(encoded(noise_picture(len(name) + ord(name[0]))))
    os.mkfifo(source / "pipe.txt")
    (source / "lost.caption").symlink_to(tmp_path / "nothing")
    report = import_pictures(source, tmp_path / "s.lance", on_missing_caption="keep")
    assert (report.added, report.rejected) == (1, {"bad-caption": 2})
    told = {line["key"]: line["detail"] for line in rejected(tmp_path / "s.lance")}
    assert told == {
        "pipe.png": "pipe.txt: a fifo, no file",
        "lost.png": "lost.caption: a link that leads nowhere",
    }


def test_members_of_archives_that_are_no_files(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("../up.png", "good.png", "x/../../up2.png"):
            archive.writestr(name, encoded(noise_picture(len(name))))
            archive.writestr(name.replace(".png", ".txt"), name)
    report = import_pictures(tmp_path / "a.zip", tmp_path / "zip.lance")
    assert (report.added, report.rejected) == (1, {"unsafe-name": 2})
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, type_ in (("pipe.png", tarfile.FIFOTYPE), ("link.png", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = type_, "good.png"
            archive.addfile(member)
    report = import_pictures(tmp_path / "a.tar", tmp_path / "tar.lance")
    assert (report.added, report.rejected) == (0, {"no-file": 2})


def test_texts_one_by_one():
    counted: Counter[str] = Counter()
    assert decode_text(b"ascii", counted) == "ascii"
    assert decode_text(b"", counted) == ""
    assert counted == Counter()
    assert decode_text(b"\x93quoted\x94", counted, "cp1252") == "“quoted”"
    assert counted == Counter({"cp1252": 1})
    assert decode_text("«MENÜ» »Spaß«".encode("cp1252"), counted, "cp1252") == "«MENÜ» »Spaß«"
    # Read as the fallback says, the part that is UTF-8 would be spoiled.
    for spoiled in (
        "café ".encode() + b"caf\xe9",
        "a ‘b’".encode() + b"\xe9",
        "写真\xe9".encode()[:-1] + b"x",
    ):
        with pytest.raises(TextError, match="UTF-8 with bytes of another encoding in it"):
            decode_text(spoiled, counted, "cp1252")
    with pytest.raises(TextError, match="another encoding"):
        decode_text(
            b"a\xed\xa0\xbd\xed\xb8\x80", counted, "cp1252"
        )  # surrogate pairs, as Java's and MySQL's exports have
    assert counted["cp1252"] == 2
    assert readable("plain ü") == "plain ü"
    assert readable(os.fsdecode(b"a\xff")) == "a\\xff"
    assert readable("\ud83d") == "\\ud83d"
