"""Files and texts of strangers: read, or refused by name, never with a crash, a hang or a traceback."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from targets import TARGETS, Target, check, corpus, inputs

SHORT = {"recipe": 60, "override": 60, "credentials": 40}
NIGHTLY = int(os.environ.get("FUZZ_INPUTS", "20000"))


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
        check(name, content, tmp_path)


def test_a_reader_that_crashes_is_found(tmp_path, monkeypatch):
    def read(content: bytes, _: object) -> object:
        return content[content.index(b"cat")]

    monkeypatch.setitem(TARGETS, "a1111", Target(read, lambda: [b"a cat"], ()))
    with pytest.raises(ValueError, match="not found"):
        check_some("a1111", 0, 200, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_many_mutations(name, tmp_path):
    check_some(name, 1, NIGHTLY, tmp_path)
