"""The comparison of cards, or the scaling curve, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from darkroom.plan.ask import kept
from darkroom.plan.jobs import Plan

BLUE, ORANGE, GREY = "#2f6690", "#d9822b", "#c9c9c9"


def draw(found: Sequence[Plan], path: Path, *, curve: bool) -> None:
    """Write a PNG (or what the file's ending says): speed and cost over devices, or card by card."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5 if curve else max(3.0, 0.28 * len(found))))
    if curve:
        _curve(axes, found)
    else:
        _bars(axes, found)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _curve(axes: Sequence[object], found: Sequence[Plan]) -> None:
    left, right = axes
    numbers = [plan.count for plan in found]
    rates = [plan.images_per_s for plan in found]
    ideal = [rates[0] * number / numbers[0] for number in numbers]
    left.plot(numbers, ideal, color=GREY, linestyle="--", label="ideal")  # type: ignore[attr-defined]
    left.plot(numbers, rates, color=BLUE, marker="o", label=found[0].device)  # type: ignore[attr-defined]
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel="images/s")  # type: ignore[attr-defined]
    left.legend(frameon=False)  # type: ignore[attr-defined]
    costs = [plan.cost.usd or plan.cost.device_hours for plan in found]
    priced = found[0].cost.usd is not None
    right.plot([plan.hours for plan in found], costs, color=ORANGE, marker="o")  # type: ignore[attr-defined]
    for plan, cost in zip(found, costs, strict=True):
        right.annotate(str(plan.count), (plan.hours, cost), textcoords="offset points", xytext=(4, 4))  # type: ignore[attr-defined]
    right.set(xscale="log", xlabel="hours", ylabel="USD" if priced else "device-hours")  # type: ignore[attr-defined]
    right.set_ylim(bottom=0)  # type: ignore[attr-defined]
    for axis in axes:
        _tidy(axis)


def _bars(axes: Sequence[object], found: Sequence[Plan]) -> None:
    names = [plan.device for plan in found][::-1]
    colours = [BLUE if kept(plan) else GREY for plan in found][::-1]
    hours = [plan.hours for plan in found][::-1]
    costs = [plan.cost.usd or 0.0 for plan in found][::-1]
    for axis, values, label in zip(axes, (costs, hours), ("USD", "hours"), strict=True):
        axis.barh(names, values, color=colours)  # type: ignore[attr-defined]
        axis.set_xlabel(label)  # type: ignore[attr-defined]
        axis.tick_params(axis="y", labelsize=7)  # type: ignore[attr-defined]
        axis.margins(y=0.01)  # type: ignore[attr-defined]
        _tidy(axis)
    for place, plan in enumerate(found[::-1]):
        if plan.cost.usd is None:
            axes[0].text(0, place, " no price", va="center", size=7, color=GREY)  # type: ignore[attr-defined]


def _tidy(axis: object) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)  # type: ignore[attr-defined]
