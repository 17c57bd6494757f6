"""What `make docs` adds to docs/: the API reference, pages of the repository, links that lead out of docs/.

A hook of MkDocs (mkdocs.yml names it). Nothing of darkroom is imported: what is public is read from the
`__all__` of the packages, so the site builds without torch. tests/test_docs.py uses the same functions.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGES = {
    "darkroom.data": "Stores: import, inspect, verify, delete",
    "darkroom.models": "Open, create and save models and adapters",
    "darkroom.prepare": "Encode pictures and captions ahead of training",
    "darkroom.recipe": "Read and check recipes",
    "darkroom.train": "Train, resume, sweep, export",
    "darkroom.sample": "Generate pictures",
    "darkroom.evaluate": "Score pictures, with intervals",
    "darkroom.plan": "Memory, time and cost before a job",
    "darkroom.serve": "What a hook or an API dialect of the server uses",
    "darkroom.cluster.prepare": "Encode on a Ray cluster",
    "darkroom.cluster.train": "Train in workers of a Ray cluster",
    "darkroom.cluster.serve": "Serve as replicas on Ray Serve",
    "darkroom.report": "One HTML page from runs and measurements",
    "darkroom.measure": "Timing and measurement rows",
    "darkroom.hardware": "This machine, cards and prices",
    "darkroom.quickstart": "The embedded first job",
    "darkroom.errors": "The errors that darkroom raises",
}
"""The public packages, in the order of the reference. What is public in each is its `__all__`."""
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "contrib/comfyui/README.md": "comfyui.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/emoji/README.md": "benchmarks/emoji.md",
    "benchmarks/finetune/README.md": "benchmarks/finetune.md",
    "benchmarks/plan/README.md": "benchmarks/plan.md",
}
"""Pages of the repository that are pages of the site too."""
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|#|mailto:)([^)#\s]+)(#[\w-]+)?\)")
FENCE = re.compile(r"^\s*(```|~~~)")
STARTS = re.compile(r"^(\s*)([-*] |\d+\. |\|)")

# What is public -------------------------------------------------------------------------------------------


@functools.cache
def parsed(module: str) -> ast.Module:
    """The syntax tree of a module of darkroom, by its dotted name."""
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def path_of(module: str) -> Path:
    """The file of a module; FileNotFoundError where there is none."""
    base = SOURCE.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"no module {module}")


def is_module(name: str) -> bool:
    """Whether a dotted name is a file or folder of darkroom."""
    try:
        return path_of(name).is_file()
    except FileNotFoundError:
        return False


def public(package: str) -> list[str]:
    """The names in a package's `__all__`."""
    for node in parsed(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{package} has no __all__")


def home_of(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """The module that defines a name, and its definition there; None for a module or a plain value."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("darkroom"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    inner = f"{node.module}.{alias.name}"
                    return (inner, None) if is_module(inner) else home_of(node.module, alias.name)
    return module, None


# The reference --------------------------------------------------------------------------------------------


def reference(package: str) -> str:
    """A page of the API reference, for mkdocstrings: a table of what there is, then each of it."""
    doc = ast.get_docstring(parsed(package)) or ""
    rows, blocks = [], []
    for name in sorted(public(package), key=lambda name: rank(home_of(package, name)[1])):
        module, node = home_of(package, name)
        if node is None and is_module(module) and module.endswith(f".{name}"):
            continue  # a package of its own
        first = docstring(module, name, node).split("\n\n")[0].replace("\n", " ")
        rows.append(f"| [`{name}`][{module}.{name}] | {first.replace('|', chr(92) + '|')} |")
        blocks.append(f"::: {module}.{name}\n")
    title = f"# {package}\n\n{doc.split(chr(10) * 2)[0]}\n\n```python\nfrom {package} import ...\n```\n\n"
    return title + "| name | what it is |\n| --- | --- |\n" + "\n".join(rows) + "\n\n" + "\n".join(blocks)


def rank(node: ast.stmt | None) -> int:
    """Functions come first, then classes, then values."""
    return 0 if isinstance(node, FUNCTION) else 1 if isinstance(node, ast.ClassDef) else 2


def docstring(module: str, name: str, node: ast.stmt | None) -> str:
    """Of a function or class, or the text that stands below a value."""
    if isinstance(node, (*FUNCTION, ast.ClassDef)):
        return ast.get_docstring(node) or ""
    body = parsed(module).body
    for before, after in itertools.pairwise(body):
        named = before.targets[0] if isinstance(before, ast.Assign) else getattr(before, "target", None)
        text = after.value if isinstance(after, ast.Expr) else None
        if named is not None and ast.unparse(named) == name and isinstance(text, ast.Constant):
            return str(text.value)
    return ""


def overview() -> str:
    """The first page of the reference."""
    rows = "\n".join(
        f"| [`{name}`](./{name.removeprefix('darkroom.')}.md) | {what} |" for name, what in PACKAGES.items()
    )
    return (
        "# API reference\n\nWhat is public is in the `__all__` of these packages. Everything else may change "
        "in any release.\n\n| package | for |\n| --- | --- |\n" + rows + "\n\n"
        "A user's mistake raises [`InputError`][darkroom.errors.InputError]: one line that says what was "
        "given, what is allowed and how to mend it.\n\n```python\nfrom darkroom import models, sample\n\n"
        'model = models.load("runs/first/model")\n'
        'for picture in sample.generate(model, ["a red circle"], num=4):\n    picture.image.show()\n```\n'
    )


# Hooks of MkDocs ------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the reference, the pages of the repository, and every file that a page links to."""
    from mkdocs.structure.files import File

    made = {"api/index.md": overview()}
    made |= {f"api/{name.removeprefix('darkroom.')}.md": reference(name) for name in PACKAGES}
    origins = {uri: path for path, uri in PAGES.items() if path != "README.md"}
    made |= {uri: (ROOT / path).read_text(encoding="utf-8") for uri, path in origins.items()}
    pages = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()} | origins
    for uri, path in pages.items():
        text = made.get(uri) or (ROOT / path).read_text(encoding="utf-8")
        for target in linked(text, path):
            place = site_path(target)
            if target.startswith("docs/") or place in made or target in PAGES:
                continue
            file = ROOT / target
            if place.startswith("source/"):
                made[place] = source_page(target)
            else:
                files.append(File.generated(config, place, abs_src_path=str(file)))
                made.setdefault(place, "")
    for uri, content in made.items():
        if content:
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links out of docs/ lead to the pages made above; lists and tables get the empty line they need here."""
    uri = page.file.src_uri
    origin = next((path for path, at in PAGES.items() if at == uri and path != "README.md"), f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[2]))
        if not (ROOT / target).exists():
            return match[0]
        place = site_path(target)
        return f"{match[1]}({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{match[3] or ''})"

    return "\n".join(spaced(LINK.sub(moved, markdown).splitlines()))


def linked(text: str, path: str) -> Iterator[str]:
    """The files of the repository that a page links to, by their path from its root."""
    for _, target, _ in LINK.findall(text):
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if (ROOT / found).exists():
            yield found


def site_path(target: str) -> str:
    """Where a file of the repository is on the site."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / target).is_dir() or target.endswith((".py", ".yaml", ".sh")) or "Dockerfile" in target:
        return f"source/{target}.md"
    return f"files/{target}"


def source_page(target: str) -> str:
    """A file of the repository as a page; of a folder, what each of its files is for."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {target}\n\n"
    path = ROOT / target
    if path.is_dir():
        modules = sorted(path.glob("*.py"))
        rows = [f"| `{file.name}` | {_first_line(file)} |" for file in modules]
        return head + "| file | subject |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(path.suffix, "text")
    return f"{head}````{language}\n{path.read_text(encoding='utf-8')}\n````\n"


def _first_line(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def spaced(lines: list[str]) -> Iterator[str]:
    """The lines with an empty one before a list, a table or a fence that follows other text directly."""
    before, in_fence = "", False
    for line in lines:
        is_fence = bool(FENCE.match(line))
        if not in_fence and before.strip() and not line.startswith("    "):
            starts, began = STARTS.match(line), STARTS.match(before)
            if (starts and not began and not before.startswith((" ", "\t"))) or (is_fence and not began):
                yield ""
        in_fence ^= is_fence
        yield line
        before = line


if __name__ == "__main__":
    os.chdir(ROOT)
    for package in PACKAGES:
        print(package, *public(package))
