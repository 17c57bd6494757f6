"""What a fine-tuning step takes, each case in a process of its own, so that one's peak is not another's; and
what fine-tuning gives: likeness to the subject and to the prompt over the steps, and the best points.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from darkroom import models
from darkroom.bill import Bill, format_number
from darkroom.errors import is_out_of_memory
from darkroom.evaluate.job import Score, append_scores, evaluate, open_extractors
from darkroom.evaluate.pictures import Prompts, read_prompts
from darkroom.hardware.meters import PeakMemory, give_back, resident_bytes
from darkroom.hardware.system import load_average, remove_tree
from darkroom.libraries import hush
from darkroom.measure.finetuning import (
    BEST,
    FIDELITY,
    LARGEST,
    RATES,
    STEP,
    Case,
    Finetuning,
    Growing,
    Planner,
    Say,
    row,
)
from darkroom.measure.timing import Measurement, Timing, measurement, synchronise
from darkroom.sample import generate
from darkroom.train.run import attempted, export, train

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
            say(_described(one))
        rows.append(one)
    return rows


def _described(one: Measurement) -> str:
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
    from darkroom.recipe.recipe import make_recipe
    from darkroom.train.jobs import Pinned
    from darkroom.train.setup import make_job

    recipe = make_recipe(dict(content))
    before = resident_bytes()
    job = make_job(recipe, Pinned(folder))
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    return before, job, inputs


SUBJECT, PROMPT = "dino", "clip-t"
SCENES = (
    "{token} {class}",
    "{token} {class} in the snow",
    "{token} {class} on the beach",
    "a red {token} {class}",
    "{token} {class} and a soccer ball",
    "{token} {class} and pizza",
)


@dataclass(frozen=True)
class Judging:
    """How pictures are drawn and scored."""

    extractors: Mapping[str, str | Path]
    prompts: Prompts
    num: int = 4
    seed: int = 0
    keep: Path | None = None  # the table that scores are added to
    draw: Mapping[str, Any] = field(default_factory=dict)  # of generate: steps, guidance, size

    @classmethod
    def of(
        cls, bench: Finetuning, extractors: Mapping[str, str | Path], prompts: str | None, **more: Any
    ) -> Judging:
        """With prompts from a file (`{token}` and `{class}` in them), or plain scenes."""
        words = {"token": bench.token, "class": bench.class_word}
        if prompts is not None:
            found = read_prompts(prompts, token=bench.token, class_word=bench.class_word)
        else:
            texts = [scene.format(**words) for scene in SCENES]
            found = Prompts.of("scenes", texts, bench.token)
        open_extractors((SUBJECT, PROMPT), extractors)  # InputError before any work
        return cls(extractors, found, **more)


@dataclass
class Followed:
    """Rows, and where the pictures of each series and step lie."""

    rows: list[Measurement] = field(default_factory=list)
    pictures: dict[tuple[str, int], list[Path]] = field(default_factory=dict)

    def add(self, other: Followed) -> None:
        """Take in what another run found."""
        self.rows += other.rows
        self.pictures |= other.pictures


def follow_methods(
    bench: Finetuning, judging: Judging, table: Growing | None = None, say: Say = lambda _: None
) -> Followed:
    """Both fidelities of every method against the steps, from the base model's (step 0) on."""
    found = Followed()
    for method in bench.methods:
        found.add(follow(bench, bench.case(method), judging, FIDELITY, method, table, say))
    return found


def follow_rates(
    bench: Finetuning, judging: Judging, table: Growing | None = None, say: Say = lambda _: None
) -> Followed:
    """The same of one method over learning rates, at the sweep's batch."""
    found = Followed()
    for rate in bench.sweep:
        case = bench.case(bench.sweep_method, batch=bench.sweep_batch, lr=rate)
        found.add(follow(bench, case, judging, RATES, f"lr {rate:g}", table, say))
    return found


def follow(
    bench: Finetuning,
    case: Case,
    judging: Judging,
    benchmark: str,
    series: str,
    table: Growing | None = None,
    say: Say = lambda _: None,
) -> Followed:
    """Train a case once and score every checkpoint; one that diverges or finds no memory is a row without
    scores. The same call again goes on where it stopped.
    """
    table = table or Growing()
    if (failed := table.find(benchmark, series)) is not None:
        return Followed([failed])
    run = bench.work / "runs" / f"{benchmark}-{series}".replace(" ", "-")
    result, failure = attempted(lambda: train(bench.recipe(case), out=run, console=lambda _: None))
    if result is None:
        say(f"{series}: {failure}")
        settings = case.settings() | {"series": series}
        return Followed([table.add(row(benchmark, series, settings, note=failure.partition(";")[0]))])
    found = Followed()
    steps = bench.steps_of(case.method)
    for step in [0, *range(bench.every, steps, bench.every), steps]:
        name = f"{series} step {step}"
        one = table.find(benchmark, name)
        if one is None:
            scores = _judge(bench, run, step, judging)
            settings = case.settings() | {"series": series} | _point(bench, case, result.bill, step, scores)
            one = table.add(row(benchmark, name, settings, note=_how(judging, scores)))
            subject, prompt = one.settings["subject_fidelity"], one.settings["prompt_fidelity"]
            say(f"{name}: subject {subject:.3f}, prompt {prompt:.3f}")
        found.rows.append(one)
        found.pictures[series, step] = sorted((_judged(bench, run, step) / "pictures").glob("*.png"))
    return found


def _point(bench: Finetuning, case: Case, bill: Bill, step: int, scores: Sequence[Score]) -> dict[str, Any]:
    share = step / bench.steps_of(case.method)
    return {
        "step": step,
        "samples": step * case.batch,
        **_fidelities(scores),
        "train_usd": round((bill.usd or 0.0) * share, 6),
        "train_s": round(bill.wall_s * share, 2),
    }


def _judged(bench: Finetuning, run: Path, step: int) -> Path:
    """Where the pictures of a run's checkpoint are; those of the base at step 0."""
    return run / "judged" / f"step-{step:06d}" if step else bench.work / "judged" / "base"


def _judge(bench: Finetuning, run: Path, step: int, judging: Judging) -> list[Score]:
    """Scores of a run's checkpoint, kept; of the base at step 0. Its pictures are drawn once."""
    folder = run / "model-of-a-step"
    remove_tree(folder)
    where = Path(bench.base) if step == 0 else export(run, folder, checkpoint=step, say=lambda _: None)
    try:
        scores = evaluate(
            models.load(str(where)),
            judging.prompts,
            (SUBJECT, PROMPT),
            generate=generate,
            extractors=dict(judging.extractors),
            subject=bench.photos,
            num=judging.num,
            seed=judging.seed,
            settings=dict(judging.draw),
            keep=_judged(bench, run, step),
            say=lambda _: None,
        )
    finally:
        remove_tree(folder)
    named = f"{run.name}@{step}" if step else "base"
    scores = [score.model_copy(update={"model": named}) for score in scores]
    if judging.keep is not None:
        append_scores(judging.keep, scores)
    return scores


def _fidelities(scores: Sequence[Score]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for score, name in zip(scores, ("subject", "prompt"), strict=True):
        settings[f"{name}_fidelity"] = round(score.value, 5)
        settings[f"{name}_low"], settings[f"{name}_high"] = (
            round(v or 0.0, 5) for v in (score.low, score.high)
        )
    return settings | {"photographs_with_each_other": scores[0].settings.get("photographs_with_each_other")}


def _how(judging: Judging, scores: Sequence[Score]) -> str:
    kind = scores[0].extractor_kind
    return (
        f"{SUBJECT} and {PROMPT} by {kind} {scores[0].extractor_sha256[:12]}; {scores[0].n} pictures of "
        f"{len(judging.prompts)} prompts; intervals: 95 %, bootstrap over prompts"
    )


# ---- the best points


def balance(one: Measurement, rows: Iterable[Measurement]) -> float:
    """Harmonic mean of what was gained in likeness to the subject and what was kept of the prompt, each
    from 0 (the base's and the lowest) to 1 (the highest and the base's) over all rows.
    """
    settings = [r.settings for r in rows]
    base = [s for s in settings if s["step"] == 0] or settings
    start, top = base[0]["subject_fidelity"], max(s["subject_fidelity"] for s in settings)
    kept, low = base[0]["prompt_fidelity"], min(s["prompt_fidelity"] for s in settings)
    gained = _share(one.settings["subject_fidelity"], start, top)
    held = _share(one.settings["prompt_fidelity"], low, kept)
    return 2 * gained * held / (gained + held) if gained + held else 0.0


def _share(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0


def best_rows(
    found: Followed,
    bench: Finetuning,
    *,
    planner: Planner | None = None,
    base: str = "",
    table: Growing | None = None,
) -> list[Measurement]:
    """Of each series the step of the best balance, the best first: quality, what it took here, and what the
    same method, batch and steps take on the planned model.
    """
    followed = [r for r in found.rows if r.benchmark == FIDELITY and "step" in r.settings]
    rows, table = [], table or Growing()
    for series in dict.fromkeys(r.settings["series"] for r in followed):
        own = [r for r in followed if r.settings["series"] == series and r.settings["step"]]
        best = max(own, key=lambda r: balance(r, followed))
        settings = {**best.settings, "balance": round(balance(best, followed), 4)}
        if planner is not None:
            case = Case(series, settings["batch"], settings.get("rank", bench.rank), 512)
            plan = planner(bench.recipe(case, base=base, steps=settings["step"]))
            settings |= {"planned_model": base, "planned_memory_bytes": int(plan["memory_bytes"])}
            settings |= {"planned_usd": round((plan["usd_per_image"] or 0.0) * settings["samples"], 5)}
            settings |= {"planned_on": f"{plan['count']} x {plan['device']}, 512 px"}
        rows.append(row(BEST, f"{series}, {settings['step']} steps", settings, note=best.note))
    return [table.add(one) for one in sorted(rows, key=lambda r: -r.settings["balance"])]
