"""The measures by name: which pictures each needs, which extractor, how it is taken and what must be said;
and their bootstrap intervals: how far a score would move with other pictures of the same kind. Seeded.

Shapes: N and M pictures of the two sets, D numbers of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from darkroom.errors import InputError
from darkroom.evaluate import statistics
from darkroom.evaluate.extractors import Extractor
from darkroom.evaluate.pictures import FolderPictures, Pictures, images
from darkroom.evaluate.statistics import Array, KernelMatrices

RESAMPLES = 1000
LEVEL, NORMAL = 0.95, 1.96
SLOW_RESAMPLES, SLOW_SIDE = 20, 1000
FRECHET_RESAMPLES = 100
LARGEST_KERNEL = 4000


class Interval(NamedTuple):
    """A score with its 95 % interval; NaN where too little is known of its spread."""

    value: float
    low: float
    high: float


def percentile(value: float, drawn: Array, level: float = LEVEL) -> Interval:
    """The middle part of the resampled scores around a value."""
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def mean_interval(
    values_N: Array, groups: Sequence[object] | None = None, *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The mean of values; whole groups (all pictures of a prompt) are drawn, as they are alike.

    With one group alone its values are drawn. One value has no interval.
    """
    values_N = np.asarray(values_N, dtype=np.float64)
    if not len(values_N):
        raise InputError("no values to take a mean of")
    sums_G, counts_G = _by_group(values_N, groups)
    value = float(values_N.mean())
    if len(sums_G) < 2:
        return Interval(value, float("nan"), float("nan"))
    picks = np.random.default_rng(seed).integers(0, len(sums_G), (resamples, len(sums_G)))
    return percentile(value, sums_G[picks].sum(axis=1) / counts_G[picks].sum(axis=1))


def _by_group(values_N: Array, groups: Sequence[object] | None) -> tuple[Array, Array]:
    numbered: dict[object, int] = {}
    for group in groups or ():
        numbered.setdefault(group, len(numbered))
    if len(numbered) < 2:
        return values_N, np.ones(len(values_N))
    index = np.array([numbered[group] for group in groups or ()])
    sums_G: Array = np.bincount(index, values_N).astype(np.float64)
    return sums_G, np.bincount(index).astype(np.float64)


def frechet_interval(x_ND: Array, y_MD: Array, *, seed: int = 0, resamples: int | None = None) -> Interval:
    """The Frechet distance; pictures of both sets are drawn anew.

    Drawing with replacement raises the distance itself, as fewer pictures do. So the resamples tell the
    width alone: their mean is moved onto the value.
    """
    value = statistics.frechet(statistics.Moments.of(x_ND), statistics.Moments.of(y_MD))
    if min(len(x_ND), len(y_MD)) < 3:
        return Interval(value, float("nan"), float("nan"))
    drawn = _drawn(
        lambda i, j: statistics.frechet_of(x_ND[i], y_MD[j]),
        (len(x_ND), len(y_MD)),
        resamples or _frechet_resamples(x_ND, y_MD),
        seed,
    )
    found = percentile(value, drawn - drawn.mean() + value)
    return Interval(value, max(found.low, 0.0), found.high)


def frechet_infinity_interval(
    x_ND: Array, y_MD: Array, *, seed: int = 0, resamples: int | None = None
) -> tuple[Interval, statistics.Extrapolated]:
    """The extrapolated Frechet distance, and the line that it is read from.

    Two errors are added up as squares: of the fitted line, and of the pictures at hand: the spread over
    resamples of 2 F(all) - F(half), the same extrapolation from two points. A distance is not below zero:
    where the line lands there, the value is 0, and the interval reaches at least as far above zero as the
    line is below it.
    """
    line = statistics.frechet_infinity(x_ND, y_MD, seed=seed)

    def two_points(i: np.ndarray, j: np.ndarray) -> float:
        whole = statistics.frechet_of(x_ND[i], y_MD[j])
        return 2 * whole - statistics.frechet_of(x_ND[i[::2]], y_MD[j[::2]])

    counts = len(x_ND), len(y_MD)
    drawn = _drawn(two_points, counts, resamples or _frechet_resamples(x_ND, y_MD) // 2, seed)
    error = float(np.sqrt(line.standard_error**2 + drawn.var(ddof=1)))
    low, high = line.value - NORMAL * error, line.value + NORMAL * error
    return Interval(max(line.value, 0.0), max(low, 0.0), max(high, -line.value)), line


def _frechet_resamples(x_ND: Array, y_MD: Array) -> int:
    """How often a Frechet distance is taken anew: less often where one takes seconds."""
    slow = min(len(x_ND), len(y_MD), x_ND.shape[1]) > SLOW_SIDE
    return SLOW_RESAMPLES if slow else FRECHET_RESAMPLES


def _drawn(
    score: Callable[[np.ndarray, np.ndarray], float], counts: tuple[int, int], resamples: int, seed: int
) -> Array:
    draws = np.random.default_rng(seed)
    return np.array([score(*(draws.integers(0, count, count) for count in counts)) for _ in range(resamples)])


def _kernel_interval(
    kernels: KernelMatrices, *, scale: float = 1.0, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """A squared MMD; pictures of both sets are drawn anew, copies of one never paired with each other.

    Of two pictures every resample with a pair is the two themselves: fewer than three have no interval.
    """
    if min(len(kernels.xx_NN), len(kernels.yy_MM)) < 3:
        return Interval(scale * kernels.mmd(), float("nan"), float("nan"))
    draws = np.random.default_rng(seed)
    counts = []
    for side in (len(kernels.xx_NN), len(kernels.yy_MM)):
        drawn = draws.multinomial(side, np.full(side, 1 / side), size=resamples)
        counts.append(drawn[(drawn > 0).sum(axis=1) > 1].astype(np.float64))
    common = min(len(drawn) for drawn in counts)
    found = kernels.mmd_of(counts[0][:common], counts[1][:common])
    return percentile(scale * kernels.mmd(), scale * found)


def kid_interval(x_ND: Array, y_MD: Array, *, seed: int = 0) -> Interval:
    """KID of whole sets with bootstrap; of sets too large for that, the mean and spread of random blocks."""
    if max(len(x_ND), len(y_MD)) <= LARGEST_KERNEL:
        return _kernel_interval(statistics.kernels_for_kid(x_ND, y_MD), seed=seed)
    blocks = statistics.kid_blocks(x_ND, y_MD, seed=seed)
    return percentile(float(blocks.mean()), blocks)


def cmmd_interval(x_ND: Array, y_MD: Array, *, seed: int = 0) -> Interval:
    """CMMD with bootstrap; of sets too large for that, of as many random pictures as can be compared."""
    draws = np.random.default_rng(seed)
    x_ND, y_MD = (
        side if len(side) <= LARGEST_KERNEL else side[draws.choice(len(side), LARGEST_KERNEL, replace=False)]
        for side in (x_ND, y_MD)
    )
    kernels = statistics.kernels_for_cmmd(x_ND, y_MD)
    return _kernel_interval(kernels, scale=statistics.CMMD_SCALE, seed=seed)


FULL_RANK, FAIR_SIZE = 2048, 10_000


@dataclass(frozen=True)
class Sets:
    """The pictures at hand. `prompts` has the prompt of each picture, without the rare token, or is empty."""

    pictures: FolderPictures
    prompts: tuple[str, ...] = ()
    reference: Pictures | None = None
    subject: Pictures | None = None
    class_pictures: Pictures | None = None
    base_pictures: Pictures | None = None


class MetricResult(NamedTuple):
    """What a measure came to: its interval, the pictures scored, and what they were compared with."""

    interval: Interval
    pictures: Pictures
    compared: Pictures | None = None
    note: str = ""
    settings: Mapping[str, Any] = {}


@dataclass
class Scorer:
    """Takes measures of sets of pictures; features are taken once for all of them."""

    sets: Sets
    seed: int = 0
    progress: Callable[[int, int | None], None] | None = None
    _features: dict[tuple[str, int], Array] = field(default_factory=dict)

    def features(self, extractor: Extractor, pictures: Pictures) -> Array:
        """Features [N, D] of a set of pictures."""
        key = extractor.sha256, id(pictures)
        if key not in self._features:
            report = self.progress
            counted = None if report is None else lambda done: report(done, len(pictures))
            self._features[key] = extractor.pictures(images(pictures), progress=counted)
        return self._features[key]

    def with_sets(self, sets: Sets) -> Scorer:
        """A scorer of other pictures against the same reference, whose features are kept."""
        kept = {key: f for key, f in self._features.items() if key[1] == id(sets.reference)}
        return Scorer(sets, self.seed, self.progress, kept)

    def given(self, need: str) -> Pictures:
        """A set that the measure cannot do without; checked before, see `check_needs`."""
        found: Pictures | None = getattr(self.sets, need)
        assert found is not None
        return found


Measure = Callable[[Scorer, Extractor], MetricResult]


@dataclass(frozen=True)
class Metric:
    """A measure: the role of its extractor, the sets it needs besides the pictures, and what it is."""

    role: str
    better: str
    measure: Measure
    about: str
    needs: tuple[str, ...] = ()
    reads_text: bool = False
    same_pictures: bool = False
    """Whether the compared pictures are held against the pictures one by one: the extractor must be new to
    them."""


# ---- over a reference


def fid(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """Frechet distance of two sets' features (Heusel et al. 2017), with its bias by sample size."""
    x_ND, y_MD = _both(scorer, extractor)
    interval = frechet_interval(x_ND, y_MD, seed=scorer.seed)
    settings = {"resamples": _frechet_resamples(x_ND, y_MD)}
    return MetricResult(
        interval, scorer.sets.pictures, scorer.sets.reference, _size_note(x_ND, y_MD), settings
    )


def _fid_infinity(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """The Frechet distance extrapolated to endless samples (Chong & Forsyth 2020)."""
    x_ND, y_MD = _both(scorer, extractor)
    interval, line = frechet_infinity_interval(x_ND, y_MD, seed=scorer.seed)
    notes = []
    if line.value < 0:
        notes.append(f"the line lands at {line.value:.4g}, which no distance is: 0 is written")
    if interval.low <= 0:
        notes.append("indistinguishable from 0")
    if min(len(x_ND), len(y_MD)) <= 2 * x_ND.shape[1]:
        notes.append(f"fewer than twice {x_ND.shape[1]} pictures: the bias is no straight line yet")
    if shared := _in_both(x_ND, y_MD):
        notes.append(f"{shared} pictures are in both sets, and extrapolating takes them to be different ones")
    settings = {"r_squared": round(line.fit, 4), "line_at_zero": round(line.value, 6)}
    return MetricResult(interval, scorer.sets.pictures, scorer.sets.reference, "; ".join(notes), settings)


def _in_both(x_ND: Array, y_MD: Array) -> int:
    """Pictures of the first set whose very features the second has."""
    known = {row.tobytes() for row in y_MD}
    return sum(row.tobytes() in known for row in x_ND)


def kid(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """Kernel distance, unbiased (Binkowski et al. 2018)."""
    x_ND, y_MD = _both(scorer, extractor)
    blocks = max(len(x_ND), len(y_MD)) > LARGEST_KERNEL
    notes = [f"mean and spread of {statistics.BLOCKS} blocks of {statistics.BLOCK_SIZE}"] if blocks else []
    interval = kid_interval(x_ND, y_MD, seed=scorer.seed)
    notes += _kernel_notes(interval, x_ND, y_MD)
    return MetricResult(interval, scorer.sets.pictures, scorer.sets.reference, "; ".join(notes))


def cmmd(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """Maximum mean discrepancy of CLIP features (Jayasumana et al. 2024)."""
    x_ND, y_MD = _both(scorer, extractor)
    cut = max(len(x_ND), len(y_MD)) > LARGEST_KERNEL
    notes = [f"of {LARGEST_KERNEL} random pictures a set"] if cut else []
    interval = cmmd_interval(x_ND, y_MD, seed=scorer.seed)
    notes += _kernel_notes(interval, x_ND, y_MD)
    return MetricResult(interval, scorer.sets.pictures, scorer.sets.reference, "; ".join(notes))


def _kernel_notes(interval: Interval, x_ND: Array, y_MD: Array) -> list[str]:
    """What an unbiased distance does not say by itself: it may lie below zero, where no distance is."""
    if shared := _in_both(x_ND, y_MD):
        return [f"{shared} pictures are in both sets, and counted as different ones: the value is too low"]
    return ["indistinguishable from 0"] if interval.low <= 0 else []


def _both(scorer: Scorer, extractor: Extractor) -> tuple[Array, Array]:
    x_ND = scorer.features(extractor, scorer.sets.pictures)
    return x_ND, scorer.features(extractor, scorer.given("reference"))


def _size_note(x_ND: Array, y_MD: Array) -> str:
    """What a Frechet distance of so few pictures is worth; empty where there are enough."""
    least, width = min(len(x_ND), len(y_MD)), x_ND.shape[1]
    parts = []
    if least <= width:
        parts.append(f"no more pictures than the {width} numbers of a feature: the covariance lacks rank")
    if least < FULL_RANK:
        parts.append(f"{least} pictures are under {FULL_RANK:,}: biased upwards, compare at equal n alone")
    elif least < FAIR_SIZE:
        parts.append(f"{least:,} pictures are under {FAIR_SIZE:,}: still biased upwards")
    return "; ".join(parts)


# ---- of prompts


def _text_fidelity(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """Mean cosine of each picture with its prompt."""
    values_N = _with_prompts(scorer, extractor)
    interval = mean_interval(values_N, scorer.sets.prompts, seed=scorer.seed)
    return MetricResult(interval, scorer.sets.pictures)


def _clip_score(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """A hundred times that cosine, not below zero."""
    values_N = 100 * np.clip(_with_prompts(scorer, extractor), 0, None)
    interval = mean_interval(values_N, scorer.sets.prompts, seed=scorer.seed)
    return MetricResult(interval, scorer.sets.pictures)


def _with_prompts(scorer: Scorer, extractor: Extractor) -> Array:
    prompts = scorer.sets.prompts
    distinct = list(dict.fromkeys(prompts))
    texts = extractor.texts(distinct)
    place = {prompt: i for i, prompt in enumerate(distinct)}
    pictures_ND = scorer.features(extractor, scorer.sets.pictures)
    return statistics.cosine_of_pairs(pictures_ND, texts[[place[prompt] for prompt in prompts]])


def _diversity(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """Mean perceptual distance between pictures of the same prompt."""
    by_prompt: dict[str, list[int]] = {}
    for i, prompt in enumerate(scorer.sets.prompts):
        by_prompt.setdefault(prompt, []).append(i)
    several = [indices for indices in by_prompt.values() if len(indices) > 1]
    if not several:
        raise InputError("div compares pictures of one prompt, and each has one", mend="raise --num")
    files = scorer.sets.pictures.files
    distances = []
    for indices in several:
        group = FolderPictures(scorer.sets.pictures.name, tuple(files[i] for i in indices))
        distances.append(extractor.distance(list(images(group))))
    note = f"1 - cosine of feature maps, over {len(several)} prompts; LPIPS without its learned weights"
    return MetricResult(mean_interval(np.array(distances), seed=scorer.seed), scorer.sets.pictures, note=note)


# ---- of a subject


def subject_fidelity(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """Mean cosine of each picture with the subject's photographs."""
    subject = scorer.given("subject")
    photographs_MD = scorer.features(extractor, subject)
    values_N = statistics.cosine_to_set(scorer.features(extractor, scorer.sets.pictures), photographs_MD)
    interval = mean_interval(values_N, scorer.sets.prompts or None, seed=scorer.seed)
    own = statistics.mean_cosine_within(photographs_MD) if len(photographs_MD) > 1 else None
    settings = {} if own is None else {"photographs_with_each_other": round(own, 6)}
    return MetricResult(interval, scorer.sets.pictures, subject, settings=settings)


def _prior_collapse(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """Mean cosine of pictures of the plain class with the subject's photographs."""
    pictures, subject = scorer.given("class_pictures"), scorer.given("subject")
    values_N = statistics.cosine_to_set(
        scorer.features(extractor, pictures), scorer.features(extractor, subject)
    )
    return MetricResult(mean_interval(values_N, seed=scorer.seed), pictures, subject)


def drift(scorer: Scorer, extractor: Extractor) -> MetricResult:
    """1 - cosine between the tuned and the base model's picture of the plain class, of the same seed."""
    pictures, base = scorer.given("class_pictures"), scorer.given("base_pictures")
    cosines_N = statistics.cosine_of_pairs(
        scorer.features(extractor, pictures), scorer.features(extractor, base)
    )
    moved_N = np.clip(1 - cosines_N, 0, None)  # equal pictures may differ from 1 by rounding
    return MetricResult(mean_interval(moved_N, seed=scorer.seed), pictures, base)


METRICS: dict[str, Metric] = {
    "fid": Metric("inception", "lower", fid, "Frechet distance to the reference", ("reference",)),
    "fid-infinity": Metric(
        "inception", "lower", _fid_infinity, "the same extrapolated to endlessly many", ("reference",)
    ),
    "kid": Metric("inception", "lower", kid, "kernel distance to the reference", ("reference",)),
    "cmmd": Metric("clip", "lower", cmmd, "Gaussian kernel distance of CLIP embeddings", ("reference",)),
    "clip": Metric("clip", "higher", _clip_score, "CLIP score, 0 to 100", reads_text=True),
    "clip-t": Metric("clip", "higher", _text_fidelity, "prompt fidelity", reads_text=True),
    "coca": Metric("coca", "higher", _text_fidelity, "prompt fidelity by CoCa", reads_text=True),
    "dino": Metric("dino", "higher", subject_fidelity, "subject fidelity", ("subject",), same_pictures=True),
    "clip-i": Metric(
        "clip", "higher", subject_fidelity, "subject fidelity by CLIP", ("subject",), same_pictures=True
    ),
    "pres": Metric(
        "dino",
        "lower",
        _prior_collapse,
        "the plain class taken for the subject",
        ("subject", "class_pictures"),
        same_pictures=True,
    ),
    "div": Metric("dino", "higher", _diversity, "difference between pictures of one prompt"),
    "drift": Metric(
        "dino",
        "lower",
        drift,
        "how far the plain class moved from the base model",
        ("class_pictures", "base_pictures"),
    ),
}

NEEDED = {
    "reference": "--reference STORE_OR_FOLDER",
    "subject": "--subject FOLDER",
    "class_pictures": "--class-word WORD and a model to draw with",
    "base_pictures": "--base MODEL",
}


def chosen(names: Sequence[str]) -> list[str]:
    """Names of measures, checked and each once; InputError for an unknown one."""
    if not names:
        raise InputError("no metric", allowed=", ".join(METRICS))
    for name in names:
        if name not in METRICS:
            raise InputError(f"metric '{name}'", allowed=", ".join(METRICS))
    return list(dict.fromkeys(names))


def check_needs(names: Sequence[str], there: Mapping[str, bool]) -> None:
    """InputError unless everything that the measures need is there."""
    for name in names:
        for need in METRICS[name].needs:
            if not there.get(need):
                raise InputError(f"metric '{name}' has nothing to compare with", mend=f"add {NEEDED[need]}")
