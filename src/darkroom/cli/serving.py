"""Verbs for servers: serve."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from darkroom import options
from darkroom.cli.application import CREDENTIALS_HELP, PRECISION_HELP, PROVENANCE_HELP, SIGN_HELP, app
from darkroom.cli.groups import grouped
from darkroom.errors import InputError

if TYPE_CHECKING:
    from darkroom.cluster.serve import Replicas
    from darkroom.serve.settings import Limits, ServeSettings


OF_RAY = ("ray_address", "replicas", "jobs_per_replica", "replica_cpus", "replica_gpus")
MOST_REPLICAS = 1000
MODELS_HELP = "a model folder, a hub id, or a family; several, or a folder of models, are chosen by name"
MODEL_MEMORY_HELP = "of several models at once, such as 20GB; default: half of what is free"
ModelMemory = Annotated[str | None, typer.Option(help=MODEL_MEMORY_HELP)]
ADAPTERS_HELP = "a folder of adapters; new ones appear by themselves"
Adapters = Annotated[Path | None, typer.Option(help=ADAPTERS_HELP)]
Slots = Annotated[int, typer.Option(min=1, help="adapters that lie ready at once")]
MaxRank = Annotated[int, typer.Option(min=1, help="the largest rank of an adapter")]
ADAPTER_MEMORY_HELP = "of adapters that are no LoRAs at once, such as 4GB; default: a quarter of what is free"
AdapterMemory = Annotated[str | None, typer.Option(help=ADAPTER_MEMORY_HELP)]
CONTROLS_HELP = "a folder of ControlNets, T2I-Adapters and IP-Adapters; new ones appear by themselves"
ControlFolder = Annotated[Path | None, typer.Option("--controls", help=CONTROLS_HELP)]
CONTROL_MEMORY_HELP = "of nets at once, such as 4GB; default: a quarter of what is free"
ControlMemory = Annotated[str | None, typer.Option(help=CONTROL_MEMORY_HELP)]
Embeddings = Annotated[Path | None, typer.Option(help="a folder of textual inversions, by name in prompts")]
UPSCALERS_HELP = "a folder of ESRGAN networks, by name"
UpscalerFolder = Annotated[Path | None, typer.Option("--upscalers", help=UPSCALERS_HELP)]
Host = Annotated[str, typer.Option(help="the address to listen on; others need --api-key-file")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")]
KeyFile = Annotated[Path | None, typer.Option(help="the API keys that are accepted; see --make-key")]
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
Capacity = Annotated[int | None, typer.Option(min=1, help="U-Net evaluations a step; default: by memory")]
LIMITS_HELP = "a YAML file of bounds (NAME: VALUE), with keys: for those of single keys"
LimitsFile = Annotated[Path | None, typer.Option(help=LIMITS_HELP)]
ONE_LIMIT_HELP = "NAME=VALUE of one bound, over the file's; may be given again"
OneLimit = Annotated[list[str] | None, typer.Option(help=ONE_LIMIT_HELP)]
PREFIX_HELP = "the path below which a proxy has the server, such as /pictures"
Prefix = Annotated[str, typer.Option("--path-prefix", help=PREFIX_HELP)]
METRICS_HELP = "metrics alone on a port of their own, without a key; 0 takes a free one"
MetricsPort = Annotated[int | None, typer.Option(min=0, max=65535, help=METRICS_HELP)]
MetricsHost = Annotated[str, typer.Option(help="the address of --metrics-port")]
TRACES_HELP = "an OpenTelemetry collector that gets traces, such as http://127.0.0.1:4318"
Traces = Annotated[str | None, typer.Option(help=TRACES_HELP)]
LogFormat = Annotated[str, typer.Option(help="text or json")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error")]
OWN_OPTIONS = {
    "queue": ("queue", 1),
    "queue_seconds": ("queue_s", 1),
    "rate": ("rate_per_minute", 1),
    "keep": ("keep_s", 3600),
    "keep_gb": ("keep_bytes", 1e9),
}
"""Options of bounds: the field, and what a unit of the option is in the field's."""
QUEUE_HELP = "pictures that may wait; more are refused; default: 256"
Queue = Annotated[int | None, typer.Option(min=1, help=QUEUE_HELP)]
QUEUE_SECONDS_HELP = "seconds of work that may wait, by the speed measured; default: 3600"
QueueSeconds = Annotated[float | None, typer.Option(min=0.001, help=QUEUE_SECONDS_HELP)]
Rate = Annotated[float | None, typer.Option(min=0.01, help="new jobs a minute with one key; 1200")]
Keep = Annotated[float | None, typer.Option(min=0.001, help="hours that finished jobs are kept; 24")]
KEEP_GB_HELP = "of pictures that are kept; the oldest go first; default: 10"
KeepGb = Annotated[float | None, typer.Option(min=0.001, help=KEEP_GB_HELP)]
Drain = Annotated[float, typer.Option(min=0, help="seconds to finish running jobs at shutdown")]
LANES_HELP = "on a CPU, sizes stepped at once, sharing the cores; 2 for a small model, else 1"
LaneCount = Annotated[int | None, typer.Option("--lanes", min=1, max=256, help=LANES_HELP)]
Pad = Annotated[bool, typer.Option(help="only a few batch sizes, for compiled backends")]
DETERMINISTIC_HELP = "calls of few shapes: a picture has the same bits in any batch"
Deterministic = Annotated[bool, typer.Option(help=DETERMINISTIC_HELP)]
WarmSize = Annotated[
    list[str] | None,
    typer.Option(help="a size compiled or captured before the first job: 512x768; again for more"),
]
HOOK_HELP = "MODULE:FUNCTION that sees each picture before it is kept; may be given again"
Hooks = Annotated[list[str] | None, typer.Option(help=HOOK_HELP)]
Sign = Annotated[Path | None, typer.Option(help=SIGN_HELP)]
Credentials = Annotated[str, typer.Option(help=CREDENTIALS_HELP)]
ProvenanceFlag = Annotated[bool, typer.Option(envvar="DARKROOM_PROVENANCE", help=PROVENANCE_HELP)]
UsdPerHour = Annotated[float | None, typer.Option(min=0, help="price of the device, for the cost of jobs")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")]
Precision = Annotated[str, typer.Option(help=PRECISION_HELP)]
Backend = Annotated[str, typer.Option(help="torch, compile, onnx or openvino")]
OPTIMISE_HELP = "optimisations; default: lossless ones"
Optimise = Annotated[str | None, typer.Option(help=OPTIMISE_HELP)]
Mcp = Annotated[bool, typer.Option("--mcp", help="an MCP server at /mcp, for agents that draw")]
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
REPLICAS_HELP = "ray: how many, N or LEAST:MOST; default: 1"
ReplicaCount = Annotated[str | None, typer.Option("--replicas", help=REPLICAS_HELP)]
JobsEach = Annotated[float | None, typer.Option(help="ray: jobs for which one replica is there; 16")]
ReplicaCpus = Annotated[float | None, typer.Option(help="ray: CPUs of a replica, and its threads; 1")]
ReplicaGpus = Annotated[float | None, typer.Option(help="ray: GPUs of a replica; 0")]


@dataclass(frozen=True)
class ServeOptions:
    """The server's settings, many by the names of `darkroom.serve.settings.ServeSettings`."""

    model_memory: ModelMemory = None
    adapters: Adapters = None
    slots: Slots = 16
    max_rank: MaxRank = 64
    adapter_memory: AdapterMemory = None
    embeddings: Embeddings = None
    controls: ControlFolder = None
    control_memory: ControlMemory = None
    upscalers: UpscalerFolder = None
    host: Host = "127.0.0.1"
    port: Port = 8000
    api_key_file: KeyFile = None
    make_key: MakeKey = None
    origin: Origins = None
    allow_host: Hosts = None
    public_url: PublicUrl = None
    state: State = Path("darkroom-serve")
    jobs: Jobs = None
    name: Name = "darkroom"
    shared: Shared = False
    patience: Patience = 0.5
    lease: Lease = 10.0
    capacity: Capacity = None
    limits: LimitsFile = None
    limit: OneLimit = None
    queue: Queue = None
    queue_seconds: QueueSeconds = None
    rate: Rate = None
    keep: Keep = None
    keep_gb: KeepGb = None
    drain: Drain = 30.0
    lanes: LaneCount = None
    pad: Pad = False
    warm_size: WarmSize = None
    deterministic: Deterministic = False
    hook: Hooks = None
    provenance: ProvenanceFlag = True
    sign: Sign = None
    credentials: Credentials = "settings"
    usd_per_hour: UsdPerHour = None
    device: Device = "auto"
    precision: Precision = "float32"
    backend: Backend = "torch"
    optimise: Optimise = None
    path_prefix: Prefix = ""
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "0.0.0.0"
    traces: Traces = None
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    mcp: Mcp = False
    vertex: Vertex = False
    variant: Variant = None
    revision: Revision = None
    engine: EngineName = "local"
    ray_address: RayAddress = None
    replicas: ReplicaCount = None
    jobs_per_replica: JobsEach = None
    replica_cpus: ReplicaCpus = None
    replica_gpus: ReplicaGpus = None


@app.command()
@grouped
def serve(
    model: Annotated[list[str] | None, typer.Argument(help=MODELS_HELP)] = None,
    *,
    asked: ServeOptions,
) -> None:
    """Serve pictures: a page, APIs and durable jobs.

    OpenAI's and other APIs, metrics. Ctrl-C drains; a second one ends at once.

    Example: darkroom serve model/ --adapters loras/ --port 8000

    Example: darkroom serve sd15.safetensors sdxl/ --model-memory 12GB

    Example: darkroom serve model/ --engine ray --replicas 1:4 --jobs postgresql+psycopg://me@db/darkroom
    """
    if asked.make_key is not None:
        print(_new_key(asked.api_key_file, asked.make_key))
        return
    said = {"model": model, **asdict(asked)}
    _check(said)
    from darkroom.serve.logs import set_up as set_up_logs

    set_up_logs(asked.log_format, asked.log_level)
    if asked.engine == "ray":
        from darkroom.cluster.serve import run as run_on_ray

        run_on_ray(_settings(said), _replicas(said), asked.ray_address)
        return
    from darkroom.serve.process import run

    run(_settings(said))


def _check(said: dict[str, Any]) -> None:
    """InputError for what does not go together."""
    if not said["model"] and not said["vertex"]:
        raise InputError("no model", mend="darkroom serve MODEL; see --help")
    plain = said["optimise"] or "auto"
    said["precision"], in_8_bits = options.eight_bits(said["backend"], said["precision"], plain)
    said["optimise"] = in_8_bits if in_8_bits != plain else said["optimise"]
    options.check_names(said["backend"], said["precision"])
    options.check_credentials(said["credentials"])
    if said["engine"] not in ("local", "ray"):
        raise InputError(f"--engine {said['engine']}", allowed="local, ray")
    if said["pad"] and said["deterministic"]:
        raise InputError("--pad with --deterministic", mend="leave --pad out: --deterministic pads too")
    given = [name for name in OF_RAY if said[name] is not None]
    if said["engine"] == "local" and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{flags} with --engine local", allowed="with --engine ray")
    need_server()


def _settings(said: dict[str, Any]) -> ServeSettings:
    """What the flags say, as the server takes it."""
    from darkroom.serve.api.vertex import model_of, routes_of
    from darkroom.serve.settings import ServeSettings, models_in

    first, *more = models_in(said["model"] or [model_of()])
    if said["model_memory"] is not None and not more:
        raise InputError("--model-memory with one model", mend="leave it out, or give several models")
    routes = routes_of() if said["vertex"] else None
    elsewhere = {} if routes is None else {"host": "0.0.0.0", "port": routes.port}
    same = {name: said[name] for name in ServeSettings.model_fields if name in said}
    settings = {
        "model": first,
        "more_models": tuple(more),
        "model_memory": _bytes(said["model_memory"]),
        "adapter_memory": _bytes(said["adapter_memory"]),
        "control_memory": _bytes(said["control_memory"]),
        "key_file": said["api_key_file"],
        "origins": tuple(_origin(one) for one in said["origin"] or ()),
        "hosts": tuple(said["allow_host"] or ()),
        "public_url": _public_url(said["public_url"]),
        "patience_s": said["patience"],
        "lease_s": said["lease"],
        "drain_s": said["drain"],
        "vertex": routes,
        "hooks": tuple(said["hook"] or ()),
        "warm_sizes": tuple(said["warm_size"] or ()),
        "prefix": _prefix(said["path_prefix"]),
        "limits": _limits(said),
    }
    return ServeSettings(**{**same, **settings, **elsewhere})


def _limits(said: dict[str, Any]) -> Limits:
    """The file of --limits, then each --limit NAME=VALUE, then the options that have a name of their own."""
    from pydantic import ValidationError

    from darkroom.serve.settings import Limits

    limits = {} if said["limits"] is None else _limits_file(said["limits"])
    for one in said["limit"] or ():
        name, equals, value = one.partition("=")
        if not equals or name not in Limits.model_fields or name == "keys":
            known = ", ".join(sorted(set(Limits.model_fields) - {"keys"}))
            raise InputError(f"--limit {one}", allowed=f"NAME=VALUE, NAME one of {known}")
        limits[name] = value
    for option, (name, factor) in OWN_OPTIONS.items():
        if said[option] is not None:
            value = said[option] * factor
            limits[name] = int(value) if name in ("queue", "keep_bytes") else value
    queue = limits.get("queue", Limits.model_fields["queue"].default)
    if "queue_per_key" not in limits and isinstance(queue, int):
        limits["queue_per_key"] = max(1, queue // 2) if said["api_key_file"] is not None else queue
    try:
        return Limits.model_validate(limits)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"limit {where}: {first['msg']}", allowed="as docs/serving.md lists them, under Limits"
        ) from error


def _limits_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--limits '{path}' cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"--limits '{path}' is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise InputError(f"--limits '{path}'", allowed="NAME: VALUE lines, and keys: with limits by key")
    return content


def _bytes(given: str | None) -> int | None:
    return None if given is None else options.parse_bytes(given)


def _prefix(given: str) -> str:
    """The path below which a proxy has the server; InputError where it is none."""
    bare = given.strip("/")
    if bare and not re.fullmatch(r"[A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*", bare):
        raise InputError(f"--path-prefix {given}", allowed="a path, such as /pictures")
    return f"/{bare}" if bare else ""


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
    settings = {
        "jobs_each": said["jobs_per_replica"],
        "cpus": said["replica_cpus"],
        "gpus": said["replica_gpus"],
    }
    try:
        return Replicas(least=least, most=most, **{k: v for k, v in settings.items() if v is not None})
    except ValueError as error:
        raise InputError(
            f"--jobs-per-replica, --replica-cpus, --replica-gpus: {settings}",
            allowed="above 0, above 0, 0 or more",
        ) from error


def _new_key(path: Path | None, name: str) -> str:
    need_server()
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
