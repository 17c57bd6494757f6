"""One published value with what the plan says of it, and a table of them.

A prediction is a function of the efficiencies, so that the fit (benchmarks/plan/fit.py) and the proof use the
same code. `fitted` rows are those whose value the fit has seen; the proof counts the others alone, and of
those none that another row's published value gives (`derived`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from darkroom.hardware.cards import Card, find_card
from darkroom.plan.roofline import Efficiency

Predict = Callable[[Efficiency], float]


@dataclass(frozen=True)
class PublishedValue:
    """One published value. `limit`: its own tolerance, where it is not the table's."""

    case: str
    published: float
    predict: Predict
    fitted: bool = False
    limit: float | None = None
    at_least: float | None = None  # a ceiling of the card: the prediction is to be at least this
    derived: bool = False  # another row's published value in another unit: shown, neither fitted nor counted
    note: str = ""  # what a reader should know of it
    plain: Predict | None = None  # the plain reading, shown next to it
    unit: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """A published table: all rows within `limit`, or their median where `by_median`."""

    name: str
    limit: float
    rows: tuple[PublishedValue, ...]
    by_median: bool = True
    reading: str = ""
    source: str = ""


def card(name: str) -> Card:
    """A card that the tables name."""
    found = find_card(name)
    assert found is not None, name
    return found


def constant(value: float) -> Predict:
    """What no efficiency changes."""
    return lambda _: value


def power_of_two(number: int) -> int:
    """The largest power of two that is not above a number; 0 of 0."""
    return 1 << (number.bit_length() - 1) if number else 0
