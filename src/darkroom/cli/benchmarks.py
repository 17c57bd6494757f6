"""`darkroom bench`: measurements as rows of a tidy CSV."""

from __future__ import annotations

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
