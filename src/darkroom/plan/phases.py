"""A recipe of several phases, on every card and on more and more devices: what they take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from darkroom.plan.ask import able_cards, going_round, plans
from darkroom.plan.cost import over_limits
from darkroom.plan.jobs import Plan
from darkroom.plan.show import gb, hours, to_dict, usd
from darkroom.plan.targets import PlanRequest, Target


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


def compared(asked: Sequence[PlanRequest], target: Target, numbers: Sequence[int]) -> list[Together]:
    """All phases on each number of devices, as far as the batch of every phase goes round: on one card in
    their order, on all cards the cheapest first; what does not fit or keep the limits comes last.
    """
    on_all = target.several
    found = []
    for number in going_round(asked, numbers):
        one = replace(target, count=number)
        names = [card.name for card in able_cards(asked[0], one)] if on_all else [target.gpu]
        found += [together(asked, replace(one, gpu=name)) for name in names]
    return sorted(found, key=_order) if on_all else found


def together(asked: Sequence[PlanRequest], target: Target) -> Together:
    """All phases on one card and number of devices; deadline and budget are those of all."""
    return Together(tuple(plans(one, without_limits(target))[0] for one in asked), target)


def without_limits(target: Target) -> Target:
    """The same where time and money do not matter."""
    return replace(target, deadline_hours=None, budget_usd=None)


def _order(one: Together) -> tuple[bool, bool, float]:
    spent = one.usd
    return (not one.kept, spent is None, one.device_hours if spent is None else spent)
