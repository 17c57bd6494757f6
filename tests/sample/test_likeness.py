"""PSNR, SSIM and NRMSE against their definitions written out another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from darkroom.sample.likeness import difference_picture, levels, likeness, nrmse, psnr, ssim


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    a = gaussian_filter(rng.uniform(0, 255, (40, 52, 3)), (2, 2, 0))
    return a, np.clip(a + rng.normal(0, 6, a.shape), 0, 255)


def test_equal_pictures(pair):
    a, _ = pair
    assert math.isinf(psnr(a, a))
    assert ssim(a, a) == pytest.approx(1)
    assert nrmse(a, a) == 0


def test_psnr_and_nrmse_of_a_known_error():
    a = np.full((8, 8, 3), 100.0)
    assert psnr(a + 5, a) == pytest.approx(20 * math.log10(255 / 5))
    assert nrmse(a + 5, a) == pytest.approx(0.05)


def test_ssim_against_scipy_s_gaussian(pair):
    a, b = pair

    def mean(v):
        return gaussian_filter(v, 1.5, truncate=5 / 1.5)[5:-5, 5:-5]

    values = []
    for c in range(3):
        x, y = a[..., c], b[..., c]
        mx, my = mean(x), mean(y)
        vx, vy, cov = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        values.append(
            (((2 * mx * my + c1) * (2 * cov + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean()
        )
    assert ssim(a, b) == pytest.approx(np.mean(values), abs=1e-6)
    assert 0 < ssim(a, b) < 0.99


def test_pictures_smaller_than_the_window():
    a = np.random.default_rng(1).uniform(0, 255, (6, 8, 3))
    assert ssim(a, a) == pytest.approx(1)
    assert ssim(a, 255 - a) < 0.5


def test_likeness_of_pictures_and_what_differs():
    a = Image.new("RGB", (16, 16), (10, 20, 30))
    b = Image.new("RGB", (16, 16), (10, 20, 33))
    found = likeness([a, a], [a, b])
    assert found["max_diff"] == 3
    assert found["psnr_db"] == pytest.approx(10 * math.log10(255**2 / (9 / 6)))
    assert levels(difference_picture(a, b, gain=8))[0, 0].tolist() == [0, 0, 24]
