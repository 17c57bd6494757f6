"""The zip reader against Python's own, and against damage."""

from __future__ import annotations

import struct
import zipfile

import numpy as np
import pytest

from darkroom.data.importers.archives import ZipReader
from darkroom.errors import InputError

CONTENT = {
    "a.txt": b"hello",
    "folder/b.bin": np.random.default_rng(0).bytes(3_000_000),
    "folder/c.bin": b"\0" * 5_000_000,
    "empty": b"",
    "Ünï/写真.png": b"picture",
}


@pytest.fixture(params=[zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def archive(tmp_path, request):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", request.param) as file:
        file.mkdir("folder")
        for name, data in CONTENT.items():
            file.writestr(name, data)
    return path


def test_members_are_those_of_pythons_reader(archive):
    reader = ZipReader(archive)
    assert [m.name for m in reader.members()] == list(CONTENT)
    for name, data in CONTENT.items():
        member = reader.find(name)
        assert member is not None
        assert member.size == len(data)
        assert reader.read(member) == data
    assert reader.find("b.bin") is None
    reader.close()


def test_what_stands_before_the_archive_does_not_matter(archive, tmp_path):
    shifted = tmp_path / "shifted.zip"
    shifted.write_bytes(b"#!/bin/sh\n" * 50 + archive.read_bytes())
    reader = ZipReader(shifted)
    assert reader.read(reader.find("a.txt")) == b"hello"


def test_zip64_and_a_comment(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.comment = b"c" * 1000
        with file.open("large", "w", force_zip64=True) as member:
            member.write(b"x" * 1000)
        for number in range(66_000):  # more than 65,535 members need the wide list of contents
            file.writestr(zipfile.ZipInfo(str(number)), b"")
    reader = ZipReader(path)
    assert sum(1 for _ in reader.members()) == 66_001
    assert reader.read(reader.find("large")) == b"x" * 1000
    assert reader.find("65999") is not None


def test_an_entry_of_wide_numbers_is_read(tmp_path):
    """As for an archive beyond 4 GiB, whose sizes and offsets stand in the extra field."""
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", b"hello")
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    extra = struct.pack("<2H3Q", 1, 24, 5, 5, 0)
    wide = data[entry : entry + 46] + b"a" + extra
    struct.pack_into("<2I", wide, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", wide, 30, len(extra))
    struct.pack_into("<I", wide, 42, 0xFFFFFFFF)
    tail = data[end:]
    struct.pack_into("<I", tail, 12, len(wide))
    path.write_bytes(bytes(data[:entry] + wide + tail))
    assert zipfile.ZipFile(path).read("a") == b"hello", "the control: Python's reader takes it too"
    reader = ZipReader(path)
    assert reader.read(reader.find("a")) == b"hello"


def test_damage_is_noticed(archive):
    data = bytearray(archive.read_bytes())
    at = data.index(b"a.txt") + 5
    data[at + 1] ^= 0xFF
    archive.write_bytes(bytes(data))
    reader = ZipReader(archive)
    with pytest.raises(ValueError, match="damaged"):
        reader.read(reader.find("a.txt"))
    assert reader.read(reader.find("folder/b.bin")) == CONTENT["folder/b.bin"]


@pytest.mark.parametrize("method", [255, 300, 65_535])
def test_a_method_that_nobody_knows_is_said_of_its_member_alone(archive, method):
    data = bytearray(archive.read_bytes())
    at = data.rindex(b"PK\1\2", 0, data.rindex(b"a.txt"))
    data[at + 10 : at + 12] = struct.pack("<H", method)
    archive.write_bytes(bytes(data))
    reader = ZipReader(archive)
    with pytest.raises(ValueError, match=f"packed by method {method}"):
        reader.read(reader.find("a.txt"))
    assert reader.read(reader.find("folder/b.bin")) == CONTENT["folder/b.bin"]


@pytest.mark.parametrize("data", [b"", b"PK\5\6", b"PK\5\6" + b"\xff" * 18, b"x" * 100_000])
def test_what_is_no_zip_is_told(tmp_path, data):
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(InputError, match="no whole zip archive"):
        ZipReader(tmp_path / "a.zip")


def test_a_member_that_unpacks_to_more_than_it_says_is_cut(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb", b"\0" * 50_000_000)
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\1\2")
    struct.pack_into("<I", data, entry + 24, 1000)
    path.write_bytes(bytes(data))
    reader = ZipReader(path)
    with pytest.raises(ValueError, match="damaged"):
        reader.read(reader.find("bomb"))
    assert sum(map(len, reader.chunks(reader.find("bomb")))) <= 1000


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_several_members_with_one_name_each_can_be_read(tmp_path):
    """As a program leaves them that adds to an archive: the last has the name, those before it a number."""
    path = tmp_path / "a.zip"
    members = [("d/a.txt", b"1"), ("b#1.txt", b"b"), ("d/a.txt", b"2"), ("plain", b"3"), ("d\\a.txt", b"4")]
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members:
            file.writestr(name, data)
    reader = ZipReader(path)
    found = {member.name: reader.read(member) for member in reader.members()}
    assert found == {"d/a#1.txt": b"1", "b#1.txt": b"b", "d/a#2.txt": b"2", "plain": b"3", "d/a.txt": b"4"}
    assert {name: reader.read(reader.find(name)) for name in found} == found
    assert reader.num_earlier == 2
    assert [reader.called(name) for name in found] == ["d/a.txt", "b#1.txt", "d/a.txt", "plain", "d/a.txt"]
    assert [reader.find(name) for name in ("d/a#0.txt", "d/a#3.txt", "b.txt", "plain#1")] == [None] * 4
