"""A sweep: runs that differ in a few settings, one after the other in one folder, under one budget."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from darkroom.bill import Bill
from darkroom.errors import DarkroomError, InputError, Stopped, is_out_of_memory
from darkroom.run import Run
from darkroom.train.checks import check_settings
from darkroom.train.defaults import SUBJECT_TASKS
from darkroom.train.gather import class_note
from darkroom.train.micro import NotOneFits
from darkroom.train.phases import with_address
from darkroom.train.ranks import RankLost, started_together
from darkroom.train.start import Estimate, train

if TYPE_CHECKING:
    from darkroom.recipe import Recipe
    from darkroom.train.trainer import TrainResult

Say = Callable[[str], None]
LONGEST_NAME = 100


@dataclass(frozen=True)
class Tried:
    """One run of a sweep: what sets it apart, and what it made, or why it did not get to its end."""

    run: Path
    settings: Mapping[str, Any]
    result: TrainResult | None
    failure: str = ""

    @property
    def bill(self) -> Bill:
        """What it used so far."""
        return _bill(self.run)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        made = self.result.to_dict() if self.result else {"bill": self.bill.model_dump(mode="json")}
        return {"run": str(self.run), "settings": dict(self.settings), **made, "failure": self.failure}


def sweep(
    recipes: Sequence[tuple[Mapping[str, Any], Recipe]],
    *,
    out: Path | str,
    resume: str = "auto",
    estimate: Estimate | None = None,
    console: Say = print,
) -> list[Tried]:
    """Train every recipe as `OUT/NAME-lr-1e-4` and the like; the same call again goes on where it stopped.

    A run that diverges or finds no memory is noted, and the others are made; the same call tries it again
    from its last checkpoint. The recipes' budget is that of all runs together. Class pictures are drawn once
    for all that draw the same ones. Raises InputError for a mistake, Stopped where the user or the budget
    stops it.
    """
    out = Path(out)
    folders = [out / f"{out.name}-{name}" for name in run_names([settings for settings, _ in recipes])]
    for _, recipe in recipes:
        if not recipe.phases:
            check_settings(recipe)
    tried: list[Tried] = []
    for folder, (settings, recipe) in zip(folders, recipes, strict=True):
        told = ", ".join(f"{key}={value}" for key, value in settings.items())
        console(f"{folder.name}, {len(tried) + 1} of {len(recipes)}: {told}")
        others = [one for one in folders if one != folder]
        one = with_address(_within(recipe, out, others), folder.name)
        made, failure = attempted(
            partial(train, one, out=folder, resume=resume, estimate=estimate, console=console)
        )
        if failure:
            console(f"warning: {folder.name}: {failure}")
        tried.append(Tried(folder, settings, made, failure))
    return tried


def attempted(training: Callable[[], TrainResult]) -> tuple[TrainResult | None, str]:
    """What a training made, or None and why where its settings diverge or find no memory."""
    try:
        return training(), ""
    except Exception as error:
        failure = _failure(error)
        if not failure:
            raise
    gc.collect()  # here, where the error no longer holds the run's tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, failure


def _failure(error: Exception) -> str:
    """What to note of an error, if the sweep goes on after it."""
    if isinstance(error, NotOneFits):
        return str(error)
    if isinstance(error, (Stopped, InputError, RankLost)):
        return ""
    if isinstance(error, DarkroomError):
        return str(error)
    # A rank that ran out of memory has left the others waiting: only alone can it go on.
    return "out of memory" if is_out_of_memory(error) and started_together() == 1 else ""


def run_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each run of a sweep a name that says its settings: `rank-8_lr-1e-4`. InputError for two alike."""
    keys = list(settings[0])
    ends = [key.rpartition(".")[2] for key in keys]
    short = dict(zip(keys, ends if len(set(ends)) == len(ends) else keys, strict=True))
    names = ["_".join(f"{short[key]}-{_value(value)}" for key, value in one.items()) for one in settings]
    if (double := next(_doubles(names), None)) is not None:
        raise InputError(f"the sweep has {double} twice", mend="say each value once")
    return [_cut(name) for name in names]


def _cut(name: str) -> str:
    """A name that a file system takes; of a longer one the end is a hash."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{digest}"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _doubles(names: Sequence[str]) -> Iterator[str]:
    return (name for i, name in enumerate(names) if name in names[:i])


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
        content["data"]["class_images"] = str(out / _class_folder(recipe))
    return type(recipe).model_validate(content)


def _class_folder(recipe: Recipe) -> str:
    """The folder of class pictures that all runs with the same model, prompt and size share."""
    note = json.dumps(class_note(recipe), sort_keys=True)
    return f"class-{hashlib.sha256(note.encode()).hexdigest()[:8]}"


def _bill(folder: Path) -> Bill:
    there = (folder / "recipe.yaml").is_file()
    return (Run.open(folder).bill() if there else None) or Bill()
