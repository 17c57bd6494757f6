"""Reading a recipe: YAML and `key=value` overrides in, a checked `Recipe` out, errors in one line. What is
not said takes the default of its task, each with the reason.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.reader import ReaderError

from darkroom.errors import InputError, RecipeError, allowed_of
from darkroom.hardware.system import read_typed, write_atomically
from darkroom.recipe.fine_tuning import (
    FINE_TUNING,
)
from darkroom.recipe.recipe import RENAMED, Recipe, with_new_names
from darkroom.recipe.rules import (
    Default,
    own_rate,
)
from darkroom.recipe.sections import (
    ADAPTER_TASKS,
    OptimSettings,
    PhaseSettings,
    TrainSettings,
)

TEXTS = ("data.prompt", "data.class_prompt", "data.filter", "adapter.trigger")
"""Settings that are free text: on the command line their commas, '#' and ': ' are part of what is said."""
RANGES = ("data.online.encoders",)
"""Settings that may be MIN:MAX, which YAML 1.1 takes for minutes and seconds."""
SOURCES = ("store", "stores", "folder", "instance", "sets")
"""Where pictures come from, in `data`: one of them."""
MAX_BYTES, MAX_NODES, MAX_DEPTH = 2**20, 10_000, 32
"""Of a recipe's YAML, aliases counted as what they stand for; recipes here have 100 nodes, 5 levels deep."""
MAX_SHOWN = 200
"""Characters of a wrong value that are quoted."""
RECIPE_SUFFIXES = (".yaml", ".yml")
TRIAL_WARMUP, TRIAL_EMA = 10, 2
"""A run that the command line shortens warms up for a tenth of its steps, and averages its last half."""


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
    _check_values(content)
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


def _check_values(content: Any, key: str = "") -> None:
    """RecipeError for what no key means: infinity, not-a-number, half a surrogate pair."""
    if isinstance(content, dict):
        for name, value in content.items():
            _check_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            _check_values(value, f"{key}.{i}")
    elif isinstance(content, float) and not math.isfinite(content):
        raise RecipeError(key or "recipe", str(content), allowed="a finite number")
    elif isinstance(content, str) and content.encode(errors="replace").decode() != content:
        raise RecipeError(key or "recipe", ascii(content)[:200], allowed="Unicode, in UTF-8")


def _validated(content: dict[str, Any], source: str) -> Recipe:
    filled = copy.deepcopy(content)
    fill(filled)
    if filled.get("task") in ADAPTER_TASKS and filled.get("adapter") is None:
        filled["adapter"] = {}
    try:
        recipe = Recipe.model_validate(filled)
    except ValidationError as error:
        raise _error_of(error.errors(), source) from error
    _check_kinds(content, recipe.model_dump(by_alias=True))
    return recipe


def _check_kinds(given: Any, taken: Any, key: str = "") -> None:
    """RecipeError for what pydantic takes for something else: yes for the number 1, bytes for text."""
    if isinstance(given, dict) and isinstance(taken, dict):
        for name in given.keys() & taken.keys():
            _check_kinds(given[name], taken[name], f"{key}.{name}" if key else str(name))
    elif isinstance(given, list) and isinstance(taken, (list, tuple)):
        for i, (one, other) in enumerate(zip(given, taken, strict=False)):
            _check_kinds(one, other, f"{key}.{i}")
    elif isinstance(given, bool) and isinstance(taken, (int, float)) and not isinstance(taken, bool):
        raise RecipeError(key, f"{given} was given", allowed="a number")
    elif isinstance(given, bytes):
        raise RecipeError(key, f"{_shown(given)} was given", allowed="text")


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


AMBIGUOUS = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""Numbers that YAML 1.1 takes as octal, or to the base of 60, and YAML 1.2 as decimal, or as text."""


class _Loader(yaml.SafeLoader):
    """YAML that refuses what PyYAML takes in silence: a key given twice (the last one would win), and numbers
    that are others in other versions of YAML.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping, refused where a key comes twice or is no scalar. Raises MarkedYAMLError."""
        if not isinstance(node, yaml.MappingNode):
            raise _wrong(f"{_shown(node.value)} is no mapping", node.start_mark)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _wrong("a key that is a list or a mapping", key_node.start_mark)
            merges = key_node.tag == "tag:yaml.org,2002:merge"  # `<<: *others`
            key = key_node.value if merges else self.construct_object(key_node, deep=True)
            if key in seen:
                raise _wrong(f"the key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value, refused where YAML 1.1 and 1.2 read another number or the tag does not fit."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        if node.tag.endswith((":int", ":float")) and AMBIGUOUS.fullmatch(node.value):
            raise _wrong(f"{_shown(node.value)} is another number in other versions of YAML", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, OverflowError) as error:  # 2026-13-45, or !!bool maybe
            kind = node.tag.rpartition(":")[2]
            raise _wrong(f"{_shown(node.value)} is no {kind}", node.start_mark) from error


def parse_yaml(text: str, *, max_nodes: int = MAX_NODES) -> Any:
    """What YAML says.

    YAMLError where it is wrong, ambiguous (a key given twice, 010), or has more values than any recipe.
    """
    _check_size(text, max_nodes)
    return yaml.load(text, Loader=_Loader)


def _check_size(text: str, max_nodes: int) -> None:
    """YAMLError for what is nested too deep or, with aliases written out, too long; nothing is built."""
    open_: list[tuple[str | None, int]] = []  # anchors of the collections around, and nodes before them
    sizes: dict[str, int] = {}
    nodes = 0
    for event in _events(text):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.AliasEvent):
                if any(anchor == event.anchor for anchor, _ in open_):
                    raise _wrong(f"*{event.anchor} stands inside of what it names", event.start_mark)
                nodes += sizes.get(str(event.anchor), 1)
            else:
                nodes += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((event.anchor, nodes))
            if len(open_) > MAX_DEPTH:
                raise _wrong(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
            if nodes > max_nodes:
                raise _wrong(f"more than {max_nodes:,} values, aliases written out", event.start_mark)


def _events(text: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except (ValueError, OverflowError) as error:  # of PyYAML's scanner: "\\U00110000" is no character
        raise yaml.YAMLError(str(error)) from error


def _wrong(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def yaml_fault(error: Exception) -> str:
    """What `parse_yaml` found wrong, and where, in one line; the file is named by who read it."""
    if isinstance(error, ReaderError):
        return f"position {error.position:,}: the character {chr(error.character)!a}"
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    said: dict[str, str] = {}  # by its place, which what was being read may have in common with its fault
    for what, mark in ((error.context, error.context_mark), (error.problem, error.problem_mark)):
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        if what:
            said[where] = f"{said[where]}; {what}" if where in said else what
    return " ".join("; ".join(f"{what}{where}" for where, what in said.items()).split())


def _shown(value: Any) -> str:
    """A value as it is quoted in a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


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
            _shown(override)[1:-1], "not an override", allowed="key=value, such as train.steps=1000"
        )
    *parents, last = path.split(".")
    if len(parents) > MAX_DEPTH:
        raise RecipeError(
            _shown(path)[1:-1], f"a key of {len(parents) + 1} parts", allowed=f"at most {MAX_DEPTH}"
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
        raise RecipeError(_shown(path)[1:-1], f"not readable as YAML: {_shown(value)}: {why}") from error
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
        return RecipeError(key, f"{_shown(first['input'])} was given", allowed=allowed, mend=more)
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


_SHORT_RUN = "the average of so short a run lags behind it"
_OWN: dict[str, tuple[Default, ...]] = {
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
_EXTRACTOR: tuple[Default, ...] = (
    ("model.base", "extractor", "darkroom's own small network"),
    ("optim.lr", 2e-3, "a small network from random weights"),
)
_TINY_VAE: tuple[Default, ...] = (("optim.lr", 5e-4, "a small network from random weights"),)
_ALL_FINE_TUNING: tuple[Default, ...] = (
    ("train.ema.enabled", False, _SHORT_RUN),
    ("data.encode", "auto", "latents are made once where pictures are always cut alike"),
)
_SCHEDULE_FREE: Default = ("train.ema.enabled", False, "schedule-free averages by itself")


def defaults_of(content: Mapping[str, Any]) -> Iterator[Default]:
    """The defaults that differ from the recipe's own, for this content; the first of a key counts."""
    task = content.get("task")
    optim = content.get("optim")
    name = optim.get("name") if isinstance(optim, dict) else None
    scaled = isinstance(optim, dict) and optim.get("scale_parameter") is False
    if (own := own_rate(task, name, scales=not scaled)) is not None:
        yield own
    if name == "lion":
        yield from _lion(content)
    if name == "schedule-free":
        yield _SCHEDULE_FREE
    if _optim_fused(content):
        yield "optim.clip_norm", None, "the step is taken inside the backward pass, before the norm is known"
    if task == "distill" and content.get("adapter") is not None:
        yield "optim.lr", 1e-4, "an adapter starts at nothing"
    if isinstance(task, str) and task in FINE_TUNING:
        yield from _OWN[task]
        yield from _ALL_FINE_TUNING
    if task == "extractor":
        yield from _EXTRACTOR
    if task == "tiny-vae":
        yield from _TINY_VAE


def _lion(content: Mapping[str, Any]) -> Iterator[Default]:
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


def fill(content: dict[str, Any]) -> list[Default]:
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
