"""What a card can do with a model: every task, its largest batch and resolution, its time, its best settings.

Each task is tried with the settings that people reach for, from the quickest to those that take the least
memory; the first that fits is shown. Resolutions are tried from the model's own upwards as long as they fit,
and downwards where even that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from darkroom.errors import InputError
from darkroom.picture_settings import PictureSettings
from darkroom.plan.ask import ask_generate, ask_recipe_object, plans
from darkroom.plan.jobs import MOST_ROWS, Plan
from darkroom.plan.show import gb, hours, seconds, usd
from darkroom.plan.targets import PlanRequest, Target, chosen_cards, fast_precision, here
from darkroom.recipe.recipe import make_recipe

RESOLUTIONS = {"sd15": (256, 512, 768), "sd2": (256, 512, 768), "sdxl": (512, 768, 1024, 1536)}
OWN = {"sd15": 512, "sd2": 768, "sdxl": 1024}
SMALLER = (64, 128)  # of a model that is none of these
STEPS = 1000  # of training, to compare by
CHECKPOINTED = {"train.gradient_checkpointing": "true"}
EIGHT_BIT = {**CHECKPOINTED, "optim.name": "adamw8bit"}
FOUR_BITS = {**CHECKPOINTED, "model.base_precision": "nf4"}
TASKS: dict[str, tuple[Mapping[str, str], ...]] = {
    "lora": ({}, CHECKPOINTED, FOUR_BITS),
    "dreambooth-lora": ({}, CHECKPOINTED, FOUR_BITS),
    "textual-inversion": ({}, CHECKPOINTED, FOUR_BITS),
    "finetune": (CHECKPOINTED, EIGHT_BIT),
}

SOURCES = {
    "dreambooth-lora": {"instance": "pictures", "prompt": "a photo of sks dog"},
    "textual-inversion": {"folder": "pictures"},
}


@dataclass(frozen=True)
class Fit:
    """A task on the card: its plan at the largest batch, and the largest resolution; no plan where none
    fits.
    """

    task: str
    settings: Mapping[str, str]
    resolution: int
    plan: Plan
    largest_resolution: int | None

    @property
    def fits(self) -> bool:
        """Whether the task can be done at all."""
        return self.largest_resolution is not None

    def row(self) -> dict[str, Any]:
        """A line of the screen."""
        plan, largest = self.plan, self.plan.largest_micro_batch or 0
        if not self.fits:
            need = gb(plan.peak_bytes)
            return {"task": self.task, "fits": "no", "batch": "-", "up to": "-", "memory": need, "time": "-",
                    "settings": "takes more than the card has, even so"}  # fmt: skip
        settings = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return {
            "task": f"{self.task}, {self.resolution} px",
            "fits": "yes",
            "batch": f"{largest:,}{' or more' if largest >= MOST_ROWS else ''}",
            "up to": f"{self.largest_resolution} px",
            "memory": gb(plan.peak_bytes, plan.intervals.get("peak_bytes")),
            "time": _time(plan),
            "settings": settings or "as they are",
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        plan = self.plan
        return {
            "task": self.task,
            "fits": self.fits,
            "settings": dict(self.settings),
            "resolution": self.resolution,
            "largest_batch": plan.largest_micro_batch,
            "largest_resolution": self.largest_resolution,
            "peak_bytes": plan.peak_bytes,
            "step_s": plan.step_s["total"],
            "step_s_low": plan.intervals["step_s"][0],
            "step_s_high": plan.intervals["step_s"][1],
        }


def _time(plan: Plan) -> str:
    spread = plan.intervals.get
    if plan.job == "generate":
        return f"{seconds(plan.step_s['total'], spread('step_s'))} a picture"
    return f"{seconds(plan.step_s['total'], spread('step_s'))} a step, {STEPS} in {hours(plan.hours)}"


@dataclass(frozen=True)
class CardFits:
    """What a card can do with a model."""

    card: str
    model: str
    memory_bytes: float
    usable_bytes: float
    usd_per_hour: float | None
    found: tuple[Fit, ...]
    notes: tuple[str, ...] = ()

    def head(self) -> str:
        """The card in one line."""
        price = "no price known" if self.usd_per_hour is None else f"{usd(self.usd_per_hour)} an hour"
        held = f"{gb(self.memory_bytes)}, {gb(self.usable_bytes)} of it for tensors"
        return f"{self.card} with {self.model}: {held}; {price}"

    def foot(self) -> Iterator[str]:
        """What the columns mean, and what no data sheet confirms of the card."""
        yield "batch: the largest at once; time: of a picture of 30 steps, or of steps of one picture"
        yield from self.notes

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "card": self.card,
            "model": self.model,
            "memory_bytes": self.memory_bytes,
            "usable_memory_bytes": self.usable_bytes,
            "tasks": [fit.to_dict() for fit in self.found],
            "notes": list(self.notes),
        }


def what_fits(
    name: str, model: str, say: Callable[[str], None] = lambda _: None, *, on: Target | None = None
) -> CardFits:
    """Every task of a model on a card, at the prices and in the precision of `on`. InputError for a card that
    nobody knows, or several.
    """
    target = replace(on or Target(), gpu=name)
    (card, *more) = [here(target).card] if name == "here" else chosen_cards(name, "--fits")
    if more:
        raise InputError(f"--fits {name}", allowed="one card")
    half = fast_precision(card) if target.precision == "auto" else target.precision
    found = [_pictures(model, target, half)]
    for task, variants in TASKS.items():
        say(f"{task} ...")
        found.append(_training(task, model, target, half, variants))
    first = found[0].plan
    return CardFits(
        card.name,
        model,
        first.device_memory_bytes or 0.0,
        first.usable_memory_bytes or 0.0,
        first.cost.usd_per_device_hour,
        tuple(found),
        tuple(dict.fromkeys(note for note in first.notes if note.startswith("no data sheet"))),
    )


def _pictures(model: str, target: Target, half: str) -> Fit:
    """Making pictures in half precision."""

    def ask(resolution: int) -> PlanRequest:
        size = f"{resolution}x{resolution}"
        return ask_generate(PictureSettings(model=model, size=size, pictures=1))

    return _largest("generate", {"--precision": half}, model, ask, replace(target, precision=half))


def _training(task: str, model: str, target: Target, half: str, variants: Sequence[Mapping[str, str]]) -> Fit:
    """The first of a task's variants that fits at the model's own resolution; else the last."""
    found = None
    for settings in variants:

        def ask(resolution: int, settings: Mapping[str, str] = settings) -> PlanRequest:
            return _asked(task, model, resolution, settings)

        found = _largest(task, settings, model, ask, replace(target, precision=half))
        if found.fits and found.resolution == OWN.get(model, SMALLER[0]):
            return found
    assert found is not None
    return found


def _asked(task: str, model: str, resolution: int, settings: Mapping[str, str]) -> PlanRequest:
    """A recipe of a task with one picture a step, on stored latents where the task reads any."""
    content: dict[str, Any] = {
        "task": task,
        "model": {"base": model},
        "data": {"resolution": resolution, **SOURCES.get(task, {"store": "pictures.lance"})},
        "train": {"steps": STEPS, "global_batch": 1},
    }
    if task == "textual-inversion":
        content["model"]["word"] = {"token": "<new>", "initial": "a"}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return ask_recipe_object(make_recipe(content, overrides), name=task)


def _largest(
    task: str, settings: Mapping[str, str], model: str, ask: Callable[[int], PlanRequest], target: Target
) -> Fit:
    """The plan at the model's own resolution, and the largest at which one picture fits."""
    own = OWN.get(model, SMALLER[0])
    tried = RESOLUTIONS.get(model, SMALLER)
    (plan,) = plans(ask(own), target)
    if not plan.fits:
        for size in (size for size in reversed(tried) if size < own):
            (smaller,) = plans(ask(size), target)
            if smaller.fits:
                return Fit(task, settings, size, smaller, size)
        return Fit(task, settings, own, plan, None)
    largest = own
    for size in (size for size in tried if size > own):
        if not plans(ask(size), target)[0].fits:
            break
        largest = size
    return Fit(task, settings, own, plan, largest)
