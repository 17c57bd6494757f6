"""Verbs for the machine: doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from darkroom.cli.application import Json, app, show
from darkroom.errors import DarkroomError, InputError


@app.command()
def doctor(
    engine: Annotated[str, typer.Option(help="local: this machine; ray: a Ray cluster")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="ray: auto, local or HOST:PORT; $RAY_ADDRESS, else local")
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="ray: an accelerator type that must be there, as Ray names it")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="ray: the folder or address to measure, such as s3://bucket/runs; this folder"),
    ] = None,
    as_json: Json = False,
) -> None:
    """What this machine, or a cluster, has and lacks.

    Each lack with the line that mends it.

    Exit code 1 where something lacks that darkroom cannot do without.

    Example: darkroom doctor

    Example: darkroom doctor --engine ray --ray-address auto --storage s3://bucket/runs
    """
    flags = {"--ray-address": ray_address, "--accelerator": accelerator, "--storage": storage}
    if engine not in ("local", "ray"):
        raise InputError(f"--engine {engine}", allowed="local, ray")
    if engine == "ray":
        from darkroom.cluster.doctor import doctor as look

        found = look(ray_address, accelerator=accelerator, storage=storage)
    elif given := [flag for flag, value in flags.items() if value is not None]:
        raise InputError(f"{', '.join(given)} with --engine local", allowed="with --engine ray")
    else:
        from darkroom.hardware import doctor as checks

        found = checks()
    show(found, as_json, lambda: (line for check in found for line in check.lines()))
    if failed := [check.name for check in found if not check.ok and not check.optional]:
        raise DarkroomError(f"not in order: {', '.join(failed)}")
