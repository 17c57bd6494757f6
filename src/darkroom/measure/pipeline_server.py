"""The plain servers that darkroom is compared with: diffusers' pipeline, one request or one key at a time.

Run as a process of its own, `python -m darkroom.measure.pipeline_server`, with its task as JSON on standard
input; it answers with one JSON line. All adapters stay loaded and are switched by `set_adapters`. A request
given up before it was begun costs nothing; one given up later stops after the step in which it was (the
pipeline's own interrupt), and in a batch only once everybody in it has given up.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from darkroom.libraries import limit_spinning
from darkroom.measure.trace import PROMPTS, TraceRequest


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
