"""The plan of a run on its own machine: kept as the run starts, and shown with what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from darkroom.errors import DarkroomError
from darkroom.plan import ask, targets
from darkroom.plan.show import gb, hours, seconds, to_dict, usd

if TYPE_CHECKING:
    from darkroom.hardware.machine import Machine
    from darkroom.plan.jobs import Plan
    from darkroom.recipe.sections import Recipe


def estimate_run(
    recipe: Recipe, devices: int = 1, *, count: bool = False, on: Machine | None = None
) -> dict[str, Any] | None:
    """The plan of a recipe's run as plain values, on this machine or another; None where there is none.

    Without `count` only counts that are kept from an earlier plan serve: counting takes 5 to 20 s.
    """
    from darkroom.hardware.machine import machine

    if recipe.train.device == "cpu":
        on = replace(on or machine(), devices=())
    target = targets.Target(count=devices, machine=on)
    try:
        plan = ask.plans(ask.ask_recipe_object(recipe, recipe.task, count=count), target)[0]
    except DarkroomError:
        return None
    return {**to_dict(plan), "steps": recipe.train.steps, "line": line(plan)}


def line(plan: Plan) -> str:
    """One line for a log."""
    money = "" if plan.cost.usd is None else f", {usd(plan.cost.usd)}"
    return (
        f"planned: {seconds(plan.step_s['total'])} a step, {plan.images_per_s:,.3g} images/s, "
        f"{gb(plan.peak_bytes)} at the peak, {hours(plan.hours)}{money}"
    )
