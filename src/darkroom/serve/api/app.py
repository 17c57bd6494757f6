"""All endpoints in one application behind the guard, and the process that serves it: listen, and shut down
gracefully on a signal. Errors have one shape, and say nothing of the inside.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import darkroom
from darkroom import options
from darkroom.errors import DarkroomError, InputError, is_system_failure
from darkroom.hardware.system import stop_in_loop, take_address
from darkroom.serve import logs
from darkroom.serve.api.a1111 import a1111_router
from darkroom.serve.api.controlnet import controlnet_router
from darkroom.serve.api.guard import (
    SIGNED,
    AsgiApp,
    Check,
    Guard,
    Keys,
    Receive,
    Send,
    allowed,
    connection,
    error_object,
    is_public,
)
from darkroom.serve.api.native import health_router, jobs_router, server_router
from darkroom.serve.api.openai import openai_router
from darkroom.serve.api.platforms import huggingface_router, kserve_router, vertex_router
from darkroom.serve.api.shared import of_validation
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import JOB_ID, Refused
from darkroom.serve.settings import Limits, ServeSettings, check_paths

if TYPE_CHECKING:
    from darkroom.serve.api.agents import Agents


# ---- the page: plain files of HTML, CSS and JavaScript, served as they are
#
# They know nothing of jobs, so they need no key; what they ask the server for does. No build step, nothing
# from elsewhere, and nothing inline: the content security policy of `guard` forbids it.

PAGES = {"/": "index.html", "/server": "server.html", "/docs": "docs.html"}
FILES = (
    "style.css",
    "icon.svg",
    "app.js",
    "also.js",
    "common.js",
    "controls.js",
    "docs.js",
    "grid.js",
    "history.js",
    "keep.js",
    "mask.js",
    "pictures.js",
    "png.js",
    "queue.js",
    "view.js",
    "server.js",
    "theme.js",
    "form.js",
)
PATHS = {**PAGES, "/favicon.ico": "icon.svg", **{f"/page/{name}": name for name in FILES}}
SOLVERS_PATH = "/page/solvers.js"
PAGE_PATHS = (*PATHS, SOLVERS_PATH)
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def _page_router(_: Core) -> APIRouter:
    """The page's files, each at its path."""
    router = APIRouter(include_in_schema=False)
    for path, name in PATHS.items():
        content = files("darkroom.serve").joinpath("page", name).read_bytes()
        router.add_api_route(path, _sender(name, content), methods=["GET", "HEAD"])
    router.add_api_route(SOLVERS_PATH, _sender("solvers.js", _solvers()), methods=["GET", "HEAD"])
    return router


def _solvers() -> bytes:
    """The solvers' names, as `options` has them, for the page's own code."""
    solvers = {name.lower(): solver for solver, name in options.A1111_NAMES.items()}
    schedules = {name.lower(): sigmas for name, sigmas in options.A1111_SCHEDULES.items()}
    lines = [
        "// Made by the server. A1111's names in small letters: darkroom's, and the other way round.",
        f"export const SOLVERS = {json.dumps(solvers)};",
        f"export const SOLVER_NAMES = {json.dumps(options.A1111_NAMES)};",
        f"export const AUTOMATIC = {json.dumps(options.A1111_AUTOMATIC)};",
        f"export const SCHEDULES = {json.dumps(schedules)};",
    ]
    return "\n".join(lines).encode()


def _sender(name: str, content: bytes) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """A handler that sends a file, or says that the reader has it already."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    return send


# ---- the application

LOG = logging.getLogger("darkroom.serve")
Router = Callable[[Core], APIRouter]
ROUTERS: tuple[Router, ...] = (
    vertex_router,
    health_router,
    jobs_router,
    server_router,
    openai_router,
    a1111_router,
    controlnet_router,
    kserve_router,
    huggingface_router,
    _page_router,
)
"""One for each dialect. Vertex comes first: its paths are the platform's to choose."""
HEALTH_PATHS = ("/live", "/ready", "/v2/health/live", "/v2/health/ready")
OPEN_PATHS: tuple[str, ...] = (*HEALTH_PATHS, *PAGE_PATHS)
"""What may be read without a key: health, and the page's own files. Nothing here knows of jobs."""


def make_app(
    core: Core, keys: Keys | None, *, routers: Sequence[Router] = ROUTERS, replica: bool = False
) -> AsgiApp:
    """The application of a core; the core starts and closes with it.

    That of a `replica` begins once the model is loaded, and drains before it ends: what runs it sends it
    requests from the first moment, and has a way of its own to tell it to stop.
    """

    agents = _agents(core)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        async with agents.running() if agents is not None else nullcontext(), served():
            yield

    @asynccontextmanager
    async def served() -> AsyncIterator[None]:
        """The application's lifetime: start the core, load the model, and drain at the end of a replica."""
        await core.start()
        settling = asyncio.create_task(_settle(core))
        if replica:
            await settling
            if core.state == "broken":
                raise DarkroomError(core.why)
        yield
        if replica:
            await core.drain(core.settings.drain_s)
        settling.cancel()
        await core.close()
        gc.unfreeze()

    app = FastAPI(
        title="darkroom",
        version=darkroom.__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"description": "refused"}, "5XX": {"description": "not served"}},
    )
    for router in routers:
        app.include_router(router(core))
    if agents is not None:
        app.router.routes.extend(agents.routes)
    _add_errors(app, core)
    _say_security(app, keys)
    settings = core.settings
    guard = Guard(
        app,
        metrics=core.metrics,
        keys=keys,
        limits=core.limits,
        origins=settings.origins,
        hosts=settings.hosts,
        open_paths=HEALTH_PATHS if keys is None else OPEN_PATHS,
        platform_paths=() if settings.vertex is None else (settings.vertex.health, settings.vertex.predict),
        traces=core.traces,
        check=_full_queue(core),
        probe_paths=HEALTH_PATHS if settings.vertex is None else (*HEALTH_PATHS, settings.vertex.health),
    )
    return under(settings.prefix, answering(guard, settings.origins))


DRAWING_PATHS = ("/jobs", "/v1/images/generations", "/sdapi/v1/txt2img", "/sdapi/v1/img2img")
"""Where a POST of JSON asks for pictures and for nothing else."""
CALLED = re.compile(f"/jobs/({JOB_ID})")


def _full_queue(core: Core) -> Check:
    """Refuses requests for pictures while the queue is full, before they are parsed: on a small machine to
    read, check and refuse them one by one takes a good part of what draws."""

    async def check(scope: MutableMapping[str, Any], headers: Mapping[str, str], body: bytes) -> None:
        """Note the hash that repeats of a request have; refuse one for pictures while the queue is full."""
        called = CALLED.fullmatch(scope["path"]) if scope["method"] == "PUT" else None
        asks = called is not None or (scope["method"] == "POST" and scope["path"] in DRAWING_PATHS)
        if not asks or not headers.get("content-type", "").startswith("application/json"):
            return
        again = hashlib.sha256(body).hexdigest()
        if (notes := logs.NOTES.get()) is not None:
            notes.again = again
        if "idempotency-key" not in headers:
            await core.check_place(scope["state"]["key"], again, None if called is None else called[1])

    return check


def _agents(core: Core) -> Agents | None:
    """The MCP server, where it is asked for."""
    if not core.settings.mcp:
        return None
    from darkroom.serve.api.agents import Agents

    return Agents(core)


async def _settle(core: Core) -> None:
    """Leave what stays for good out of Python's garbage collection, which holds up all threads."""
    await core.loaded()
    gc.collect()
    gc.freeze()


def answering(guard: Guard, origins: Sequence[str]) -> AsgiApp:
    """Browsers ask, without a key, whether pages of an origin may; these get an answer. Keys stay needed."""
    if not origins:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=[origin.lower().rstrip("/") for origin in origins],
        allow_methods=("GET", "PUT", "POST", "DELETE"),
        allow_headers=("Authorization", "X-API-Key", "Last-Event-ID", "Idempotency-Key", "X-Request-Id"),
        expose_headers=("Retry-After", "X-Seed", "X-Should-Retry", "X-Request-Id"),
    )


def under(prefix: str, app: AsgiApp) -> AsgiApp:
    """The application below a path, for a proxy that passes the path on as it came; without it too, for one
    that takes it off."""
    if not prefix:
        return app

    async def below(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Requests under the prefix go to the application without it; its root is redirected to."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path == prefix and scope["method"] in ("GET", "HEAD"):
            await RedirectResponse(f"{prefix}/", 308)(scope, receive, send)
            return
        if scope["type"] == "http" and (path == prefix or path.startswith(f"{prefix}/")):
            scope = {**scope, "path": path[len(prefix) :] or "/"}
            scope["raw_path"] = scope.get("raw_path", b"")[len(prefix) :] or b"/"
        await app(scope, receive, send)

    return below


def _add_errors(app: FastAPI, core: Core) -> None:
    def respond(refused: Refused) -> JSONResponse:
        logs.refused(refused.code, refused.logged)
        return JSONResponse(error_object(refused), refused.status, headers=refused.headers)

    @app.exception_handler(Refused)
    async def _refused(_: Request, error: Refused) -> JSONResponse:
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return respond(of_validation(error.errors()))

    @app.exception_handler(ValidationError)
    async def _invalid_inside(_: Request, error: ValidationError) -> JSONResponse:
        return respond(of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        names = {400: "bad_request", 404: "no_such_route", 405: "method_not_allowed"}
        messages = {400: "the body is no JSON that can be read", 404: "no such route"}
        message = messages.get(error.status_code, "this is not possible here")
        answer = respond(Refused(error.status_code, names.get(error.status_code, "http_error"), message))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        LOG.error("%s %r failed", request.method, request.url.path, exc_info=error)
        return respond(Refused(500, "internal", "the server failed at this request; its log says more"))


SECURITY: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "basic": {"type": "http", "scheme": "basic", "description": "the key as the password"},
}
"""How a key may come, in OpenAPI's terms."""


def _say_security(app: FastAPI, keys: Keys | None) -> None:
    """Have the OpenAPI document say which keys are asked for, and where none is."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        """FastAPI's document with the keys that each path needs."""
        schema = made()
        schema.setdefault("components", {})["securitySchemes"] = SECURITY
        schema["security"] = [{name: []} for name in SECURITY] if keys is not None else []
        for path, methods in schema["paths"].items():
            if path in OPEN_PATHS or path.startswith(SIGNED):
                for method in methods.values():
                    method["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


BACKLOG = 1024
# Between threads that compute in Python (the engine's) and the event loop: the default of 5 ms is half a
# small model's step.
SWITCH_S = 0.001
LISTENING_S = 10.0
"""So long a model may load before the address is logged without it: what is wrong with the model is found
before that, and reported in one line."""


def run(settings: ServeSettings) -> NoReturn:
    """Serve until SIGTERM or Ctrl-C: the first drains, a second leaves at once. Jobs are kept either way."""
    check_paths(settings)
    keys = Keys(settings.key_file) if settings.key_file is not None else None
    if keys is None and settings.vertex is None and is_public(settings.host):
        raise InputError(
            f"--host {settings.host} can be reached from elsewhere",
            mend="give --api-key-file (made with --make-key), or serve on 127.0.0.1",
        )
    for name in sorted(settings.limits.keys.keys() - (set() if keys is None else keys.names)):
        LOG.warning("limits for key '%s': there is no key of that name", name)
    listening = _listen(settings.host, settings.port)
    core = Core(settings)
    if settings.metrics_port is not None:
        _serve_metrics(core, settings.metrics_host, settings.metrics_port)
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Server(configured(make_app(core, keys), settings.limits), core, address)
    sys.setswitchinterval(SWITCH_S)
    server.run(sockets=[listening])
    if core.state == "broken" and core.engine is None:
        raise _failure(core)
    # All is written and closed. A thread that still loads or computes cannot be stopped, and to take hundreds
    # of thousands of objects apart, as Python does at its end, takes a core for a second.
    leave()


def _serve_metrics(core: Core, host: str, port: int) -> None:
    """Metrics on a port of their own, in a thread: a scrape needs no key, and no turn of the event loop."""
    from prometheus_client import start_http_server

    try:
        there, _ = start_http_server(port, host, core.metrics.registry)
    except OSError as error:
        raise InputError(f"--metrics-host {host} --metrics-port {port}: {error.strerror or error}") from error
    LOG.info("metrics on http://%s:%d/metrics", host, there.server_port)


def _failure(core: Core) -> DarkroomError:
    """Why a server that never took a job ends, as the command line tells it."""
    if isinstance(core.error, DarkroomError):
        return core.error
    return DarkroomError(f"{core.why} ({type(core.error).__name__}); the log above says more")


def leave() -> NoReturn:
    """End the process at once, whatever its threads do."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def configured(app: AsgiApp, limits: Limits) -> uvicorn.Config:
    """uvicorn with our bounds: the guard's on requests and bodies, `connections`' on what comes before."""
    return uvicorn.Config(
        app,
        http=connection(allowed(limits.connections), limits.head_s),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=limits.idle_s,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=64 * 1024,
        proxy_headers=False,
    )


def _listen(host: str, port: int) -> socket.socket:
    """The socket, bound before anything long begins, so that a taken port is reported at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        take_address(listening)
        listening.bind(address)
        listening.listen(BACKLOG)  # who connects from here on is answered, if later
    except OSError as error:
        if is_system_failure(error):
            raise
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from error
    return listening


class _Server(uvicorn.Server):
    """Uvicorn with signals that drain first."""

    def __init__(self, config: uvicorn.Config, core: Core, address: str) -> None:
        super().__init__(config)
        self._core, self._address = core, address
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once; from then on a model that cannot be loaded ends the server."""
        await super().startup(sockets)
        if not self.should_exit:
            self._watching = asyncio.get_running_loop().create_task(self._end_if_broken())

    async def _end_if_broken(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._core.loaded(), LISTENING_S)
        if self._core.state != "broken" or self._core.engine is not None:
            LOG.info("listening on %s", self._address)
        await self._core.loaded()
        if self._core.state == "broken" and self._core.engine is None:
            self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Called by uvicorn around its loop."""
        stop_in_loop(asyncio.get_running_loop(), self._stop_gently)
        yield

    def _stop_gently(self) -> None:
        if self._draining is not None:
            LOG.info("leaving at once; jobs that are not over are kept")
            leave()
        LOG.info("stopping: finishing what is on its way, for at most %g s", self._core.settings.drain_s)
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._core.drain(self._core.settings.drain_s)
        self.should_exit = True
