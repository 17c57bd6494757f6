"""Verbs for pictures: import, inspect, delete, prepare."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from darkroom.cli.application import Json, app, console, progress_bar, show, table
from darkroom.cli.groups import grouped
from darkroom.errors import InputError


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="a folder, zip, tar, Parquet file or MDS folder")],
    store: Annotated[Path, typer.Argument(help="the picture store, such as pictures.lance")],
    kind: Annotated[str, typer.Option(help="auto, folder, webdataset, parquet or mds")] = "auto",
    image_column: Annotated[str | None, typer.Option(help="Parquet, MDS: where the picture is")] = None,
    caption_column: Annotated[str | None, typer.Option(help="where the caption is")] = None,
    background: Annotated[str, typer.Option(help="colour behind transparent pictures")] = "white",
    min_size: Annotated[int, typer.Option(min=1, help="shortest side taken, in pixels")] = 16,
    max_pixels: Annotated[
        int, typer.Option(min=1, help="most pixels taken, checked before decoding")
    ] = 178_000_000,
    missing_caption: Annotated[str, typer.Option(help="reject, or keep with an empty caption")] = "reject",
    caption_encoding: Annotated[
        str | None, typer.Option(help="of captions that are not UTF-8, such as cp1252; else rejected")
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="of these pictures, such as CC-BY-4.0; model cards say it")
    ] = None,
    as_json: Json = False,
) -> None:
    """Import pictures and captions into a store.

    A second run continues, and adds no duplicates.

    Example: darkroom import photos/ pictures.lance
    """
    from darkroom.data.importers.job import import_pictures

    if licence is not None and not re.fullmatch(r"[ -~]{1,200}", licence):
        raise InputError(f"--licence {licence!r}", allowed="1 to 200 plain characters on one line")
    with progress_bar("import", as_json) as progress:
        report = import_pictures(
            source,
            store,
            kind=kind,
            image_column=image_column,
            caption_column=caption_column,
            background=background,
            min_size=min_size,
            max_pixels=max_pixels,
            on_missing_caption=missing_caption,
            caption_encoding=caption_encoding,
            progress=progress,
        )
    if licence is not None:
        from darkroom.data.store import Store

        Store.open(store).note_licence(source, licence)
    show(report, as_json, report.lines)


@app.command()
def inspect(
    what: Annotated[Path, typer.Argument(help="a store, a model, an adapter file or a run folder")],
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="the contact sheet of a store, a PNG")
    ] = None,
    mark_doubles: Annotated[
        bool, typer.Option("--mark-doubles", help="note near-doubles of a store in its column double_of")
    ] = False,
    as_json: Json = False,
) -> None:
    """What a store, model, adapter or run holds.

    A store also gets an overview picture.

    Marked doubles are left out of training by data.filter='double_of IS NULL'.

    Example: darkroom inspect pictures.lance
    """
    if mark_doubles:
        from darkroom import data

        with progress_bar("doubles", as_json) as progress:
            data.mark_doubles(data.Store.open(what), progress=progress)
    description = _described(what, out)
    show(description, as_json, lambda: table(description))


def _described(what: Path, out: Path | None) -> dict[str, Any]:
    from darkroom.data.store import exists

    if (what / "metrics.jsonl").is_file() or (what / "recipe.yaml").is_file():
        from darkroom.run import Run, summarise

        run = Run.open(what)
        bill = run.bill()
        return {**summarise(run).to_dict(), "bill": bill.model_dump(mode="json") if bill else None}
    if what.suffix == ".safetensors" or (what / "adapter_config.json").is_file():
        from darkroom import models

        return models.describe_adapter(what) if models.is_adapter(what) else models.describe(what)
    if (what / "model_index.json").is_file() or (what.suffix != ".lance" and not exists(what)):
        from darkroom import models

        return models.describe(what)
    from darkroom import data

    store = data.Store.open(what)
    if not store.num_rows:
        return {**data.describe(store), "contact_sheet": None}
    sheet = out or what.with_suffix(".contact.png")
    data.contact_sheet(store, sheet)
    return {**data.describe(store), "contact_sheet": str(sheet)}


@app.command()
def delete(
    store: Annotated[Path, typer.Argument(help="the picture store")],
    ids: Annotated[list[str] | None, typer.Option("--id", help="a row's id; may be given again")] = None,
    source: Annotated[str | None, typer.Option(help="all rows that came from this source")] = None,
    as_json: Json = False,
) -> None:
    """Delete pictures from a store, and from the disk.

    Pictures deleted by id are refused by later imports.

    Stopped or killed, the same command goes on. Versions that a run has pinned keep their pictures; it says
    so. An id that is not in the store deletes nothing.

    Example: darkroom delete pictures.lance --id 2c26b46b68ffc68ff99b453c1d304134
    """
    from darkroom.data.store import Store

    deleted = Store.open(store).delete(ids=ids or None, source=source)
    counts = {"deleted": deleted.rows, "purged": deleted.purged}
    before = "" if deleted.rows else ": what was asked for was deleted before"
    line = f"{deleted.rows:,} pictures deleted from {store}{before}"
    show(counts, as_json, lambda: [line, *deleted.purged.lines()])


@app.command()
def verify(
    paths: Annotated[list[Path], typer.Argument(help="picture stores; pictures; signed models or files")],
    purge: Annotated[
        bool, typer.Option("--purge", help="first remove what was deleted and what belongs to no version")
    ] = False,
    trust: Annotated[
        Path | None, typer.Option(help="pictures: PEM of authorities; models: PEM of the signer's public key")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a store, a picture's credentials or a model's signature.

    A store: reads every picture, compares hashes and counts, names what is left over. A picture: credentials
    and their chain, watermark, parameters. A model folder, adapter or recipe: its `.sig` file.

    Exit code 0: nothing is wrong. 1: something is, one line each.

    Example: darkroom verify pictures.lance

    Example: darkroom verify out/00000-0.png

    Example: darkroom verify model/ --trust signer.pub.pem
    """
    found = [_verified(path, purge, trust, as_json) for path in paths]
    findings = [one.to_dict() for one in found]
    show(
        findings[0] if len(findings) == 1 else {"files": findings},
        as_json,
        lambda: [x for one in found for x in one.lines()],
    )
    if not all(one.ok for one in found):
        raise typer.Exit(1)


def _verified(path: Path, purge: bool, trust: Path | None, as_json: bool) -> Any:
    """What was found in a store, a picture, or what is signed."""
    from darkroom import data
    from darkroom.models.signing import signature_of, verify_signature
    from darkroom.recipe.recipe import RECIPE_SUFFIXES

    signed = signature_of(path).is_file()
    if path.is_dir() and not signed and not (path / "model_index.json").is_file():
        with progress_bar("verify", as_json) as progress:
            return data.verify(path, purge=purge, progress=progress)
    if purge:
        raise InputError(f"--purge with '{path}'", allowed="a picture store")
    if signed or path.is_dir() or path.suffix.lower() in (".safetensors", *RECIPE_SUFFIXES):
        return verify_signature(path, trust)
    if not path.exists():
        with progress_bar("verify", as_json) as progress:  # says what a store's path may be
            return data.verify(path, purge=purge, progress=progress)
    from darkroom.sample.provenance import verify_picture

    return verify_picture(path, trust=trust)


@dataclass(frozen=True)
class EncoderOptions:
    """The encoders of a Ray cluster."""

    ray_address: Annotated[
        str | None, typer.Option(help="ray: auto, local or HOST:PORT; $RAY_ADDRESS, else local")
    ] = None
    encoders: Annotated[str | None, typer.Option(help="ray: how many encode, N or MIN:MAX; default: 1")] = (
        None
    )
    accelerator: Annotated[
        str | None, typer.Option(help="ray: the accelerator type they run on, as Ray names it")
    ] = None
    fraction: Annotated[
        float | None, typer.Option(help="ray: each one's share of a GPU, or of CPU cores; default: 1")
    ] = None
    cpu_workers: Annotated[
        int | None, typer.Option(min=1, help="ray: tasks that read and decode; default: all CPUs left")
    ] = None
    grows: Annotated[
        bool,
        typer.Option(
            "--wait-for-autoscaler", help="ray: an autoscaler adds nodes: wait for what is not there yet"
        ),
    ] = False

    def given(self) -> list[str]:
        """The options that were given."""
        flags = {"grows": "--wait-for-autoscaler"}
        names = [name for name, value in asdict(self).items() if value is not None and value is not False]
        return [flags.get(name, f"--{name.replace('_', '-')}") for name in names]


@app.command()
@grouped
def prepare(
    store: Annotated[Path, typer.Argument(help="the picture store")],
    model: Annotated[str, typer.Option(help="whose encoders: a model folder, hub id or family")],
    resolution: Annotated[int, typer.Option(min=8, help="side in pixels")] = 512,
    text: Annotated[bool, typer.Option("--text", help="the captions' states too")] = False,
    precision: Annotated[str, typer.Option(help="float32 or bf16")] = "float32",
    buckets: Annotated[
        int,
        typer.Option(
            min=0, help="keep aspect ratios, sides being multiples of this: 64, or 8 for small models"
        ),
    ] = 0,
    engine: Annotated[str, typer.Option(help="local: this process; ray: a Ray cluster")] = "local",
    *,
    on: EncoderOptions,
    as_json: Json = False,
) -> None:
    """Encode pictures once: adds latent and text columns.

    A second run encodes only what is new.

    Example: darkroom prepare pictures.lance --model runs/vae/model --resolution 64

    Example: darkroom prepare pictures.lance --model sd2/ --engine ray --encoders 2:16 --accelerator A10G
    """
    settings = {"resolution": resolution, "text": text, "precision": precision, "bucket_step": buckets}
    if engine not in ("local", "ray"):
        raise InputError(f"--engine {engine}", allowed="local, ray")
    if engine == "local" and (given := on.given()):
        raise InputError(f"{', '.join(given)} with --engine local", allowed="with --engine ray")
    if engine == "local":
        from darkroom.prepare.job import prepare as run

        with progress_bar("prepare", as_json) as progress:
            report = run(store, model, progress=progress, **settings)  # type: ignore[arg-type]
    else:
        from darkroom.cluster.encoders import Bounds
        from darkroom.cluster.prepare import prepare_on_ray

        bounds = Bounds.parsed(
            on.encoders or "1", on.accelerator, 1.0 if on.fraction is None else on.fraction
        )
        with progress_bar("prepare", as_json) as progress:
            report = prepare_on_ray(
                store,
                model,
                address=on.ray_address,
                bounds=bounds,
                cpu_workers=on.cpu_workers,
                grows=on.grows,
                progress=progress,
                say=console(as_json),
                **settings,
            )
    show(report, as_json, report.lines)
