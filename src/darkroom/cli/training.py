"""Verbs for jobs: quickstart, train, recipe, runs, export, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from darkroom.cli.application import RECIPE_HELP, Json, Out, app, columns, console, recipe_file, show
from darkroom.cli.groups import grouped
from darkroom.errors import DarkroomError, InputError

if TYPE_CHECKING:
    from darkroom.cluster.train import Placement
    from darkroom.train.run import Tried
    from darkroom.train.trainer import TrainResult


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="the folder for everything it makes")] = Path("quickstart"),
    seed: Annotated[int, typer.Option(min=0, help="of the pictures, the weights and the training")] = 0,
    as_json: Json = False,
) -> None:
    """Pictures -> model -> pictures -> report, in minutes.

    On a CPU, with pictures that it draws itself.

    Example: darkroom quickstart --out quickstart
    """
    from darkroom.quickstart.journey import quickstart as run

    result = run(out, seed=seed, console=console(as_json), whole_process=True)
    show(result, as_json, result.lines)


@dataclass(frozen=True)
class RayOptions:
    """Where a Ray cluster is and what it gives: `darkroom.cluster.train.Placement`."""

    ray_address: Annotated[
        str | None, typer.Option(help="ray: auto, local or HOST:PORT; $RAY_ADDRESS, else local")
    ] = None
    workers: Annotated[
        str | None,
        typer.Option(help="ray: how many; MIN:MAX as machines come and go; else as parallel.devices"),
    ] = None
    accelerator: Annotated[
        str | None, typer.Option(help="ray: the accelerator type of the workers' nodes, as Ray names it")
    ] = None
    cpus: Annotated[int, typer.Option(min=1, help="ray: CPUs of each worker, and its threads")] = 1
    max_failures: Annotated[
        int, typer.Option(min=0, help="ray: how often lost workers are started again")
    ] = 3
    grows: Annotated[
        bool,
        typer.Option(
            "--wait-for-autoscaler", help="ray: an autoscaler adds nodes: wait for what is not there yet"
        ),
    ] = False

    def placement(self) -> Placement:
        """Where workers go."""
        from darkroom.cluster.train import Placement
        from darkroom.cluster.worker import WorkerRange

        workers = WorkerRange.parsed(self.workers) if self.workers is not None else None
        return Placement(
            self.ray_address, workers, self.accelerator, self.cpus, self.max_failures, self.grows
        )

    def check_engine(self, engine: str) -> None:
        """InputError for options that mean nothing without a cluster."""
        flags = {
            "--ray-address": self.ray_address is not None,
            "--workers": self.workers is not None,
            "--accelerator": self.accelerator is not None,
            "--wait-for-autoscaler": self.grows,
        }
        if asked := ", ".join(name for name, is_given in flags.items() if is_given):
            raise InputError(f"{asked} with --engine {engine}", allowed="with --engine ray")


@app.command()
@grouped
def train(
    recipe: Annotated[Path, typer.Argument(help=RECIPE_HELP, callback=recipe_file)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    *,
    out: Out = None,
    resume: Annotated[str, typer.Option(help="auto, never, or a checkpoint's folder")] = "auto",
    engine: Annotated[
        str,
        typer.Option(
            help="local: this process; torchrun: as many as parallel.devices; ray: workers of a Ray cluster; "
            "auto: this machine, as it needs"
        ),
    ] = "auto",
    on_ray: RayOptions,
    of: Annotated[
        str | None, typer.Option("--from", help="kohya: the file is a TOML of kohya's sd-scripts")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="say what it takes on this machine, and stop")] = False,
    plan_first: Annotated[
        bool,
        typer.Option(
            "--plan-first", help="count the plan that the run keeps before it starts (5 to 20 s), if need be"
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train what a recipe says.

    The same command resumes where it was stopped.

    Several values, as in optim.lr=1e-5,5e-5,1e-4, make a run of each in one folder, under one budget.
    A run that diverges or runs out of memory is reported and the others go on. Exit code 1 if none finished.

    Example: darkroom train recipes/emoji.yaml train.steps=2000 --out runs/emoji
    """
    if plan:
        from darkroom.cli.planning import plan_here

        if of is not None:
            raise InputError("--plan with --from", mend="take --plan-first")
        return plan_here(recipe, overrides or [], as_json)
    from darkroom.recipe.recipe import read_sweep

    # What starts processes that train does not itself import what they need.
    place = out or Path("runs") / recipe.stem
    how: Any = {"out": place, "resume": resume, "console": console(as_json)}
    recipes = read_sweep(recipe, overrides or [], of=of)
    if engine not in ("auto", "local", "torchrun", "ray"):
        raise InputError(f"--engine {engine}", allowed="auto, local, torchrun, ray")
    if engine == "ray":
        if len(recipes) > 1:
            raise InputError(f"{len(recipes)} recipes with --engine ray", allowed="one value for each key")
        from darkroom.cluster.train import train as train_on_ray

        return _show_run(train_on_ray(recipes[0][1], placement=on_ray.placement(), **how), as_json)
    on_ray.check_engine(engine)
    from darkroom.train.ranks import is_first, launch, num_processes, starts_processes
    from darkroom.train.tracking import check_reach

    first = recipes[0][1]
    if engine != "local" and starts_processes(first.parallel):
        count = num_processes(first.parallel)
        if not first.phases:
            first.check(count)
            check_reach(first.track, first.evaluate, first.checkpoint)
        arguments = ["train", str(recipe), *(overrides or []), "--out", str(place), "--resume", resume]
        arguments += [] if of is None else ["--from", of]
        flags = [flag for flag, is_set in (("--json", as_json), ("--plan-first", plan_first)) if is_set]
        return launch([*arguments, "--engine", "local", *flags], count)
    from darkroom.plan.ask import estimate_run
    from darkroom.train import run

    how |= {"whole_process": True, "estimate": partial(estimate_run, count=plan_first)}
    if len(recipes) > 1:
        tried = run.sweep(recipe, overrides or [], of=of, **how)
        return _show_sweep(tried, as_json) if is_first() else None
    result = run.train(first, **how)
    return _show_run(result, as_json) if is_first() else None


def _show_sweep(tried: list[Tried], as_json: bool) -> None:
    """A line for each run; DarkroomError where none got to its end."""
    rows = [
        {
            "run": str(one.run),
            **one.settings,
            "loss": one.result.loss if one.result else None,
            "held out": one.result.heldout_loss if one.result else None,
            "usd": one.bill.usd,
            "note": one.failure.partition(";")[0],
        }
        for one in tried
    ]
    show([one.to_dict() for one in tried], as_json, lambda: columns(rows))
    if all(one.failure for one in tried):
        raise DarkroomError(f"none of {len(tried)} runs got to its end")


def _show_run(result: TrainResult, as_json: bool) -> None:
    made = [f"made: {path}" for path in result.outputs]
    show(result.to_dict(), as_json, lambda: [*made, f"bill: {result.bill.line()}"])


@app.command()
def recipe(
    pattern: Annotated[
        str | None, typer.Argument(help="keys to show: a part of their name, or with * as 'optim.*'")
    ] = None,
    as_keys: Annotated[
        bool, typer.Option("--keys", help="keys, types, defaults and what is allowed (the default)")
    ] = False,
    as_schema: Annotated[bool, typer.Option("--schema", help="JSON Schema, for editors and checks")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="the page docs/recipe.md")] = False,
    as_json: Json = False,
) -> None:
    """Every key of a recipe: type, default, limits.

    And what it means, and what tasks set instead.

    Example: darkroom recipe --keys 'optim.*'

    Example: darkroom recipe --schema
    """
    import json

    from darkroom.recipe import reference

    forms = {"--keys": as_keys, "--schema": as_schema, "--markdown": as_markdown}
    given = [flag for flag, is_given in forms.items() if is_given]
    if len(given) > 1:
        raise InputError(" and ".join(given), allowed="one of them")
    if pattern is not None and (as_schema or as_markdown):
        raise InputError(f"'{pattern}' with {given[0]}, which prints every key", allowed="with --keys")
    if as_markdown:
        page = reference.page()
        show({"page": page}, as_json, lambda: page.splitlines())
    elif as_schema:
        made = reference.schema()
        show(made, as_json, lambda: [json.dumps(made, indent=2, ensure_ascii=False)])
    else:
        found = reference.find_keys(pattern)
        show(found, as_json, lambda: (line for one in found for line in one.lines()))


@app.command()
def runs(
    compare: Annotated[list[str] | None, typer.Argument(metavar="[compare RUN RUN ...]")] = None,
    root: Annotated[Path, typer.Option(help="the folder that holds the runs")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs, or compare two and more.

    Example: darkroom runs compare runs/a runs/b
    """
    from darkroom import run

    if not compare:
        found = run.list_runs(root)
        none = [f"no runs in '{root}'"]
        show(found, as_json, lambda: columns([one.to_dict() for one in found]) if found else none)
        return
    if compare[0] != "compare" or len(compare) < 3:
        raise InputError(f"runs {' '.join(compare)}", allowed="runs, or runs compare RUN RUN ...")
    side_by_side = run.compare(*map(Path, compare[1:]))
    show(side_by_side, as_json, lambda: _side_by_side(side_by_side))


def _side_by_side(compared: dict[str, Any]) -> Iterator[str]:
    """A line for each key that differs, a column for each run."""
    for part in ("settings", "metrics", "bill"):
        rows = [
            {f"{part}:": key, **dict(zip(compared["runs"], values, strict=True))}
            for key, values in compared[part].items()
        ]
        yield from columns(rows) if rows else [f"{part}: the same"]
        yield ""


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="a run folder, an adapter file, a model, or a recipe")],
    to: Annotated[
        Path,
        typer.Option(
            help="the model folder to write; for an adapter a .safetensors file, for a recipe .yaml"
        ),
    ],
    merge: Annotated[
        list[str] | None,
        typer.Option(help="FILE[:WEIGHT], an adapter to merge into a model; may be given again"),
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(help="the step; default: the newest, or with evaluate.patience the best")
    ] = None,
    ema: Annotated[bool, typer.Option(help="the averaged weights")] = True,
    kohya: Annotated[
        bool, typer.Option("--kohya", help="an adapter in the keys of ComfyUI and A1111")
    ] = False,
    precision: Annotated[
        str | None, typer.Option(help="float32, bf16 or fp16, of an adapter or a model")
    ] = None,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="a model as one .safetensors for ComfyUI and A1111")
    ] = False,
    sign: Annotated[
        Path | None, typer.Option(help="a private key (PEM; see `keys make-signing-key`) to sign it with")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's weights as a model or adapter, signed or not.

    Also while it trains; an adapter merged, or as its own file. A recipe is checked and copied, to be signed.

    Example: darkroom export runs/emoji --to model/ --checkpoint 2000

    Example: darkroom export sd15/ --merge sks.safetensors:0.8 --to merged/

    Example: darkroom export sks.safetensors --kohya --to sks_comfy.safetensors

    Example: darkroom export runs/emoji --single-file --to emoji.safetensors
    """
    from darkroom import models
    from darkroom.models import signing
    from darkroom.recipe.recipe import RECIPE_SUFFIXES, copy_recipe

    if sign is not None:
        signing.check_private_key(sign)
    recipe = recipe_file(Path(source))
    if recipe is not None and recipe.suffix in RECIPE_SUFFIXES and recipe.is_file():
        if merge or checkpoint or kohya or precision or single_file:
            raise InputError(f"recipe '{source}'", allowed="--to and --sign")
        made = copy_recipe(recipe, to)
    elif not single_file:
        made = _exported(source, to, merge, checkpoint, ema, kohya, precision, console(as_json))
    elif not merge and models.is_model(source):
        made = models.export_model(source, to, single_file=True, dtype=_precision(precision))
    else:
        with TemporaryDirectory(
            prefix=".export-", dir=to.parent if to.parent.is_dir() else None, ignore_cleanup_errors=True
        ) as temporary:
            folder = _exported(
                source, Path(temporary) / "model", merge, checkpoint, ema, False, None, console(as_json)
            )
            made = models.export_model(folder, to, single_file=True, dtype=_precision(precision))
    kind = "recipe" if made.suffix in RECIPE_SUFFIXES else "adapter" if models.is_adapter(made) else "model"
    files = {kind: made}
    if sign is not None:
        files["signature"] = signing.sign(made, sign)
    show(files, as_json, lambda: [f"{name}: {path}" for name, path in files.items()])


def _precision(name: str | None) -> Any:
    from darkroom import models

    return None if name is None else models.precision(name)


def _exported(
    source: str,
    to: Path,
    merge: list[str] | None,
    checkpoint: int | None,
    ema: bool,
    kohya: bool,
    precision: str | None,
    say: Callable[[str], None],
) -> Path:
    """A run's, a model's or an adapter's weights in the form they have."""
    from darkroom import models, sample, train

    dtype = _precision(precision)
    if merge:
        chosen = [sample.Named.parsed(one) for one in merge]
        return models.export_merged(source, to, [(one.adapter, one.weight) for one in chosen], dtype=dtype)
    if models.is_adapter(Path(source)):
        return models.export_adapter(source, to, kohya=kohya, dtype=dtype)
    if models.is_model(source):
        return models.export_model(source, to, dtype=dtype)
    if precision is not None:
        raise InputError("--precision with a run", allowed="with --merge, --single-file, or an adapter")
    return train.export(source, to, checkpoint=checkpoint, ema=ema, kohya=kohya, say=say)


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="a finished run")],
    repo: Annotated[str, typer.Argument(help="the hub's repository, OWNER/NAME")],
    license: Annotated[str | None, typer.Option(help="of what was trained, such as openrail++")] = None,
    private: Annotated[bool, typer.Option("--private", help="a new repository is private")] = False,
    hub: Annotated[str | None, typer.Option(help="another hub's address; else the usual one")] = None,
    as_json: Json = False,
) -> None:
    """Put a run's adapter or model on a hub.

    A model card and the run's last samples go with it.

    Example: darkroom push runs/dog me/sks-dog --private
    """
    from darkroom.train.exports import push as put

    made = put(run, repo, license=license, private=private, hub=hub)
    show({"repository": made}, as_json, lambda: [f"repository: {made}"])


@app.command()
def report(
    sources: Annotated[list[Path] | None, typer.Argument(help="run folders and measurement CSVs")] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="the HTML file")] = Path("report.html"),
    five_systems: Annotated[
        bool,
        typer.Option("--five-systems", help="five published systems next to darkroom's figures, with a CSV"),
    ] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="samples alone: prompts down, steps across")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a report: one HTML file.

    Curves, samples by step, settings, environment, bill.

    Example: darkroom report runs/emoji --out report.html
    """
    if checkpoints:
        from darkroom.report.checkpoints import write_checkpoints_page

        page = write_checkpoints_page(sources or [], out)
        show({"report": page}, as_json, lambda: [f"report: {page}"])
        return
    if five_systems:
        from darkroom.proof.page import write_five_systems

        laid, rows = write_five_systems(out, sources or [])
        show({"report": laid, "csv": rows}, as_json, lambda: [f"report: {laid}", f"cells: {rows}"])
        return
    from darkroom.report.runs import write_report

    page = write_report(sources or [], out, plan=True)
    show({"report": page}, as_json, lambda: [f"report: {page}"])
