"""docs/gpu.md: what it says a card should reach is what `darkroom plan` prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from darkroom.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
INTERVAL = re.compile(r"[\d.,]+ (?:GB )?\([\d.,]+ to [\d.,]+\)")
LEAST = 4


def quotes() -> dict[str, list[str]]:
    """The commands of the page, and what it quotes of their output."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"```\n(\$ darkroom plan.*?)```", PAGE, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ darkroom "):
                last = found.setdefault(line.removeprefix("$ darkroom "), [])
            else:
                last.append(line.strip())
    return found


def test_the_targets_name_the_plan_s_own_figures():
    """Every figure with an interval in the table is one that is quoted; prices grow old and are not."""
    told = "\n".join(line for lines in quotes().values() for line in lines)
    assert len(quotes()) >= LEAST
    assert "USD" not in told
    table = [
        line.split("|")[3] for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 5
    ]
    figures = [figure for cell in table for figure in INTERVAL.findall(cell)]
    assert len(figures) >= LEAST
    assert [figure for figure in figures if figure not in told] == []
    assert not [cell for cell in table if not cell.strip()], "a target without an interval says why"


@pytest.mark.nightly
@pytest.mark.parametrize("command", quotes())
def test_the_page_quotes_what_the_plan_prints(command):
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    printed = [line.strip() for line in done.output.splitlines()]
    assert [line for line in quotes()[command] if line not in printed] == []
