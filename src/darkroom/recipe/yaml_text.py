"""YAML as recipes are written in it: bounded in size, and refused where it is ambiguous."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from typing import Any

import yaml
from yaml.reader import ReaderError

from darkroom.errors import RecipeError

MAX_NODES, MAX_DEPTH = 10_000, 32
"""Of a text, aliases counted as what they stand for; recipes here have 100 nodes, 5 levels deep."""
MAX_SHOWN = 200
"""Characters of a wrong value that are quoted."""
AMBIGUOUS = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""Numbers that YAML 1.1 takes as octal, or to the base of 60, and YAML 1.2 as decimal, or as text."""


class _Loader(yaml.SafeLoader):
    """YAML that refuses what PyYAML takes in silence: a key given twice (the last one would win), and numbers
    that are others in other versions of YAML.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping, refused where a key comes twice or is no scalar. Raises MarkedYAMLError."""
        if not isinstance(node, yaml.MappingNode):
            raise _wrong(f"{shown(node.value)} is no mapping", node.start_mark)
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
            raise _wrong(f"{shown(node.value)} is another number in other versions of YAML", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, OverflowError) as error:  # 2026-13-45, or !!bool maybe
            kind = node.tag.rpartition(":")[2]
            raise _wrong(f"{shown(node.value)} is no {kind}", node.start_mark) from error


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


def shown(value: Any) -> str:
    """A value as it is quoted in a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def check_values(content: Any, key: str = "") -> None:
    """RecipeError for what no key means: infinity, not-a-number, half a surrogate pair."""
    if isinstance(content, dict):
        for name, value in content.items():
            check_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            check_values(value, f"{key}.{i}")
    elif isinstance(content, float) and not math.isfinite(content):
        raise RecipeError(key or "recipe", str(content), allowed="a finite number")
    elif isinstance(content, str) and content.encode(errors="replace").decode() != content:
        raise RecipeError(key or "recipe", ascii(content)[:200], allowed="Unicode, in UTF-8")


def check_kinds(given: Any, taken: Any, key: str = "") -> None:
    """RecipeError for what pydantic takes for something else: yes for the number 1, bytes for text."""
    if isinstance(given, dict) and isinstance(taken, dict):
        for name in given.keys() & taken.keys():
            check_kinds(given[name], taken[name], f"{key}.{name}" if key else str(name))
    elif isinstance(given, list) and isinstance(taken, (list, tuple)):
        for i, (one, other) in enumerate(zip(given, taken, strict=False)):
            check_kinds(one, other, f"{key}.{i}")
    elif isinstance(given, bool) and isinstance(taken, (int, float)) and not isinstance(taken, bool):
        raise RecipeError(key, f"{given} was given", allowed="a number")
    elif isinstance(given, bytes):
        raise RecipeError(key, f"{shown(given)} was given", allowed="text")
