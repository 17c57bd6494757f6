"""How many clients may be connected, and how long one may be without having asked for anything.

uvicorn bounds neither before the first request. A connection that says nothing, or its head byte by byte, is
closed after a while; where there are too many, the one that has been silent for longest makes room.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

UNREAD_S = 60
"""A client that takes nothing of its answer for so long is cut off."""
SPARE_FILES = 256
"""For the model, the jobs' database and pictures, beside connections."""


def connection(most: int, head_s: float) -> type[H11Protocol]:
    """uvicorn's connection, of which there are at most `most`, each waiting for a head `head_s` at most."""

    class Connection(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            _cut_off_who_reads_nothing(transport)
            self._wait()
            if len(self.connections) > most:
                self._make_room()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_waiting()
            elif self._waiting is None:
                self._wait()

        @property
        def idle_since_s(self) -> float | None:
            """Since when it waits for a head; None while it has a request."""
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                return None
            timers = [(self._waiting, head_s), (self.timeout_keep_alive_task, self.timeout_keep_alive)]
            return min((timer.when() - span_s for timer, span_s in timers if timer), default=0.0)

        def _wait(self) -> None:
            self._waiting = self.loop.call_later(head_s, self._drop)

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _drop(self) -> None:
            self._stop_waiting()
            self.connections.discard(self)
            self.transport.abort()

        def _make_room(self) -> None:
            """The one that has been idle for longest leaves; perhaps this one."""
            since: list[tuple[float, Any]] = [
                (one.idle_since_s, one)
                for one in self.connections
                if isinstance(one, Connection) and one.idle_since_s is not None
            ]
            min(since, key=lambda pair: pair[0], default=(0.0, self))[1]._drop()

    return Connection


def _cut_off_who_reads_nothing(transport: asyncio.Transport) -> None:
    there = transport.get_extra_info("socket")
    if there is not None and there.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)


def allowed(most: int) -> int:
    """As many connections as this process may have files for, `most` where it may have enough."""
    try:
        import resource
    except ImportError:  # no POSIX
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most + SPARE_FILES:
        soft = most + SPARE_FILES if hard == resource.RLIM_INFINITY else min(hard, most + SPARE_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft - SPARE_FILES))
