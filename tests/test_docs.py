"""README and docs: links lead to files, and the walks of how-it-works.md name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from documented import Command, parsed

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
HOP = re.compile(r"^\| (\d+) \| \[\S+\]\((\S+)\) \| ([^|]+) \|", re.M)


def broken_links(page: Path) -> list[str]:
    """Links of a page to a file or a heading that there is not."""
    broken = []
    for path, heading in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(f"{path}#{heading}")
    return broken


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](page.md#one-thing) [b](page.md#two) [c](none.md) [d](#one-thing)\n")
    assert broken_links(page) == ["page.md#two", "none.md#"]


@pytest.mark.parametrize("walk", ["A training step", "A request"])
def test_a_walk_names_functions_that_exist_and_counts_its_files(walk):
    page = ROOT / "docs" / "how-it-works.md"
    text = page.read_text(encoding="utf-8").partition(f"\n## {walk}\n")[2].partition("\n## ")[0]
    hops = HOP.findall(text)
    count = int(re.search(r": (\d+) files", text)[1])
    assert len({path for _, path, _ in hops}) == count
    assert {int(number) for number, _, _ in hops} == set(range(1, count + 1))
    for _, path, names in hops:
        code = (page.parent / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b", code), f"{path}: {name}"


def test_every_command_in_the_readmes_tables_parses():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\|.*?`(darkroom [^`]+)`", text, re.M)
    assert len(found) >= 15
    for command in found:
        values = parsed(Command("README.md", command).arguments)
        recipe = str(values.get("recipe") or "")
        assert not recipe.startswith("recipes/") or (ROOT / recipe).is_file(), command
    with pytest.raises(typer.TyperException):
        parsed(Command("README.md", "darkroom generate MODEL 'a dog' --strenght 0.7").arguments)
