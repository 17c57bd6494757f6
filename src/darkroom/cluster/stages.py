"""Two stages on a cluster: CPU tasks make blocks ready, encoder actors encode them.

Blocks are asked for by what they are, so any of them can be made again: a dead task is started anew by Ray, a
dead encoder's blocks go to another one. What is in flight is bounded at every place, so a slow stage holds up
the ones before it, and memory does not grow.

Not Ray Data's `map_batches`: a block here must hold exactly the rows that share an encoder's batch, finished
blocks must be reported one by one so that a restart resumes from them, an online feed takes blocks by number
and in its own order, and the time that each stage is busy must be known. That is a loop over `ray.wait`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from darkroom.cluster.encoders import QUEUE, Encoder, Pool, Use
from darkroom.errors import DarkroomError

MOST_TRIES = 8


@dataclass
class InFlightBlock:
    """A block on its way. `key` is the caller's; `ask` goes to both stages."""

    key: Any
    ask: Any
    rows: int
    tries: int = 0
    data: Any = None  # reference of what the CPU stage made


Start = Callable[[Any], tuple[Any, Any]]
"""Starts the CPU stage for an ask: references of the data and of its Seconds."""


class Stages:
    """Brings blocks through both stages. `encode` names the actor's method (data, ask) -> result, Seconds."""

    def __init__(self, pool: Pool, start: Start, use: Use, *, encode: str = "encode") -> None:
        self.pool, self._start, self._encode = pool, start, encode
        self.use = use
        self.look: Callable[[], None] = lambda: None
        """Called at every step, also while nothing is done."""
        self._queue: deque[InFlightBlock] = deque()
        self._ready: deque[InFlightBlock] = deque()
        self._on_cpu: dict[Any, InFlightBlock] = {}
        self._at_encoder: dict[Any, tuple[InFlightBlock, Encoder, Any]] = {}
        self._ticked = time.monotonic()

    @property
    def held(self) -> int:
        """Blocks that were handed in and are not done."""
        return len(self._queue) + len(self._ready) + len(self._on_cpu) + len(self._at_encoder)

    def submit(self, key: Any, ask: Any, rows: int) -> None:
        """Hand in a block."""
        self._queue.append(InFlightBlock(key, ask, rows))

    def run(self, blocks: Iterable[tuple[Any, Any, int]]) -> Iterator[tuple[Any, Any]]:
        """Bring all through, so many at a time as the stages take: (key, result reference) when done."""
        coming = iter(blocks)
        over = False
        while True:
            while not over and len(self._queue) < self.use.cpu_workers:
                following = next(coming, None)
                if following is None:
                    over = True
                    break
                self.submit(*following)
            if over and not self.held:
                return
            yield from self.step()

    def step(self, timeout_s: float = 1.0) -> list[tuple[Any, Any]]:
        """Move blocks along; returns those that are done: (key, reference of the result)."""
        import ray

        self.look()
        self.pool.poll(len(self._ready))
        self._fill()
        refs = [*self._on_cpu, *self._at_encoder, *self.pool.starting]
        if not refs:
            time.sleep(min(timeout_s, 0.05))
            return []
        ray.wait(refs, num_returns=1, timeout=timeout_s)
        self._tick()
        self._take_ready()
        return self._take_encoded()

    def _tick(self) -> None:
        now = time.monotonic()
        self.use.tick(now - self._ticked, len(self.pool.up), len(self._on_cpu))
        self._ticked = now

    def _fill(self) -> None:
        """Start what fits. Ready blocks that wait are bounded, so the CPU stage waits too."""
        while self._ready and (encoder := self.pool.free()) is not None:
            block = self._ready.popleft()
            method = getattr(encoder.handle, self._encode).options(num_returns=2)
            result, seconds = method.remote(block.data, block.ask)
            encoder.calls.add(seconds)
            self._at_encoder[seconds] = block, encoder, result
        queue_length = max(QUEUE, self.use.cpu_workers // 2)
        while (
            self._queue
            and len(self._on_cpu) < self.use.cpu_workers
            and len(self._ready) + len(self._on_cpu) < queue_length + self.use.cpu_workers
            and len(self._ready) < queue_length
        ):
            block = self._queue.popleft()
            block.data, seconds = self._start(block.ask)
            self._on_cpu[seconds] = block

    def _take_ready(self) -> None:
        import ray

        if not self._on_cpu:
            return
        done, _ = ray.wait(list(self._on_cpu), num_returns=len(self._on_cpu), timeout=0, fetch_local=False)
        for ref in done:
            block = self._on_cpu.pop(ref)
            try:
                self.use.add(ray.get(ref))
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except ray.exceptions.RayError as error:
                self._again(block, error)
                continue
            self._ready.append(block)

    def _take_encoded(self) -> list[tuple[Any, Any]]:
        import ray

        if not self._at_encoder:
            return []
        refs = list(self._at_encoder)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        found = []
        for ref in done:
            if ref not in self._at_encoder:  # went down with an encoder that was lost in this round
                continue
            block, encoder, result = self._at_encoder.pop(ref)
            encoder.calls.discard(ref)
            try:
                seconds = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                self._lose(encoder)
                self._again(block, error)
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, ray.exceptions.RayError):
                    raise _cause(error) from None
                self._again(block, error)  # its data were lost on the way
            except ray.exceptions.RayError as error:
                self._again(block, error)
            else:
                self.pool.made()
                self.use.add(seconds)
                self.use.made(block.rows)
                found.append((block.key, result))
        return found

    def _lose(self, encoder: Encoder) -> None:
        """An encoder died: all blocks that it had go to others, nothing else does."""
        self.pool.lose(encoder.number)
        for ref in [ref for ref, (_, its, _) in self._at_encoder.items() if its is encoder]:
            block, _, _ = self._at_encoder.pop(ref)
            self.use.repeated += 1
            self._queue.appendleft(block)

    def _again(self, block: InFlightBlock, error: BaseException) -> None:
        block.tries += 1
        self.use.repeated += 1
        if block.tries >= MOST_TRIES:
            raise DarkroomError(
                f"block {block.key} was lost {block.tries} times with the worker that had it "
                f"({type(error).__name__}); is there enough memory?"
            ) from error
        self._queue.appendleft(block)


def _cause(error: Any) -> BaseException:
    """What a worker raised, as if it had been raised here."""
    cause = error.cause
    return cause if isinstance(cause, BaseException) else DarkroomError(str(error).splitlines()[-1])
