"""nightly.py: which files are read for `make nightly`, and who runs when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nightly

ROOT = Path(__file__).resolve().parents[1]


class Item:
    def __init__(self, nodeid: str, group: str | None = None) -> None:
        self.nodeid, self.mark = nodeid, None if group is None else pytest.mark.xdist_group(group).mark

    def get_closest_marker(self, name: str) -> Any:
        return self.mark

    def add_marker(self, mark: Any) -> None:
        self.mark = mark.mark


def test_a_modules_tests_stay_together_and_the_longest_group_starts() -> None:
    ids = ["tests/a.py::one", "tests/b.py::one[x]", "tests/a.py::two", "tests/e2e/test_docs_commands.py::x"]
    items = [*map(Item, ids), Item("tests/c.py::one", "ray")]
    nightly.arrange(items)  # type: ignore[arg-type]
    assert [item.mark.args[0] for item in items] == [
        *("ray", "tests/e2e/test_docs_commands.py", "tests/a.py", "tests/b.py", "tests/a.py")
    ]


def test_the_longest_are_groups_that_there_are() -> None:
    files = [name for name in nightly.LONGEST if name != "ray"]
    assert len(files) >= 10
    assert [name for name in files if "nightly" not in (ROOT / name).read_text(encoding="utf-8")] == []


def test_files_without_such_a_test_are_not_read(tmp_path: Path) -> None:
    for name, content in (("test_a.py", "@pytest.mark.nightly"), ("test_b.py", ""), ("conftest.py", "")):
        (tmp_path / name).write_text(content)
    assert [nightly.may_hold(tmp_path / name) for name in ("test_a.py", "test_b.py", "conftest.py")] == [
        *(True, False, True)
    ]


def test_seconds_are_added_by_group() -> None:
    told = {"a.py::x@a.py": 1.0, "b.py::y[1@2]": 2.0, "c.py::z[1]@ray": 3.0, "d.py::z@ray": 4.0}
    reports: Any = [SimpleNamespace(nodeid=nodeid, duration=s) for nodeid, s in told.items()]
    assert nightly.seconds_by_group(reports) == {"ray": 7.0, "b.py": 2.0, "a.py": 1.0}
