"""Batches that other machines encode while training runs, with nothing stored in between.

Every rank asks for its share of global batch k, k + 1, ... of the job's own order, some batches ahead; CPU
tasks read and cut the rows, encoder actors encode them, and they come straight to the rank, which adds the
noise. So the batches are those of `data.encode=inline` at the same seed; going on at step k asks for batch k
first; and what a dead worker or encoder had is asked for again. Nothing of the order is given up. What is:
rows are read one by one, not in blocks that stay in memory for a window, so an object store is asked more
often where global batches are small against the order's window; text states come in float16, as stored ones.

Encoders belong to a keeper, an actor on the driver's node: they outlive the workers that train, who may be
started again, and all ranks share them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from darkroom.cluster.connect import check_nodes, describe, resources_of_nodes, stores_here
from darkroom.cluster.encoders import (
    ONLINE,
    QUEUE,
    Bounds,
    Keeper,
    OnlineEncoder,
    Parts,
    RowSource,
    SharedPool,
    Use,
    asked,
    check_room,
    on_one_machine,
    read_rows,
)
from darkroom.cluster.stages import MOST_TRIES, Stages
from darkroom.data.loader import Assembler, Batch
from darkroom.errors import InputError, LoaderError
from darkroom.hardware import accelerator

if TYPE_CHECKING:
    from darkroom.data.order import BatchRows, SampleOrder
    from darkroom.data.store import Store
    from darkroom.recipe.sections import DataSettings, OnlineSettings, TrainSettings
    from darkroom.train.feed import Feed
    from darkroom.train.ranks import Ranks
    from darkroom.train.tasks.diffusion import Columns, Task

Say = Callable[[str], None]
LAST_WORD_S = 5.0
LOOK_S = 5.0  # how often it is looked whether encoders wait for a node
SAID_EVERY_S = 60.0  # how often that is said at most


@contextmanager
def online(
    data: DataSettings,
    *,
    reserved_cpus: float = 0.0,
    say: Say = lambda _: None,
    encoder: Callable[..., Any] = OnlineEncoder,
    grows: bool = False,
) -> Iterator[OnlineFeed | None]:
    """Within, encoders stand ready where data.encode is online; for any other there is no feed.

    To be called on the driver while it is connected to a cluster. The feed may be handed to workers. CPUs
    that training needs are `reserved_cpus`. InputError where the cluster lacks what is asked, unless it
    `grows`; StoreError where a node with CPUs does not see the store's folder.
    """
    import ray

    if data.encode != "online":
        yield None
        return
    settings = data.online
    bounds = Bounds.parsed(str(settings.encoders), settings.accelerator, settings.fraction)
    cluster = describe(grows=grows)
    cluster.require(bounds.accelerator)
    if waits := cluster.waits_for(bounds.accelerator):
        say(waits)
    cpus = math.inf
    if not cluster.may_grow:
        nodes = resources_of_nodes()
        bounds = on_one_machine(bounds, nodes, reserved_cpus)
        cpus = _spare_cpus(bounds, nodes, reserved_cpus)
    if bounds.shares:
        say(f"reading, encoding and training share this machine's {cluster.cpus:g} CPUs")
    for store in stores_here(data):
        check_nodes(store, say)  # any of them may be the one that reads
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    keeper = ray.remote(num_cpus=0, scheduling_strategy=here)(Keeper).remote(bounds, encoder)
    try:
        with _waits_said(keeper, say):
            yield OnlineFeed(keeper, settings, cpus, bounds.shares)
        for line in ray.get(keeper.lines.remote()):
            say(line)
    finally:
        with suppress(ray.exceptions.RayError):  # the cluster is gone, and they with it
            ray.get(keeper.close.remote())
            ray.kill(keeper)


@contextmanager
def _waits_said(keeper: Any, say: Say) -> Iterator[None]:
    """Within, what encoders wait for that cannot start is said, from a thread of its own."""
    import ray

    over = threading.Event()

    def look() -> None:
        """Show every `LOOK_S` seconds what encoders wait for, until the block is left."""
        pause_s = LOOK_S
        while not over.wait(pause_s):
            pause_s = LOOK_S
            with suppress(ray.exceptions.RayError):  # the keeper is gone, which the ranks tell
                if line := ray.get(keeper.waits.remote(), timeout=LAST_WORD_S):
                    say(line)
                    pause_s = SAID_EVERY_S

    thread = threading.Thread(target=look, name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LAST_WORD_S)


def _spare_cpus(bounds: Bounds, nodes: list[dict[str, float]], reserved: float) -> float:
    """CPUs that are left to read and cut with; InputError where there are none."""
    total = sum(node.get("CPU", 0.0) for node in nodes)
    if bounds.shares:
        return total
    if total - reserved < 1:
        raise InputError(
            f"the cluster has {total:g} CPUs and training takes {reserved:g}",
            allowed="at least one more, to read and decode with",
            mend="add nodes, or set data.encode=inline",
        )
    check_room(bounds, [*nodes, {"CPU": -reserved}], ONLINE)
    on_gpu = any(node.get("GPU", 0) for node in nodes)
    return max(1.0, total - reserved - bounds.least * (0.1 if on_gpu else bounds.fraction))


# ---- a rank


@dataclass(frozen=True)
class OnlineFeed:
    """A feed that workers can be handed; see `darkroom.train.feed.OpenFeed`."""

    keeper: Any
    settings: OnlineSettings
    cpus: float  # that the cluster leaves to read and cut with
    shares: bool = False  # one machine's CPUs, of which then no task takes any for itself

    def bound(
        self,
        train: TrainSettings,
        data: DataSettings,
        task: Task,
        stores: Sequence[Store],
        order: SampleOrder,
        device: torch.device,
        ranks: Ranks,
    ) -> Feed:
        """The stream of this rank's batches of a job."""

        [store] = stores
        parts = _parts(task, data.text)
        ranks.rank0_first(lambda: self._hold(parts))
        source = RowSource(str(store.path), store.version, task.read)
        pin = accelerator.kind_of(device).streams
        job = _StreamSetup(
            keeper=self.keeper,
            cpus=self.cpus,
            shares=self.shares,
            settings=data.online,
            ahead=data.prefetch_batches,
            steps=train.steps,
            source=source,
            order=order,
            ranks=ranks,
            tokenizers=parts.tokenizers,
            pin=pin,
        )

        @contextmanager
        def feed(k: int) -> Iterator[Iterator[Columns]]:
            """Batches from step `k` on; the stream is closed on leaving."""
            stream = Stream(job, k)
            try:
                yield iter(stream)
            finally:
                stream.close()

        return feed

    def _hold(self, parts: Parts) -> None:
        """Hand the keeper the parts, unless another rank has."""
        import ray

        if not ray.get(self.keeper.holds.remote(parts.identity)):
            ray.get(self.keeper.hold.remote(parts.identity, [ray.put(parts)]))


def _parts(task: Task, text_from: str) -> Parts:
    """Copies of the frozen parts on the CPU; text encoders too, unless text is trained, stored or inline."""
    import copy

    from darkroom import models

    model, read = task.model, task.read
    assert model.vae is not None
    trained = any(name.startswith("text_encoder") for name in task.modules)
    text = read.text is None and text_from == "auto" and not trained
    encoders = tuple(model.text_encoders) if text else ()
    identity = models.identity(model.vae, *encoders)
    modules = [copy.deepcopy(module).to("cpu").eval() for module in (model.vae, *encoders)]
    return Parts(identity, modules[0], tuple(modules[1:]), tuple(model.tokenizers) if text else ())


@dataclass(frozen=True)
class _StreamSetup:
    """What a stream needs to know."""

    keeper: Any
    cpus: float
    shares: bool
    settings: OnlineSettings
    ahead: int  # batches that are asked for before they are taken, at least
    steps: int
    source: RowSource
    order: SampleOrder
    ranks: Ranks
    tokenizers: tuple[Any, ...]
    pin: bool

    def rows(self, k: int) -> BatchRows:
        """This rank's rows of global batch k."""
        return self.order.batch(k).rank(self.ranks.rank, self.ranks.size)

    def block_rows(self, rows: BatchRows) -> int:
        """Rows that the trainer would encode in one call."""
        from darkroom.train.tasks.diffusion import ENCODED_PIXELS

        width, height = rows.size or (self.source.read.pixels or 1,) * 2
        return max(1, ENCODED_PIXELS // (width * height))


@dataclass
class _Coming:
    """A batch on its way: how many blocks it lacks, and the results of the others."""

    rows: BatchRows
    blocks: int
    results: dict[int, Any] = field(default_factory=dict)


class Stream:
    """Batches k, k + 1, ... of one rank, asked for ahead by a thread of their own."""

    def __init__(self, job: _StreamSetup, k: int) -> None:
        import ray

        self._job, self._next, self._end = job, k, job.steps
        self._settings = job.settings
        self._asked = k  # the first batch that was not asked for
        self._coming: dict[int, _Coming] = {}
        self._made: dict[int, Columns] = {}
        self._error: BaseException | None = None
        self._over = False
        self._changed = threading.Condition()
        bounds = Bounds.parsed(str(self._settings.encoders), None, 1.0)
        cpu_workers = share_of(self._settings.cpu_workers, job.ranks)
        if job.shares:
            cpu_workers = min(cpu_workers, max(1, int(job.cpus)))
        read: Any = ray.remote(read_rows).options(
            num_cpus=0 if job.shares else 1, num_returns=2, max_retries=MOST_TRIES
        )
        tokenizers = ray.put(job.tokenizers)
        use = Use(cpu_workers, job.cpus, ONLINE)
        self._pool = SharedPool(job.keeper, job.ranks.rank, bounds, use)
        self.stages = Stages(self._pool, lambda ask: tuple(read.remote(ask, tokenizers)), use)
        first = job.rows(k)
        in_batch = -(-len(first) // job.block_rows(first))
        share = -(-QUEUE * bounds.most // job.ranks.size)
        self.ahead = max(job.ahead, -(-(share + 2 * cpu_workers) // in_batch))
        """Batches that are asked for before they are taken, and so the most that lie in memory."""
        self._assembler = Assembler(job.source.read, _nothing, pin=job.pin)
        self._thread = threading.Thread(target=self._run, name="online", daemon=True)
        self._thread.start()

    # ---- the trainer's side

    @property
    def ready(self) -> int:
        """Batches that lie ready."""
        return len(self._made)

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        if self._next >= self._end:
            raise StopIteration
        limit_s, began, counts = self._settings.timeout_s, time.monotonic(), self.stages.use.begun
        with self._changed:
            there = self._changed.wait_for(lambda: self._error or self._next in self._made, limit_s)
            if self._error is not None:
                raise self._error
            if not there:
                up = len(self.stages.pool.up)
                raise LoaderError(
                    f"no batch for {limit_s:g} s (batch {self._next}); {up} encoders are up and "
                    f"{self.stages.held} blocks wait; are there nodes for them, is the storage reachable?"
                )
            batch = self._made.pop(self._next)
            self._next += 1
            self._changed.notify_all()
        if counts:  # what starts up is not waited for
            self.stages.use.waited_s += time.monotonic() - began
        return batch

    def close(self) -> None:
        """Stop asking."""
        import ray

        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(LAST_WORD_S)
        last = self._pool.tell(0)
        with suppress(ray.exceptions.RayError):
            ray.wait([last], timeout=LAST_WORD_S)

    # ---- the thread's side

    def _run(self) -> None:
        try:
            while self._goes_on():
                self._ask()
                for (k, i), result in self.stages.step(0.2):
                    self._take(k, i, result)
        except BaseException as error:  # whatever it is, the trainer must hear of it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        """Wait while nothing is to be done; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self.stages.held or self._wants(), 1.0)
            return not self._over

    def _wants(self) -> bool:
        return self._asked < min(self._next + self.ahead, self._end)

    def _ask(self) -> None:
        job = self._job
        while self._wants():
            k, rows = self._asked, job.rows(self._asked)
            blocks = asked(job.source, rows, job.block_rows(rows))
            self._coming[k] = _Coming(rows, len(blocks))
            for i, block in enumerate(blocks):
                self.stages.submit((k, i), block, len(block.rows))
            self._asked += 1

    def _take(self, k: int, i: int, result: Any) -> None:
        import ray

        coming = self._coming[k]
        try:
            coming.results[i] = ray.get(result)
        except ray.exceptions.RayError:  # its node died before it was fetched
            block = asked(self._job.source, coming.rows, self._job.block_rows(coming.rows))[i]
            self.stages.submit((k, i), block, len(block.rows))
            return
        if len(coming.results) < coming.blocks:
            return
        del self._coming[k]
        batch = self._batch(coming)
        with self._changed:
            self._made[k] = batch
            self._changed.notify_all()

    def _batch(self, coming: _Coming) -> Columns:
        """All blocks of a batch in one, with the draws of its rows."""
        parts = [coming.results[i] for i in range(coming.blocks)]
        rows = coming.rows
        batch = Batch(rows.k, rows.epochs_B, rows.positions_B, size=rows.size)
        for name in parts[0]:
            batch.columns[name] = _joined([part[name] for part in parts], self._job.pin)
        self._assembler.add_draws(batch)
        return batch.columns


def share_of(cpu_workers: int, ranks: Ranks) -> int:
    """How many of all CPU tasks are this rank's: the first ranks have one more; each has one at least."""
    each, over = divmod(cpu_workers, ranks.size)
    return max(1, each + (ranks.rank < over))


def _joined(parts: list[Any], pin: bool) -> Any:
    if not isinstance(parts[0], np.ndarray):
        return [value for part in parts for value in part]
    tensor = torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0].copy())
    return tensor.pin_memory() if pin else tensor


def _nothing(indices: Any) -> Any:
    raise LoaderError("an online feed reads no rows itself")
