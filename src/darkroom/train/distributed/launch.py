"""Starting a job's processes on this machine, as `torchrun --standalone` does, and saying why they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from darkroom.errors import DarkroomError, RecipeError, Stopped
from darkroom.hardware import accelerator, machine
from darkroom.recipe.sections import ParallelSettings
from darkroom.train.distributed.ranks import LOST, meet_without_libuv, started_together

WINDOWS_FAULT = 0x8000_0000  # and above: exit codes of processes that Windows ended, as for 0xc0000005
SAVE_S = 300  # how long processes that are asked to stop may take to save


class ProcessesFailed(DarkroomError):
    """The processes ended with an error that one of them has reported already."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def starts_processes(settings: ParallelSettings) -> bool:
    """Whether this process has to start the ones that train."""
    return settings.mode != "none" and started_together() == 1 and num_processes(settings) > 1


def num_processes(settings: ParallelSettings) -> int:
    """Processes on this machine; RecipeError where there are too few GPUs, or several machines."""
    gpus = accelerator.count()
    wanted = settings.devices if settings.devices != "auto" else max(1, gpus)
    if gpus and wanted > gpus:
        raise RecipeError("parallel.devices", f"{wanted}, but this machine has {gpus} GPUs")
    if settings.nodes > 1 and started_together() == 1:
        raise RecipeError(
            "parallel.nodes",
            f"{settings.nodes}: each machine starts its own processes",
            mend=f"on each: torchrun --nnodes {settings.nodes} --nproc-per-node {wanted} --rdzv-backend c10d "
            "--rdzv-endpoint HOST:29500 -m darkroom train ...",
        )
    return wanted


def launch(arguments: Sequence[str], count: int) -> None:
    """Run `darkroom ARGUMENTS` in so many processes of this machine, to the end.

    Raises DarkroomError that names a lost process,
    ProcessesFailed where one of them reported its error, Stopped where they were asked to stop.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meet_without_libuv()
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # it is said below, in one line
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(machine().usable_cores) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
        shutdown_timeout=SAVE_S,
    )
    command = [sys.executable, "-u", "-m", "darkroom", *arguments]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise Stopped(
            f"{name}: the job's processes were asked to save and stop; the same command goes on"
        ) from None
    except ChildFailedError as error:
        raise _why(error.failures) from None


def _why(failures: dict[int, Any]) -> DarkroomError:
    """What a user should know of processes that failed, by rank: who was lost, or that it was reported."""
    for rank, failure in sorted(failures.items()):
        code = failure.exitcode
        if (code < 0 and -code != signal.SIGTERM) or code >= WINDOWS_FAULT:
            name = signal.Signals(-code).name if code < 0 else f"error {code:#x} of Windows"
            hint = " (was memory short?)" if name == "SIGKILL" else ""
            return DarkroomError(
                f"rank {rank} was lost: ended by {name}{hint}; the others were stopped; the same command "
                "goes on from the last checkpoint"
            )
    codes = [failure.exitcode for failure in failures.values() if failure.exitcode > 0]
    failed = [code for code in codes if code != LOST]
    return ProcessesFailed(failed[0] if failed else 1)
