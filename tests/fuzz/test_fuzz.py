"""Files and texts of strangers: read, or refused by name, never with a crash, a hang or a traceback."""

from __future__ import annotations

import importlib
import itertools
import os
import time
import tracemalloc
from pathlib import Path

import pytest
import targets
from targets import TARGETS, Target, check, corpus, inputs, packed

SHORT = {"recipe": 60, "override": 60, "credentials": 40}
NIGHTLY = int(os.environ.get("FUZZ_INPUTS", "20000"))
SLOW = {"override": 4}  # milliseconds each: a whole recipe is read


def check_some(name: str, seed: int, count: int, folder: Path) -> None:
    for content in itertools.islice(inputs(name, seed), count):
        check(name, content, folder)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_are_read_or_refused(name, tmp_path):
    check_some(name, 0, SHORT.get(name, 200), tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_whole(name, tmp_path):
    """Or mutations of them would be refused at the first byte."""
    TARGETS[name].read(TARGETS[name].seeds()[0], tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_before_stays_mended(name, tmp_path):
    for content in corpus(name):
        tracemalloc.start()
        try:
            check(name, content, tmp_path)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most_bytes < 2**28


@pytest.mark.parametrize("name", TARGETS)
def test_what_coverage_led_to_is_read_or_refused(name, tmp_path):
    found = packed(name)
    assert found
    for content in found:
        check(name, content, tmp_path)


def test_a_corpus_is_packed_by_size_with_what_was_there(fuzz, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "GROWN", tmp_path / "grown")
    monkeypatch.setattr(targets, "GROWN", tmp_path / "grown")
    monkeypatch.setattr(fuzz, "PACKED", 8)
    (tmp_path / "zip").mkdir()
    for content in (b"bb", b"a", b"cccc", b"ddddd"):
        (tmp_path / "zip" / content.decode()).write_bytes(content)
    fuzz.pack(tmp_path)
    first = (tmp_path / "grown" / "zip.zip").read_bytes()
    assert packed("zip") == [b"a", b"bb", b"cccc"]
    fuzz.pack(tmp_path)
    assert (tmp_path / "grown" / "zip.zip").read_bytes() == first
    assert packed("tar") == []


def test_a_reader_that_crashes_is_found(tmp_path, monkeypatch):
    def read(content: bytes, _: object) -> object:
        return content[content.index(b"cat")]

    monkeypatch.setitem(TARGETS, "a1111", Target(read, lambda: [b"a cat"], ()))
    with pytest.raises(ValueError, match="not found"):
        check_some("a1111", 0, 200, tmp_path)


@pytest.fixture
def fuzz(monkeypatch):
    pytest.importorskip("resource", reason="bounds of memory and fork are POSIX's")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("fuzz")


def test_long_runs_go_on_with_new_inputs_and_count_them(fuzz, tmp_path):
    rows = tmp_path / "fuzz.csv"
    for turns in (1, 2):
        assert fuzz.go(rows, tmp_path / "found", 0.2 / 60, ["prompt"], 0.2) == 0
        row = fuzz.read(rows)["prompt"]
        assert row.seeds >= turns
        assert row.executions > row.seeds
    assert fuzz.read(rows)["zip"].executions == 0


@pytest.mark.parametrize("ends", ["raises", "dies", "hangs"])
def test_a_long_run_keeps_the_input_that_was_too_much(fuzz, tmp_path, monkeypatch, ends):
    def read(content: bytes, _: object) -> object:
        if b"cat" in content:
            return None
        return {
            "raises": lambda: 1 / 0,
            "dies": lambda: os.kill(os.getpid(), 9),
            "hangs": lambda: time.sleep(60),
        }[ends]()

    monkeypatch.setitem(TARGETS, "a1111", Target(read, lambda: [b"a cat"], ()))
    monkeypatch.setattr(fuzz, "MOST_S", 0.3)
    monkeypatch.setattr(fuzz, "MOST_ALARMS", 0)
    assert fuzz.go(tmp_path / "fuzz.csv", tmp_path / "found", 1, ["a1111"]) == 1
    [file] = (tmp_path / "found").iterdir()
    assert b"cat" not in file.read_bytes()
    before = fuzz.read(tmp_path / "fuzz.csv")["a1111"]
    assert fuzz.go(tmp_path / "fuzz.csv", tmp_path / "found", 1, ["a1111"]) == 1
    assert fuzz.read(tmp_path / "fuzz.csv")["a1111"] == before, "it rests until it is mended"


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_many_mutations(name, tmp_path):
    check_some(name, 1, NIGHTLY // SLOW.get(name, 1), tmp_path)
