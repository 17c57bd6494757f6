"""What a fine-tuning step takes: each case in a process of its own, so that one's peak is not another's."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from darkroom.bill import format_number
from darkroom.errors import is_out_of_memory
from darkroom.hardware.memory import PeakMemory, give_back, resident_bytes
from darkroom.hardware.system import load_average
from darkroom.hush import hush
from darkroom.measure.finetuning import LARGEST, STEP, Case, Finetuning, Growing, Say, row
from darkroom.measure.timing import Measurement, Timing, measurement, synchronise

WARMUP = 1


def step_rows(
    bench: Finetuning, *, repeats: int = 5, table: Growing | None = None, say: Say = lambda _: None
) -> list[Measurement]:
    """Time of a step and peak memory of every case, measured on the bench's own model; of a case that finds
    no memory a row that says so.
    """
    rows, table = [], table or Growing()
    for case in bench.cases():
        one = table.find(STEP, case.name)
        if one is None:
            found, failure = alone_if_it_fits(weigh, bench.content(case), repeats)
            one = table.add(_step_row(bench, case, found) if found else _failed_row(bench, case, failure))
            say(_told(one))
        rows.append(one)
    return rows


def _told(one: Measurement) -> str:
    if one.images_per_s is None:
        return f"{one.case}: {one.note}"
    peak = (one.peak_memory_bytes or 0) / 1e6
    return f"{one.case}: {format_number(one.images_per_s)} images/s, peak {peak:.0f} MB"


def _failed_row(bench: Finetuning, case: Case, failure: str) -> Measurement:
    settings = case.settings() | {"model": Path(bench.base).name, "source": "measured"}
    return row(STEP, case.name, settings, note=failure)


def _step_row(bench: Finetuning, case: Case, found: Mapping[str, Any]) -> Measurement:
    timing = Timing(case.name, tuple(found["seconds"]), found["warmup_s"], found["load"])
    kept = (
        "trained",
        "total",
        "trained_state_bytes",
        "above_start_bytes",
        "host_peak_bytes",
        "rows",
        "threads",
    )
    settings = {"model": Path(bench.base).name, "source": "measured"} | {name: found[name] for name in kept}
    return measurement(
        STEP,
        timing,
        images=case.batch,
        steps=1,
        precision=found["precision"],
        device=found["device"],
        settings=case.settings() | settings,
        peak_memory_bytes=found["peak_bytes"],
        note="a process of its own; above_start: over what it held before the model was opened",
    )


def largest_rows(
    bench: Finetuning,
    *,
    budget_bytes: int,
    most: int = 1024,
    table: Growing | None = None,
    say: Say = lambda _: None,
) -> list[Measurement]:
    """The largest batch of each method and resolution, found by search: until memory ends on a card, or
    until the process holds `budget_bytes`.
    """
    rows, table = [], table or Growing()
    for method in bench.methods:
        for side in bench.resolutions:
            name = f"{method} {side} px"
            one = table.find(LARGEST, name)
            if one is None:
                one = table.add(_largest_row(bench, method, side, name, budget_bytes, most))
                say(f"{name}: largest batch {one.settings['batch']}")
            rows.append(one)
    return rows


def _largest_row(
    bench: Finetuning, method: str, side: int, name: str, budget_bytes: int, most: int
) -> Measurement:
    case = bench.case(method, resolution=side, batch=most)
    found, failure = alone_if_it_fits(search, bench.content(case), budget_bytes)
    found = found or {"batch": 0, "peak_bytes": 0, "tried": 0, "ended": True}
    settings = bench.case(method, resolution=side).settings() | {
        "batch": found["batch"],
        "budget_bytes": budget_bytes,
        "tried": found["tried"],
        "model": Path(bench.base).name,
        "source": "measured",
    }
    note = "out of memory ended the search" if found["ended"] else "the process's memory was the limit"
    note = failure or (note if found["batch"] < most else f"the search went to {most} only")
    return row(LARGEST, name, settings, peak_memory_bytes=found["peak_bytes"] or None, note=note)


def alone_if_it_fits(
    call: Callable[..., dict[str, Any]], *arguments: Any
) -> tuple[dict[str, Any] | None, str]:
    """The same as `alone`, or None and why where memory ended it."""
    try:
        return alone(call, *arguments), ""
    except BrokenProcessPool:
        return None, "its process was killed, as a system short of memory does"
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, "out of memory"


def alone(call: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call in a fresh process, and wait for what it returns."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=hush) as pool:
        return pool.submit(_watched, call, *arguments).result()


# ---- in the process


def _watched(call: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call, and go with the process that asked: one that is killed cannot say that nobody waits."""

    def leave() -> None:
        asked_by = multiprocessing.parent_process()
        if asked_by is not None:
            asked_by.join()
            os._exit(1)

    threading.Thread(target=leave, name="leave", daemon=True).start()
    return call(*arguments)


def weigh(content: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds of each step of a recipe, the peak while they ran, and what training itself holds."""
    import torch

    from darkroom.train.tasks.lora import parameter_table

    with tempfile.TemporaryDirectory(prefix="darkroom-bench-", ignore_cleanup_errors=True) as folder:
        before, job, inputs = _open(content, Path(folder))
        device = str(job.device)
        seconds = []
        peak, host = PeakMemory(device), PeakMemory("cpu")
        for k in range(WARMUP + repeats):
            synchronise(device)
            start = time.perf_counter()
            job.step(k, inputs)
            synchronise(device)
            seconds.append(time.perf_counter() - start)
        highest = peak.bytes()
        trained, total = parameter_table(job.task.modules)
        return {
            "seconds": seconds[WARMUP:],
            "warmup_s": sum(seconds[:WARMUP]),
            "load": load_average(),
            "peak_bytes": highest,
            "host_peak_bytes": host.bytes(),
            "above_start_bytes": max(0, highest - before) if device == "cpu" else highest,
            "trained_state_bytes": trained_state_bytes(job.step),
            "trained": trained,
            "total": total,
            "rows": len(next(iter(inputs.values()))),
            "precision": job.environment["precision"],
            "threads": torch.get_num_threads(),
            "device": device,
        }


def trained_state_bytes(step: Any) -> int:
    """Master weights, their gradients and the optimiser's state."""
    from darkroom.train.optim import optimiser_tensors

    masters = step.weights.masters
    state = optimiser_tensors(step.optimiser, masters)
    held = [*masters.values(), *masters.values(), *state.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def search(content: Mapping[str, Any], budget_bytes: int) -> dict[str, Any]:
    """Double the batch until memory or the budget ends, then halve the gap to an eighth."""
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-", ignore_cleanup_errors=True) as folder:
        _, job, inputs = _open(content, Path(folder))
        device, most = str(job.device), int(content["train"]["global_batch"])
        peaks: dict[int, int] = {}
        ended = False

        def fits(batch: int) -> bool:
            """Whether a step of `batch` pictures fits; the peak and what ended it are kept."""
            nonlocal ended
            some = {name: tensor[: batch * job.task.rows_a_picture] for name, tensor in inputs.items()}
            give_back()  # what a larger try left is not this one's
            peak = PeakMemory(device)
            try:
                job.step(0, some)
                synchronise(device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                ended = True
                return False
            peaks[batch] = peak.bytes()
            return device != "cpu" or peaks[batch] <= budget_bytes

        batch = largest(fits, most)
        return {"batch": batch, "peak_bytes": peaks.get(batch, 0), "tried": len(peaks), "ended": ended}


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, to within an eighth; 0 where not even 1 does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    if high > most and low == most:
        return low
    high = min(high, most + 1)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _open(content: Mapping[str, Any], folder: Path) -> tuple[int, Any, dict[str, Any]]:
    """Memory held before, the job, and one batch of its inputs."""
    from darkroom.recipe.read import make_recipe
    from darkroom.train.jobs import Pinned
    from darkroom.train.setup import make_job

    recipe = make_recipe(dict(content))
    before = resident_bytes()
    job = make_job(recipe, Pinned(folder))
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    return before, job, inputs
