"""Phases: one recipe's runs one after the other, each from the averaged weights of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import RecipeError, Stopped

if TYPE_CHECKING:
    from darkroom.recipe import Recipe
    from darkroom.train.trainer import TrainResult


class PhaseSettings(BaseModel):
    """A part of a training with its own resolution and length. What is left out is the recipe's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    resolution: int = Field(ge=8, le=8192, multiple_of=8, description="side in pixels")
    samples: int = Field(gt=0, description="pictures seen, in whole batches")
    global_batch: int | None = Field(default=None, gt=0, description="pictures in an optimiser step")
    lr: float | None = Field(default=None, gt=0, le=10, description="peak learning rate")
    warmup_steps: int | None = Field(default=None, ge=0, description="steps in which the rate rises")
    ema_from: int | None = Field(
        default=None,
        ge=0,
        description="pictures of the phase before weights are averaged; null: ema.start_step",
    )
    keep: float | None = Field(
        default=None, gt=0, le=1, description="train.routing.keep of this phase; 1: no token is routed"
    )
    align: float | None = Field(
        default=None, ge=0, le=100, description="train.align.weight of this phase; 0: nothing is aligned"
    )


def phase_recipes(recipe: Recipe, out: Path) -> Iterator[tuple[Path, Recipe]]:
    """Each phase as a recipe of its own, and its run's folder. RecipeError where one is impossible."""
    before: Path | None = None
    for i, phase in enumerate(recipe.phases):
        folder = out / f"phase-{i + 1}-{phase.resolution}px"
        one = _recipe_of(recipe, i, phase, before)
        yield folder, with_address(one, folder.name)
        before = folder


def with_address(recipe: Recipe, name: str) -> Recipe:
    """A recipe of several that share an address for checkpoints: with a place of its own there."""
    if recipe.checkpoint.url is None:
        return recipe
    own = recipe.checkpoint.model_copy(update={"url": f"{recipe.checkpoint.url.rstrip('/')}/{name}"})
    return recipe.model_copy(update={"checkpoint": own})


def _recipe_of(recipe: Recipe, i: int, phase: PhaseSettings, before: Path | None) -> Recipe:
    content: dict[str, Any] = recipe.model_dump(mode="json") | {"phases": []}
    batch = phase.global_batch or recipe.train.global_batch
    steps = -(-phase.samples // batch)
    content["data"]["resolution"] = phase.resolution
    content["train"] |= {"global_batch": batch, "steps": steps}
    for key, value in (("lr", phase.lr), ("warmup_steps", phase.warmup_steps)):
        if value is not None:
            content["optim"][key] = value
    if phase.ema_from is not None:
        if phase.ema_from >= phase.samples:
            raise RecipeError(
                f"phases.{i}.ema_from", f"{phase.ema_from} of {phase.samples} pictures", allowed="fewer"
            )
        content["train"]["ema"]["start_step"] = phase.ema_from // batch
    if phase.keep is not None:
        content["train"]["routing"] = _kept(content["train"]["routing"], phase.keep)
    if phase.align is not None:
        content["train"]["align"] = (
            {**content["train"]["align"], "weight": phase.align} if phase.align else {}
        )
    if before is not None:
        trains_text = recipe.model.train_text_encoder
        content["model"] = {"base": str(before / "model"), "train_text_encoder": trains_text}
        content["data"]["text"] = recipe.data.text
    return type(recipe).model_validate(content)


def _kept(routing: dict[str, Any], keep: float) -> dict[str, Any]:
    return {**routing, "keep": keep} if keep < 1 else {}


def train_phases(
    recipe: Recipe, out: Path, one: Callable[[Recipe, Path], TrainResult], say: Callable[[str], None]
) -> TrainResult:
    """Train all phases with `one`; the same call again goes on in the phase where it stopped.

    The budget is that of all phases together.
    """
    result: TrainResult | None = None
    used = None
    for folder, phase in phase_recipes(recipe, out):
        if used is not None:
            left = recipe.budget.less(used)
            if left is None:
                raise Stopped(
                    f"{recipe.budget.spent(used)} is spent by the phases; say a larger one to go on"
                )
            phase = phase.model_copy(update={"budget": left})
        say(
            f"{folder.name}: {phase.train.steps} steps of {phase.train.global_batch} pictures, "
            f"{phase.data.resolution} px"
        )
        result = one(phase, folder)
        used = result.bill if used is None else used + result.bill
    assert result is not None
    return result
