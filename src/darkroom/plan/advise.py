"""The cheapest and the fastest way to do a job: a search over the settings, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from darkroom.errors import InputError
from darkroom.hardware.cards import cards
from darkroom.plan.ask import Asked, Target, ask_recipe, here, kept, place, plans, preparing_profile
from darkroom.plan.jobs import Plan, PrepareJob, Where, plan_preparing
from darkroom.plan.roofline import Software
from darkroom.plan.show import hours, to_dict, usd

ENCODER_CARD = "A10G"  # what encodes beside the training machines, as the published online system had it


@dataclass(frozen=True)
class Option:
    """One combination of settings on one kind and number of devices."""

    settings: dict[str, str]
    plan: Plan
    more_hours: float = 0.0  # encoding beforehand
    more_usd: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def usd(self) -> float:
        """All dollars; device-hours where no price is known."""
        base = self.plan.cost.usd if self.plan.cost.usd is not None else self.plan.cost.device_hours
        return base + self.more_usd

    @property
    def hours(self) -> float:
        """From the start of encoding to the last step."""
        return self.plan.hours + self.more_hours

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "settings": self.settings,
            "hours": self.hours,
            "usd": self.usd,
            "notes": list(self.notes),
            "plan": to_dict(self.plan),
        }


@dataclass(frozen=True)
class Advice:
    """The best of what was looked at."""

    cheapest: Option
    fastest: Option
    looked_at: int
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)
    break_even_epochs: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "cheapest": self.cheapest.to_dict(),
            "fastest": self.fastest.to_dict(),
            "looked_at": self.looked_at,
            "reasons": {name: list(found) for name, found in self.reasons.items()},
            "break_even_epochs": self.break_even_epochs,
        }

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        for name, option in (("cheapest", self.cheapest), ("fastest", self.fastest)):
            plan = option.plan
            yield f"{name}: {plan.count} x {plan.device}, {hours(option.hours)}, {usd(option.usd)}"
            yield "  " + " ".join(f"{key}={value}" for key, value in option.settings.items())
            for reason in (*self.reasons[name], *option.notes, *plan.notes):
                yield f"  - {reason}"
        if self.break_even_epochs is not None:
            yield f"encoding beforehand pays from {self.break_even_epochs:.2g} epochs on"
        yield f"{self.looked_at} combinations looked at"


def advise(
    asked: Asked,
    recipe: Path,
    overrides: Sequence[str],
    target: Target,
    numbers: Sequence[int],
    say: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Search checkpointing, sharding, encoding and the number of devices of a recipe; of another job the
    cards and numbers alone. InputError where nothing fits.
    """
    if not asked.settings:
        options = [
            Option({}, plan) for number in numbers for plan in plans(asked, replace(target, count=number))
        ]
    else:
        options = list(_training_options(asked, recipe, overrides, target, numbers, say))
    fitting = [option for option in options if kept(option.plan)]
    if not fitting:
        allowed = [option for option in options if option.plan.fits]
        why = "keeps the deadline and the budget" if allowed else "fits"
        raise InputError(
            f"of {len(options)} combinations none {why}", mend="try --gpu all or a larger --count"
        )
    cheapest = min(fitting, key=lambda option: (option.usd, option.hours))
    fastest = min(fitting, key=lambda option: (option.hours, option.usd))
    reasons = {
        "cheapest": tuple(_reasons(cheapest, fitting, "usd")),
        "fastest": tuple(_reasons(fastest, fitting, "hours")),
    }
    return Advice(cheapest, fastest, len(options), reasons, _break_even(cheapest, fitting, asked))


def _training_options(
    asked: Asked,
    recipe: Path,
    overrides: Sequence[str],
    target: Target,
    numbers: Sequence[int],
    say: Callable[[str], None],
) -> Iterator[Option]:
    said = {override.partition("=")[0] for override in overrides}
    fixed = asked.settings
    checkpointing = [fixed["checkpointing"]] if "train.gradient_checkpointing" in said else [False, True]
    modes = ("ddp", "fsdp") if target.mode == "auto" else (target.mode,)
    encodes = ["inline", "stored", "online"] if fixed["task"] == "pretrain" else [fixed["encode"]]
    for recompute in checkpointing:
        for encode in encodes:
            told = "stored" if encode == "online" else encode
            changes = [f"train.gradient_checkpointing={str(recompute).lower()}"]
            if fixed["task"] == "pretrain":
                changes.append(f"data.encode={told}")
            say(f"counting {' '.join(changes)}")
            variant = ask_recipe(recipe, [*overrides, *changes])
            for number in numbers:
                for mode in modes if number > 1 else modes[:1]:
                    if number > fixed["global_batch"]:
                        continue
                    for plan in plans(variant, replace(target, count=number, mode=mode)):
                        settings = {
                            "precision": plan.precision,
                            "checkpointing": str(recompute).lower(),
                            "encode": encode,
                            "mode": mode,
                            "micro_batch": str(plan.batch["micro"]),
                        }
                        yield _with_encoding(Option(settings, plan), asked, target)


def _with_encoding(option: Option, asked: Asked, target: Target) -> Option:
    """Add what encoding beforehand, or on other machines meanwhile, takes."""
    encode, settings = option.settings["encode"], asked.settings
    if encode not in ("stored", "online") or settings["task"] != "pretrain":
        return option
    samples, pictures = _samples(asked)
    if encode == "stored":
        beside = _encoding(asked, option.plan.device, pictures, target, option.plan.count)
        note = f"encoding {pictures:,} pictures first: {hours(beside.hours)}, {usd(beside.cost.usd or 0.0)}"
        return replace(option, more_hours=beside.hours, more_usd=beside.cost.usd or 0.0, notes=(note,))
    beside = _encoding(asked, ENCODER_CARD, samples, target, 1)
    number = max(1, -(-option.plan.images_per_s // beside.images_per_s))
    spent = (beside.cost.usd_per_device_hour or 0.0) * number * option.plan.hours
    note = f"{number:.0f} x {ENCODER_CARD} encode beside it: {usd(spent)}"
    return replace(option, more_usd=spent, notes=(note,))


def _encoding(asked: Asked, device: str, pictures: int, target: Target, count: int) -> Plan:
    settings = asked.settings
    own = target.gpu == "here" and device not in (ENCODER_CARD,)
    where: Where = here(target) if own else place(cards()[device], replace(target, count=count))
    precision = "bf16" if "bf16" in where.card.flops or where.card.kind == "gpu" else "float32"
    profile = preparing_profile(settings["vae"] or settings["base"], settings["resolution"], False, precision)
    price = None if device == ENCODER_CARD else target.usd_per_hour
    job = PrepareJob("prepare", pictures)
    return plan_preparing(profile, job, where, Software(precision=precision), usd_per_hour=price)


def _reasons(best: Option, options: Sequence[Option], by: str) -> Iterator[str]:
    """What each choice is worth: against the best with the other choice."""
    unit = usd if by == "usd" else hours
    value = getattr(best, by)
    for key, chosen in best.settings.items():
        if key == "micro_batch":
            yield f"micro_batch {chosen}: the largest that fits"
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


def _break_even(best: Option, options: Sequence[Option], asked: Asked) -> float | None:
    """Epochs from which encoding once is cheaper than at each step, on the cheapest plan's device."""
    if not asked.settings:
        return None
    samples, pictures = _samples(asked)
    alike = [o for o in options if (o.plan.device, o.plan.count) == (best.plan.device, best.plan.count)]
    cheapest = {
        encode: min(
            (o for o in alike if o.settings.get("encode") == encode), key=lambda o: o.usd, default=None
        )
        for encode in ("inline", "stored")
    }
    inline, stored = cheapest["inline"], cheapest["stored"]
    if inline is None or stored is None:
        return None
    saved = (inline.usd - (stored.usd - stored.more_usd)) / samples
    return stored.more_usd / pictures / saved if saved > 0 else None


def _samples(asked: Asked) -> tuple[int, int]:
    """Pictures trained on, and how many of them differ: all, where the store is not there yet."""
    samples = asked.settings["steps"] * asked.settings["global_batch"]
    return samples, min(asked.settings["rows"] or samples, samples)
