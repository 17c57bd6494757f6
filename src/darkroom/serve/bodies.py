"""`Bodies`: the bodies of requests, read whole, within bounds of size, time and memory of all together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from darkroom.serve.refused import Refused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
BODY_S = 60.0
AGAIN_S = 5.0
MOST_KEYS, MOST_VALUES = 50_000, 200_000
"""Of a body in JSON, counted by its colons and commas, those in texts too."""


class Bodies:
    """All bodies of a server. What is read counts until its request is over: until then it is held."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.held_bytes = most_bytes, 0

    @contextmanager
    def place(self) -> Iterator[Body]:
        """For one request's body, let go at the end."""
        body = Body(self)
        try:
            yield body
        finally:
            self.held_bytes -= body.held_bytes


class Body:
    """One request's."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self.held_bytes = bodies, 0

    async def read(self, headers: dict[str, str], receive: Receive, most_bytes: int) -> bytes:
        """The whole of it. Refused where it is too large, too slow, or one too many; none is waited for
        where none is allowed. ConnectionError where the client leaves.
        """
        length = headers.get("content-length", "0")
        told = length.isdecimal() and len(length) <= 18 and int(length) <= most_bytes
        if not told or (not most_bytes and "transfer-encoding" in headers):
            raise _too_large(most_bytes)
        try:
            return await asyncio.wait_for(self._read(receive, most_bytes), BODY_S)
        except TimeoutError:
            raise Refused(408, "too_slow", f"the body did not arrive within {BODY_S:g} s") from None

    async def _read(self, receive: Receive, most_bytes: int) -> bytes:
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            part = message.get("body", b"")
            self._hold(len(part), most_bytes)
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    def _hold(self, num_bytes: int, most_bytes: int) -> None:
        if self.held_bytes + num_bytes > most_bytes:
            raise _too_large(most_bytes)
        if self._bodies.held_bytes + num_bytes > self._bodies.most_bytes:
            raise Refused(503, "busy", "no room for a body of this size just now", retry_after_s=AGAIN_S)
        self.held_bytes += num_bytes
        self._bodies.held_bytes += num_bytes


def check_values(content: bytes) -> None:
    """413 for a body of a million keys or values: to check them, and to tell what is wrong with each of them,
    takes the event loop many seconds, and gigabytes."""
    if content.count(b":") > MOST_KEYS or content.count(b",") > MOST_VALUES:
        raise Refused(413, "too_large", f"a body of at most {MOST_KEYS} keys and {MOST_VALUES} values")


def _too_large(most_bytes: int) -> Refused:
    told = f"a body of at most {most_bytes} bytes" if most_bytes else "no body here"
    return Refused(413, "too_large", told)
