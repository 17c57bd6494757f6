"""Encoder actors: how many, on what, what is done when one is lost, and who holds them for all ranks; what
the workers of an online feed do; and how busy the stages of a job are.

Every encoder is an actor that holds the same frozen parts on one accelerator, or a share of it, or on a CPU.
Parts reach them through Ray's object store: read from the disk once, not once an actor.

For an online feed rows of a batch are read and cut on CPUs. A block is the rows of one rank's share of a
global batch that the trainer itself would have encoded in one call, so the numbers are those of
`data.encode=inline`. Crops, flips and dropped captions are drawn where the rows are read, from (seed, epoch,
row) alone.

torch is imported where it is used: the keeper takes the encoder's class from here and needs none of it.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from darkroom.cluster.connect import TYPE, WAIT_SAID_S, check_here, waiting
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware import accelerator

if TYPE_CHECKING:
    from darkroom.data.loader import Assembler, ReadSettings
    from darkroom.data.order import BatchRows


# ---- how busy the stages of a job are, what holds it up, and what to change

BUSY = 0.85  # of its time: a stage that is busier holds up the others
WAITS = 0.1  # of its time that training may stand still for batches
FEW = 3  # blocks that tell nothing
WAITING = 3  # times as long as it works a CPU task has its place where it waits for a CPU most of the time


@dataclass
class BlockTimes:
    """What one block took, as the worker that made it measured."""

    read_s: float = 0.0
    ready_s: float = 0.0
    encode_s: float = 0.0
    write_s: float = 0.0

    def __add__(self, other: BlockTimes) -> BlockTimes:
        return BlockTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class SettingNames:
    """What the settings are called, and what is said where no stage is full."""

    cpu: str = "--cpu-workers"
    encoders: str = "--encoders"
    fraction: str = "--fraction"
    idle: str = "neither is full: larger blocks, or fewer machines, would do"


PREPARE = SettingNames()
ONLINE = SettingNames(
    "data.online.cpu_workers",
    "data.online.encoders",
    "data.online.fraction",
    "training is the limit, encoders keep up with it",
)


@dataclass
class Use:
    """How busy the stages were, counted from the first finished block on: what starts up is not at work."""

    cpu_workers: int
    cpus: float = math.inf  # that the cluster has for the CPU stage
    words: SettingNames = PREPARE
    wall_s: float = 0.0
    busy: BlockTimes = field(default_factory=BlockTimes)
    rows: int = 0
    blocks: int = 0
    encoder_s: float = 0.0  # summed over the encoders while they were up
    place_s: float = 0.0  # summed over the places of the CPU stage, where their number changed
    slot_s: float = 0.0  # summed over CPU tasks, from when they were asked for
    waited_s: float = 0.0  # that training stood still for batches
    repeated: int = 0  # blocks made again because somebody died
    begun: bool = False

    def tick(self, seconds: float, encoders: int, on_cpu: int) -> None:
        """Time went by with so many encoders up and CPU tasks asked for."""
        if self.begun:
            self.wall_s += seconds
            self.encoder_s += seconds * encoders
            self.place_s += seconds * self.cpu_workers
            self.slot_s += seconds * on_cpu

    def add(self, part: BlockTimes) -> None:
        """Count what a worker did."""
        if self.begun:
            self.busy += part

    def made(self, rows: int) -> None:
        """Count a finished block."""
        if self.begun:
            self.rows, self.blocks = self.rows + rows, self.blocks + 1
        self.begun = True

    def shares(self) -> dict[str, float]:
        """The share of its time that each stage was busy, from 0 to 1."""
        cpu = (self.busy.read_s + self.busy.ready_s) / self._places()
        encode = (self.busy.encode_s + self.busy.write_s) / max(self.encoder_s, 1e-9)
        return {"cpu": min(cpu, 1.0), "encode": min(encode, 1.0)}

    def rows_per_s(self) -> float:
        """Rows a second."""
        return self.rows / max(self.wall_s, 1e-9)

    def bottleneck(self) -> str:
        """One line: what holds the job up, and what to change."""
        if self.blocks < FEW:
            return "too few blocks yet to say what holds it up" if self.begun else "nothing was encoded yet"
        shares, words = self.shares(), self.words
        message = f"cpu stage {shares['cpu']:.0%} busy, encoders {shares['encode']:.0%}"
        if shares["encode"] >= BUSY:
            if self.busy.write_s > self.busy.encode_s:
                return f"{message}: writing encoded values is the limit: take faster storage"
            up = max(1, round(self.encoder_s / self.wall_s))
            return f"{message}: encoding is the limit: raise {words.encoders} above {up}, or {words.fraction}"
        if max(shares["cpu"], self._slots()) >= BUSY:
            return f"{message}: {self._starving(shares)}"
        waits = self.waited_s / self.wall_s
        if waits > WAITS:
            waited = f"training waits {waits:.0%} of its time"
            return f"{message}: neither is full, and {waited}: raise data.prefetch_batches"
        return f"{message}: {words.idle}"

    def _slots(self) -> float:
        return self.slot_s / self._places()

    def _places(self) -> float:
        return max(self.place_s or self.wall_s * self.cpu_workers, 1e-9)

    def _starving(self, shares: dict[str, float]) -> str:
        if shares["cpu"] < self._slots() / WAITING:
            return f"encoders starve: {self.cpu_workers} CPU tasks wait for a free CPU: add nodes with CPUs"
        wanted = math.ceil(self.cpu_workers * 0.95 / max(shares["encode"], 0.05))
        more = f"raise {self.words.cpu} from {self.cpu_workers} to {wanted}"
        if wanted > self.cpus:
            more += f", which takes {math.ceil(wanted - self.cpus)} more CPUs in the cluster"
        if self.busy.read_s > 2 * self.busy.ready_s:
            return f"encoders starve for reading the store: take faster storage, or {more}"
        return f"encoders starve: {more}"


def together(uses: Sequence[Use]) -> Use:
    """The use of encoders that several ranks share, each of which counted its own blocks."""
    first = uses[0]
    whole = Use(sum(use.cpu_workers for use in uses), first.cpus, first.words, begun=first.begun)
    whole.wall_s = sum(use.wall_s for use in uses) / len(uses)
    whole.encoder_s = sum(use.encoder_s for use in uses) / len(uses)
    whole.waited_s = sum(use.waited_s for use in uses) / len(uses)
    for use in uses:
        whole.busy += use.busy
        whole.slot_s += use.slot_s
        whole.place_s += use.place_s
        whole.rows += use.rows
        whole.blocks += use.blocks
        whole.repeated += use.repeated
    return whole


# ---- encoders

QUEUE = 2  # calls that an encoder has at once: one at work, one whose data are on their way
GROW_AFTER_S = 2.0
IDLE_S = 60.0
MOST_LOST = 100  # without one block made in between


@dataclass(frozen=True)
class Bounds:
    """How many encoders there are, at least and at most, and where they run."""

    least: int = 1
    most: int = 1
    accelerator: str | None = None  # a type as Ray names it, such as A10G; None: whatever there is
    fraction: float = 1.0  # of a GPU, or of a CPU core, for each encoder
    shares: bool = False  # the CPUs of one machine with all else: Ray is asked for none

    @classmethod
    def parsed(cls, number: str, accelerator: str | None = None, fraction: float = 1.0) -> Bounds:
        """From `N` or `MIN:MAX`; InputError for anything else."""
        low, _, high = number.partition(":")
        if not low.isdigit() or not (high or low).isdigit() or not 1 <= int(low) <= int(high or low):
            raise InputError(f"encoders '{number}'", allowed="N, or MIN:MAX, 1 or more: 4, 2:16")
        whole = fraction == int(fraction) and fraction >= 1
        if not (0 < fraction <= 1 or whole):
            raise InputError(f"fraction {fraction:g}", allowed="above 0 and at most 1, or a whole number")
        return cls(int(low), int(high or low), accelerator, fraction)


def options_of(bounds: Bounds) -> dict[str, Any]:
    """The resources that one encoder asks Ray for: a share of a GPU where nodes of the type have any."""
    import ray

    if bounds.shares:
        return {"num_gpus": 0, "num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
    name = None if bounds.accelerator is None else TYPE + bounds.accelerator
    resources = [
        n["Resources"] for n in ray.nodes() if n["Alive"] and (name is None or name in n["Resources"])
    ]
    on_gpu = any(r.get("GPU", 0) for r in resources) or not resources  # not yet there: accelerators are GPUs
    asked: dict[str, Any] = {"num_gpus": bounds.fraction, "num_cpus": 0.1} if on_gpu else {}
    if not on_gpu:
        asked = {"num_gpus": 0, "num_cpus": bounds.fraction}
    if name is not None:
        asked["resources"] = {name: 0.001}
    return {**asked, "max_restarts": 0, "max_task_retries": 0}


def device_here() -> str:
    """Where an actor computes: on the GPU that Ray gave it, else on the CPU."""
    import ray

    place = "cuda" if ray.get_gpu_ids() else "cpu"
    accelerator.round_float32(place, allowed=False)  # as `models.device` has it
    return place


@dataclass
class Encoder:
    """An encoder actor as its pool sees it."""

    number: int
    handle: Any
    starting: Any = None  # the answer to the first call; None once it came
    calls: set[Any] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)  # when it was asked for, or last had nothing to do

    @property
    def up(self) -> bool:
        """Whether it has answered."""
        return self.starting is None


class Pool:
    """The encoders of a job: starts them, replaces lost ones, grows under load and shrinks without.

    `make(options)` starts an actor that has a method `ping`. Those that find no place wait for a node to
    come; the others work meanwhile.
    """

    def __init__(self, bounds: Bounds, make: Callable[[dict[str, Any]], Any]) -> None:
        self.bounds, self._make = bounds, make
        self.encoders: dict[int, Encoder] = {}
        self.lost, self._lost_in_a_row = 0, 0
        self._numbers = itertools.count()
        self._busy_since: float | None = None
        self._options = options_of(bounds)
        for _ in range(bounds.least):
            self._start()

    def _start(self) -> None:
        encoder = Encoder(next(self._numbers), self._make(self._options))
        encoder.starting = encoder.handle.ping.remote()
        self.encoders[encoder.number] = encoder

    @property
    def up(self) -> list[Encoder]:
        """Those that answer."""
        return [encoder for encoder in self.encoders.values() if encoder.up]

    @property
    def starting(self) -> list[Any]:
        """What will tell that one more is up."""
        return [encoder.starting for encoder in self.encoders.values() if not encoder.up]

    def waits(self) -> str:
        """What encoders wait for that could not start for a while; nothing while as many as asked are up."""
        import ray

        before, least = time.monotonic() - WAIT_SAID_S, self.bounds.least
        late = [one.starting for one in self.encoders.values() if not one.up and one.since < before]
        unanswered = ray.wait(late, num_returns=len(late), timeout=0)[1] if late else []
        lacking = min(len(unanswered), least - len(self.up))
        if lacking <= 0:
            return ""
        needs = self._options["num_cpus"], self._options["num_gpus"]
        return waiting(f"{lacking} of {least} encoders", *needs, self.bounds.accelerator)

    def free(self) -> Encoder | None:
        """The one with the fewest calls, if it can take one more."""
        least = min(self.up, key=lambda encoder: (len(encoder.calls), encoder.number), default=None)
        return least if least is not None and len(least.calls) < QUEUE else None

    def made(self) -> None:
        """A block was made."""
        self._lost_in_a_row = 0

    def lose(self, number: int) -> None:
        """This one is dead: forget it and start another. DarkroomError when all die at once."""
        if self.encoders.pop(number, None) is None:
            return
        self.lost, self._lost_in_a_row = self.lost + 1, self._lost_in_a_row + 1
        if self._lost_in_a_row > MOST_LOST:
            raise DarkroomError(f"{self._lost_in_a_row} encoders died one after the other; see Ray's logs")
        self._start()

    def poll(self, waiting: int) -> None:
        """See who is up; start more while `waiting` blocks find no free encoder, stop idle ones."""
        import ray

        for encoder in [e for e in self.encoders.values() if not e.up]:
            if ray.wait([encoder.starting], timeout=0)[0]:
                self._answered(encoder)
        now = time.monotonic()
        for encoder in self.up:
            if encoder.calls:
                encoder.since = now
        if not waiting or self.free() is not None:
            self._busy_since = None
            self._shrink(now)
            return
        self._busy_since = self._busy_since or now
        if now - self._busy_since > GROW_AFTER_S:
            addable = self.bounds.most - len(self.encoders)
            for _ in range(min(addable, max(0, len(self.up) - len(self.starting)))):
                self._start()
            self._busy_since = now

    def _answered(self, encoder: Encoder) -> None:
        import ray

        try:
            ray.get(encoder.starting)
        except ray.exceptions.RayTaskError as error:  # it could not even take its parts
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayActorError as error:
            if "creation task" in str(error) or "__init__" in str(error):
                raise DarkroomError(f"no encoder could start: {last_line(error)}") from error
            self.lose(encoder.number)
            return
        encoder.starting, encoder.since = None, time.monotonic()

    def _shrink(self, now: float) -> None:
        idle = [e for e in self.up if not e.calls and now - e.since > IDLE_S]
        for encoder in idle[: max(0, len(self.encoders) - self.bounds.least)]:
            self._stop(encoder)

    def _stop(self, encoder: Encoder) -> None:
        import ray

        del self.encoders[encoder.number]
        ray.kill(encoder.handle)

    def close(self) -> None:
        """Stop all."""
        for encoder in list(self.encoders.values()):
            self._stop(encoder)


def last_line(error: BaseException) -> str:
    """What a Ray error says at its end, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def on_one_machine(bounds: Bounds, nodes: Sequence[dict[str, float]], reserved: float = 0.0) -> Bounds:
    """The bounds on a single machine whose CPUs do not go round: encoding and decoding share them.

    Those that training takes are `reserved`. Several nodes, and encoders on GPUs or more of them than the
    machine has CPUs for, stay as they are.
    """
    if len(nodes) != 1 or nodes[0].get("GPU") or bounds.accelerator is not None:
        return bounds
    cpus = nodes[0].get("CPU", 0.0)
    if bounds.least * bounds.fraction > cpus or cpus - reserved - bounds.least * bounds.fraction >= 1:
        return bounds
    return replace(bounds, shares=True, most=min(bounds.most, int(cpus / bounds.fraction)))


def check_room(bounds: Bounds, nodes: Sequence[dict[str, float]], words: SettingNames = PREPARE) -> None:
    """InputError when encoders do not fit, each whole on one node, or would leave no CPU to decode with.

    `nodes` are their resources.
    """
    name = None if bounds.accelerator is None else TYPE + bounds.accelerator
    fitting = [node for node in nodes if name is None or name in node]
    if not fitting or bounds.shares:
        return  # their nodes are still to come, or there is one for all
    kind = "GPU" if any(node.get("GPU", 0) for node in fitting) else "CPU"
    capacity, left = sum(_whole(node.get(kind, 0.0), bounds.fraction) for node in fitting), ""
    if kind == "CPU":
        total = sum(node.get("CPU", 0.0) for node in nodes)
        capacity, left = (
            max(0, min(capacity, int((total - 1) // bounds.fraction))),
            " with one CPU left to decode",
        )
    if bounds.least > capacity:
        largest = max(node.get(kind, 0.0) for node in fitting)
        raise InputError(
            f"{bounds.least} encoders of {bounds.fraction:g} {kind}s each: the nodes fit "
            f"{capacity}{left}, the largest has {largest:g} {kind}s",
            mend=f"ask for fewer ({words.encoders}) or less of each ({words.fraction}), or add nodes",
        )


def _whole(has: float, fraction: float) -> int:
    """How many such shares a node has; a GPU is not shared out in parts of two."""
    if fraction < 1:
        return int(1 / fraction + 1e-6) * int(has)
    return max(0, int(has / fraction))


Columns = dict[str, Any]


@dataclass(frozen=True)
class RowSource:
    """Where rows come from and how they are read."""

    store: str
    version: int
    read: ReadSettings


@dataclass(frozen=True)
class OnlineAsk:
    """Rows to encode; their indices are positions in the store."""

    source: RowSource
    rows: BatchRows


@dataclass(frozen=True)
class Parts:
    """The frozen parts that encoders hold. Without text encoders captions stay captions."""

    identity: str
    vae: Any
    text_encoders: tuple[Any, ...] = ()
    tokenizers: tuple[Any, ...] = ()


def asked(source: RowSource, rows: BatchRows, most: int) -> list[OnlineAsk]:
    """A rank's rows of a batch in blocks of at most so many."""
    cuts = [slice(start, start + most) for start in range(0, len(rows), most)]
    return [
        OnlineAsk(
            source,
            replace(
                rows,
                epochs_B=rows.epochs_B[cut],
                indices_B=rows.positions_B[cut],
                positions_B=rows.positions_B[cut],
            ),
        )
        for cut in cuts
    ]


@lru_cache(maxsize=4)
def _assembler(source: RowSource) -> Assembler:
    """One a worker and source: the store is opened once."""
    from darkroom.data.loader import row_assembler
    from darkroom.data.store import Store

    check_here(source.store)
    store = Store.open(source.store, version=source.version)
    return row_assembler(store, source.read.model_copy(update={"draws": ()}))


def read_rows(ask: OnlineAsk, tokenizers: tuple[Any, ...] | None) -> tuple[Columns, BlockTimes]:
    """The CPU stage: pixels cut as this epoch has them, and captions or, with tokenizers, their token ids."""
    import numpy as np
    import torch

    from darkroom.prepare.columns import token_ids

    began = time.perf_counter()
    columns = dict(_assembler(ask.source).build(ask.rows).columns)
    if tokenizers and "caption" in columns:
        rows = [token_ids(caption, tokenizers=tokenizers) for caption in columns.pop("caption")]
        columns["ids"] = [np.stack(each) for each in zip(*rows, strict=True)]
    arrays = {
        name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in columns.items()
    }
    return arrays, BlockTimes(ready_s=time.perf_counter() - began)


class OnlineEncoder:
    """An encoder actor of an online feed."""

    def __init__(self, parts: Parts) -> None:
        from darkroom.prepare.columns import TextEncoder, VaeEncoder

        device = device_here()
        self._vae = VaeEncoder(parts.vae, device=device)
        encoders, tokenizers = parts.text_encoders, parts.tokenizers
        self._text = TextEncoder(encoders, tokenizers, device=device) if encoders else None

    def ping(self) -> int:
        """That it is up: its process."""
        return os.getpid()

    def encode(self, columns: Columns, ask: OnlineAsk) -> tuple[Columns, BlockTimes]:
        """Moments in place of pixels, states in place of token ids."""
        import torch

        began = time.perf_counter()
        out = {name: value for name, value in columns.items() if name not in ("pixels", "ids")}
        # Ray's arrays cannot be written to, and torch wants what it can.
        out["moments"] = self._vae.encode(torch.from_numpy(columns["pixels"].copy())).cpu().numpy()
        if self._text is not None and "ids" in columns:
            states, pooled = self._text.encode_tokens(
                [torch.from_numpy(ids.copy()) for ids in columns["ids"]]
            )
            out["text"] = states.cpu().numpy()
            if pooled is not None:
                out["pooled"] = pooled.cpu().numpy()
        return out, BlockTimes(encode_s=time.perf_counter() - began)


# ---- the keeper of an online feed: an actor on the driver's node that holds the encoders for all ranks
#
# It outlives the workers that train, who may be started again, fewer or more of them. A rank asks it from
# time to time which encoders are up, and tells what it waits for and how busy its stages were. The keeper has
# a reference to the encoders' parts and never the parts: it imports nothing that they are made of.

ASK_S = 0.5
SILENT_S = 10.0  # a rank that says nothing for so long has ended


@dataclass
class RankStatus:
    """What a rank says of itself."""

    waiting: int = 0  # blocks that are ready and find no free encoder
    calls: dict[int, int] = field(default_factory=dict)  # how many blocks each encoder has of it
    dead: list[int] = field(default_factory=list)  # encoders that it found dead
    made: int = 0  # blocks since its last report
    use: Use | None = None
    at: float = 0.0  # by the keeper's clock


class Keeper:
    """Holds the encoders of a job for all of its ranks; an actor."""

    def __init__(self, bounds: Bounds, encoder: Callable[..., Any]) -> None:
        self._bounds, self._encoder = bounds, encoder
        self._pool: Pool | None = None
        self._identity = ""
        self._ranks: dict[int, RankStatus] = {}
        self._lost = 0

    def holds(self, identity: str) -> bool:
        """Whether the encoders hold these parts."""
        return self._pool is not None and self._identity == identity

    def hold(self, identity: str, parts: list[Any]) -> None:
        """Start encoders with these parts, unless they are there.

        `parts` is a rank's reference to them, in a list so that Ray does not resolve it. A task on this
        machine copies them, so that the keeper owns what encoders start from when the rank is gone.
        """
        import ray

        if self.holds(identity):
            return
        self.close()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        held = ray.remote(_as_it_is).options(num_cpus=0, scheduling_strategy=here).remote(parts[0])
        ray.wait([held], fetch_local=False)
        actor = ray.remote(self._encoder)
        self._pool = Pool(self._bounds, lambda options: actor.options(**options).remote(held))
        self._identity, self._ranks = identity, {}

    def state(self, rank: int, status: RankStatus) -> list[tuple[int, Any]]:
        """The encoders that are up, by number."""
        pool, now = self._pool, time.monotonic()
        if pool is None:
            return []
        if status.made:
            pool.made()
        for number in status.dead:
            pool.lose(number)
        status.at = now
        self._ranks[rank] = status
        there = [one for one in self._ranks.values() if now - one.at < SILENT_S]
        for number, encoder in pool.encoders.items():
            encoder.calls = set(range(sum(one.calls.get(number, 0) for one in there)))
        pool.poll(sum(one.waiting for one in there))
        return [(encoder.number, encoder.handle) for encoder in pool.up]

    def waits(self) -> str:
        """What encoders wait for that could not start for a while; else nothing."""
        return self._pool.waits() if self._pool is not None else ""

    def lines(self) -> list[str]:
        """What is to be said of the encoding, for the console."""
        last = max((status.at for status in self._ranks.values()), default=0.0)
        ranks = (status for status in self._ranks.values() if last - status.at < SILENT_S)
        uses = [status.use for status in ranks if status.use is not None]
        if not uses:
            return []
        use, lost = together(uses), self._lost + (self._pool.lost if self._pool else 0)
        lines = [f"online encoding: {use.rows_per_s():,.1f} rows/s; {use.bottleneck()}"]
        if lost or use.repeated:
            lines.append(f"{lost} encoders were lost and replaced, {use.repeated} blocks made again")
        return lines

    def close(self) -> None:
        """Stop the encoders."""
        if self._pool is not None:
            self._lost += self._pool.lost
            self._pool.close()
            self._pool = None


def _as_it_is(parts: Any) -> Any:
    """A copy of its own: what a task returns belongs to who started it."""
    return parts


class SharedPool(Pool):
    """A keeper's encoders as one rank sees them."""

    def __init__(self, keeper: Any, rank: int, bounds: Bounds, use: Use) -> None:
        self.bounds, self.encoders, self.lost = bounds, {}, 0
        self._keeper, self._rank, self._use = keeper, rank, use
        self._dead: list[int] = []
        self._made = 0
        self._asked: Any = None
        self._asked_at = -math.inf

    def free(self) -> Encoder | None:
        """An encoder that may take a block now; None where all are busy."""

        # Ranks begin at different ones, so that the first is not everybody's.
        def load(encoder: Encoder) -> tuple[int, int]:
            return len(encoder.calls), (encoder.number + self._rank) % max(len(self.encoders), 1)

        least = min(self.up, key=load, default=None)
        return least if least is not None and len(least.calls) < QUEUE else None

    def made(self) -> None:
        self._made += 1

    def lose(self, number: int) -> None:
        if self.encoders.pop(number, None) is not None:
            self._dead.append(number)
            self.lost += 1

    def poll(self, waiting: int) -> None:
        """Ask the keeper from time to time; DarkroomError where it is gone, or no encoder can start."""
        import ray

        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            try:
                self._take(ray.get(self._asked))
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (cause if isinstance(cause, Exception) else error) from None
            except ray.exceptions.RayError as error:
                raise DarkroomError(f"the keeper of the encoders is gone ({type(error).__name__})") from error
            self._asked = None
        if self._asked is None and time.monotonic() - self._asked_at > ASK_S:
            self._asked, self._asked_at = self.tell(waiting), time.monotonic()

    def tell(self, waiting: int) -> Any:
        """Tell the keeper how things are; a reference of the encoders that are up."""
        calls = {number: len(encoder.calls) for number, encoder in self.encoders.items()}
        dead, self._dead = self._dead, []
        made, self._made = self._made, 0
        return self._keeper.state.remote(self._rank, RankStatus(waiting, calls, dead, made, self._use))

    def _take(self, there: list[tuple[int, Any]]) -> None:
        dead = {*self._dead}
        for number, handle in there:
            if number not in dead and number not in self.encoders:
                self.encoders[number] = Encoder(number, handle)
        known = {number for number, _ in there}
        for number in [n for n, e in self.encoders.items() if n not in known and not e.calls]:
            del self.encoders[number]

    @property
    def starting(self) -> list[Any]:
        return [] if self._asked is None else [self._asked]

    def close(self) -> None:
        """The keeper stops them."""
