"""The models of a server by name: loaded when a job asks for one, released when another needs the memory.

A job of a model that is not loaded waits here, checked by the model's outline. Models are loaded one at a
time, first the one whose jobs have waited longest; the others draw meanwhile. Where memory is short, the one
not asked for longest is released. What it was given before it draws first, and newer jobs of it wait here for
its next turn: none is released while it has work, and each has its turn.

With one model there is nothing to choose: it is loaded at the start and stays.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from darkroom import models
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware import accelerator
from darkroom.hardware.meters import give_back
from darkroom.serve.engine import loader
from darkroom.serve.engine.loop import Admission, Engine, Loop
from darkroom.serve.engine.nets import names_of_nets
from darkroom.serve.engine.shelf import scan
from darkroom.serve.engine.tickets import EngineJob, Ticket
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import Refused
from darkroom.serve.settings import ServeSettings

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.serve.engine.loader import EngineCallbacks, LoadedModel


LOG = logging.getLogger("darkroom.serve")
MODEL_SHARE = 0.5
"""What models may take of the memory that is free at the start, unless --model-memory says otherwise."""
CLOSE_S = 60.0
"""So long a released engine's last step is waited for, and then again."""
TRIES, TRY_S = 6, 0.05
"""How often, and first how soon, a released model's memory is collected before the next is loaded."""
MIB = 2**20


@dataclass(eq=False, repr=False)
class ServedModel:
    """One model of the server, loaded or not. Belongs to the event loop's thread."""

    ref: str
    """Folder, file, hub id or family."""
    name: str = ""
    outline: Model | None = None
    """The model without weights; None where it is the only one, of which the loaded one tells all."""
    bytes: int = 0
    """Of its weights, by its outline."""
    opened: LoadedModel | None = None
    works: set[EngineJob] = field(default_factory=set)
    """What its engine was given and is not over."""
    parked: list[EngineJob] = field(default_factory=list)
    """What waits for its next turn."""
    busy: str = ""
    """loading or releasing, while a thread does so."""
    closing: bool = False
    """To be released as soon as its works are over."""
    used: int = 0
    """Grows with each job of any model: the least is that of the model not asked for longest."""
    largest_load: float | None = None
    """The most that one picture may take, once that is known."""
    embeddings: loader.Embeddings = field(default_factory=loader.Embeddings)

    @property
    def model(self) -> Model | None:
        """As far as it is in memory."""
        return self.outline if self.opened is None else self.opened.model

    @property
    def engine(self) -> Engine | None:
        """Where it is drawn, while it is loaded."""
        opened = self.opened
        return None if opened is None else opened.engine

    @property
    def sha256(self) -> str | None:
        """Of the model's file, once it is hashed."""
        digest = None if self.model is None else self.model.digest
        return None if digest is None else digest["sha256"]

    def is_called(self, name: str) -> bool:
        """Whether a client means this model: its name, as A1111 writes it (with a hash, without the file's
        ending), or its hash."""
        names = {self.name, self.name.removesuffix(".safetensors")}
        if (sha256 := self.sha256) is not None:
            names |= {f"{one} [{sha256[:10]}]" for one in names} | {sha256, sha256[:10]}
        return name in names

    @property
    def state(self) -> str:
        """loaded, loading, releasing, waiting (for memory), or released."""
        if self.busy:
            return self.busy
        if self.opened is not None:
            return "loaded"
        return "waiting" if self.parked else "released"

    def in_memory(self) -> int:
        """Bytes of its weights while it is loaded."""
        opened = self.opened  # once: metrics are read from a thread of their own
        parts = () if opened is None else opened.model.modules.values()
        return sum(one.numel() * one.element_size() for part in parts for one in part.parameters())

    def waiting(self, key: str | None = None) -> int:
        """Pictures that wait, of one key or of all."""
        here = sum(len(work.tickets) for work in self.parked if key in (None, work.key))
        engine = self.engine
        return here + (0 if engine is None else engine.waiting(key))


class ModelPool:
    """Belongs to the event loop's thread, but for what only counts."""

    def __init__(
        self,
        settings: ServeSettings,
        metrics: Metrics,
        loop: Loop,
        hooks: EngineCallbacks,
        still_possible: Callable[[EngineJob], Awaitable[bool]],
        fail: Callable[[EngineJob, BaseException], None],
    ) -> None:
        """`still_possible` checks a job again now that its model is loaded, and ends it if it is not; `fail`
        ends one whose model cannot be loaded."""
        self._settings, self._metrics, self._loop, self._hooks = settings, metrics, loop, hooks
        self._still_possible, self._fail = still_possible, fail
        self.served = [ServedModel(ref) for ref in (settings.model, *settings.more_models)]
        self.known = False
        """Whether the models' names and sizes are."""
        self.most_bytes = 0
        self._free: loader.FreeBytes = loader.free_bytes
        self._clock = itertools.count(1)
        self._changed = asyncio.Event()
        self._watchers = 0

    # ---- life

    async def open(self) -> LoadedModel:
        """Look at all models and load the first. DarkroomError where one of them cannot be served."""
        if self.several:
            await self._loop.in_daemon_thread(self._look_at_all)
            self.known = True
            self._follow()
        opened = await self._load(self.first)
        self.known = True
        if self.several:
            self._loop.spawn(self._run())
        return opened

    def _follow(self) -> None:
        """Have the metrics look at each model, and at all together."""
        self._metrics.follow_models(
            {one.name: (partial(ServedModel.in_memory, one), one.waiting) for one in self.served},
            rows=lambda: sum(len(engine.rows()) for engine in self.engines),
            waiting=self.waiting,
            capacity=lambda: sum(engine.capacity for engine in self.engines),
        )

    def _look_at_all(self) -> None:
        settings = self._settings
        device = models.device(settings.device)
        size = models.precision(settings.precision, device).itemsize
        for one in self.served:
            one.outline = models.looked_at(one.ref, variant=settings.variant, revision=settings.revision)
            one.name = one.outline.name
            one.bytes = sum(one.outline.num_parameters.values()) * size
            if models.has_quick_digest(one.outline):
                one.outline.digest = models.file_digest(one.outline)
        _check_names(self.served)
        self._share_memory(device)

    def _share_memory(self, device: torch.device) -> None:
        """How much models may take, and each of those that fit together of what is left."""
        free, sizes = loader.free_bytes(device), sorted(one.bytes for one in self.served)
        asked = self._settings.model_memory
        if asked is not None and sizes[-1] > asked:
            largest = max(self.served, key=lambda one: one.bytes)
            allowed = f"at least {_mib(largest.bytes)}"
            raise InputError(f"--model-memory {_mib(asked)} with '{largest.name}'", allowed=allowed)
        self.most_bytes = asked or max(sizes[-1], int(MODEL_SHARE * (free or 0)))
        at_once = sum(1 for whole in itertools.accumulate(sizes) if whole <= self.most_bytes)
        if free is not None:
            left = max(0, free - min(sum(sizes), self.most_bytes)) // at_once
            self._free = lambda _: left
        LOG.info("%d models, at most %s in memory at once", len(self.served), _mib(self.most_bytes))

    async def close(self) -> None:
        """Compute no more. A step or loading that goes on nothing ends."""
        for opened in [one.opened for one in self.served if one.opened is not None]:
            await asyncio.to_thread(opened.engine.stop)
            _close_shelves(opened)

    # ---- what there is

    @property
    def several(self) -> bool:
        """Whether there is a choice."""
        return len(self.served) > 1

    @property
    def first(self) -> ServedModel:
        """The one that is drawn with unless a request says otherwise."""
        return self.served[0]

    def find(self, name: str | None) -> ServedModel:
        """A model by name, the first for none; 404 where there is none of that name."""
        found = self.first if name is None else next((o for o in self.served if o.is_called(name)), None)
        if found is None:
            names = ", ".join(f"'{one.name}'" for one in self.served)
            raise Refused(404, "model_not_found", f"model: this server has {names}", param="model")
        return found

    @property
    def opened(self) -> list[LoadedModel]:
        """Those that are loaded, the first of the server's before others."""
        return [opened for opened in (one.opened for one in self.served) if opened is not None]

    @property
    def engines(self) -> list[Engine]:
        """Those of the loaded models."""
        return [opened.engine for opened in self.opened]

    def adapter_names(self) -> set[str]:
        """Of the folder's adapters, whichever model is loaded."""
        folder = self._settings.adapters
        return set() if folder is None else set(scan(folder, "adapter"))

    def net_names(self) -> set[str]:
        """Of the folder's nets."""
        folder = self._settings.controls
        return set() if folder is None else names_of_nets(folder)

    @property
    def trouble(self) -> str | None:
        """Why a device answers no more."""
        return next((engine.trouble for engine in self.engines if engine.trouble), None)

    # ---- jobs

    def submit(self, work: EngineJob) -> None:
        """Draw a job, once its model is loaded."""
        served = self.find(work.request.model)
        served.used = next(self._clock)
        if served.opened is None or served.closing or served.parked:
            served.parked.append(work)
            self._changed.set()
        else:
            served.works.add(work)
            served.opened.engine.submit(work)

    def drop(self, work: EngineJob) -> None:
        """Have no more of a job computed."""
        served = self._of(work)
        if served is None:
            work.over = True
        elif work in served.parked:
            work.over = True
            served.parked.remove(work)
        elif served.engine is not None:
            served.engine.drop(work)

    def forget(self, work: EngineJob) -> None:
        """A job is over, or left for the next process."""
        for one in self.served:
            one.works.discard(work)
            if work in one.parked:
                one.parked.remove(work)
        self._changed.set()

    def _of(self, work: EngineJob) -> ServedModel | None:
        return next((one for one in self.served if work in one.works or work in one.parked), None)

    def waiting(self, key: str | None = None) -> int:
        """Pictures that wait, of one key or of all."""
        return sum(one.waiting(key) for one in self.served)

    def places(self) -> dict[Ticket, int]:
        """The place of every picture that waits, among those of its model."""
        found: dict[Ticket, int] = {}
        for one in self.served:
            found |= {} if one.engine is None else one.engine.places()
            before = 0 if one.engine is None else one.engine.waiting()
            parked = (ticket for work in one.parked for ticket in work.tickets)
            found |= {ticket: before + i for i, ticket in enumerate(parked)}
        return found

    def admissions(self) -> list[Admission]:
        """Of what waits in the engines, in order: when it is admitted."""
        found = [one for engine in self.engines for one in engine.admissions()]
        return sorted(found, key=lambda one: one.after_s) if self.several else found

    def seconds_for(self, cost: float) -> float | None:
        """How long so much work takes with the slowest model, by what was measured."""
        estimates = [engine.seconds_for(cost) for engine in self.engines]
        return max((seconds for seconds in estimates if seconds is not None), default=None)

    def waiting_work(self) -> dict[str, float]:
        """Work that waits, by key: pixels x steps x evaluations."""
        parts = [
            (work.key, work.shape.whole_cost * len(work.tickets))
            for one in self.served
            for work in one.parked
        ]
        parts += [part for engine in self.engines for part in engine.waiting_work().items()]
        waits: dict[str, float] = {}
        for key, work in parts:
            waits[key] = waits.get(key, 0.0) + work
        return waits

    def watch(self, count: int) -> None:
        """So many clients watch: the engines tick for them."""
        self._watchers = count
        for engine in self.engines:
            engine.watchers = count

    # ---- turns

    async def _run(self) -> None:
        """Load what jobs wait for, for as long as the server runs."""
        while True:
            self._changed.clear()
            wanted = self._wanted()
            if wanted is None:
                await self._open_again(self.served)
            elif await self._has_room(wanted):
                await self._bring(wanted)
                continue
            await self._changed.wait()

    def _wanted(self) -> ServedModel | None:
        """The model not loaded whose jobs have waited longest."""
        waiting = [one for one in self.served if one.opened is None and one.parked]
        return min(waiting, key=lambda one: one.parked[0].accepted_s, default=None)

    async def _has_room(self, wanted: ServedModel) -> bool:
        """Release what has no work until the model fits; the rest of what has to go is given no more."""
        there = [one for one in self.served if one.opened is not None]
        short = sum(one.bytes for one in there) + wanted.bytes - self.most_bytes
        going: list[ServedModel] = []
        # What is drawn longest ago; of those at work the ones that are closing already.
        for one in sorted(there, key=lambda one: (bool(one.works), not one.closing, one.used)):
            if short > 0:
                going.append(one)
                short -= one.bytes
        for one in going:
            one.closing = True
        await self._open_again([one for one in there if one not in going])
        for one in [one for one in going if not one.works]:
            await self._release(one)
        return not any(one.opened is not None for one in going)

    async def _open_again(self, models: Sequence[ServedModel]) -> None:
        for one in models:
            one.closing = False
            if one.opened is not None:
                await self._hand_over(one)

    async def _bring(self, wanted: ServedModel) -> None:
        try:
            await self._load(wanted)
        except Exception as error:
            LOG.error("model '%s' cannot be loaded: %s", wanted.name, error, exc_info=_is_unknown(error))
            failure = DarkroomError(f"model '{wanted.name}' cannot be loaded: {_said(error)}")
            for work in list(wanted.parked):
                wanted.parked.remove(work)
                self._fail(work, failure)
            return
        await self._hand_over(wanted)

    async def _hand_over(self, served: ServedModel) -> None:
        """Give the engine what has waited for it, in the order in which it came."""
        while served.parked and served.opened is not None:
            work = served.parked[0]
            try:
                possible = await self._still_possible(work)
            except Exception as error:  # unforeseen: this job fails, and the others are loaded for
                LOG.exception("job %s cannot be checked", work.uid)
                self._fail(work, error)
                possible = False
            if possible and work in served.parked:
                served.works.add(work)
                served.opened.engine.submit(work)
            if work in served.parked:
                served.parked.remove(work)

    async def _load(self, served: ServedModel) -> LoadedModel:
        start_s = time.monotonic()
        settings = self._settings.model_copy(update={"model": served.ref})
        arguments: tuple[Any, ...] = (settings, self._metrics, self._hooks)
        free = [self._free] if self.several else []
        opened: LoadedModel = await self._in_thread("loading", served, loader.open_model, *arguments, *free)
        served.name = served.name or opened.model.name
        served.largest_load = opened.engine.largest_load
        served.embeddings = opened.embeddings
        opened.engine.watchers = self._watchers
        opened.engine.start()
        served.opened, served.closing = opened, False
        if self.several:
            seconds = time.monotonic() - start_s
            LOG.info("model '%s' loaded in %.1f s, %s", served.name, seconds, _mib(served.bytes))
            self._metrics.model_loads.labels(served.name).inc()
            self._metrics.model_load_seconds.observe(seconds)
        return opened

    async def _in_thread(self, what: str, served: ServedModel, call: Callable[..., Any], *given: Any) -> Any:
        """What takes long, in a thread. Where nobody waits for it any more it goes on, and `busy` says so."""
        served.busy = what
        try:
            made = await self._loop.in_daemon_thread(call, *given)
        except Exception:
            served.busy = ""
            raise
        served.busy = ""
        return made

    async def _release(self, served: ServedModel) -> None:
        opened, served.opened = served.opened, None
        assert opened is not None
        assert served.outline is not None
        served.outline.digest = opened.model.digest
        await self._in_thread("releasing", served, _close, opened)
        weights, device = weakref.ref(opened.model), opened.engine.studio.backend.device
        del opened
        for i in range(TRIES):  # a listener to its last job may still hold that
            await self._in_thread("releasing", served, _collect, device)
            if weights() is None:
                break
            await asyncio.sleep(TRY_S * 2**i)
        else:
            LOG.warning("model '%s' is released, and its memory is still in use", served.name)
        LOG.info("model '%s' released", served.name)
        self._metrics.model_releases.labels(served.name).inc()


def _check_names(served: Sequence[ServedModel]) -> None:
    """InputError for two of one name: a request could not tell them apart."""
    refs: dict[str, str] = {}
    for one in served:
        if one.name in refs:
            message = f"two models are named '{one.name}': {refs[one.name]} and {one.ref}"
            raise InputError(message, mend="rename one")
        refs[one.name] = one.ref


def _close(opened: LoadedModel) -> None:
    while not opened.engine.stop(CLOSE_S):
        LOG.warning("model '%s' is to be released and still takes a step", opened.model.name)
    _close_shelves(opened)


def _close_shelves(opened: LoadedModel) -> None:
    for shelf in (opened.library, opened.nets):
        if shelf is not None:
            shelf.close()


def _collect(device: torch.device) -> None:
    """Give a released model's memory back; what the server left out of collections is looked at again."""
    gc.unfreeze()
    with accelerator.alone(device):  # also where a tensor's last user is gone
        gc.collect()
        gc.freeze()
        accelerator.empty_cache()
    give_back()


def _mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"


def _is_unknown(error: BaseException) -> bool:
    return not isinstance(error, DarkroomError)


def _said(error: BaseException) -> str:
    """What clients may read of why."""
    return "the server's log says why" if isinstance(error, InputError) else type(error).__name__
