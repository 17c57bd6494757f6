"""`darkroom plan`: memory, time and money before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from darkroom.cli.application import Json, app, columns, console, recipe_file, show
from darkroom.cli.groups import OptionsOf, grouped
from darkroom.errors import InputError, RecipeError
from darkroom.picture_settings import PictureSettings
from darkroom.plan.options import FleetSettings, PrepareSettings, TargetSettings

if TYPE_CHECKING:
    from darkroom.plan.targets import Target

JOBS = ("generate", "serve", "prepare")


TARGET = OptionsOf(
    TargetSettings,
    tuple(TargetSettings.model_fields),
    flags={
        "budget_usd": "--budget",
        "deadline_hours": "--deadline",
        "usd_per_hour": "--price",
        "usd_per_gb_month": "--storage",
        "usd_per_gb_out": "--egress",
        **{name: f"--{name}" for name in ("spot", "cheapest", "tf32")},
    },
)
"""On what, how many, and what may be spent: type, default, range and meaning are `TargetSettings`'."""
PICTURES = OptionsOf(PictureSettings, tuple(PictureSettings.model_fields))
"""Pictures that are planned: type, default, range and meaning are `PictureSettings`'."""


FLEET = OptionsOf(
    FleetSettings,
    tuple(FleetSettings.model_fields),
    flags={
        "pictures_per_s": "--rate",
        "latency_s": "--latency",
        "least": "--autoscale",
        "start_s": "--start",
        "losses_per_hour": "--losses",
    },
)
"""What a server is asked for: type, default, range and meaning are `FleetSettings`'."""
PREPARED = OptionsOf(PrepareSettings, tuple(PrepareSettings.model_fields), flags={"text": "--text"})


@app.command()
@grouped
def plan(
    job: Annotated[str | None, typer.Argument(help="a recipe, or generate, serve, prepare")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    *,
    on: Annotated[dict[str, Any], TARGET],
    fits: Annotated[
        str | None, typer.Option(help="what a card can do with --model: all tasks, on one screen")
    ] = None,
    of: Annotated[dict[str, Any], PICTURES],
    served: Annotated[dict[str, Any], FLEET],
    stored: Annotated[dict[str, Any], PREPARED],
    advise: Annotated[
        bool, typer.Option("--advise", help="search for the cheapest and fastest plan")
    ] = False,
    head: Annotated[
        str | None,
        typer.Option(
            "--recipe-header", help="the comment a recipe quotes its plan in, on 'A10G, 8 x A100-80'"
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="put that comment into the recipe")] = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="draw the comparison or the curve, a PNG")
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="measure this machine, once")] = False,
    rows: Annotated[
        list[Path] | None, typer.Option(help="--calibrate: a table of bench batch, measured on this machine")
    ] = None,
    refresh_prices: Annotated[
        Path | None, typer.Option(help="write today's offers to a file for --prices, through gpuhunt")
    ] = None,
    validate: Annotated[bool, typer.Option("--validate", help="predict published tables")] = False,
    as_json: Json = False,
) -> None:
    """Memory, time and cost of a job before it runs.

    Needs no GPU.

    Example: darkroom plan generate --model sd15 --size 512x512 --steps 30 --batch 4 --gpu A100-80
    """
    on_what = TARGET.settings(on)
    if calibrate:
        return _calibrate(rows or [], as_json)
    if validate:
        return _validate(as_json)
    if refresh_prices is not None:
        return _refresh(refresh_prices, as_json)
    if fits is not None:
        return _fits(fits, of["model"], on_what.target(fits), as_json)
    job, target = _checked_job(job), on_what.target()
    if job in JOBS and overrides:
        raise InputError(f"{job} {overrides[0]}", mend="a job takes flags, only a recipe takes KEY=VALUE")
    if served["trace"] is not None and job != "serve":
        raise InputError(f"--trace with {job}", allowed="serve --trace FILE")
    if head is not None:
        return _head(job, overrides or [], head, write, as_json)
    from darkroom.plan import ask

    if job == "generate":
        asked = [ask.ask_generate(PictureSettings(**of))]
    elif job == "serve":
        asked = [FLEET.settings(served).asked(PictureSettings(**of))]
    elif job == "prepare":
        asked = [ask.ask_prepare(of["model"], stored["resolution"], of["pictures"], text=stored["text"])]
    else:
        asked = ask.ask_phases(Path(job), overrides or [])
    numbers = [ask.own_count(asked[0], target)] if on_what.count == "auto" else ask.counts(on_what.count)
    if advise and plot is not None:
        raise InputError(
            "--plot with --advise", mend="draw without --advise: --gpu all, or a range of --count"
        )
    if advise:
        return _advise(asked, Path(job), overrides or [], target, numbers, as_json)
    return _show_plans(asked, target, numbers, plot, as_json)


def _checked_job(given: str | None) -> str:
    """The job, or a recipe's file that is there: a mistake is said before the seconds that imports take."""
    if not given:
        raise InputError("no job", allowed=f"a recipe file, {', '.join(JOBS)}, --calibrate or --validate")
    job = str(recipe_file(Path(given)))
    if job not in JOBS and not Path(job).is_file():
        raise RecipeError.missing(Path(job))
    return job


def plan_here(recipe: Path, overrides: list[str], as_json: bool) -> None:
    """A recipe's plan for this machine."""
    from darkroom.plan import ask, targets

    asked, target = ask.ask_phases(recipe, overrides), targets.Target()
    numbers = [ask.own_count(asked[0], target)]
    return _show_plans(asked, target, numbers, None, as_json)


def _show_plans(asked: list[Any], target: Any, numbers: list[int], plot: Path | None, as_json: bool) -> None:
    """One plan in full, several side by side, a recipe's phases one after the other."""
    from darkroom.plan import ask
    from darkroom.plan.show import comparison, lines, price_lines, to_dict, together

    if len(asked) > 1 and (target.several or len(numbers) > 1):
        _compare_phases(asked, target, numbers, plot, as_json)
        return
    found = [plan for one in asked for plan in ask.compared(one, target, numbers)]
    several, compared = len(found) > 1, len(found) > len(asked)
    _draw(found, plot, by_job=len(asked) > 1)

    def text_lines() -> Iterator[str]:
        """The plans for a reader: one by one, or as a table that compares them."""
        for one in found if not compared else ():
            yield from lines(one)
        yield from columns(comparison(found)) if compared else ()
        yield from [together(found, sure=True)] if len(asked) > 1 else ()
        yield from price_lines(found) if several else ()
        yield from _drawn(plot)

    show({"plans": [to_dict(one) for one in found]}, as_json, text_lines)


def _compare_phases(
    asked: list[Any], target: Any, numbers: list[int], plot: Path | None, as_json: bool
) -> None:
    """What several phases take together: on every card, the cheapest first, or on each number of devices."""
    from darkroom.plan.phases import compared
    from darkroom.plan.show import price_lines

    found = compared(asked, target, numbers)
    _draw(found, plot)

    def text_lines() -> Iterator[str]:
        yield from columns([one.row() for one in found])
        yield from price_lines([plan for one in found for plan in one.plans])
        yield from _drawn(plot)

    name = "cards" if target.several else "counts"
    show({name: [one.to_dict() for one in found]}, as_json, text_lines)


def _draw(found: list[Any], plot: Path | None, *, by_job: bool = False) -> None:
    if plot is None:
        return
    from darkroom.plan.plot import draw, points

    draw(points(found, by_job=by_job), plot)


def _drawn(plot: Path | None) -> Iterator[str]:
    if plot is not None:
        yield f"drawn: {plot}"


def _advise(
    asked: list[Any], recipe: Path, overrides: list[str], target: Any, numbers: list[int], as_json: bool
) -> None:
    from darkroom.plan.advise import advise, advise_phases

    rest, say = (recipe, overrides, target, numbers), console(as_json)
    advice = advise(asked[0], *rest, say) if len(asked) == 1 else advise_phases(asked, *rest, say)
    show(advice.to_dict(), as_json, advice.lines)


def _head(job: str, overrides: list[str], on: str, write: bool, as_json: bool) -> None:
    from darkroom.plan import recipe_header as head

    if job in JOBS:
        raise InputError(f"{job} --recipe-header", allowed="a recipe file")
    if write:
        head.write(Path(job), overrides, on)
    block = list(head.head(Path(job), overrides, on))
    show({"head": block, "written": write}, as_json, lambda: block)


def _refresh(file: Path, as_json: bool) -> None:
    from darkroom.hardware.prices import refresh

    found = refresh(file)
    cards = len({one.device for one in found})
    show(
        {"file": str(file), "offers": len(found), "cards": cards},
        as_json,
        lambda: [f"{len(found)} offers of {cards} cards in {file}; use them with --prices {file}"],
    )


def _calibrate(tables: list[Path], as_json: bool) -> None:
    from darkroom.measure.timing import read_csv
    from darkroom.plan.calibrate import calibrate
    from darkroom.plan.targets import calibration_file

    found = calibrate(console(as_json), [row for table in tables for row in read_csv(table)])
    rows = [
        {"what": one.name, "rate": one.rate, "unit": one.unit, "share of the rated peak": one.share}
        for one in found
    ]
    show(
        {"measured": found, "kept": str(calibration_file())},
        as_json,
        lambda: [*columns(rows), f"kept in {calibration_file()}"],
    )


def _validate(as_json: bool) -> None:
    from darkroom.proof.published import validate

    validation = validate(say=console(as_json))
    show(validation.to_dict(), as_json, validation.lines)


def _fits(card: str, model: str, target: Target, as_json: bool) -> None:
    from darkroom.plan.fits import what_fits

    found = what_fits(card, model, console(as_json), on=target)
    rows = [fit.row() for fit in found.found]
    show(found.to_dict(), as_json, lambda: [found.head(), *columns(rows), *found.foot()])
