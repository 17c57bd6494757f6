"""New jobs: their row, rates of keys, and room in the queue, counting jobs that are being written down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from darkroom.serve.admission import Rates, check_room
from darkroom.serve.engine import Engine
from darkroom.serve.limits import Limits
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


class Intake:
    """Belongs to the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rates = Rates(limits.rate_per_minute)
        self._reserved: Counter[str] = Counter()

    def check_room(self, engine: Engine, key: str, num: int, others: Counter[str] | None = None) -> None:
        """429 where the queue is full or the key comes too often; `others` wait for any server, by key."""
        others = others or Counter()
        waiting = engine.waiting() + self._reserved.total() + others.total()
        mine = engine.waiting(key) + self._reserved[key] + others[key]
        check_room(waiting, mine, num, self._limits, engine.wait_s(), key)
        self._rates.take(key)

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
