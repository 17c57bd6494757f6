"""`darkroom bench`: measurements as rows of a tidy CSV."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from darkroom.cli.application import (
    PRECISION_HELP,
    RECIPE_HELP,
    SIZE_HELP,
    Json,
    Out,
    bench,
    columns,
    console,
    recipe_file,
    show,
    size_of,
)
from darkroom.cli.groups import grouped
from darkroom.errors import InputError

if TYPE_CHECKING:
    from darkroom.measure.finetuning import Finetuning
    from darkroom.train.jobs import TrainingSetup


def _measured(found: Iterable[Any], out: Path | None, as_json: bool) -> None:
    """Append measurements to a CSV as they come, and print them."""
    from darkroom.measure.timing import append_csv

    rows = []
    for row in found:
        rows.append(row)
        if out is not None:
            append_csv(out, [row])
    shown = ("benchmark", "case", "median_s", "ratio", "ratio_to", "images_per_s", "repeats", "note")
    show(rows, as_json, lambda: columns([{name: getattr(row, name) for name in shown} for row in rows]))


@bench.command("train")
def bench_train(
    recipe: Annotated[Path | None, typer.Argument(help=RECIPE_HELP, callback=recipe_file)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    model: Annotated[str | None, typer.Option(help="or a family's step on synthetic latents")] = None,
    resolution: Annotated[int | None, typer.Option(min=8, help="side in pixels, with --model")] = None,
    batch: Annotated[str, typer.Option(help="pictures a step, with --model; auto: what fits")] = "auto",
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", help="with --model: plain, or bf16,channels_last,...; again for more"),
    ] = None,
    device: Annotated[str, typer.Option(help="with --model: auto, cpu, cuda, ...")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="steps, or chunks of steps, measured")] = 7,
    profile: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="PNG of one iteration: where its time goes, and its memory"),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What the training loop adds to the bare step.

    With --model, each setting's share of a step.

    Example: darkroom bench train recipes/emoji.yaml --out results.csv

    Example: darkroom bench train --model sd2 --resolution 512 --batch auto --out results.csv

    Example: darkroom bench train recipes/emoji.yaml --profile iteration.png
    """
    if (recipe is None) == (model is None):
        raise InputError("bench train", allowed="a recipe, or --model FAMILY", mend="say one of them")
    if profile is not None:
        from darkroom.measure import training

        if model is None and recipe is not None:
            with _job_of(recipe, overrides or []) as job:
                found = training.profile_job(job, repeats=repeats)
        else:
            pictures = 1 if batch == "auto" else _count(batch)
            case = cases[0] if cases else None
            asked: Any = {"resolution": resolution, "batch": pictures, "case": case, "device": device}
            found = training.profile_family(str(model), **asked, repeats=repeats)
        return _profiled(found, profile, out, as_json)
    if model is not None or recipe is None:
        from darkroom.measure.pretraining import bench_pretraining

        rows = bench_pretraining(
            str(model),
            resolution=resolution,
            batch="auto" if batch == "auto" else _count(batch),
            cases=cases or (),
            repeats=repeats,
            device=device,
            say=console(as_json),
        )
        return _measured(rows, out, as_json)
    from darkroom.measure.training import bench_train as run

    _measured(run(recipe, overrides or [], repeats=repeats), out, as_json)
    return None


@contextmanager
def _job_of(recipe: Path, overrides: list[str]) -> Iterator[TrainingSetup]:
    """A recipe's job of these processes in a temporary folder. Raises what training it would raise."""
    from darkroom.recipe.recipe import read_recipe
    from darkroom.train.jobs import Pinned
    from darkroom.train.ranks import joined
    from darkroom.train.setup import make_job

    read = read_recipe(recipe, overrides)
    with (
        joined(read.parallel) as ranks,
        tempfile.TemporaryDirectory(prefix="darkroom-bench-", ignore_cleanup_errors=True) as folder,
    ):
        yield make_job(read, Pinned(Path(folder)), ranks=ranks)


def _profiled(found: Any, picture: Path, out: Path | None, as_json: bool) -> None:
    """Draw a profile and print its parts; of several processes the first has it."""
    if found is None:
        return
    from darkroom.report.measurements import draw_iteration

    console(as_json)(f"profile: {draw_iteration(found, picture)}")
    _measured(found.rows(), out, as_json)


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 4096:
        raise InputError(f"--batch {text}", allowed="auto, or 1 to 4096")
    return int(text)


@bench.command("loader")
def bench_loader(
    rows: Annotated[int, typer.Option(min=1, help="of the store, 32 KB each")] = 20_000,
    batch: Annotated[int, typer.Option(min=1, help="rows a batch")] = 256,
    repeats: Annotated[int, typer.Option(min=5, help="passes over the store")] = 7,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Samples/s of the loader, shuffled, against a plain scan.

    Example: darkroom bench loader --out results.csv
    """
    from darkroom.measure.loading import bench_loader as run

    _measured(run(rows=rows, batch=batch, repeats=repeats), out, as_json)


@bench.command("job-history")
def bench_job_history(
    jobs: Annotated[int, typer.Option(min=1, help="jobs in the history")] = 200_000,
    repeats: Annotated[int, typer.Option(min=5, help="jobs accepted, and lists")] = 50,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time the job queue with a long history.

    Milliseconds to accept a job and to list a key's newest ones, with a long history and with none.

    Example: darkroom bench job-history --out results.csv
    """
    from darkroom.cli.serving import need_server

    need_server()
    from darkroom.measure.job_history import bench_job_history as run

    _measured(run(jobs=jobs, repeats=repeats), out, as_json)


@bench.command("import")
def bench_import(
    kind: Annotated[str, typer.Option(help="of source: zip, webdataset or parquet")] = "zip",
    pictures: Annotated[
        int, typer.Option(min=1, help="in the source; one larger import has 4 times as many")
    ] = 20_000,
    size: Annotated[int, typer.Option(min=1, help="side of each picture in pixels")] = 64,
    picture_format: Annotated[str, typer.Option("--format", help="JPEG, PNG or WEBP")] = "WEBP",
    repeats: Annotated[int, typer.Option(min=5, help="imports measured")] = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Pictures/s of an import, and its memory.

    Example: darkroom bench import --out results.csv

    Example: darkroom bench import --kind webdataset --size 1024 --format JPEG --pictures 1000
    """
    from darkroom.measure.loading import bench_import as run

    if picture_format.upper() not in ("JPEG", "PNG", "WEBP"):
        raise InputError(f"--format {picture_format}", allowed="JPEG, PNG, WEBP")
    rows = run(kind=kind, pictures=pictures, size=size, format=picture_format.upper(), repeats=repeats)
    _measured(rows, out, as_json)


@bench.command("backends")
def bench_backends(
    model: Annotated[str, typer.Argument(help="a model folder, a hub id, or a family")],
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", help="such as 'openvino bf16', or BACKEND OPTIMISATIONS; again for more"),
    ] = None,
    size: Annotated[str | None, typer.Option(help=SIZE_HELP)] = None,
    steps: Annotated[int, typer.Option(min=1, help="of the whole picture")] = 20,
    rows: Annotated[int, typer.Option(min=1, help="rows of a U-Net call")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="U-Net calls measured of each")] = 5,
    pictures: Annotated[int, typer.Option(min=0, help="whole pictures of each; 0 for none")] = 1,
    guidance: Annotated[
        float, typer.Option(min=0, help="of the whole picture; 1, as few-step models take, is off")
    ] = 7.5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """U-Net call, picture and loop of each backend.

    On the CPU, against diffusers in float32.

    Example: darkroom bench backends sd15 --size 512x512 --steps 20 --out results.csv
    """
    from darkroom import models
    from darkroom.measure.backends import DEFAULT_CASES
    from darkroom.measure.backends import bench_backends as run

    asked = size_of(size)
    rows_measured = run(
        models.load(model),
        cases=tuple(cases or DEFAULT_CASES),
        size=asked,
        steps=steps,
        rows=rows,
        repeats=repeats,
        pictures=pictures,
        guidance=guidance,
        say=lambda text: print(text, file=sys.stderr),
    )
    _measured(rows_measured, out, as_json)


Model = Annotated[str, typer.Argument(help="a model folder, a hub id, or a family (random weights)")]
Size = Annotated[str | None, typer.Option(help=SIZE_HELP)]
Steps = Annotated[int, typer.Option(min=1, help="solver steps")]
Guidance = Annotated[float, typer.Option(min=0, help="above 1 is on")]
Precision = Annotated[str, typer.Option(help=f"of the weights that are loaded: {PRECISION_HELP}")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")]


def _drawing(model: str, size: str | None, steps: int, guidance: float, precision: str, device: str) -> Any:
    """The picture job that a benchmark repeats."""
    from darkroom import models
    from darkroom.measure.optimisations import Workload

    asked, place = size_of(size), models.device(device)
    opened = models.load(model, dtype=models.precision(precision, place), device=place)
    side = opened.sample_size
    return Workload(opened, asked or (side, side), steps=steps, guidance=guidance)


@bench.command("optimisations")
@bench.command("ladder", hidden=True)  # its name until this release
def bench_optimisations(
    model: Model,
    cases: Annotated[
        list[str] | None, typer.Argument(help="optimisations with commas; default: every one and stacks")
    ] = None,
    size: Size = None,
    steps: Steps = 20,
    guidance: Guidance = 7.5,
    precision: Precision = "float32",
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="pictures timed of each, in turns with the plain")] = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Every optimisation against the plain model.

    Time, memory, energy, and what it costs the picture.

    Example: darkroom bench optimisations sd15 --steps 20 --out results.csv
    """
    from darkroom.measure.optimisations import bench_optimisations as run

    drawing = _drawing(model, size, steps, guidance, precision, device)
    _measured(run(drawing, cases=cases or (), repeats=repeats, say=console(as_json)), out, as_json)


@bench.command("batch")
def bench_batch(
    model: Model,
    size: Size = None,
    steps: Steps = 20,
    guidance: Guidance = 7.5,
    device: Device = "auto",
    backends: Annotated[str, typer.Option(help="torch, compile, onnx, openvino, with commas")] = "torch",
    most: Annotated[int, typer.Option(min=1, help="the largest batch")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="batches timed of each kind, in turns")] = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Batch 1, 2, 4 and so on until memory ends.

    Precision, autocast and backend, interleaved.

    Example: darkroom bench batch sd15 --most 8 --out results.csv
    """
    from darkroom.measure.batch import bench_batch as run
    from darkroom.measure.batch import default_kinds

    drawing = _drawing(model, size, steps, guidance, "float32", device)
    kinds = default_kinds(drawing.device, [name.strip() for name in backends.split(",") if name.strip()])
    rows = run(drawing, kinds=kinds, most=most, repeats=repeats, say=console(as_json))
    _measured(rows, out, as_json)


@bench.command("precision")
def bench_precision(
    model: Model,
    against: Annotated[str, typer.Option(help="the other precision: bf16, fp16, tf32, autocast")] = "bf16",
    prompt: Annotated[str | None, typer.Option(help="what is drawn")] = None,
    size: Size = None,
    steps: Annotated[str, typer.Option(help="numbers of steps, with commas")] = "5,10,20,30,50,75,100",
    guidance: Guidance = 7.5,
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="runs timed of each, in turns")] = 3,
    page: Annotated[
        Path | None, typer.Option(dir_okay=False, help="one HTML file with pictures and plots")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """float32 against another precision.

    Runs of 5 to 100 steps, and the intermediates of one long run.

    Example: darkroom bench precision model/ --against bf16 --page precision.html --out results.csv
    """
    from dataclasses import replace

    from darkroom.measure.optimisations import compare_precisions, parse_steps
    from darkroom.report.measurements import write_precision_page

    counts = parse_steps(steps)
    drawing = _drawing(model, size, counts[-1], guidance, "float32", device)
    if prompt is not None:
        drawing = replace(drawing, prompts=(prompt,))
    found = compare_precisions(drawing, against=against, steps=counts, repeats=repeats, say=console(as_json))
    if page is not None:
        console(as_json)(f"page: {write_precision_page(found, page)}")
    _measured(found.rows, out, as_json)


@dataclass(frozen=True)
class FinetuneOptions:
    """Which fine-tunings are compared: `darkroom.measure.finetuning.Finetuning`."""

    methods: Annotated[str, typer.Option(help="with commas")] = "full,lora,dreambooth,dreambooth-lora"
    token: Annotated[str, typer.Option(help="the rare word")] = "sks"
    batches: Annotated[str, typer.Option(help="with commas")] = "1,2,4,8"
    ranks: Annotated[str, typer.Option(help="of adapters, with commas")] = "4,8,16,32"
    resolutions: Annotated[str, typer.Option(help="in pixels, with commas")] = "256,512,768"
    resolution: Annotated[int, typer.Option(help="of what is trained")] = 512
    batch: Annotated[int, typer.Option(min=1, help="of what is trained")] = 4
    rank: Annotated[int, typer.Option(min=1, help="of adapters that are trained")] = 8
    targets: Annotated[str, typer.Option(help="qv, attention, all-linear or conv")] = "attention"
    steps: Annotated[int, typer.Option(min=1, help="of what is trained")] = 400
    every: Annotated[int, typer.Option(min=1, help="steps between scores")] = 100
    method_steps: Annotated[
        list[str] | None, typer.Option(help="METHOD=STEPS where one is trained longer; again for more")
    ] = None
    lr: Annotated[list[str] | None, typer.Option(help="METHOD=RATE; again for more")] = None
    sweep: Annotated[str, typer.Option(help="learning rates to compare, with commas")] = "1e-5,5e-5,1e-4"
    sweep_method: Annotated[str, typer.Option(help="by which method")] = "lora"
    sweep_batch: Annotated[int, typer.Option(min=1, help="at which batch")] = 5

    def settings(self, **more: Any) -> Finetuning:
        """What these options say, lists split at their commas, with more settings."""
        from darkroom.cli.finetuning import finetuning_settings, split

        plain = {name: value for name, value in asdict(self).items() if name != "lr"}
        return finetuning_settings(
            **plain
            | {
                "rates": dict(one.partition("=")[::2] for one in self.lr or []),
                "method_steps": dict(one.partition("=")[::2] for one in self.method_steps or []),
                "methods": tuple(split(self.methods, str)),
                "batches": tuple(split(self.batches, int)),
                "ranks": tuple(split(self.ranks, int)),
                "resolutions": tuple(split(self.resolutions, int)),
                "sweep": tuple(split(self.sweep, float)),
            }
            | more
        )


@bench.command("finetune")
@grouped
def bench_finetune(
    model: Annotated[str, typer.Argument(help="a model folder; what is measured and fine-tuned")],
    photos: Annotated[Path, typer.Argument(help="3 to 30 photographs of one subject")],
    class_word: Annotated[str, typer.Option(help="what the subject is: dog")],
    out: Annotated[Path, typer.Option("--out", help="folder for tables, plots, pictures and the page")],
    *,
    extractor: Annotated[
        list[str] | None, typer.Option(help="NAME=WHERE as in darkroom evaluate; again for more")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="file of prompts with {token} and {class}")] = None,
    compared: FinetuneOptions,
    num: Annotated[int, typer.Option(min=1, help="pictures of each prompt")] = 4,
    draw_steps: Annotated[int, typer.Option(min=1, help="solver steps of a picture")] = 25,
    guidance: Guidance = 7.5,
    class_images: Annotated[int, typer.Option(min=1, help="for prior preservation")] = 24,
    memory: Annotated[str, typer.Option(help="what the search for the largest batch stays under")] = "2GB",
    planned: Annotated[str, typer.Option(help="also plan this model for comparison, or none")] = "sd15",
    gpu: Annotated[str, typer.Option(help="the planned cards")] = "A100",
    cards: Annotated[int, typer.Option(min=1, help="how many planned cards")] = 2,
    work: Annotated[Path | None, typer.Option(help="folder of runs; default: OUT/work")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="steps timed of each case")] = 5,
    costs_only: Annotated[
        bool, typer.Option("--costs-only", help="memory, speed and cost; nothing is followed or scored")
    ] = False,
    as_json: Json = False,
) -> None:
    """One subject, every fine-tuning method.

    Memory, speed, cost, likeness by steps, and the best recipes.

    What finds no memory or diverges is a row that says so. The same command goes on where it stopped.

    Example: darkroom bench finetune model/ photos/ --class-word dog --extractor all=ext/ --out dog/
    """
    from darkroom.cli.finetuning import report

    folder = work or out / "work"
    asked = compared.settings(
        base=model, photos=photos, class_word=class_word, work=folder, class_images=class_images
    )
    side = (compared.resolution, compared.resolution)
    found = report(
        asked,
        out,
        extractors=dict(one.partition("=")[::2] for one in extractor or []),
        prompts=prompts,
        num=num,
        draw={"steps": draw_steps, "guidance": guidance, "size": side},
        memory=memory,
        planned=planned,
        gpu=gpu,
        cards=cards,
        repeats=repeats,
        costs_only=costs_only,
        say=console(as_json),
    )
    show(found, as_json, found.lines)


@bench.command("serve")
def bench_serve(
    model: Model,
    adapters: Annotated[int, typer.Option(min=0, help="LoRA files made for the trace")] = 20,
    seconds: Annotated[float, typer.Option(min=0.1, help="of each trial")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="of saturation, the servers in turns")] = 2,
    loads: Annotated[str, typer.Option(help="multiples of the capacity, with commas")] = "0.5,1,4",
    tables: Annotated[
        str, typer.Option(help="with commas; load alone is overload without the other servers")
    ] = "saturation,poisson,load",
    seed: Annotated[int, typer.Option(min=0, help="of the trace and the adapters")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="of every server; 0 leaves it to torch")] = 0,
    device: Device = "auto",
    option: Annotated[list[str] | None, typer.Option(help="a further word for darkroom serve")] = None,
    page: Annotated[Path | None, typer.Option(dir_okay=False, help="one HTML file with plots")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Darkroom's server against diffusers.

    One request at a time, and batches of one key. About 5 minutes; --seconds 60 for figures to rely on, which
    --tables load has in less than 5.

    Example: darkroom bench serve model/ --out rows.csv --page serve.html
    """
    from darkroom.cli.serving import need_server
    from darkroom.errors import InputError
    from darkroom.measure.serving import ServeBench
    from darkroom.measure.serving import bench_serve as run
    from darkroom.report.measurements import say_goals, write_serving_page

    need_server()
    try:
        multiples = tuple(float(word) for word in loads.split(",") if word.strip())
    except ValueError:
        raise InputError(f"--loads '{loads}'", allowed="numbers with commas, such as 0.5,1,2") from None
    rows = run(
        ServeBench(
            model,
            adapters=adapters,
            seconds=seconds,
            rounds=rounds,
            loads=multiples,
            tables=tuple(word.strip() for word in tables.split(",") if word.strip()),
            seed=seed,
            threads=threads,
            device=device,
            options=tuple(option or ()),
        ),
        console(as_json),
    )
    say_goals(rows, console(as_json))
    if page is not None:
        console(as_json)(f"page: {write_serving_page(rows, page)}")
    _measured(rows, out, as_json)
