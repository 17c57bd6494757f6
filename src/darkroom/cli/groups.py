"""Groups of options: a command takes one object in place of a parameter for each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from darkroom.cli.door import SIZE_HELP, SOLVER_HELP, size_of


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses stand for one option a field.

    A field is annotated as typer has it, `steps: Annotated[int, typer.Option(help=...)] = 30`; the command is
    handed the dataclass.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
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
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _options(group: Any) -> dict[str, tuple[Any, Any]]:
    """Of each field its annotation, and its default or what stands for none."""
    hints = get_type_hints(group, include_extras=True)
    plain = {field.name: field.default for field in fields(group)}
    return {
        name: (hints[name], inspect.Parameter.empty if default is MISSING else default)
        for name, default in plain.items()
    }


@dataclass(frozen=True)
class SamplingOptions:
    """How pictures are drawn, whatever the prompt: settings of `darkroom.sample.GenerateSettings`."""

    seed: Annotated[int, typer.Option(min=0, help="picture i has seed + i")] = 0
    steps: Annotated[int | None, typer.Option(help="solver steps; default: 30")] = None
    guidance: Annotated[float | None, typer.Option(help="above 1 is on; default: the model's own or 7.5")] = (
        None
    )
    solver: Annotated[str | None, typer.Option(help=SOLVER_HELP)] = None
    size: Annotated[str | None, typer.Option(help=SIZE_HELP)] = None
    negative: Annotated[str | None, typer.Option(help="what to steer away from")] = None

    def settings(self) -> dict[str, Any]:
        """What was given, by the settings' names."""
        return {**asdict(self), "size": size_of(self.size)}
