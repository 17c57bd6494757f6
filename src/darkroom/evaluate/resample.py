"""Bootstrap intervals: how far a score would move with other pictures of the same kind. Seeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from darkroom.errors import InputError
from darkroom.evaluate import statistics
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


def mean_of(
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


def frechet(x_ND: Array, y_MD: Array, *, seed: int = 0, resamples: int | None = None) -> Interval:
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
        resamples or frechet_resamples(x_ND, y_MD),
        seed,
    )
    found = percentile(value, drawn - drawn.mean() + value)
    return Interval(value, max(found.low, 0.0), found.high)


def frechet_infinity(
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
    drawn = _drawn(two_points, counts, resamples or frechet_resamples(x_ND, y_MD) // 2, seed)
    error = float(np.sqrt(line.standard_error**2 + drawn.var(ddof=1)))
    low, high = line.value - NORMAL * error, line.value + NORMAL * error
    return Interval(max(line.value, 0.0), max(low, 0.0), max(high, -line.value)), line


def frechet_resamples(x_ND: Array, y_MD: Array) -> int:
    """How often a Frechet distance is taken anew: less often where one takes seconds."""
    slow = min(len(x_ND), len(y_MD), x_ND.shape[1]) > SLOW_SIDE
    return SLOW_RESAMPLES if slow else FRECHET_RESAMPLES


def _drawn(
    score: Callable[[np.ndarray, np.ndarray], float], counts: tuple[int, int], resamples: int, seed: int
) -> Array:
    draws = np.random.default_rng(seed)
    return np.array([score(*(draws.integers(0, count, count) for count in counts)) for _ in range(resamples)])


def kernel(
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


def kid(x_ND: Array, y_MD: Array, *, seed: int = 0) -> Interval:
    """KID of whole sets with bootstrap; of sets too large for that, the mean and spread of random blocks."""
    if max(len(x_ND), len(y_MD)) <= LARGEST_KERNEL:
        return kernel(statistics.kernels_for_kid(x_ND, y_MD), seed=seed)
    blocks = statistics.kid_blocks(x_ND, y_MD, seed=seed)
    return percentile(float(blocks.mean()), blocks)


def cmmd(x_ND: Array, y_MD: Array, *, seed: int = 0) -> Interval:
    """CMMD with bootstrap; of sets too large for that, of as many random pictures as can be compared."""
    draws = np.random.default_rng(seed)
    x_ND, y_MD = (
        side if len(side) <= LARGEST_KERNEL else side[draws.choice(len(side), LARGEST_KERNEL, replace=False)]
        for side in (x_ND, y_MD)
    )
    kernels = statistics.kernels_for_cmmd(x_ND, y_MD)
    return kernel(kernels, scale=statistics.CMMD_SCALE, seed=seed)
