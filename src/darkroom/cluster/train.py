"""Training in workers of a Ray cluster: the same `train`, placed by Ray and started again where it fails.

What a worker says, why it ended and what it made goes through one small actor beside the driver; the run's
state goes where it always goes, its folder or `checkpoint.url`, never through Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from darkroom.cluster.connect import TYPE, Cluster, connected
from darkroom.cluster.elastic import (
    MONITOR_S,
    Paused,
    Span,
    allowed_counts,
    elastic_trainer,
    listening_callback,
    rounded_down,
    why_leave,
)
from darkroom.cluster.feed import online
from darkroom.cluster.mail import Mail
from darkroom.errors import DarkroomError, InputError, RecipeError, Stopped

if TYPE_CHECKING:
    from darkroom.recipe import Recipe
    from darkroom.train import TrainResult

Say = Callable[[str], None]
TICK_S = 0.5  # how often the driver and the workers look for news
LET_GO_S = 60.0  # how long a killed worker may hold the run
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
    workers: Span | int | None = None  # None: parallel.devices times parallel.nodes, or one a GPU
    accelerator: str | None = None  # the type of their nodes, as Ray names it
    cpus: int = 1  # each worker's share, and its threads unless OMP_NUM_THREADS says
    max_failures: int = 3  # how often lost workers are started again
    monitor_s: float = MONITOR_S  # how often it is looked whether more or fewer workers fit


class WorkersFailed(DarkroomError):
    """The workers ended with an error that one of them told, with the exit code it means."""

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
    with connected(placement.address, accelerator=placement.accelerator) as cluster:
        console(cluster.line())
        room = _room(cluster, placement.accelerator)
        counts = _workers(recipe, placement, room)
        target = _target(recipe, Path(out).absolute(), resume)
        return _run(recipe, target, resume, counts, placement, room, console)


# ---- where


@dataclass(frozen=True)
class _Room:
    """What the nodes have that workers may go to."""

    cpus: float
    gpus: float
    grows: bool  # an autoscaler may add nodes


def _room(cluster: Cluster, accelerator: str | None) -> _Room:
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = [has for has in nodes if accelerator is None or f"{TYPE}{accelerator}" in has]
    cpus, gpus = (sum(has.get(name, 0.0) for has in fit) for name in ("CPU", "GPU"))
    return _Room(cpus, gpus, grows=bool(cluster.planned))


def _workers(recipe: Recipe, placement: Placement, room: _Room) -> list[int]:
    """How many workers there may be; InputError where the recipe or the cluster does not allow any."""
    parallel = recipe.parallel
    gpus = int(room.gpus) if _uses_gpus(recipe, room) else 0
    asked = max(1, gpus) if parallel.devices == "auto" else parallel.devices * parallel.nodes
    given = placement.workers or (1 if parallel.mode == "none" else asked)
    span = given if isinstance(given, Span) else Span(given, given)
    if span.least < 1 or placement.cpus < 1:
        raise InputError(f"--workers {span} of {placement.cpus} CPUs each", allowed="1 or more")
    if span.most > 1 and parallel.mode == "none":
        raise RecipeError("parallel.mode", f"none, with {span} workers", mend="set parallel.mode=ddp or fsdp")
    counts = allowed_counts(recipe, span)
    least = counts[0]
    kind, has, each = ("GPUs", room.gpus, 1) if gpus else ("CPUs", room.cpus, placement.cpus)
    if least * each > has and not room.grows:
        of = f" of type {placement.accelerator}" if placement.accelerator else ""
        raise InputError(
            f"{least} workers need {least * each} {kind}, and the cluster's nodes{of} have {has:g}",
            mend="ask for fewer with --workers, or add nodes",
        )
    return counts


def _uses_gpus(recipe: Recipe, room: _Room) -> bool:
    return room.gpus >= 1 and recipe.train.device != "cpu"


def _target(recipe: Recipe, out: Path, resume: str) -> Path:
    """The run's folder, settled once so that workers that start again go on in it."""
    from darkroom.run import numbered_folder

    if resume == "auto":
        return out
    if recipe.phases:
        raise InputError(f"--resume {resume} with phases", allowed="auto")
    if resume != "never" and not (Path(resume) / "manifest.json").is_file():
        raise InputError(
            f"--resume {resume}", allowed="auto, never, or a checkpoint's folder (RUN/checkpoints/step-...)"
        )
    return numbered_folder(out)


# ---- the driver


def _run(
    recipe: Recipe, out: Path, resume: str, counts: list[int], placement: Placement, room: _Room, say: Say
) -> TrainResult:
    import ray

    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    mail = ray.remote(num_cpus=0, scheduling_strategy=here)(Mail).remote()
    job: dict[str, Any] = {
        "recipe": recipe,
        "out": str(out),
        "resume": resume,
        "mail": mail,
        "folder": os.getcwd(),
        "max_failures": placement.max_failures,
        "token": uuid.uuid4().hex[:12],
        "elastic": len(counts) > 1,
    }
    with (
        TemporaryDirectory(prefix="darkroom-ray-") as records,
        online(
            recipe, reserved_cpus=_at_once(recipe, counts, placement, room) * placement.cpus, say=say
        ) as job["feed"],
    ):
        failure = _followed(_trainer(job, recipe, counts, placement, room, records), mail, say)
    made = ray.get(mail.what_was_made.remote())
    if failure is None and made is not None:
        return _result(made)
    raise _why(failure, ray.get(mail.failed.remote()), placement.max_failures) from failure


def _at_once(recipe: Recipe, counts: list[int], placement: Placement, room: _Room) -> int:
    """How many workers the nodes there are have room for."""
    fit = room.gpus if _uses_gpus(recipe, room) else room.cpus // placement.cpus
    return rounded_down(int(fit), counts) or counts[0]


def _trainer(
    job: dict[str, Any], recipe: Recipe, counts: list[int], placement: Placement, room: _Room, records: str
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    gpus = _uses_gpus(recipe, room)
    resources = {"CPU": float(placement.cpus), **({"GPU": 1.0} if gpus else {})}
    return elastic_trainer(
        counts,
        job["mail"],
        train_loop_per_worker=_work,
        train_loop_config=job,
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if gpus else "gloo",
            timeout_s=int(2 * recipe.parallel.timeout_s + 60),  # the job's own watch is to name who hangs
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
            callbacks=[listening_callback()] if len(counts) > 1 else None,
        ),
    )


def _followed(trainer: Any, mail: Any, say: Say) -> Exception | None:
    """Run to the end, saying what workers say; the error that Ray Train ended with, if any.

    Ray Train waits in a thread of its own: in the main one it would answer Ctrl-C by killing the workers.
    """
    import ray

    ended: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:  # every kind: it is told below
            ended.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    try:
        with _asked_to_stop() as asked:
            thread.start()
            while thread.is_alive():
                thread.join(TICK_S)
                if asked.is_set():
                    ray.get(mail.ask_stop.remote())
                for line in ray.get(mail.take.remote()):
                    say(line)
        for line in ray.get(mail.take.remote()):
            say(line)
    except ray.exceptions.RayError as error:
        first = str(error).splitlines()[0][:200]
        raise DarkroomError(f"the Ray cluster is gone ({first}); the same command goes on") from error
    return ended[0] if ended else None


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C or SIGTERM is noted; a second one ends the driver at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _result(made: dict[str, Any]) -> TrainResult:
    from darkroom.bill import Bill
    from darkroom.train import TrainResult

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


def _why(failure: Exception | None, told: list[tuple[str, int, bool, str]], retries: int) -> DarkroomError:
    """The one error that a user should read."""
    for kind, code, final, message in told:
        if final:
            return Stopped(message) if kind == Stopped.__name__ else WorkersFailed(message, code)
    again = f"after {retries} new starts (--max-failures)" if retries else "and --max-failures is 0"
    go_on = "the same command goes on from the last checkpoint"
    if lost := _lost(failure):
        return DarkroomError(f"{lost}, {again}; {go_on}")
    cause = told[-1][3] if told else " ".join(str(failure).split())[:300]
    return DarkroomError(f"{cause}, {again}; {go_on}")


def _lost(failure: Exception | None) -> str:
    """Which workers are gone, as words; nothing where all lived and told an error."""
    from ray.train.v2._internal.exceptions import RayTrainError

    failures = getattr(failure, "worker_failures", {})
    gone = [rank for rank, error in failures.items() if isinstance(error, RayTrainError)]
    if not gone:
        return ""
    names = f"rank {gone[0]} was" if len(gone) == 1 else f"ranks {', '.join(map(str, sorted(gone)))} were"
    return f"{names} lost: the process was killed or its machine is gone (was memory short?)"


# ---- a worker


def _work(job: dict[str, Any]) -> None:
    """What each worker does: join the others, train, and tell the driver how it ended."""
    import ray

    mail = job["mail"]
    rank = int(os.environ["RANK"])

    def say(line: str) -> None:
        mail.say.remote(line)

    if ray.get(mail.over.remote()):
        return
    try:
        with _stopping(mail, why_leave if job["elastic"] else lambda: ""):
            made = _trained(job, rank, mail, say)
    except DarkroomError as error:
        if isinstance(error, Stopped) and ray.get(mail.leave.remote()):
            _together()  # before any ends: the others would be killed where they are
            raise Paused(str(error)) from None
        final = isinstance(error, InputError | Stopped) or type(error) is DarkroomError
        ray.get(mail.fail.remote(type(error).__name__, error.exit_code, final, str(error)))
        raise RuntimeError(str(error)) from None  # darkroom's own errors do not survive being pickled
    if rank == 0:
        ray.get(mail.made.remote(made.to_dict()))


def _together() -> None:
    """Wait until all workers are here."""
    import torch
    import torch.distributed as dist

    if int(os.environ["WORLD_SIZE"]) > 1:
        with suppress(RuntimeError):  # one is gone
            dist.all_reduce(torch.zeros(1))


def _trained(job: dict[str, Any], rank: int, mail: Any, say: Say) -> TrainResult:
    import ray
    import torch

    from darkroom.train import train as train_here

    out, recipe, resume = Path(job["out"]), job["recipe"], job["resume"]
    _go_to(job["folder"])
    if torch.cuda.is_available() and recipe.train.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if rank == 0:
        starts, _ = ray.get(mail.begin.remote())
        if lost := ray.get(mail.newly_lost.remote()):
            say(f"workers were lost and are started again ({lost} of at most {job['max_failures']})")
        if starts > 1:
            _wait_for(out)
    _check_shared(job, out, rank)
    resume = "auto" if resume == "never" or (out / "recipe.yaml").is_file() else resume
    return train_here(recipe, out=out, resume=resume, feed=job["feed"], console=say)


def _go_to(folder: str) -> None:
    """To the driver's folder, so that a recipe's paths mean the same."""
    if not Path(folder).is_dir():
        raise InputError(
            f"'{folder}' is not on the machine {socket.gethostname()}",
            mend="start the command in a folder that all machines share",
        )
    os.chdir(folder)


def _wait_for(out: Path) -> None:
    """Until workers that were killed have let the run go; after a while it is another job's."""
    from darkroom.run import Run

    until = time.monotonic() + LET_GO_S
    while time.monotonic() < until and any(Run(path).is_running() for path in (out, *out.glob("phase-*"))):
        time.sleep(TICK_S)


def _check_shared(job: dict[str, Any], out: Path, rank: int) -> None:
    """InputError unless all workers see one folder for the run, or checkpoints go to an address."""
    if int(os.environ["WORLD_SIZE"]) == 1 or job["recipe"].checkpoint.url is not None:
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
        mark.unlink(missing_ok=True)
    if int(missing):
        raise InputError(
            f"--out {out} is not one folder for all machines: {int(missing)} of "
            f"{os.environ['WORLD_SIZE']} workers do not see it",
            mend="choose a folder that they share, or set checkpoint.url",
        )


@contextmanager
def _stopping(mail: Any, leaving: Callable[[], str]) -> Iterator[None]:
    """Within, a stop that the driver was asked for reaches the training loop, which saves.

    `leaving` tells why this worker must go, if it must: all of them pause then.
    """
    import ray

    from darkroom.train.stopping import STOP

    over = threading.Event()

    def look() -> None:
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
