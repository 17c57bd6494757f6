"""What may stand in a recipe, read from its pydantic models: a list of keys, a JSON Schema, a page of docs.

`darkroom recipe` prints all three; `docs/recipe.md` and `recipes/recipe.schema.json` are what it printed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args

from darkroom.errors import InputError
from darkroom.recipe.recipe import Recipe, defaults_of
from darkroom.recipe.sections import OptimSettings, Task
from darkroom.recipe.task_keys import TASKS, others_of, tasks_of

REQUIRED = "required"
_LIMITS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "above {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "below {}"),
    ("multipleOf", "multiple of {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("pattern", "matches {}"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
)
_TYPES = {"string": "text", "object": "mapping", "null": "null"}
_UNITS = {
    "px": ("data.resolution", "data.sets[].resolution", "phases[].resolution"),
    "tokens": ("model.vocab_size", "model.max_length", "model.word.vectors", "data.max_token_length"),
    "tags": ("data.keep_tokens", "data.token_warmup_min"),
    "words": ("objective.extractor.network.most_words", "objective.extractor.network.buckets"),
    "pictures": (
        *("data.num_class_images", "train.global_batch", "train.micro_batch", "sample.num"),
        *("phases[].samples", "phases[].global_batch", "phases[].ema_from"),
        *("evaluate.rows", "evaluate.every_images", "evaluate.num"),
    ),
    "steps": (
        *("data.token_warmup_steps", "optim.warmup_steps", "phases[].warmup_steps"),
        *("optim.text_encoder_steps", "optim.layers[].start_step", "optim.layers[].stop_step"),
        *("train.steps", "train.log_every", "train.ema.start_step", "train.ema.every"),
        *("checkpoint.every", "sample.every", "sample.steps", "evaluate.every"),
        *("objective.distill.steps", "objective.distill.ddim_steps", "objective.distill.fake_updates"),
    ),
    "timesteps": (
        *("objective.timesteps.min", "objective.timesteps.max", "objective.noise.num_timesteps"),
        "evaluate.timesteps",
    ),
    "checkpoints": ("checkpoint.keep",),
    "evaluations": ("evaluate.patience",),
    "channels": (
        *("objective.tiny_vae.width", "objective.extractor.network.width", "train.align.hidden"),
        "objective.extractor.network.embedding",
    ),
    "blocks": (
        *("train.blocks_to_swap", "train.routing.before", "train.routing.after", "train.align.block"),
        "objective.tiny_vae.blocks",
    ),
    "layers": ("data.clip_skip",),
    "threads": ("data.workers",),
    "batches": ("data.prefetch_batches",),
    "GB": ("data.cache_gb",),
    "processes": ("parallel.devices", "data.online.encoders", "data.online.cpu_workers"),
    "machines": ("parallel.nodes",),
    "s": ("data.online.timeout_s", "parallel.timeout_s"),
    "h": ("budget.hours",),
    "US dollars": ("budget.usd",),
    "share": (
        *("data.caption_dropout", "data.tag_dropout", "data.online.fraction", "data.augment.share"),
        *("data.augment.hue", "adapter.rank_dropout", "adapter.module_dropout", "adapter.dropout"),
        *("objective.extractor.caption_weight", "objective.extractor.zoom", "optim.final_lr_ratio"),
        *("objective.noise.multires_discount", "train.routing.keep", "phases[].keep", "train.ema.decay"),
    ),
}
"""Keys by their unit; other numbers have none."""


@dataclass(frozen=True)
class OtherDefault:
    """A default that a task or an optimiser sets instead of the key's own."""

    when: str
    value: Any
    why: str


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe.

    `allowed` is empty where every value of the type is, `unit` where it has none. `tasks` are those that read
    it: the others refuse any value but the default. `needs` are the other keys with which it is read.
    """

    key: str
    section: str
    type: str
    unit: str
    default: Any
    required: bool
    allowed: str
    tasks: tuple[str, ...]
    needs: tuple[str, ...]
    description: str
    other_defaults: tuple[OtherDefault, ...]

    def lines(self) -> Iterator[str]:
        """The key as the terminal shows it."""
        default = REQUIRED if self.required else f"default {shown(self.default)}"
        kind = f"{self.type} ({self.unit})" if self.unit else self.type
        yield "  ".join(part for part in (self.key, kind, default, self.allowed) if part)
        yield f"    {self.description}"
        if self.tasks != TASKS:
            yield f"    tasks: {_tasks(self.tasks)}"
        if self.needs:
            yield f"    read with: {' and '.join(self.needs)}"
        for other in self.other_defaults:
            yield f"    with {other.when}: {shown(other.value)}" + (f" ({other.why})" if other.why else "")


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe's file. Only `task` is required: the rest may come from the command line."""
    made = Recipe.model_json_schema()
    made["required"] = ["task"]
    del made["$defs"]["ModelSettings"]["required"]  # the task extractor sets base
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "darkroom recipe"}


def find_keys(pattern: str | None = None) -> list[RecipeKey]:
    """Every key in the order of the sections, or those of a pattern: `optim.*`, `optim`, `snr`.

    A list's entries are written `phases[].lr`. InputError where nothing matches.
    """
    found = list(_keys())
    if pattern is None:
        return found
    chosen = [one for one in found if _matches(one.key, pattern)]
    if not chosen:
        sections = ", ".join(dict.fromkeys(one.section for one in found if one.section))
        raise InputError(f"no key matches '{pattern}'", allowed=f"a part of a key; sections: {sections}")
    return chosen


def sections() -> Iterator[tuple[str, str]]:
    """Each section's name and what it is about, '' being the recipe itself."""
    whole = Recipe.model_json_schema()
    yield "", whole["description"]
    for name, found, _ in _sections(whole, whole["$defs"], ""):
        yield name, found["description"]


def page() -> str:
    """The reference page of every key, as Markdown."""
    lines = [_HEAD]
    grouped: dict[str, list[RecipeKey]] = {}
    for one in find_keys():
        grouped.setdefault(one.section, []).append(one)
    for name, about in sections():
        lines += [f"## {name or 'The recipe itself'}", about, ""]
        lines += ["| key | type | unit | default | allowed | tasks | meaning |", "| --- " * 7 + "|"]
        lines += [_row(one) for one in grouped[name]] + [""]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as a recipe would have it."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


_HEAD = """\
# Every key of a recipe
Look a key up, list a section, or find where a word occurs:
```
darkroom recipe optim.lr            # one key
darkroom recipe 'data.*'            # a section
darkroom recipe snr                 # every key with these letters
darkroom recipe --json              # all of them, for machines
```
A key is set in the recipe's YAML, or on the command line as `KEY=VALUE`. A list's keys, such as \
`phases[].lr`, are set in YAML.

A recipe is refused for a key that nothing in it reads: one that its task does not read, or one that is \
read only with another key that is not there. The default of such a key may be written. Where the other key \
is turned off by its own default, such as `evaluate.every_images=0`, what belongs to it may stay.

To check a recipe in an editor, put this on its first line, with the path from the recipe to the schema:
```yaml
# yaml-language-server: $schema=recipe.schema.json
```
`darkroom recipe --schema` prints that schema. This page is printed by `darkroom recipe --markdown`.
"""


def _row(one: RecipeKey) -> str:
    default = REQUIRED if one.required else f"`{shown(one.default)}`"
    meaning = [one.description.replace("<", "\\<")]
    meaning += [f"read with {' and '.join(f'`{other}`' for other in one.needs)}"] if one.needs else []
    meaning += [
        f"`{other.when}`: `{shown(other.value)}`" + (f" ({other.why})" if other.why else "")
        for other in one.other_defaults
    ]
    tasks = _tasks(one.tasks)
    cells = (f"`{one.key}`", one.type, one.unit, default, one.allowed, tasks, "<br>".join(meaning))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _tasks(tasks: tuple[str, ...]) -> str:
    others = [task for task in TASKS if task not in tasks]
    if not others:
        return "all"
    return f"all but {', '.join(others)}" if len(others) < len(tasks) else ", ".join(tasks)


def _matches(key: str, pattern: str) -> bool:
    if any(letter in pattern for letter in "*?"):
        return fnmatchcase(key, pattern)
    return pattern in key


def _keys() -> Iterator[RecipeKey]:
    whole = Recipe.model_json_schema()
    others = _other_defaults()
    units = {key: unit for unit, keys in _UNITS.items() for key in keys}
    for name, found, inner in [("", whole, ""), *_sections(whole, whole["$defs"], "")]:
        for field, its in found["properties"].items():
            if _section_in(its, whole["$defs"]) is not None:
                continue
            key = f"{inner}{field}"
            options = [option for option in its.get("anyOf", [its]) if option.get("type") != "null"]
            nullable = len(options) < len(its.get("anyOf", [its]))
            kinds = dict.fromkeys(_type_of(option) for option in options)
            yield RecipeKey(
                key=key,
                section=name,
                type=" or ".join((*kinds, "null") if nullable else kinds),
                unit=units.get(key, ""),
                default=its.get("default"),
                required=field in found.get("required", ()),
                allowed="; or ".join(filter(None, map(_allowed, options))),
                tasks=tasks_of(key),
                needs=tuple(others_of(key)),
                description=its["description"],
                other_defaults=tuple(_together(others.get(key, ()), its.get("default"))),
            )


def _sections(
    found: Mapping[str, Any], models: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Each section below one: its name, its model, and what its keys begin with."""
    for field, its in found["properties"].items():
        if (section := _section_in(its, models)) is not None:
            name = f"{path}{field}" + ("[]" if its.get("type") == "array" else "")
            yield name, section, f"{name}."
            yield from _sections(section, models, f"{name}.")


def _section_in(its: Mapping[str, Any], models: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The model that a key holds, alone, in a list or where it is not null."""
    options = [its, its.get("items", {}), *its.get("anyOf", ())]
    name = next((option["$ref"].rpartition("/")[2] for option in options if "$ref" in option), None)
    return None if name is None else models[name]


def _type_of(option: Mapping[str, Any]) -> str:
    if "enum" in option or "const" in option:
        return "choice"
    if option.get("type") == "array":
        return f"list of {_type_of(option['items'])}"
    kind = str(option.get("format", option.get("type", "any")))
    return _TYPES.get(kind, kind)


def _allowed(option: Mapping[str, Any]) -> str:
    choices = option.get("enum", [option["const"]] if "const" in option else [])
    limits = [text.format(_limit(option[name])) for name, text in _LIMITS if name in option]
    return ", ".join([*map(str, choices), *limits])


def _limit(value: Any) -> str:
    is_power = isinstance(value, int) and value >= 2**20 and value & (value - 1) == 0
    return f"2^{value.bit_length() - 1}" if is_power else shown(value)


def _other_defaults() -> dict[str, list[OtherDefault]]:
    """What tasks, optimisers and both together set, by key."""
    tasks, optimisers = get_args(Task), get_args(OptimSettings.model_fields["name"].annotation)
    cases: list[tuple[str, dict[str, Any]]] = [(f"task: {task}", {"task": task}) for task in tasks]
    cases += [(f"optim.name: {name}", {"optim": {"name": name}}) for name in optimisers]
    cases.append(("optim.fused_backward: true", {"optim": {"fused_backward": True}}))
    found: dict[str, list[OtherDefault]] = {}
    for when, content in cases:
        for key, (value, why) in _first(defaults_of(content)).items():
            found.setdefault(key, []).append(OtherDefault(when, value, why))
    for name in optimisers:
        alone = _first(defaults_of({"optim": {"name": name}}))
        for task in tasks:
            both = _first(defaults_of({"task": task, "optim": {"name": name}}))
            for key in alone.keys() & both.keys():
                if both[key][0] != alone[key][0]:
                    when = f"optim.name: {name}, task: {task}"
                    found[key].append(OtherDefault(when, *both[key]))
    return found


def _first(defaults: Iterator[tuple[str, Any, str]]) -> dict[str, tuple[Any, str]]:
    """The first default of each key, which is the one that counts."""
    first: dict[str, tuple[Any, str]] = {}
    for key, value, why in defaults:
        first.setdefault(key, (value, why))
    return first


def _together(others: Iterable[OtherDefault], own: Any) -> Iterator[OtherDefault]:
    """Those that differ from the key's own default, neighbours of one value and reason as one."""
    different = (one for one in others if one.value != own)
    for (kind, value, why), group in itertools.groupby(
        different, lambda one: (one.when.rpartition(": ")[0], one.value, one.why)
    ):
        names = ", ".join(one.when.rpartition(": ")[2] for one in group)
        yield OtherDefault(f"{kind}: {names}", value, why)
