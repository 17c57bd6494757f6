"""What `darkroom bench serve` compares: requests drawn once by a seed, the same for every server; and plain
servers around the pipeline of diffusers, which draw one request or one key at a time.

The servers run as a process of their own, `python -m darkroom.measure.pipeline_server`, with their task as
JSON on standard input; one answers with one JSON line. All adapters stay loaded and are switched by
`set_adapters`. A request given up before it was begun costs nothing; one given up later stops after the step
in which it was (the pipeline's own interrupt), and in a batch only once everybody in it has given up.
"""

from __future__ import annotations

import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.libraries import limit_spinning

if TYPE_CHECKING:
    from darkroom.models.model import Model


# ---- requests
#
# Arrivals are Poisson's: gaps are drawn for one request a second and divided by the rate that is wanted, so a
# trace at twice the rate is the same trace, only denser.

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


# ---- servers


class Pipeline:
    """diffusers' pipeline with adapters loaded."""

    def __init__(self, folder: str, adapters: dict[str, str], device: str) -> None:
        import torch
        from diffusers import StableDiffusionPipeline

        self._torch = torch
        self._pipe: Any = StableDiffusionPipeline.from_pretrained(
            folder, safety_checker=None, requires_safety_checker=False
        ).to(device)
        self._pipe.set_progress_bar_config(disable=True)
        for name, file in adapters.items():
            self._pipe.load_lora_weights(file, adapter_name=name)
        self._adapter: str | None = None
        if adapters:
            self._pipe.disable_lora()

    def draw(self, batch: Sequence[TraceRequest]) -> list[bool]:
        """Draw requests of one key together, to PNG bytes; which of them came to a picture."""
        first = batch[0]
        self._switch(first.adapter)
        cancel_steps = [asked.cancel_step for asked in batch]
        stop_at = max(step for step in cancel_steps if step is not None) if None not in cancel_steps else None

        def after_step(pipe: Any, step: int, _: Any, more: dict[str, Any]) -> dict[str, Any]:
            pipe._interrupt = stop_at is not None and step + 1 >= stop_at
            return more

        images = self._pipe(
            [asked.prompt for asked in batch],
            width=first.width,
            height=first.height,
            num_inference_steps=first.steps,
            guidance_scale=first.guidance,
            generator=[self._torch.Generator().manual_seed(asked.seed) for asked in batch],
            callback_on_step_end=after_step,
            output_type="pil" if stop_at is None else "latent",
        ).images
        if stop_at is not None:
            return [False] * len(batch)
        for image in images:
            image.save(io.BytesIO(), "PNG")
        return [asked.cancel_step is None for asked in batch]

    def _switch(self, name: str | None) -> None:
        if name == self._adapter:
            return
        if name is None:
            self._pipe.disable_lora()
        else:
            self._pipe.enable_lora()
            self._pipe.set_adapters([name])
        self._adapter = name


def serve(
    pipeline: Pipeline,
    trace: Sequence[TraceRequest],
    rate: float | None,
    most_rows: int,
    start_s: float,
    limit_s: float | None = None,
) -> list[dict[str, Any]]:
    """Work a trace off as its requests come, oldest first; with `most_rows`, together with others of its key.

    Without a rate all are there at once. No request is begun after `limit_s`.
    """
    due = {asked.number: start_s + (asked.at / rate if rate else 0.0) for asked in trace}
    waiting = list(trace)
    outcomes = []
    while waiting and (limit_s is None or time.time() < start_s + limit_s):
        if (early_s := due[waiting[0].number] - time.time()) > 0:
            time.sleep(early_s)
        batch = _together(waiting, due, most_rows)
        waiting = [asked for asked in waiting if asked not in batch]
        begun = [asked for asked in batch if asked.cancel_step != 0]
        started_s = time.time()
        drawn = dict(zip(begun, pipeline.draw(begun), strict=True)) if begun else {}
        now_s = time.time()
        outcomes += [
            {
                "number": asked.number,
                "state": "done" if drawn.get(asked) else "cancelled",
                "due_s": due[asked.number],
                "started_s": started_s,
                "finished_s": now_s,
            }
            for asked in batch
        ]
    return outcomes


def _together(waiting: Sequence[TraceRequest], due: dict[int, float], most_rows: int) -> list[TraceRequest]:
    """The oldest request and those of its key that are there already, as many as fit."""
    first, now_s = waiting[0], time.time()
    same = [asked for asked in waiting if asked.key == first.key and due[asked.number] <= now_s]
    return (same or [first])[: max(1, most_rows // first.evaluations)]


def main() -> None:
    """Answer one task."""
    limit_spinning()
    import torch

    task = json.load(sys.stdin)
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    pipeline = Pipeline(task["model"], task["adapters"], task["device"])
    trace = [TraceRequest(**asked) for asked in task["trace"]]
    for size in dict.fromkeys((asked.width, asked.height) for asked in trace):
        for guidance in (1.0, 7.5):
            warm = TraceRequest(
                -1, 0.0, PROMPTS[0], *size, 2, guidance, 0, next(iter(task["adapters"]), None)
            )
            pipeline.draw([warm])
    start_s = time.time()
    outcomes = serve(pipeline, trace, task["rate"], task["most_rows"], start_s, task["limit_s"])
    print(json.dumps({"outcomes": outcomes, "start_s": start_s, "end_s": time.time()}))


if __name__ == "__main__":
    main()
