"""The recipe: its sections, what follows from them together, and what they may not say together. And how one
is read: YAML and `key=value` overrides in, a checked `Recipe` out, errors in one line. What is not said takes
the default of its task, each with the reason.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from darkroom.errors import InputError, RecipeError, allowed_of
from darkroom.hardware.system import read_typed, write_atomically
from darkroom.recipe import rules
from darkroom.recipe.fine_tuning import (
    FINE_TUNING,
    check_adapter,
    check_frozen_base,
    check_preference,
    check_subject,
)
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
from darkroom.recipe.task_keys import check_read
from darkroom.recipe.yaml_text import (
    MAX_DEPTH,
    MAX_SHOWN,
    check_kinds,
    check_values,
    parse_yaml,
    shown,
    yaml_fault,
)

TEXTS = ("data.prompt", "data.class_prompt", "data.filter", "adapter.trigger")
"""Settings that are free text: on the command line their commas, '#' and ': ' are part of what is said."""
RANGES = ("data.online.encoders",)
"""Settings that may be MIN:MAX, which YAML 1.1 takes for minutes and seconds."""
SOURCES = ("store", "stores", "folder", "instance", "sets")
"""Where pictures come from, in `data`: one of them."""
MAX_BYTES = 2**20  # of a file
RECIPE_SUFFIXES = (".yaml", ".yml")
TRIAL_WARMUP, TRIAL_EMA = 10, 2
"""A run that the command line shortens warms up for a tenth of its steps, and averages its last half."""
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
        rules.check_parallel(task, self.parallel, optim, train, adapter)
        rules.check_online(task, data)
        rules.check_extras(task, train, data, phases=bool(self.phases))
        rules.check_distill(task, objective, model, adapter, train, optim)
        rules.check_patience(self.evaluate, data)
        check_read(task, self)

    def check(self, processes: int | None = None) -> None:
        """RecipeError for what cannot be trained, whatever the store and the model.

        With a number of `processes` also where they cannot share a batch.
        """
        task, data, train = self.task, self.data, self.train
        self.check_together()
        rules.check_micro_batch(train)
        rules.check_scored(self.evaluate, data)
        if not self.phases:  # each phase has a length of its own, and is checked as a recipe of its own
            rules.check_length(train, self.optim)
        if task in VAE_TASKS:
            rules.check_vae_task(task, self.model)
        elif task == "extractor":
            rules.check_extractor(train, data, self.objective.extractor)
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


# ---- reading one


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides; raises RecipeError with the key, in one line."""
    return make_recipe(_read_yaml(Path(path)), overrides, source=str(path))


def copy_recipe(source: Path, to: Path) -> Path:
    """A recipe's file, byte by byte. RecipeError where it is none, InputError where `to` is there."""
    read_recipe(source)
    if to.suffix not in RECIPE_SUFFIXES:
        raise InputError(f"a recipe to '{to}'", allowed="--to FILE.yaml")
    if to.exists():
        raise InputError(f"'{to}' is there already", mend="choose another file")
    write_atomically(to, source.read_bytes())
    return to


def read_sweep(
    path: str | Path, overrides: Sequence[str] = (), *, of: str | None = None
) -> list[tuple[dict[str, Any], Recipe]]:
    """The recipes that overrides with several values mean, each with what sets it apart; one without any.

    `optim.lr=1e-5,5e-5` is two recipes; with `adapter.rank=4,8` as well, four. A text's commas are its
    own: `data.prompt='a dog, sitting'` is one value. `of` is the trainer whose file it is (kohya); None: a
    recipe.
    """
    choices = [_choices(override) for override in overrides]
    content, notes = _read_content(Path(path), of)
    found = []
    for chosen in itertools.product(*choices):
        apart = [one for one, all_ in zip(chosen, choices, strict=True) if len(all_) > 1]
        pairs = (one.partition("=") for one in apart)
        made = make_recipe(content, chosen, source=str(path))
        settings = {key: parse_yaml(value) for key, _, value in pairs}
        made._derived = (*notes, *made.derived)
        found.append((settings, made))
    return found


def _read_content(path: Path, of: str | None) -> tuple[dict[str, Any], list[str]]:
    """A file's content as a recipe's, and lines about what of it was left out."""
    if of is None:
        return _read_yaml(path), []
    if of != "kohya":
        raise RecipeError("--from", f"'{of}'", allowed="kohya")
    from darkroom.recipe.kohya import read_kohya

    return read_kohya(path)


def _choices(override: str) -> list[str]:
    """The single overrides that one with commas stands for."""
    key, _, value = override.partition("=")
    parts = value.split(",")
    plain = len(parts) > 1 and all(re.fullmatch(r"[\w.+-]+", part) for part in parts)
    return [f"{key}={part}" for part in parts] if plain and key not in TEXTS else [override]


def make_recipe(content: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """A recipe from its content as a dictionary, checked; `source` is named in errors."""
    content, notes = with_new_names(copy.deepcopy(content))
    for override in overrides:
        notes += _override(content, override)
    check_values(content)
    notes += _replace_sources(content, overrides)
    recipe = _validated(content, source)
    if shorter := _shortened(content, recipe.train, recipe.optim, recipe.phases, overrides):
        notes += shorter
        recipe = _validated(content, source)
    recipe.check_together()
    recipe._derived = (*notes, *_derivations(content))
    return recipe


def recipe_of(content: Mapping[str, Any], run: Path) -> Recipe:
    """The recipe that a run's folder holds; RecipeError where it is not one that training wrote."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise _error_of(error.errors(), f"the recipe of '{run}'") from error


def _validated(content: dict[str, Any], source: str) -> Recipe:
    filled = copy.deepcopy(content)
    fill(filled)
    if filled.get("task") in ADAPTER_TASKS and filled.get("adapter") is None:
        filled["adapter"] = {}
    try:
        recipe = Recipe.model_validate(filled)
    except ValidationError as error:
        raise _error_of(error.errors(), source) from error
    check_kinds(content, recipe.model_dump(by_alias=True))
    return recipe


def _replace_sources(content: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Where an override says where the pictures are, what the recipe itself says of it is left out, aloud."""
    data, keys = content.get("data"), {override.partition("=")[0] for override in overrides}
    if not isinstance(data, dict):
        return []
    new = [name for name in SOURCES if f"data.{name}" in keys and data.get(name)]
    old = [name for name in SOURCES if f"data.{name}" not in keys and data.get(name)]
    if not new:
        return []
    return [
        f"data.{name} {data.pop(name)} is left out: data.{new[0]} {data[new[0]]} is given" for name in old
    ]


def _shortened(
    content: dict[str, Any],
    train: TrainSettings,
    optim: OptimSettings,
    phases: Sequence[PhaseSettings],
    overrides: Sequence[str],
) -> list[str]:
    """Fit a warm-up and an average that would begin only after the `train.steps` of the command line."""
    keys, steps, notes = {override.partition("=")[0] for override in overrides}, train.steps, []
    if phases:
        return _shortened_phases(content, train, optim, phases)
    if "train.steps" not in keys:
        return []
    warmup, ema = optim.warmup_steps, train.ema
    if warmup > steps and "optim.warmup_steps" not in keys:
        content["optim"]["warmup_steps"] = steps // TRIAL_WARMUP
        notes.append(
            f"optim.warmup_steps {steps // TRIAL_WARMUP}, not {warmup}: a tenth of train.steps {steps}"
        )
    if ema.enabled and ema.start_step >= steps and "train.ema.start_step" not in keys:
        content["train"]["ema"]["start_step"] = steps // TRIAL_EMA
        notes.append(
            f"train.ema.start_step {steps // TRIAL_EMA}, not {ema.start_step}: half of train.steps {steps}"
        )
    return notes


def _shortened_phases(
    content: dict[str, Any], train: TrainSettings, optim: OptimSettings, phases: Sequence[PhaseSettings]
) -> list[str]:
    """The same for phases that are shorter than what they take over from the recipe."""
    notes, ema = [], train.ema
    for i, phase in enumerate(phases):
        steps = -(-phase.samples // (phase.global_batch or train.global_batch))
        if phase.warmup_steps is None and optim.warmup_steps > steps:
            content["phases"][i]["warmup_steps"] = steps // TRIAL_WARMUP
            notes.append(
                f"phases.{i}.warmup_steps {steps // TRIAL_WARMUP}, not {optim.warmup_steps}: "
                f"a tenth of its {steps} steps"
            )
        if ema.enabled and phase.ema_from is None and ema.start_step >= steps:
            content["phases"][i]["ema_from"] = phase.samples // TRIAL_EMA
            notes.append(f"phases.{i}.ema_from {phase.samples // TRIAL_EMA}: half of its pictures")
    return notes


def _derivations(content: dict[str, Any]) -> list[str]:
    """Lines for the values that the task decides, each once."""
    found = fill(copy.deepcopy(content)) if isinstance(content, dict) else []
    return [f"{key} {json.dumps(value)}" + (f": {why}" if why else "") for key, value, why in found]


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecipeError.missing(path)
    if (size := path.stat().st_size) > MAX_BYTES:
        raise RecipeError(str(path), f"{size:,} bytes", allowed=f"a recipe of at most {MAX_BYTES:,} bytes")
    try:
        content = parse_yaml(read_typed(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), f"not readable as YAML: {yaml_fault(error)}") from error
    if not isinstance(content, dict):
        raise RecipeError(str(path), "not a recipe", allowed=f"a mapping of {', '.join(Recipe.model_fields)}")
    return content


def _override(content: dict[str, Any], override: str) -> list[str]:
    """Set what an override says; a line where it says it by a key's old name."""
    said, given, value = override.partition("=")
    path = RENAMED.get(said, said)
    if not given or not path:
        raise RecipeError(
            shown(override)[1:-1], "not an override", allowed="key=value, such as train.steps=1000"
        )
    *parents, last = path.split(".")
    if len(parents) > MAX_DEPTH:
        raise RecipeError(
            shown(path)[1:-1], f"a key of {len(parents) + 1} parts", allowed=f"at most {MAX_DEPTH}"
        )
    for key in parents:
        inner = content.setdefault(key, {})
        if not isinstance(inner, dict):
            raise RecipeError(path, f"'{key}' holds a value, so it has no '{last}'")
        content = inner
    try:
        content[last] = value.strip() if _is_literal(path, value) else parse_yaml(value)
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or yaml_fault(error)
        raise RecipeError(shown(path)[1:-1], f"not readable as YAML: {shown(value)}: {why}") from error
    return [] if path == said else [f"{said} is now {path}; the old name goes with the next release"]


def _is_literal(path: str, value: str) -> bool:
    """Whether a value is text as it stands, and neither quoted, a list nor null."""
    plain = value.strip()
    if path in RANGES and ":" in plain:
        return True
    return path in TEXTS and plain not in ("", "~", "null") and plain[0] not in "[{\"'"


def _error_of(errors: Sequence[ErrorDetails], source: str) -> RecipeError:
    """The first mistake as one line: its path, what was given, what is allowed, the nearest right name."""
    first = errors[0]
    key = ".".join(str(part)[:MAX_SHOWN] for part in first["loc"] if not _is_branch(part)) or source
    more = f"and {len(errors) - 1} more in {source}" if len(errors) > 1 else ""
    if first["type"] == "extra_forbidden":
        names = _sibling_keys(first["loc"])
        near = difflib.get_close_matches(str(first["loc"][-1]), names, 1, cutoff=0.5)
        mend = "; ".join(part for part in (f"did you mean '{near[0]}'?" if near else "", more) if part)
        return RecipeError(key, "no such key", allowed=", ".join(names), mend=mend)
    if first["type"] == "missing":
        return RecipeError(key, "missing", mend=more or f"say it in {source} or as {key}=VALUE")
    allowed = allowed_of(first)
    if not isinstance(first["input"], dict):
        return RecipeError(key, f"{shown(first['input'])} was given", allowed=allowed, mend=more)
    if first["type"] == "value_error":  # two settings that exclude each other: the message says which
        return RecipeError(key, allowed, mend=more)
    return RecipeError(key, "impossible", allowed=allowed, mend=more)


def _is_branch(part: int | str) -> bool:
    """Whether pydantic named the branch of a union here, which is no key of the recipe."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def _sibling_keys(loc: tuple[int | str, ...]) -> list[str]:
    """The keys that are allowed where an unknown one was given."""
    model: type[BaseModel] = Recipe
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        if field is None or (inner := _model_in(field.annotation)) is None:
            break
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


# ---- what a task sets by default


_SHORT_RUN = "the average of so short a run lags behind it; true where another key of train.ema is given"
_OWN: dict[str, tuple[rules.Default, ...]] = {
    "finetune": (
        ("optim.lr", 1e-5, "all weights, learned long before: small steps"),
        ("train.steps", 1000, ""),
        ("train.global_batch", 16, ""),
    ),
    "lora": (
        ("optim.lr", 1e-4, "an adapter starts at nothing"),
        ("train.steps", 1000, ""),
        ("train.global_batch", 4, ""),
    ),
    "dreambooth": (
        ("optim.lr", 5e-6, "the published best of full DreamBooth: 400 steps of one picture at 5e-6"),
        ("train.steps", 400, "the published best of full DreamBooth"),
        ("train.global_batch", 1, "the published best of DreamBooth"),
    ),
    "dreambooth-lora": (
        ("optim.lr", 1e-4, "the published best of DreamBooth with LoRA: 500 steps of one picture at 1e-4"),
        ("train.steps", 500, "the published best of DreamBooth with LoRA"),
        ("train.global_batch", 1, "the published best of DreamBooth"),
    ),
    "dpo": (
        ("optim.lr", 1e-5, "preferences shift a model a little"),
        ("train.steps", 1000, ""),
        ("train.global_batch", 4, "pairs"),
    ),
    "textual-inversion": (
        ("optim.lr", 2e-3, "5e-4 for each of four pictures, as the paper scales it"),
        ("train.steps", 3000, "as the paper's authors advise"),
        ("train.global_batch", 4, "as the paper's authors advise"),
        ("optim.weight_decay", 0.0, "a word drawn towards zero would mean nothing"),
    ),
    "distill": (
        ("optim.lr", 8e-6, "all weights of a U-Net, as LCM's paper has it; 1e-4 with an adapter"),
        ("train.steps", 1000, ""),
        ("train.global_batch", 16, ""),
        ("sample.steps", 4, "what is distilled is drawn in few steps"),
        ("sample.guidance", 1.0, "guidance is distilled too"),
    ),
}
_EXTRACTOR: tuple[rules.Default, ...] = (
    ("model.base", "extractor", "darkroom's own small network"),
    ("optim.lr", 2e-3, "a small network from random weights"),
)
_TINY_VAE: tuple[rules.Default, ...] = (("optim.lr", 5e-4, "a small network from random weights"),)
_ENCODED: rules.Default = (
    "data.encode",
    "auto",
    "latents are made once where pictures are always cut alike",
)
_UNAVERAGED: rules.Default = ("train.ema.enabled", False, _SHORT_RUN)
_SCHEDULE_FREE: rules.Default = ("train.ema.enabled", False, "schedule-free averages by itself")


def defaults_of(content: Mapping[str, Any]) -> Iterator[rules.Default]:
    """The defaults that differ from the recipe's own, for this content; the first of a key counts."""
    task = content.get("task")
    optim = content.get("optim")
    name = optim.get("name") if isinstance(optim, dict) else None
    scaled = isinstance(optim, dict) and optim.get("scale_parameter") is False
    if (own := rules.own_rate(task, name, scales=not scaled)) is not None:
        yield own
    if name == "lion":
        yield from _lion(content)
    if name == "schedule-free":
        yield _SCHEDULE_FREE
    if _optim_fused(content):
        yield "optim.clip_norm", None, "the step is taken inside the backward pass, before the norm is known"
    if task == "distill":
        yield from _distill(content)
    if isinstance(task, str) and task in FINE_TUNING:
        yield from _OWN[task]
        yield _ENCODED
        if not _ema_of(content):  # who says how weights are averaged wants them averaged
            yield _UNAVERAGED
    if task == "extractor":
        yield from _EXTRACTOR
    if task == "tiny-vae":
        yield from _TINY_VAE


def _distill(content: Mapping[str, Any]) -> Iterator[rules.Default]:
    """An adapter's rate; else of LCM the average that its student learns from."""
    if content.get("adapter") is not None:
        yield "optim.lr", 1e-4, "an adapter starts at nothing"
        return
    objective = content.get("objective")
    settings = objective.get("distill") if isinstance(objective, dict) else None
    given = settings if isinstance(settings, dict) else {}
    if _ema_of(content).get("enabled") is False:
        return
    if given.get("method", "lcm") == "lcm" and given.get("target") != "student":
        yield "train.ema.enabled", True, "its averaged weights are what LCM's student learns from"
        yield "train.ema.decay", 0.95, "as LCM's paper has it"


def _ema_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of averaged weights."""
    train = content.get("train")
    ema = train.get("ema") if isinstance(train, dict) else None
    return ema if isinstance(ema, dict) else {}


def _lion(content: Mapping[str, Any]) -> Iterator[rules.Default]:
    """Lion's betas, a third of AdamW's rate and thrice its decay, which the paper has at 3 to 10 times."""
    plain = {**content, "optim": {**content["optim"], "name": "adamw"}}
    usual = dict(reversed([(key, value) for key, value, _ in defaults_of(plain)]))
    lr, decay = usual.get("optim.lr", 1e-4), usual.get("optim.weight_decay", 0.01)
    yield "optim.lr", float(f"{lr / 3:.1g}"), "each step of Lion moves every weight by the whole rate"
    yield "optim.beta2", 0.99, "Lion's own"
    yield "optim.weight_decay", 3 * decay, "Lion's rate is smaller, and decay goes with it"


def _optim_fused(content: Mapping[str, Any]) -> bool:
    """Whether the content asks for the step inside the backward pass."""
    optim = content.get("optim")
    return isinstance(optim, dict) and optim.get("fused_backward") is True


def fill(content: dict[str, Any]) -> list[rules.Default]:
    """Put a task's defaults where nothing is said, in place; returns what was put."""
    put = []
    for key, value, why in defaults_of(content):
        *parents, last = key.split(".")
        inner: Any = content
        for parent in parents:
            inner = inner.setdefault(parent, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last not in inner:
            inner[last] = value
            put.append((key, value, why))
    return put
