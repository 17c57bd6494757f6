"""Verbs for servers: serve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from darkroom.cli.door import app
from darkroom.errors import InputError


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help="a model folder, a hub id, or a family")] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="a folder of LoRA files; new ones appear by themselves")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="adapters that lie ready at once")] = 16,
    max_rank: Annotated[int, typer.Option(min=1, help="the largest rank of an adapter")] = 64,
    host: Annotated[
        str, typer.Option(help="the address to listen on; others need --api-key-file")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="who may come in; see --make-key")] = None,
    make_key: Annotated[
        str | None, typer.Option(help="add a key of this name to --api-key-file, print it, and end")
    ] = None,
    origin: Annotated[list[str] | None, typer.Option(help="a further web origin that may ask")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="a further name of this server, without keys")
    ] = None,
    state: Annotated[Path, typer.Option(help="the folder of jobs and pictures")] = Path("darkroom-serve"),
    jobs: Annotated[
        str | None, typer.Option(help="the jobs' database, if not SQLite: postgresql+psycopg://...")
    ] = None,
    name: Annotated[str, typer.Option(help="of this server, where several share a database")] = "darkroom",
    capacity: Annotated[
        int | None, typer.Option(min=1, help="U-Net evaluations a step; by memory if not said")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="pictures that may wait; more are refused")] = 256,
    rate: Annotated[float, typer.Option(min=0.01, help="new jobs a minute with one key")] = 1200.0,
    keep: Annotated[float, typer.Option(min=0.001, help="hours that finished jobs are kept")] = 24.0,
    keep_gb: Annotated[
        float, typer.Option(min=0.001, help="of pictures that are kept; the oldest go first")
    ] = 10.0,
    drain: Annotated[float, typer.Option(min=0, help="seconds to finish when told to stop")] = 30.0,
    pad: Annotated[bool, typer.Option(help="only a few batch sizes, for compiled backends")] = False,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0, help="price of the device, for the cost of jobs")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, bf16 or fp16")] = "float32",
    backend: Annotated[str, typer.Option(help="torch, compile, onnx or openvino")] = "torch",
    optimise: Annotated[
        str | None, typer.Option(help="optimisations of the ladder; lossless ones if not said")
    ] = None,
    vertex: Annotated[
        bool, typer.Option(help="as Vertex AI's container: AIP_HTTP_PORT and the other AIP_ variables")
    ] = False,
    variant: Annotated[str | None, typer.Option(help="weight files of a variant, such as fp16")] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the hub")] = None,
) -> None:
    """A server of pictures: jobs that survive it, OpenAI's dialect, metrics. Ctrl-C drains, twice leaves.

    Example: darkroom serve model/ --adapters loras/ --port 8000
    """
    if make_key is not None:
        print(_new_key(api_key_file, make_key))
        return
    if model is None and not vertex:
        raise InputError("no model", mend="darkroom serve MODEL; see --help")
    _need_extra()
    from darkroom.serve.http.vertex import model_of, routes_of
    from darkroom.serve.limits import Limits
    from darkroom.serve.process import run
    from darkroom.serve.settings import ServeSettings

    routes = routes_of() if vertex else None
    if routes is not None:
        host, port = "0.0.0.0", routes.port
    _log_to_stderr()
    limits = Limits(
        queue=queue,
        queue_per_key=max(1, queue // 2) if api_key_file is not None else queue,
        rate_per_minute=rate,
        keep_s=keep * 3600,
        keep_bytes=int(keep_gb * 1e9),
    )
    run(
        ServeSettings(
            model=model if model is not None else model_of(),
            adapters=adapters,
            slots=slots,
            max_rank=max_rank,
            host=host,
            port=port,
            key_file=api_key_file,
            origins=tuple(origin or ()),
            hosts=tuple(allow_host or ()),
            state=state,
            jobs=jobs,
            name=name,
            capacity=capacity,
            pad=pad,
            device=device,
            precision=precision,
            backend=backend,
            optimise=optimise,
            variant=variant,
            revision=revision,
            drain_s=drain,
            vertex=routes,
            usd_per_hour=usd_per_hour,
            limits=limits,
        )
    )


def _new_key(path: Path | None, name: str) -> str:
    from darkroom.serve.keys import make_key

    if path is None:
        raise InputError("--make-key without a file", mend="add --api-key-file FILE")
    return make_key(path, name)


def _need_extra() -> None:
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
