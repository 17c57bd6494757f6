"""Recipes made of a recipe: one for each of its phases, one for each run of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from darkroom.errors import RecipeError
from darkroom.recipe.sections import BudgetSettings, CheckpointSettings, PhaseSettings, Recipe


def phase_recipes(recipe: Recipe, out: Path) -> Iterator[tuple[Path, Recipe]]:
    """Each phase as a recipe of its own, and its run's folder. RecipeError where one is impossible."""
    before: Path | None = None
    for i, phase in enumerate(recipe.phases):
        folder = out / f"phase-{i + 1}-{phase.resolution}px"
        content: dict[str, Any] = recipe.model_dump(mode="json") | {"phases": []}
        _set_phase(content, i, phase)
        if before is not None:
            _set_base(content, before / "model")
        one = Recipe.model_validate(content)
        yield folder, one.model_copy(update={"checkpoint": _apart(one.checkpoint, folder.name)})
        before = folder


def _set_phase(content: dict[str, Any], i: int, phase: PhaseSettings) -> None:
    """Put a phase's settings into a recipe's content, in place of what it says for all of them."""
    train = content["train"]
    batch = phase.global_batch or train["global_batch"]
    content["data"]["resolution"] = phase.resolution
    train |= {"global_batch": batch, "steps": -(-phase.samples // batch)}
    for key, value in (("lr", phase.lr), ("warmup_steps", phase.warmup_steps)):
        if value is not None:
            content["optim"][key] = value
    if phase.ema_from is not None:
        if phase.ema_from >= phase.samples:
            raise RecipeError(
                f"phases.{i}.ema_from", f"{phase.ema_from} of {phase.samples} pictures", allowed="fewer"
            )
        train["ema"]["start_step"] = phase.ema_from // batch
    if phase.keep is not None:
        train["routing"] = {**train["routing"], "keep": phase.keep} if phase.keep < 1 else {}
    if phase.align is not None:
        train["align"] = {**train["align"], "weight": phase.align} if phase.align else {}


def _set_base(content: dict[str, Any], base: Path) -> None:
    """Have a recipe's content go on from a model, of which it keeps what is trained."""
    trains_text = content["model"]["train_text_encoder"]
    content["model"] = {"base": str(base), "train_text_encoder": trains_text}


def sweep_recipe(recipe: Recipe, name: str, left: BudgetSettings, class_images: Path | None) -> Recipe:
    """A recipe as one run of a sweep: with what is left of the budget, and its own place for checkpoints.

    `class_images` is the folder of class pictures that it shares with others, if it does.
    """
    content: dict[str, Any] = recipe.model_dump(mode="json") | {"budget": left.model_dump()}
    if class_images is not None:
        content["data"]["class_images"] = str(class_images)
    one = Recipe.model_validate(content)
    return one.model_copy(update={"checkpoint": _apart(one.checkpoint, name)})


def _apart(settings: CheckpointSettings, name: str) -> CheckpointSettings:
    """Where several runs share an address for checkpoints: a place of its own there."""
    if settings.url is None:
        return settings
    return settings.model_copy(update={"url": f"{settings.url.rstrip('/')}/{name}"})
