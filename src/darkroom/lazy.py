"""Public names of a package that are imported when they are used: what needs little of it imports little."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def importer(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`: names come from its modules, by each module's path below the package."""
    places = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return get
