"""What a server says of itself: its model, its adapters, and how it is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from darkroom.errors import InputError
from darkroom.serve.engine.pool import ModelPool, ServedModel
from darkroom.serve.settings import ServeSettings

if TYPE_CHECKING:
    from darkroom.models.model import Model


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


def status(pool: ModelPool, state: str, why: str, jobs: int, uploads_bytes: int = 0) -> Status:
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
