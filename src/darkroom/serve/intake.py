"""New jobs: their row, rates of keys, and room in the queue, counting jobs that are being written down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from darkroom.serve.admission import Rates, owner
from darkroom.serve.engine import Engine
from darkroom.serve.limits import Limits
from darkroom.serve.refused import Refused
from darkroom.serve.request import PRIORITIES, PictureRequest
from darkroom.serve.store import Record
from darkroom.serve.work import Shape


def new_record(
    uid: str, server: str, key: str, job_id: str, digest: str, request: PictureRequest, shape: Shape
) -> Record:
    """The row of a job that is accepted now."""
    now_s = time.time()
    return Record(
        uid=uid,
        server=server,
        key=key,
        id=job_id,
        digest=digest,
        state="queued",
        request=request.model_dump_json(),
        created_s=now_s,
        num=request.num,
        priority=PRIORITIES[request.priority],
        work=shape.whole_cost * request.num,
        due_s=None if request.deadline_s is None else now_s + request.deadline_s,
    )


UNMEASURED_S = 5.0
"""When to come again, before the first step has been measured."""


class Line(NamedTuple):
    """Who was refused and told when to come again: places that free up until then are promised to them."""

    until_s: float
    key: str
    num: int
    cost: float


class Intake:
    """Belongs to the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rates = Rates(limits.rate_per_minute)
        self._reserved: Counter[str] = Counter()
        self._line: list[Line] = []

    def check_room(self, engine: Engine, key: str, num: int, others: Counter[str] | None = None) -> None:
        """429 where the queue is full or the key comes too often; `others` wait for any server, by key."""
        others = others or Counter()
        waiting = engine.waiting() + self._reserved.total() + others.total()
        mine = engine.waiting(key) + self._reserved[key] + others[key]
        for there, most, whose in (
            (waiting, self._limits.queue, None),
            (mine, self._limits.queue_per_key, key),
        ):
            if there + num > most:
                after_s = self._places_free_s(engine, there + num - most, whose)
                self._promise(Line(time.monotonic() + after_s, key, num, 0.0))
                told = f"{there} pictures wait already{owner(key) if whose else ''}"
                raise Refused(429, "queue_full", told, retry_after_s=after_s)
        self._rates.take(key)

    def check_work(self, engine: Engine, key: str, num: int, cost: float) -> None:
        """429 where the work that waits would take too long with this job's `cost` on top; alone it may."""
        limits = self._limits
        for whose, most_s in ((None, limits.queue_s), (key, limits.queue_s * limits.share_of_a_key)):
            waiting = engine.waiting_cost(whose)
            waiting_s, own_s = engine.seconds_for(waiting), engine.seconds_for(cost)
            if not waiting or waiting_s is None or own_s is None or waiting_s + own_s <= most_s:
                continue
            too_much = waiting * (1 - max(0.0, most_s - own_s) / waiting_s)
            after_s = self._work_gone_s(engine, too_much, whose)
            self._promise(Line(time.monotonic() + after_s, key, num, cost))
            whole = f"work of {waiting_s:.3g} s waits already{owner(key) if whose else ''}"
            told = f"{whole}, and this is {own_s:.3g} s; at most {most_s:.4g} s may wait"
            raise Refused(429, "queue_full", told, retry_after_s=after_s)

    def _promise(self, line: Line) -> None:
        """Of each key no more than may wait: who asks in vain again and again delays nobody else."""
        if sum(one.num for one in self._promised(line.key)) + line.num <= self._limits.queue_per_key:
            self._line.append(line)

    def _promised(self, key: str | None) -> list[Line]:
        now_s = time.monotonic()
        self._line = [one for one in self._line if one.until_s > now_s]
        return [one for one in self._line if key is None or one.key == key]

    def _places_free_s(self, engine: Engine, num: int, key: str | None) -> float:
        """When so many pictures, of a key or of all, will have left the queue, and those promised before."""
        times = [one.after_s for one in engine.admissions() if key is None or one.key == key]
        if not times:
            return UNMEASURED_S
        num += sum(one.num for one in self._promised(key))
        beyond = max(0, num - len(times))  # who was promised a place will wait as well
        return times[min(num, len(times)) - 1] + beyond * times[-1] / len(times)

    def _work_gone_s(self, engine: Engine, work: float, key: str | None) -> float:
        """When so much of the waiting work will have been admitted, and what was promised before."""
        admissions = [one for one in engine.admissions() if key is None or one.key == key]
        work += sum(one.cost for one in self._promised(key))
        for one in admissions:
            work -= one.cost
            if work <= 0:
                return one.after_s
        last_s = admissions[-1].after_s if admissions else UNMEASURED_S
        return last_s + (engine.seconds_for(work) or 0.0)

    @contextmanager
    def reserved(self, key: str, num: int) -> Iterator[None]:
        """Room in the queue for a job that is being written down."""
        self._reserved[key] += num
        try:
            yield
        finally:
            self._reserved[key] -= num
            if not self._reserved[key]:
                del self._reserved[key]
