"""A sweep: runs that differ in a few settings, one after the other in one folder, under one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.bill import Bill
from darkroom.errors import Stopped
from darkroom.run import Run
from darkroom.train.defaults import SUBJECT_TASKS
from darkroom.train.phases import with_address
from darkroom.train.start import Estimate, train

if TYPE_CHECKING:
    from darkroom.recipe import Recipe
    from darkroom.train.trainer import TrainResult

Say = Callable[[str], None]
CLASS = "class"


def sweep(
    recipes: Sequence[tuple[Mapping[str, Any], Recipe]],
    *,
    out: Path | str,
    resume: str = "auto",
    estimate: Estimate | None = None,
    console: Say = print,
) -> list[TrainResult]:
    """Train every recipe as `OUT/NAME-0`, `OUT/NAME-1`, ...; the same call again goes on where it stopped.

    The recipes' budget is that of all runs together. Class pictures are drawn once for all.
    """
    out = Path(out)
    folders = [out / f"{out.name}-{i}" for i in range(len(recipes))]
    results: list[TrainResult] = []
    for folder, (settings, recipe) in zip(folders, recipes, strict=True):
        told = ", ".join(f"{key}={value}" for key, value in settings.items())
        console(f"{folder.name} of {len(recipes)}: {told}")
        others = [one for one in folders if one != folder]
        one = with_address(_within(recipe, out, others), folder.name)
        results.append(train(one, out=folder, resume=resume, estimate=estimate, console=console))
    return results


def _within(recipe: Recipe, out: Path, others: Sequence[Path]) -> Recipe:
    """The recipe with what the other runs left of the budget; Stopped where they left nothing."""
    used = Bill()
    for folder in others:
        used += _bill(folder)
    left = recipe.budget.less(used)
    if left is None:
        raise Stopped(f"{recipe.budget.spent(used)} is spent by the sweep; say a larger one to go on")
    content = recipe.model_dump(mode="json") | {"budget": left.model_dump()}
    if recipe.task in SUBJECT_TASKS and recipe.data.class_prompt and not recipe.data.class_images:
        content["data"]["class_images"] = str(out / CLASS)
    return type(recipe).model_validate(content)


def _bill(folder: Path) -> Bill:
    there = (folder / "recipe.yaml").is_file()
    return (Run.open(folder).bill() if there else None) or Bill()
