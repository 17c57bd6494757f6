"""`Guard`: stands before every route. Nothing passes but health and signed pictures unless it may.

It asks for a key where there are keys; refuses what a foreign web page or a rebound name sends; bounds how
many requests are under way; and has the body read whole (`bodies`), so that no handler ever waits for a slow
or endless client. Who came in without a key sends none.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from darkroom.errors import InputError
from darkroom.hardware.system import allow_open_files, read_typed
from darkroom.serve import logs
from darkroom.serve.logs import Traces, trace_id
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import Refused
from darkroom.serve.settings import Limits

LOG = logging.getLogger("darkroom.serve")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Check = Callable[[MutableMapping[str, Any], Mapping[str, str], bytes], Awaitable[None]]
"""Of a request's scope, headers and body: Refused before anything else reads them."""

SIGNED = "/signed/"
ANONYMOUS = "local"
"""The caller's name where the server has no keys."""
PLATFORM = "platform"
"""The caller's name where a platform let it in."""
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
"""A host, perhaps with its port."""
SAFETY = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)


@dataclass
class _Sent:
    """What a request was answered with, as it goes out."""

    request_id: str
    began_s: float = field(default_factory=time.monotonic)
    status: int = 0
    bytes: int = 0


class Guard:
    """ASGI middleware. `open_paths` may be read without a key, and always; `hosts` are names that a server
    without keys answers to; who comes to `platform_paths` was let in by the platform that the server runs on.
    A platform's server without keys answers at those and at the open paths only. `probe_paths` ask how the
    server is. `check` may refuse what has passed, from its body as it came.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        metrics: Metrics,
        keys: Keys | None,
        limits: Limits,
        origins: Iterable[str] = (),
        hosts: Iterable[str] = (),
        open_paths: Iterable[str] = (),
        platform_paths: Iterable[str] = (),
        probe_paths: Iterable[str] = (),
        traces: Traces | None = None,
        check: Check | None = None,
    ) -> None:
        self._traces, self._check = traces, check
        self.app, self.metrics, self.keys, self.limits = app, metrics, keys, limits
        self.origins = {origin.lower().rstrip("/") for origin in origins}
        self.hosts = {"localhost", *(host.lower() for host in hosts)}
        self.open_paths = set(open_paths)
        self.platform_paths = set(platform_paths)
        self.probe_paths = set(probe_paths)
        self._bodies = Bodies(limits.bodies_bytes)
        self._under_way = 0
        self._by_key: Counter[str] = Counter()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = _headers(scope)
        notes = logs.RequestNotes(logs.request_id(headers.get("x-request-id")))
        if self._traces is not None and scope["path"] not in (*self.probe_paths, "/metrics"):
            notes.trace = self._traces.request(_method(scope), headers)
        sent = _Sent(notes.id)
        token = logs.NOTES.set(notes)
        self._under_way += 1
        try:
            await self._answer(scope, headers, receive, self._noting(scope, send, sent))
        finally:
            self._under_way -= 1
            logs.NOTES.reset(token)
            self._log_request(scope, notes, sent)

    def _log_request(self, scope: MutableMapping[str, Any], notes: logs.RequestNotes, sent: _Sent) -> None:
        """Count the request, and write its line. Probes are counted apart: one before the model is loaded
        is no refusal, and lines of those that went well are for debugging only."""
        seconds = time.monotonic() - sent.began_s
        probe = scope["path"] in self.probe_paths
        route = getattr(scope.get("route"), "path", "other")
        if not probe:
            self.metrics.request_seconds.labels(route).observe(seconds)
            if notes.refused is not None:
                self.metrics.refused.labels(notes.refused).inc()
        quiet = probe or (route == "/metrics" and sent.status < 400)
        fields = {
            "request_id": notes.id,
            "method": scope["method"],
            "path": scope["path"][:500],
            "route": route,
            "status": sent.status or 499,
            "key": scope.get("state", {}).get("key") or None,
            "client": (scope.get("client") or (None,))[0],
            "seconds": round(seconds, 6),
            "bytes": sent.bytes,
            "jobs": notes.jobs or None,
            "sha256": notes.hashes or None,
            "refused": notes.refused,
            "why": notes.reason,
        }
        if self._traces is not None and notes.trace is not None:
            self._traces.answered(notes.trace, _method(scope), fields)
            fields["trace_id"] = trace_id(notes.trace)
        logs.event("request", logging.DEBUG if quiet else logging.INFO, **fields)

    async def _answer(
        self, scope: MutableMapping[str, Any], headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        with self._bodies.place() as body, ExitStack() as held:
            is_read = False
            try:
                caller = self._caller(scope, headers)
                if self._under_way > self.limits.requests and not self._is_open(scope):
                    raise Refused(503, "busy", "too many requests are under way", retry_after_s=AGAIN_S)
                held.enter_context(self._share_of(caller))
                scope.setdefault("state", {})["key"] = caller
                scope["state"]["address"] = self._address(scope, headers)
                content = await body.read(headers, receive, self.limits.body_bytes if caller else 0)
                is_read = True
                if not headers.get("content-type", "").lower().startswith("multipart/"):
                    check_values(content)
                if self._check is not None:
                    await self._check(scope, headers, content)
            except Refused as refused:
                await self._refuse(refused, send, close=not is_read)
                return
            except ConnectionError:
                return
            await self.app(scope, _replay(content, receive), send)

    @contextmanager
    def _share_of(self, caller: str) -> Iterator[None]:
        """While a request of a key is under way; 429 for one of several keys that has half of all already."""
        shares = caller and self.keys is not None and self.keys.several
        if shares and self._by_key[caller] >= max(1, self.limits.requests // 2):
            message = f"{self._by_key[caller]} requests with key '{caller}' are under way"
            raise Refused(429, "too_many_requests", message, retry_after_s=AGAIN_S)
        self._by_key[caller] += 1
        try:
            yield
        finally:
            self._by_key[caller] -= 1

    def _caller(self, scope: MutableMapping[str, Any], headers: dict[str, str]) -> str:
        """The name of the caller's key, empty where none was needed; Refused where it may not come in."""
        path = scope["path"]
        self._check_origin(headers)
        if path in self.platform_paths:
            return PLATFORM
        if self.keys is None and not self.platform_paths:
            self._check_local(scope, headers)
            return ANONYMOUS
        if self._is_open(scope) or (path.startswith(SIGNED) and self.keys is not None):
            return ""
        if self.keys is None:
            raise Refused(403, "closed", "without keys only the platform's routes and health answer here")
        given = _credential(headers)
        if given is None:
            raise Refused(401, "no_key", "a key is needed: Authorization: Bearer KEY")
        name = self.keys.name_of(given)
        if name is None:
            raise Refused(401, "invalid_key", "this key is not known")
        return name

    def _is_open(self, scope: MutableMapping[str, Any]) -> bool:
        return scope["path"] in self.open_paths and scope["method"] in ("GET", "HEAD")

    def _check_origin(self, headers: dict[str, str]) -> None:
        """A web page of another origin (`null` is one) must not use the reader's access to this server."""
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
                raise Refused(403, "foreign_origin", "requests of other web origins are not served")
            return
        lowered = origin.lower()
        own = {f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")}
        if lowered not in own and lowered not in self.origins:
            raise Refused(403, "foreign_origin", "requests of other web origins are not served")

    def _check_local(self, scope: MutableMapping[str, Any], headers: dict[str, str]) -> None:
        """Without keys only this machine, by a name of its own: a foreign one may have been bent to it."""
        client = scope.get("client")
        if client and is_public(client[0]):
            raise Refused(403, "foreign_address", "without keys the server answers to its own machine only")
        if not self._is_own(headers.get("host", "")):
            raise Refused(403, "foreign_host", "without keys the server answers to its local names only")

    def _address(self, scope: MutableMapping[str, Any], headers: dict[str, str]) -> str:
        """The server's address as the client used it, such as https://pictures.example.

        What a proxy says of that (`X-Forwarded-Proto` and `-Host`) counts where it runs on this machine.
        Without keys the name must be one of the server's own, from any client.
        """
        host, scheme = headers.get("host", ""), str(scope.get("scheme", "http"))
        client = scope.get("client")
        if client and not is_public(client[0]):
            forwarded = headers.get("x-forwarded-host", "").partition(",")[0].strip()
            if ADDRESS.fullmatch(forwarded) and (self.keys is not None or self._is_own(forwarded)):
                host = forwarded
            proto = headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
            scheme = proto if proto in ("http", "https") else scheme
        if not ADDRESS.fullmatch(host):
            name, port = (scope.get("server") or ("localhost", None))[:2]
            name = f"[{name}]" if ":" in name else name
            host = name if port is None else f"{name}:{port}"
        return f"{scheme}://{host}"

    def _is_own(self, host: str) -> bool:
        """Whether a name, perhaps with its port, is one that this server answers to without keys."""
        name = _host_name(host)
        return name in self.hosts or not is_public(name)

    def _noting(self, scope: MutableMapping[str, Any], send: Send, sent: _Sent) -> Send:
        """Count answers, and add the request's id and the headers that keep browsers from guessing."""
        method = _method(scope)

        async def noted(message: Message) -> None:
            """Send a message on, with the safe headers, and count it."""
            if message["type"] == "http.response.start":
                sent.status = message["status"]
                self.metrics.requests.labels(method, str(message["status"])).inc()
                there = {name for name, _ in message.get("headers", ())}
                more = [pair for pair in SAFETY if pair[0] not in there]
                own = (b"x-request-id", sent.request_id.encode())
                message["headers"] = [*message.get("headers", ()), *more, own]
            else:
                sent.bytes += len(message.get("body", b""))
            await send(message)

        return noted

    async def _refuse(self, refused: Refused, send: Send, *, close: bool) -> None:
        """Answer with a refusal, and `close` the connection where the rest of the body is not read."""
        logs.refused(refused.code, refused.logged)
        body = json.dumps(error_object(refused)).encode()
        headers = [(name.lower().encode(), value.encode()) for name, value in refused.headers.items()]
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        headers += [(b"connection", b"close")] if close else []
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _method(scope: MutableMapping[str, Any]) -> str:
    """A request's method, of those that there are: strangers' own would fill the metrics."""
    return scope["method"] if scope["method"] in ("GET", "PUT", "POST", "DELETE", "HEAD") else "other"


def error_object(refused: Refused) -> dict[str, Any]:
    """A refusal as OpenAI's clients know it; the native endpoints speak the same."""
    content = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": content}


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, once; after it whatever comes: that the client has left."""
    left = [True]

    async def replayed() -> Message:
        if left:
            left.clear()
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _credential(headers: dict[str, str]) -> str | None:
    """A key as bearer, as `x-api-key`, or as the password of basic authorization."""
    kind, _, rest = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and rest.strip():
        return rest.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2] or None
        except (binascii.Error, UnicodeDecodeError):
            return None
    return headers.get("x-api-key") or None


def _host_name(host: str) -> str:
    """A Host header's name without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


@lru_cache(maxsize=1024)
def is_public(host: str) -> bool:
    """Whether a server on this address can be reached from other machines."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


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
        """For one request's body, released at the end."""
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
        is_allowed = length.isdecimal() and len(length) <= 18 and int(length) <= most_bytes
        if not is_allowed or (not most_bytes and "transfer-encoding" in headers):
            raise _too_large(most_bytes)
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read(receive, most_bytes)
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
            raise Refused(503, "busy", "no memory for a body of this size just now", retry_after_s=AGAIN_S)
        self.held_bytes += num_bytes
        self._bodies.held_bytes += num_bytes


def check_values(content: bytes) -> None:
    """413 for a body of a million keys or values: to check them, and to tell what is wrong with each of them,
    takes the event loop many seconds, and gigabytes."""
    if content.count(b":") > MOST_KEYS or content.count(b",") > MOST_VALUES:
        raise Refused(413, "too_large", f"a body of at most {MOST_KEYS} keys and {MOST_VALUES} values")


def _too_large(most_bytes: int) -> Refused:
    allowed = f"a body of at most {most_bytes} bytes" if most_bytes else "no body here"
    return Refused(413, "too_large", allowed)


UNREAD_S = 60
"""A client that takes nothing of its answer for so long is cut off."""
SPARE_FILES = 256
"""For the model, the jobs' database and pictures, besides connections."""


def connection(most: int, head_s: float) -> type[H11Protocol]:
    """uvicorn's connection, of which there are at most `most`, each waiting for a head `head_s` at most."""

    class Connection(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """A connection opens: it has so long to send its request, and the longest idle one makes way."""
            super().connection_made(transport)
            _cut_off_who_reads_nothing(transport)
            self._wait()
            if len(self.connections) > most:
                self._make_room()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Bytes arrive: the wait ends with a request's first byte."""
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
    is_tcp = there is not None and there.family in (socket.AF_INET, socket.AF_INET6)
    if is_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)


def allowed(most: int) -> int:
    """As many connections as this process may have files for, `most` where it may have enough."""
    files = allow_open_files(most + SPARE_FILES)
    return most if files is None else max(1, min(most, files - SPARE_FILES))


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,63}):([0-9a-f]{32}):([0-9a-f]{64})")
PREFIX = "dk-"
LOOK_S = 2.0


def make_key(path: Path, name: str) -> str:
    """Add a key of a name to a file and give it: it is shown this once."""
    if not NAME.fullmatch(name):
        raise InputError(f"key name '{name}'", allowed="1 to 64 letters, digits, '.', '-' or '_'")
    if path.exists() and any(line[0] == name for line in _read(path)):
        raise InputError(f"'{path}' has a key named '{name}' already", mend="take its line out first")
    key, salt = PREFIX + secrets.token_urlsafe(32), secrets.token_hex(16)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "r+", encoding="ascii", newline="") as file:
        before = file.read()
        if before and not before.endswith("\n"):  # as editors leave it
            file.write("\n")
        file.write(f"{name}:{salt}:{_hash(salt, key)}\n")
        file.flush()
        os.fsync(file.fileno())
    return key


class Keys:
    """The keys of a file, read again when it changes; a file that has gone bad leaves the last good ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._looked_s, self._stamp = 0.0, self._stat()
        self._lines = _read(path)
        if not self._lines:
            raise InputError(
                f"'{path}' holds no key", mend="darkroom serve --make-key NAME --api-key-file FILE"
            )

    @property
    def names(self) -> set[str]:
        """Of all keys."""
        return {name for name, _, _ in self._lines}

    @property
    def several(self) -> bool:
        """Whether there are keys of more than one name."""
        return len(self.names) > 1

    def name_of(self, given: str) -> str | None:
        """The name of a key, None if it is none. Takes the same time whichever it is."""
        self._look_again()
        found = None
        for name, salt, digest in self._lines:
            if hmac.compare_digest(_hash(salt, given), digest):
                found = name
        return found

    def _look_again(self) -> None:
        with self._lock:
            if time.monotonic() - self._looked_s < LOOK_S:
                return
            self._looked_s = time.monotonic()
            stamp = self._stat()
            if stamp != self._stamp:
                try:
                    self._lines, self._stamp = _read(self.path), stamp
                except InputError:
                    return

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


def _hash(salt: str, key: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + key.encode("utf-8", "surrogateescape")).hexdigest()


def _read(path: Path) -> list[tuple[str, str, str]]:
    try:
        text = read_typed(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"key file '{path}' cannot be read", mend="make one with --make-key NAME") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = LINE.fullmatch(stripped)
        if match is None:
            raise InputError(f"'{path}', line {number}", allowed="name:salt:sha256, as --make-key writes it")
        lines.append((match[1], match[2], match[3]))
    return lines
