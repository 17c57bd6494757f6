"""Advice on a recipe of several phases: the best way through each, and what all of them take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darkroom.errors import InputError
from darkroom.plan.advise import Advice, Option, Search, search
from darkroom.plan.ask import Asked, Target
from darkroom.plan.money import over_limits
from darkroom.plan.phases import without_limits
from darkroom.plan.show import hours, price_lines, usd

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
        told = {name: self.way(name) for name in ("cheapest", "fastest")}
        return {
            "phases": [
                {"job": name, **one.to_dict()} for name, one in zip(self.names, self.phases, strict=True)
            ],
            "together": {name: {"hours": hours_of(way), "usd": usd_of(way)} for name, way in told.items()},
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


def device_hours_of(way: Way) -> float:
    """What ways are ranked by where some phase has no option with a price."""
    return sum(option.device_hours for option in way)


def advise_phases(
    asked: Sequence[Asked],
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
    cost = _dollars if priced else device_hours_of
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
