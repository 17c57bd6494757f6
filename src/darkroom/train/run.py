"""Entry points: `train` starts a run or goes on with one, `export` writes a model from a checkpoint."""

from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from darkroom import hardware, models
from darkroom.bill import Bill, Meter
from darkroom.errors import DarkroomError, InputError, RecipeError, Stopped, is_out_of_memory
from darkroom.hardware import accelerator
from darkroom.hardware.system import file_name
from darkroom.libraries import without_compiler
from darkroom.recipe.fine_tuning import SUBJECT_TASKS
from darkroom.recipe.kohya import refuse_foreign_state
from darkroom.recipe.recipe import Recipe, read_sweep, recipe_of
from darkroom.recipe.sections import BudgetSettings, CheckpointSettings, DataSettings
from darkroom.run import ENVIRONMENT, Run, is_free, numbered_folder
from darkroom.train.checkpoint import Checkpoint, Saved, load_checkpoint
from darkroom.train.checkpoint_storage import (
    CheckpointStorage,
    RemotePlace,
    check_changes,
    check_environment,
    newest,
    place_of,
    take_records,
)
from darkroom.train.evaluation import KIND as BEST
from darkroom.train.exports import Exporter, described_base, write_adapter_file
from darkroom.train.feed import Feed, OpenFeed
from darkroom.train.jobs import Pinned, Say, TrainingSetup, devices_of
from darkroom.train.local_dataset import (
    class_note,
    forget,
    has_own_store,
    release_pins,
    settled,
    store_path,
)
from darkroom.train.memory import NotOneFits
from darkroom.train.model import keep_tokenizer
from darkroom.train.ranks import ALONE, RankLost, Ranks, joined, started_together
from darkroom.train.setup import make_job, own_device
from darkroom.train.tasks.lora import note_start
from darkroom.train.tracking import NoTracker, check_reach, make_tracker
from darkroom.train.trainer import Trainer, TrainResult, result_of

Estimate = Callable[[Run, int], Mapping[str, Any] | None]
"""What the plan says of a run on so many devices, `line` for the log among it; None without one."""


def train(
    recipe: Recipe,
    *,
    out: Path | str,
    resume: str = "auto",
    feed: Feed | OpenFeed | None = None,
    estimate: Estimate | None = None,
    console: Say = print,
    whole_process: bool = False,
) -> TrainResult:
    """Train a recipe in the run folder `out`; the same call again goes on where it stopped, to the bit.

    Where several processes were started together, each calls this, and rank 0 tells and writes.

    `resume`: `auto` goes on with the run in `out` if there is one; `never` starts a new one next to it,
    numbered; a checkpoint's folder starts a new one from that state, and the recipe may then differ.
    `feed(k)` opens another stream of batches from step k on (an OpenFeed learns first what it feeds);
    `estimate` gives the plan's estimate of a run that begins: it is shown, and kept in the run. With
    `whole_process` this process is there for the run alone: the bill counts it from its start. Raises
    InputError before any work for what cannot be, Stopped (state saved) on Ctrl-C and SIGTERM, DarkroomError
    when the loss is not finite.
    """
    if not recipe.phases:  # before the processes meet: each finds the same mistake for itself
        recipe.check(started_together())
        check_reach(recipe.track, recipe.evaluate, recipe.checkpoint)
    with joined(recipe.parallel) as ranks, without_compiler():
        say = console if ranks.first else _nothing
        launch = _Launch(recipe, feed, say, ranks, whole_process)
        if recipe.phases:
            if resume != "auto":
                raise InputError(f"--resume {resume} with phases", allowed="auto")
            again = partial(train, feed=feed, estimate=estimate, console=console)
            return launch.phases(Path(out), again)
        place = _place(ranks, Path(out), resume, recipe.checkpoint, say)
        if place.run is None:
            return launch.begin(place, estimate)
        with _held(place.run, ranks):
            return launch.resume(place.run)


def _nothing(line: str) -> None:
    """What the other ranks say."""


@contextmanager
def _held(run: Run, ranks: Ranks) -> Iterator[None]:
    """Within, no other job trains this run: rank 0 holds it for all."""
    if not ranks.first:
        ranks.barrier()
        yield
        return
    with run.lock():
        ranks.barrier()
        yield


@dataclass(frozen=True)
class _Place:
    """Where a run will be: one that goes on, or a free folder, with a checkpoint to start from or none."""

    path: Path
    run: Run | None = None
    start: Checkpoint | None = None


def _place(ranks: Ranks, out: Path, resume: str, settings: CheckpointSettings, say: Say) -> _Place:
    """Rank 0 looks, so that what it makes a moment later misleads nobody."""
    if resume == "auto":
        there = ranks.broadcast(lambda: (out / "recipe.yaml").is_file() or _fetch_run(settings.url, out, say))
        return _Place(out, Run(out) if there else None)  # other machines may not have the folder yet
    free = Path(ranks.broadcast(lambda: str(numbered_folder(out))))
    if resume == "never":
        return _Place(free)
    start = Path(resume)
    refuse_foreign_state("--resume", start)
    if not (start / "manifest.json").is_file():
        raise InputError(
            f"--resume {resume}", allowed="auto, never, or a checkpoint's folder (RUN/checkpoints/step-...)"
        )
    return _Place(free, start=load_checkpoint(start))


def _fetch_run(url: str | None, out: Path, say: Say) -> bool:
    """Make the run anew that an address holds, if it does; what it made along the way is not there."""
    if url is None or not is_free(out):
        return False
    place, found = newest([RemotePlace(url, out)], say, ALONE)
    if place is None or found is None:
        return False
    before = Recipe.model_validate(found.scalars["recipe"])
    take_records(found, out)
    there = (out / ENVIRONMENT).is_file()
    Run.create(out, before.dump(), Run(out).environment if there else {"store": found.scalars["store"]})
    say(f"'{out}' is made from {place.address}, which holds this run up to step {found.step}")
    return True


@dataclass(frozen=True)
class _Launch:
    """A recipe that these processes train, each in a call of its own."""

    recipe: Recipe
    feed: Feed | OpenFeed | None
    say: Say
    ranks: Ranks
    whole_process: bool

    def phases(self, out: Path, one: Callable[..., TrainResult]) -> TrainResult:
        """Train all phases with `one`; the same call again goes on in the phase where it stopped.

        The budget is that of all phases together.
        """
        budget = self.recipe.budget
        result: TrainResult | None = None
        used = None
        for folder, phase in self.recipe.in_phases(out):
            if used is not None:
                left = budget.less(used)
                if left is None:
                    raise Stopped(f"{budget.spent(used)} is spent by the phases; say a larger one to go on")
                phase = phase.model_copy(update={"budget": left})
            self.say(
                f"{folder.name}: {phase.train.steps} steps of {phase.train.global_batch} pictures, "
                f"{phase.data.resolution} px"
            )
            result = one(phase, out=folder, whole_process=self.whole_process and result is None)
            used = result.bill if used is None else used + result.bill
        assert result is not None
        return result

    def begin(self, place: _Place, estimate: Estimate | None) -> TrainResult:
        """Make a new run, and train it."""
        recipe, say, ranks = self.recipe, self.say, self.ranks
        before = hardware.resident_bytes()
        if not ranks.broadcast(lambda: is_free(place.path)):
            raise InputError(f"'{place.path}' holds something that is no run", mend="choose another --out")
        if place.start is not None and place.start.step >= recipe.train.steps:
            raise RecipeError("train.steps", f"{recipe.train.steps}, but {place.start.step} steps are made")
        if ranks.broadcast(lambda: bool(place_of(recipe.checkpoint.url, place.path).kept())):
            raise RecipeError(
                "checkpoint.url",
                f"'{recipe.checkpoint.url}' holds another run's checkpoints",
                mend="choose another prefix, or go on with that run: --resume auto and a new --out",
            )
        for note in recipe.derived:
            say(note)
        meter = self.meter()
        with meter.part("load"):
            version = ranks.broadcast(lambda: settled(recipe.data, place.path, None, say))
            with _undone(recipe.data, place.path, ranks):
                job = make_job(recipe, Pinned(place.path, version), self.feed, say, ranks, meter)
        if ranks.first:
            Run.create(place.path, recipe.dump(), _environment(job) | {"resident_bytes": before})
        run = Run(place.path)
        with _held(run, ranks):
            if ranks.first:
                with meter.part("plan"):
                    planned = None if estimate is None else estimate(run, job.num_devices)
                _keep_plan(run, planned, say)
                keep_tokenizer(recipe.model, job.task.model, run.path)
                note_start(run.path, job.step.weights.masters, recipe.adapter)
            trainer = _trainer(job, run, say, first_step=0, meter=meter)
            if place.start is not None:
                trainer.restore(place.start)
                trainer.save()  # from now on the run stands on its own
                say(f"starting from {place.start.path} (step {place.start.step})")
            return trainer.train()

    def meter(self, before: Bill | None = None) -> Meter:
        """What counts this session; `before` is the bill of the run's earlier ones."""
        device = own_device(self.recipe.train.device, self.ranks)
        number = devices_of(self.ranks, device)
        return Meter(device, before, num_devices=number, whole_process=self.whole_process)

    def resume(self, run: Run) -> TrainResult:
        """Train a run on from its newest checkpoint, after checking that it is the same job."""
        recipe, say, ranks = self.recipe, self.say, self.ranks
        before = recipe_of(ranks.broadcast(lambda: run.recipe), run.path)
        place, checkpoint = newest(_places(run, recipe.checkpoint, before.checkpoint), say, ranks)
        step = checkpoint.step if checkpoint else 0
        notes = check_changes(before.model_dump(mode="json"), recipe.model_dump(mode="json"), step)
        if ranks.broadcast(lambda: bool(run.outputs and (step == recipe.train.steps or run.ended_early))):
            made = f"it ended early, after step {step}" if run.ended_early else f"all {step} steps are made"
            say(f"'{run.path}' is finished: {made}")
            return result_of(run)
        store = ranks.broadcast(lambda: run.environment.get("store", {}))
        ranks.rank0_first(run.tidy)
        meter = self.meter(run.bill() if ranks.first else None)
        micro = checkpoint.scalars["micro_batch"] if checkpoint else None
        here = not has_own_store(recipe.data) or Path(store_path(recipe.data, run.path)).exists()
        known = store.get("version") if here else None
        anew = checkpoint is None or isinstance(place, RemotePlace)
        with meter.part("load"):
            version = ranks.broadcast(lambda: settled(recipe.data, run.path, known, say) if anew else known)
        pinned = Pinned(
            run.path,
            version,
            store.get("rows"),
            micro,
            checkpoint.scalars["environment"].get("channels_last") if checkpoint else None,
            contents=store.get("contents"),
            base=ranks.broadcast(lambda: run.environment.get("fingerprints")),
            chosen=store.get("chosen"),
        )
        with meter.part("load"):
            job = make_job(recipe, pinned, self.feed, say, ranks, meter)
        if checkpoint:
            notes += check_environment(checkpoint.scalars["environment"], job.environment)

        def prepare_run() -> None:
            """Cut metrics off after the checkpoint, and note this session."""
            run.truncate(step if checkpoint else -1)
            run.set_recipe(recipe.dump())
            run.add_session(_environment(job))
            keep_tokenizer(recipe.model, job.task.model, run.path)
            note_start(run.path, job.step.weights.masters, recipe.adapter)

        ranks.rank0_first(prepare_run)
        trainer = _trainer(job, run, say, first_step=step, meter=meter)
        say(f"going on after step {step} of {recipe.train.steps}")
        for note in notes:
            say(f"note: {note}")
        if checkpoint and place:
            with meter.part("load"):
                trainer.restore(checkpoint)
            ranks.barrier()
            place.forget()
        return trainer.train()


@contextmanager
def _undone(data: DataSettings, run: Path, ranks: Ranks) -> Iterator[None]:
    """What was opened for a run is released where something within ends it."""
    try:
        yield
    except BaseException as error:
        if ranks.first:
            release_pins(data, run)
        if isinstance(error, InputError):
            forget(run)
        raise


def _keep_plan(run: Run, planned: Mapping[str, Any] | None, say: Say) -> None:
    if planned is not None:
        run.set_plan(planned)
        say(planned["line"])


def _places(run: Run, *settings: CheckpointSettings) -> list[CheckpointStorage]:
    """Where a run's checkpoints may be, now and before: the first is where they are now."""
    urls = dict.fromkeys([*(one.url for one in settings), None])
    return [place_of(url, run.path) for url in urls]


def _environment(job: TrainingSetup) -> dict[str, Any]:
    """Where a session runs, the store it reads, and of an adapter what it is trained on."""
    facts = {**hardware.environment(), "store": dict(job.store), "fingerprints": dict(job.base)}
    return facts | ({"base": described_base(job.task.model)} if job.recipe.adapts else {})


def _trainer(job: TrainingSetup, run: Run, say: Say, first_step: int, meter: Meter) -> Trainer:
    for note in job.notes:
        say(note)
    tracker = make_tracker(job.recipe.track, run.path, first_step + 1) if job.ranks.first else NoTracker()
    return Trainer(job, run, tracker=tracker, say=say, meter=meter)


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
    source, target = Run.open(run), Path(to)
    if target.exists():
        raise InputError(f"'{target}' is there already", mend="choose another folder")
    recipe = recipe_of(source.recipe, source.path)
    as_file = target.suffix == ".safetensors"
    if kohya and not as_file:
        raise InputError(f"--kohya with the folder '{to}'", allowed="--to FILE.safetensors")
    state = _state(source, _places(source, recipe.checkpoint), checkpoint, say)
    best = recipe.evaluate.patience is not None and checkpoint is None and ema
    values, measured = _exported(state, best=best, ema=ema, say=say)
    exporter = Exporter(recipe, source.path)
    if as_file:
        made = exporter.adapter(values, target.stem)
        family = recipe.model.base if recipe.model.base in models.FAMILIES else None
        base = source.environment.get("base") or {"family": family}
        return write_adapter_file(made, target, base=base, kohya=kohya)
    exporter.write_whole_model(values, measured, target)
    return target


def _exported(state: Checkpoint, *, best: bool, ema: bool, say: Say) -> tuple[Saved, dict[str, float]]:
    """The weights to export, with what was measured: the best ones so far, if asked for and there."""
    kept: dict[str, Any] | None = state.scalars.get(BEST)
    if best and kept is not None:
        say(f"the weights after step {kept['step']}, of the best held-out loss; --checkpoint takes others")
        return state.tensors[BEST], kept["measured"]
    averaged = state.tensors.get("ema") if ema else None
    return averaged or state.tensors["weights"], state.scalars["measured"]


def _state(run: Run, places: Sequence[CheckpointStorage], step: int | None, say: Say) -> Checkpoint:
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


@dataclass(frozen=True)
class Tried:
    """One run of a sweep: what sets it apart, and what it made, or why it did not get to its end."""

    run: Path
    settings: Mapping[str, Any]
    result: TrainResult | None
    failure: str = ""

    @property
    def bill(self) -> Bill:
        """What it used so far."""
        return _bill(self.run)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        made = self.result.to_dict() if self.result else {"bill": self.bill.model_dump(mode="json")}
        return {"run": str(self.run), "settings": dict(self.settings), **made, "failure": self.failure}


def sweep(
    file: Path,
    overrides: Sequence[str],
    *,
    out: Path | str,
    of: str | None = None,
    resume: str = "auto",
    estimate: Estimate | None = None,
    console: Say = print,
    whole_process: bool = False,
) -> list[Tried]:
    """Train each of a recipe's overrides of several values, `optim.lr=1e-4,1e-5`, as `OUT/NAME-lr-1e-4` and
    the like; the same call again goes on where it stopped.

    A run that diverges or finds no memory is noted, and the others are made; the same call tries it again
    from its last checkpoint. The recipe's budget is that of all runs together. Class pictures are drawn once
    for all that draw the same ones. With `of="kohya"` the file is a TOML of kohya's. Raises InputError for a
    mistake, Stopped where the user or the budget stops it.
    """
    out, recipes = Path(out), read_sweep(file, overrides, of=of)
    folders = [out / f"{out.name}-{name}" for name in run_names([settings for settings, _ in recipes])]
    for _, recipe in recipes:
        if not recipe.phases:
            recipe.check()
            check_reach(recipe.track, recipe.evaluate, recipe.checkpoint)
    tried: list[Tried] = []
    for folder, (settings, recipe) in zip(folders, recipes, strict=True):
        changes = ", ".join(f"{key}={value}" for key, value in settings.items())
        console(f"{folder.name}, {len(tried) + 1} of {len(recipes)}: {changes}")
        others = [one for one in folders if one != folder]
        shared = _class_folder(recipe.task, recipe.data, recipe.model.base, out)
        one = recipe.in_sweep(folder.name, _left(recipe.budget, others), shared)
        first = whole_process and not tried
        training = partial(train, one, out=folder, resume=resume, whole_process=first)
        made, failure = attempted(partial(training, estimate=estimate, console=console))
        if failure:
            console(f"warning: {folder.name}: {failure}")
        tried.append(Tried(folder, settings, made, failure))
    return tried


def attempted(training: Callable[[], TrainResult]) -> tuple[TrainResult | None, str]:
    """What a training made, or None and why where its settings diverge or find no memory."""
    try:
        return training(), ""
    except Exception as error:
        failure = _failure(error)
        if not failure:
            raise
    gc.collect()  # here, where the error no longer holds the run's tensors
    accelerator.empty_cache()
    return None, failure


def _failure(error: Exception) -> str:
    """What to note of an error, if the sweep goes on after it."""
    if isinstance(error, NotOneFits):
        return str(error)
    if isinstance(error, (Stopped, InputError, RankLost)):
        return ""
    if isinstance(error, DarkroomError):
        return str(error)
    # A rank that ran out of memory has left the others waiting: only alone can it go on.
    return "out of memory" if is_out_of_memory(error) and started_together() == 1 else ""


def run_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each run of a sweep a name that says its settings: `rank-8_lr-1e-4`. InputError for two alike."""
    keys = list(settings[0])
    ends = [key.rpartition(".")[2] for key in keys]
    short = dict(zip(keys, ends if len(set(ends)) == len(ends) else keys, strict=True))
    names = ["_".join(f"{short[key]}-{_value(value)}" for key, value in one.items()) for one in settings]
    if (double := next(_doubles(names), None)) is not None:
        raise InputError(f"the sweep has {double} twice", mend="say each value once")
    alike = Counter(name.casefold() for name in names)  # folders that are one on Windows and macOS
    marked = [
        f"{name}-{hashlib.sha256(name.encode()).hexdigest()[:8]}" if alike[name.casefold()] > 1 else name
        for name in names
    ]
    return [file_name(name, longest=100) for name in marked]


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _doubles(names: Sequence[str]) -> Iterator[str]:
    return (name for i, name in enumerate(names) if name in names[:i])


def _left(budget: BudgetSettings, others: Sequence[Path]) -> BudgetSettings:
    """What the other runs left of the budget; Stopped where they left nothing."""
    used = Bill()
    for folder in others:
        used += _bill(folder)
    left = budget.less(used)
    if left is None:
        raise Stopped(f"{budget.spent(used)} is spent by the sweep; say a larger one to go on")
    return left


def _class_folder(task: str, data: DataSettings, base: str, out: Path) -> Path | None:
    """The folder of class pictures that all runs with the same model, prompt and size share, if they draw."""
    if task not in SUBJECT_TASKS or not data.class_prompt or data.class_images:
        return None
    note = json.dumps(class_note(data, base), sort_keys=True)
    return out / f"class-{hashlib.sha256(note.encode()).hexdigest()[:8]}"


def _bill(folder: Path) -> Bill:
    there = (folder / "recipe.yaml").is_file()
    return (Run.open(folder).bill() if there else None) or Bill()
