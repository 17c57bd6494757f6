"""docs/importing.md: every tree that it draws is made as drawn, and imported."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from darkroom.data import Store, import_pictures
from darkroom.data.images import is_picture
from data.material import encoded, noise_picture
from data.test_readers import mds

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "importing.md").read_text(encoding="utf-8")
TREES = [block for block in re.findall(r"^```\n(.+?)^```", PAGE, re.M | re.S) if not block.startswith("dark")]
ENTRY = re.compile(r"^((?:[│ ] {3})*)(?:[├└]── )?(\S+)(?: {2,}(.+))?$")
KINDS = {".zip": "folder", ".tar": "webdataset", ".parquet": "parquet", ".mds": "mds"}


def entries(tree: str) -> list[tuple[str, str]]:
    """Paths of a tree's files with what stands to the right of them; folders end with a slash."""
    path: list[str] = []
    found = []
    for line in tree.splitlines():
        match = ENTRY.match(line)
        assert match, line
        depth = len(match[1]) // 4 + ("── " in line)
        path[depth:] = [match[2].rstrip("/")]
        found.append(("/".join(path) + ("/" if match[2].endswith("/") else ""), match[3] or ""))
    return found


def content(name: str, said: str, seed: int) -> bytes:
    """A file's bytes: a picture, a Parquet file of the columns said, or the text itself."""
    if name.endswith(".parquet"):
        return parquet(said, seed)
    if is_picture(name) or name.endswith(".mask.png"):
        return encoded(noise_picture(seed), "PNG" if name.endswith("png") else "JPEG")
    return said.replace("⏎", "\n").encode()


def parquet(said: str, seed: int) -> bytes:
    picture = encoded(noise_picture(seed))
    columns: dict[str, object] = {}
    for column in said.removeprefix("columns: ").replace("{bytes, path}", "struct").split(", "):
        name, _, kind = column.partition(" ")
        value = {"struct": {"bytes": picture, "path": "a.png"}, "bytes": picture}.get(kind)
        columns[name] = [value or ("pictures/0.jpg" if name.endswith("path") else f"{name} {seed}")]
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def make(tree: str, root: Path) -> Path:
    """The tree on the disk; archives hold what is drawn below them."""
    listed = entries(tree)
    top = root / listed[0][0].rstrip("/")
    if any(name.endswith(".mds") for name, _ in listed):
        return mds(top)
    archives = [name for name, _ in listed if name.endswith((".zip", ".tar"))]
    for seed, (name, said) in enumerate(listed):
        inside = next((one for one in archives if name.startswith(one + "/")), None)
        data = content(name, said, seed)
        if name.endswith("/") or name in archives:
            (root / name if name.endswith("/") and not inside else root).mkdir(parents=True, exist_ok=True)
        elif inside and inside.endswith(".zip"):
            with zipfile.ZipFile(root / inside, "a") as archive:
                archive.writestr(name.removeprefix(inside + "/"), data)
        elif inside:
            with tarfile.open(root / inside, "a") as archive:
                member = tarfile.TarInfo(name.removeprefix(inside + "/"))
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
    return top


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.splitlines()[0].strip("/"))
def test_a_layout_of_the_page_imports_as_drawn(tree: str, tmp_path: Path) -> None:
    source = make(tree, tmp_path)
    report = import_pictures(source, tmp_path / "pictures.lance", on_missing_caption="keep")
    listed = entries(tree)
    pictures = [name for name, _ in listed if is_picture(name)]
    if "MDS" not in report.kind.upper() and report.kind != "parquet":
        assert report.added == len(pictures)
        captions = [said for name, said in listed if name.endswith((".txt", ".caption"))]
        captions += [json.loads(said)["text"] for name, said in listed if name.endswith(".jsonl")]
        store = Store.open(tmp_path / "pictures.lance")
        found = [row for batch in store.scan(["caption"]) for row in batch.column("caption").to_pylist()]
        assert set(captions) <= set(found)
    assert report.added >= 1
    assert report.rejected == {}
    expected = {KINDS[Path(name).suffix] for name, _ in listed if Path(name).suffix in KINDS} or {"folder"}
    assert report.kind in expected


def test_the_page_shows_every_kind_of_source() -> None:
    assert len(TREES) >= 12
    text = "".join(TREES)
    assert all(suffix in text for suffix in (".txt", ".caption", ".jsonl", ".csv", ".mask.png", *KINDS))
    with pytest.raises(AssertionError):
        entries("photos/\n├── two words.jpg")  # a line that is no entry is not passed over
