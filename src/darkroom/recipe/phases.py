"""The phases of a recipe, each as a recipe of its own that goes on from the model of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from darkroom.errors import RecipeError
from darkroom.recipe.sections import PhaseSettings, Recipe


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
