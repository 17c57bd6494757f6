"""`Guard`: stands before every route. Nothing passes but health and signed pictures unless it may.

It asks for a key where there are keys; refuses what a foreign web page or a rebound name sends; bounds how
many requests are under way; and has the body read whole (`bodies`), so that no handler ever waits for a slow
or endless client. Who came in without a key sends none.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from darkroom.serve.bodies import AGAIN_S, Bodies, Message, Receive, check_values
from darkroom.serve.keys import Keys
from darkroom.serve.limits import Limits
from darkroom.serve.metrics import Metrics
from darkroom.serve.refused import Refused

LOG = logging.getLogger("darkroom.serve")
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

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


class Guard:
    """ASGI middleware. `open_paths` may be read without a key, and always; `hosts` are names that a server
    without keys answers to; who comes to `platform_paths` was let in by the platform that the server runs on.
    A platform's server without keys answers at those and at the open paths only.
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
    ) -> None:
        self.app, self.metrics, self.keys, self.limits = app, metrics, keys, limits
        self.origins = {origin.lower().rstrip("/") for origin in origins}
        self.hosts = {"localhost", *(host.lower() for host in hosts)}
        self.open_paths = set(open_paths)
        self.platform_paths = set(platform_paths)
        self._bodies = Bodies(limits.bodies_bytes)
        self._under_way = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self._under_way += 1
        try:
            await self._answer(scope, receive, self._noting(scope, send))
        finally:
            self._under_way -= 1

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        with self._bodies.place() as body:
            try:
                headers = _headers(scope)
                caller = self._caller(scope, headers)
                if self._under_way > self.limits.requests and not self._is_open(scope):
                    raise Refused(503, "busy", "too many requests are under way", retry_after_s=AGAIN_S)
                scope.setdefault("state", {})["key"] = caller
                scope["state"]["address"] = self._address(scope, headers)
                content = await body.read(headers, receive, self.limits.body_bytes if caller else 0)
                if not headers.get("content-type", "").lower().startswith("multipart/"):
                    check_values(content)
            except Refused as refused:
                await self._refuse(refused, send)
                return
            except ConnectionError:
                return
            await self.app(scope, _replay(content, receive), send)

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
        told = origin.lower()
        own = {f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")}
        if told not in own and told not in self.origins:
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
        Without keys the name must be one of the server's own, whoever says it.
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
