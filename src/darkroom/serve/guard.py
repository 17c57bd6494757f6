"""`Guard`: stands before every route. Nothing passes but health and signed pictures unless it may.

It reads the body whole, within bounds of size and time, so that no handler ever waits for a slow or endless
client; asks for a key where there are keys; and refuses what a foreign web page or a rebound name sends.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from darkroom.serve.keys import Keys
from darkroom.serve.metrics import Metrics
from darkroom.serve.refused import Refused

LOG = logging.getLogger("darkroom.serve")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SIGNED = "/signed/"
BODY_S = 60.0
ANONYMOUS = "local"
"""The caller's name where the server has no keys."""
PLATFORM = "platform"
"""The caller's name where a platform let it in."""
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


class Guard:
    """ASGI middleware. `open_paths` may be read without a key; `hosts` are names that a server without keys
    answers to; who comes to `platform_paths` was let in by the platform that the server runs on.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        metrics: Metrics,
        keys: Keys | None,
        body_bytes: int,
        origins: Iterable[str] = (),
        hosts: Iterable[str] = (),
        open_paths: Iterable[str] = (),
        platform_paths: Iterable[str] = (),
    ) -> None:
        self.app, self.metrics, self.keys, self.body_bytes = app, metrics, keys, body_bytes
        self.origins = {origin.lower().rstrip("/") for origin in origins}
        self.hosts = {"localhost", *(host.lower() for host in hosts)}
        self.open_paths = set(open_paths)
        self.platform_paths = set(platform_paths)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = self._noting(scope, send)
        try:
            scope.setdefault("state", {})["key"] = self._caller(scope)
            body = await self._body(scope, receive)
        except Refused as refused:
            await self._refuse(refused, answer)
            return
        except ConnectionError:
            return
        await self.app(scope, _replay(body, receive), answer)

    def _caller(self, scope: MutableMapping[str, Any]) -> str:
        """The name of the caller's key; raises Refused where it may not come in."""
        headers = _headers(scope)
        path, reads = scope["path"], scope["method"] in ("GET", "HEAD")
        self._check_origin(headers)
        if path in self.platform_paths:
            return PLATFORM
        if self.keys is None:
            self._check_host(headers)
            return ANONYMOUS
        if (path in self.open_paths and reads) or path.startswith(SIGNED):
            return ""
        given = _credential(headers)
        if given is None:
            raise Refused(401, "no_key", "a key is needed: Authorization: Bearer KEY")
        name = self.keys.name_of(given)
        if name is None:
            raise Refused(401, "invalid_key", "this key is not known")
        return name

    def _check_origin(self, headers: dict[str, str]) -> None:
        """A web page of another origin (`null` is one) must not use the reader's access to this server."""
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
                raise Refused(403, "foreign_origin", "requests of other web origins are not served")
            return
        told = origin.lower()
        own = {f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")}
        if told not in own and told not in self.origins:
            raise Refused(403, "foreign_origin", "requests of other web origins are not served")

    def _check_host(self, headers: dict[str, str]) -> None:
        """Without keys, only names of this machine: a foreign name may have been bent to point here."""
        name = _host_name(headers.get("host", ""))
        if name in self.hosts:
            return
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            address = None
        if address is None or not address.is_loopback:
            raise Refused(403, "foreign_host", "without keys the server answers to its local names only")

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        length = _headers(scope).get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self.body_bytes:
            raise Refused(413, "too_large", f"a body of at most {self.body_bytes} bytes")
        try:
            return await asyncio.wait_for(self._read(receive), BODY_S)
        except TimeoutError:
            raise Refused(408, "too_slow", f"the body did not arrive within {BODY_S:g} s") from None

    async def _read(self, receive: Receive) -> bytes:
        parts, total, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            part = message.get("body", b"")
            total += len(part)
            if total > self.body_bytes:
                raise Refused(413, "too_large", f"a body of at most {self.body_bytes} bytes")
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    def _noting(self, scope: MutableMapping[str, Any], send: Send) -> Send:
        """Count answers, and add the headers that keep browsers from guessing."""
        method = scope["method"] if scope["method"] in ("GET", "PUT", "POST", "DELETE", "HEAD") else "other"

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(method, str(message["status"])).inc()
                there = {name for name, _ in message.get("headers", ())}
                more = [pair for pair in SAFETY if pair[0] not in there]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        return noted

    async def _refuse(self, refused: Refused, send: Send) -> None:
        self.metrics.refused.labels(refused.code).inc()
        body = json.dumps(error_object(refused)).encode()
        headers = [(name.lower().encode(), value.encode()) for name, value in refused.headers.items()]
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),  # the rest of the body is not read
        ]
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def error_object(refused: Refused) -> dict[str, Any]:
    """A refusal as OpenAI's clients know it; the native doors speak the same."""
    told = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": told}


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


def is_public(host: str) -> bool:
    """Whether a server on this address can be reached from other machines."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True
