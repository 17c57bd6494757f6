"""What fine-tuning gives: likeness to the subject and to the prompt over the steps, and the best points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from darkroom import models
from darkroom.bill import Bill
from darkroom.evaluate.job import Score, append_scores, evaluate, open_extractors
from darkroom.evaluate.prompts import Prompts, read_prompts
from darkroom.hardware.system import remove_tree
from darkroom.measure.finetuning import BEST, FIDELITY, RATES, Case, Finetuning, Growing, Planner, Say, row
from darkroom.measure.timing import Measurement
from darkroom.sample import generate
from darkroom.train.run import attempted, export, train

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
    for step in [0, *range(bench.every, bench.steps, bench.every), bench.steps]:
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
    share = step / bench.steps
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
