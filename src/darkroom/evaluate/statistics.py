"""Distances between sets of features, in float64: Frechet, kernel, cosine, and their closed forms.

A feature is a picture's embedding; where a feature comes from is none of this file's business.

Shapes: N and M pictures of the two sets, D numbers of a feature, K of a kernel's rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darkroom.errors import InputError

Array = NDArray[np.float64]

KID_DEGREE = 3
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
BLOCKS, BLOCK_SIZE = 100, 1000
EXTRAPOLATION_POINTS = 15


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean [D] and scatter [D, D] (sum of outer products about the mean) of a set of features.

    Sets are joined exactly with `+` (Chan, Golub and LeVeque 1979), so features may come in any parts.
    """

    count: int
    mean_D: Array
    scatter_DD: Array

    @classmethod
    def of(cls, features_ND: NDArray[Any]) -> Moments:
        """The moments of features at hand; InputError for numbers that are not finite."""
        values_ND = as_features(features_ND)
        mean_D = values_ND.mean(axis=0)
        off_ND = values_ND - mean_D
        return cls(len(values_ND), mean_D, off_ND.T @ off_ND)

    @classmethod
    def stream(cls, parts: Iterable[NDArray[Any]]) -> Moments:
        """The moments of features that come in parts, one part in memory at a time."""
        total: Moments | None = None
        for part in parts:
            found = cls.of(part)
            total = found if total is None else total + found
        if total is None:
            raise InputError("no features", mend="give at least one picture")
        return total

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        apart_D = other.mean_D - self.mean_D
        mean_D = self.mean_D + apart_D * (other.count / count)
        between_DD = np.outer(apart_D, apart_D) * (self.count * other.count / count)
        return Moments(count, mean_D, self.scatter_DD + other.scatter_DD + between_DD)

    @property
    def covariance(self) -> Array:
        """The unbiased covariance; zeros for a single picture."""
        return self.scatter_DD / max(self.count - 1, 1)


def as_features(features_ND: NDArray[Any]) -> Array:
    """Features as float64 [N, D]; InputError for another shape or numbers that are not finite."""
    values_ND = np.asarray(features_ND, dtype=np.float64)
    if values_ND.ndim != 2 or not len(values_ND):
        raise InputError(f"features of shape {list(values_ND.shape)}", allowed="[pictures, numbers]")
    if not np.isfinite(values_ND).all():
        raise InputError("features that are not finite", mend="the extractor overflows: use float32")
    return values_ND


# ---- Frechet distance


def frechet(a: Moments, b: Moments) -> float:
    """Frechet distance of two Gaussians with these moments: |mean difference|^2 + tr(A + B - 2 (AB)^1/2).

    Over Inception features this is the FID (Heusel et al. 2017). tr (AB)^1/2 is taken from the eigenvalues of
    the symmetric A^1/2 B A^1/2, so that no complex root and no added constant is needed.
    """
    if a.mean_D.shape != b.mean_D.shape:
        raise InputError(f"features of {len(a.mean_D)} and {len(b.mean_D)} numbers cannot be compared")
    cov_a, cov_b = a.covariance, b.covariance
    values_D, vectors_DD = np.linalg.eigh(cov_a)
    root_DD = (vectors_DD * np.sqrt(np.clip(values_D, 0, None))) @ vectors_DD.T
    product_DD = root_DD @ cov_b @ root_DD
    shared = _sum_of_roots(np.linalg.eigvalsh((product_DD + product_DD.T) / 2))
    apart_D = a.mean_D - b.mean_D
    return _distance(apart_D, float(np.trace(cov_a) + np.trace(cov_b)), shared)


def _distance(apart_D: Array, spread: float, shared: float) -> float:
    """|mean difference|^2 + traces - 2 tr (AB)^1/2; zero where no more than float64's rounding is left."""
    squared = float(apart_D @ apart_D)
    found = squared + spread - 2 * shared
    rounding = len(apart_D) * np.finfo(np.float64).eps * (squared + spread)
    return found if found > rounding else 0.0


def _sum_of_roots(values: Array) -> float:
    """Sum of square roots of eigenvalues; what is below zero or drowned by rounding counts as zero."""
    floor = max(float(values.max(initial=0.0)), 0.0) * len(values) * np.finfo(np.float64).eps
    return float(np.sqrt(values[values > floor]).sum())


def frechet_of(x_ND: Array, y_MD: Array) -> float:
    """Frechet distance of two sets of features; the same number as `frechet`, by the cheaper way.

    With fewer pictures than numbers, tr (AB)^1/2 is the sum of singular values of X Y^T (centred, scaled).
    """
    small = min(len(x_ND), len(y_MD))
    if small >= x_ND.shape[1] or small < 2:
        return frechet(Moments.of(x_ND), Moments.of(y_MD))
    x_ND, y_MD = np.asarray(x_ND, np.float64), np.asarray(y_MD, np.float64)
    mean_x, mean_y = x_ND.mean(axis=0), y_MD.mean(axis=0)
    x_off = (x_ND - mean_x) / np.sqrt(len(x_ND) - 1)
    y_off = (y_MD - mean_y) / np.sqrt(len(y_MD) - 1)
    shared = float(np.linalg.svd(x_off @ y_off.T, compute_uv=False).sum())
    apart: Array = mean_x - mean_y
    return _distance(apart, float(np.square(x_off).sum() + np.square(y_off).sum()), shared)


@dataclass(frozen=True)
class Extrapolated:
    """FID at endlessly many pictures as the line has it, which may be below zero.

    `standard_error` is the line's alone, `fit` is R squared.
    """

    value: float
    standard_error: float
    fit: float


def frechet_infinity(x_ND: Array, y_MD: Array, *, seed: int = 0) -> Extrapolated:
    """The Frechet distance extrapolated to endlessly many pictures (Chong and Forsyth 2020).

    The estimate's bias falls as 1/N: both sets are cut to the same share, from a half to the whole, and the
    line through (1 / share, distance) is read off at zero.
    """
    if min(len(x_ND), len(y_MD)) < 8:
        raise InputError(
            f"{min(len(x_ND), len(y_MD))} pictures to extrapolate from", allowed="8 or more of each set"
        )
    draws = np.random.default_rng(seed)
    order_x, order_y = draws.permutation(len(x_ND)), draws.permutation(len(y_MD))
    at, found = [], []
    for share in np.linspace(0.5, 1.0, EXTRAPOLATION_POINTS):
        some_x, some_y = (
            draws.permutation(order)[: max(2, round(share * len(order)))] for order in (order_x, order_y)
        )
        at.append(1 / share)
        found.append(frechet_of(x_ND[some_x], y_MD[some_y]))
    return _line_at_zero(np.array(at), np.array(found))


def _line_at_zero(at: Array, found: Array) -> Extrapolated:
    design = np.stack([np.ones_like(at), at], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    line = inverse @ design.T @ found
    rest = found - design @ line
    error = np.sqrt(inverse[0, 0] * (rest @ rest) / (len(at) - 2))
    spread = np.square(found - found.mean()).sum()
    return Extrapolated(float(line[0]), float(error), float(1 - rest @ rest / spread) if spread else 1.0)


# ---- kernel distances


@dataclass(frozen=True, eq=False)
class KernelMatrices:
    """The three kernel matrices between two sets: [N, N], [M, M] and [N, M]."""

    xx_NN: Array
    yy_MM: Array
    xy_NM: Array

    def mmd(self) -> float:
        """Squared maximum mean discrepancy, unbiased (Gretton et al. 2012): no picture meets itself."""
        ones = [np.ones((1, len(kernel))) for kernel in (self.xx_NN, self.yy_MM)]
        return float(self.mmd_of(*ones)[0])

    def mmd_of(self, counts_RN: Array, counts_RM: Array) -> Array:
        """The same of R resamples [R], given by how often each picture stands in one.

        Copies of a picture do not meet either: that would be the kernel's largest value.
        """
        across_R = ((counts_RN @ self.xy_NM) * counts_RM).sum(axis=1)
        across_R = across_R / (counts_RN.sum(axis=1) * counts_RM.sum(axis=1))
        within_R = _mean_of_pairs(self.xx_NN, counts_RN) + _mean_of_pairs(self.yy_MM, counts_RM)
        return np.asarray(within_R - 2 * across_R)


def _mean_of_pairs(kernel_KK: Array, counts_RK: Array) -> Array:
    square_RK = np.square(counts_RK)
    pairs_R = counts_RK.sum(axis=1) ** 2 - square_RK.sum(axis=1)
    total_R = ((counts_RK @ kernel_KK) * counts_RK).sum(axis=1) - square_RK @ np.diag(kernel_KK)
    return np.asarray(total_R / pairs_R)


def polynomial(x_ND: Array, y_MD: Array) -> Array:
    """KID's kernel (x.y / D + 1)^3 [N, M] (Binkowski et al. 2018)."""
    return np.asarray((x_ND @ y_MD.T / x_ND.shape[1] + 1.0) ** KID_DEGREE)


def gaussian(x_ND: Array, y_MD: Array) -> Array:
    """CMMD's kernel exp(-|x - y|^2 / (2 sigma^2)) [N, M], sigma 10 (Jayasumana et al. 2024)."""
    square_NM = np.square(x_ND).sum(1)[:, None] + np.square(y_MD).sum(1)[None] - 2 * x_ND @ y_MD.T
    return np.asarray(np.exp(-np.clip(square_NM, 0, None) / (2 * CMMD_SIGMA**2)))


def kernels_for_kid(x_ND: Array, y_MD: Array) -> KernelMatrices:
    """The polynomial kernels between two sets of raw features."""
    _enough(x_ND, y_MD)
    return KernelMatrices(polynomial(x_ND, x_ND), polynomial(y_MD, y_MD), polynomial(x_ND, y_MD))


def kernels_for_cmmd(x_ND: Array, y_MD: Array) -> KernelMatrices:
    """The Gaussian kernels between two sets of embeddings, each brought to length 1."""
    _enough(x_ND, y_MD)
    x_ND, y_MD = unit(x_ND), unit(y_MD)
    return KernelMatrices(gaussian(x_ND, x_ND), gaussian(y_MD, y_MD), gaussian(x_ND, y_MD))


def _enough(x_ND: Array, y_MD: Array) -> None:
    if min(len(x_ND), len(y_MD)) < 2:
        raise InputError(f"sets of {len(x_ND)} and {len(y_MD)} pictures", allowed="2 or more in each")


def kid(x_ND: Array, y_MD: Array) -> float:
    """Kernel Inception distance: the unbiased squared MMD with the polynomial kernel, of the whole sets."""
    return kernels_for_kid(as_features(x_ND), as_features(y_MD)).mmd()


def cmmd(x_ND: Array, y_MD: Array) -> float:
    """CMMD over CLIP embeddings: a thousand times the unbiased squared MMD with the Gaussian kernel.

    The published code keeps the pairs of a picture with itself: about 5 / N more at N pictures, nothing at
    the 30,000 it is used with.
    """
    return CMMD_SCALE * kernels_for_cmmd(as_features(x_ND), as_features(y_MD)).mmd()


def kid_blocks(
    x_ND: Array, y_MD: Array, *, blocks: int = BLOCKS, size: int = BLOCK_SIZE, seed: int = 0
) -> Array:
    """KID of `blocks` random parts of `size` pictures of each set, as it is published for large sets."""
    draws = np.random.default_rng(seed)
    size = min(size, len(x_ND), len(y_MD))
    return np.array(
        [
            kid(
                x_ND[draws.choice(len(x_ND), size, replace=False)],
                y_MD[draws.choice(len(y_MD), size, replace=False)],
            )
            for _ in range(blocks)
        ]
    )


# ---- cosine similarities


def unit(features_ND: NDArray[Any]) -> Array:
    """Features of length 1; InputError for one that is zero throughout."""
    values_ND = as_features(features_ND)
    length_N = np.linalg.norm(values_ND, axis=1, keepdims=True)
    if not length_N.all():
        raise InputError("a feature of zeros has no direction", mend="try another extractor")
    return np.asarray(values_ND / length_N)


def cosine_to_set(x_ND: Array, y_MD: Array) -> Array:
    """Of each picture [N], the mean cosine with all pictures of the other set."""
    return np.asarray(unit(x_ND) @ unit(y_MD).mean(axis=0))


def cosine_of_pairs(x_ND: Array, y_ND: Array) -> Array:
    """Of each pair of rows [N], the cosine."""
    if len(x_ND) != len(y_ND):
        raise InputError(f"{len(x_ND)} and {len(y_ND)} rows are no pairs")
    return np.asarray((unit(x_ND) * unit(y_ND)).sum(axis=1))


def mean_cosine_within(x_ND: Array) -> float:
    """Mean cosine over all pairs of different pictures of one set."""
    rows_ND = unit(x_ND)
    count = len(rows_ND)
    if count < 2:
        raise InputError("one picture has no pairs", allowed="2 or more")
    total = np.square(rows_ND.sum(axis=0)).sum() - count
    return float(total / (count * (count - 1)))
