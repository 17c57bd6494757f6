"""The processes that train together: who they are, what they tell each other, who of them hangs, and how they
are asked to stop: by Ctrl-C, SIGTERM, or an event where signals do not come.

A rank is one process with one device. They are started by `torchrun` (or `darkroom train --engine torchrun`);
NCCL carries what lies on GPUs, gloo what lies on CPUs. Nothing is pickled between them: JSON goes as bytes.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch
from torch import Tensor

from darkroom.errors import DarkroomError, InputError, RecipeError, Stopped, first_line
from darkroom.hardware import accelerator, machine
from darkroom.hardware.system import on_stop_signal
from darkroom.recipe.sections import ParallelSettings

LOST = 75  # the exit code of a process that ends because another one hangs


class RankLost(DarkroomError):
    """Another process of the job is gone or stands still."""


@dataclass(frozen=True)
class Ranks:
    """All processes as one of them sees them; alone it is rank 0 of 1, and asks nobody."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    sharded: bool = False

    @property
    def first(self) -> bool:
        """Whether it is this one that writes and tells."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"rank {self.rank} of {self.size}"

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides, known to all: plain JSON values. A mistake that it finds is raised on all."""
        if self.size == 1:
            return decide()
        mistake: InputError | None = None
        answer: dict[str, Any] = {}
        if self.first:
            try:
                answer = {"decided": decide()}
            except InputError as error:
                mistake, answer = error, {"mistake": str(error)}
        answer = self._from_first(answer)
        if "mistake" in answer:
            raise mistake or InputError(answer["mistake"])
        return answer["decided"]

    def _from_first(self, value: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's value on all ranks."""
        import torch.distributed as dist

        content = json.dumps(value).encode() if self.first else b""
        length = torch.tensor([len(content)])
        dist.broadcast(length, 0)
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else None
        if text is None:
            text = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, 0)
        found: dict[str, Any] = json.loads(text.numpy().tobytes())
        return found

    def rank0_first(self, work: Callable[[], None]) -> None:
        """Let rank 0 do what must be done once before the others go on."""
        if self.first:
            work()
        self.barrier()

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(torch.zeros(1))

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over all, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def smallest(self, number: int) -> int:
        """The least of all ranks' numbers."""
        if self.size == 1:
            return number
        import torch.distributed as dist

        shared = torch.tensor([number])
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return int(shared)


ALONE = Ranks()


def started_together() -> int:
    """How many processes torchrun started this one among; 1 where it was started alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that tells results: alone, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def meet_without_libuv() -> None:
    """On Windows, have processes meet over PyTorch's other TCP store: its builds for Windows lack libuv.

    torch.distributed knows that, but its launcher, and what it starts, ask for libuv whatever USE_LIBUV says
    (pytorch issue 178600).
    """
    if sys.platform != "win32":
        return
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has its name

    # The launcher's own store; the one that ranks share; theirs, as ranks find it.
    modules: tuple[Any, ...] = (c10d_rendezvous_backend, dist, rendezvous)
    base = rendezvous.TCPStore

    def made(self: Any, *given: Any, **named: Any) -> None:
        base.__init__(self, *given, **{**named, "use_libuv": False})

    store = type("PlainStore", (base,), {"__init__": made})
    for module in modules:
        module.TCPStore = store


@contextmanager
def joined(settings: ParallelSettings) -> Iterator[Ranks]:
    """Within, this process is one of the job's ranks. RecipeError where recipe and starter contradict."""
    size = started_together()
    if size > 1 and settings.mode == "none":
        raise RecipeError(
            "parallel.mode", f"none, but {size} processes were started", mend="set parallel.mode=ddp or fsdp"
        )
    if size == 1:
        yield ALONE
        return
    import torch.distributed as dist

    meet_without_libuv()
    ours = not dist.is_initialized()  # Ray has made the group already; so has an earlier phase
    if ours:
        here = accelerator.current()
        theirs = here and accelerator.collectives(here)
        if theirs:
            accelerator.use(int(os.environ["LOCAL_RANK"]))
        # Beyond the watch's own limit: it names who hangs, which a collective that gives up cannot.
        limit = timedelta(seconds=2 * settings.timeout_s + 60)
        dist.init_process_group(f"cpu:gloo,{here}:{theirs}" if theirs else "gloo", timeout=limit)
    local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), *local, sharded=settings.mode == "fsdp")
    finally:
        if ours and sys.exc_info()[0] is None:  # with another rank gone there is nobody to say goodbye to
            dist.destroy_process_group()


class Agreement:
    """A small number that all ranks know of each other one step later; nobody waits for it in between.

    Each step hands in its own; what is returned is the largest of those handed in at the step before.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._last: tuple[Any, Tensor] | None = None

    def __call__(self, mine: int) -> int:
        if self._ranks.size == 1:
            return mine
        import torch.distributed as dist

        before, shared = self._last, torch.tensor([mine])
        self._last = dist.all_reduce(shared, dist.ReduceOp.MAX, async_op=True), shared
        if before is None:
            return 0
        before[0].wait()
        return int(before[1])

    def close(self) -> None:
        """Take in what is under way, so that nothing is left behind."""
        if self._last is not None:
            self._last[0].wait()
            self._last = None


class HangWatchdog:
    """Notes how far this rank is, and ends the process with a message where the job stands still.

    A rank that hangs leaves the others waiting inside a collective. A thread of each rank writes where it is
    for all to read, again and again; a rank that stands still for longer than the limit reads what the others
    wrote, names the one that all wait for, and ends.
    """

    def __init__(self, ranks: Ranks, limit_s: float, say: Callable[[str], None]) -> None:
        self._ranks, self._limit_s, self._say = ranks, limit_s, say
        self._tick_s = min(1.0, limit_s / 10)
        self._at, self._doing, self._since = -1, "start", time.monotonic()
        self._beat = 0
        self._over = threading.Event()
        self._store: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the work inside goes on; RankLost where it fails because another rank is gone."""
        if self._ranks.size == 1:
            yield
            return
        from torch.distributed.distributed_c10d import _get_default_store

        # A connection of its own: the main thread may hang inside a call on the first.
        store: Any = _get_default_store()
        self._store = store.clone()
        thread = threading.Thread(target=self._run, name="watch", daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError as error:
            if not is_broken_link(error):
                raise
            raise RankLost(self._message(f"the connection broke ({first_line(error)[:120]})")) from error
        finally:
            self._over.set()
            thread.join(5)

    def note(self, k: int, doing: str) -> None:
        """This rank has made k steps and now does this."""
        self._at, self._doing, self._since = k, doing, time.monotonic()

    def _run(self) -> None:
        while not self._over.wait(self._tick_s):
            self._beat += 1
            late = time.monotonic() - self._since > self._limit_s
            with suppress(RuntimeError):  # the store is gone with the process that held it
                self._store.set(_key(self._ranks.rank), self._state())
            if late and self._all_wait():
                self._end(self._message(f"no progress for {self._limit_s:g} s (parallel.timeout_s)"))

    def _message(self, what: str) -> str:
        return f"{what} after step {self._at}: {self._blamed()}; the same command goes on from the last save"

    def _state(self) -> str:
        age_s = time.monotonic() - self._since
        return json.dumps([self._beat, self._at, self._doing, age_s])

    def _all_wait(self) -> bool:
        """Whether no other rank is busy with something that takes its time, such as drawing samples."""
        try:
            before = self._read()
            time.sleep(3 * self._tick_s)
            now = self._read()
        except RuntimeError:
            return True
        return not any(
            rank != self._ranks.rank and seen[3] < self._limit_s and before[rank][0] != seen[0]
            for rank, seen in now.items()
        )

    def _blamed(self) -> str:
        """Whom all wait for, as words."""
        try:
            before = self._read()
            time.sleep(3 * self._tick_s)
            now = self._read()
        except RuntimeError:
            return "the process that holds the job together is gone"
        still = [rank for rank, seen in now.items() if before[rank][0] == seen[0]]
        if still:
            return f"{_named(still)} is lost or hangs"
        least = min(seen[1] for seen in now.values())
        behind = [rank for rank, seen in now.items() if seen[1] == least]
        if len(behind) == len(now):
            odd = [rank for rank in behind if now[rank][2] != "step"]
            return f"{_named(odd)} hangs in: {now[odd[0]][2]}" if odd else "all ranks wait for each other"
        return f"{_named(behind)} hangs after step {least} in: {now[behind[0]][2]}"

    def _read(self) -> dict[int, tuple[int, int, str, float]]:
        """Beat, steps made, what is done and for how long, by rank; this one lives: it asks."""
        found = {self._ranks.rank: (time.monotonic_ns(), self._at, self._doing, 0.0)}
        for rank in range(self._ranks.size):
            if rank != self._ranks.rank:
                there = self._store.check([_key(rank)])
                status = json.loads(self._store.get(_key(rank))) if there else (0, -1, "start", 0.0)
                found[rank] = tuple(status)
        return found

    def _end(self, message: str) -> None:
        self._say(f"error: {self._ranks.name}: {message}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOST)


def is_broken_link(error: RuntimeError) -> bool:
    """Whether a collective failed because of another process."""
    message = str(error).lower()
    return any(word in message for word in ("gloo", "nccl", "connection", "socket", "timed out"))


def _key(rank: int) -> str:
    return f"darkroom/at/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


# ---- starting a job's processes on this machine, as `torchrun --standalone` does

WINDOWS_FAULT = 0x8000_0000  # and above: exit codes of processes that Windows ended, as for 0xc0000005
LEAVE_S = (1.0, 4.0)  # how long they may take to leave at once, after the first and the second signal
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
    for name in [*logging.root.manager.loggerDict]:  # what they warn of is said below, in one line
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
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
        signals_to_handle="SIGHUP,SIGQUIT",  # the others: _stopping_ranks
    )
    command = [sys.executable, "-u", "-m", "darkroom", *arguments]
    try:
        with _stopping_ranks():
            elastic_launch(config, command[0])(*command[1:])
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise Stopped(
            f"{name}: the job's processes were asked to save and stop; the same command goes on"
        ) from None
    except ChildFailedError as error:
        raise _why(error.failures) from None


@contextmanager
def _stopping_ranks() -> Iterator[None]:
    """Within, the first Ctrl-C or SIGTERM asks the ranks to save and stop; a second ends them and this one.

    torch's launcher would ask them once more and wait for one that hangs; a third would leave that behind.
    It waits as long as `SAVE_S` from torch 2.13 on only: before, 30 s.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        """The handler."""
        nonlocal asked
        if asked:
            _leave_at_once()
        asked = True
        _ended(psutil.Process().children(), SAVE_S)
        raise SignalException(f"signal {number}", signal.Signals(number))

    with on_stop_signal(stop):
        yield


def _leave_at_once() -> NoReturn:
    """End the ranks and this process. Rank 0 says which checkpoint is kept; here, who had to be killed."""
    me = psutil.Process()
    ranks, everyone = me.children(), me.children(recursive=True)
    for seconds in LEAVE_S:  # for a rank that was not asked to save yet, the first is not the second one
        ranks = _ended(ranks, seconds)
    for one in everyone:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if ranks:
        message = f"{len(ranks)} of the job's processes did not stop and were killed"
        go_on = "what was saved before is whole, and the same command goes on"
        os.write(2, f"darkroom: {message}; {go_on}\n".encode())
    os._exit(1)


def _ended(ranks: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Ask them to end; those that have not after so long."""
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.terminate()
    alive: list[psutil.Process] = psutil.wait_procs(ranks, seconds)[1]
    return alive


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


STOP = threading.Event()  # asks for a stop where signals do not come: training in a thread


class StopRequest:
    """Whether Ctrl-C or SIGTERM came. A second one ends the process; `kept` says what is left then."""

    def __init__(self, kept: Callable[[], str]) -> None:
        self._noted, self._kept = False, kept

    @property
    def asked(self) -> bool:
        """Whether one came, or `STOP` was set."""
        return self._noted or STOP.is_set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals instead of dying of them; in another thread than the main one nothing is done."""
        with on_stop_signal(self._note, once=True, kept=self._kept):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
