"""Requests as they may come to a server: drawn once by a seed, the same for every server that is compared.

Arrivals are Poisson's: gaps are drawn for one request a second and divided by the rate that is wanted, so a
trace at twice the rate is the same trace, only denser.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from darkroom.models.model import Model

STEPS = (10, 15, 20, 25, 30, 40, 50)
GUIDANCE, GUIDED, CANCELLED = 7.5, 0.7, 0.1
SIZE_SHARES = (0.6, 0.2, 0.2)
"""Of the square, the wide and the high."""
PROMPTS = (
    "a red circle",
    "a blue square on a table",
    "a photo of an astronaut riding a horse",
    "two cats asleep on a sofa, watercolour",
    "a lighthouse at night",
    "a bowl of fruit",
)
RANK = 8


@dataclass(frozen=True)
class TraceRequest:
    """One request: one picture."""

    number: int
    at: float
    """When it comes, in mean gaps between requests."""
    prompt: str
    width: int
    height: int
    steps: int
    guidance: float
    seed: int
    adapter: str | None = None
    cancel_step: int | None = None
    """Given up once so many steps are taken; 0 is before it was begun, None is never."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for two requests to share one call of a pipeline."""
        return self.width, self.height, self.steps, self.guidance, self.adapter

    @property
    def evaluations(self) -> int:
        """U-Net rows a step."""
        return 2 if self.guidance > 1 else 1

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def body(self) -> dict[str, Any]:
        """As `/jobs` takes it."""
        names = ("prompt", "width", "height", "steps", "guidance", "seed")
        adapters = [] if self.adapter is None else [{"name": self.adapter}]
        return {**{name: getattr(self, name) for name in names}, "adapters": adapters}


def draw_trace(
    count: int, *, seed: int, sizes: Sequence[tuple[int, int]], adapters: Sequence[str] = ()
) -> list[TraceRequest]:
    """Requests of mixed steps, guidance, sizes and adapters (by Zipf: the n-th is asked for 1/n as often)."""
    draw = random.Random(seed)
    shares = [1 / (i + 1) for i in range(len(adapters))]
    at = 0.0
    trace = []
    for i in range(count):
        at += draw.expovariate(1.0)
        steps = draw.choice(STEPS)
        given_up = draw.random() < CANCELLED
        trace.append(
            TraceRequest(
                i,
                at,
                draw.choice(PROMPTS),
                *draw.choices(sizes, SIZE_SHARES[: len(sizes)])[0],
                steps=steps,
                guidance=GUIDANCE if draw.random() < GUIDED else 1.0,
                seed=draw.randrange(2**31),
                adapter=draw.choices(adapters, shares)[0] if adapters else None,
                cancel_step=draw.randrange(steps) if given_up else None,
            )
        )
    return trace


def description_of(trace: Sequence[TraceRequest]) -> dict[str, Any]:
    """What a row of measurements says of a trace."""
    return {
        "requests": len(trace),
        "to_cancel": sum(asked.cancel_step is not None for asked in trace),
        "guided": sum(asked.evaluations == 2 for asked in trace),
        "sizes": " ".join(f"{w}x{h}" for w, h in sorted(Counter((a.width, a.height) for a in trace))),
        "adapters_asked_for": len({asked.adapter for asked in trace if asked.adapter}),
        "keys": len({asked.key for asked in trace}),
    }


def sizes_for(model: Model) -> list[tuple[int, int]]:
    """The model's own square, a wide one and a high one of three quarters of it."""
    own = model.sample_size
    grain = model.size_unit
    short = max(grain, own * 3 // 4 // grain * grain)
    return [(own, own), (own, short), (short, own)]


def make_adapters(model: Model, folder: Path, count: int, *, seed: int) -> list[str]:
    """Small LoRA files of the U-Net's attention with random weights that change the picture; their names."""
    import torch

    from darkroom.models.adapters.adapter import Adapter, Layer
    from darkroom.models.adapters.read import adaptable, write_adapter

    places = {
        path: layer
        for path, layer in adaptable(model).items()
        if path.startswith("unet.") and path.endswith(("to_q", "to_k", "to_v", "to_out.0"))
    }
    names = [f"style{i:02d}" for i in range(count)]
    for i, name in enumerate(names):
        draw = torch.Generator().manual_seed(seed * 1000 + i)
        layers = {}
        for path, layer in places.items():
            outputs, inputs = layer.weight.shape[:2]
            down = torch.randn(RANK, inputs, generator=draw) / inputs**0.5
            up = torch.randn(outputs, RANK, generator=draw) * (0.2 / RANK**0.5)
            layers[path] = Layer(down, up)
        write_adapter(Adapter(name, layers), folder / f"{name}.safetensors")
    return names
