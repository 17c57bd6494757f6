"""Who is next: deficit round robin over keys, and within a key over picture sizes.

Each flow in turn is credited a quantum of work and served while its credit lasts (Shreedhar & Varghese 1996),
so that a key with many or large pictures takes no more of the device than one with few small ones, and large
pictures are not starved by small ones. Within a key, higher priority goes first; within a size, first come.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


@dataclass(eq=False, repr=False)
class Entry:
    """One picture waiting. `cost` is its work in any unit, the same for all."""

    item: Any
    key: str
    size: Hashable
    cost: float
    priority: int = 0


Admits = Callable[[Entry], bool]
"""Whether an entry fits now. Flows whose next entry finds none are passed over, unserved."""


def _any_entry(entry: Entry) -> bool:
    """All fit."""
    return True


class _Flow(Protocol):
    @property
    def empty(self) -> bool: ...
    def head(self, admits: Admits) -> Entry | None: ...
    def take(self, admits: Admits) -> Entry: ...
    def copy(self) -> _Flow: ...


class _Line:
    """First come, first served."""

    def __init__(self, entries: deque[Entry] | None = None) -> None:
        self.entries = entries if entries is not None else deque[Entry]()

    @property
    def empty(self) -> bool:
        return not self.entries

    def head(self, admits: Admits) -> Entry | None:
        return self.entries[0] if self.entries and admits(self.entries[0]) else None

    def take(self, admits: Admits) -> Entry:
        return self.entries.popleft()

    def copy(self) -> _Line:
        return _Line(self.entries.copy())


class _Ring:
    """Deficit round robin over flows by name; the flow whose turn it is stands first."""

    def __init__(self, quantum: list[float], shares: Mapping[Any, int] | None = None) -> None:
        self.quantum = quantum  # shared by all rings of a queue
        self.shares = shares or {}
        self.flows: dict[Hashable, _Flow] = {}
        self.turns: deque[Hashable] = deque()
        self.credit: dict[Hashable, float] = {}
        self.credited = False

    def add(self, name: Hashable, flow: _Flow) -> None:
        self.flows[name] = flow
        self.turns.append(name)
        self.credit[name] = 0.0

    @property
    def empty(self) -> bool:
        return all(flow.empty for flow in self.flows.values())

    def head(self, admits: Admits) -> Entry | None:
        """The next entry; turns pass on until one can pay for its head.

        Where none fits the turn stays whose it is, without new credit: it would be credited at each look.
        """
        passed = 0
        turn = (self.turns[0], self.credited) if self.turns else None
        while passed < len(self.turns):
            name = self.turns[0]
            entry = self.flows[name].head(admits)
            if entry is None:
                if self.flows[name].empty:
                    self._drop(name)
                else:
                    self._pass_on()
                    passed += 1
                continue
            passed = 0
            if not self.credited:
                quantum = self.quantum[0] * self.shares.get(name, 1)
                self.credit[name] = min(self.credit[name] + quantum, 2 * quantum)
                self.credited = True
            if entry.cost <= self.credit[name] or len(self.turns) == 1:
                return entry
            self._pass_on()
        if turn is not None and self.turns and self.turns[0] == turn[0]:
            self.credited = turn[1]
        return None

    def take(self, admits: Admits) -> Entry:
        """Remove and return the entry whose turn it is, at the price of its cost."""
        assert self.head(admits) is not None
        name = self.turns[0]
        entry = self.flows[name].take(admits)
        self.credit[name] = max(0.0, self.credit[name] - entry.cost)
        return entry

    def _pass_on(self) -> None:
        self.turns.rotate(-1)
        self.credited = False

    def _drop(self, name: Hashable) -> None:
        self.turns.popleft()
        self.credited = False
        del self.flows[name], self.credit[name]

    def copy(self) -> _Ring:
        twin = _Ring(self.quantum, self.shares)
        twin.flows = {name: flow.copy() for name, flow in self.flows.items()}
        twin.turns, twin.credit, twin.credited = self.turns.copy(), dict(self.credit), self.credited
        return twin


class _KeyFlow:
    """One key's entries: a ring over sizes for each priority."""

    def __init__(self, quantum: list[float], rings: dict[int, _Ring] | None = None) -> None:
        self.quantum = quantum
        self.rings = rings if rings is not None else {}

    def line(self, entry: Entry) -> _Line:
        """The queue of entries of this size and priority, made at its first."""
        ring = self.rings.setdefault(entry.priority, _Ring(self.quantum))
        if entry.size not in ring.flows:
            ring.add(entry.size, _Line())
        line = ring.flows[entry.size]
        assert isinstance(line, _Line)
        return line

    @property
    def empty(self) -> bool:
        return all(ring.empty for ring in self.rings.values())

    def head(self, admits: Admits) -> Entry | None:
        return next((entry for entry in (ring.head(admits) for ring in self._by_priority()) if entry), None)

    def take(self, admits: Admits) -> Entry:
        return next(ring for ring in self._by_priority() if ring.head(admits) is not None).take(admits)

    def _by_priority(self) -> Iterator[_Ring]:
        return (self.rings[priority] for priority in sorted(self.rings, reverse=True))

    def copy(self) -> _KeyFlow:
        return _KeyFlow(self.quantum, {priority: ring.copy() for priority, ring in self.rings.items()})


class LoadLimit:
    """Which pictures fit together with `loads`, those in the batch by size, which the owner keeps up to date.

    Each size takes a load of `capacity` in each of the `lanes` that may step it, all of them `calls` times
    that; a picture alone always fits. For one round of choices: a size that has no capacity for one has none
    for the next either, or large pictures would wait for ever behind small ones.
    """

    def __init__(self, loads: Mapping[Hashable, float], capacity: float, calls: int, lanes: int = 1) -> None:
        self._loads, self._capacity = loads, capacity * max(1, min(lanes, calls - 1))
        # However large its pictures are, a size leaves capacity for a full call of the others.
        self._most, self._whole = (calls - 1) * capacity, calls * capacity
        self._closed: set[Hashable] = set()
        self._full, self._kept = False, 0.0

    def admits(self, size: Hashable, load: float) -> bool:
        """Whether a picture of this size and load may start now."""
        if self._full or size in self._closed:
            return False
        here = self._loads.get(size, 0.0)
        if here > 0 and here + load > self._capacity:
            self._closed.add(size)
            return False
        loads, load = self._loads.values(), min(load, self._most)
        there = sum(min(taken, self._most) for taken in loads)
        large = sum(min(taken, self._most) for taken in loads if taken > self._capacity)
        if there > 0 and there + load > self._whole:
            if large + load <= self._whole:
                self._full = True
            else:  # it waits for a large one to end, and then has to fit together with the small ones
                self._kept = max(self._kept, load)
            return False
        return not self._kept or there - large + load + self._kept <= self._whole


@dataclass(frozen=True)
class PendingPicture:
    """A picture on its way, or that will be: so many steps more, each of so much work."""

    size: Hashable
    steps: int
    step_work: float
    load: float
    """What it takes of the capacity of its size."""


def admitted_after(
    drawn: Iterable[PendingPicture],
    waiting: Sequence[PendingPicture],
    capacity: float,
    calls: int,
    work_per_s: float,
    lanes: int = 1,
) -> list[float]:
    """After how many seconds each of those waiting, in their order, will be admitted, as `LoadLimit` has it.

    The size whose pictures had the least time each is stepped next, so all that are on their way get the same
    work a second, and a small one is over while a large one takes few steps.
    """
    there: defaultdict[Hashable, float] = defaultdict(float)
    ends: list[tuple[float, int, PendingPicture]] = []
    lines: dict[Hashable, deque[int]] = {}
    for i, one in enumerate(waiting):
        lines.setdefault(one.size, deque()).append(i)
    number = itertools.count()
    had, now_s, times = 0.0, 0.0, [0.0] * len(waiting)  # `had` is the work that each has had

    def begin(one: PendingPicture) -> None:
        there[one.size] += one.load
        heapq.heappush(ends, (had + max(1, one.steps) * one.step_work, next(number), one))

    for one in drawn:
        begin(one)
    while lines:
        limit = LoadLimit(there, capacity, calls, lanes)
        while (first := _first_that_fits(lines, waiting, limit)) is not None:
            size = waiting[first].size
            times[lines[size].popleft()] = now_s
            begin(waiting[first])
            if not lines[size]:
                del lines[size]
        if not lines:
            break
        end, _, one = ends[0]
        now_s += (end - had) * len(ends) / work_per_s
        had = end
        heapq.heappop(ends)
        there[one.size] -= one.load
        if there[one.size] < 1e-6:
            del there[one.size]
    return times


def _first_that_fits(
    lines: Mapping[Hashable, deque[int]], waiting: Sequence[PendingPicture], limit: LoadLimit
) -> int | None:
    heads = sorted(line[0] for line in lines.values())
    return next((head for head in heads if limit.admits(waiting[head].size, waiting[head].load)), None)


class FairQueue:
    """Pictures waiting. Not safe for several threads at once: its owner locks. `shares` says how many times
    the work of another key a key gets while both wait; 1 for those it does not name."""

    def __init__(self, shares: Mapping[str, int] | None = None) -> None:
        self._quantum = [0.0]
        self._ring = _Ring(self._quantum, shares)
        self._counts: Counter[str] = Counter()
        self._costs: defaultdict[str, float] = defaultdict(float)
        self._there: set[Entry] = set()

    def __len__(self) -> int:
        return self._counts.total()

    def count(self, key: str) -> int:
        """Pictures of one key."""
        return self._counts[key]

    def costs(self) -> dict[str, float]:
        """Work waiting, by key."""
        return dict(self._costs)

    def push(self, entry: Entry) -> None:
        """Add one at the end of its flow."""
        # The largest cost seen lets each turn serve at least one picture, so that finding the head is quick.
        self._quantum[0] = max(self._quantum[0], entry.cost)
        self._key_flow(entry.key).line(entry).entries.append(entry)
        self._there.add(entry)
        self._counts[entry.key] += 1
        self._costs[entry.key] += entry.cost

    def _key_flow(self, key: str) -> _KeyFlow:
        if key not in self._ring.flows:
            self._ring.add(key, _KeyFlow(self._quantum))
        flow = self._ring.flows[key]
        assert isinstance(flow, _KeyFlow)
        return flow

    def head(self, admits: Admits = _any_entry) -> Entry | None:
        """The one that is next of those that fit. Where all fit it stays so until it is
        taken, removed or outranked by its own key."""
        return self._ring.head(admits)

    def take(self, admits: Admits = _any_entry) -> Entry:
        """Take the head."""
        entry = self._ring.take(admits)
        self._forget(entry)
        return entry

    def remove(self, entry: Entry) -> bool:
        """Take one out, wherever it stands; whether it was there."""
        if entry not in self._there:
            return False
        self._key_flow(entry.key).line(entry).entries.remove(entry)
        self._forget(entry)
        return True

    def _forget(self, entry: Entry) -> None:
        self._there.discard(entry)
        self._counts[entry.key] -= 1
        self._costs[entry.key] -= entry.cost
        if not self._counts[entry.key]:
            del self._counts[entry.key], self._costs[entry.key]

    def in_order(self) -> list[Entry]:
        """All of them in the order in which they would be served if nothing else came and all fitted."""
        twin = self._ring.copy()
        return [twin.take(_any_entry) for _ in range(len(self))]


class Waits(Protocol):
    """A job that waits: whose it is, and its work."""

    @property
    def key(self) -> str: ...
    @property
    def work(self) -> float: ...


W = TypeVar("W", bound=Waits)


class Shares:
    """The same promise for jobs that are looked up anew each time: whose key had the least work is next.

    A key that comes to those that wait starts level with who had least of them (Goyal, Vin & Cheng 1996).
    """

    def __init__(self, shares: Mapping[str, int] | None = None) -> None:
        self._had: dict[str, float] = {}
        self._shares = shares or {}

    def begin(self, keys: Iterable[str]) -> None:
        """These are the keys that have jobs waiting now."""
        waiting = dict.fromkeys(keys)
        least = min((self._had[key] for key in waiting if key in self._had), default=0.0)
        self._had = {key: self._had.get(key, least) - least for key in waiting}

    def in_turn(self, items: Iterable[W]) -> list[W]:
        """Jobs in the order in which they are to be given; those of one key keep theirs."""
        lines: dict[str, deque[W]] = {}
        for item in items:
            lines.setdefault(item.key, deque()).append(item)
        had, order = {key: self._had.get(key, 0.0) for key in lines}, []
        while lines:
            key = min(lines, key=lambda key: had[key])
            item = lines[key].popleft()
            had[key] += _at_least_some(item) / self._shares.get(key, 1)
            order.append(item)
            if not lines[key]:
                del lines[key]
        return order

    def give(self, item: Waits) -> None:
        """A job was given."""
        share = self._shares.get(item.key, 1)
        self._had[item.key] = self._had.get(item.key, 0.0) + _at_least_some(item) / share


def _at_least_some(item: Waits) -> float:
    return max(1.0, item.work)
