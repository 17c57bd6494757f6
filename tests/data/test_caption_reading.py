"""A caption comes in as it was written or is set aside: never changed, never empty because unread."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from material import encoded, noise_picture
from test_readers import add, mds_shard

from darkroom.data.importers.job import ImportReport, import_pictures
from darkroom.data.store import Store
from darkroom.errors import InputError

PICTURE = {name: encoded(noise_picture(ord(name))) for name in "abcd"}


def folder(path: Path, names: str = "abc") -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / f"{name}.png").write_bytes(PICTURE[name])
    return path


def stored(path: Path) -> dict[str, str]:
    store = Store.open(path)
    rows = store.take(store.select(None), ["key", "caption"]).to_pylist()
    return {row["key"]: row["caption"] for row in rows}


def reasons(path: Path) -> dict[str, str]:
    lines = (path / "rejected.jsonl").read_text().splitlines()
    return {line["key"]: line["reason"] for line in map(json.loads, lines)}


def kept(source: Path, to: Path) -> ImportReport:
    return import_pictures(source, to, on_missing_caption="keep")


def test_a_picture_of_an_unread_line_is_not_kept_without_its_caption(tmp_path):
    source = folder(tmp_path / "set" / "torn")
    (source / "metadata.jsonl").write_bytes(
        b'{"file_name": "a.png", "text": "an a"}\n{"file_name": "b.png", "text": "caf\xe9"}\n'
    )
    (source / "d.png").write_bytes(PICTURE["d"])
    (source / "d.txt").write_text("a d")
    (source / "deep").mkdir()
    (source / "deep" / "e.png").write_bytes(encoded(noise_picture(5)))
    whole = folder(source.parent / "torn2", "a")  # a name that begins alike: another folder
    (whole / "metadata.jsonl").write_text('{"file_name": "other.png", "text": "x"}\n')
    (source.parent / "loose.png").write_bytes(encoded(noise_picture(6)))
    report = kept(source.parent, tmp_path / "s.lance")
    assert stored(tmp_path / "s.lance") == {
        "torn/a.png": "an a", "torn/d.png": "a d", "torn2/a.png": "", "loose.png": "",
    }  # fmt: skip
    assert report.rejected == {"bad-metadata": 4, "no-picture": 1}
    assert {key for key, why in reasons(tmp_path / "s.lance").items() if why == "bad-metadata"} == {
        "torn/metadata.jsonl:2", "torn/b.png", "torn/c.png", "torn/deep/e.png",
    }  # fmt: skip


def test_a_mended_line_brings_its_picture(tmp_path):
    source = folder(tmp_path / "set", "ab")
    (source / "metadata.csv").write_text('file_name,text\na.png,an a\nb.png,"a b\n')
    assert kept(source, tmp_path / "s.lance").rejected == {"bad-metadata": 2}
    (source / "metadata.csv").write_text('file_name,text\na.png,an a\nb.png,"a b"\n')
    assert kept(source, tmp_path / "s.lance").rejected == {}
    assert stored(tmp_path / "s.lance") == {"a.png": "an a", "b.png": "a b"}


@pytest.mark.parametrize("caption", ["true", "1.50", "1e5", "+7", "0.10", "-0", "FALSE"])
def test_a_caption_in_csv_stays_as_it_is_written(tmp_path, caption):
    source = folder(tmp_path / "set", "a")
    (source / "captions.csv").write_text(f"file_name,text,stars\na.png,{caption},{caption}\n")
    import_pictures(source, tmp_path / "s.lance")
    assert stored(tmp_path / "s.lance") == {"a.png": caption}
    store = Store.open(tmp_path / "s.lance")
    assert not pa.types.is_string(store.dataset.schema.field("stars").type), "other cells are numbers still"


@pytest.mark.parametrize(
    ("torn", "captions"),
    [
        ('a.png,"an a\nb.png,"a ""b"""\nc.png,a c\n', {"c.png": "a c"}),
        ('a.png,an a\nb.png,"a "good" b"\nc.png,a c\n', {"a.png": "an a", "c.png": "a c"}),
    ],
)
def test_a_quote_that_is_not_closed_swallows_no_captions(tmp_path, torn, captions):
    source = folder(tmp_path / "set")
    (source / "metadata.csv").write_text("file_name,text\n" + torn)
    report = kept(source, tmp_path / "s.lance")
    assert stored(tmp_path / "s.lance") == captions
    assert report.added + report.rejected["bad-metadata"] == 4  # the three pictures, and the line


def test_a_csv_with_the_index_that_pandas_writes(tmp_path):
    source = folder(tmp_path / "set", "ab")
    (source / "metadata.csv").write_text(",file_name,text\n0,a.png,an a\n1,b.png,a b\n")
    report = import_pictures(source, tmp_path / "s.lance")
    assert (report.rejected, stored(tmp_path / "s.lance")) == ({}, {"a.png": "an a", "b.png": "a b"})


def test_a_csv_with_a_column_twice_or_an_unread_header(tmp_path):
    source = folder(tmp_path / "set", "a")
    (source / "metadata.csv").write_text("file_name,text,text\na.png,one,two\n")
    with pytest.raises(InputError, match="two columns 'text'"):
        import_pictures(source, tmp_path / "s.lance")
    (source / "metadata.csv").write_bytes(b"file_name,text,caf\xe9\na.png,one,two\n")
    assert kept(source, tmp_path / "t.lance").rejected == {"bad-metadata": 2}
    assert stored(tmp_path / "t.lance") == {}


@pytest.mark.parametrize("value", ['{"en": "an a"}', "true", "[true]", '[["an a"], {"b": 1}]'])
def test_a_caption_that_is_no_text_is_set_aside(tmp_path, value):
    source = folder(tmp_path / "set", "ab")
    lines = f'{{"file_name": "a.png", "text": {value}}}\n{{"file_name": "b.png", "text": NaN}}\n'
    (source / "metadata.jsonl").write_text(lines)
    assert kept(source, tmp_path / "s.lance").rejected == {"bad-caption": 1}
    assert stored(tmp_path / "s.lance") == {"b.png": ""}
    assert "no text" in (tmp_path / "s.lance" / "rejected.jsonl").read_text()


def tar(path: Path, cut: int = 0) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in "ab":
            add(archive, f"{name}.png", PICTURE[name])
            add(archive, f"{name}.txt", f"an {name}".encode())
        linked = tarfile.TarInfo("b.json")
        linked.type, linked.linkname = tarfile.SYMTYPE, "/etc/passwd"
        if not cut:
            archive.addfile(linked)
    content = buffer.getvalue()
    path.write_bytes(content[: content.rindex(b"an b") + 1] if cut else content)
    return path


def test_the_last_sample_of_a_torn_tar_is_not_kept_without_its_text(tmp_path):
    report = kept(tar(tmp_path / "w.tar", cut=1), tmp_path / "s.lance")
    assert (report.rejected, stored(tmp_path / "s.lance")) == ({"torn-part": 1}, {"a": "an a"})


def test_metadata_in_a_tar_that_are_a_link_are_no_metadata(tmp_path):
    report = kept(tar(tmp_path / "w.tar"), tmp_path / "s.lance")
    assert (report.rejected, stored(tmp_path / "s.lance")) == ({"bad-metadata": 1}, {"a": "an a"})


def texts(*values: bytes) -> pa.Array:
    """Texts that nothing looked at: Parquet and Arrow check none."""
    offsets = pa.py_buffer(
        struct.pack(f"<{len(values) + 1}i", *[len(b"".join(values[:i])) for i in range(len(values) + 1)])
    )
    return pa.StringArray.from_buffers(len(values), offsets, pa.py_buffer(b"".join(values)))


@pytest.mark.parametrize(
    ("column", "wrong"),
    [
        (texts(b"caf\xe9", b"fine"), "not UTF-8"),
        (pa.ListArray.from_arrays([0, 1, 2], texts(b"caf\xe9", b"fine")), "not UTF-8"),
        (pa.array([2**59, 5], pa.timestamp("us")), ""),
        (pa.array([2**31 - 1, 5], pa.date32()), ""),
    ],
    ids=["text", "list", "year", "date"],
)
def test_a_value_in_parquet_that_cannot_be_read_sets_its_row_aside(tmp_path, column, wrong):
    table = pa.table({"image": [PICTURE["a"], PICTURE["b"]], "text": ["an a", "a b"], "more": column})
    pq.write_table(table, tmp_path / "p.parquet")
    report = import_pictures(tmp_path / "p.parquet", tmp_path / "s.lance")
    assert (report.rejected, stored(tmp_path / "s.lance")) == ({"bad-metadata": 1}, {"1": "a b"})
    rejected = (tmp_path / "s.lance" / "rejected.jsonl").read_text()
    assert "column 'more': " in rejected
    assert wrong in rejected


def test_times_to_the_nanosecond_come_along(tmp_path):
    times = pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns"))
    table = pa.table({"image": [PICTURE["a"], PICTURE["b"]], "text": ["an a", "a b"], "taken": times})
    pq.write_table(table, tmp_path / "p.parquet")
    assert import_pictures(tmp_path / "p.parquet", tmp_path / "s.lance").rejected == {}
    store = Store.open(tmp_path / "s.lance")
    taken = store.take([0, 1], ["taken"])["taken"].to_pylist()
    assert taken == ["2023-11-14T22:13:20.123456", None]


def shard(path: Path, encoding: str, caption: bytes, number: bytes = struct.pack("<q", 3)) -> Path:
    """An MDS shard of one sample, with its caption in some encoding."""
    path.mkdir()
    columns = {"text": (encoding, None), "jpg": ("bytes", None), "n": ("int64", None)}
    raw = mds_shard([{"text": caption, "jpg": PICTURE["a"], "n": number}], columns)
    (path / "shard.00000.mds").write_bytes(raw)
    entry = {
        "column_names": list(columns), "column_encodings": [e for e, _ in columns.values()],
        "column_sizes": [None] * 3, "format": "mds", "version": 2, "samples": 1,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw)},
    }  # fmt: skip
    (path / "index.json").write_text(json.dumps({"shards": [entry], "version": 2}))
    return path


@pytest.mark.parametrize("encoding", ["ndarray", "pkl", "ndarray:int32"])
def test_a_column_of_arrays_is_no_caption(tmp_path, encoding):
    """Tokens are often called text. Their encoding is not read, and was taken for a caption."""
    source = shard(tmp_path / "m", encoding, b"\1\2\3")
    with pytest.raises(InputError, match="no caption column found"):
        kept(source, tmp_path / "s.lance")
    with pytest.raises(InputError, match=f"the caption column 'text' is {encoding}"):
        import_pictures(source, tmp_path / "s.lance", caption_column="text")
    assert import_pictures(shard(tmp_path / "t", "str", b"an a"), tmp_path / "t.lance").added == 1


def test_a_number_without_bytes_sets_its_sample_aside(tmp_path):
    report = import_pictures(shard(tmp_path / "m", "str", b"an a", b""), tmp_path / "s.lance")
    assert (report.added, report.rejected) == (0, {"bad-metadata": 1})
