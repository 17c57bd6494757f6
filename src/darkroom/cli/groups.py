"""Groups of options: a command takes one object in place of a parameter for each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from darkroom.cli.application import SIZE_HELP, size_of
from darkroom.errors import InputError, allowed_of
from darkroom.picture_settings import GenerateSettings


@dataclass(frozen=True)
class OptionsOf:
    """Marks a command's parameter that stands for one option for each of these fields of a settings' model.

    Type, default, range and help are the field's own; `instead` has the typer annotation of a field that has
    another form on the command line, `flags` the names of options that are not called like their field. The
    command is handed a dictionary by the fields' names; with `only_given` None for what was not given.
    """

    model: type[BaseModel]
    names: tuple[str, ...]
    instead: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    only_given: bool = False

    def options(self) -> dict[str, tuple[Any, Any]]:
        """Of each field the typer annotation, and the default or what stands for none."""
        made = {
            name: _option_of(self.model, name, self.flags.get(name), only_given=self.only_given)
            for name in self.names
        }
        return made | {name: (hint, made[name][1]) for name, hint in self.instead.items()}

    def __call__(self, **given: Any) -> dict[str, Any]:
        """What the command is handed."""
        return given

    def settings(self, given: Mapping[str, Any]) -> Any:
        """The model that the options fill. InputError names the option whose value it refuses."""
        try:
            return self.model(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            flag = self.flags.get(name, f"--{name.replace('_', '-')}")
            choices = ", ".join(_choices_of(self.model, name))
            raise InputError(f"{flag} {first.get('input')}", allowed=choices or allowed_of(first)) from error


WIDEST = 2**31
"""A larger bound says nothing to a reader of `--help`: it is left to the model."""


def _option_of(model: type[BaseModel], name: str, flag: str | None, *, only_given: bool) -> tuple[Any, Any]:
    """A field's typer annotation and its default: its type, its description, its range, its choices.

    A `None: ...` in the description says what holds by default. Bounds that are open (`gt`) are left to the
    model, which has the last word on every value.
    """
    one, choices = model.model_fields[name], _choices_of(model, name)
    kinds = [kind for kind in get_args(one.annotation) or (one.annotation,) if kind is not type(None)]
    kind: Any = str if choices else kinds[0]
    bounds = {"min": "ge", "max": "le"} if kind in (int, float) else {}
    rules = [(bound, getattr(rule, key, None)) for bound, key in bounds.items() for rule in one.metadata]
    limits = {bound: limit for bound, limit in rules if limit is not None and abs(limit) < WIDEST}
    about = (one.description or "").replace("None:", "default:")
    about += f"; default: {one.default:g}" if only_given else ""
    option = typer.Option(
        *(() if flag is None else (flag,)),
        help=f"{', '.join(choices)}: {about}" if choices else about,
        autocompletion=(lambda: choices) if choices else None,
        **limits,
    )
    optional = kind | None if only_given or type(None) in get_args(one.annotation) else kind
    if only_given:
        return Annotated[optional, option], None
    if one.default is PydanticUndefined:
        return Annotated[optional, option], inspect.Parameter.empty
    # A tuple stands for an option that may be given again: without it the command is handed None.
    return Annotated[optional, option], None if isinstance(one.default, tuple) else one.default


def _choices_of(model: type[BaseModel], name: str) -> list[str]:
    """The values of a field that has a choice of some; none of any other."""
    annotation = model.model_fields[name].annotation
    literal = next((one for one in (annotation, *get_args(annotation)) if get_origin(one) is Literal), None)
    return list(map(str, get_args(literal)))


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command of whose parameters some stand for several options each.

    A dataclass stands for one option a field, annotated as typer has it,
    `steps: Annotated[int, typer.Option(help=...)] = 30`; the command is handed the dataclass. A dictionary
    marked by `OptionsOf` stands for fields of a settings' model.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: found for name, hint in hints.items() if (found := _group_of(hint)) is not None}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = groups.get(name)
        given = {name: (hints[name], parameter.default)} if group is None else _options(group)
        parameters += [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for key, (hint, default) in given.items()
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        """The command's options, put together into its dataclasses."""
        made = {
            name: group(**{option: given.pop(option) for option in _options(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _group_of(hint: Any) -> Any:
    """The dataclass or the mark of a parameter that stands for several options; None for any other."""
    marks = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, OptionsOf)]
    return hint if is_dataclass(hint) else marks[0] if marks else None


def _options(group: Any) -> dict[str, tuple[Any, Any]]:
    """Of each field its annotation, and its default or what stands for none."""
    if isinstance(group, OptionsOf):
        return group.options()
    hints = get_type_hints(group, include_extras=True)
    plain = {field.name: field.default for field in fields(group)}
    return {
        name: (hints[name], inspect.Parameter.empty if default is MISSING else default)
        for name, default in plain.items()
    }


SEED_SIZE_HELP = "of the picture whose noise is kept in the middle of this one's, as --size"
SIZE = {"size": Annotated[str | None, typer.Option(help=SIZE_HELP)]}
SAMPLING = OptionsOf(GenerateSettings, ("seed", "steps", "guidance", "solver", "size", "negative"), SIZE)
"""How pictures are drawn, whatever the prompt."""
DRAWING = OptionsOf(
    GenerateSettings,
    (
        *SAMPLING.names,
        *("num", "variation_seed", "variation_strength", "seed_size"),
        *(
            "strength",
            "only_masked",
            "masked_content",
            "paste",
            "weighting",
            "clip_skip",
            "guidance_rescale",
            "eta",
        ),
        *("karras", "exponential", "sigmas", "spacing"),
    ),
    {**SIZE, "seed_size": Annotated[str | None, typer.Option(help=SEED_SIZE_HELP)]},
)
"""The same and the other settings of pictures, but for the second pass."""
Sampling = Annotated[dict[str, Any], SAMPLING]
Drawing = Annotated[dict[str, Any], DRAWING]


def read_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of these options, the size read. InputError for one that no model makes."""
    return given | {name: size_of(given[name]) for name in ("size", "seed_size") if name in given}
