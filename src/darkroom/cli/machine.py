"""Verbs for the machine and its keys: doctor, keys make-test-certificate, keys make-signing-key."""

from __future__ import annotations

from pathlib import Path
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

    What is missing is listed with the command that installs or sets it.

    Exit code 1 if a required part is missing.

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


# ---- keys and certificates

keys = typer.Typer(help="Keys and certificates to sign with.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys")


@keys.command("make-test-certificate")
def make_test_certificate(
    out: Annotated[Path, typer.Option(help="the PEM file to write")] = Path("certificate.pem"),
    name: Annotated[str, typer.Option(help="the signer's name")] = "darkroom test signer",
) -> None:
    """Make a certificate for trying `--sign`.

    It is for `generate` and `serve`, by an authority that nobody else trusts.

    Example: darkroom keys make-test-certificate --out certificate.pem
    """
    from darkroom import certificates

    _check_free(out)
    if not 1 <= len(name) <= 40:
        raise InputError(f"--name {name}", allowed="1 to 40 characters")
    certificates.make_test_certificate(out, name)
    print(f"{out}: keep it to yourself, the key is inside")


@keys.command("make-signing-key")
def make_signing_key(
    out: Annotated[Path, typer.Option(help="the private key's PEM file to write")] = Path("signer.pem"),
) -> None:
    """Make a key for `export --sign`.

    Its public half (signer.pub.pem) is for `verify --trust`.

    Example: darkroom keys make-signing-key --out signer.pem
    """
    from darkroom.models.signing import make_key, public_path

    _check_free(out)
    _check_free(public_path(out))
    make_key(out)
    print(f"{out}: keep it to yourself; {public_path(out)} is for those who verify")


def _check_free(path: Path) -> None:
    if path.exists():
        raise InputError(f"'{path}' is there already", mend="name another with --out, or move it away")
