"""A job on its way through the engine: `Work`, and a `Ticket` for each of its pictures."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from darkroom.serve.fairness import Entry
from darkroom.serve.request import PictureRequest, Uploads

if TYPE_CHECKING:
    from PIL import Image

    from darkroom import sample
    from darkroom.serve.library import Loan

PRIORITIES = {"low": 0, "normal": 1, "high": 2}


@dataclass(frozen=True)
class Shape:
    """What a request costs, as far as the engine needs to know beforehand."""

    width: int
    height: int
    steps: int
    evaluations: int
    """U-Net rows a step: 2 with guidance."""

    @property
    def pixels(self) -> int:
        """Of one picture."""
        return self.width * self.height

    @property
    def cost(self) -> float:
        """Work of one picture: pixels x steps x evaluations."""
        return float(self.pixels * self.steps * self.evaluations)


class Listener(Protocol):
    """Who is told how a work goes, on the engine's threads."""

    def began(self, work: Work) -> None:
        """Its first picture was admitted."""

    def made(self, work: Work) -> None:
        """All its pictures are decoded."""

    def failed(self, work: Work, error: BaseException) -> None:
        """One of its pictures cannot be made; its rows are gone."""


@dataclass(frozen=True, eq=False)
class Preview:
    """A picture as far as it had come."""

    picture: int
    index: int
    step: int
    image: Image.Image


@dataclass(eq=False)
class Work:
    """A job as the engine sees it."""

    uid: str
    key: str
    request: PictureRequest
    shape: Shape
    listener: Listener
    uploads: Uploads | None = None
    accepted_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    prepared: sample.Job | None = None
    lent: dict[str, Loan] = field(default_factory=dict)
    """Where its adapters are, by name."""
    tickets: list[Ticket] = field(default_factory=list)
    pictures: dict[int, sample.Picture] = field(default_factory=dict)
    previews: list[Preview] = field(default_factory=list)
    watchers: int = 0
    device_s: float = 0.0
    dropped_round: int = 0
    """Which of the engine's rounds was under way when it was stopped."""
    over: bool = False
    """Cancelled, failed or finished: nothing of it is to be computed any more."""

    def __post_init__(self) -> None:
        self.tickets = [Ticket(self, i) for i in range(self.request.num)]

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        return tuple(choice.name for choice in self.request.adapters)

    @property
    def steps_done(self) -> int:
        """Of all its pictures."""
        return sum(ticket.step for ticket in self.tickets)

    @property
    def steps_total(self) -> int:
        """Of all its pictures; known exactly once they are prepared (PNDM takes one more)."""
        steps = len(self.prepared.table) if self.prepared is not None else self.shape.steps
        return steps * len(self.tickets)


@dataclass(eq=False)
class Ticket:
    """One picture of a work: waiting (`entry`), on its way (`row`), or done."""

    work: Work
    index: int
    entry: Entry = field(init=False)
    row: sample.Row | None = None
    preview_at: dict[int, int] = field(default_factory=dict)
    """After which step which preview is due."""
    meter_s: float = 0.0
    """The bucket's meter when it came aboard."""
    done: bool = False

    def __post_init__(self) -> None:
        shape, request = self.work.shape, self.work.request
        size: Hashable = (shape.width, shape.height)
        self.entry = Entry(self, self.work.key, size, shape.cost, PRIORITIES[request.priority])

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.row.step if self.row is not None else 0


def preview_steps(count: int, steps: int) -> dict[int, int]:
    """After which steps `count` previews are due, evenly spread; the last step is the picture itself."""
    at = {round((i + 1) * steps / (count + 1)): i for i in range(count)}
    return {step: index for step, index in at.items() if 0 < step < steps}
