"""The command line: parse, call one function, print. No logic lives here.

Exit codes: 0 done, 1 failed or stopped, 2 wrong input (one line says what was given, what is allowed and
how to mend it). `--json` prints one object for machines. Everything heavy is imported by the verb that
needs it, so `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import darkroom
from darkroom.errors import DarkroomError, InputError

app = typer.Typer(
    name="darkroom",
    help="Stable Diffusion models, from pictures to pictures: import, prepare, train, generate, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure: rows of a tidy CSV.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Out = Annotated[Path | None, typer.Option("--out", help="where the result goes")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code; a user's mistake is one line, never a traceback."""
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # their hints are for those who call them directly
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        code = app(args=arguments, prog_name="darkroom", standalone_mode=False)
    except typer.Abort:
        sys.exit(_failed("stopped", 1))
    except typer.TyperException as error:
        sys.exit(_misused(error))
    except DarkroomError as error:
        sys.exit(_failed(str(error), error.exit_code))
    except KeyboardInterrupt:
        sys.exit(_failed("stopped", 1))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        sys.exit(_failed(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1))
    # The parser turns Ctrl-C into 130; a stopped job is one that was not done.
    sys.exit(_failed("stopped", 1) if code == 130 else code if isinstance(code, int) else 0)


def _misused(error: typer.TyperException) -> int:
    """A mistake on the command line: one line and where to look; nothing said at all shows the help."""
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if message.startswith("Usage:"):
        print(message)
        return 2
    where = context.command_path if context else "darkroom"
    return _failed(f"{' '.join(message.split())} (see '{where} --help')", 2)


def _failed(message: str, code: int) -> int:
    print(f"darkroom: {message}", file=sys.stderr)
    return code


def _version(value: bool) -> None:
    if value:
        print(f"darkroom {darkroom.__version__}")
        raise typer.Exit


@app.callback()
def _darkroom(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def _print(result: Any, as_json: bool, lines: Callable[[], Any]) -> None:
    """Print a result: one JSON object, or what `lines` gives, line by line."""
    if as_json:
        print(json.dumps(_plain(result), ensure_ascii=False))
        return
    for line in lines():
        print(line)


def _plain(value: Any) -> Any:
    """A value as JSON has them: models, dataclasses and paths taken apart."""
    import dataclasses

    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def _table(content: dict[str, Any], indent: str = "") -> Iterator[str]:
    """A dictionary as aligned lines, dictionaries in it indented below their name."""
    width = max((len(key) for key in content), default=0)
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}"
            yield from _table(value, indent + "  ")
        else:
            yield f"{indent}{key:<{width}}  {_cell(value)}"


def _columns(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Dictionaries of the same keys as a table with a heading."""
    if not rows:
        return
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _console(as_json: bool) -> Callable[[str], None]:
    """Where a job tells how it goes: beside the JSON object, on the error stream."""
    return lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(_cell(v) for v in value) if isinstance(value, (list, tuple)) else str(value)


@contextmanager
def _progress(label: str, quiet: bool) -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar on a terminal, a plain line every few seconds in a log, nothing beside `--json`."""
    if quiet:
        yield None
        return
    from darkroom.progress import progress

    with progress(label) as advance:
        yield advance


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="the folder for everything it makes")] = Path("quickstart"),
    seed: Annotated[int, typer.Option(min=0, help="of the pictures, the weights and the training")] = 0,
    as_json: Json = False,
) -> None:
    """Pictures -> model -> pictures -> report, on a CPU, in minutes.

    Example: darkroom quickstart --out quickstart
    """
    from darkroom.quickstart import quickstart as run

    result = run(out, seed=seed, console=_console(as_json))
    _print(result, as_json, result.lines)


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
    as_json: Json = False,
) -> None:
    """Bring pictures and captions into a store; a second run goes on and adds no doubles.

    Example: darkroom import photos/ pictures.lance
    """
    from darkroom.data import import_pictures

    with _progress("import", as_json) as progress:
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
            progress=progress,
        )
    _print(report, as_json, report.lines)


@app.command()
def inspect(
    what: Annotated[Path, typer.Argument(help="a store, a model folder or a run folder")],
    out: Annotated[Path | None, typer.Option(help="the contact sheet of a store, a PNG")] = None,
    mark_doubles: Annotated[
        bool, typer.Option("--mark-doubles", help="note near-doubles of a store in its column double_of")
    ] = False,
    as_json: Json = False,
) -> None:
    """What is in it; a store also gets a contact sheet.

    Marked doubles are left out of training by data.filter='double_of IS NULL'.

    Example: darkroom inspect pictures.lance
    """
    if mark_doubles:
        from darkroom import data

        with _progress("doubles", as_json) as progress:
            data.mark_doubles(data.Store.open(what), progress=progress)
    told = _described(what, out)
    _print(told, as_json, lambda: _table(told))


def _described(what: Path, out: Path | None) -> dict[str, Any]:
    if (what / "metrics.jsonl").is_file() or (what / "recipe.yaml").is_file():
        from darkroom.run import Run, summarise

        run = Run.open(what)
        bill = run.bill()
        return {**summarise(run).to_dict(), "bill": bill.model_dump(mode="json") if bill else None}
    if (what / "model_index.json").is_file() or what.suffix != ".lance":
        from darkroom import models

        return models.describe(what)
    from darkroom import data

    store = data.Store.open(what)
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
    """Delete pictures from a store for good: their bytes leave the disk; by id they stay out.

    Example: darkroom delete pictures.lance --id 2c26b46b68ffc68ff99b453c1d304134
    """
    from darkroom.data import Store

    deleted = Store.open(store).delete(ids=ids or None, source=source)
    _print({"deleted": deleted}, as_json, lambda: [f"{deleted:,} pictures deleted from {store}"])


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="a run folder")],
    to: Annotated[Path, typer.Option(help="the model folder to write")],
    checkpoint: Annotated[int | None, typer.Option(help="the step; the newest if not said")] = None,
    ema: Annotated[bool, typer.Option(help="the averaged weights")] = True,
    as_json: Json = False,
) -> None:
    """Write a run's weights as a model folder, also while it trains.

    Example: darkroom export runs/emoji --to model/ --checkpoint 2000
    """
    from darkroom.train import export as write

    folder = write(source, to, checkpoint=checkpoint, ema=ema)
    _print({"model": folder}, as_json, lambda: [f"model: {folder}"])


@app.command()
def prepare(
    store: Annotated[Path, typer.Argument(help="the picture store")],
    model: Annotated[str, typer.Option(help="whose encoders: a model folder, hub id or family")],
    resolution: Annotated[int, typer.Option(min=8, help="side in pixels")] = 512,
    text: Annotated[bool, typer.Option("--text", help="the captions' states too")] = False,
    precision: Annotated[str, typer.Option(help="float32 or bf16")] = "float32",
    as_json: Json = False,
) -> None:
    """Encode pictures once: adds latent (and text) columns; a second run encodes only what is new.

    Example: darkroom prepare pictures.lance --model runs/vae/model --resolution 64
    """
    from darkroom.prepare import prepare as run

    with _progress("prepare", as_json) as progress:
        report = run(store, model, resolution=resolution, text=text, precision=precision, progress=progress)
    _print(report, as_json, report.lines)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="the recipe, a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    out: Out = None,
    resume: Annotated[str, typer.Option(help="auto, never, or a checkpoint's folder")] = "auto",
    as_json: Json = False,
) -> None:
    """Train what a recipe says; the same command goes on where it was stopped.

    Example: darkroom train recipes/emoji.yaml train.steps=2000 --out runs/emoji
    """
    from darkroom.recipe import read_recipe
    from darkroom.train import train as run

    result = run(
        read_recipe(recipe, overrides or []),
        out=out or Path("runs") / recipe.stem,
        resume=resume,
        console=_console(as_json),
    )
    told = result.to_dict()
    _print(told, as_json, lambda: [f"model: {result.model}", f"bill: {result.bill.line()}"])


@app.command()
def runs(
    compare: Annotated[list[str] | None, typer.Argument(metavar="[compare RUN RUN]")] = None,
    root: Annotated[Path, typer.Option(help="the folder that holds the runs")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """What ran, what runs; or two runs side by side.

    Example: darkroom runs compare runs/a runs/b
    """
    from darkroom import run

    if not compare:
        found = run.list_runs(root)
        _print(found, as_json, lambda: _columns([one.to_dict() for one in found]))
        return
    if compare[0] != "compare" or len(compare) != 3:
        raise InputError(f"runs {' '.join(compare)}", allowed="runs, or runs compare RUN RUN")
    side_by_side = run.compare(Path(compare[1]), Path(compare[2]))
    _print(side_by_side, as_json, lambda: _table(side_by_side))


@app.command()
def report(
    sources: Annotated[list[Path], typer.Argument(help="run folders and measurement CSVs")],
    out: Annotated[Path, typer.Option(help="the HTML file")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """One HTML file: curves, samples by step, settings, environment, bill.

    Example: darkroom report runs/emoji --out report.html
    """
    from darkroom.report import write_report

    page = write_report(sources, out)
    _print({"report": page}, as_json, lambda: [f"report: {page}"])


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has and lacks, each lack with the line that mends it.

    Example: darkroom doctor
    """
    from darkroom.hardware import doctor as checks

    found = checks()
    _print(found, as_json, lambda: (line for check in found for line in check.lines()))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="a model folder, a hub id, or a family")],
    prompts: Annotated[list[str], typer.Argument(help="one or more prompts")],
    negative: Annotated[str | None, typer.Option(help="what to steer away from")] = None,
    seed: Annotated[int, typer.Option(min=0, help="picture i has seed + i")] = 0,
    num: Annotated[int, typer.Option(min=1, help="pictures of each prompt")] = 1,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT, the model's own if not said")] = None,
    steps: Annotated[int | None, typer.Option(help="solver steps; 30 if not said")] = None,
    guidance: Annotated[float | None, typer.Option(help="above 1 is on; 7.5 if not said")] = None,
    solver: Annotated[str | None, typer.Option(help="the model's own if not said")] = None,
    guidance_rescale: Annotated[float, typer.Option(help="0 to 1, against burnt contrast")] = 0.0,
    eta: Annotated[float, typer.Option(help="noise of ddim, 0 to 1")] = 0.0,
    karras: Annotated[bool | None, typer.Option(help="Karras sigmas")] = None,
    spacing: Annotated[str | None, typer.Option(help="leading, trailing or linspace")] = None,
    precision: Annotated[str, typer.Option(help="float32, bf16 or fp16")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")] = "auto",
    variant: Annotated[str | None, typer.Option(help="weight files of a variant, such as fp16")] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the hub")] = None,
    out: Annotated[Path, typer.Option(help="the folder for the pictures")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Prompts -> pictures, each with its parameters inside, and a grid of them.

    Example: darkroom generate model/ "a red circle" --num 4 --solver dpmpp_2m --steps 20
    """
    from darkroom import models, sample

    opened = models.load(
        model,
        dtype=models.precision(precision),
        device=models.device(device),
        variant=variant,
        revision=revision,
    )
    with _progress("denoise", as_json) as progress:
        pictures = sample.generate(
            opened,
            prompts,
            negative=negative,
            seed=seed,
            num=num,
            size=_size(size),
            steps=steps,
            guidance=guidance,
            solver=solver,
            guidance_rescale=guidance_rescale,
            eta=eta,
            karras=karras,
            spacing=spacing,
            progress=progress,
            notice=lambda note: print(f"note: {note}", file=sys.stderr),
        )
    files = sample.save_pictures(pictures, out)
    _print({"pictures": files}, as_json, lambda: files)


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise InputError(f"--size {text}", allowed="WIDTHxHEIGHT, such as 512x512")
    return int(width), int(height)


def _measured(rows: list[Any], out: Path | None, as_json: bool) -> None:
    """Print measurements and append them to a CSV."""
    from darkroom.measure import append_csv

    if out is not None:
        append_csv(out, rows)
    shown = ("benchmark", "case", "median_s", "ratio", "ratio_to", "images_per_s", "repeats", "note")
    _print(rows, as_json, lambda: _columns([{name: getattr(row, name) for name in shown} for row in rows]))


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
