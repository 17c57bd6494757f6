"""The server in replicas under Ray Serve: each a whole engine behind the same endpoints, on one database.

Ray gives a request to any replica, and every replica knows every job (`darkroom.serve.shared_queue`). Who
draws it is settled in the database: a replica that has the adapters comes before one that would have to load
them. The leases of a lost replica run out, and the others draw its jobs. The number of replicas follows the
length of the queue.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from darkroom.cluster.connect import connected, require_ray
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware.system import STOP_SIGNALS
from darkroom.serve.settings import ServeSettings, check_certificate

if TYPE_CHECKING:
    from ray.serve import Application


__all__ = ["Replicas", "application", "run"]
LOG = logging.getLogger("darkroom.serve")
MOST_REQUESTS = 1024
"""Of one replica at a time: most of them wait for a picture."""
MOST_WATCHERS = MOST_REQUESTS // 2
"""Of these event streams, which last; the rest is for all other requests, health among them."""
MOST_QUEUED = 256
"""Requests that wait for a free replica; further ones are answered with 503."""
HEALTH_S = 5.0
KILL_S = 15.0
"""Beyond the drain, until Ray ends a replica by force."""


class Replicas(BaseModel):
    """How many replicas there are, and what each takes of the cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    least: int = Field(1, ge=1, le=1000)
    most: int = Field(1, ge=1, le=1000)
    jobs_each: float = Field(16.0, gt=0, description="jobs, waiting or drawn, for which one replica is there")
    cpus: float = Field(1.0, gt=0, description="of a replica; also its threads")
    gpus: float = Field(0.0, ge=0, description="of a replica")
    up_s: float = Field(10.0, ge=0, description="the queue must have been long for so long")
    down_s: float = Field(300.0, ge=0, description="and short for so long")

    @model_validator(mode="after")
    def _ordered(self) -> Replicas:
        if self.least > self.most:
            raise ValueError(f"at least {self.least} and at most {self.most} replicas")
        return self


class OnRay(BaseModel):
    """What `serve deploy` hands to `app`: the arguments of an application in Ray Serve's YAML."""

    model_config = ConfigDict(extra="forbid")

    settings: ServeSettings
    replicas: Replicas = Replicas()


class Replica:
    """One engine and its endpoints, in an actor of Ray Serve."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from darkroom.serve.jobs.core import Core

        self.settings = ServeSettings.model_validate(settings)
        self.core = Core(self.settings)

    def __serve_build_asgi_app__(self) -> Any:
        """Ray Serve asks for the application that answers; it begins and ends with the replica."""
        from darkroom.serve.api.app import make_app
        from darkroom.serve.api.guard import Keys

        keys = None if self.settings.key_file is None else Keys(self.settings.key_file)
        return make_app(self.core, keys, replica=True)

    async def check_health(self) -> None:
        """Ray replaces a replica that raises here."""
        trouble = self.core.trouble()
        if trouble is not None and trouble[0] == "broken":
            raise DarkroomError(trouble[1])

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling.ByQueue` decides by."""

        sharing = self.core.sharing
        assert sharing is not None
        return {WAITING: float(sharing.backlog.jobs), DRAWN: float(self.core.status().jobs)}


def app(args: OnRay) -> Application:
    """The application, for `serve deploy` with `import_path: darkroom.cluster.serve:app`.

    InputError without keys: where Ray listens is not for the application to say.
    """
    if args.settings.key_file is None:
        raise InputError(
            "settings.key_file is missing: others may reach the address that Ray listens on",
            mend="key_file: FILE, made with darkroom serve --make-key NAME --api-key-file FILE",
        )
    return application(args.settings, args.replicas)


def application(settings: ServeSettings, replicas: Replicas) -> Application:
    """Replicas of a server as an application of Ray Serve. InputError without a database to share."""
    require_ray()
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    settings = shared(settings)
    if settings.lanes is None and replicas.cpus < 2:  # Ray promised no second core
        settings = settings.model_copy(update={"lanes": 1})
    kind = serve.deployment(serve.ingress()(Replica))
    return kind.options(
        name="replica",
        autoscaling_config=AutoscalingConfig(
            min_replicas=replicas.least,
            max_replicas=replicas.most,
            upscale_delay_s=replicas.up_s,
            downscale_delay_s=replicas.down_s,
            policy=AutoscalingPolicy(
                policy_function="darkroom.cluster.serve:ByQueue",
                policy_kwargs={"jobs_per_replica": replicas.jobs_each},
            ),
        ),
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        max_ongoing_requests=MOST_REQUESTS,
        max_queued_requests=MOST_QUEUED,
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=settings.drain_s + KILL_S,
    ).bind(settings.model_dump(mode="json"))


def shared(settings: ServeSettings) -> ServeSettings:
    """Settings of a server that shares its jobs; InputError where that cannot be."""
    if settings.jobs is None or not settings.jobs.startswith("postgresql"):
        raise InputError(
            "--engine ray without a database that all replicas reach",
            mend="give --jobs postgresql+psycopg://USER@HOST/NAME",
        )
    if settings.vertex is not None:
        raise InputError(
            "--vertex with --engine ray", mend="Vertex AI starts replicas itself: --engine local"
        )
    limits = settings.limits
    limits = limits.model_copy(update={"watchers": min(limits.watchers, MOST_WATCHERS)})
    return settings.model_copy(update={"shared": True, "limits": limits})


def run(settings: ServeSettings, replicas: Replicas, address: str | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; then every replica drains. `address` is as in `connect.connected`."""
    from darkroom.serve.api.guard import is_public

    settings = shared(settings)
    if settings.key_file is None and is_public(settings.host):
        raise InputError(
            f"--host {settings.host} can be reached from elsewhere",
            mend="give --api-key-file (made with --make-key), or serve on 127.0.0.1",
        )
    if _is_here(address) or (settings.sign is not None and settings.sign.is_file()):
        check_certificate(settings)  # before Ray begins; a cluster's own nodes may have what is not here
    port = settings.port or _free_port(settings.host)
    stop = threading.Event()
    with connected(address, num_cpus=_cpus(replicas, address)) as cluster:
        from ray import serve

        LOG.info("%s", cluster.line())
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: stop_gently(stop))
        serve.start(proxy_location="EveryNode", http_options={"host": settings.host, "port": port})
        try:
            serve.run(application(settings, replicas), name=settings.name, route_prefix="/")
            LOG.info("listening on http://%s:%d", settings.host, port)
            stop.wait()
            LOG.info(
                "stopping: every replica finishes what is on its way, for at most %g s", settings.drain_s
            )
        finally:
            serve.shutdown()


def stop_gently(stop: threading.Event) -> None:
    """The first signal has the replicas drain. A second one leaves at once; on a cluster they drain on."""
    from darkroom.serve.api.app import leave

    if stop.is_set():
        LOG.info("leaving at once; jobs that are not over are kept")
        leave()
    stop.set()


def _is_here(address: str | None) -> bool:
    """Whether all replicas run on this machine."""
    return (address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def _cpus(replicas: Replicas, address: str | None) -> int | None:
    """A cluster of this machine alone is given as many cores as the replicas want, threads or not."""
    if address not in (None, "local"):
        return None
    return max(os.cpu_count() or 1, math.ceil(replicas.most * replicas.cpus) + 1)


def _free_port(host: str) -> int:
    with socket.socket() as there:
        there.bind((host, 0))
        return int(there.getsockname()[1])


WAITING, DRAWN = "waiting", "drawn"
"""What each replica tells: jobs that nobody works on, the same ones to all, and those it has itself."""


class ByQueue:
    """So many jobs a replica; Ray adds the bounds and delays of its own configuration."""

    def __init__(self, jobs_per_replica: float = 16.0) -> None:
        self.jobs_per_replica = jobs_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Replicas wanted, for what the replicas reported lately."""
        metrics = context.aggregated_metrics or {}
        waiting = max(metrics.get(WAITING, {}).values(), default=0.0)
        drawn = sum(metrics.get(DRAWN, {}).values())
        if not metrics:
            return context.target_num_replicas, {}
        return math.ceil((waiting + drawn) / self.jobs_per_replica), {}
