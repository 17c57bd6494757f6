"""Draws depend on seed, epoch, row and purpose, and on nothing else."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy import stats

from darkroom.data.draws import Purpose, mix, noise, normal, uniform


def rows(count: int, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.full(count, epoch, dtype=np.int64), np.arange(count, dtype=np.int64)


def test_a_row_draws_the_same_in_any_batch() -> None:
    epochs, positions = rows(64)
    whole = noise(7, epochs, positions, (4, 8, 8))
    some = np.array([50, 3, 17])
    assert np.array_equal(noise(7, epochs[some], positions[some], (4, 8, 8)), whole[some])
    whole_u = uniform(7, epochs, positions, Purpose.TIMESTEP)
    assert np.array_equal(uniform(7, epochs[some], positions[some], Purpose.TIMESTEP), whole_u[some])


@pytest.mark.parametrize("other", ["seed", "epoch", "row", "purpose"])
def test_each_part_of_the_key_changes_the_draw(other: str) -> None:
    epochs, positions = rows(200)
    at = {"seed": 1, "epochs_B": epochs, "positions_B": positions}
    changed = {
        "seed": at | {"seed": 2},
        "epoch": at | {"epochs_B": epochs + 1},
        "row": at | {"positions_B": positions + 200},
        "purpose": at,
    }[other]
    purpose = Purpose.POSTERIOR if other == "purpose" else Purpose.NOISE
    first, second = normal(**at, shape=(64,)).ravel(), normal(**changed, shape=(64,), purpose=purpose).ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    u = uniform(**at, purpose=Purpose.FLIP)
    v = uniform(**changed, purpose=Purpose.DROPOUT if other == "purpose" else Purpose.FLIP)
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.25
    assert (u != v).all()


def test_distributions() -> None:
    epochs, positions = rows(20_000)
    assert stats.kstest(uniform(0, epochs, positions, Purpose.CROP_X), "uniform").pvalue > 0.001
    drawn = noise(0, epochs[:200], positions[:200], (256,))
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 0.001
    assert drawn.mean(axis=1).std() == pytest.approx(1 / 16, rel=0.2)  # rows are independent


def test_known_values() -> None:
    """What a seed means must not drift: not with a numpy release, not with a change here."""
    epochs, positions = rows(2, epoch=3)
    assert mix(1, np.array([2]))[0] == np.uint64(KNOWN_MIX)
    assert uniform(5, epochs, positions, Purpose.TIMESTEP).tolist() == pytest.approx(KNOWN_UNIFORM, abs=1e-15)
    assert noise(5, epochs, positions, (2,)).ravel().tolist() == pytest.approx(KNOWN_NORMAL, abs=1e-7)


KNOWN_MIX = 13608149317741381227
KNOWN_UNIFORM = [0.06999945353296366, 0.6332832696910601]
KNOWN_NORMAL = [0.53340191, 0.25315905, 0.95613533, -0.35979459]


def test_negative_and_huge_keys_are_legal() -> None:
    epochs, positions = rows(4)
    for seed in (-1, 2**63, 2**64 + 5):
        assert np.isfinite(noise(seed, epochs, positions + 2**40, (3,))).all()
        assert (uniform(seed, epochs, positions, Purpose.FLIP) < 1).all()


def test_noise_of_a_small_batch_is_quick() -> None:
    """128 rows of 4x8x8: under 1.5 ms on a quiet core; the best of 50 is what the code costs."""
    epochs, positions = rows(128)
    walls = []
    for _ in range(50):
        began = time.perf_counter()
        noise(0, epochs, positions, (4, 8, 8))
        walls.append(time.perf_counter() - began)
    assert min(walls) < 1.5e-3
