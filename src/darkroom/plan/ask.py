"""What a user asks: a recipe, with all its phases, or a job; on one card or on all, on one device or on a
thousand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import DarkroomError, InputError
from darkroom.hardware.cards import Card, storage_price, unsourced
from darkroom.hardware.prices import Price, listed, over_limits, storage
from darkroom.options import parse_size
from darkroom.picture_settings import PictureSettings
from darkroom.plan.counts import LATENTS, Profile, cached, cached_profile
from darkroom.plan.jobs import (
    GenerateJob,
    Plan,
    PrepareJob,
    TrainJob,
    Where,
    batch_seconds,
    plan_generating,
    plan_preparing,
    plan_training,
)
from darkroom.plan.roofline import Software
from darkroom.plan.show import gb, hours, seconds, to_dict, usd, with_intervals
from darkroom.plan.targets import (
    PlanRequest,
    Target,
    as_counted,
    check_planned,
    chosen_cards,
    configs_of,
    counted_as,
    here,
    layout_of,
    may_make_anew,
    mode_of,
    of_pictures,
    of_steps,
    own_guidance,
    picture_profile,
    pictures_of,
    place,
    preparing_profile,
    read_phase,
    rows_of,
    runs_of,
    runs_tensorrt,
    software_notes,
    software_of,
    text_of,
)
from darkroom.recipe.rules import channels_last

if TYPE_CHECKING:
    from darkroom.hardware.machine import Machine
    from darkroom.recipe.recipe import Recipe
    from darkroom.run import Run

MOST_DEVICES = 65536
USUAL_PRECISION = "float32"  # of `generate`, `serve` and `prepare` by default
UNCOUNTED = "train.align is not counted: its extractor is not opened"
NO_PICTURES = "the time of making latents is not counted: how many pictures there will be is not known"


Planner = Callable[[Where, Software], Plan]


def plans(asked: PlanRequest, target: Target) -> list[Plan]:
    """The plan on the card asked for; of all cards the cheapest first, those that do not fit or keep the
    deadline and the budget last.
    """
    settings = asked.settings
    target = replace(
        target,
        mode=mode_of(asked, target),
        shard=settings.get("shard", "grads"),
        node_devices=settings.get("node_devices") or target.node_devices,
    )
    own = target.gpu == "here"
    wheres = [here(target)] if own else [place(card, target) for card in _able_cards(asked, target)]
    found = [_with_limits(_plan_on(asked, where, target), target) for where in wheres]
    return sorted(found, key=_order)


def _able_cards(asked: PlanRequest, target: Target) -> list[Card]:
    """The cards asked for; several of Apple's cannot train together, as torch has no collectives there. Of
    many, those that the software runs on.
    """
    found = chosen_cards(target.gpu)
    if target.software == "tensorrt" and target.several:
        found = [card for card in found if runs_tensorrt(card)] or found
    if target.count == 1 or not asked.settings:
        return found
    able = [card for card in found if card.architecture != "Apple GPU"]
    if not able:
        raise InputError(f"{target.count} x {found[0].name}", allowed="one: they cannot train together")
    return able


def own_count(asked: PlanRequest, target: Target) -> int:
    """The number of devices that a recipe says: on each machine as many as it says, else one a GPU."""
    from darkroom.hardware.machine import machine

    settings = asked.settings
    if settings.get("alone", True):
        return 1
    each = settings["node_devices"]
    if each is None:
        each = max(1, len(machine().devices)) if target.gpu == "here" else 1
    return int(settings["nodes"] * each)


def _plan_on(asked: PlanRequest, where: Where, target: Target) -> Plan:
    software = software_of(asked, target, where)
    precision, gpu = software.precision, where.card.kind == "gpu"
    profile = asked.profile(precision, gpu)
    plan = asked.plan(profile, where, software, target.usd_per_hour, target.prices)
    offers = (
        ()
        if target.usd_per_hour is not None
        else listed(where.card, where.cores, plan.cost.device_hours, target.prices, number=plan.count)
    )
    plan = with_intervals(replace(plan, offers=offers), where, software)
    notes = (*software_notes(target, where, software), *unsourced(where.card))
    plan = replace(plan, notes=(*plan.notes, *notes))
    price = storage_price(
        plan.cost.provider, usd_per_gb_month=target.usd_per_gb_month, usd_per_gb_out=target.usd_per_gb_out
    )
    return replace(plan, storage=storage(plan.sizes_bytes, price))


def _with_limits(plan: Plan, target: Target) -> Plan:
    """The plan with what it breaks of the deadline and the budget."""
    return replace(
        plan, over=over_limits(plan.hours, plan.cost.usd, target.deadline_hours, target.budget_usd)
    )


def _order(plan: Plan) -> tuple[bool, bool, float]:
    usd = plan.cost.usd
    return (not plan.kept, usd is None, usd if usd is not None else plan.cost.device_hours)


def counts(text: str) -> list[int]:
    """'8', or '1..1024': the doublings between."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= MOST_DEVICES:
        raise InputError(f"--count {text}", allowed=f"a number, or FIRST..LAST, of 1 to {MOST_DEVICES}")
    found = [low]
    while found[-1] * 2 <= high:
        found.append(found[-1] * 2)
    return found if found[-1] == high else [*found, high]


def going_round(asked: Sequence[PlanRequest], numbers: Sequence[int]) -> list[int]:
    """The numbers of devices that every job's batch can be dealt out to; where none is, the first, whose plan
    says why.
    """
    batches = [one.settings["global_batch"] for one in asked if one.settings]
    return [n for n in numbers if not any(batch % n for batch in batches)] or list(numbers[:1])


def compared(asked: PlanRequest, target: Target, numbers: Sequence[int]) -> list[Plan]:
    """The plans of several numbers of devices, as far as the batch goes round: on one card in their order, on
    all cards the cheapest first.
    """
    found = [
        plan
        for number in going_round([asked], numbers)
        for plan in plans(asked, replace(target, count=number))
    ]
    return sorted(found, key=_order) if target.several else found


# ---- jobs


def ask_phases(path: Path, overrides: Sequence[str] = ()) -> list[PlanRequest]:
    """A recipe's jobs: each of its phases, or the one job of a recipe without any."""
    asked = ask_recipe(path, overrides)
    number = asked.settings["phases"]
    return [ask_recipe(path, overrides, phase=i) for i in range(number)] if number else [asked]


def ask_recipe(path: Path, overrides: Sequence[str] = (), *, phase: int | None = None) -> PlanRequest:
    """A recipe's job, or that of one of its phases. It is read and checked once; its counts are kept."""
    text = text_of(path)
    runs = runs_of("\n".join([text, *overrides]), path.parent)
    key = {"recipe": text, "overrides": list(overrides), "phase": phase, "runs": runs}
    settings = cached(
        {**key, "settings": 13}, lambda: ask_recipe_object(*read_phase(path, overrides, phase)).settings
    )
    settings["rows"] = rows_of(settings["store"])
    name = path.stem if phase is None else f"{path.stem}, phase {phase + 1}, {settings['resolution']} px"
    return _asked_training(name, settings)


def mends_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What takes less memory and is not set already."""
    adapted = settings["task"] in ("lora", "dreambooth-lora", "textual-inversion")
    tuned = {"finetune": "lora", "dreambooth": "dreambooth-lora"}.get(settings["task"], "")
    found = {
        "train.gradient_checkpointing=true": not settings["checkpointing"],
        "train.precision=bf16": settings["precision"] == "float32",
        f"task={tuned}": bool(tuned),
        "model.base_precision=nf4": settings["packs"],
        "optim.name=adamw8bit": settings["optimiser"] == "adamw" and not adapted,
        f"data.resolution={settings['resolution'] // 2}": settings["resolution"] >= 512,
    }
    return tuple(mend for mend, helps in found.items() if helps)


class NotCounted(DarkroomError):
    """The counts of a recipe are not kept from before, and nobody may wait for them now."""


def ask_recipe_object(
    recipe: Recipe, notes: Sequence[str] = (), *, name: str = "recipe", count: bool = True
) -> PlanRequest:
    """The same of a recipe that is read already. Without `count` only kept counts serve, else NotCounted.

    Raises InputError for what is not planned, RecipeError for what contradicts itself, ModelError for a base
    that is no model's name.
    """
    check_planned(recipe.task, recipe.model)
    recipe.check()
    model, data, train, optim = recipe.model, recipe.data, recipe.train, recipe.optim
    anew = recipe.frozen_unet and may_make_anew(train, recipe.adapter)
    alike = recipe.model_copy(update=as_counted(train, optim, data, recipe.sample))
    settings = {
        "recipe": alike.dump(),
        "notes": list(notes),
        "phases": len(recipe.phases),
        "packs": anew and model.base_precision is None,
        "swaps": anew and not train.blocks_to_swap,
        **of_pictures(recipe.task, model, data),
        **of_steps(train, optim, recipe.parallel, recipe.checkpoint),
    }
    settings["rows"] = rows_of(settings["store"])
    return _asked_training(name, settings, count=count)


def _asked_training(name: str, settings: dict[str, Any], *, count: bool = True) -> PlanRequest:
    folders = [configs_of(ref) for ref in (settings["base"], settings["vae"]) if ref]
    key = {"recipe": settings["recipe"], "folders": folders}
    job = TrainJob(
        name,
        settings["steps"],
        settings["global_batch"],
        settings["micro_batch"],
        settings.get("rows"),
        settings["reads"],
        mends_of(settings),
        settings["gradient_bytes"],
        swaps=settings["swaps"],
        saves=settings["saves"],
        every_save=settings["every_save"],
    )

    def plan(
        profile: Profile, where: Where, software: Software, usd: float | None, prices: Sequence[Price] | None
    ) -> Plan:
        """The training plan of one place, with the recipe's notes."""
        own = replace(job, pictures=own_pictures(), class_s=_class_seconds(settings, where, software))
        made = plan_training(profile, own, where, software, usd_per_hour=usd, prices=prices)
        uncounted = [UNCOUNTED] if settings["aligns"] else []
        if LATENTS in profile.chunks and own.pictures is None:
            uncounted.append(NO_PICTURES)
        return replace(made, notes=(*made.notes, *settings["notes"], *uncounted))

    @cache
    def own_pictures() -> int | None:
        found = pictures_of(settings["pictures"])
        return None if found is None else found + settings["class_pictures"]

    def profile(precision: str, gpu: bool) -> Profile:
        """The recipe's counts in a precision, from the cache or made. NotCounted where none may be made."""
        precision = counted_as(precision) if gpu else precision

        def made() -> Profile:
            """Counts of the very text that they are kept under."""
            from darkroom.plan.training import profile_recipe

            if not count:
                raise NotCounted(name)
            return profile_recipe(settings["recipe"], precision, gpu=gpu)

        counted = cached_profile({**key, "precision": precision, "gpu": gpu}, made)
        return counted if own_pictures() is None else counted.of_pictures(own_pictures() or 1)

    return PlanRequest(
        name,
        profile,
        plan,
        precision=settings["precision"],
        channels_last=lambda precision, where, compiled: channels_last(
            settings["channels_last"],
            "cuda" if where.card.kind == "gpu" else "cpu",
            sharded=where.cluster.sharded,
        ),
        settings=settings,
        remade=lambda changes: _asked_training(name, {**settings, **changes}, count=count),
    )


def _class_seconds(settings: Mapping[str, Any], where: Where, software: Software) -> float:
    """Seconds of drawing those pictures of a recipe's class that are not there yet, on one device."""
    missing = settings["class_pictures"] - (pictures_of(settings["class_images"]) or 0)
    if missing <= 0:
        return 0.0
    base, side = settings["base"], settings["resolution"]
    counted = picture_profile(base, side, side, own_guidance(base) > 1, software.precision, "fused")
    batch = settings["class_call"]
    each = batch_seconds(counted, where, software, batch=batch, steps=settings["class_steps"])
    return float(each.total * math.ceil(missing / batch))


def ask_generate(settings: PictureSettings) -> PlanRequest:
    """Making pictures."""
    job = GenerateJob("generate", settings.pictures, settings.batch, settings.steps)

    def plan(
        profile: Profile, where: Where, software: Software, usd: float | None, prices: Sequence[Price] | None
    ) -> Plan:
        return plan_generating(profile, job, where, software, usd_per_hour=usd, prices=prices)

    return _asked_pictures("generate", settings, plan)


def _asked_pictures(name: str, settings: PictureSettings, plan: Any) -> PlanRequest:
    width, height = parse_size(settings.size)
    guidance = own_guidance(settings.model) if settings.guidance is None else settings.guidance

    def profile(precision: str, gpu: bool) -> Profile:
        return picture_profile(settings.model, width, height, guidance > 1, precision, settings.attention)

    return PlanRequest(
        name,
        profile,
        plan,
        precision=USUAL_PRECISION,
        attention=settings.attention,
        channels_last=layout_of(settings.channels_last),
    )


def ask_prepare(model: str, resolution: int, pictures: int, *, text: bool = False) -> PlanRequest:
    """Encoding a store once."""
    job = PrepareJob("prepare", pictures)

    def plan(
        profile: Profile, where: Where, software: Software, usd: float | None, prices: Sequence[Price] | None
    ) -> Plan:
        return plan_preparing(profile, job, where, software, usd_per_hour=usd, prices=prices)

    return PlanRequest(
        "prepare",
        lambda p, _: preparing_profile(model, resolution, text, p),
        plan,
        precision=USUAL_PRECISION,
        channels_last=layout_of(False),
    )


STATE = ("gradients", "optimiser")


def planned_columns(asked: PlanRequest, gpu: str, count: int) -> dict[str, Any]:
    """Columns of a benchmark's row for a recipe that is planned, not run, in bytes and USD: on `count` cards,
    or with a smaller batch on as many cards as it has pictures.
    """
    batch, steps = asked.settings["global_batch"], asked.settings["steps"]
    number = min(count, batch)
    assert asked.remade is not None  # a recipe's request always has it
    (plan,) = plans(asked.remade({"micro_batch": -(-batch // number)}), Target(gpu=gpu, count=number))
    masters = 4 * plan.parameters["trained"]
    return {
        "device": plan.device,
        "count": plan.count,
        "memory_bytes": plan.peak_bytes,
        "trained_state_bytes": int(masters + sum(plan.memory_bytes[name] for name in STATE)),
        "images_per_s": plan.images_per_s,
        "usd_per_image": None if plan.cost.usd is None else plan.cost.usd / (steps * batch),
        "trained": plan.parameters["trained"],
        "total": plan.parameters["unet"],
        "largest_batch": plan.largest_micro_batch,
        "note": "; ".join(["planned by fake tensors and a roofline, not run", plan.cost.price, *plan.notes]),
    }


# ---- the plan of a run on its own machine


def estimate_run(
    run: Run, devices: int = 1, *, count: bool = False, on: Machine | None = None
) -> dict[str, Any] | None:
    """The plan of a run as plain values, on this machine or another; None where there is none.

    Without `count` only counts that are kept from an earlier plan serve: counting takes 5 to 20 s.
    """
    from darkroom.hardware.machine import machine
    from darkroom.recipe.recipe import recipe_of

    try:
        recipe = recipe_of(run.recipe, run.path)
        asked = ask_recipe_object(recipe, name=recipe.task, count=count)
        if asked.settings["on_cpu"]:
            on = replace(on or machine(), devices=())
        plan = plans(asked, Target(count=devices, machine=on))[0]
    except DarkroomError:
        return None
    return {**to_dict(plan), "steps": asked.settings["steps"], "line": line(plan)}


def line(plan: Plan) -> str:
    """One line for a log."""
    money = "" if plan.cost.usd is None else f", {usd(plan.cost.usd)}"
    return (
        f"planned: {seconds(plan.step_s['total'])} a step, {plan.images_per_s:,.3g} images/s, "
        f"{gb(plan.peak_bytes)} at the peak, {hours(plan.hours)}{money}"
    )


@dataclass(frozen=True)
class Together:
    """The plans of all phases on one card."""

    plans: tuple[Plan, ...]
    target: Target

    @property
    def device(self) -> str:
        """The card's name."""
        return self.plans[0].device

    @property
    def count(self) -> int:
        """The number of them."""
        return self.plans[0].count

    @property
    def fits(self) -> bool:
        """Whether every phase does."""
        return all(plan.fits for plan in self.plans)

    @property
    def hours(self) -> float:
        """From the first phase's start to the last one's end."""
        return sum(plan.hours for plan in self.plans)

    @property
    def usd(self) -> float | None:
        """On demand; None where no price is known."""
        spent = [plan.cost.usd for plan in self.plans if plan.cost.usd is not None]
        return sum(spent) if len(spent) == len(self.plans) else None

    @property
    def device_hours(self) -> float:
        """Of all devices and phases."""
        return sum(plan.cost.device_hours for plan in self.plans)

    def limits(self) -> tuple[str, ...]:
        """What the phases together break of deadline and budget."""
        return over_limits(self.hours, self.usd, self.target.deadline_hours, self.target.budget_usd)

    @property
    def kept(self) -> bool:
        """Whether they fit and keep deadline and budget."""
        return self.fits and not self.limits()

    def row(self) -> dict[str, Any]:
        """A row of a comparison."""
        return {
            "device": self.device,
            "count": self.count,
            "fits": "yes" if self.fits else "no",
            "memory": gb(max(plan.peak_bytes for plan in self.plans)),
            "time": hours(self.hours),
            "device-h": f"{self.device_hours:,.3g}",
            "USD": "-" if self.usd is None else usd(self.usd).removeprefix("USD "),
            "note": "; ".join(self.limits()),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "device": self.device,
            "count": self.count,
            "fits": self.fits,
            "kept": self.kept,
            "hours": self.hours,
            "device_hours": self.device_hours,
            "usd": self.usd,
            "plans": [to_dict(plan) for plan in self.plans],
        }


def compared_phases(asked: Sequence[PlanRequest], target: Target, numbers: Sequence[int]) -> list[Together]:
    """All phases on each number of devices, as far as the batch of every phase goes round: on one card in
    their order, on all cards the cheapest first; what does not fit or keep the limits comes last.
    """
    on_all = target.several
    found = []
    for number in going_round(asked, numbers):
        one = replace(target, count=number)
        names = [card.name for card in _able_cards(asked[0], one)] if on_all else [target.gpu]
        found += [together(asked, replace(one, gpu=name)) for name in names]
    return sorted(found, key=_phases_order) if on_all else found


def together(asked: Sequence[PlanRequest], target: Target) -> Together:
    """All phases on one card and number of devices; deadline and budget are those of all."""
    return Together(tuple(plans(one, without_limits(target))[0] for one in asked), target)


def without_limits(target: Target) -> Target:
    """The same where time and money do not matter."""
    return replace(target, deadline_hours=None, budget_usd=None)


def _phases_order(one: Together) -> tuple[bool, bool, float]:
    spent = one.usd
    return (not one.kept, spent is None, one.device_hours if spent is None else spent)
