"""A1111's prompts that change between steps: `[from:to:when]`, `[to:when]`, `[from::when]` and `[a|b]`.

`when` is a share of the steps where it has a point, else a number of steps; in a second pass shares count on
from 1. A1111 counts steps from 0 and keeps a text up to and including its last step; so does this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from darkroom.errors import InputError

NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*")
MAX_DEPTH = 50
MAX_TEXTS = 100
At = Callable[[int], str]
"""A text by the number of its step, from 1."""


def schedule(prompt: str, steps: int, *, second_pass: bool = False) -> list[tuple[int, str]]:
    """The texts of a prompt in order, each with the last step (from 0) at which it is read.

    `steps` are those asked for, before a strength leaves some of them out. One text: nothing changes.
    """
    ends: set[int] = {steps}
    at = _read(prompt, steps, second_pass, ends, 0)
    texts = [(end, at(end)) for end in sorted(ends)]
    found = [one for i, one in enumerate(texts) if i + 1 == len(texts) or texts[i + 1][1] != one[1]]
    if len({text for _, text in found}) > MAX_TEXTS:
        raise InputError(f"'{prompt[:60]}' changes {len(found)} times", allowed=f"up to {MAX_TEXTS} texts")
    return found


def text_at(texts: Sequence[tuple[int, str]], step: int) -> int:
    """Which of a schedule's texts is read at a step, counted from 0."""
    return next((i for i, (end, _) in enumerate(texts) if step <= end), len(texts) - 1)


def _read(text: str, steps: int, second_pass: bool, ends: set[int], depth: int) -> At:
    """A text with its changing parts; adds to `ends` the steps after which it changes."""
    if depth > MAX_DEPTH:
        raise InputError(f"brackets {depth} deep in a prompt", allowed=f"up to {MAX_DEPTH}")
    parts: list[At] = []
    closings = _closings(text)
    at = 0
    while at < len(text):
        if text[at] == "\\" and at + 1 < len(text):
            parts.append(_plain(text[at : at + 2]))
            at += 2
            continue
        close = closings.get(at)
        if close is None:
            parts.append(_plain(text[at]))
            at += 1
            continue
        parts.append(_bracket(text[at + 1 : close], steps, second_pass, ends, depth))
        at = close + 1
    return lambda step: "".join(part(step) for part in parts)


def _plain(text: str) -> At:
    return lambda step: text


def _bracket(inner: str, steps: int, second_pass: bool, ends: set[int], depth: int) -> At:
    """What stands between square brackets: a change at a step, texts in turn, or a plain emphasis."""

    def read(text: str) -> At:
        return _read(text, steps, second_pass, ends, depth + 1)

    parts = _split(inner, ":")
    number = NUMBER.fullmatch(parts[-1]) if 2 <= len(parts) <= 3 else None
    if number is not None:
        when = _when(number[1], steps, second_pass)
        if when >= 1:
            ends.add(when)
        before, after = read(parts[0] if len(parts) == 3 else ""), read(parts[-2])
        return lambda step: before(step) if step <= when else after(step)
    options = _split(inner, "|")
    if len(options) > 1:
        ends.update(range(1, steps + 1))
        turns = [read(option) for option in options]
        return lambda step: turns[(step - 1) % len(turns)](step)
    held = read(inner)
    return lambda step: f"[{held(step)}]"


def _when(number: str, steps: int, second_pass: bool) -> int:
    """After which step; a number may be as large as it likes."""
    when = max(-2.0 * steps, min(float(number), 2.0 * steps))
    if "." in number:
        return min(steps, int((when - (1.0 if second_pass else 0.0)) * steps))
    return min(steps, int(when) - (steps if second_pass else 0))


def _closings(text: str) -> dict[int, int]:
    """Where each square bracket that is closed closes."""
    found: dict[int, int] = {}
    opened: list[int] = []
    at = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[":
            opened.append(at)
        elif text[at] == "]" and opened:
            found[opened.pop()] = at
        at += 1
    return found


def _split(text: str, mark: str) -> list[str]:
    """Parts of a text between marks that stand in no brackets."""
    parts, depth, at, start = [], 0, 0, 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "[(":
            depth += 1
        elif text[at] in "])":
            depth -= 1
        elif text[at] == mark and not depth:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]
