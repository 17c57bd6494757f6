"""`darkroom plan`: memory, time and money before anything runs.

What it is asked for, besides a recipe or pictures, are devices, money, requests and latents: every default,
range and meaning stands in the models here once, and the options are generated from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BaseModel, ConfigDict, Field

from darkroom.cli.application import Json, app, columns, console, recipe_file, show
from darkroom.cli.groups import OptionsOf, grouped
from darkroom.errors import InputError, RecipeError
from darkroom.picture_settings import PictureSettings

if TYPE_CHECKING:
    from darkroom.hardware.prices import Price
    from darkroom.plan.targets import PlanRequest, Target


class TargetSettings(BaseModel):
    """On what, how many, and what may be spent."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)

    gpu: str = Field("here", description="here, all, cards such as A100-80,H100, or memory=12GB")
    count: str = Field(
        "auto", description="devices: 8, or 1..1024 for the curve; auto: the recipe's own number"
    )
    budget_usd: float | None = Field(None, ge=0, description="most USD")
    deadline_hours: float | None = Field(None, ge=0, description="most hours")
    usd_per_hour: float | None = Field(None, ge=0, description="USD for an hour of one device")
    prices: Path | None = Field(None, description="a price table of your own, like prices.csv")
    provider: str = Field("", description="only this provider's prices: aws, lambda, verda, vast ...")
    region: str = Field("", description="only prices of regions that begin so: us, eu-central-1")
    spot: bool = Field(False, description="spot prices: machines that may be taken away")
    reserved: Literal["1", "3"] | None = Field(
        None, description="prices of a commitment of 1 or 3 years, paid for used or not"
    )
    cheapest: bool = Field(False, description="the cheapest offer of each card, not the middle one")
    usd_per_gb_month: float | None = Field(None, ge=0, description="USD for a GB kept a month")
    usd_per_gb_out: float | None = Field(None, ge=0, description="USD for a GB moved out")
    mode: Literal["ddp", "fsdp", "auto"] = Field(
        "auto", description="how several devices train; fsdp with ZeRO-2 shards, auto as the recipe says"
    )
    network: str | None = Field(None, description="between nodes: a row of networks.csv")
    machine: str | None = Field(
        None, description="what the cards stand in: a row of machines.csv; None: the usual one"
    )
    precision: Literal["bf16", "fp16", "float32", "fp8", "int8", "auto"] = Field(
        "auto", description="fp8 and int8 of pictures alone; auto as the job computes by default"
    )
    tf32: bool = Field(False, description="float32 products on tensor cores too")
    engine: Literal["eager", "compile", "graphs"] = Field("eager", description="how kernels are launched")
    software: Literal["darkroom", "diffusers", "compile", "tensorrt"] = Field(
        "darkroom", description="whose program runs it"
    )

    def target(self, card: str = "") -> Target:
        """What is asked for, all but the number of devices; of a `card` where that is not --gpu's.

        InputError for a card, network, machine or price table that is not known.
        """
        from darkroom.hardware.cards import machines, networks
        from darkroom.plan import targets

        if self.gpu != "here":
            targets.chosen_cards(self.gpu)
        offers = self._offers()
        if self.reserved:
            self._check_reserved(offers or (), card or self.gpu)
        _check_known("--network", self.network, networks(), ", ")
        _check_known("--machine", self.machine, machines(), "; ")
        return targets.Target(
            gpu=self.gpu,
            mode=self.mode,
            network=self.network,
            stands_in=self.machine,
            usd_per_hour=self.usd_per_hour,
            prices=offers,
            budget_usd=self.budget_usd,
            deadline_hours=self.deadline_hours,
            usd_per_gb_month=self.usd_per_gb_month,
            usd_per_gb_out=self.usd_per_gb_out,
            precision=self.precision,
            engine=self.engine,
            software=self.software,
            tf32=self.tf32,
        )

    def _offers(self) -> tuple[Price, ...] | None:
        """The offers that count; None where nothing is said: all of prices.csv."""
        from darkroom.hardware.prices import choose, prices

        file = self.prices
        if file is not None and not file.is_file():
            raise InputError(f"--prices {file}", mend="there is no such file: columns as in prices.csv")
        if self.reserved and (self.spot or self.usd_per_hour is not None):
            other = "--spot" if self.spot else "--price"
            raise InputError(f"--reserved {self.reserved} with {other}", allowed="one of them")
        if not (self.provider or self.region or self.spot or self.cheapest or self.reserved):
            return None if file is None else prices(file)
        return choose(
            prices() if file is None else prices(file),
            provider=self.provider,
            region=self.region,
            spot=self.spot,
            cheapest=self.cheapest,
            reserved=int(self.reserved or 0),
        )

    def _check_reserved(self, offers: Iterable[Price], name: str) -> None:
        """InputError where no card of that name is among the offers, with those that are."""
        from darkroom.plan import targets

        known = {row.device for row in offers}
        option = "--gpu" if name == self.gpu else "--fits"
        own = name == "here"
        cards = [targets.here(targets.Target()).card] if own else targets.chosen_cards(name, option)
        if not known & {card.name for card in cards}:
            raise InputError(
                f"--reserved {self.reserved} of {name}",
                allowed=", ".join(sorted(known)),
                mend="no such price is known of it: say yours with --price",
            )


def _check_known(flag: str, name: str | None, known: Iterable[str], between: str) -> None:
    if name is not None and name not in known:
        raise InputError(f"{flag} {name}", allowed=between.join(known))


class FleetSettings(BaseModel):
    """Requests that come to a server, and the devices that serve them."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    pictures_per_s: float = Field(1.0, description="serve: pictures a second")
    trace: Path | None = Field(
        None,
        description="serve: requests as they came, a JSON object a line (docs/plan.md), --rate times",
    )
    latency_s: float = Field(10.0, description="serve: seconds within which 95 of 100 are done")
    least: int | None = Field(
        None, ge=1, description="serve: fewest devices of a fleet that grows with its queue"
    )
    start_s: float = Field(
        120.0, ge=0, description="serve: seconds until another device serves: its machine, loading"
    )
    losses_per_hour: float = Field(
        0.0, ge=0, le=60, description="serve: spot interruptions of a device in an hour"
    )

    def asked(self, pictures: PictureSettings) -> PlanRequest:
        """The plan to ask for: of requests that come evenly, or of a trace of them."""
        from darkroom.plan.serving import Fleet, read_trace
        from darkroom.plan.trace import ask_rate, ask_trace

        changes = self.least is not None or self.losses_per_hour
        fleet = Fleet(self.start_s, self.losses_per_hour, self.least) if changes else None
        if self.trace is None:
            return ask_rate(pictures, self.pictures_per_s, self.latency_s, fleet)
        if not self.pictures_per_s > 0:
            raise InputError(f"--rate {self.pictures_per_s}", allowed="a number above 0")
        return ask_trace(pictures, read_trace(self.trace, self.pictures_per_s), self.latency_s, fleet)


class PrepareSettings(BaseModel):
    """Latents that a store is prepared with."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    resolution: int = Field(512, ge=8, description="prepare: side in pixels")
    text: bool = Field(False, description="prepare: the captions' states too")


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
    from darkroom.plan.ask import compared_phases
    from darkroom.plan.show import price_lines

    found = compared_phases(asked, target, numbers)
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
    from darkroom.plan.written import draw, points

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
    from darkroom.plan import written

    if job in JOBS:
        raise InputError(f"{job} --recipe-header", allowed="a recipe file")
    if write:
        written.write(Path(job), overrides, on)
    block = list(written.head(Path(job), overrides, on))
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
