"""`darkroom bench finetune`, from its flags to the measurements and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from darkroom.cli.application import columns
from darkroom.errors import InputError

if TYPE_CHECKING:
    from darkroom.measure.finetuning import Finetuning

T = TypeVar("T")


def split(text: str, kind: Callable[[str], T]) -> list[T]:
    """Values between commas; InputError for what is none."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InputError(f"'{text}'", allowed="numbers with commas") from error


def finetuning_settings(**given: Any) -> Finetuning:
    """From flags; InputError for a rate or a number of steps that is no number. The settings check every
    other value.
    """
    from darkroom.measure.finetuning import Finetuning

    try:
        given["rates"] = {name: float(value) for name, value in given["rates"].items()}
    except ValueError as error:
        raise InputError("--lr", allowed="METHOD=RATE, such as lora=1e-4") from error
    try:
        given["method_steps"] = {name: int(value) for name, value in given["method_steps"].items()}
    except ValueError as error:
        raise InputError("--method-steps", allowed="METHOD=STEPS, such as lora=900") from error
    return Finetuning(**given)


@dataclass(frozen=True)
class Reported:
    """Where everything was written, and the best recipes."""

    page: str
    measurements: str
    scores: str | None
    plots: list[str]
    best: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a terminal."""
        where = [f"page: {self.page}", f"rows: {self.measurements}"]
        return [*columns(self.best), *where, *([f"scores: {self.scores}"] if self.scores else [])]


BEST_SHOWN = (
    *("series", "step", "samples", "subject_fidelity", "prompt_fidelity"),
    *("balance", "train_usd", "planned_usd"),
)


def report(
    bench: Finetuning,
    out: Path,
    *,
    extractors: Mapping[str, str],
    prompts: str | None,
    num: int,
    draw: Mapping[str, Any],
    memory: str,
    planned: str,
    gpu: str,
    cards: int,
    repeats: int,
    costs_only: bool = False,
    say: Callable[[str], None],
) -> Reported:
    """Measure, plan, follow, and write `measurements.csv`, `scores.csv`, PNGs and `report.html`. Rows are
    kept as they come: the same call again goes on. With `costs_only` no method is followed: no extractor is
    asked for, and there are neither scores nor pictures.
    """
    from darkroom.measure.finetuning import Growing, check_same, parameter_rows, planned_rows
    from darkroom.measure.finetuning_results import (
        Followed,
        Judging,
        best_rows,
        follow_methods,
        follow_rates,
        largest_rows,
        step_rows,
    )
    from darkroom.options import parse_bytes
    from darkroom.plan.ask import ask_recipe_object, planned_columns
    from darkroom.report.finetuning import write_finetuning

    asked = asdict(bench) | {"photos": bench.photos.resolve(), "work": bench.work.resolve()}
    asked |= {"memory": memory, "planned": planned, "gpu": gpu, "cards": cards, "repeats": repeats}
    scoring = {"extractors": extractors, "prompts": prompts, "num": num, "draw": draw}
    file, scores = out / "measurements.csv", out / "scores.csv"
    budget = parse_bytes(memory)
    judging = None
    if not costs_only:
        judging = Judging.of(bench, extractors, prompts, num=num, seed=bench.seed, draw=draw, keep=scores)
    ask = None if planned == "none" else lambda one: planned_columns(ask_recipe_object(one), gpu, cards)
    for method in bench.methods:
        bench.recipe(bench.case(method))  # InputError before any work
    check_same(out / "asked.json", file, asked)
    if judging:
        check_same(out / "asked-scores.json", scores, scoring)
    table = Growing(file)
    found, best = Followed(), []
    if judging:
        found = follow_methods(bench, judging, table, say)
        found.add(follow_rates(bench, judging, table, say))
        best = best_rows(found, bench, planner=ask, base=planned, table=table)
    step_rows(bench, repeats=repeats, table=table, say=say)
    largest_rows(bench, budget_bytes=budget, table=table, say=say)
    if ask is not None:
        large = replace(bench, resolution=512, resolutions=(256, 512, 768), checkpointing=True)
        planned_rows(large, ask, base=planned, step_counts=(50, 200, 400, 1000), table=table, say=say)
    for one in parameter_rows(table.rows):
        table.add(one)
    plots, page = write_finetuning(table.rows, found.pictures, bench, out)
    shown = [{name: one.settings.get(name) for name in BEST_SHOWN} for one in best]
    scored = str(scores) if judging else None
    return Reported(str(page), str(file), scored, [str(plot) for plot in plots], shown)
