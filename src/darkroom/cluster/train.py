"""Training in workers of a Ray cluster: the same `train`, placed by Ray and started again where it fails.

What a worker says, why it ended and what it made goes through one small actor on the driver's node; the run's
state goes where it always goes, its folder or `checkpoint.url`, never through Ray.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from darkroom.cluster.connect import WAIT_SAID_S, Capacity, capacity_of, connected, stores_here, waiting
from darkroom.cluster.feed import online
from darkroom.cluster.private_ray import private, to_extend
from darkroom.cluster.worker import (
    LOST,
    MONITOR_S,
    TICK_S,
    Mail,
    WorkerRange,
    allowed_counts,
    job_trainer,
    listening_callback,
    rounded_down,
    work,
)
from darkroom.errors import DarkroomError, InputError, RecipeError, Stopped, first_line
from darkroom.hardware.system import on_stop_signal

if TYPE_CHECKING:
    from darkroom.recipe.recipe import Recipe
    from darkroom.recipe.sections import DataSettings, ParallelSettings, TrainSettings
    from darkroom.train.trainer import TrainResult

__all__ = ["Placement", "train"]
Say = Callable[[str], None]
SILENT_S = 15.0  # workers of which nothing is heard for so long do not run
LEAVE_S = 60.0  # what Ray Train's own thread gets to return once the driver leaves
GONE_S = 10.0  # the same where the cluster is gone
# Set before ray.train is imported: workers stay in the driver's folder, and Ray's own records are not kept.
SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}


@dataclass(frozen=True)
class Placement:
    """Where the workers of a job go."""

    address: str | None = None  # auto, local, HOST:PORT; None: $RAY_ADDRESS, else local
    workers: WorkerRange | int | None = None  # None: parallel.devices times parallel.nodes, or one a GPU
    accelerator: str | None = None  # the type of their nodes, as Ray names it
    cpus: int = 1  # each worker's share, and its threads unless OMP_NUM_THREADS says
    max_failures: int = 3  # how often lost workers are started again
    grows: bool = False  # the cluster has an autoscaler: what it lacks is waited for
    monitor_s: float = MONITOR_S  # how often it is looked whether more or fewer workers fit


class Lost(DarkroomError):
    """Workers, or what runs them, are gone or ended with an error; more of it is in Ray's logs."""


class WorkersFailed(DarkroomError):
    """The workers ended with an error that one of them reported, with the exit code it means."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def train(
    recipe: Recipe,
    *,
    out: Path | str,
    placement: Placement = Placement(),
    resume: str = "auto",
    console: Say = print,
) -> TrainResult:
    """Train a recipe in workers of a Ray cluster; the same call again goes on where it stopped.

    `out` must be a folder that all workers see, and `resume` is as for `darkroom.train.train`. Raises
    InputError before any work for what cannot be, Stopped (state saved) on Ctrl-C and SIGTERM, DarkroomError
    where workers were lost more than `max_failures` times.
    """
    if placement.max_failures < 0:
        raise InputError(f"--max-failures {placement.max_failures}", allowed="0 or more")
    os.environ.update(SETTINGS)
    # Ray forks only to start another program.
    warnings.filterwarnings("ignore", message="lance is not fork-safe", category=UserWarning)
    with connected(placement.address, accelerator=placement.accelerator, grows=placement.grows) as cluster:
        console(cluster.line())
        if waits := cluster.waits_for(placement.accelerator):
            console(waits)
        capacity = capacity_of(cluster, placement.accelerator)
        phases = [one.train for _, one in recipe.in_phases(Path())] or [recipe.train]
        counts = _workers(phases, recipe.parallel, placement, capacity)
        target = _target(Path(out).absolute(), resume, in_phases=bool(recipe.phases))
        try:
            job: dict[str, Any] = {
                "recipe": recipe,
                "out": str(target),
                "resume": resume,
                "folder": os.getcwd(),
                "max_failures": placement.max_failures,
                "token": uuid.uuid4().hex[:12],
                "elastic": len(counts) > 1,
                "stores": stores_here(recipe.data),
            }
            on_gpus = _uses_gpus(recipe.train.device, placement, capacity)
            timeout_s = recipe.parallel.timeout_s
            return _run(job, recipe.data, timeout_s, counts, placement, capacity, console, on_gpus=on_gpus)
        except Lost as error:
            raise DarkroomError(f"{error}; Ray's logs are in {cluster.logs}") from error


# ---- where


def _workers(
    phases: Sequence[TrainSettings], parallel: ParallelSettings, placement: Placement, capacity: Capacity
) -> list[int]:
    """How many workers there may be; InputError where the recipe or the cluster does not allow any."""
    on_gpus = _uses_gpus(phases[0].device, placement, capacity)
    counted = placement.workers is None and parallel.devices == "auto" and parallel.mode != "none"
    if counted and on_gpus and not capacity.gpus:
        raise InputError(
            "--workers is not said, and no GPU is up to count", mend="give --workers N or MIN:MAX"
        )
    gpus = int(capacity.gpus) if on_gpus else 0
    asked = max(1, gpus) if parallel.devices == "auto" else parallel.devices * parallel.nodes
    given = placement.workers or (1 if parallel.mode == "none" else asked)
    span = given if isinstance(given, WorkerRange) else WorkerRange(given, given)
    if span.least < 1 or placement.cpus < 1:
        raise InputError(f"--workers {span} of {placement.cpus} CPUs each", allowed="1 or more")
    if span.most > 1 and parallel.mode == "none":
        raise RecipeError("parallel.mode", f"none, with {span} workers", mend="set parallel.mode=ddp or fsdp")
    counts = allowed_counts(phases, span)
    holds = capacity.holds(placement.cpus, 1 if on_gpus else 0)
    if counts[0] > holds and not capacity.grows:
        of = f" of type {placement.accelerator}" if placement.accelerator else ""
        each = f"{placement.cpus} CPUs" + (" and a GPU" if on_gpus else "")
        raise InputError(
            f"{counts[0]} workers of {each} each: the cluster's nodes{of} fit {holds}, "
            f"the largest has {capacity.largest}",
            mend="ask for fewer with --workers or less with --cpus, add nodes, or say "
            "--wait-for-autoscaler where an autoscaler brings them",
        )
    return counts


def _uses_gpus(device: str, placement: Placement, capacity: Capacity) -> bool:
    """Whether workers get a GPU each: where nodes have some, or will: an accelerator still to come is one."""
    comes = capacity.grows and (
        device == "cuda" or (placement.accelerator is not None and not capacity.nodes)
    )
    return device != "cpu" and (capacity.gpus >= 1 or comes)


def _target(out: Path, resume: str, *, in_phases: bool) -> Path:
    """The run's folder, settled once so that workers that start again go on in it."""
    from darkroom.run import numbered_folder

    if resume == "auto":
        return out
    if in_phases:
        raise InputError(f"--resume {resume} with phases", allowed="auto")
    if resume != "never" and not (Path(resume) / "manifest.json").is_file():
        raise InputError(
            f"--resume {resume}", allowed="auto, never, or a checkpoint's folder (RUN/checkpoints/step-...)"
        )
    return numbered_folder(out)


# ---- the driver


def _run(
    job: dict[str, Any],
    data: DataSettings,
    timeout_s: float,
    counts: list[int],
    placement: Placement,
    capacity: Capacity,
    say: Say,
    *,
    on_gpus: bool,
) -> TrainResult:
    """Run the job that workers are handed, to its end; `counts` are the numbers of workers it may have."""
    import ray

    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    mail = ray.remote(num_cpus=0, scheduling_strategy=here)(Mail).remote()
    job["mail"] = mail
    gpus = 1 if on_gpus else 0
    at_once = (
        rounded_down(capacity.holds(placement.cpus, gpus), counts) or counts[0]
    )  # on the nodes there are

    def waits() -> str:
        return waiting(f"{counts[0]} workers", placement.cpus, gpus, placement.accelerator)

    with (
        _asked_to_stop() as asked,
        TemporaryDirectory(prefix="darkroom-ray-", ignore_cleanup_errors=True) as records,
        online(
            data,
            reserved_cpus=at_once * placement.cpus,
            say=say,
            grows=placement.grows,
        ) as job["feed"],
    ):
        trainer = _trainer(job, timeout_s, counts, placement, capacity, records, gpus=bool(gpus))
        failure = _followed(trainer, mail, asked, waits, say)
    made = ray.get(mail.what_was_made.remote())
    if made is not None and (failure is None or isinstance(failure, Stopped)):
        return _result(made)
    failures, starts = ray.get([mail.failed.remote(), mail.new_starts.remote()])
    raise _why(failure, failures, placement.max_failures, starts) from failure


def _trainer(
    job: dict[str, Any],
    timeout_s: float,
    counts: list[int],
    placement: Placement,
    capacity: Capacity,
    records: str,
    *,
    gpus: bool,
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    resources = {"CPU": float(placement.cpus), **({"GPU": 1.0} if gpus else {})}
    return job_trainer(
        counts,
        job["mail"],
        local=capacity.local,
        train_loop_per_worker=work,
        train_loop_config=job,
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if gpus else "gloo",
            timeout_s=int(2 * timeout_s + 60),  # the job's own watch is to name who hangs
        ),
        scaling_config=ScalingConfig(
            num_workers=(counts[0], counts[-1]) if len(counts) > 1 else counts[0],
            elastic_resize_monitor_interval_s=placement.monitor_s,
            use_gpu=gpus,
            resources_per_worker=resources,
            accelerator_type=placement.accelerator,
        ),
        run_config=RunConfig(
            name="run",
            storage_path=records,
            failure_config=FailureConfig(placement.max_failures),
            callbacks=[_known_callback(job["mail"]), *([listening_callback()] if len(counts) > 1 else [])],
        ),
    )


def _known_callback(mail: Any) -> Any:
    """What has Ray Train's controller leave its handle, so that the driver can end it."""
    import ray

    class HandleSender(to_extend("ControllerCallback")):  # type: ignore[misc]
        def after_controller_start(self, train_run_context: Any) -> None:
            ray.get(mail.control.remote(ray.get_runtime_context().current_actor))

    return HandleSender()


def _followed(
    trainer: Any, mail: Any, asked: threading.Event, waits: Callable[[], str], say: Say
) -> Exception | None:
    """Run to the end, saying what workers say; the error that Ray Train ended with, if any.

    Ray Train waits in a thread of its own: in the main one it would answer Ctrl-C by killing the workers.
    While no worker runs, `waits` tells what for, and a stop ends at once.
    """
    import ray

    ended: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:  # every kind: it is reported below
            ended.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    shown_at = time.monotonic()
    try:
        thread.start()
        while thread.is_alive():
            thread.join(TICK_S)
            silent_s, lines = ray.get(mail.news.remote())
            for line in lines:
                say(line)
            if asked.is_set():
                ray.get(mail.ask_stop.remote())
                if silent_s > SILENT_S:
                    return Stopped("stopped while no worker ran; the same command goes on")
            if min(silent_s, time.monotonic() - shown_at) > WAIT_SAID_S:
                say(waits())
                shown_at = time.monotonic()
        for line in ray.get(mail.take.remote()):
            say(line)
    except ray.exceptions.RayError as error:
        raise Lost(
            f"the Ray cluster is gone ({first_line(error)[:200]}); the same command goes on"
        ) from error
    finally:
        _end(thread, mail)
    return ended[0] if ended else None


def _end(thread: threading.Thread, mail: Any) -> None:
    """Have Ray Train's thread return while Ray still answers: one that asks later ends the whole process."""
    import ray

    until = time.monotonic() + LEAVE_S
    try:
        while thread.is_alive() and time.monotonic() < until:
            # A controller that is still starting has not registered itself.
            controller = ray.get(mail.controlled_by.remote(), timeout=LEAVE_S)
            if controller is not None:
                ray.kill(controller)
            thread.join(TICK_S)
    except ray.exceptions.RayError:  # the cluster is gone, which the thread learns as well
        thread.join(GONE_S)


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C or SIGTERM is noted; with a second one the driver waits for no worker."""
    asked = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    with on_stop_signal(note):
        yield asked


def _result(made: dict[str, Any]) -> TrainResult:
    from darkroom.bill import Bill
    from darkroom.train.trainer import TrainResult

    return TrainResult(
        run=Path(made["run"]),
        model=Path(made["run"]) / "model",
        outputs=[Path(path) for path in made["outputs"]],
        steps=made["steps"],
        results_step=made["results_step"],
        loss=made["loss"],
        heldout_loss=made["heldout_loss"],
        bill=Bill.model_validate(made["bill"]),
    )


def _why(
    failure: Exception | None, failures: list[tuple[str, int, bool, str]], retries: int, starts: int = 0
) -> DarkroomError:
    """The one error that a user should read. `starts`: how often workers were in fact started again."""
    import ray
    from ray.train import WorkerGroupError

    for kind, code, final, message in failures:
        if final:
            return Stopped(message) if kind == Stopped.__name__ else WorkersFailed(message, code)
    if isinstance(failure, Stopped):
        return failure
    go_on = "the same command goes on from the last checkpoint"
    if isinstance(failure, ray.exceptions.RayActorError):
        again = f", after {starts} new starts of the workers" if starts else ""
        return Lost(
            f"Ray Train's controller was lost: its process was killed (was memory short?){again}; {go_on}"
        )
    if failure is None or isinstance(failure, WorkerGroupError):  # that is, none is left
        again = f"after {retries} new starts (--max-failures)" if retries else "and --max-failures is 0"
    else:
        again = f"after {starts} new starts"
    if lost := _lost(failure):
        return Lost(f"{lost}, {again}; {go_on}")
    causes = [message for kind, _, _, message in failures if kind != LOST] or [end[3] for end in failures]
    cause = causes[-1] if causes else " ".join(str(failure).split())[:300]
    return Lost(f"{cause}, {again}; {go_on}")


def _lost(failure: Exception | None) -> str:
    """Which workers are gone, as words; nothing where all lived and reported an error."""
    lost = private("RayTrainError")
    failures = getattr(failure, "worker_failures", {})
    gone = [rank for rank, error in failures.items() if isinstance(error, lost)]
    if not gone:
        return ""
    names = f"rank {gone[0]} was" if len(gone) == 1 else f"ranks {', '.join(map(str, sorted(gone)))} were"
    return f"{names} lost: the process was killed or its machine is gone (was memory short?)"
