"""Verbs for servers: serve."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from darkroom import options
from darkroom.cli.door import PRECISION_HELP, app
from darkroom.errors import InputError

if TYPE_CHECKING:
    from darkroom.cluster.serve import Replicas
    from darkroom.serve.settings import ServeSettings


OF_RAY = ("ray_address", "replicas", "jobs_per_replica", "replica_cpus", "replica_gpus")
MOST_REPLICAS = 1000
ADAPTERS_HELP = "a folder of LoRA files; new ones appear by themselves"
Adapters = Annotated[Path | None, typer.Option(help=ADAPTERS_HELP)]
Slots = Annotated[int, typer.Option(min=1, help="adapters that lie ready at once")]
MaxRank = Annotated[int, typer.Option(min=1, help="the largest rank of an adapter")]
Host = Annotated[str, typer.Option(help="the address to listen on; others need --api-key-file")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")]
KeyFile = Annotated[Path | None, typer.Option(help="who may come in; see --make-key")]
NEW_KEY_HELP = "add a key of this name to --api-key-file, print it, and end"
MakeKey = Annotated[str | None, typer.Option(help=NEW_KEY_HELP)]
Origins = Annotated[list[str] | None, typer.Option(help="a further web origin that may ask")]
Hosts = Annotated[list[str] | None, typer.Option(help="a further name of this server, without keys")]
PUBLIC_URL_HELP = "the address that clients know the server by, such as https://pictures.example"
PublicUrl = Annotated[str | None, typer.Option(help=PUBLIC_URL_HELP)]
State = Annotated[Path, typer.Option(help="the folder of jobs and pictures")]
JOBS_HELP = "the jobs' database, if not SQLite: postgresql+psycopg://..."
Jobs = Annotated[str | None, typer.Option(help=JOBS_HELP)]
Name = Annotated[str, typer.Option(help="of this server, where several use a database")]
Capacity = Annotated[int | None, typer.Option(min=1, help="U-Net evaluations a step; by memory if not said")]
Queue = Annotated[int, typer.Option(min=1, help="pictures that may wait; more are refused")]
QUEUE_SECONDS_HELP = "seconds of work that may wait, by the speed measured; more is refused"
QueueSeconds = Annotated[float, typer.Option(min=0.001, help=QUEUE_SECONDS_HELP)]
Rate = Annotated[float, typer.Option(min=0.01, help="new jobs a minute with one key")]
Keep = Annotated[float, typer.Option(min=0.001, help="hours that finished jobs are kept")]
KeepGb = Annotated[float, typer.Option(min=0.001, help="of pictures that are kept; the oldest go first")]
Drain = Annotated[float, typer.Option(min=0, help="seconds to finish when told to stop")]
LANES_HELP = "on a CPU, sizes stepped at once, sharing the cores; 2 for a small model, else 1"
LaneCount = Annotated[int | None, typer.Option("--lanes", min=1, max=256, help=LANES_HELP)]
Pad = Annotated[bool, typer.Option(help="only a few batch sizes, for compiled backends")]
HOOK_HELP = "MODULE:FUNCTION that sees each picture before it is kept; may be given again"
Hooks = Annotated[list[str] | None, typer.Option(help=HOOK_HELP)]
UsdPerHour = Annotated[float | None, typer.Option(min=0, help="price of the device, for the cost of jobs")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")]
Precision = Annotated[str, typer.Option(help=PRECISION_HELP)]
Backend = Annotated[str, typer.Option(help="torch, compile, onnx or openvino")]
OPTIMISE_HELP = "optimisations of the ladder; lossless ones if not said"
Optimise = Annotated[str | None, typer.Option(help=OPTIMISE_HELP)]
VERTEX_HELP = "as Vertex AI's container: AIP_HTTP_PORT and the other AIP_ variables"
Vertex = Annotated[bool, typer.Option(help=VERTEX_HELP)]
Variant = Annotated[str | None, typer.Option(help="weight files of a variant, such as fp16")]
Revision = Annotated[str | None, typer.Option(help="branch, tag or commit on the hub")]
SHARED_HELP = "jobs and pictures are those of every server of this --name on the --jobs database"
Shared = Annotated[bool, typer.Option(help=SHARED_HELP)]
PATIENCE_HELP = "shared: seconds that a job waits for a server that has its adapters"
Patience = Annotated[float, typer.Option(min=0, help=PATIENCE_HELP)]
Lease = Annotated[float, typer.Option(min=1, help="shared: a server silent for so many seconds has no jobs")]
EngineName = Annotated[str, typer.Option("--engine", help="local: this process; ray: replicas on Ray Serve")]
ADDRESS_HELP = "ray: auto, local or HOST:PORT; $RAY_ADDRESS, else local"
RayAddress = Annotated[str | None, typer.Option(help=ADDRESS_HELP)]
REPLICAS_HELP = "ray: how many, N or LEAST:MOST; 1 if not said"
ReplicaCount = Annotated[str | None, typer.Option("--replicas", help=REPLICAS_HELP)]
JobsEach = Annotated[float | None, typer.Option(help="ray: jobs for which one replica is there; 16")]
ReplicaCpus = Annotated[float | None, typer.Option(help="ray: CPUs of a replica, and its threads; 1")]
ReplicaGpus = Annotated[float | None, typer.Option(help="ray: GPUs of a replica; 0")]


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help="a model folder, a hub id, or a family")] = None,
    adapters: Adapters = None,
    slots: Slots = 16,
    max_rank: MaxRank = 64,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: KeyFile = None,
    make_key: MakeKey = None,
    origin: Origins = None,
    allow_host: Hosts = None,
    public_url: PublicUrl = None,
    state: State = Path("darkroom-serve"),
    jobs: Jobs = None,
    name: Name = "darkroom",
    shared: Shared = False,
    patience: Patience = 0.5,
    lease: Lease = 10.0,
    capacity: Capacity = None,
    queue: Queue = 256,
    queue_seconds: QueueSeconds = 3600.0,
    rate: Rate = 1200.0,
    keep: Keep = 24.0,
    keep_gb: KeepGb = 10.0,
    drain: Drain = 30.0,
    lanes: LaneCount = None,
    pad: Pad = False,
    hook: Hooks = None,
    usd_per_hour: UsdPerHour = None,
    device: Device = "auto",
    precision: Precision = "float32",
    backend: Backend = "torch",
    optimise: Optimise = None,
    vertex: Vertex = False,
    variant: Variant = None,
    revision: Revision = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    replicas: ReplicaCount = None,
    jobs_per_replica: JobsEach = None,
    replica_cpus: ReplicaCpus = None,
    replica_gpus: ReplicaGpus = None,
) -> None:
    """A server of pictures: jobs that survive it, OpenAI's dialect, metrics. Ctrl-C drains, twice leaves.

    Example: darkroom serve model/ --adapters loras/ --port 8000

    Example: darkroom serve model/ --engine ray --replicas 1:4 --jobs postgresql+psycopg://me@db/darkroom
    """
    said = dict(locals())
    if make_key is not None:
        print(_new_key(api_key_file, make_key))
        return
    _check(said)
    _log_to_stderr()
    if engine == "ray":
        from darkroom.cluster.serve import run as run_on_ray

        run_on_ray(_settings(said), _replicas(said), ray_address)
        return
    from darkroom.serve.process import run

    run(_settings(said))


def _check(said: dict[str, Any]) -> None:
    """InputError for what does not go together."""
    if said["model"] is None and not said["vertex"]:
        raise InputError("no model", mend="darkroom serve MODEL; see --help")
    plain = said["optimise"] or "auto"
    said["precision"], in_8_bits = options.eight_bits(said["backend"], said["precision"], plain)
    said["optimise"] = in_8_bits if in_8_bits != plain else said["optimise"]
    options.check_names(said["backend"], said["precision"])
    if said["engine"] not in ("local", "ray"):
        raise InputError(f"--engine {said['engine']}", allowed="local, ray")
    given = [name for name in OF_RAY if said[name] is not None]
    if said["engine"] == "local" and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{flags} with --engine local", allowed="with --engine ray")
    need_server()


def _settings(said: dict[str, Any]) -> ServeSettings:
    """What the flags say, as the server takes it."""
    from darkroom.serve.api.vertex import model_of, routes_of
    from darkroom.serve.settings import Limits, ServeSettings

    routes = routes_of() if said["vertex"] else None
    elsewhere = {} if routes is None else {"host": "0.0.0.0", "port": routes.port}
    limits = Limits(
        queue=said["queue"],
        queue_per_key=max(1, said["queue"] // 2) if said["api_key_file"] is not None else said["queue"],
        queue_s=said["queue_seconds"],
        rate_per_minute=said["rate"],
        keep_s=said["keep"] * 3600,
        keep_bytes=int(said["keep_gb"] * 1e9),
    )
    same = {name: said[name] for name in ServeSettings.model_fields if name in said}
    told = {
        "model": said["model"] if said["model"] is not None else model_of(),
        "key_file": said["api_key_file"],
        "origins": tuple(_origin(one) for one in said["origin"] or ()),
        "hosts": tuple(said["allow_host"] or ()),
        "public_url": _public_url(said["public_url"]),
        "patience_s": said["patience"],
        "lease_s": said["lease"],
        "drain_s": said["drain"],
        "vertex": routes,
        "hooks": tuple(said["hook"] or ()),
        "limits": limits,
    }
    return ServeSettings(**{**same, **told, **elsewhere})


def _origin(given: str) -> str:
    """A web origin; InputError where it is none, or all of them."""
    if not re.fullmatch(r"https?://[^/\s*?#@]+/?", given, re.IGNORECASE):
        raise InputError(f"--origin {given}", allowed="one web origin, such as https://pictures.example")
    return given


def _public_url(given: str | None) -> str | None:
    """An address to which paths are added; InputError where it is none."""
    if given is not None and not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", given, re.IGNORECASE):
        raise InputError(f"--public-url {given}", allowed="an address, such as https://pictures.example")
    return None if given is None else given.rstrip("/")


def _replicas(said: dict[str, Any]) -> Replicas:
    """How many replicas, and what each takes."""
    from darkroom.cluster.serve import Replicas

    words = (said["replicas"] or "1").split(":")
    if len(words) > 2 or not all(word.isdigit() for word in words):
        raise InputError(f"--replicas {said['replicas']}", allowed="N or LEAST:MOST, such as 2 or 1:8")
    least, most = int(words[0]), int(words[-1])
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise InputError(f"--replicas {said['replicas']}", allowed=f"1 to {MOST_REPLICAS}, LEAST first")
    told = {"jobs_each": said["jobs_per_replica"], "cpus": said["replica_cpus"], "gpus": said["replica_gpus"]}
    try:
        return Replicas(least=least, most=most, **{k: v for k, v in told.items() if v is not None})
    except ValueError as error:
        raise InputError(
            f"--jobs-per-replica, --replica-cpus, --replica-gpus: {told}",
            allowed="above 0, above 0, 0 or more",
        ) from error


def _new_key(path: Path | None, name: str) -> str:
    from darkroom.serve.api.guard import make_key

    if path is None:
        raise InputError("--make-key without a file", mend="add --api-key-file FILE")
    return make_key(path, name)


def need_server() -> None:
    """MissingExtra where the packages of the server are not installed."""
    from importlib.util import find_spec

    from darkroom.errors import MissingExtra

    for package in ("fastapi", "uvicorn", "prometheus_client", "sqlalchemy"):
        if find_spec(package) is None:
            raise MissingExtra(package, "serve")


def _log_to_stderr() -> None:
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("darkroom")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
