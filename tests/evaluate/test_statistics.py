"""Distances against closed forms, scipy and plain loops; intervals against repeated draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import linalg

from darkroom.errors import InputError
from darkroom.evaluate import metrics, statistics
from darkroom.evaluate.statistics import Moments


def gaussian(count, mean, root, seed):
    draws = np.random.default_rng(seed)
    return draws.standard_normal((count, len(root))) @ root.T + mean


def two_gaussians(width=6, seed=0):
    draws = np.random.default_rng(seed)
    roots = [draws.standard_normal((width, width)) / np.sqrt(width) + np.eye(width) for _ in range(2)]
    return draws.standard_normal(width), roots[0], draws.standard_normal(width), roots[1]


def closed_frechet(mean_a, cov_a, mean_b, cov_b):
    """With scipy's matrix root, as the definition has it."""
    root = linalg.sqrtm(cov_a @ cov_b).real
    return float(np.square(mean_a - mean_b).sum() + np.trace(cov_a + cov_b - 2 * root))


def test_frechet_is_that_of_the_definition_with_scipys_matrix_root():
    mean_a, root_a, mean_b, root_b = two_gaussians()
    a, b = Moments(1001, mean_a, 1000 * root_a @ root_a.T), Moments(501, mean_b, 500 * root_b @ root_b.T)
    expected = closed_frechet(mean_a, root_a @ root_a.T, mean_b, root_b @ root_b.T)
    assert statistics.frechet(a, b) == pytest.approx(expected, rel=1e-10)
    assert statistics.frechet(b, a) == pytest.approx(expected, rel=1e-10)
    moved = Moments(501, mean_b + 1, b.scatter_DD)
    assert abs(statistics.frechet(a, moved) - expected) > 0.1


def test_frechet_of_diagonal_gaussians_has_a_closed_form():
    spread_a, spread_b, apart = (
        np.array([1.0, 2.0, 0.5]),
        np.array([3.0, 2.0, 0.1]),
        np.array([1.0, 0.0, -2.0]),
    )
    a = Moments(2, np.zeros(3), np.diag(spread_a**2))
    b = Moments(2, apart, np.diag(spread_b**2))
    expected = float((apart**2).sum() + ((spread_a - spread_b) ** 2).sum())
    assert statistics.frechet(a, b) == pytest.approx(expected, abs=1e-12)


def test_frechet_stays_exact_where_the_covariance_lacks_rank():
    x, y = (np.random.default_rng(s).standard_normal((20, 64)) + s for s in (0, 1))
    by_moments = statistics.frechet(Moments.of(x), Moments.of(y))
    assert statistics.frechet_of(x, y) == pytest.approx(by_moments, rel=1e-6)
    assert statistics.frechet_of(x, x) == pytest.approx(0, abs=1e-6)
    assert statistics.frechet_of(x, x + 0.5) == pytest.approx(64 * 0.25, rel=1e-9)


def test_moments_join_exactly_in_any_parts():
    x = np.random.default_rng(3).standard_normal((101, 5)) * 7 + 1e4
    whole = Moments.of(x)
    streamed = Moments.stream(iter(np.array_split(x, [1, 2, 40, 77])))
    assert streamed.count == whole.count == 101
    np.testing.assert_allclose(streamed.mean_D, x.mean(0), rtol=1e-14)
    np.testing.assert_allclose(streamed.covariance, np.cov(x.T), rtol=1e-9)
    wrong = Moments.of(x[:100])
    assert np.abs(wrong.covariance - np.cov(x.T)).max() > 1e-3
    with pytest.raises(InputError, match="no features"):
        Moments.stream(iter([]))


def test_fid_grows_with_noise_and_is_zero_for_the_same_set():
    x = np.random.default_rng(0).standard_normal((400, 8))
    noise = np.random.default_rng(1).standard_normal((400, 8))
    found = [statistics.frechet_of(x, x + share * noise) for share in (0.0, 0.3, 1.0, 3.0)]
    assert found[0] == pytest.approx(0, abs=1e-9)
    assert found == sorted(found)
    assert found[3] > 10 * found[1]


def test_the_extrapolated_distance_is_nearer_to_the_truth():
    mean_a, root_a, mean_b, root_b = two_gaussians(width=16, seed=4)
    truth = closed_frechet(mean_a, root_a @ root_a.T, mean_b, root_b @ root_b.T)
    x, y = gaussian(300, mean_a, root_a, 5), gaussian(300, mean_b, root_b, 6)
    near_x, near_y = gaussian(300, mean_a, root_a, 7), gaussian(300, mean_a, root_a, 8)
    assert statistics.frechet_infinity(x, y).value == pytest.approx(truth, rel=0.15)
    plain, extrapolated = statistics.frechet_of(near_x, near_y), statistics.frechet_infinity(near_x, near_y)
    assert plain > 0.3  # the truth is 0: bias alone
    assert abs(extrapolated.value) < plain / 2
    assert abs(extrapolated.value) < 1.96 * extrapolated.standard_error


def test_the_interval_of_fid_infinity_holds_the_truth_as_often_as_it_says():
    """The line's own error alone misses it a quarter of the time: it knows nothing of the draw."""
    draws = np.random.default_rng(4)
    truth, held, by_line, values, widths = 8 * 0.3**2, 0, 0, [], []
    for seed in range(30):
        x, y = draws.standard_normal((120, 8)), draws.standard_normal((120, 8)) + 0.3
        interval, line = metrics.frechet_infinity_interval(x, y, seed=seed, resamples=20)
        held += interval.low <= truth <= interval.high
        by_line += abs(line.value - truth) <= 1.96 * line.standard_error
        values.append(interval.value)
        widths.append(interval.high - interval.low)
    assert held >= 27
    assert by_line <= 25
    assert np.mean(widths) < 2 * (2 * 1.96 * np.std(values))


@pytest.mark.parametrize("count", [40, 6])
def test_the_distance_of_a_set_to_itself_is_zero_and_not_what_rounding_leaves(count):
    """Of more pictures than numbers and of fewer; 2.2e-16 was told, as if it were measured."""
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal((count, 8)) + 3
        assert statistics.frechet_of(x, x) == 0.0
        assert statistics.frechet_of(x, x[::-1]) == 0.0
        assert statistics.frechet_of(x, x + 1e-5) == pytest.approx(8e-10, rel=1e-4)


def kid_by_loops(x, y):
    def k(a, b):
        return (a @ b / len(a) + 1) ** 3

    xx = np.mean([k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    yy = np.mean([k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    return xx + yy - 2 * np.mean([k(a, b) for a in x for b in y])


def test_kid_is_the_unbiased_estimate_written_out():
    draws = np.random.default_rng(2)
    x, y = draws.standard_normal((12, 5)), draws.standard_normal((9, 5)) + 1
    assert statistics.kid(x, y) == pytest.approx(kid_by_loops(x, y), rel=1e-12)
    assert abs(statistics.kid(x, y + 0.1) - kid_by_loops(x, y)) > 1e-3


def test_kid_has_no_bias_of_small_samples():
    draws = np.random.default_rng(0)
    found = [
        statistics.kid(draws.standard_normal((20, 4)), draws.standard_normal((20, 4))) for _ in range(400)
    ]
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(400)
    biased = [value + 2 * (2.0**3) / 20 for value in found]  # what pairs with oneself would add, about
    assert abs(np.mean(biased)) > 3 * np.std(found) / np.sqrt(400)


def test_blocks_of_kid_agree_with_the_whole():
    x = np.random.default_rng(0).standard_normal((600, 6))
    y = np.random.default_rng(1).standard_normal((600, 6)) + 0.5
    blocks = statistics.kid_blocks(x, y, blocks=40, size=100)
    assert blocks.mean() == pytest.approx(statistics.kid(x, y), rel=0.1)
    assert 0 < blocks.std() < blocks.mean()


def test_cmmd_is_the_gaussian_mmd_of_unit_vectors():
    draws = np.random.default_rng(2)
    x, y = draws.standard_normal((15, 8)), draws.standard_normal((11, 8)) + 1

    def k(a, b):
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        return np.exp(-np.square(a - b).sum() / 200)

    xx = np.mean([k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    yy = np.mean([k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    expected = 1000 * (xx + yy - 2 * np.mean([k(a, b) for a in x for b in y]))
    assert statistics.cmmd(x, y) == pytest.approx(expected, rel=1e-9)
    assert statistics.cmmd(3 * x, y) == pytest.approx(expected, rel=1e-9)
    assert abs(statistics.cmmd(x, y + 1) - expected) > 0.1


def test_cosines_are_those_of_all_pairs():
    draws = np.random.default_rng(5)
    x, y = draws.standard_normal((7, 4)), draws.standard_normal((5, 4))
    unit_x, unit_y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y))
    np.testing.assert_allclose(statistics.cosine_to_set(x, y), (unit_x @ unit_y.T).mean(1))
    np.testing.assert_allclose(statistics.cosine_of_pairs(x[:5], y), (unit_x[:5] * unit_y).sum(1))
    pairs = [unit_x[i] @ unit_x[j] for i in range(7) for j in range(7) if i != j]
    assert statistics.mean_cosine_within(x) == pytest.approx(np.mean(pairs))


def test_what_cannot_be_compared_is_refused():
    x = np.zeros((4, 3))
    with pytest.raises(InputError, match="no direction"):
        statistics.unit(x)
    with pytest.raises(InputError, match="not finite"):
        statistics.as_features(np.full((2, 2), np.nan))
    with pytest.raises(InputError, match="allowed: 2 or more"):
        statistics.kid(x[:1], x)
    with pytest.raises(InputError, match="cannot be compared"):
        statistics.frechet(Moments.of(np.eye(3)), Moments.of(np.eye(4)))


# ---- intervals


def test_a_means_interval_is_as_wide_as_repeated_draws_say():
    values = np.random.default_rng(0).normal(2.0, 1.0, 400)
    found = metrics.mean_interval(values, seed=1)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.15)
    assert metrics.mean_interval(values, seed=1) == found
    assert metrics.mean_interval(values, seed=2) != found


def test_pictures_of_one_prompt_count_as_alike():
    groups = [prompt for prompt in range(20) for _ in range(50)]
    values = np.random.default_rng(0).normal(size=20)[groups] + 0.01 * np.random.default_rng(1).normal(
        size=1000
    )
    together, apart = metrics.mean_interval(values, groups), metrics.mean_interval(values)
    assert together.high - together.low > 4 * (apart.high - apart.low)


def test_a_single_value_has_no_interval():
    found = metrics.mean_interval(np.array([0.5]))
    assert found.value == 0.5
    assert np.isnan([found.low, found.high]).all()


INTERVALS = {
    "frechet": metrics.frechet_interval,
    "kid": metrics.kid_interval,
    "cmmd": metrics.cmmd_interval,
}


@pytest.mark.parametrize("score", INTERVALS)
def test_distances_lie_in_their_interval_which_is_as_wide_as_their_spread(score):
    mean_a, root_a, mean_b, root_b = two_gaussians(width=4, seed=1)
    taken = {"frechet": statistics.frechet_of, "kid": statistics.kid, "cmmd": statistics.cmmd}[score]
    sets = [(gaussian(150, mean_a, root_a, s), gaussian(150, mean_b, root_b, 1000 + s)) for s in range(60)]
    repeated = np.array([taken(x, y) for x, y in sets])
    found = [INTERVALS[score](x, y, seed=s) for s, (x, y) in enumerate(sets[:8])]
    width = np.mean([interval.high - interval.low for interval in found])
    assert all(interval.low < interval.value < interval.high for interval in found)
    assert width == pytest.approx(2 * 1.96 * repeated.std(), rel=0.35)


@pytest.mark.parametrize("score", INTERVALS)
def test_a_set_of_two_pictures_has_no_interval(score):
    """All resamples of two that can be scored are the two: the interval would have no width."""
    draws = np.random.default_rng(0)
    few, many = draws.standard_normal((2, 4)), draws.standard_normal((20, 4))
    for x, y in ((few, few + 1), (few, many), (many, few)):
        found = INTERVALS[score](x, y)
        assert np.isfinite(found.value)
        assert np.isnan([found.low, found.high]).all()
    three = INTERVALS[score](many[:3], many)
    assert three.low < three.high
