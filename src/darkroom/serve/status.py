"""What a server says of itself: what it can draw with, and how it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from darkroom.errors import InputError
from darkroom.models.upscaler import Upscalers
from darkroom.serve.engine.loader import Embeddings, used_bytes
from darkroom.serve.engine.loop import Loop
from darkroom.serve.engine.pool import ModelPool, ServedModel
from darkroom.serve.engine.tickets import AdapterCard
from darkroom.serve.request import Refused
from darkroom.serve.settings import ServeSettings

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.serve.engine.loader import LoadedModel
    from darkroom.serve.engine.nets import NetCard


STARTED_S = time.time()


@dataclass(frozen=True)
class ModelCard:
    """The model served and what may be asked of it."""

    name: str
    family: str
    width: int
    height: int
    """The size it draws by default, in pixels."""
    size_step: int
    """Widths and heights are multiples of this."""
    most_pixels: int
    """Of a picture with guidance."""
    solvers: tuple[str, ...]
    solver: str
    """The one it uses by default."""
    defaults: dict[str, dict[str, Any]]
    """By solver: whether its sigmas are Karras', and its spacing, by default."""
    guidance: float
    """The scale it draws with by default."""
    precision: str
    created_s: int
    """When this server was started."""
    sha256: str | None = None
    """Of the model's file, once it is hashed; None for random weights."""


@dataclass(frozen=True)
class Status:
    """The server as it is now."""

    state: str
    why: str
    jobs: int
    """Accepted and not over."""
    uploads_bytes: int = 0
    """Of the pictures that came with them, in memory."""
    waiting: int = 0
    """Pictures in the queue."""
    load: float = 0.0
    capacity: float = 0.0
    """U-Net evaluations a step at the model's own size."""
    step_s: float = 0.0
    """A step of one size, lately."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Pictures on their way: job, key, model, picture, size, step, of."""
    models: list[dict[str, Any]] = field(default_factory=list)
    """Of each model: name, state, bytes in memory, pictures waiting. Empty until they are known."""


def model_card(model: Model, settings: ServeSettings, most_pixels: int) -> ModelCard:
    """The card of a loaded model."""
    from darkroom import sample

    solver = sample.default_solver(model.scheduler)[0]
    return ModelCard(
        name=model.name,
        family=model.family,
        width=model.sample_size,
        height=model.sample_size,
        size_step=model.size_unit,
        most_pixels=most_pixels,
        solvers=sample.solvers_of(model.scheduler),
        solver=solver,
        defaults={name: _usual(model, name) for name in sample.solvers_of(model.scheduler)},
        guidance=sample.GenerateSettings().resolved(solver, model.guidance).guidance or 0.0,
        precision=settings.precision,
        created_s=int(STARTED_S),
        sha256=None if model.digest is None else model.digest["sha256"],
    )


def _usual(model: Model, solver: str) -> dict[str, Any]:
    """Nothing for a solver that the model's scheduler cannot be."""
    from darkroom import sample

    try:
        table = sample.make_table(solver, model.scheduler, 4)
    except InputError:
        return {}
    return {"karras": table.karras, "spacing": table.spacing}


def status_of(pool: ModelPool, state: str, why: str, jobs: int, uploads_bytes: int = 0) -> Status:
    """The status of models that may still be loading; what is said of the engine is of all together."""
    engines = {one.name: one.engine for one in pool.served if one.engine is not None}
    return Status(
        state,
        why,
        jobs,
        uploads_bytes,
        pool.waiting(),
        sum(engine.load for engine in engines.values()),
        sum(engine.capacity for engine in engines.values()),
        max((engine.step_s for engine in engines.values()), default=0.0),
        [{**row, "model": name} for name, engine in engines.items() for row in engine.rows()],
        [_state_of(one) for one in pool.served] if pool.known else [],
    )


def _state_of(served: ServedModel) -> dict[str, Any]:
    about = {"name": served.name, "state": served.state, "bytes": served.in_memory()}
    return {**about, "jobs": len(served.works) + len(served.parked), "waiting": served.waiting()}


class Catalogue:
    """What requests may name: the models, and what lies in the folders with them.

    Where no model is loaded yet, `not_known` gives the error that says why.
    """

    def __init__(
        self, settings: ServeSettings, pool: ModelPool, loop: Loop, not_known: Callable[[], Refused]
    ) -> None:
        self._settings, self._limits, self._pool = settings, settings.limits_in_force, pool
        self._loop, self._not_known = loop, not_known

    @property
    def model(self) -> ModelCard:
        """What the first model is and can do."""
        return self.card(None)

    def card(self, name: str | None) -> ModelCard:
        """What a model is and can do, the first for no name; 404 where there is none of that name."""
        if not self._pool.known:
            raise self._not_known()
        served = self._pool.find(name)
        model, most = self.model_of(served), self._limits.side_pixels**2
        if served.largest_load is not None:
            most = min(most, int(served.largest_load / 2 * model.sample_size**2))
        return model_card(model, self._settings, most)

    def model_of(self, served: ServedModel) -> Model:
        """A model as far as it is in memory; 503 where it is not."""
        if served.model is None:
            raise self._not_known()
        return served.model

    def models(self) -> list[ModelCard]:
        """What each model is and can do, the first before the others."""
        if not self._pool.known:
            raise self._not_known()
        return [self.card(one.name) for one in self._pool.served]

    def adapters(self, model: str | None = None) -> list[AdapterCard]:
        """The adapters that a request may name."""
        opened = self._opened_or_any(model)
        return [] if opened is None or opened.library is None else opened.library.cards()

    def _opened_or_any(self, model: str | None) -> LoadedModel | None:
        """A loaded model; where that one is not, another tells what lies in the folders."""
        if not self._pool.known:
            return None
        return self._pool.find(model).opened or next(iter(self._pool.opened), None)

    def nets(self, model: str | None = None) -> list[NetCard]:
        """The nets that a request may name."""
        opened = self._opened_or_any(model)
        return [] if opened is None or opened.nets is None else opened.nets.cards()

    async def reference_net(self, model: str | None = None) -> str | None:
        """The first IP-Adapter of the nets by name, which shows a model further pictures; None for none."""
        opened = self._opened_or_any(model)
        if opened is None or opened.nets is None:
            return None
        found: str | None = await self._loop.in_thread(opened.nets.first_of, "ip-adapter")
        return found

    def embeddings(self, model: str | None = None) -> Embeddings:
        """The textual inversions that prompts may name, and those that are for other models."""
        return self._pool.find(model).embeddings if self._pool.known else Embeddings()

    @property
    def upscalers(self) -> Upscalers:
        """The networks that make pictures larger."""
        engine = next(iter(self._pool.engines), None)
        if engine is None:
            return Upscalers(self._settings.upscalers if self._pool.known else None, torch.device("cpu"))
        return engine.studio.upscalers

    @property
    def device(self) -> torch.device | None:
        """Where pictures are drawn, once a model is there."""
        engine = next(iter(self._pool.engines), None)
        return None if engine is None else engine.studio.backend.device

    def device_bytes(self) -> float:
        """What is used of the device's memory."""
        return 0.0 if self.device is None else float(used_bytes(self.device))

    def net_bytes(self) -> float:
        """What the loaded nets take."""
        return float(sum(opened.nets.bytes for opened in self._pool.opened if opened.nets is not None))
