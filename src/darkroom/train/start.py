"""The doors: `train` starts a run or goes on with one, `export` writes a model from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom import hardware
from darkroom.errors import InputError, RecipeError
from darkroom.run import ENVIRONMENT, Run, is_free, numbered_folder
from darkroom.train.best import KIND as BEST
from darkroom.train.build import keep_tokenizer
from darkroom.train.checkpoint import Checkpoint, Saved, load_checkpoint
from darkroom.train.checks import check_settings
from darkroom.train.defaults import ADAPTER_TASKS
from darkroom.train.feed import Feed
from darkroom.train.gather import forget, has_own_store, store_path
from darkroom.train.job import Job, Pinned, Say, make_job
from darkroom.train.online import OpenFeed
from darkroom.train.parallel import check_batch
from darkroom.train.phases import train_phases
from darkroom.train.pinning import let_go, settled
from darkroom.train.places import Place, RemotePlace, newest, place_of, take_records
from darkroom.train.ranks import ALONE, Ranks, joined, started_together
from darkroom.train.result import described_base, write_adapter_file, write_whole_model
from darkroom.train.resume import check_changes, check_environment
from darkroom.train.tracking import NoTracker, make_tracker
from darkroom.train.trainer import Trainer, TrainResult, result_of

if TYPE_CHECKING:
    from darkroom.recipe import Recipe

Estimate = Callable[["Recipe", int], Mapping[str, Any] | None]
"""What the plan says of a recipe's run on so many devices, `line` for the log among it; None without one."""


def train(
    recipe: Recipe,
    *,
    out: Path | str,
    resume: str = "auto",
    feed: Feed | OpenFeed | None = None,
    estimate: Estimate | None = None,
    console: Say = print,
) -> TrainResult:
    """Train a recipe in the run folder `out`; the same call again goes on where it stopped, to the bit.

    Where several processes were started together, each calls this, and rank 0 tells and writes.

    `resume`: `auto` goes on with the run in `out` if there is one; `never` starts a new one beside it,
    numbered; a checkpoint's folder starts a new one from that state, and the recipe may then differ.
    `feed(k)` opens another stream of batches from step k on (an OpenFeed learns first what it feeds);
    `estimate` says what the plan foretells of a run that begins: it is shown, and kept in the run. Raises
    InputError before any work for what cannot be, Stopped (state saved) on Ctrl-C and SIGTERM, DarkroomError
    when the loss is not finite.
    """
    if not recipe.phases:  # before the processes meet: each finds the same mistake for itself
        check_settings(recipe)
        check_batch(recipe, started_together())
    with joined(recipe.parallel) as ranks:
        say = console if ranks.first else _nothing
        if recipe.phases:
            if resume != "auto":
                raise InputError(f"--resume {resume} with phases", allowed="auto")
            one = partial(_phase, feed=feed, estimate=estimate, console=console)
            return train_phases(recipe, Path(out), one, say)
        place = _place(ranks, Path(out), resume, recipe, say)
        if place.run is None:
            return _begin(recipe, place, feed, estimate, say, ranks)
        with _held(place.run, ranks):
            return _go_on(recipe, place.run, feed, say, ranks)


def _phase(
    recipe: Recipe, out: Path, *, feed: Feed | OpenFeed | None, estimate: Estimate | None, console: Say
) -> TrainResult:
    return train(recipe, out=out, feed=feed, estimate=estimate, console=console)


def _nothing(line: str) -> None:
    """What the other ranks say."""


@contextmanager
def _held(run: Run, ranks: Ranks) -> Iterator[None]:
    """Within, no other job trains this run: rank 0 holds it for all."""
    if not ranks.first:
        ranks.meet()
        yield
        return
    with run.lock():
        ranks.meet()
        yield


@dataclass(frozen=True)
class _Place:
    """Where a run will be: one that goes on, or a free folder, with a checkpoint to start from or none."""

    path: Path
    run: Run | None = None
    start: Checkpoint | None = None


def _place(ranks: Ranks, out: Path, resume: str, recipe: Recipe, say: Say) -> _Place:
    """Rank 0 looks, so that what it makes a moment later misleads nobody."""
    if resume == "auto":
        there = ranks.tell(lambda: (out / "recipe.yaml").is_file() or _fetch_run(recipe, out, say))
        return _Place(out, Run(out) if there else None)  # other machines may not have the folder yet
    free = Path(ranks.tell(lambda: str(numbered_folder(out))))
    if resume == "never":
        return _Place(free)
    start = Path(resume)
    if not (start / "manifest.json").is_file():
        raise InputError(
            f"--resume {resume}", allowed="auto, never, or a checkpoint's folder (RUN/checkpoints/step-...)"
        )
    return _Place(free, start=load_checkpoint(start))


def _fetch_run(recipe: Recipe, out: Path, say: Say) -> bool:
    """Make the run anew that an address holds, if it does; what it made along the way is not there."""
    if recipe.checkpoint.url is None or not is_free(out):
        return False
    place, found = newest([RemotePlace(recipe.checkpoint.url, out)], say, ALONE)
    if place is None or found is None:
        return False
    before = type(recipe).model_validate(found.scalars["recipe"])
    take_records(found, out)
    there = (out / ENVIRONMENT).is_file()
    Run.create(out, before.dump(), Run(out).environment if there else {"store": found.scalars["store"]})
    say(f"'{out}' is made from {place.address}, which holds this run up to step {found.step}")
    return True


def _begin(
    recipe: Recipe,
    place: _Place,
    feed: Feed | OpenFeed | None,
    estimate: Estimate | None,
    say: Say,
    ranks: Ranks,
) -> TrainResult:
    before = hardware.resident_bytes()
    if not ranks.tell(lambda: is_free(place.path)):
        raise InputError(f"'{place.path}' holds something that is no run", mend="choose another --out")
    if place.start is not None and place.start.step >= recipe.train.steps:
        raise RecipeError("train.steps", f"{recipe.train.steps}, but {place.start.step} steps are made")
    if ranks.tell(lambda: bool(place_of(recipe.checkpoint.url, place.path).kept())):
        raise RecipeError(
            "checkpoint.url",
            f"'{recipe.checkpoint.url}' holds another run's checkpoints",
            mend="choose another prefix, or go on with that run: --resume auto and a new --out",
        )
    for note in recipe.derived:
        say(note)
    version = ranks.tell(lambda: settled(recipe, place.path, None, say))
    with _undone(recipe, place.path, ranks):
        job = make_job(recipe, Pinned(place.path, version), feed, say, ranks)
    if ranks.first:
        Run.create(place.path, recipe.dump(), _environment(job) | {"resident_bytes": before})
    run = Run(place.path)
    with _held(run, ranks):
        if ranks.first:
            _keep_plan(run, job, estimate, say)
            keep_tokenizer(recipe.model, job.task.model, run.path)
        trainer = _trainer(job, run, say, first_step=0)
        if place.start is not None:
            trainer.restore(place.start)
            trainer.save()  # from now on the run stands on its own
            say(f"starting from {place.start.path} (step {place.start.step})")
        return trainer.train()


@contextmanager
def _undone(recipe: Recipe, run: Path, ranks: Ranks) -> Iterator[None]:
    """What was settled and gathered for a run is let go where something within ends it."""
    try:
        yield
    except BaseException as error:
        if ranks.first:
            let_go(recipe, run)
        if isinstance(error, InputError):
            forget(run)
        raise


def _keep_plan(run: Run, job: Job, estimate: Estimate | None, say: Say) -> None:
    found = None if estimate is None else estimate(job.recipe, job.num_devices)
    if found is not None:
        run.set_plan(found)
        say(found["line"])


def _places(run: Run, *recipes: Recipe) -> list[Place]:
    """Where a run's checkpoints may be, now and before: the first is where they are now."""
    urls = dict.fromkeys([*(recipe.checkpoint.url for recipe in recipes), None])
    return [place_of(url, run.path) for url in urls]


def _go_on(recipe: Recipe, run: Run, feed: Feed | OpenFeed | None, say: Say, ranks: Ranks) -> TrainResult:
    before = type(recipe).model_validate(ranks.tell(lambda: run.recipe))
    place, checkpoint = newest(_places(run, recipe, before), say, ranks)
    step = checkpoint.step if checkpoint else 0
    notes = check_changes(before.model_dump(mode="json"), recipe.model_dump(mode="json"), step)
    if ranks.tell(lambda: bool(run.outputs and (step == recipe.train.steps or run.ended_early))):
        made = f"it ended early, after step {step}" if run.ended_early else f"all {step} steps are made"
        say(f"'{run.path}' is finished: {made}")
        return result_of(run)
    store = ranks.tell(lambda: run.environment.get("store", {}))
    ranks.in_turn(run.tidy)
    micro = checkpoint.scalars["micro_batch"] if checkpoint else None
    here = not has_own_store(recipe) or Path(store_path(recipe, run.path)).exists()
    known = store.get("version") if here else None
    anew = checkpoint is None or isinstance(place, RemotePlace)
    version = ranks.tell(lambda: settled(recipe, run.path, known, say) if anew else known)
    pinned = Pinned(
        run.path,
        version,
        store.get("rows"),
        micro,
        contents=store.get("contents"),
        base=ranks.tell(lambda: run.environment.get("fingerprints")),
    )
    job = make_job(recipe, pinned, feed, say, ranks)
    if checkpoint:
        notes += check_environment(checkpoint.scalars["environment"], job.environment)

    def prepare_run() -> None:
        run.truncate(step if checkpoint else -1)
        run.set_recipe(recipe.dump())
        run.add_session(_environment(job))
        keep_tokenizer(recipe.model, job.task.model, run.path)

    ranks.in_turn(prepare_run)
    trainer = _trainer(job, run, say, first_step=step)
    say(f"going on after step {step} of {recipe.train.steps}")
    for note in notes:
        say(f"note: {note}")
    if checkpoint and place:
        trainer.restore(checkpoint)
        ranks.meet()
        place.forget()
    return trainer.train()


def _environment(job: Job) -> dict[str, Any]:
    """Where a session runs, the store it reads, and of an adapter what it is trained on."""
    told = {**hardware.environment(), "store": dict(job.store), "fingerprints": dict(job.base)}
    adapts = job.recipe.task in ADAPTER_TASKS
    return told | ({"base": described_base(job.task.model)} if adapts else {})


def _trainer(job: Job, run: Run, say: Say, first_step: int) -> Trainer:
    for note in job.notes:
        say(note)
    tracker = make_tracker(job.recipe.track, run.path, first_step + 1) if job.ranks.first else NoTracker()
    return Trainer(job, run, tracker=tracker, say=say)


def export(
    run: Path | str,
    to: Path | str,
    *,
    checkpoint: int | None = None,
    ema: bool = True,
    kohya: bool = False,
    say: Say = print,
) -> Path:
    """Write a run's model as a folder that diffusers opens, from a checkpoint (the newest unless said).

    Of a run with `evaluate.patience` the newest one's best weights so far, unless `checkpoint` is said.
    Of a run that trained an adapter the folder holds the base with the adapter merged in, and `to` may be a
    `.safetensors` file for the adapter itself (with `kohya` in the keys of ComfyUI and A1111). With `ema` the
    averaged weights, else the trained ones. InputError names the checkpoints there are.
    """
    from darkroom.recipe import Recipe

    source, target = Run.open(run), Path(to)
    if target.exists():
        raise InputError(f"'{target}' is there already", mend="choose another folder")
    recipe = Recipe.model_validate(source.recipe)
    as_file = target.suffix == ".safetensors"
    if kohya and not as_file:
        raise InputError(f"--kohya with the folder '{to}'", allowed="--to FILE.safetensors")
    state = _state(source, recipe, checkpoint, say)
    values, measured = _exported(recipe, state, newest=checkpoint is None, ema=ema, say=say)
    if as_file:
        base = source.environment.get("base", {})
        return write_adapter_file(recipe, values, target, name=target.stem, base=base, kohya=kohya)
    write_whole_model(recipe, values, measured, source.path, target)
    return target


def _exported(
    recipe: Recipe, state: Checkpoint, *, newest: bool, ema: bool, say: Say
) -> tuple[Saved, dict[str, float]]:
    """The weights to export, with what was measured: the best ones of a run that looks for them."""
    best: dict[str, Any] | None = state.scalars.get(BEST)
    if best is not None and recipe.evaluate.patience is not None and newest and ema:
        say(f"the weights after step {best['step']}, of the best held-out loss; --checkpoint takes others")
        return state.tensors[BEST], best["measured"]
    averaged = state.tensors.get("ema") if ema else None
    return averaged or state.tensors["weights"], state.scalars["measured"]


def _state(run: Run, recipe: Recipe, step: int | None, say: Say) -> Checkpoint:
    places = _places(run, recipe)
    if step is None:
        found = newest(places, say, ALONE)[1]
        if found is None:
            raise InputError(f"'{run.path}' has no checkpoint yet")
        return found
    there = [(kept, place) for place in places for kept in place.kept()]
    for kept, place in reversed(there):
        if kept.step == step:
            return place.load(kept)
    raise InputError(f"no checkpoint of step {step}", allowed=", ".join(str(kept.step) for kept, _ in there))
