"""From a model and prompts, or from a folder of pictures, to scores. Checked first, then worked on."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

import darkroom
from darkroom import models
from darkroom.errors import InputError
from darkroom.evaluate.extractors import Extractor, open_extractor
from darkroom.evaluate.metrics import METRICS, MetricResult, Scorer, Sets, check_needs, chosen
from darkroom.evaluate.pictures import (
    FolderPictures,
    Generate,
    Pictures,
    Prompts,
    draw,
    open_pictures,
    prompts_of_pictures,
    without_token,
)
from darkroom.models.model import Model, is_lcm_scheduler
from darkroom.options import LCM_SOLVERS
from darkroom.run import append_rows, check_table, read_rows

LOG = logging.getLogger("darkroom")
ROLES = ("dino", "clip", "inception", "coca")
ALL = "all"
DEFAULTS = {"dino": "facebook/dino-vits16", "clip": "openai/clip-vit-base-patch32"}
Progress = Callable[[int, int | None], None]
Where = str | Path


def evaluate(
    model: Model,
    prompts: Prompts | Sequence[str],
    metrics: Sequence[str],
    *,
    generate: Generate,
    extractors: Mapping[str, Where | Extractor] | None = None,
    reference: Where | None = None,
    reference_filter: str | None = None,
    subject: Where | None = None,
    class_word: str | None = None,
    base: Model | None = None,
    num: int = 4,
    class_num: int = 16,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    keep: Where | None = None,
    allow_seen: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = LOG.warning,
) -> list[Score]:
    """Draw `num` pictures of each prompt and score them: one row for each of `metrics` (see `METRICS`).

    `generate` is `darkroom.sample.generate`; `settings` are its further arguments (steps, size, ...).
    `extractors` says which network has which of `ROLES`, `all` for those not said; the published ones are
    had from the hub. `pres` and `drift` draw `class_num` pictures of 'a photo of a <class_word>', drift with
    `base` too. Pictures are kept in `keep` and drawn once. Raises InputError for what cannot be.
    """
    names = chosen(metrics)
    prompts_read = _prompts(prompts, names)
    there = {
        "reference": reference is not None,
        "subject": subject is not None,
        "class_pictures": bool(class_word),
        "base_pictures": base is not None,
    }
    check_needs(names, there)
    _check_counts(names, num, class_num)
    rows = _MetricRows(names, extractors or {}, seed=seed, allow_seen=allow_seen, progress=progress, say=say)
    rows.compare(
        reference=None if reference is None else open_pictures(reference, filter=reference_filter),
        subject=None if subject is None else open_pictures(subject),
    )
    needs = {need for name in names for need in METRICS[name].needs}
    where = {"model": model_name(model), "model_sha256": rows.model_sha256(model)}
    settings = {**(settings or {})}
    solver = settings.get("solver")
    few = is_lcm_scheduler(model.scheduler) if solver is None else solver in LCM_SOLVERS
    if settings.get("guidance") is None and model.guidance is not None and not few:
        settings["guidance"] = model.guidance  # of the base too, and kept with what was drawn
    more: dict[str, Any] = {"seed": seed, "precision": _precision_of(model), **settings}
    named = {}
    with _folder(keep) as folder:
        drawing = _Drawing(generate, folder, rows, seed, settings, progress, kept=keep is not None)
        sets = rows.sets(FolderPictures("", ()), ())
        if draws_prompts(names):
            where |= {"prompts": prompts_read.name, "prompts_sha256": prompts_read.sha256}
            more["num"] = num
            sets = rows.sets(
                drawing("pictures", model, prompts_read.texts, num), _repeated(prompts_read.plain, num)
            )
        if "class_pictures" in needs:
            more |= {"class_prompt": f"a photo of a {class_word}", "class_num": class_num}
            drawn = drawing("class", model, [more["class_prompt"]], class_num)
            sets = replace(sets, class_pictures=drawn)
        if base is not None and "base_pictures" in needs:
            drawn = drawing("class-base", base, [more["class_prompt"]], class_num)
            sets = replace(sets, base_pictures=drawn)
            named["base_pictures"] = model_name(base), rows.model_sha256(base)
        return rows.scores(sets, where, more, named)


def _check_counts(names: Sequence[str], num: int, class_num: int) -> None:
    if num < 1 or class_num < 1:
        raise InputError(f"{min(num, class_num)} pictures of a prompt", allowed="1 or more")
    if num < 2 and "div" in names:
        raise InputError("metric 'div' compares pictures of one prompt", mend="draw 2 or more (--num)")


class _MetricRows:
    """What the two ways share: extractors opened and checked first, rows made last."""

    def __init__(
        self,
        names: Sequence[str],
        given: Mapping[str, Where | Extractor],
        *,
        seed: int,
        allow_seen: bool,
        progress: Progress | None,
        say: Callable[[str], None],
    ) -> None:
        self.names, self.seed, self.allow_seen = names, seed, allow_seen
        self.progress, self.say = progress, say
        self.extractors = open_extractors(names, given)
        self._reference: Pictures | None = None
        self._subject: Pictures | None = None
        self._identities: dict[int, str] = {}

    def compare(self, *, reference: Pictures | None, subject: Pictures | None) -> None:
        """Set what pictures are compared with; refuse a subject that an extractor was trained on."""
        self._reference, self._subject = reference, subject
        for name in self.names:
            if METRICS[name].same_pictures and self._overlap(name, subject) and not self.allow_seen:
                found = self.extractors[METRICS[name].role]
                raise InputError(
                    f"extractor '{found.name}' was trained on {self._overlap(name, subject)} of the subject",
                    mend="its similarities would flatter: train it without them, or --allow-seen",
                )

    def _overlap(self, name: str, pictures: Pictures | None) -> str:
        seen = self.extractors[METRICS[name].role].seen
        if seen is None or pictures is None:
            return ""
        found = seen.overlap(pictures)
        return str(found) if found else ""

    def model_sha256(self, model: Model) -> str:
        if id(model) not in self._identities:
            self._identities[id(model)] = models.identity(*model.modules.values())
        return self._identities[id(model)]

    def sets(self, pictures: FolderPictures, prompts: Sequence[str]) -> Sets:
        return Sets(pictures, tuple(prompts), self._reference, self._subject)

    def scores(
        self,
        sets: Sets,
        where: Mapping[str, str],
        settings: Mapping[str, Any],
        named: Mapping[str, tuple[str, str]],
    ) -> list[Score]:
        """A row for each metric; `named` says what a drawn set stands for instead of its files."""
        scorer = Scorer(sets, self.seed, self.progress)
        notes_by_file: dict[str, str] = {}
        made = []
        for name in self.names:
            metric = METRICS[name]
            extractor = self.extractors[metric.role]
            found = metric.measure(scorer, extractor)
            compared = named.get("base_pictures") if found.compared is sets.base_pictures else None
            score = _score(name, found, extractor, compared, where, settings)
            if found.compared is not None and found.compared in (sets.reference, sets.subject):
                score = self._with_overlap(name, score, found.compared)
            if score.note and score.note not in notes_by_file:
                notes_by_file[score.note] = name
                self.say(f"{name}: {score.note}")
            made.append(score)
        return made

    def _with_overlap(self, name: str, score: Score, compared: Pictures) -> Score:
        overlap = self._overlap(name, compared)
        parts = [score.note, overlap and f"the extractor was trained on {overlap} compared with"]
        return score.model_copy(update={"note": "; ".join(part for part in parts if part)})


@dataclass(frozen=True)
class _Drawing:
    """How the sets of one evaluation are drawn."""

    generate: Generate
    folder: Path
    rows: _MetricRows
    seed: int
    settings: Mapping[str, Any] | None
    progress: Progress | None
    kept: bool

    def __call__(self, part: str, by: Model, texts: Sequence[str], count: int) -> FolderPictures:
        """`count` pictures of each text, in a folder of their own."""
        found = draw(
            self.generate,
            by,
            texts,
            folder=self.folder / part,
            model_sha256=self.rows.model_sha256(by),
            num=count,
            seed=self.seed,
            settings=self.settings,
            progress=self.progress,
        )
        return replace(found, name=found.name if self.kept else model_name(by))


def draws_prompts(metrics: Sequence[str]) -> bool:
    """Whether any of these metrics looks at pictures of prompts, not of the plain class alone."""
    return any("class_pictures" not in METRICS[name].needs for name in chosen(metrics))


def evaluate_folder(
    folder: Where,
    metrics: Sequence[str],
    *,
    extractors: Mapping[str, Where | Extractor] | None = None,
    reference: Where | None = None,
    reference_filter: str | None = None,
    subject: Where | None = None,
    token: str | None = None,
    prompt_of: Callable[[Path], str | None] | None = None,
    seed: int = 0,
    allow_seen: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = LOG.warning,
) -> list[Score]:
    """Score the pictures that lie in a folder, as `evaluate` does.

    For metrics that need prompts, `prompt_of` tells that of a picture's file; where it does not, it is read
    from a picture's `.txt` or a metadata file (see `prompts_of_pictures`). `token` is left out of it.
    """
    names = chosen(metrics)
    check_needs(names, {"reference": reference is not None, "subject": subject is not None})
    pictures = FolderPictures.of(folder)
    rows = _MetricRows(names, extractors or {}, seed=seed, allow_seen=allow_seen, progress=progress, say=say)
    prompts: tuple[str, ...] = ()
    if any(METRICS[name].reads_text or name == "div" for name in names):
        prompts = tuple(without_token(text, token) for text in prompts_of_pictures(pictures, prompt_of))
    rows.compare(
        reference=None if reference is None else open_pictures(reference, filter=reference_filter),
        subject=None if subject is None else open_pictures(subject),
    )
    where = {"model": str(folder), "model_sha256": pictures.sha256}
    return rows.scores(rows.sets(pictures, prompts), where, {"seed": seed}, {})


def _score(
    name: str,
    found: MetricResult,
    extractor: Extractor,
    compared: tuple[str, str] | None,
    where: Mapping[str, str],
    settings: Mapping[str, Any],
) -> Score:
    if compared is None and found.compared is not None:
        compared = found.compared.name, found.compared.sha256
    return Score(
        metric=name,
        value=found.interval.value,
        low=finite(found.interval.low),
        high=finite(found.interval.high),
        n=len(found.pictures),
        compared_n=None if found.compared is None else len(found.compared),
        better=METRICS[name].better,
        extractor=extractor.name,
        extractor_kind=extractor.kind,
        extractor_sha256=extractor.sha256,
        compared=compared[0] if compared else "",
        compared_sha256=compared[1] if compared else "",
        settings={**settings, **found.settings},
        note=found.note,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        version=darkroom.__version__,
        **where,
    )


def open_extractors(
    metrics: Sequence[str],
    given: Mapping[str, Where | Extractor],
    *,
    device: str | torch.device = "cpu",
) -> dict[str, Extractor]:
    """The extractor of each role that these metrics need: as given, the one for `all`, or the hub's.

    InputError where there is none, or where it cannot do what a metric needs.
    """
    for role in given:
        if role not in (*ROLES, ALL):
            raise InputError(f"extractor '{role}'", allowed=", ".join((*ROLES, ALL)))
    found: dict[str, Extractor] = {}
    opened: dict[str, Extractor] = {}
    for role in dict.fromkeys(METRICS[name].role for name in chosen(metrics)):
        where = given.get(role, given.get(ALL, DEFAULTS.get(role)))
        if where is None:
            raise InputError(
                f"no {role} extractor",
                mend=f"add --extractor {role}=FOLDER (docs/evaluation.md says how to come by one)",
            )
        if isinstance(where, Extractor):
            found[role] = where
            continue
        if str(where) not in opened:
            opened[str(where)] = open_extractor(where, device=device)
        found[role] = opened[str(where)]
    for name in metrics:
        _check_able(name, found[METRICS[name].role])
    return found


def _check_able(name: str, extractor: Extractor) -> None:
    if METRICS[name].reads_text:
        extractor.texts(["a word"])  # InputError where it reads none
    if name == "div" and extractor.maps is None:
        raise InputError(f"extractor '{extractor.name}' has no feature maps, which div needs")


def _precision_of(model: Model) -> str:
    """What a model's weights are held in."""
    weight = next(parameter for module in model.modules.values() for parameter in module.parameters())
    return str(weight.dtype).removeprefix("torch.")


def model_name(model: Model) -> str:
    """A model as a row of scores calls it."""
    return model.path or model.family


def _prompts(given: Prompts | Sequence[str], names: Sequence[str]) -> Prompts:
    if isinstance(given, Prompts) or (not given and not draws_prompts(names)):
        return given if isinstance(given, Prompts) else Prompts("", (), ())
    return Prompts.of("prompts", [given] if isinstance(given, str) else list(given))


def _repeated(prompts: Sequence[str], num: int) -> list[str]:
    return [prompt for prompt in prompts for _ in range(num)]


@contextmanager
def _folder(keep: Where | None) -> Iterator[Path]:
    """Where pictures are drawn: the user's folder, or one that goes afterwards."""
    if keep is not None:
        yield Path(keep)
        return
    with tempfile.TemporaryDirectory(prefix="darkroom-evaluate-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Score(BaseModel):
    """One row: a metric of one set of pictures. What does not apply is empty."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(description="fid, kid, cmmd, clip, dino, clip-i, clip-t, pres, div, drift, ...")
    value: float = Field(description="the score")
    low: float | None = Field(default=None, description="lower end of the 95 % bootstrap interval")
    high: float | None = Field(default=None, description="upper end of it")
    n: int = Field(ge=1, description="pictures scored")
    compared_n: int | None = Field(default=None, description="pictures of what they were compared with")
    better: str = Field(default="", description="higher or lower")
    extractor: str = Field(default="", description="folder or hub id")
    extractor_kind: str = Field(default="", description="what network it is")
    extractor_sha256: str = Field(default="", description="of its weights")
    compared: str = Field(default="", description="reference store or folder, subject's folder, base model")
    compared_sha256: str = Field(default="", description="of those pictures, or that model's weights")
    model: str = Field(default="", description="the model, or the folder of pictures")
    model_sha256: str = Field(default="", description="of its weights, adapters merged, or of the pictures")
    prompts: str = Field(default="", description="where the prompts came from")
    prompts_sha256: str = Field(default="", description="of the prompts as drawn")
    settings: dict[str, Any] = Field(default={}, description="how pictures were drawn and scores taken")
    note: str = Field(default="", description="what must be known to read the value")
    date: str = Field(default="", description="when, UTC")
    version: str = Field(default="", description="of darkroom")

    @property
    def interval(self) -> str:
        """'0.71 to 0.78', or nothing."""
        return "" if self.low is None or self.high is None else f"{self.low:.4g} to {self.high:.4g}"


def finite(value: float) -> float | None:
    """A number, or None where there is none."""
    return value if math.isfinite(value) else None


def append_scores(path: Path | str, scores: Iterable[Score]) -> Path:
    """Add rows to a CSV, which is replaced whole; InputError where the file has other columns."""
    return append_rows(Path(path), Score, scores, digits=9)


def check_scores_file(path: Path) -> str:
    """What stands in the file, empty where there is none; InputError unless scores can be added to it."""
    return check_table(path, Score)


def read_scores(path: Path | str) -> list[Score]:
    """The rows of a table of scores."""
    return read_rows(Path(path), Score)
