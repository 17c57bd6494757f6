"""Plans that are written to files: one picture of several, and the comment at a recipe's head.

The picture shows cards or phases side by side, the scaling curve of a card, or those of many cards. The
comment names the command it came from:

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
from typing import Any

from darkroom.errors import InputError
from darkroom.plan.ask import Together, ask_phases, plans
from darkroom.plan.jobs import Plan
from darkroom.plan.show import gb, hours, seconds, together, usd
from darkroom.plan.targets import Target

# ---- a picture


BLUE, ORANGE, GREY = "#2f6690", "#d9822b", "#c9c9c9"
MARKED = (BLUE, ORANGE, "#3a7d44", "#8e4585", "#b23a48", "#5b8e7d", "#6c757d")


@dataclass(frozen=True)
class Point:
    """One plan as it is drawn."""

    label: str
    count: int
    hours: float
    device_hours: float
    usd: float | None
    images_per_s: float | None
    kept: bool


def points(found: Sequence[Plan | Together], *, by_job: bool = False) -> list[Point]:
    """What is drawn of plans, or of all phases together: labelled with the card, `by_job` with the phase."""
    return [_point(one, by_job=by_job) for one in found]


def _point(one: Plan | Together, *, by_job: bool) -> Point:
    if isinstance(one, Together):
        return Point(one.device, one.count, one.hours, one.device_hours, one.usd, None, one.kept)
    label, cost = one.job if by_job else one.device, one.cost
    return Point(label, one.count, one.hours, cost.device_hours, cost.usd, one.images_per_s, one.kept)


def draw(found: Sequence[Point], path: Path) -> None:
    """Write a PNG (or what the file's ending says): bars, or over several numbers of devices curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = {point.label for point in found}
    curves = len({(point.label, point.count) for point in found}) > len(labels)  # some on several numbers
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5 if curves else max(3.0, 0.28 * len(found))))
    if not curves:
        _bars(axes, found)
    elif len(labels) > 1:
        _many_curves(axes, found)
    else:
        _curve(axes, found)
    for axis in axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _curve(axes: Sequence[Any], found: Sequence[Point]) -> None:
    """A card's speed over devices against the ideal, and what each number of devices costs."""
    left, right = axes
    numbers = [point.count for point in found]
    speeds, unit = _speeds(found)
    left.plot(
        numbers, [speeds[0] * n / numbers[0] for n in numbers], color=GREY, linestyle="--", label="ideal"
    )
    left.plot(numbers, speeds, color=BLUE, marker="o", label=found[0].label)
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel=unit)
    left.legend(frameon=False)
    costs, money = _costs(found)
    right.plot([point.hours for point in found], costs, color=ORANGE, marker="o")
    for point, cost in zip(found, costs, strict=True):
        _number(right, point, cost)
    right.set(xscale="log", xlabel="hours", ylabel=money)
    right.set_ylim(bottom=0)


def _many_curves(axes: Sequence[Any], found: Sequence[Point]) -> None:
    """A curve for each card; in colour those with a plan that no other beats in both time and cost."""
    left, right = axes
    _, unit = _speeds(found)
    money = _costs(found)[1]
    best = frontier(found)
    marked = list(dict.fromkeys(point.label for point in best))
    colours = {label: MARKED[i % len(MARKED)] for i, label in enumerate(marked)}
    for label in dict.fromkeys(point.label for point in found):
        own = sorted((point for point in found if point.label == label and point.kept), key=lambda p: p.count)
        if not own or (money == "USD" and own[0].usd is None):
            continue
        look = {"color": colours.get(label, GREY), "zorder": 2 if label in colours else 1, "marker": "."}
        left.plot([point.count for point in own], _speeds(own)[0], label=label, **look)
        right.plot([point.hours for point in own], _costs(own)[0], **look)
    for point in best:
        right.plot(point.hours, _costs([point])[0][0], color=colours[point.label], marker="o", zorder=3)
        _number(right, point, _costs([point])[0][0])
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel=unit)
    right.set(xscale="log", yscale="log", xlabel="hours", ylabel=money)
    handles, labels = left.get_legend_handles_labels()
    shown = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label in colours]
    if shown:
        left.legend(
            *zip(*shown, strict=True), frameon=False, fontsize=8, title="no other is quicker and cheaper"
        )


def frontier(found: Sequence[Point]) -> list[Point]:
    """The plans that no other beats in both time and cost, the quickest first."""
    money = _costs(found)[1]
    kept = [point for point in found if point.kept and (money != "USD" or point.usd is not None)]
    best: list[Point] = []
    for point in sorted(kept, key=lambda p: (p.hours, _costs([p])[0][0])):
        if not best or _costs([point])[0][0] < _costs(best[-1:])[0][0]:
            best.append(point)
    return best


def _bars(axes: Sequence[Any], found: Sequence[Point]) -> None:
    names = [point.label for point in found][::-1]
    colours = [BLUE if point.kept else GREY for point in found][::-1]
    hours = [point.hours for point in found][::-1]
    costs = [point.usd or 0.0 for point in found][::-1]
    for axis, values, label in zip(axes, (costs, hours), ("USD", "hours"), strict=True):
        axis.barh(names, values, color=colours)
        axis.set_xlabel(label)
        axis.tick_params(axis="y", labelsize=7)
        axis.margins(y=0.01)
    axes[1].tick_params(axis="y", labelleft=False)  # as on the left
    for place, point in enumerate(found[::-1]):
        if point.usd is None:
            axes[0].text(0, place, " no price", va="center", size=7, color=GREY)


def _speeds(found: Sequence[Point]) -> tuple[list[float], str]:
    """How quick each is, and in what; phases of several sizes have no one rate of pictures."""
    if found[0].images_per_s is None:
        return [1 / point.hours for point in found], "jobs an hour"
    return [point.images_per_s or 0.0 for point in found], "images/s"


def _costs(found: Sequence[Point]) -> tuple[list[float], str]:
    """What each costs, and in what: dollars where any price is known."""
    if all(point.usd is None for point in found):
        return [point.device_hours for point in found], "device-hours"
    return [point.usd or 0.0 for point in found], "USD"


def _number(axis: Any, point: Point, cost: float) -> None:
    where = (point.hours, cost)
    axis.annotate(str(point.count), where, textcoords="offset points", xytext=(4, 4), fontsize=8)


# ---- a recipe's head


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
