"""Encoder actors: how many, on what, what is done when one is lost; and what the workers of an online feed
do.

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
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from darkroom.cluster.connect import TYPE, WAIT_SAID_S, waiting
from darkroom.cluster.shared_store import check_here
from darkroom.cluster.usage import PREPARE, BlockTimes, SettingNames
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware import accelerator

if TYPE_CHECKING:
    from darkroom.data.loader import Assembler, ReadSettings
    from darkroom.data.order import BatchRows

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
