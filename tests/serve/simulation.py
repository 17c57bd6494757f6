"""Servers on a virtual clock: the real core, store, leases, keeper and engine rounds, one step at a time.

A `World` has an event loop whose time passes only when nothing is left to do, simulated threads of which one
runs at a time, a database in memory, and disks that outlive servers. All that is random comes from one seed:
delays, crashes at any write, answers that are lost, slow and full disks, steps of the clock, servers cut off
from the database for longer than a lease, drains, requests sent twice, cancellations, pictures that cannot be
made. `run(seed)` raises `Violation` where an accepted job is lost, doubled, changed or waits for ever, and
where a key that always has pictures waiting in an engine gets less than its share while another gets more;
with `crowd` there are many jobs and few faults, so that keys wait for long.

    python tests/serve/simulation.py 0:1000      # seeds; the first that fails is told, with its trace
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import json
import logging
import random
import selectors
import sys
import threading
import time as real_time
import types
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sql
import torch
from sqlalchemy.pool import StaticPool

from darkroom.errors import DarkroomError
from darkroom.sample.pictures import Picture
from darkroom.serve import shared_queue
from darkroom.serve.engine import batch, tickets
from darkroom.serve.engine import loop as engine_loop
from darkroom.serve.engine.loader import LoadedModel
from darkroom.serve.engine.tickets import Shape
from darkroom.serve.jobs import active, admission, core, results, store
from darkroom.serve.request import FINAL, PictureRequest, Refused
from darkroom.serve.settings import KeyLimits, Limits, ServeSettings

FAULTS_S, PATIENCE_S = 15.0, 600.0
"""So long faults are injected, and so long after the last one every job has to be over."""
KEYS = ("alice", "bob")
SHARES = {"carol": 2}
"""Of the keys of a crowd, where it is not 1."""
BEHIND = 6.0
"""The most that a key that always waits may fall behind another's work by share, in the largest picture's:
four for a turn each and what either may save up (Shreedhar & Varghese 1996), and two for turns that it lost
because just then no picture of its sizes fitted. Of 140 crowds the worst had 5.8."""


class Violation(AssertionError):
    """Something that must never happen."""


class Dead(BaseException):
    """In a thread of a server that was killed: nothing of it goes on."""


class _Selector(selectors.SelectSelector):
    """Waits by moving the world's clock."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Violation("nothing will ever happen again")
        self._world.now += max(0.0, timeout)
        return []


class _Loop(asyncio.SelectorEventLoop):
    """asyncio on the world's clock; its executor's threads are the world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__(_Selector(world))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._world.now

    def _write_to_self(self) -> None:
        """Nobody else runs: there is nobody to be woken from elsewhere."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        del executor  # nothing that comes here waits for anything: a turn of the loop is enough
        future = self._world.call(SERVER.get(), lambda: func(*args))
        return asyncio.wrap_future(future, loop=self)


SERVER: contextvars.ContextVar[Any] = contextvars.ContextVar("server", default=None)
WORLD: World | None = None


def world() -> World:
    assert WORLD is not None
    return WORLD


class Result(Future[Any]):
    """A future that a simulated thread may wait for; the event loop may not."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            thread = world().running
            if thread is None:
                raise Violation("the event loop waits for a thread")
            thread.wait_for(self)
        return super().result(0)


class Thread:
    """A real thread that runs only while the loop's stands still."""

    def __init__(self, of: World, server: Any, call: Any, done: Result) -> None:
        self.world, self.server, self.call, self.done = of, server, call, done
        self.go = threading.Semaphore(0)
        self.context = contextvars.copy_context()
        self.real = threading.Thread(target=self.context.run, args=(self._run,), daemon=True)
        self.real.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            self._call()
        except Dead:
            pass
        finally:
            self.world.running = None
            self.world.threads.discard(self)
            self.world.back.release()

    def _call(self) -> None:
        gone = self.world.over or (self.server is not None and self.server.dead)
        if gone or not self.done.set_running_or_notify_cancel():
            return
        try:
            value = self.call()
        except Dead:
            raise
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(value)

    def resume(self) -> None:
        """Let it run until it waits or ends; on the loop's thread."""
        assert self.world.running is None
        self.world.running = self
        self.go.release()
        self.world.back.acquire()

    def pause(self) -> None:
        """Give the turn back; on its own thread."""
        self.world.running = None
        self.world.back.release()
        self.go.acquire()
        if self.world.over or (self.server is not None and self.server.dead):
            raise Dead

    def wait_for(self, future: Future[Any]) -> None:
        future.add_done_callback(lambda _: self.world.loop.call_soon(self.resume))
        self.pause()

    def sleep(self, seconds: float) -> None:
        self.world.loop.call_later(seconds, self.resume)
        self.pause()


class Pool:
    """`ThreadPoolExecutor` in the world."""

    def __init__(self, most: int, thread_name_prefix: str = "") -> None:
        self.server, self.free = SERVER.get(), most
        self.waiting: collections.deque[tuple[Result, Any, bool]] = collections.deque()
        self.closed = False

    def submit(self, func: Any, *args: Any) -> Result:
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Result()
        waits = getattr(func, "__name__", "") in ("_keep", "_fail")  # for the store, or a full disk
        self.waiting.append((future, lambda: func(*args), waits))
        self._next()
        return future

    def _next(self) -> None:
        if self.free and self.waiting:
            self.free -= 1
            future, call, waits = self.waiting.popleft()
            future.add_done_callback(self._ended)
            (world().thread if waits else world().call)(self.server, call, future)

    def _ended(self, _: Any) -> None:
        self.free += 1
        self._next()

    def shutdown(self, wait: bool = True) -> None:
        self.closed = True
        while wait and world().running is not None and self.waiting:
            world().running.sleep(0.05)


class Signal:
    """`threading.Event` in the world."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float) -> bool:
        thread = world().running
        assert thread is not None
        end = world().now + timeout
        while not self._set and world().now < end:
            thread.sleep(min(0.2, end - world().now + 1e-6))
        return self._set


class Clock:
    """The `time` module in the world."""

    strftime, gmtime = staticmethod(real_time.strftime), staticmethod(real_time.gmtime)

    def time(self) -> float:
        return world().now + world().offset

    def monotonic(self) -> float:
        return world().now

    perf_counter = monotonic


# ---- what a server is made of


class Disk:
    """The files of jobs, which outlive the server; each write may be slow, fail, or be the last."""

    folder = None
    secret = b"s" * 32

    def __init__(self, of: World) -> None:
        self.world, self.files = of, collections.defaultdict(dict)

    def write(self, uid: str, files: dict[str, bytes]) -> int:
        server = SERVER.get()
        for name, content in files.items():
            self.world.delay(server)
            self.world.may_crash(server)
            if self.world.chance(0.05):
                raise OSError(28, "No space left on device")
            self.files[uid][name] = content
            self.world.may_crash(server)
        return sum(map(len, files.values()))

    def read(self, uid: str, name: str) -> bytes | None:
        if world().chance(0.03):
            raise OSError(world().draw.choice([5, 24]), "it cannot be read just now")
        return self.files.get(uid, {}).get(name)

    def delete(self, uid: str, names: Any = None) -> None:
        self.world.may_crash(SERVER.get())
        if names is None:
            self.files.pop(uid, None)
        for name in names or ():
            self.files[uid].pop(name, None)

    def uids(self) -> list[str]:
        return [uid for uid in self.files if not uid.startswith(results.PROBE_START)]

    def close(self) -> None:
        """Nothing is held."""


class Database(store.JobStore):
    """The real statements and transactions; when they run, and whether their answer comes, is drawn."""

    def __init__(self, of: World, name: str) -> None:
        self.world, self.home, self.server, self.trouble = of, SERVER.get(), name, None
        self._engine, self._called = of.database, None  # other servers add jobs to it

    def close(self) -> None:
        """The world's database stays."""

    def do(self, action: Any) -> Any:
        future = Result()
        future.set_running_or_notify_cancel()
        self.world.loop.call_later(self.world.draw.uniform(0, 0.02), self._perform, action, future)
        return future

    def _perform(self, action: Any, future: Result) -> None:
        if self.home.dead:
            return
        if self.world.now < self.home.cut_off_until or self.world.chance(0.02):
            self._fail_so(future)
        elif self.world.chance(0.01):
            self.world.crash(self.home, "before a commit")
        elif self.world.chance(0.01):
            self._commit([(action, Future())])
            self.world.crash(self.home, "after a commit")
        elif self.world.chance(0.015):
            self.world.tell("an answer is lost", self.home)
            self._commit([(action, Future())])
            self._fail_so(future)
        else:
            self._commit([(action, future)])

    def _fail_so(self, future: Result) -> None:
        self.trouble = "unreachable"
        future.set_exception(store.StorageError("unreachable"))


class Row:
    """A picture on its way."""

    def __init__(self, steps: int, size: Any) -> None:
        self.steps, self.size, self.step = steps, size, 0
        self.adapters, self.controls = (((1, 1.0),) if steps % 3 == 0 else ()), ()

    @property
    def done(self) -> bool:
        return self.step >= self.steps


class Bucket(batch.Bucket):
    """Steps that are counted, not computed; some fail, and take the row that is to blame with them."""

    def step(self, unet: Any, pace: Any = lambda: None) -> Any:
        stepped = super().step(unet, pace)
        stepped.wall_s += 0.05
        return stepped

    def _together(self, unet: Any, now: Any, stepped: Any) -> None:
        if world().chance(0.004):
            raise RuntimeError("a step failed")
        for ticket in now:
            ticket.row.step += 1

    def _apart(self, unet: Any, now: Any, stepped: Any) -> None:
        for ticket in now:
            if world().chance(0.2):
                stepped.failed.append((ticket, DarkroomError("a row failed")))
            else:
                ticket.row.step += 1


class Queue(tickets.FairQueue):
    """Counts the work that keys are given by share, in every stretch of time in which they wait together:
    each time that one is given a picture the other has one of its size waiting, which would fit too.
    """

    def __init__(self, shares: Any = None) -> None:
        super().__init__(shares)
        self._lead: dict[tuple[str, str], tuple[float, float]] = {}  # of a before b: now, the least so far
        self._largest = 0.0
        self.suspicion = False  # then one job is drawn alone, by intent

    def push(self, entry: Any) -> None:
        super().push(entry)
        self._largest = max(self._largest, entry.cost)

    def take(self, admits: Any = tickets._any_entry) -> Any:
        waiting = {(one.key, one.size) for one in self._there}
        entry = super().take(admits)
        if self.suspicion:
            self._lead.clear()
        else:
            self._note(entry, waiting)
        return entry

    def _note(self, entry: Any, waiting: set[tuple[str, Any]]) -> None:
        work = entry.cost / SHARES.get(entry.key, 1) / self._largest
        keys = {key for key, _ in waiting}
        for pair in [pair for pair in self._lead if not set(pair) <= keys]:
            del self._lead[pair]
        for other in sorted(keys - {entry.key}):
            behind, least = self._lead.get((other, entry.key), (0.0, 0.0))
            self._lead[other, entry.key] = behind - work, min(least, behind - work)
            if (other, entry.size) not in waiting:
                self._lead.pop((entry.key, other), None)
                continue
            lead, least = self._lead.get((entry.key, other), (0.0, 0.0))
            self._lead[entry.key, other] = lead + work, least
            world().given_together += work
            world().furthest_behind = max(world().furthest_behind, lead + work - least)
            if lead + work - least > BEHIND and not world().unfair:
                world().unfair = (
                    f"at {world().now:.3f} s {other} always has pictures waiting, and got "
                    f"{lead + work - least:.1f} times the largest one's work less, by share, than {entry.key}"
                )


class Studio:
    """Texts and pictures without a model."""

    stopping = False

    def prepare(self, works: Any, *_: Any) -> list[Any]:
        failed = []
        for work in works:
            if world().chance(0.01):
                failed.append((work, DarkroomError("no such picture")))
            elif work.prepared is None:
                work.prepared = types.SimpleNamespace(table=range(work.request.steps), hires=None, notes=())
        return failed

    def start(self, ticket: Any) -> None:
        shape = ticket.work.shape
        ticket.row = Row(shape.steps, (shape.width, shape.height))

    def finish(self, done: Any) -> list[Any]:
        for ticket in done:
            work = ticket.work
            told = {"prompt": work.request.prompt, "seed": work.request.seed + ticket.index}
            work.pictures[ticket.index] = Picture(None, told, None)  # type: ignore[arg-type]
            ticket.done = True
        return []

    def preview(self, _: Any) -> list[Any]:
        return []


class Condition:
    """Held by whoever runs: nobody else does."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait(self, _: float) -> None: ...
    def notify(self) -> None: ...


class Lanes:
    """Steps that take their time, several at once."""

    def __init__(self, count: int, server: Any) -> None:
        self.count, self.free, self.server, self.on_free = count, count, server, lambda: None

    def pace(self) -> None:
        """A step is over when its call returns."""

    def put(self, task: Any) -> None:
        self.free -= 1
        slow = 5.0 if world().chance(0.01) else 0.2
        world().loop.call_later(world().draw.uniform(0.001, slow), self._run, task)

    def _run(self, task: Any) -> None:
        if not self.server.dead:
            task()
            self.free += 1
            self.on_free()

    def close(self, _: float = 0) -> bool:
        return True


class Aside:
    """One task after the other."""

    def __init__(self, server: Any) -> None:
        self.server, self.tasks, self.busy = server, collections.deque(), False

    def put(self, task: Any) -> None:
        self.tasks.append(task)
        self._next()

    def _next(self) -> None:
        if self.tasks and not self.busy:
            self.busy = True
            world().loop.call_later(world().draw.uniform(0.001, 0.1), self._run)

    def _run(self) -> None:
        if not self.server.dead:
            self.tasks.popleft()()
            self.busy = False
            self._next()

    def settle(self) -> None:
        """There is no device to wait for."""

    def taken(self, tensors: Any) -> None:
        """Nor memory of a stream."""

    def close(self, _: float = 0) -> bool:
        return True


class Engine(engine_loop.Engine):
    """The real rounds, one after the other as they are called for."""

    def __init__(self, metrics: Any, given: Any, server: Any, shares: Any) -> None:
        model = types.SimpleNamespace(sample_size=64)
        backend = types.SimpleNamespace(unet=None, device=torch.device("cpu"))
        with mock.patch.object(engine_loop, "Studio", return_value=Studio()):
            super().__init__(
                model,  # type: ignore[arg-type]
                backend,  # type: ignore[arg-type]
                capacity=world().draw.choice([2, 4, 8]),
                metrics=metrics,
                on_tick=given.on_tick,
                on_stop=given.on_stop,
                shares=shares,
                places=(Lanes(world().draw.choice([1, 2]), server), Aside(server)),
            )
        self.server, self._planned = server, False
        self._condition = Condition()  # type: ignore[assignment]

    def start(self) -> None:
        self._plan(0.01)

    def stop(self, within_s: float = 0) -> bool:
        self._stopping = self.studio.stopping = True
        return True

    def _room(self) -> Any:
        admits = super()._room()
        self._queue.suspicion = bool(self._suspects)  # type: ignore[attr-defined]
        return admits

    def _call(self) -> None:
        self._called = True
        self._plan(world().draw.uniform(0, 0.01))

    def _plan(self, after_s: float) -> None:
        if not self._planned:
            self._planned = True
            world().loop.call_later(after_s, self._once)

    def _once(self) -> None:
        self._planned = False
        if not (self._stopping or self.server.dead):
            self._round()
            self._plan(0.01 if self._buckets else engine_loop.IDLE_S)


def open_model(settings: Any, metrics: Any, given: Any) -> LoadedModel:
    server = SERVER.get()
    model: Any = types.SimpleNamespace(name="sim")
    return LoadedModel(model, Engine(metrics, given, server, settings.limits.shares), None)


class Loop(engine_loop.Loop):
    async def in_daemon_thread(self, call: Any, *arguments: Any) -> Any:
        await asyncio.sleep(world().draw.uniform(0.1, 3))  # a model is loaded
        return await self._loop.run_in_executor(None, call, *arguments)


class Core(core.Core):
    async def _shape(self, request: Any, uploads: Any) -> Shape:
        await asyncio.sleep(world().draw.uniform(0, 0.02))
        return Shape(request.width, request.height, request.steps, 2)


def open_stores(settings: Any) -> Any:
    kept = Database(world(), settings.name)
    return world().disk, kept


# ---- the world


class Server:
    """One process of a server: dies once."""

    def __init__(self, number: int) -> None:
        self.number, self.dead, self.cut_off_until = number, False, 0.0
        self.core: Core | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.died = world().loop.create_future()

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(SERVER.set, self)
        task = world().loop.create_task(coroutine, context=context)
        self.tasks.add(task)
        return task


class World:
    """One schedule: everything that happens follows from the seed."""

    def __init__(self, seed: int, crowd: bool = False) -> None:
        self.draw, self.crowd = random.Random(seed), crowd
        self.furthest_behind = self.given_together = 0.0
        self.unfair = ""
        self.now, self.offset, self.furthest = 0.0, 1.8e9, 1.8e9
        self.shared = self.draw.random() < 0.5
        self.faulty, self.over = True, False
        self.strength = self.draw.choice([0.0, 0.1] if crowd else [0.0, 0.3, 1.0, 1.0, 2.0])
        self.back, self.running = threading.Semaphore(0), None
        self.threads: set[Thread] = set()
        self.trace: list[str] = []
        self.loop = _Loop(self)
        self.disk = Disk(self)
        self.database = sql.create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
        )
        store.METADATA.create_all(self.database)
        self.servers: dict[int, Server] = {}

    def tell(self, what: str, server: Any = None) -> None:
        whose = "" if server is None else f" at server {server.number}"
        self.trace.append(f"{self.now:8.3f} {what}{whose}")

    def chance(self, part: float) -> bool:
        return self.draw.random() < part * self.strength and self.faulty

    def delay(self, server: Any) -> None:
        if self.running is not None:
            self.running.sleep(self.draw.uniform(0.5, 8) if self.chance(0.03) else self.draw.uniform(0, 0.02))

    def may_crash(self, server: Any) -> None:
        if server is not None and self.chance(0.01):
            self.crash(server, "at a write")
            raise Dead

    def crash(self, server: Server, where: str) -> None:
        if not server.dead:
            self.tell(f"crash {where}", server)
            self.bury(server)

    def bury(self, server: Server) -> None:
        server.dead = True
        self.servers.pop(server.number, None)
        for task in server.tasks | (server.core._loop._tasks if server.core else set()):
            task.cancel()
        if not server.died.done():
            server.died.set_result(None)

    def thread(self, server: Any, call: Any, done: Result) -> None:
        """Run what may wait."""
        started = Thread(self, server, call, done)
        self.threads.add(started)
        self.loop.call_later(self.draw.uniform(0, 0.01), started.resume)

    def call(self, server: Any, call: Any, done: Result | None = None) -> Result:
        """Run what does not wait, in one turn of the loop."""
        done = done or Result()
        self.loop.call_later(self.draw.uniform(0, 0.01), self._called, server, call, done)
        return done

    def _called(self, server: Any, call: Any, done: Result) -> None:
        if (server is not None and server.dead) or not done.set_running_or_notify_cancel():
            return
        try:
            value = call()
        except Dead:
            return
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(value)

    async def start(self, number: int) -> None:
        server = self.servers[number] = Server(number)
        settings = ServeSettings(
            model="sim",
            state=Path("/sim"),
            shared=self.shared,
            jobs="sqlite://" if self.shared else None,
            lease_s=2.0,
            provenance=False,
            min_free_bytes=0,
            limits=Limits(
                queue=90 if self.crowd else 12,
                queue_per_key=30 if self.crowd else 8,
                attempts=1000,
                rate_per_minute=1e5,
                keys={key: KeyLimits(share=share) for key, share in SHARES.items()},
            ),
        )
        self.tell("started", server)

        async def life() -> None:
            server.core = await self.loop.run_in_executor(None, Core, settings)
            await server.core.start()

        task = server.spawn(life())
        await asyncio.wait({task, server.died}, return_when=asyncio.FIRST_COMPLETED)

    async def stop(self, server: Server) -> None:
        """In good order, as SIGTERM does."""
        self.tell("drains", server)
        assert server.core is not None

        async def end() -> None:
            await server.core.drain(self.draw.uniform(0, 3))
            await server.core.close()

        task = server.spawn(end())
        await asyncio.wait({task, server.died}, return_when=asyncio.FIRST_COMPLETED)
        self.tell("stopped", server)
        self.bury(server)

    async def asked(self, call: Any) -> Any:
        """A server's answer to a request; None where none came."""
        able = [
            one for one in self.servers.values() if one.core is not None and hasattr(one.core, "_loading")
        ]
        if not able:
            return None
        server = self.draw.choice(able)
        task = server.spawn(call(server.core))
        await asyncio.wait({task, server.died}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.cancelled():
            return None
        try:
            return task.result()
        except Refused as refused:
            return refused


class Client:
    """Asks for one job until it is accepted, perhaps twice, perhaps to cancel it, until it is over."""

    def __init__(self, of: World, number: int) -> None:
        draw = of.draw
        keys = (*KEYS, *SHARES) if of.crowd else KEYS
        self.world, self.id, self.key = of, f"job-{number}", draw.choice(keys)
        side = draw.choice([64, 64, 96])
        self.request = PictureRequest(
            prompt=f"picture {number}",
            num=draw.choice([1, 1, 2, 3]),
            steps=draw.randint(1, 6),
            width=side,
            height=side,
            seed=draw.choice([None, number * 100]),
        )
        self.cancels = draw.random() < 0.15
        self.uid: str | None = None
        self.final: Any = None

    async def run(self) -> None:
        draw = self.world.draw
        await asyncio.sleep(draw.uniform(0, 3 if self.world.crowd else 10))
        while self.uid is None:
            both = [self._submit()] * 1 if draw.random() < 0.8 else [self._submit(), self._submit()]
            for answer in await asyncio.gather(*both):
                self._accepted(answer)
            await asyncio.sleep(draw.uniform(0.1, 2))
        if self.cancels:
            await asyncio.sleep(draw.uniform(0, 3))
            await self.world.asked(lambda core: core.cancel(self.id, key=self.key))
        while self.final is None:
            await asyncio.sleep(draw.uniform(0.05, 3))
            if draw.random() < 0.1:
                self._accepted(await self._submit())
            self.look(await self.world.asked(lambda core: core.get(self.id, key=self.key)))

    async def _submit(self) -> Any:
        return await self.world.asked(lambda core: core.submit(self.request, key=self.key, job_id=self.id))

    def _accepted(self, answer: Any) -> None:
        if answer is None or (isinstance(answer, Refused) and answer.status != 409):
            return
        if isinstance(answer, Refused):
            raise Violation(f"{self.id}: {answer}")
        if self.uid is None:
            self.world.tell(f"{self.id} accepted as {answer.uid[:6]}")
        elif self.uid != answer.uid:
            raise Violation(f"{self.id} is two jobs: {self.uid} and {answer.uid}")
        self.uid = answer.uid

    def look(self, job: Any) -> None:
        """What a server says of the job: an end is for good."""
        if job is None or isinstance(job, Refused):
            if isinstance(job, Refused) and job.status == 404:
                raise Violation(f"{self.id} was accepted and is unknown")
            return
        said = (job.state, tuple(one["seed"] for one in job.pictures), (job.error or {}).get("code"))
        if job.over and self.final is None:
            self.final = said
            self.world.tell(f"{self.id} over: {said}")
        elif self.final is not None and said != self.final:
            raise Violation(f"{self.id} was {self.final}, and now is {said}")


async def _schedule(of: World) -> None:
    servers = of.draw.choice([2, 3]) if of.shared else 1
    for number in range(servers):
        await of.start(number)
    clients = [Client(of, i) for i in range(60 if of.crowd else of.draw.randint(3, 10))]
    running = [asyncio.ensure_future(client.run()) for client in clients]
    while of.now < FAULTS_S:
        await asyncio.sleep(of.draw.uniform(0.2, 4))
        await _disturb(of, servers)
    of.faulty, of.strength = False, 0.0
    for server in of.servers.values():
        server.cut_off_until = 0.0
    for number in range(servers):
        if number not in of.servers:
            await of.start(number)
    of.tell("no more faults")
    _, late = await asyncio.wait(running, timeout=PATIENCE_S, return_when=asyncio.FIRST_EXCEPTION)
    for task in running:
        if task.done():
            task.result()
    if late:
        waiting = [client.id for client in clients if client.final is None]
        raise Violation(f"waiting for ever: {waiting}")
    await _check(of, clients)


async def _disturb(of: World, servers: int) -> None:
    for number in range(servers):
        if number not in of.servers:
            await of.start(number)
    alive = [one for one in of.servers.values() if one.core is not None]
    if not alive or of.strength == 0:
        return
    server, what = of.draw.choice(alive), of.draw.random() / of.strength
    if what < 0.1:
        of.crash(server, "from outside")
    elif what < 0.2 and hasattr(server.core, "_loading"):
        await of.stop(server)
    elif what < 0.3:
        of.tell("cut off from the database", server)
        server.cut_off_until = of.now + of.draw.uniform(0.5, 8)
    elif what < 0.4:
        step = of.draw.choice([-3600, -5, -1, 1, 5, 3600])
        of.tell(f"the clock steps by {step} s")
        of.offset += step
        of.furthest = max(of.furthest, of.offset)


async def _check(of: World, clients: list[Client]) -> None:
    """The database and the disk at the end, by their own words."""
    with of.database.connect() as connection:
        rows = {(row.key, row.id): row for row in connection.execute(sql.select(store.JOBS))}
    if len(rows) != len(clients):
        raise Violation(f"{len(clients)} jobs were asked for, {len(rows)} are there")
    for client in clients:
        row = rows[client.key, client.id]
        told = json.loads(row.result)
        assert client.final is not None
        if (row.uid, row.state) != (client.uid, client.final[0]):
            raise Violation(
                f"{client.id}: {row.uid} {row.state}, but {client.uid} {client.final[0]} was told"
            )
        if row.state not in FINAL or (row.state == "cancelled" and not client.cancels):
            raise Violation(f"{client.id} is {row.state}")
        if row.state == "failed" and told["error"]["code"] != "failed":
            raise Violation(f"{client.id} failed: {told['error']}")
        if row.state == "done":
            seed = json.loads(row.request)["seed"]
            if client.request.seed is not None and seed != client.request.seed:
                raise Violation(f"{client.id} has another seed")
            for i in range(client.request.num):
                file = of.disk.read(row.uid, f"{i}.png")
                want = {"prompt": client.request.prompt, "seed": seed + i}
                if file is None or json.loads(file) != want:
                    raise Violation(f"{client.id}: picture {i} is {file!r}")


def _patches() -> contextlib.ExitStack:
    stack, clock = contextlib.ExitStack(), Clock()
    timed = (core, active, admission, results, active, results, store, shared_queue)
    for module in (*timed, engine_loop, tickets, batch):
        stack.enter_context(mock.patch.object(module, "time", clock))
    waiting = types.SimpleNamespace(Event=Signal)
    changes: tuple[tuple[Any, str, Any], ...] = (
        (results, "ThreadPoolExecutor", Pool),
        (results, "threading", waiting),
        (engine_loop, "ThreadPoolExecutor", Pool),
        (shared_queue, "CLAIM_S", 0.4),  # the statement is most of a schedule's time
        (core, "Loop", Loop),
        (core, "open_stores", open_stores),
        (core.opening, "open_model", open_model),
        (engine_loop, "Bucket", Bucket),
        (engine_loop, "FairQueue", Queue),
        (engine_loop, "bucket_of", lambda row: row.size),
        (results.Hooks, "png", lambda _, picture, origin=None: json.dumps(picture.parameters).encode()),
        (core.secrets, "randbelow", lambda most: world().draw.randrange(most)),
        (core.uuid, "uuid4", lambda: types.SimpleNamespace(hex=f"{world().draw.getrandbits(128):032x}")),
    )
    for owner, name, new in changes:
        stack.enter_context(mock.patch.object(owner, name, new))
    return stack


def run(seed: int, *, crowd: bool = False) -> World:
    """One schedule, or one of a crowd. `Violation` where something happened that must not, with its trace."""
    global WORLD
    logging.getLogger("darkroom.serve").setLevel(logging.CRITICAL + 1)
    WORLD = made = World(seed, crowd)
    problems: list[BaseException] = []

    def noted(_: Any, told: dict[str, Any]) -> None:
        error = told.get("exception")
        if error is not None and not isinstance(error, (Dead, asyncio.CancelledError)):
            problems.append(error)

    made.loop.set_exception_handler(noted)
    try:
        with _patches():
            made.loop.run_until_complete(_schedule(made))
        if problems:
            raise Violation("an error that nobody caught")
        if made.unfair:
            raise Violation(made.unfair)
    except Violation as error:
        trace = "\n".join(made.trace)
        raise Violation(f"seed {seed}: {error}\n{trace}") from (problems or [error])[0]
    finally:
        _end(made)
    return made


def _end(made: World) -> None:
    """No thread and no task of a world outlives it."""
    made.over = True
    for server in list(made.servers.values()):
        made.bury(server)
    for thread in list(made.threads):
        made.running = thread
        thread.go.release()
        made.back.acquire()
    for task in asyncio.all_tasks(made.loop):
        task.cancel()
    made.faulty = False
    made.loop._ready.clear()  # type: ignore[attr-defined]
    made.loop.close()
    made.database.dispose()


def main(seeds: str) -> int:
    first, _, last = seeds.partition(":")
    begun = real_time.perf_counter()
    for number in range(int(first), int(last or int(first) + 1)):
        try:
            run(number)
        except Violation as error:
            print(error)
            return 1
    print(f"{seeds}: no violation, {real_time.perf_counter() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
