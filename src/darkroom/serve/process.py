"""A server as a process: listen, and shut down gracefully on a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import uvicorn

from darkroom.errors import DarkroomError, InputError, is_system_failure
from darkroom.hardware.system import stop_in_loop, take_address
from darkroom.serve.api.app import make_app
from darkroom.serve.api.guard import AsgiApp, Keys, allowed, connection, is_public
from darkroom.serve.jobs.core import Core
from darkroom.serve.settings import Limits, ServeSettings, check_paths

LOG = logging.getLogger("darkroom.serve")
BACKLOG = 1024
# Between threads that compute in Python (the engine's) and the event loop: the default of 5 ms is half a
# small model's step.
SWITCH_S = 0.001
LISTENING_S = 10.0
"""So long a model may load before the address is logged without it: what is wrong with the model is found
before that, and reported in one line."""


def run(settings: ServeSettings) -> None:
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
    if core.left_at_work:  # a thread that loads or computes cannot be stopped
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
        stop_in_loop(asyncio.get_running_loop(), self._told_to_stop)
        yield

    def _told_to_stop(self) -> None:
        if self._draining is not None:
            LOG.info("leaving at once; jobs that are not over are kept")
            leave()
        LOG.info("stopping: finishing what is on its way, for at most %g s", self._core.settings.drain_s)
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._core.drain(self._core.settings.drain_s)
        self.should_exit = True
