"""`Loop`: the event loop as the engine's threads and the core's coroutines use it, and its ticks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
TICK_S = 0.03  # watchers get an event at most so often
LOOK_S = 1.0  # and look by themselves so often


class Loop:
    """Tasks, calls from other threads, and work that blocks in threads; of use from `begin` on."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tick: asyncio.Future[None] | None = None
        self._ticked_s = 0.0
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="darkroom-files")

    def begin(self) -> None:
        """In the event loop that all of this belongs to."""
        self._loop = asyncio.get_running_loop()
        self._tick = self._loop.create_future()

    def end_tasks(self) -> None:
        """Cancel what still runs."""
        for task in list(self._tasks):
            task.cancel()

    def close(self) -> None:
        """Wait for the threads."""
        self._pool.shutdown(wait=True)

    def soon(self, call: Callable[[], Any]) -> None:
        """Call it in the loop, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: the job stays in the store
            self._loop.call_soon_threadsafe(call)

    def later(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> asyncio.TimerHandle:
        """Call it in the loop after so long."""
        return self._loop.call_later(seconds, call, *arguments)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine as a task that is held on to."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What blocks, in a thread."""
        return await self._loop.run_in_executor(self._pool, call, *arguments)

    async def in_daemon_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """What may take minutes, in a thread of its own that the end of the process does not wait for."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who waits may leave: the thread goes on until it is through

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="darkroom-daemon", daemon=True).start()
        return await asyncio.wrap_future(future)

    # ---- ticks

    def on_tick(self) -> None:
        """On the engine's thread, after each step while somebody watches."""
        now = time.monotonic()
        if now - self._ticked_s > TICK_S:
            self._ticked_s = now
            self.soon(self.tick)

    def tick(self) -> None:
        """Something has changed: watchers look."""
        if self._tick is not None and not self._tick.done():
            self._tick.set_result(None)

    async def next_tick(self, at_most_s: float = LOOK_S) -> None:
        """Until something changes, or so long."""
        if self._tick is None or self._tick.done():
            self._tick = self._loop.create_future()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._tick), at_most_s)
