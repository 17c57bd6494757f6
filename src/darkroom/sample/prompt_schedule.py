"""A1111's prompts that change between steps: `[from:to:when]`, `[to:when]`, `[from::when]` and `[a|b]`;
and those composed of several (`a AND b :0.5`, Liu et al. 2022), each of which may change by itself.

`when` is a share of the steps where it has a point, else a number of steps; in a second pass shares count on
from 1, and numbers from the steps of the first. A1111 counts steps from 0 and keeps a text up to and
including its last step; so does this. Of a solver that calls the U-Net twice a step each call counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from darkroom.errors import InputError

NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*")
MAX_DEPTH = 50
MAX_WEIGHT = 100.0
MAX_TEXTS = 100
MAX_COMPOSED = 16
AND = re.compile(r"\bAND\b")
COMPOSED_WEIGHT = re.compile(r"\s*:\s*([-+]?(?:\d+\.?|\d*\.\d+))\s*$")
At = Callable[[int], str]
"""A text by the number of its step, from 1."""


class PromptStage(NamedTuple):
    """What is read of a prompt and its negative up to a step."""

    until: int
    prompts: tuple[str, ...]
    """One, or those that AND composes."""
    negative: str
    second_pass: bool


def readings(
    prompt: str, negative: str, weighting: str, steps: int, second_steps: int | None = None
) -> list[PromptStage]:
    """All that is read of a prompt in order, in one pass or two of so many U-Net calls each."""
    if weighting != "a1111":
        passes = [(False, steps)] + ([] if second_steps is None else [(True, second_steps)])
        return [PromptStage(count, (prompt,), negative, second) for second, count in passes]
    positives = [text for text, _ in composed(prompt)]
    found = []
    for second, count in ((False, steps), (True, second_steps)):
        if count is None:
            continue
        # In a negative prompt AND is a word, as A1111 has it.
        before = steps if second else None
        texts = [schedule(text, count, first_steps=before) for text in (*positives, AND.sub("and", negative))]
        for end in sorted({end for text in texts for end, _ in text}):
            *mine, against = (text[_text_at(text, end)][1] for text in texts)
            found.append(PromptStage(end, tuple(mine), against, second))
    return found


def composed(prompt: str) -> list[tuple[str, float]]:
    """The prompts that AND composes, and how much each counts; one without AND counts 1, whatever it says."""
    if not (parts := AND.split(prompt))[1:]:
        return [(prompt, 1.0)]
    if len(parts) > MAX_COMPOSED:
        raise InputError(f"{len(parts)} prompts joined by AND", allowed=f"up to {MAX_COMPOSED}")
    found = []
    for part in parts:
        weight = COMPOSED_WEIGHT.search(part)
        found.append((part.rstrip(), 1.0) if weight is None else (part[: weight.start()], float(weight[1])))
        if not abs(found[-1][1]) <= MAX_WEIGHT:
            raise InputError(
                f"a weight of {found[-1][1]:g} after AND", allowed=f"-{MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
            )
    return found


def schedule(prompt: str, steps: int, *, first_steps: int | None = None) -> list[tuple[int, str]]:
    """The texts of a prompt in order, each with the last step (from 0) at which it is read.

    `steps` are those asked for, before a strength leaves some of them out; of a second pass those it takes,
    after the `first_steps` of the first. One text: nothing changes.
    """
    ends: set[int] = {steps}
    at = _read(prompt, steps, first_steps, ends, 0)
    texts = [(end, at(end)) for end in sorted(ends)]
    found = [one for i, one in enumerate(texts) if i + 1 == len(texts) or texts[i + 1][1] != one[1]]
    if len({text for _, text in found}) > MAX_TEXTS:
        raise InputError(f"'{prompt[:60]}' changes {len(found)} times", allowed=f"up to {MAX_TEXTS} texts")
    return found


def _text_at(texts: Sequence[tuple[int, str]], step: int) -> int:
    """Which of a schedule's texts is read at a step, counted from 0."""
    return next((i for i, (end, _) in enumerate(texts) if step <= end), len(texts) - 1)


def _read(text: str, steps: int, first_steps: int | None, ends: set[int], depth: int) -> At:
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
        parts.append(_bracket(text[at + 1 : close], steps, first_steps, ends, depth))
        at = close + 1
    return lambda step: "".join(part(step) for part in parts)


def _plain(text: str) -> At:
    return lambda step: text


def _bracket(inner: str, steps: int, first_steps: int | None, ends: set[int], depth: int) -> At:
    """What stands between square brackets: a change at a step, texts in turn, or a plain emphasis."""

    def read(text: str) -> At:
        return _read(text, steps, first_steps, ends, depth + 1)

    parts = _split(inner, ":")
    number = NUMBER.fullmatch(parts[-1]) if 2 <= len(parts) <= 3 else None
    if number is not None:
        when = _when(number[1], steps, first_steps)
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


def _when(number: str, steps: int, first_steps: int | None) -> int:
    """After which step; a number may be as large as it likes."""
    most = 2.0 * (steps + (first_steps or 0))
    when = max(-most, min(float(number), most))
    if "." in number:
        return min(steps, int((when - (0.0 if first_steps is None else 1.0)) * steps))
    return min(steps, int(when) - (first_steps or 0))


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
