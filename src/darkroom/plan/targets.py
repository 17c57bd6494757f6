"""What a plan is for: cards and their number, precision, layout, and this machine's own rates."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import InputError
from darkroom.hardware.cards import Card, cards, find_card
from darkroom.hardware.prices import Price
from darkroom.plan.counts import Profile, cache_folder
from darkroom.plan.jobs import Plan, Where
from darkroom.plan.roofline import Software, efficiency
from darkroom.plan.scale import Cluster, default_cluster

if TYPE_CHECKING:
    from darkroom.hardware.machine import Machine

USUAL_GUIDANCE = 7.5


@dataclass(frozen=True)
class Target:
    """On what, how many, and what may be spent."""

    gpu: str = "here"  # here, all, or a card's name
    count: int = 1
    mode: str = "auto"  # the recipe's own, else ddp
    shard: str = "grads"  # of fsdp: the recipe's own
    node_devices: int | None = None  # on one machine; a recipe's own
    network: str | None = None
    stands_in: str | None = None  # a row of machines.csv; None: the card's usual one
    usd_per_hour: float | None = None
    prices: tuple[Price, ...] | None = None
    budget_usd: float | None = None
    deadline_hours: float | None = None
    usd_per_gb_month: float | None = None
    usd_per_gb_out: float | None = None
    precision: str = "auto"
    engine: str = "eager"
    machine: Machine | None = None  # which machine is 'here', where it is not this one


Layout = Callable[[str, Where], bool]
"""Whether tensors lie channels last, of a precision and a place."""


def layout_of(asked: bool | None) -> Layout:
    """As asked; where nothing is, in half precisions."""
    return lambda precision, where: precision != "float32" if asked is None else asked


@dataclass(frozen=True)
class Asked:
    """A job that can be planned on any device."""

    name: str
    profile: Callable[[str, bool], Profile]  # of a precision; whether a GPU computes it
    plan: Callable[[Profile, Where, Software, float | None, Sequence[Price] | None], Plan]
    precision: str = "auto"
    attention: str = "fused"
    channels_last: Layout = lambda precision, where: True
    settings: dict[str, Any] = field(default_factory=dict)
    remade: Callable[[Mapping[str, Any]], Asked] | None = None  # with other settings and the same counts


def mode_of(asked: Asked, target: Target) -> str:
    """How several devices train together: as asked, else as the recipe says."""
    return target.mode if target.mode != "auto" else str(asked.settings.get("mode", "ddp"))


def choose_precision(asked: Asked, target: Target, card: Card) -> str:
    """The precision to compute in: as asked, else what the hardware is fast in."""
    said = target.precision if target.precision != "auto" else asked.precision
    return fast_precision(card) if said == "auto" else said


def fast_precision(card: Card) -> str:
    """The precision that a device is fastest in and trains in unless told otherwise."""
    if "bf16" in card.flops:
        return "bf16"
    return "fp16" if card.kind == "gpu" and "fp16" in card.flops else "float32"


# ---- devices


def chosen_cards(name: str) -> list[Card]:
    """The cards of a name; 'all' is every GPU. InputError names the nearest for an unknown one."""
    if name == "all":
        return [card for card in cards().values() if card.kind == "gpu"]
    card = find_card(name)
    if card is None:
        near = nearest(name)
        mend = f"did you mean {', '.join(near)}?" if near else ""
        raise InputError(f"--gpu {name}", allowed="here, all, or a card of hardware.csv", mend=mend)
    return [card]


def nearest(name: str) -> list[str]:
    """Up to three cards that are called nearly so: those whose name is in it first, then the most alike."""
    wanted = name.lower()
    names = {text.lower(): text for card in cards().values() for text in (card.name, *card.aliases)}
    inside = sorted((text for text in names if text in wanted), key=len, reverse=True)
    alike = [one for text in (wanted, f"rtx {wanted}") for one in difflib.get_close_matches(text, names, 3)]
    return list(dict.fromkeys(names[text] for text in [*inside, *alike]))[:3]


def place(card: Card, target: Target) -> Where:
    """A card as it usually stands; a CPU class stands for eight of its cores."""
    return Where(card, _cluster(card, target), cores=8 if card.unit == "core" else 1)


def _cluster(card: Card, target: Target) -> Cluster:
    return default_cluster(
        card,
        target.count,
        target.mode,
        target.network,
        machine=target.stands_in,
        node_devices=target.node_devices,
        shard=target.shard,
    )


def here(target: Target) -> Where:
    """This machine, with what `plan --calibrate` measured of it; or the target's."""
    from darkroom.hardware.machine import machine

    found = target.machine or machine()
    if found.devices:
        name = found.devices[0].name
        card, memory = find_card(name), float(found.devices[0].memory_bytes)
        if card is None:
            raise InputError(f"this machine's {name} is not in hardware.csv", mend="say --gpu NAME")
    else:
        name = found.cpu
        card, memory = cards()[found.cpu_class], float(found.memory_bytes)
    known = efficiency().with_values(calibration(card.name) if target.machine is None else {})
    # Processes on one CPU share its cores and its memory.
    sharers = 1 if found.devices else min(target.count, target.node_devices or 1)
    cores = max(1, round(found.cores / sharers))
    return Where(card, _cluster(card, target), cores, known, memory / sharers)


@dataclass(frozen=True)
class Measured:
    """One measurement: its rate, what share of the rated peak that is, and the constant it replaces."""

    name: str
    rate: float
    unit: str
    share: float | None = None  # of the rated peak, where there is one
    constant: tuple[str, str, float] | None = None  # name, what it applies to, value


def calibration_file() -> Path:
    """Where the measurements of this machine are kept."""
    return cache_folder() / "calibration.json"


def calibration(card: str) -> dict[tuple[str, str], float]:
    """Constants measured on this machine for a card, to replace the fitted ones; empty if none were."""
    with suppress(OSError, ValueError, TypeError):
        content = json.loads(calibration_file().read_text(encoding="utf-8"))
        return {(name, applies_to): float(value) for name, applies_to, value in content.get(card, [])}
    return {}
