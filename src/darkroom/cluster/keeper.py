"""The keeper of an online feed: an actor on the driver's node that holds the encoders for all ranks.

It outlives the workers that train, who may be started again, fewer or more of them. A rank asks it from time
to time which encoders are up, and tells what it waits for and how busy its stages were. The keeper has
a reference to the encoders' parts and never the parts: it imports nothing that they are made of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from darkroom.cluster.encoders import QUEUE, Bounds, Encoder, Pool
from darkroom.cluster.usage import Use, together
from darkroom.errors import DarkroomError

ASK_S = 0.5
SILENT_S = 10.0  # a rank that says nothing for so long has ended


@dataclass
class RankStatus:
    """What a rank says of itself."""

    waiting: int = 0  # blocks that are ready and find no free encoder
    calls: dict[int, int] = field(default_factory=dict)  # how many blocks each encoder has of it
    dead: list[int] = field(default_factory=list)  # encoders that it found dead
    made: int = 0  # blocks since its last report
    use: Use | None = None
    at: float = 0.0  # by the keeper's clock


class Keeper:
    """Holds the encoders of a job for all of its ranks; an actor."""

    def __init__(self, bounds: Bounds, encoder: Callable[..., Any]) -> None:
        self._bounds, self._encoder = bounds, encoder
        self._pool: Pool | None = None
        self._identity = ""
        self._ranks: dict[int, RankStatus] = {}
        self._lost = 0

    def holds(self, identity: str) -> bool:
        """Whether the encoders hold these parts."""
        return self._pool is not None and self._identity == identity

    def hold(self, identity: str, parts: list[Any]) -> None:
        """Start encoders with these parts, unless they are there.

        `parts` is a rank's reference to them, in a list so that Ray does not resolve it. A task on this
        machine copies them, so that the keeper owns what encoders start from when the rank is gone.
        """
        import ray

        if self.holds(identity):
            return
        self.close()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        held = ray.remote(_as_it_is).options(num_cpus=0, scheduling_strategy=here).remote(parts[0])
        ray.wait([held], fetch_local=False)
        actor = ray.remote(self._encoder)
        self._pool = Pool(self._bounds, lambda options: actor.options(**options).remote(held))
        self._identity, self._ranks = identity, {}

    def state(self, rank: int, status: RankStatus) -> list[tuple[int, Any]]:
        """The encoders that are up, by number."""
        pool, now = self._pool, time.monotonic()
        if pool is None:
            return []
        if status.made:
            pool.made()
        for number in status.dead:
            pool.lose(number)
        status.at = now
        self._ranks[rank] = status
        there = [one for one in self._ranks.values() if now - one.at < SILENT_S]
        for number, encoder in pool.encoders.items():
            encoder.calls = set(range(sum(one.calls.get(number, 0) for one in there)))
        pool.poll(sum(one.waiting for one in there))
        return [(encoder.number, encoder.handle) for encoder in pool.up]

    def waits(self) -> str:
        """What encoders wait for that could not start for a while; else nothing."""
        return self._pool.waits() if self._pool is not None else ""

    def lines(self) -> list[str]:
        """What is to be said of the encoding, for the console."""
        last = max((status.at for status in self._ranks.values()), default=0.0)
        ranks = (status for status in self._ranks.values() if last - status.at < SILENT_S)
        uses = [status.use for status in ranks if status.use is not None]
        if not uses:
            return []
        use, lost = together(uses), self._lost + (self._pool.lost if self._pool else 0)
        lines = [f"online encoding: {use.rows_per_s():,.1f} rows/s; {use.bottleneck()}"]
        if lost or use.repeated:
            lines.append(f"{lost} encoders were lost and replaced, {use.repeated} blocks made again")
        return lines

    def close(self) -> None:
        """Stop the encoders."""
        if self._pool is not None:
            self._lost += self._pool.lost
            self._pool.close()
            self._pool = None


def _as_it_is(parts: Any) -> Any:
    """A copy of its own: what a task returns belongs to who started it."""
    return parts


class SharedPool(Pool):
    """A keeper's encoders as one rank sees them."""

    def __init__(self, keeper: Any, rank: int, bounds: Bounds, use: Use) -> None:
        self.bounds, self.encoders, self.lost = bounds, {}, 0
        self._keeper, self._rank, self._use = keeper, rank, use
        self._dead: list[int] = []
        self._made = 0
        self._asked: Any = None
        self._asked_at = -math.inf

    def free(self) -> Encoder | None:
        """An encoder that may take a block now; None where all are busy."""

        # Ranks begin at different ones, so that the first is not everybody's.
        def load(encoder: Encoder) -> tuple[int, int]:
            return len(encoder.calls), (encoder.number + self._rank) % max(len(self.encoders), 1)

        least = min(self.up, key=load, default=None)
        return least if least is not None and len(least.calls) < QUEUE else None

    def made(self) -> None:
        self._made += 1

    def lose(self, number: int) -> None:
        if self.encoders.pop(number, None) is not None:
            self._dead.append(number)
            self.lost += 1

    def poll(self, waiting: int) -> None:
        """Ask the keeper from time to time; DarkroomError where it is gone, or no encoder can start."""
        import ray

        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            try:
                self._take(ray.get(self._asked))
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (cause if isinstance(cause, Exception) else error) from None
            except ray.exceptions.RayError as error:
                raise DarkroomError(f"the keeper of the encoders is gone ({type(error).__name__})") from error
            self._asked = None
        if self._asked is None and time.monotonic() - self._asked_at > ASK_S:
            self._asked, self._asked_at = self.tell(waiting), time.monotonic()

    def tell(self, waiting: int) -> Any:
        """Tell the keeper how things are; a reference of the encoders that are up."""
        calls = {number: len(encoder.calls) for number, encoder in self.encoders.items()}
        dead, self._dead = self._dead, []
        made, self._made = self._made, 0
        return self._keeper.state.remote(self._rank, RankStatus(waiting, calls, dead, made, self._use))

    def _take(self, there: list[tuple[int, Any]]) -> None:
        dead = {*self._dead}
        for number, handle in there:
            if number not in dead and number not in self.encoders:
                self.encoders[number] = Encoder(number, handle)
        known = {number for number, _ in there}
        for number in [n for n, e in self.encoders.items() if n not in known and not e.calls]:
            del self.encoders[number]

    @property
    def starting(self) -> list[Any]:
        return [] if self._asked is None else [self._asked]

    def close(self) -> None:
        """The keeper stops them."""
