"""A worker of a training job on a Ray cluster: joins the others, trains, and mails how it ended."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.cluster.elastic import Paused, why_leave
from darkroom.cluster.encoders import last_line
from darkroom.cluster.shared_store import check_here
from darkroom.errors import DarkroomError, InputError, Stopped
from darkroom.hardware import accelerator
from darkroom.hardware.system import remove_file

if TYPE_CHECKING:
    from darkroom.train.trainer import TrainResult

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
        with _stopping(mail, why_leave if job["elastic"] else lambda: ""):
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
    from darkroom.train.distributed.ranks import is_broken_link

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

    from darkroom.train.checkpoint.storage import place_of

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

    from darkroom.train.stopping import STOP

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
