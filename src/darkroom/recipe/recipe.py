"""The recipe: its sections, what follows from them together, and what they may not say together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from darkroom.errors import RecipeError
from darkroom.recipe import rules
from darkroom.recipe.fine_tuning import check_adapter, check_frozen_base, check_preference, check_subject
from darkroom.recipe.sections import (
    ADAPTER_TASKS,
    VAE_TASKS,
    AdapterSettings,
    BudgetSettings,
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimSettings,
    ParallelSettings,
    PhaseSettings,
    SamplePrompt,
    SampleSettings,
    Task,
    TrackSettings,
    TrainSettings,
)

RENAMED = {
    "data.ahead": "data.prefetch_batches",
    "optim.decay": "optim.lr_schedule",
    "train.on_nan": "train.nonfinite_policy",
}
"""Keys that had another name until this release."""


def with_new_names(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A recipe's content with keys by the names they have now, and a line for each that had its old one."""
    made, notes = dict(content), []
    for old, new in RENAMED.items():
        (section, name), now = old.split("."), new.split(".")[1]
        inner = made.get(section)
        if isinstance(inner, dict) and name in inner and now not in inner:
            made[section] = {now if key == name else key: value for key, value in inner.items()}
            notes.append(f"{old} is now {new}; the old name goes with the next release")
    return made, notes


class Recipe(BaseModel):
    """A training job, whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Task = Field(description="what is trained, and on what kind of pictures")
    model: ModelSettings
    data: DataSettings
    adapter: AdapterSettings | None = None
    objective: ObjectiveSettings = ObjectiveSettings()
    optim: OptimSettings = OptimSettings()
    train: TrainSettings = TrainSettings()
    parallel: ParallelSettings = ParallelSettings()
    phases: tuple[PhaseSettings, ...] = Field(
        default=(), description="runs one after the other, each from the weights of the one before"
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    sample: SampleSettings = SampleSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    track: TrackSettings = TrackSettings()
    budget: BudgetSettings = BudgetSettings()
    _derived: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _take_old_names(cls, content: Any) -> Any:
        """Runs and checkpoints of earlier releases hold recipes with the names of then."""
        return with_new_names(content)[0] if isinstance(content, dict) else content

    @property
    def adapts(self) -> bool:
        """Whether low-rank additions are trained instead of the model's own weights."""
        return self.task in ADAPTER_TASKS or (self.task == "distill" and self.adapter is not None)

    @property
    def frees_in_forward(self) -> bool:
        """Whether the forward pass frees blocks among those that live on until the backward pass: frozen
        layers and checkpointed blocks let their inputs go as soon as they have run.
        """
        return self.train.gradient_checkpointing or self.adapts or self.model.word is not None

    @property
    def trains_text(self) -> bool:
        """Whether anything of the text encoders is trained: weights, an adapter, or a new word."""
        adapted = self.adapter is not None and self.adapter.text_encoder
        return self.model.train_text_encoder or adapted or self.model.word is not None

    @property
    def frozen_text(self) -> bool:
        """Whether an adapter is trained that leaves the text encoders as they are."""
        return self.adapts and not self.trains_text

    @property
    def frozen_unet(self) -> bool:
        """Whether the U-Net's own weights stay as they are."""
        return self.adapts or self.task == "textual-inversion"

    @property
    def prompts(self) -> tuple[str, ...]:
        """The captions of pictures that the recipe itself gives."""
        word = self.model.word
        return self.data.prompts or (() if word is None else word.prompts)

    @property
    def sample_prompts(self) -> tuple[str | SamplePrompt, ...] | None:
        """What samples are drawn of, as far as the recipe alone gives it; None: of pictures' captions."""
        settings, prompts = self.sample, self.prompts
        if self.task == "extractor":
            return ()
        if settings.prompts or not settings.every or self.task in VAE_TASKS:
            return settings.prompts
        if not prompts:
            return None
        scenes = (scene.format(prompts[0]) for scene in SCENES)
        return (prompts[0], *scenes, *filter(None, [self.data.class_prompt]))

    @property
    def trigger(self) -> str | None:
        """The words that call a trained adapter up."""
        own = None if self.adapter is None else self.adapter.trigger
        return own or next(iter(self.data.prompts), None)

    @property
    def derived(self) -> tuple[str, ...]:
        """What the task decided because the recipe did not say it, with the reason."""
        return self._derived

    def check_together(self) -> None:
        """RecipeError for parts that contradict the task or each other, before anything is opened."""
        task, model, data, adapter = self.task, self.model, self.data, self.adapter
        objective, optim, train = self.objective, self.optim, self.train
        rules.check_sources(task, data)
        rules.check_mixture(task, data)
        rules.check_sets(task, data, train)
        rules.check_folder(task, data)
        check_adapter(task, adapter, model, data, self.parallel, optim)
        check_subject(task, model, data)
        check_frozen_base(task, model, adapter, train, frozen=self.frozen_unet)
        check_preference(task, data, adapter, objective)
        rules.check_text(task, data, model, adapter)
        rules.check_masks(data, objective)
        rules.check_optimiser(optim, train)
        rules.check_rates(task, optim, self.phases)
        rules.check_parallel(task, self.parallel, optim, train)
        rules.check_online(task, data)
        rules.check_extras(task, train, data, phases=bool(self.phases))
        rules.check_distill(task, objective, model, adapter)
        rules.check_patience(self.evaluate, data)

    def check(self, processes: int | None = None) -> None:
        """RecipeError for what cannot be trained, whatever the store and the model.

        With a number of `processes` also where they cannot share a batch.
        """
        task, data, train = self.task, self.data, self.train
        self.check_together()
        rules.check_micro_batch(train)
        rules.check_scored(task, self.evaluate, data)
        if not self.phases:  # each phase has a length of its own, and is checked as a recipe of its own
            rules.check_length(train, self.optim)
        if task in VAE_TASKS:
            rules.check_vae_task(task, self.model, data, train)
        elif task == "extractor":
            rules.check_extractor(train, data, self.model, self.objective.extractor)
        else:
            rules.check_stored(data)
        if processes is not None:
            rules.check_batch(train, processes)

    def dump(self) -> str:
        """The resolved recipe as YAML, every value said; reading it back gives the same recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def in_phases(self, out: Path) -> Iterator[tuple[Path, Recipe]]:
        """Each phase as a recipe of its own, and its run's folder. RecipeError where one is impossible."""
        before: Path | None = None
        for i, phase in enumerate(self.phases):
            folder = out / f"phase-{i + 1}-{phase.resolution}px"
            content: dict[str, Any] = self.model_dump(mode="json") | {"phases": []}
            _set_phase(content, i, phase)
            if before is not None:
                _set_base(content, before / "model")
            one = Recipe.model_validate(content)
            yield folder, one.model_copy(update={"checkpoint": _apart(one.checkpoint, folder.name)})
            before = folder

    def in_sweep(self, name: str, left: BudgetSettings, class_images: Path | None) -> Recipe:
        """One run of a sweep: with what is left of the budget, and its own place for checkpoints.

        `class_images` is the folder of class pictures that it shares with others, if it does.
        """
        content: dict[str, Any] = self.model_dump(mode="json") | {"budget": left.model_dump()}
        if class_images is not None:
            content["data"]["class_images"] = str(class_images)
        one = Recipe.model_validate(content)
        return one.model_copy(update={"checkpoint": _apart(one.checkpoint, name)})


SCENES = ("{} in the snow", "{} on the beach")
"""Of which samples are drawn besides a subject's own prompt."""


def _set_phase(content: dict[str, Any], i: int, phase: PhaseSettings) -> None:
    """Put a phase's settings into a recipe's content, in place of what it says for all of them."""
    train = content["train"]
    batch = phase.global_batch or train["global_batch"]
    content["data"]["resolution"] = phase.resolution
    train |= {"global_batch": batch, "steps": -(-phase.samples // batch)}
    for key, value in (("lr", phase.lr), ("warmup_steps", phase.warmup_steps)):
        if value is not None:
            content["optim"][key] = value
    if phase.ema_from is not None:
        if phase.ema_from >= phase.samples:
            raise RecipeError(
                f"phases.{i}.ema_from", f"{phase.ema_from} of {phase.samples} pictures", allowed="fewer"
            )
        train["ema"]["start_step"] = phase.ema_from // batch
    if phase.keep is not None:
        train["routing"] = {**train["routing"], "keep": phase.keep} if phase.keep < 1 else {}
    if phase.align is not None:
        train["align"] = {**train["align"], "weight": phase.align} if phase.align else {}


def _set_base(content: dict[str, Any], base: Path) -> None:
    """Have a recipe's content go on from a model, of which it keeps what is trained."""
    trains_text = content["model"]["train_text_encoder"]
    content["model"] = {"base": str(base), "train_text_encoder": trains_text}


def _apart(settings: CheckpointSettings, name: str) -> CheckpointSettings:
    """Where several runs share an address for checkpoints: a place of its own there."""
    if settings.url is None:
        return settings
    return settings.model_copy(update={"url": f"{settings.url.rstrip('/')}/{name}"})
