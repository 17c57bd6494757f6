"""The commands in the fenced blocks of README.md and docs/, and what the parser makes of them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from darkroom import cli, options
from darkroom.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(r"^```\w*\n(.+?)^```", re.M | re.S)
VARIABLES = re.compile(r"^(?:[A-Z_]+=\S* )+")


@dataclass(frozen=True)
class Command:
    """One line of a page that calls darkroom."""

    page: str
    text: str

    @property
    def arguments(self) -> list[str]:
        """What stands behind `darkroom`, without the comment and the file that its output goes to."""
        words = shlex.split(VARIABLES.sub("", self.text), comments=True)[1:]
        return words[: words.index(">")] if ">" in words else words


def commands(*pages: Path) -> list[Command]:
    """Every command of the pages, in their order; a line that goes on with a backslash is one."""
    found = []
    for page in pages or PAGES:
        for block in FENCED.findall(page.read_text()):
            lines = block.replace("\\\n", " ").splitlines()
            found += [
                Command(page.name, line) for line in lines if VARIABLES.sub("", line).startswith("darkroom ")
            ]
    return found


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The values that a command's options and arguments get; an error of the parser where there is one.

    The command itself does not run.
    """
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("darkroom", list(arguments))
    rest = [*getattr(context, "_protected_args", ()), *context.args]
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
    return dict(context.params)


def check_values(values: dict[str, Any]) -> None:
    """InputError for a value that the command would refuse before it does anything."""
    from darkroom.sample import optimisations

    for name, check in (
        ("size", options.parse_size),
        ("solver", options.parse_solver),
        ("memory", options.parse_bytes),
        ("optimise", optimisations.parse),
    ):
        if isinstance(values.get(name), str):
            check(values[name])
    backend, precision = values.get("backend") or "torch", values.get("precision") or options.AUTO
    if "software" not in values:  # `plan` knows number formats that nothing computes in here
        precision, _ = options.eight_bits(backend, precision, values.get("optimise") or "none")
        options.check_names(backend, precision)
    recipe = values.get("recipe")
    if recipe is not None and str(recipe).startswith("recipes/") and not (ROOT / recipe).is_file():
        raise InputError(f"no recipe '{recipe}'")
