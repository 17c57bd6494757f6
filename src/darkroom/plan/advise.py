"""The cheapest and the fastest way to do a job: a search over the settings, with reasons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from darkroom.bill import format_number
from darkroom.errors import InputError
from darkroom.hardware.prices import over_limits
from darkroom.plan.ask import USUAL_PRECISION, ask_recipe, going_round, plans, without_limits
from darkroom.plan.jobs import Plan, PrepareJob, Where, plan_preparing
from darkroom.plan.roofline import Software
from darkroom.plan.show import hours, price_lines, to_dict, usd
from darkroom.plan.targets import PlanRequest, Target, chosen_cards, here, place, preparing_profile

ENCODER_CARD = "A10G"  # what encodes next to the training machines, as the published online system had it


@dataclass(frozen=True)
class Option:
    """One combination of settings on one kind and number of devices."""

    settings: dict[str, str]
    plan: Plan
    more_hours: float = 0.0  # encoding beforehand
    more_usd: float | None = 0.0  # None: no price is known of what encodes
    more_device_hours: float = 0.0
    encoding: Plan | None = None
    asked: PlanRequest | None = None  # what was planned, to plan it again with another micro-batch
    target: Target | None = None
    notes: tuple[str, ...] = ()

    @property
    def usd(self) -> float | None:
        """All dollars; None where a price is not known."""
        if self.plan.cost.usd is None or self.more_usd is None:
            return None
        return self.plan.cost.usd + self.more_usd

    @property
    def device_hours(self) -> float:
        """Of the training devices, and of those that encode beforehand or meanwhile."""
        return self.plan.cost.device_hours + self.more_device_hours

    @property
    def price(self) -> float:
        """What options are ranked by: dollars, and device-hours where none has a price (see `ranked`)."""
        return self.device_hours if self.usd is None else self.usd

    @property
    def hours(self) -> float:
        """From the start of encoding to the last step."""
        return self.plan.hours + self.more_hours

    def around(self, value: float) -> tuple[float, float] | None:
        """The 80 % interval of its time or money: as wide as the plan's own."""
        found = self.plan.intervals.get("hours")
        if found is None or not self.plan.hours:
            return None
        low, high = (one / self.plan.hours for one in found)
        return value * low, value * high

    def kept(self, target: Target) -> bool:
        """Whether it fits and keeps deadline and budget, encoding included; no price keeps no budget."""
        limits = over_limits(self.hours, self.usd, target.deadline_hours, target.budget_usd)
        return self.plan.fits and not limits

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "settings": self.settings,
            "hours": self.hours,
            "usd": self.usd,
            "device_hours": self.device_hours,
            "notes": list(self.notes),
            "plan": to_dict(self.plan),
        }


@dataclass(frozen=True)
class Advice:
    """The best of what was looked at. Where some options have a price they alone are ranked; the quickest of
    each card without one are `unpriced`.
    """

    cheapest: Option
    fastest: Option
    looked_at: int
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)
    break_even_epochs: float | None = None
    unpriced: tuple[Option, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "cheapest": self.cheapest.to_dict(),
            "fastest": self.fastest.to_dict(),
            "looked_at": self.looked_at,
            "reasons": {name: list(found) for name, found in self.reasons.items()},
            "break_even_epochs": self.break_even_epochs,
            "unpriced": [one.to_dict() for one in self.unpriced],
        }

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        yield from self.found()
        yield from price_lines(self.priced())

    def priced(self) -> list[Plan]:
        """The plans whose prices count."""
        chosen = (self.cheapest, self.fastest)
        return [one.plan for one in chosen] + [one.encoding for one in chosen if one.encoding]

    def found(self) -> Iterator[str]:
        """What was found, without the dates of its prices."""
        for name, option in (("cheapest", self.cheapest), ("fastest", self.fastest)):
            plan = option.plan
            took = hours(option.hours, option.around(option.hours))
            yield f"{name}: {plan.count} x {plan.device}, {took}, {_price_of(option)}"
            yield "  " + " ".join(f"{key}={value}" for key, value in option.settings.items())
            for reason in (*self.reasons[name], *option.notes, *plan.notes):
                yield f"  - {reason}"
        if self.break_even_epochs is not None:
            yield f"encoding beforehand pays from {format_number(self.break_even_epochs, 2)} epochs on"
        if self.unpriced:
            ways = [f"{o.plan.count} x {o.plan.device} {hours(o.hours)}" for o in self.unpriced]
            yield f"no price known, so not ranked (say --price): {', '.join(ways)}"
        yield f"{self.looked_at} combinations looked at"


def _price_of(option: Option) -> str:
    """'USD 12.30', or the device-hours where no price is known."""
    if option.usd is None:
        return f"{option.device_hours:,.3g} device-hours, no price known (say --price)"
    return usd(option.usd, option.around(option.usd))


def advise(
    asked: PlanRequest,
    recipe: Path,
    overrides: Sequence[str],
    target: Target,
    numbers: Sequence[int],
    say: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Search precision, checkpointing, sharding, encoding, micro-batch and the number of devices of a recipe,
    each where the recipe leaves it open; of another job the cards and numbers alone. InputError where nothing
    fits.
    """
    searched = search(asked, recipe, overrides, target, numbers, say)
    ranked = searched.ranked
    return searched.advice(_cheapest(ranked), _fastest(ranked))


@dataclass(frozen=True)
class Search:
    """A job's combinations: those that fit and keep the limits, and how many there were."""

    asked: PlanRequest
    fitting: Sequence[Option]
    looked_at: int

    @property
    def ranked(self) -> Sequence[Option]:
        """Those that have a price; where none has, all, which device-hours rank."""
        return [option for option in self.fitting if option.usd is not None] or self.fitting

    @property
    def unpriced(self) -> tuple[Option, ...]:
        """The quickest of each card without a price, where others have one."""
        left = [option for option in self.fitting if option.usd is None]
        if len(left) == len(self.fitting):
            return ()
        names = dict.fromkeys(option.plan.device for option in left)
        best = [_fastest([option for option in left if option.plan.device == name]) for name in names]
        return tuple(sorted(best, key=lambda option: option.plan.device))

    def advice(
        self, cheapest: Option, fastest: Option, among: Mapping[str, Sequence[Option]] | None = None
    ) -> Advice:
        """Two of them, with what speaks for each against those `among` which it was chosen: all if unsaid."""
        among = among or {"cheapest": self.ranked, "fastest": self.ranked}
        reasons = {
            "cheapest": tuple(_reasons(cheapest, among["cheapest"], "price")),
            "fastest": tuple(_reasons(fastest, among["fastest"], "hours")),
        }
        pays = _break_even(cheapest, self.ranked, self.asked)
        return Advice(cheapest, fastest, self.looked_at, reasons, pays, self.unpriced)


def search(
    asked: PlanRequest,
    recipe: Path,
    overrides: Sequence[str],
    target: Target,
    numbers: Sequence[int],
    say: Callable[[str], None],
    phase: int | None = None,
) -> Search:
    """All combinations of a job, or of a phase of a recipe; InputError where none fits."""
    if not asked.settings:
        options = [
            Option({}, plan) for number in numbers for plan in plans(asked, replace(target, count=number))
        ]
    else:
        rest = (recipe, overrides)
        options = list(_training_options(asked, *rest, target, numbers, say, phase))
        if _leaves_precision(asked, target) and not any(option.kept(target) for option in options):
            other = replace(target, precision="float32")
            options += _training_options(asked, *rest, other, numbers, say, phase)
    fitting = [option for option in options if option.kept(target)]
    if not fitting:
        allowed = [option for option in options if option.plan.fits]
        why = "keeps the deadline and the budget" if allowed else "fits"
        unknown = allowed and all(option.usd is None for option in allowed)
        raise InputError(
            f"{asked.name}: of {len(options)} combinations none {why}",
            mend="no price is known: say --price" if unknown else "try --gpu all or a larger --count",
        )
    ranked = Search(asked, fitting, 0).ranked
    for best in {id(one): one for one in (_cheapest(ranked), _fastest(ranked))}.values():
        more = [*_smaller_batches(best), *_in_float32(best, asked, target)]
        options += more
        fitting += [option for option in more if option.kept(target)]
    return Search(asked, fitting, len(options))


def _cheapest(options: Sequence[Option]) -> Option:
    return min(options, key=lambda option: (option.price, option.hours))


def _fastest(options: Sequence[Option]) -> Option:
    return min(options, key=lambda option: (option.hours, option.price))


def _smaller_batches(best: Option) -> Iterator[Option]:
    """The same with smaller micro-batches than the largest that fits, where the recipe leaves that open."""
    asked, target = best.asked, best.target
    if asked is None or asked.remade is None or target is None or asked.settings["micro_batch"] is not None:
        return
    if target.gpu != "here":
        target = replace(target, gpu=best.plan.device)
    micro = best.plan.batch["micro"] // 2
    while micro:
        (plan,) = plans(asked.remade({"micro_batch": micro}), target)
        settings = {**best.settings, "micro_batch": str(plan.batch["micro"])}
        smaller = replace(best, settings=settings, plan=plan)
        # Encoders next to the training run as long as it does, and as many as keep up with it.
        yield _with_encoding(smaller, asked, target) if best.settings["encode"] == "online" else smaller
        micro //= 2


def _leaves_precision(asked: PlanRequest, target: Target) -> bool:
    return asked.settings["precision"] == "auto" and target.precision == "auto"


def _in_float32(best: Option, asked: PlanRequest, target: Target) -> Iterator[Option]:
    """The same in float32, on all cards asked for, where recipe and user leave the precision open."""
    if best.asked is None or best.target is None or best.plan.precision == "float32":
        return
    if _leaves_precision(asked, target):
        where = replace(best.target, precision="float32")
        for plan in plans(best.asked, where):
            settings = {
                **best.settings,
                "precision": plan.precision,
                "micro_batch": str(plan.batch["micro"]),
            }
            yield _with_encoding(Option(settings, plan, asked=best.asked, target=where), asked, target)


def _training_options(
    asked: PlanRequest,
    recipe: Path,
    overrides: Sequence[str],
    target: Target,
    numbers: Sequence[int],
    say: Callable[[str], None],
    phase: int | None = None,
) -> Iterator[Option]:
    names_given = {override.partition("=")[0] for override in overrides}
    fixed = asked.settings
    checkpointing = (
        [fixed["checkpointing"]] if "train.gradient_checkpointing" in names_given else [False, True]
    )
    modes = ("ddp", "fsdp") if target.mode == "auto" else (target.mode,)
    encodes = ["inline", "stored", "online"] if fixed["task"] == "pretrain" else [fixed["encode"]]
    for recompute in checkpointing:
        for encode in encodes:
            stored_or_online = "stored" if encode == "online" else encode
            changes = [f"train.gradient_checkpointing={str(recompute).lower()}"]
            if fixed["task"] == "pretrain":
                changes.append(f"data.encode={stored_or_online}")
            say(f"counting {' '.join(changes)}")
            variant = ask_recipe(recipe, [*overrides, *changes], phase=phase)
            for number, mode in itertools.product(going_round([asked], numbers), modes):
                if number > 1 or mode == modes[0]:
                    where = replace(target, count=number, mode=mode)
                    for plan in plans(variant, where):
                        settings = {
                            "precision": plan.precision,
                            "checkpointing": str(recompute).lower(),
                            "encode": encode,
                            "mode": mode,
                            "micro_batch": str(plan.batch["micro"]),
                        }
                        option = Option(settings, plan, asked=variant, target=where)
                        yield _with_encoding(option, asked, target)


def _with_encoding(option: Option, asked: PlanRequest, target: Target) -> Option:
    """Add what encoding beforehand, or on other machines meanwhile, takes."""
    encode, settings = option.settings["encode"], asked.settings
    if encode not in ("stored", "online") or settings["task"] != "pretrain":
        return option
    samples, pictures = _samples(asked)
    if encode == "stored":
        encoding = _encoding(asked, option.plan.device, pictures, target, option.plan.count, own=True)
        note = f"encoding {pictures:,} pictures first: {hours(encoding.hours)}, {_money(encoding.cost.usd)}"
        return replace(
            option,
            more_hours=encoding.hours,
            more_usd=encoding.cost.usd,
            more_device_hours=encoding.cost.device_hours,
            encoding=encoding,
            notes=(note,),
        )
    encoding = _encoding(asked, ENCODER_CARD, samples, target, 1)
    number = max(1, -(-option.plan.images_per_s // encoding.images_per_s))
    each, taken = encoding.cost.usd_per_device_hour, number * option.plan.hours
    spent = None if each is None else each * taken
    note = f"{number:.0f} x {ENCODER_CARD} encode meanwhile: {_money(spent)}"
    return replace(option, more_usd=spent, more_device_hours=taken, encoding=encoding, notes=(note,))


def _money(spent: float | None) -> str:
    return "no price known" if spent is None else usd(spent)


def _encoding(
    asked: PlanRequest, device: str, pictures: int, target: Target, count: int, *, own: bool = False
) -> Plan:
    """Encoding so many pictures: on the training's `own` machines, or on others of their own price."""
    settings = asked.settings
    where: Where = (
        here(target)
        if own and target.gpu == "here"
        else place(chosen_cards(device)[0], replace(target, count=count))
    )
    profile = preparing_profile(
        settings["base"], settings["resolution"], settings["stores_text"], USUAL_PRECISION, settings["vae"]
    )
    price = target.usd_per_hour if own else None  # said of the card that trains
    job = PrepareJob("prepare", pictures)
    software = Software(precision=USUAL_PRECISION, channels_last=False)
    return plan_preparing(profile, job, where, software, usd_per_hour=price, prices=target.prices)


def _reasons(best: Option, options: Sequence[Option], by: str) -> Iterator[str]:
    """What each choice is worth: against the best with the other choice."""
    unit, value = _unit(best, by), getattr(best, by)
    options = [option for option in options if (option.usd is None) == (best.usd is None)]
    for key, chosen in best.settings.items():
        if key == "micro_batch":
            yield _micro_reason(best, options, by)
            continue
        others = [o for o in options if o.settings.get(key) != chosen]
        if others:
            next_best = min(others, key=lambda option: getattr(option, by))
            yield (
                f"{key} {chosen}: {unit(value)} against {unit(getattr(next_best, by))} "
                f"with {next_best.settings[key]}"
            )
    others = [option for option in options if option.plan.device != best.plan.device]
    if others:
        second = min(others, key=lambda option: getattr(option, by))
        yield f"{best.plan.device}: next comes {second.plan.device} with {unit(getattr(second, by))}"


def _unit(best: Option, by: str) -> Callable[[float], str]:
    if by == "hours":
        return hours
    return usd if best.usd is not None else lambda number: f"{number:,.3g} device-hours"


def _micro_reason(best: Option, options: Sequence[Option], by: str) -> str:
    chosen = best.settings["micro_batch"]
    if best.asked is None or best.asked.settings["micro_batch"] is not None:
        return f"micro_batch {chosen}: as the recipe says"
    others = [
        option
        for option in options
        if option.settings == {**best.settings, "micro_batch": option.settings["micro_batch"]}
        and (option.plan.device, option.plan.count) == (best.plan.device, best.plan.count)
        and option.settings["micro_batch"] != chosen
    ]
    if not others:
        return f"micro_batch {chosen}: the only one that fits"
    unit, next_best = _unit(best, by), min(others, key=lambda option: getattr(option, by))
    value, other = unit(getattr(best, by)), unit(getattr(next_best, by))
    return f"micro_batch {chosen}: {value} against {other} with {next_best.settings['micro_batch']}"


def _break_even(best: Option, options: Sequence[Option], asked: PlanRequest) -> float | None:
    """Epochs from which encoding once is cheaper than at each step, on the cheapest plan's device."""
    if not asked.settings:
        return None
    samples, pictures = _samples(asked)
    alike = [o for o in options if (o.plan.device, o.plan.count) == (best.plan.device, best.plan.count)]
    cheapest = {
        encode: min(
            (o for o in alike if o.settings.get("encode") == encode and o.usd is not None),
            key=lambda o: o.price,
            default=None,
        )
        for encode in ("inline", "stored")
    }
    inline, stored = cheapest["inline"], cheapest["stored"]
    if inline is None or stored is None or stored.more_usd is None:
        return None
    saved = (inline.price - (stored.price - stored.more_usd)) / samples
    return stored.more_usd / pictures / saved if saved > 0 else None


def _samples(asked: PlanRequest) -> tuple[int, int]:
    """Pictures trained on, and how many of them differ: all, where the store is not there yet."""
    samples = asked.settings["steps"] * asked.settings["global_batch"]
    return samples, min(asked.settings["rows"] or samples, samples)


Way = tuple[Option, ...]  # one of each phase


@dataclass(frozen=True)
class PhasesAdvice:
    """Each phase's advice: together they are the cheapest and the fastest within the limits."""

    names: tuple[str, ...]
    phases: tuple[Advice, ...]

    def way(self, name: str) -> Way:
        """The options of 'cheapest' or 'fastest'."""
        return tuple(getattr(one, name) for one in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        ways = {name: self.way(name) for name in ("cheapest", "fastest")}
        return {
            "phases": [
                {"job": name, **one.to_dict()} for name, one in zip(self.names, self.phases, strict=True)
            ],
            "together": {name: {"hours": hours_of(way), "usd": usd_of(way)} for name, way in ways.items()},
        }

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        for name, one in zip(self.names, self.phases, strict=True):
            yield name
            yield from (f"  {line}" for line in one.found())
        for name in ("cheapest", "fastest"):
            way = self.way(name)
            spent = usd_of(way)
            money = "no price known (say --price)" if spent is None else usd(spent)
            yield f"together, the {name}: {hours(hours_of(way))}, {money}"
        if len({_settings(way) for way in self.way("cheapest")}) > 1:
            yield "phases with settings of their own are runs of their own, each from the model before it"
        yield from price_lines([plan for one in self.phases for plan in one.priced()])


def hours_of(way: Way) -> float:
    """One phase after the other."""
    return sum(option.hours for option in way)


def usd_of(way: Way) -> float | None:
    """All dollars; None where a price is not known."""
    spent = [option.usd for option in way if option.usd is not None]
    return sum(spent) if len(spent) == len(way) else None


def _device_hours_of(way: Way) -> float:
    """What ways are ranked by where some phase has no option with a price."""
    return sum(option.device_hours for option in way)


def advise_phases(
    asked: Sequence[PlanRequest],
    recipe: Path,
    overrides: Sequence[str],
    target: Target,
    numbers: Sequence[int],
    say: Callable[[str], None] = lambda _: None,
) -> PhasesAdvice:
    """Search each phase as `advise` does; deadline and budget are those of all phases. InputError where
    nothing fits or keeps them.
    """
    free, searched = without_limits(target), list[Search]()
    for i, one in enumerate(asked):
        say(one.name)
        searched.append(search(one, recipe, overrides, free, numbers, say, phase=i))
    priced = all(one.ranked[0].usd is not None for one in searched)
    cost = _dollars if priced else _device_hours_of
    ways: list[Way] = [()]
    for found in searched:
        options = _front([(option,) for option in (found.ranked if priced else found.fitting)], cost)
        ways = _front([(*way, *option) for way in ways for option in options], cost)
    kept = [way for way in ways if _keeps(way, target)]
    if not kept:
        number = sum(one.looked_at for one in searched)
        raise InputError(
            f"of {number} combinations none keeps the deadline and the budget of all phases",
            mend="try --gpu all or a larger --count",
        )
    cheapest = min(kept, key=lambda way: (cost(way), hours_of(way)))
    fastest = min(kept, key=lambda way: (hours_of(way), cost(way)))
    chosen = {"cheapest": cheapest, "fastest": fastest}
    advised = [
        one.advice(
            cheapest[i],
            fastest[i],
            {name: _others(one, way, i, target) for name, way in chosen.items()},
        )
        for i, one in enumerate(searched)
    ]
    return PhasesAdvice(tuple(one.name for one in asked), tuple(advised))


def _others(searched: Search, way: Way, i: int, target: Target) -> list[Option]:
    """What phase i could do instead, within the limits, while the others go the same way."""
    options = searched.fitting if usd_of(way) is None else searched.ranked
    return [option for option in options if _keeps((*way[:i], option, *way[i + 1 :]), target)]


def _dollars(way: Way) -> float:
    spent = usd_of(way)
    assert spent is not None  # only ways whose options all have a price are ranked by it
    return spent


def _front(ways: Sequence[Way], cost: Callable[[Way], float]) -> list[Way]:
    """Those that no other one beats in both time and money."""
    kept: list[Way] = []
    for way in sorted(ways, key=lambda one: (hours_of(one), cost(one))):
        if not kept or cost(way) < cost(kept[-1]):
            kept.append(way)
    return kept


def _keeps(way: Way, target: Target) -> bool:
    return not over_limits(hours_of(way), usd_of(way), target.deadline_hours, target.budget_usd)


def _settings(option: Option) -> tuple[Any, ...]:
    """What one run of all phases has in common."""
    shared = {key: value for key, value in option.settings.items() if key != "micro_batch"}
    return (option.plan.device, option.plan.count, *sorted(shared.items()))
