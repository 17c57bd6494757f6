"""Workers of a training job on a Ray cluster: how many may train, pauses in which they save before others go
on, and what one does: it joins the others, trains, and mails how it ended.

A pause is asked for when the cluster fits another number of workers, when a machine is about to be
taken away, or when a worker gets SIGTERM. All workers save the same step and leave; others go on
from it. Pauses are not failures. A worker or a machine that is gone without a word is one: the others go on
from the newest checkpoint.

Which rows form which batch does not depend on how many workers there are, so the order is the same; sums are
added up differently, so the loss is the same to about 1e-6 and not to the bit.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.cluster.connect import check_here, unless_set
from darkroom.cluster.encoders import last_line
from darkroom.cluster.private_ray import private, to_extend
from darkroom.errors import DarkroomError, InputError, RecipeError, Stopped
from darkroom.hardware import accelerator
from darkroom.hardware.system import remove_file

if TYPE_CHECKING:
    from darkroom.recipe.sections import TrainSettings
    from darkroom.train.trainer import TrainResult


# ---- workers that come and go

WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
PLACING = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
PLACING_S = "15"
"""Seconds that Ray waits for the resources of a choice of workers before it chooses anew; its default is 60.

The choice counts a machine that is gone until Ray notices, some seconds later: only choosing anew helps.
"""
MONITOR_S = 10.0  # how often it is looked whether another number of workers fits
TAKEN_AWAY = "a machine is about to be taken away"
TOLD_TO_END = threading.Event()  # in a worker: SIGTERM came


class Paused(Exception):
    """The workers saved and left, so that others go on."""


@dataclass(frozen=True)
class WorkerRange:
    """At least and at most so many workers."""

    least: int
    most: int

    @classmethod
    def parsed(cls, text: str) -> WorkerRange:
        """From `N` or `MIN:MAX`; InputError for anything else."""
        low, colon, high = text.partition(":")
        numbers = [low, high] if colon else [low, low]
        if not all(part.isdecimal() for part in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
            raise InputError(f"--workers {text}", allowed="N, or MIN:MAX, 1 or more: 4, 2:8")
        return cls(int(numbers[0]), int(numbers[1]))

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.least)


def allowed_counts(phases: Sequence[TrainSettings], span: WorkerRange) -> list[int]:
    """The numbers of workers within the span that share the global batch evenly, in every phase.

    Raises RecipeError where there is none.
    """
    if not span.elastic:
        _check_batches(phases, span.least)
        return [span.least]
    counts = []
    for count in range(span.least, span.most + 1):
        with suppress(RecipeError):
            _check_batches(phases, count)
            counts.append(count)
    if not counts:
        batches = " and ".join(dict.fromkeys(str(one.global_batch) for one in phases))
        raise RecipeError(
            "train.global_batch",
            f"{batches} (micro_batch {phases[0].micro_batch}) over {span} processes",
            mend="choose a number of workers that divides it",
        )
    return counts


def _check_batches(phases: Sequence[TrainSettings], count: int) -> None:
    """RecipeError unless so many share the global batch of each phase."""
    from darkroom.recipe.rules import check_batch

    for one in phases:
        check_batch(one, count)


def rounded_down(count: int, counts: Sequence[int]) -> int:
    """The greatest of the allowed counts that is not above; 0 where there is none."""
    return max((allowed for allowed in counts if allowed <= count), default=0)


def job_trainer(counts: Sequence[int], mail: Any, *, local: bool, **settings: Any) -> Any:
    """Ray's TorchTrainer; with several counts allowed its workers come and go, and pause.

    What Ray Train starts besides the workers are processes that wake a hundred times a second and take about
    one percent of a core each. Those of no use are left out: that of Ray's datasets, and in a Ray that ends
    with this job (`local`) that which looks for nodes that go (unless the user asked for it), that which
    clears up after a dead job and, where the number of workers is fixed, that which asks for nodes.
    """
    names = ("DatasetsCallback", "PlacementGroupCleanerCallback") if local else ("DatasetsCallback",)
    useless = tuple(private(name) for name in names)

    class PausingTrainer(to_extend("TorchTrainer")):  # type: ignore[misc]
        """As TorchTrainer, but for the policies and the processes left out."""

        def _create_default_callbacks(self) -> list[Any]:
            return [one for one in super()._create_default_callbacks() if not isinstance(one, useless)]

        def _initialize_and_run_controller(self, **given: Any) -> Any:
            given["failure_policy"] = _failure_policy(self.run_config.failure_config, mail)
            if len(counts) > 1:
                given["scaling_policy"] = scaling_policy(self.scaling_config, counts, mail)
            elif local:
                given["scaling_policy"] = _unasking_policy(self.scaling_config)
            watched = unless_set(WATCHER, "0") if local else nullcontext()
            placed = unless_set(PLACING, PLACING_S) if len(counts) > 1 else nullcontext()
            with watched, placed:
                return super()._initialize_and_run_controller(**given)

    return PausingTrainer(**settings)


def scaling_policy(scaling_config: Any, counts: Sequence[int], mail: Any) -> Any:
    """Ray's elastic policy, rounded to allowed counts; instead of cutting workers off it asks for a pause."""
    import ray

    noop, resize = private("NoopDecision"), private("ResizeDecision")

    class PausingScalingPolicy(to_extend("ElasticScalingPolicy")):  # type: ignore[misc]
        """Counts workers that fit on the nodes that live and will stay."""

        def _count_possible_workers(self, reserved_resources: Any) -> int:
            # What Ray reserved for the job may be some seconds old, and a node that drains takes no
            # workers: Ray would wait a minute for them there.
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - drained()
            there = {node: has for node, has in reserved_resources.items() if node in alive}
            return rounded_down(super()._count_possible_workers(there), counts)

        def make_decision_for_running_worker_group(self, worker_group_state: Any, **status: Any) -> Any:
            """Ray Train's hook: another number of workers is a pause, never a restart."""
            decision = super().make_decision_for_running_worker_group(worker_group_state, **status)
            if isinstance(decision, resize):
                why = f"the cluster now fits {decision.num_workers} workers"
                why += f" instead of {worker_group_state.num_workers}"
                gone = decision.num_workers < worker_group_state.num_workers and drained()
                ray.get(mail.ask_pause.remote(TAKEN_AWAY if gone else why))
            return noop()

    return PausingScalingPolicy(scaling_config)


def drained() -> set[str]:
    """The ids of nodes that take no workers any more, for they are about to go."""
    return set(private("draining")())


def _unasking_policy(scaling_config: Any) -> Any:
    """Ray's policy of a fixed number of workers, for a single machine that no other will join."""

    class UnaskingScalingPolicy(to_extend("FixedScalingPolicy")):  # type: ignore[misc]
        """Asks nobody for nodes."""

        def after_controller_start(self, train_run_context: Any) -> None:
            """Ray would start the process here that nodes are asked for by."""

        def _maybe_send_resource_request(self) -> None:
            """The machine is there."""

    return UnaskingScalingPolicy(scaling_config)


def _failure_policy(failure_config: Any, mail: Any) -> Any:
    """Ray's policy, for which a pause is no failure, and an error that would come again is the last."""
    import ray

    retry, give_up = private("FailureDecision.RETRY"), private("FailureDecision.RAISE")

    class PausingFailurePolicy(to_extend("DefaultFailurePolicy")):  # type: ignore[misc]
        def make_decision(self, training_failed_error: Exception) -> Any:
            """Retry after a pause, give up after a final error; else as Ray decides."""
            if ray.get(mail.end_pause.remote()):
                return retry
            if ray.get(mail.over.remote()):
                return give_up
            return super().make_decision(training_failed_error)

    return PausingFailurePolicy(failure_config)


def listening_callback() -> Any:
    """What has every worker note SIGTERM instead of dying of it."""

    class Listening(to_extend("WorkerGroupCallback")):  # type: ignore[misc]
        def after_worker_group_start(self, worker_group: Any) -> None:
            worker_group.execute(_note_sigterm)

    return Listening()


def _note_sigterm() -> None:
    """In a worker's main thread: the first SIGTERM is noted, a second one ends it."""

    def note(number: int, frame: Any) -> None:
        if TOLD_TO_END.is_set():
            os._exit(1)
        TOLD_TO_END.set()

    if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
        signal.signal(signal.SIGTERM, note)


def _why_leave() -> str:
    """In a worker: why this machine or process is about to go, or nothing."""
    if TOLD_TO_END.is_set():
        return f"rank {os.environ.get('RANK', '?')} was asked to stop"
    try:
        info = private("train_context")().preemption_context.preemption_info
    except (RuntimeError, AttributeError) as error:  # not public: a later Ray may have it elsewhere
        logging.getLogger(__name__).debug("pre-emption is not looked for: %s", error)
        return ""
    return TAKEN_AWAY if info is not None else ""


# ---- one worker

Say = Callable[[str], None]
TICK_S = 1.0  # how often the driver and the workers look for news
LET_GO_S = 60.0  # how long a killed worker may hold the run
LOST = "RankLost"  # how an end is called that another worker's caused


def work(job: dict[str, Any]) -> None:
    """What each worker does: join the others, train, and tell the driver how it ended."""
    import ray

    mail = job["mail"]
    rank = int(os.environ["RANK"])

    def say(line: str) -> None:
        mail.say.remote(line)

    if ray.get(mail.over.remote()):
        return
    try:
        with _stopping(mail, _why_leave if job["elastic"] else lambda: ""):
            made = _trained(job, rank, mail, say)
    except DarkroomError as error:
        if isinstance(error, Stopped) and ray.get(mail.leave.remote()):
            _together()  # before any ends: the others would be killed where they are
            raise Paused(str(error)) from None
        final = isinstance(error, InputError | Stopped) or type(error) is DarkroomError
        ray.get(mail.fail.remote(type(error).__name__, error.exit_code, final, str(error)))
        raise RuntimeError(str(error)) from None  # darkroom's own errors do not survive being pickled
    except Exception as error:  # whatever it is, the driver tells it; Ray's own logs have the traceback
        ray.get(mail.fail.remote(*_unexpected(error)))
        raise
    if rank == 0:
        ray.get(mail.made.remote(made.to_dict()))


def _unexpected(error: Exception) -> tuple[str, int, bool, str]:
    """An error that darkroom did not foresee, as the mail takes it: its type and its last line."""
    from darkroom.train.ranks import is_broken_link

    name = type(error).__name__
    kind = LOST if isinstance(error, RuntimeError) and is_broken_link(error) else name
    return kind, 1, False, f"{name}: {last_line(error)}"


def _together() -> None:
    """Wait until all workers are here."""
    import torch
    import torch.distributed as dist

    if int(os.environ["WORLD_SIZE"]) > 1:
        with suppress(RuntimeError):  # one is gone
            dist.all_reduce(torch.zeros(1))


def _trained(job: dict[str, Any], rank: int, mail: Any, say: Say) -> TrainResult:
    import ray

    from darkroom.train.run import train as train_here

    out, recipe = Path(job["out"]), job["recipe"]
    _go_to(job["folder"])
    _check_stores(job["stores"])
    if recipe.train.device != "cpu":
        accelerator.use(int(os.environ["LOCAL_RANK"]))
    starts = 0
    if rank == 0:
        starts, _ = ray.get(mail.begin.remote())
        if lost := ray.get(mail.newly_lost.remote()):
            say(f"workers were lost and are started again ({lost} of at most {job['max_failures']})")
        if starts > 1:
            _wait_for(out)
    _check_shared(job, out, rank)
    resume = "auto" if _goes_on(job, out, again=starts > 1) else job["resume"]
    return train_here(recipe, out=out, resume=resume, feed=job["feed"], console=say)


def _goes_on(job: dict[str, Any], out: Path, *, again: bool) -> bool:
    """Whether the run is there already, as rank 0 finds; other machines need not see its folder."""
    import torch
    import torch.distributed as dist

    from darkroom.train.checkpoint_storage import place_of

    if job["resume"] in ("auto", "never"):  # `never` has been given a folder of its own
        return True
    url = job["recipe"].checkpoint.url
    there = (out / "recipe.yaml").is_file()
    there = there or bool(again and url is not None and place_of(url, out).kept())
    if int(os.environ["WORLD_SIZE"]) > 1:
        agreed = torch.tensor([int(there)])
        dist.broadcast(agreed, 0)
        there = bool(agreed)
    return there


def _go_to(folder: str) -> None:
    """To the driver's folder, so that a recipe's paths mean the same."""
    if not Path(folder).is_dir():
        raise InputError(
            f"'{folder}' is not on the machine {socket.gethostname()}",
            mend="start the command in a folder that all machines share",
        )
    os.chdir(folder)


def _check_stores(stores: list[str]) -> None:
    """InputError unless the stores that the driver sees are here too."""
    for store in stores:
        check_here(store)


def _wait_for(out: Path) -> None:
    """Until workers that were killed have let the run go; after a while it is another job's."""
    from darkroom.run import Run

    until = time.monotonic() + LET_GO_S
    while time.monotonic() < until and any(Run(path).is_running() for path in (out, *out.glob("phase-*"))):
        time.sleep(TICK_S)


def _check_shared(job: dict[str, Any], out: Path, rank: int) -> None:
    """InputError unless all workers see one folder for the run, or do not need to.

    With checkpoints at an address rank 0 alone needs it; but a phase starts from the model that the one
    before it left there.
    """
    recipe = job["recipe"]
    apart = recipe.checkpoint.url is not None and not recipe.phases
    if int(os.environ["WORLD_SIZE"]) == 1 or apart:
        return
    import torch
    import torch.distributed as dist

    mark = out.parent / f".{out.name}.{job['token']}"
    if rank == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    dist.all_reduce(torch.zeros(1))
    missing = torch.tensor([0 if mark.exists() else 1])
    dist.all_reduce(missing)
    if rank == 0:
        remove_file(mark)
    if int(missing):
        mend = "a phase starts from the model that the one before left there: choose a folder that they share"
        raise InputError(
            f"--out {out} is not one folder for all machines: {int(missing)} of "
            f"{os.environ['WORLD_SIZE']} workers do not see it",
            mend=mend if recipe.phases else "choose a folder that they share, or set checkpoint.url",
        )


@contextmanager
def _stopping(mail: Any, leaving: Callable[[], str]) -> Iterator[None]:
    """Within, a stop that the driver was asked for reaches the training loop, which saves.

    `leaving` tells why this worker must go, if it must: all of them pause then.
    """
    import ray

    from darkroom.train.ranks import STOP

    over = threading.Event()

    def look() -> None:
        """Ask every `TICK_S` seconds for a pause or stop until the block is left."""
        with suppress(ray.exceptions.RayError):  # the driver is gone, and Ray ends this worker
            while not over.wait(TICK_S):
                if why := leaving():
                    ray.get(mail.ask_pause.remote(why))
                if ray.get(mail.stops.remote()):
                    STOP.set()

    thread = threading.Thread(target=look, name="stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ---- what workers and driver tell each other


@dataclass
class Mail:
    """Lines for the console, how workers ended, and what they are asked to do: an actor of the driver's."""

    lines: list[str] = field(default_factory=list)
    ends: list[tuple[str, int, bool, str]] = field(default_factory=list)
    stop: bool = False
    pause: str = ""  # why the workers are to save and leave
    left: bool = False  # whether one did
    pauses: int = 0
    result: dict[str, Any] | None = None
    starts: int = 0
    reported: int = 0  # losses that the console has shown
    heard_at: float = -math.inf  # when a worker last asked whether it is to stop
    controller: Any = None  # the actor by which Ray Train runs the job

    def say(self, line: str) -> None:
        """A line for the console."""
        self.lines.append(line)

    def take(self) -> list[str]:
        """The lines that came since the last time."""
        taken, self.lines = self.lines, []
        return taken

    def news(self) -> tuple[float, list[str]]:
        """For how long no worker has asked anything, and the lines that came."""
        return self.silent_s(), self.take()

    def begin(self) -> tuple[int, int]:
        """How often the workers have been started, and after how many pauses; rank 0 counts."""
        self.starts += 1
        return self.starts, self.pauses

    def new_starts(self) -> int:
        """How often workers were started again because some were lost."""
        return max(0, self.starts - 1 - self.pauses)

    def newly_lost(self) -> int:
        """The same where it grew since it was asked; 0 otherwise."""
        lost, before = self.new_starts(), self.reported
        self.reported = lost
        return lost if lost > before else 0

    def fail(self, kind: str, exit_code: int, final: bool, message: str) -> None:
        """How a worker ended: the error's kind, its exit code, and whether starting again is of no use."""
        self.ends.append((kind, exit_code, final, message))

    def failed(self) -> list[tuple[str, int, bool, str]]:
        """All such ends."""
        return self.ends

    def over(self) -> bool:
        """Whether starting again is of no use."""
        return any(final for _, _, final, _ in self.ends)

    def control(self, controller: Any) -> None:
        """By which actor Ray Train runs the job."""
        self.controller = controller

    def controlled_by(self) -> Any:
        """The same, for the driver; None until it runs."""
        return self.controller

    def ask_stop(self) -> None:
        """Have the workers save and stop for good."""
        self.stop = True

    def stops(self) -> bool:
        """Whether the workers are to save and stop; each of them asks all the time."""
        self.heard_at = time.monotonic()
        return self.stop or bool(self.pause)

    def silent_s(self) -> float:
        """For how long no worker has asked anything: without end where none has run yet."""
        return time.monotonic() - self.heard_at

    def ask_pause(self, why: str) -> None:
        """Have them save and leave, so that others go on."""
        if not self.pause:
            self.pause = why
            self.say(f"{why}: saving, then going on")

    def leave(self) -> bool:
        """Whether a worker that saved and stopped did so for a pause."""
        self.left = bool(self.pause) and not self.stop
        return self.left

    def end_pause(self) -> bool:
        """Whether the workers ended for a pause, which is over then."""
        ended, self.left, self.pause = self.left, False, ""
        self.pauses += ended
        return ended

    def made(self, result: dict[str, Any]) -> None:
        """What rank 0 made in the end."""
        self.result = result

    def what_was_made(self) -> dict[str, Any] | None:
        """The same, for the driver."""
        return self.result
