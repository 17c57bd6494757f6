"""README and docs: links lead to files, and the walks of how-it-works.md name what there is."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from darkroom import cli
from darkroom.recipe.reference import find_keys
from documented import VARIABLES, Command, parsed
from needs import missing
from test_import_rules import SOURCE, modules_imported, modules_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
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


def not_imported_before(paths: list[str]) -> list[str]:
    """Files of a walk that no file before them imports."""
    modules = modules_of(SOURCE)
    names = {path.relative_to(SOURCE).as_posix(): name for name, path in modules.items()}
    walked = list(dict.fromkeys(path.partition("darkroom/")[2] for path in paths))
    reached: set[str] = set()
    found = []
    for path in walked:
        found += [] if names[path] in reached else [path]
        reached |= modules_imported(SOURCE / path, modules)
    return found


@pytest.mark.parametrize(
    ("walk", "entered"),
    [("A training step", ["cli/training.py"]), ("A request", ["serve/api/guard.py", "serve/api/native.py"])],
)
def test_each_file_of_a_walk_is_imported_by_one_before_it(walk, entered):
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    paths = [path for _, path, _ in HOP.findall(text.partition(f"\n## {walk}\n")[2].partition("\n## ")[0])]
    assert not_imported_before(paths) == entered, "where it begins"
    assert len(not_imported_before(paths[::-1])) > len(entered), "the control: not the other way round"


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


OUTSIDE_QUOTES = re.compile(r""""[^"]*"|'[^']*'|\s#.*""")


def only_posix(text: str) -> str:
    """What of a command PowerShell would read in another way; nothing where it is the same there."""
    command = VARIABLES.sub("", text)  # docs/installation.md says how to set a variable there
    if command.endswith("\\"):
        return "\\"
    found = re.search(r"&&|[,;$`{}()<|&]", OUTSIDE_QUOTES.sub("", command))
    inside = re.search(r'"[^"]*[$`][^"]*"', command)
    return found[0] if found else "$ in double quotes" if inside else ""


def test_every_command_is_typed_the_same_in_powershell():
    tables = re.findall(r"^\|.*?`(darkroom [^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    found = [*tables, *(line for line in lines if VARIABLES.sub("", line).startswith("darkroom "))]
    assert len(found) > 100
    assert {line: why for line in found if (why := only_posix(line))} == {}
    for wrong in ("a --metrics fid,kid", "a \\", "a $HOME/x", 'a "$HOME/x"', "a {1} # x", "a && b"):
        assert only_posix(f"darkroom {wrong}")
    assert not only_posix("""darkroom a "fid,kid" 'a $5 {x}' b=c:1 # then $this, too""")


# ---- what other tools' users look up

OPTION = re.compile(r"--[a-z][\w-]*")


def known_options() -> set[str]:
    """Every option of every verb."""
    found: set[str] = set()
    waiting: list[Any] = [typer.main.get_command(cli.app)]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        found |= {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return found


def unknown(text: str, keys: dict[str, Any], options: set[str]) -> str:
    """Why a name in the middle column is neither key, option nor command; empty where it is one."""
    if text.startswith("darkroom "):
        parsed(Command("coming-from.md", text).arguments)
        return ""
    if text.startswith("--"):
        return next((f"no option {one}" for one in OPTION.findall(text) if one not in options), "")
    key, _, value = text.replace(": ", "=").partition("=")
    if text.endswith(".yaml"):
        return "" if (ROOT / text).is_file() else f"no file {text}"
    if key not in keys:
        return f"no key {key}"
    choices = re.split(r"[,;] (?:or )?", keys[key].allowed) if keys[key].type == "choice" else []
    return f"{key} has no {value}" if value and choices and value not in choices else ""


def test_what_other_tools_options_are_here_exists():
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!---)([^\n]+?) \| ([^\n|]*) \|(?: [^\n]*)?\|$", text, re.M)
    keys, options = {one.key: one for one in find_keys()}, known_options()
    named = [name for _, middle in rows for name in re.findall(r"`([^`]+)`", middle)]
    assert len(rows) > 110
    assert len(set(named)) > 80
    assert [why for name in named if (why := unknown(name, keys, options))] == []
    for wrong in ("optim.learning_rate", "--sampler", "task: hypernetwork", "optim.name=dadapt"):
        assert unknown(wrong, keys, options)


# ---- the site


@pytest.fixture(scope="module")
def site() -> Any:
    """docs/site.py, which adds the reference."""
    spec = importlib.util.spec_from_file_location("darkroom_site", ROOT / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_nav(entries: Any) -> list[str]:
    """The pages that the site's navigation lists."""
    values = [
        value for entry in entries for value in (entry.values() if isinstance(entry, dict) else [entry])
    ]
    return [page for one in values for page in (in_nav(one) if isinstance(one, list) else [one])]


def test_every_page_is_in_the_navigation_once(site):
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = in_nav(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES if (ROOT / "docs") in path.parents}
    made = {uri for path, uri in site.PAGES.items() if path != "README.md"}
    reference = {"api/index.md", *(f"api/{name.removeprefix('darkroom.')}.md" for name in site.PACKAGES)}
    assert sorted(listed) == sorted(pages | made | reference)


def test_what_is_public_is_listed_documented_and_there(site):
    undocumented, untyped = [], []
    for package in site.PACKAGES:
        module = importlib.import_module(package)
        for name in site.public(package):
            assert hasattr(module, name), f"{package}.{name}"
            _, node = site.home_of(package, name)
            members = node.body if isinstance(node, ast.ClassDef) else []
            shown = [node, *(one for one in members if isinstance(one, site.FUNCTION) and one.name[0] != "_")]
            for one in filter(None, shown):
                undocumented += [f"{package}.{name}: {one.name}"] if not ast.get_docstring(one) else []
                is_function = isinstance(one, site.FUNCTION)
                untyped += [f"{package}.{name}: {one.name}"] if is_function and one.returns is None else []
    assert undocumented == untyped == []
    assert {"generate", "make_table"} <= set(site.public("darkroom.sample"))
    with pytest.raises(ValueError, match="has no __all__"):
        site.public("darkroom.bill")


def test_the_reference_names_what_is_public(site):
    page = site.reference("darkroom.train")
    assert "::: darkroom.train.run.train\n" in page  # by the module that defines it
    assert page.index("::: darkroom.train.run.train\n") < page.index(
        "::: darkroom.train.trainer.TrainResult\n"
    )


@pytest.mark.nightly
def test_the_site_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        missing("mkdocs is not installed: make setup ARGS=docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    built = (tmp_path / "site" / "api" / "sample.html").read_text(encoding="utf-8")
    assert 'id="darkroom.sample.generate.generate"' in built
