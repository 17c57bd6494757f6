"""`darkroom bench`: measurements as rows of a tidy CSV."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from darkroom.cli.door import Json, Out, bench, columns, show


def _measured(rows: list[Any], out: Path | None, as_json: bool) -> None:
    """Print measurements and append them to a CSV."""
    from darkroom.measure import append_csv

    if out is not None:
        append_csv(out, rows)
    shown = ("benchmark", "case", "median_s", "ratio", "ratio_to", "images_per_s", "repeats", "note")
    show(rows, as_json, lambda: columns([{name: getattr(row, name) for name in shown} for row in rows]))


@bench.command("train")
def bench_train(
    recipe: Annotated[Path, typer.Argument(help="the recipe, a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    repeats: Annotated[int, typer.Option(min=5, help="chunks of steps measured")] = 7,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What the training loop adds to the bare step: forward, backward, optimiser.

    Example: darkroom bench train recipes/emoji.yaml --out results.csv
    """
    from darkroom.measure.training import bench_train as run
    from darkroom.recipe import read_recipe

    _measured(run(read_recipe(recipe, overrides or []), repeats=repeats), out, as_json)


@bench.command("loader")
def bench_loader(
    repeats: Annotated[int, typer.Option(min=5, help="passes over the store")] = 7,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Samples/s of the loader, shuffled, against a plain scan of the same store.

    Example: darkroom bench loader --out results.csv
    """
    from darkroom.measure.loading import bench_loader as run

    _measured(run(repeats=repeats), out, as_json)


@bench.command("import")
def bench_import(
    repeats: Annotated[int, typer.Option(min=5, help="imports measured")] = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Pictures/s of an import from a zip, and the memory it takes.

    Example: darkroom bench import --out results.csv
    """
    from darkroom.measure.importing import bench_import as run

    _measured(run(repeats=repeats), out, as_json)


@bench.command("backends")
def bench_backends(
    model: Annotated[str, typer.Argument(help="a model folder, a hub id, or a family")],
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="such as 'openvino bf16'; again for more")
    ] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT, the model's own if not said")] = None,
    steps: Annotated[int, typer.Option(min=1, help="of the whole picture")] = 20,
    rows: Annotated[int, typer.Option(min=1, help="rows of a U-Net call")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="U-Net calls measured of each")] = 5,
    pictures: Annotated[int, typer.Option(min=0, help="whole pictures of each; 0 for none")] = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """U-Net call, whole picture and loop of each backend against diffusers in float32, on the CPU.

    Example: darkroom bench backends sd15 --size 512x512 --steps 20 --out results.csv
    """
    from darkroom import models
    from darkroom.cli.pictures import _size
    from darkroom.measure.backends import DEFAULT_CASES
    from darkroom.measure.backends import bench_backends as run

    told = run(
        models.load(model),
        cases=tuple(cases or DEFAULT_CASES),
        size=_size(size),
        steps=steps,
        rows=rows,
        repeats=repeats,
        pictures=pictures,
        say=lambda text: print(text, file=sys.stderr),
    )
    _measured(told, out, as_json)
