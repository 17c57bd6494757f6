"""The plan that a recipe quotes at its head: a comment that names the command it came from.

    # Planned by: darkroom plan recipes/NAME.yaml --recipe-header "A10G, 8 x A100-80"
    #   A10G: 9.1 GB of 24, 0.91 s a step, 15 min, USD 0.26 (price of 2026-07-15)

`quoted` finds that block in a recipe, `differences` says what of it the plan no longer says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from darkroom.errors import InputError
from darkroom.plan.ask import ask_phases, plans
from darkroom.plan.jobs import Plan
from darkroom.plan.show import gb, hours, seconds, together, usd
from darkroom.plan.targets import Target

MARK = "# Planned by: darkroom plan "
TOLERANCE = 0.05  # other versions of torch and diffusers count a little differently
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Quoted:
    """The block in a recipe: the arguments of its command, and its lines."""

    overrides: tuple[str, ...]
    on: str
    lines: tuple[str, ...]


def head(recipe: Path, overrides: Sequence[str], on: str) -> Iterator[str]:
    """The comment block of a recipe's plan on cards such as 'A10G, 8 x A100-80'."""
    shown = " ".join(["recipes/" + recipe.name, *(shlex.quote(one) for one in overrides)])
    yield f'{MARK}{shown} --recipe-header "{on}"'
    asked = ask_phases(recipe, overrides)
    for name, count in devices(on):
        found = [plans(one, Target(gpu=name, count=count))[0] for one in asked]
        for plan in found:
            which = f"{plan.job.rpartition(', ')[2]}, " if len(found) > 1 else ""
            yield f"#   {which}{_line(plan)}"
        if len(found) > 1:
            yield f"#   {together(found)}"


def devices(on: str) -> Iterator[tuple[str, int]]:
    """Cards and how many of each; InputError for what cannot be read."""
    for text in on.split(","):
        match = re.fullmatch(r"(?:(\d+)\s*x\s+)?(\S.*)", text.strip())
        if match is None:
            raise InputError(f"--recipe-header {on}", allowed="cards such as 'A10G, 8 x A100-80'")
        yield match[2], int(match[1] or 1)


def _line(plan: Plan) -> str:
    many = f"{plan.count} x " if plan.count > 1 else ""
    if not plan.fits:
        return f"{many}{plan.device}: does not fit, {gb(plan.peak_bytes)} of {gb(plan.device_memory_bytes)}"
    held = f"{plan.peak_bytes / 1e9:.2g}" if plan.peak_bytes < 1e10 else f"{plan.peak_bytes / 1e9:.0f}"
    memory = f"{held} GB of {(plan.device_memory_bytes or 0) / 1e9:.0f}{' each' if plan.count > 1 else ''}"
    speed = f"{seconds(plan.step_s['total'])} a step"
    money = "no price known" if plan.cost.usd is None else usd(plan.cost.usd)
    dated = f" (price of {plan.cost.price_as_of})" if plan.cost.price_as_of else ""
    return f"{many}{plan.device}: {memory}, {speed}, {hours(plan.hours)}, {money}{dated}"


def quoted(recipe: Path) -> Quoted | None:
    """The block at the head of a recipe; None where it quotes no plan."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(MARK)), None)
    if start is None:
        return None
    end = start + 1
    while end < len(lines) and lines[end].startswith("#   "):
        end += 1
    _, *overrides, flag, on = shlex.split(lines[start].removeprefix(MARK))
    if flag not in ("--recipe-header", "--head"):  # the latter until this release
        raise InputError(
            f"{recipe}: {lines[start]}", allowed=f'{MARK}RECIPE [KEY=VALUE] --recipe-header "CARDS"'
        )
    return Quoted(tuple(overrides), on, tuple(lines[start:end]))


def differences(recipe: Path) -> list[str]:
    """What a recipe quotes and its plan says otherwise: words, or numbers by more than a twentieth."""
    found = quoted(recipe)
    if found is None:
        return [f"{recipe}: quotes no plan"]
    now = list(head(recipe, found.overrides, found.on))
    pairs = zip(found.lines, now, strict=False)
    wrong = [f"{recipe}: {stated} <> {says}" for stated, says in pairs if not alike(stated, says)]
    if len(found.lines) != len(now):
        wrong.append(f"{recipe}: {len(found.lines)} lines, the plan has {len(now)}")
    return wrong


def alike(one: str, other: str) -> bool:
    """The same words, and numbers within a twentieth."""
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    numbers = [[float(text.replace(",", "")) for text in _NUMBER.findall(line)] for line in (one, other)]
    return all(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) for a, b in zip(*numbers, strict=True))


def write(recipe: Path, overrides: Sequence[str], on: str) -> None:
    """Put the block into a recipe: in the place of an older one, else after the comment at its head."""
    block = list(head(recipe, overrides, on))
    lines = recipe.read_text(encoding="utf-8").splitlines()
    old = quoted(recipe)
    if old is not None:
        start = lines.index(old.lines[0])
        lines[start : start + len(old.lines)] = block
    else:
        start = next(i for i, line in enumerate(lines) if not line.startswith("#"))
        lines[start:start] = block
    recipe.write_text("\n".join(lines) + "\n", encoding="utf-8")


__all__ = ["Quoted", "alike", "devices", "differences", "head", "quoted", "write"]
