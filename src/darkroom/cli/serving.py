"""Verbs for servers: serve."""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from darkroom import options
from darkroom.cli.application import PROVENANCE_HELP, app
from darkroom.cli.groups import OptionsOf, grouped
from darkroom.errors import InputError, first_fault
from darkroom.hardware.system import read_typed
from darkroom.serve.settings import KeyLimits, Limits, ServeSettings, VertexRoutes, check_paths, models_in

if TYPE_CHECKING:
    from darkroom.cluster.serve import Replicas


OF_RAY = ("ray_address", "replicas", "jobs_per_replica", "replica_cpus", "replica_gpus")
MOST_REPLICAS = 1000
MOST_LIMITS = 100_000
"""Values in a file of limits, which may have some for each key."""
MODELS_HELP = "a model folder, a hub id, or a family; several, or a folder of models, are chosen by name"


def _option(kind: Any, flag: str, text: str) -> Any:
    return Annotated[kind, typer.Option(flag, help=text)]


MEMORY_HELP = "such as 20GB, of {} in memory at once; default: {} of what is free"
OTHER_FORMS = {
    "model_memory": _option(str | None, "--model-memory", MEMORY_HELP.format("several models", "half")),
    "adapter_memory": _option(
        str | None, "--adapter-memory", MEMORY_HELP.format("adapters that are no LoRAs", "a quarter")
    ),
    "control_memory": _option(str | None, "--control-memory", MEMORY_HELP.format("nets", "a quarter")),
    "key_file": _option(Path | None, "--api-key-file", "the API keys that are accepted; see --make-key"),
    "origins": _option(list[str] | None, "--origin", "a further web origin that may ask"),
    "hosts": _option(list[str] | None, "--allow-host", "a further name of this server, without keys"),
    "prefix": _option(str, "--path-prefix", "the path below which a proxy has the server, such as /pictures"),
    "hooks": _option(
        list[str] | None,
        "--hook",
        "MODULE:FUNCTION that sees each picture before it is kept; may be given again",
    ),
    "warm_sizes": _option(
        list[str] | None,
        "--warm-size",
        "a size compiled or captured before the first job: 512x768; again for more",
    ),
}
"""Settings that have another form on the command line, or are given several times."""
FLAGS = {
    "slots": "--max-loras",
    "patience_s": "--adapter-affinity-timeout",
    "lease_s": "--lease",
    "drain_s": "--drain",
}
"""Settings whose options are named otherwise."""
SERVING = OptionsOf(
    ServeSettings,
    (
        *("model_memory", "adapters", "slots", "max_rank", "adapter_memory", "embeddings", "controls"),
        *("control_memory", "upscalers", "host", "port", "key_file", "origins", "hosts", "public_url"),
        *("state", "jobs", "name", "shared", "patience_s", "lease_s", "capacity", "drain_s", "lanes", "pad"),
        *("warm_sizes", "deterministic", "hooks", "sign", "credentials", "usd_per_hour", "device"),
        *("precision", "backend", "optimise", "prefix", "metrics_port", "metrics_host", "traces", "mcp"),
        *("variant", "revision"),
    ),
    OTHER_FORMS,
    FLAGS,
)
"""Settings of a server: type, default, range and meaning are `ServeSettings`'."""


BOUNDS = OptionsOf(
    Limits,
    ("queue", "queue_s", "rate_per_minute", "keep_s", "keep_bytes"),
    {
        "keep_s": _option(float | None, "--keep", "hours that finished jobs are kept; default: 24"),
        "keep_bytes": _option(
            float | None, "--keep-gb", "of pictures that are kept; the oldest go first; default: 10"
        ),
    },
    {"queue_s": "--queue-seconds", "rate_per_minute": "--rate"},
    only_given=True,
)
"""Bounds with options of their own; what is not given is left to the file of --limits."""
UNITS = {"keep_s": 3600, "keep_bytes": 1e9}
"""What a unit of such an option is in its field's."""


@dataclass(frozen=True)
class ServeOptions:
    """What is no setting of one server: its keys, its other bounds, its logs, and where it runs."""

    make_key: Annotated[
        str | None, typer.Option(help="add a key of this name to --api-key-file, print it, and end")
    ] = None
    limits: Annotated[
        Path | None,
        typer.Option(help="a YAML file of bounds (NAME: VALUE), with keys: for those of single keys"),
    ] = None
    limit: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of one bound, over the file's; may be given again"),
    ] = None
    provenance: Annotated[bool, typer.Option(envvar="DARKROOM_PROVENANCE", help=PROVENANCE_HELP)] = True
    log_format: Annotated[str, typer.Option(help="text or json")] = "text"
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info"
    vertex: Annotated[
        bool, typer.Option(help="as Vertex AI's container: AIP_HTTP_PORT and the other AIP_ variables")
    ] = False
    engine: Annotated[str, typer.Option(help="local: this process; ray: replicas on Ray Serve")] = "local"
    ray_address: Annotated[
        str | None, typer.Option(help="ray: auto, local or HOST:PORT; $RAY_ADDRESS, else local")
    ] = None
    replicas: Annotated[str | None, typer.Option(help="ray: how many, N or LEAST:MOST; default: 1")] = None
    jobs_per_replica: Annotated[
        float | None, typer.Option(help="ray: jobs in the queue or drawn for each replica; default: 16")
    ] = None
    replica_cpus: Annotated[float | None, typer.Option(help="ray: CPUs of a replica, and its threads; 1")] = (
        None
    )
    replica_gpus: Annotated[float | None, typer.Option(help="ray: GPUs of a replica; 0")] = None


@app.command()
@grouped
def serve(
    model: Annotated[list[str] | None, typer.Argument(help=MODELS_HELP)] = None,
    *,
    settings: Annotated[dict[str, Any], SERVING],
    bounds: Annotated[dict[str, Any], BOUNDS],
    asked: ServeOptions,
) -> None:
    """Serve pictures: a page, APIs and durable jobs.

    OpenAI's and other APIs, metrics. Ctrl-C drains; a second one ends at once.

    Example: darkroom serve model/ --adapters loras/ --port 8000

    Example: darkroom serve sd15.safetensors sdxl/ --model-memory 12GB

    Example: darkroom serve model/ --engine ray --replicas 1:4 --jobs postgresql+psycopg://me@db/darkroom
    """
    if asked.make_key is not None:
        print(_new_key(settings["key_file"], asked.make_key))
        return
    said = {"model": model, **settings, **bounds, **asdict(asked)}
    _check(said)
    from darkroom.serve.logs import set_up as set_up_logs

    set_up_logs(asked.log_format, asked.log_level)
    if asked.engine == "ray":
        from darkroom.cluster.serve import run as run_on_ray

        run_on_ray(_settings(said), _replicas(said), asked.ray_address)
        return
    said_settings = _settings(said)
    check_paths(said_settings)
    from darkroom.serve.api.app import run

    run(said_settings)


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
    routes: VertexRoutes | None = None
    named = said["model"]
    if said["vertex"]:  # its module brings the whole server
        from darkroom.serve.api.platforms import model_of, routes_of

        routes, named = routes_of(), named or [model_of()]
    first, *more = models_in(named)
    if said["model_memory"] is not None and not more:
        raise InputError("--model-memory with one model", mend="leave it out, or give several models")
    elsewhere = {} if routes is None else {"host": "0.0.0.0", "port": routes.port}
    same = {name: said[name] for name in ServeSettings.model_fields if name in said}
    settings = {
        "model": first,
        "more_models": tuple(more),
        "model_memory": _bytes(said["model_memory"]),
        "adapter_memory": _bytes(said["adapter_memory"]),
        "control_memory": _bytes(said["control_memory"]),
        "origins": tuple(_origin(one) for one in said["origins"] or ()),
        "hosts": tuple(said["hosts"] or ()),
        "public_url": _public_url(said["public_url"]),
        "vertex": routes,
        "hooks": tuple(said["hooks"] or ()),
        "warm_sizes": tuple(said["warm_sizes"] or ()),
        "prefix": _prefix(said["prefix"]),
        "limits": _limits(said),
    }
    return ServeSettings(**{**same, **settings, **elsewhere})


def _limits(said: dict[str, Any]) -> Limits:
    """The file of --limits, then each --limit NAME=VALUE, then the options that have a name of their own."""
    from pydantic import ValidationError

    limits = {} if said["limits"] is None else _limits_file(said["limits"])
    for one in said["limit"] or ():
        name, equals, value = one.partition("=")
        if not equals or name not in Limits.model_fields or name == "keys":
            known = ", ".join(sorted(set(Limits.model_fields) - {"keys"}))
            raise InputError(f"--limit {one}", allowed=f"NAME=VALUE, NAME one of {known}")
        limits[name] = value
    for name in BOUNDS.names:
        if said[name] is not None:
            value = said[name] * UNITS.get(name, 1)
            limits[name] = int(value) if name == "keep_bytes" else value
    try:
        checked = Limits.model_validate(limits)
    except ValidationError as error:
        first = error.errors()[0]
        what, mend = first_fault(error.errors()), ""
        if first["type"] == "extra_forbidden":
            fields = KeyLimits.model_fields if len(first["loc"]) > 1 else Limits.model_fields
            near = difflib.get_close_matches(str(first["loc"][-1]), fields, 1)
            what = f"{'.'.join(map(str, first['loc']))}: there is no such limit"
            mend = f"write {near[0]}" if near else ""
        allowed = "as docs/serving.md lists them, under Limits"
        raise InputError(f"limit {what}", allowed=allowed, mend=mend) from error
    if "queue_per_key" in limits:
        return checked
    per_key = checked.queue if said["key_file"] is None else max(1, checked.queue // 2)
    return checked.model_copy(update={"queue_per_key": per_key})


def _limits_file(path: Path) -> dict[str, Any]:
    import yaml

    from darkroom.recipe.yaml_text import parse_yaml, yaml_fault

    try:
        content = parse_yaml(read_typed(path), max_nodes=MOST_LIMITS)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--limits '{path}' cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"--limits '{path}' is no YAML: {yaml_fault(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"--limits '{path}'", allowed="NAME: VALUE lines, and keys: with limits by key")
    for name, value in content.items():
        of_keys = value.items() if name == "keys" and isinstance(value, dict) else ()
        within = [item for key, own in of_keys if isinstance(own, dict) for item in own.items()]
        for limit, given in ((name, value), *within):
            if isinstance(given, bool):  # which pydantic takes for 0 or 1
                raise InputError(f"limit {limit}: {given} was given", allowed="a number")
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
