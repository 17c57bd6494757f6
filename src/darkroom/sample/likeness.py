"""How alike two pictures are: PSNR, SSIM, NRMSE and the largest difference; LPIPS where it is installed.

Shapes: H W rows and columns, 3 colours, in levels of 0 to 255.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

Levels = NDArray[np.float64]
WINDOW, SIGMA = 11, 1.5
STABLE = ((0.01 * 255) ** 2, (0.03 * 255) ** 2)
"""What keeps SSIM's quotients finite (Wang et al. 2004: K1 0.01, K2 0.03)."""


def levels(picture: Image.Image) -> Levels:
    """A picture as [H, W, 3] levels."""
    return np.asarray(picture.convert("RGB"), dtype=np.float64)


def likeness(pictures: Sequence[Image.Image], references: Sequence[Image.Image]) -> dict[str, float]:
    """Over pairs of pictures: `psnr_db` (of the mean squared error; infinite for equal ones), means of `ssim`
    and `nrmse`, `max_diff`, the largest difference of a level, and `lpips` where that package is installed.
    """
    pairs = [(levels(a), levels(b)) for a, b in zip(pictures, references, strict=True)]
    found = {
        "psnr_db": psnr(*(np.stack(side) for side in zip(*pairs, strict=True))),
        "ssim": float(np.mean([ssim(a, b) for a, b in pairs])),
        "nrmse": float(np.mean([nrmse(a, b) for a, b in pairs])),
        "max_diff": float(max(np.abs(a - b).max() for a, b in pairs)),
    }
    network = _lpips()
    if network is not None:
        found["lpips"] = float(np.mean([_lpips_of(network, a, b) for a, b in pairs]))
    return found


def psnr(a: Levels, b: Levels) -> float:
    """Peak signal-to-noise ratio in dB; infinite for equal pictures."""
    error = float(np.mean((a - b) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def nrmse(a: Levels, reference: Levels) -> float:
    """Root mean squared error by the reference's root mean square; 0 for two black pictures."""
    size = math.sqrt(float(np.mean(reference**2)))
    error = math.sqrt(float(np.mean((a - reference) ** 2)))
    return error / size if size else (math.inf if error else 0.0)


def ssim(a: Levels, b: Levels) -> float:
    """Structural similarity (Wang et al. 2004): a Gaussian window of 11 pixels, mean over places and colours.

    Pictures smaller than the window are compared under the largest odd window that fits.
    """
    x, y = (torch.from_numpy(v).permute(2, 0, 1)[:, None] for v in (a, b))
    kernel = _window(min(WINDOW, *(side - (side + 1) % 2 for side in a.shape[:2])))

    def mean(v: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.conv2d(v, kernel.view(1, 1, -1, 1))
        return torch.nn.functional.conv2d(rows, kernel.view(1, 1, 1, -1))

    mean_x, mean_y = mean(x), mean(y)
    variance_x, variance_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    together = mean(x * y) - mean_x * mean_y
    light = (2 * mean_x * mean_y + STABLE[0]) / (mean_x**2 + mean_y**2 + STABLE[0])
    form = (2 * together + STABLE[1]) / (variance_x + variance_y + STABLE[1])
    return float((light * form).mean())


def _window(size: int) -> torch.Tensor:
    at = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    weights = torch.exp(-0.5 * (at / SIGMA) ** 2)
    return weights / weights.sum()


def difference_picture(a: Image.Image, b: Image.Image, *, gain: float = 8.0) -> Image.Image:
    """The absolute difference of two pictures, `gain` times as bright so that it can be seen."""
    return Image.fromarray(np.clip(np.abs(levels(a) - levels(b)) * gain, 0, 255).astype(np.uint8))


@cache
def _lpips() -> Any:
    """The AlexNet of Zhang et al. 2018 where the package `lpips` is installed with its weights; else None."""
    if importlib.util.find_spec("lpips") is None:
        return None
    import lpips  # type: ignore[import-not-found,unused-ignore]

    return lpips.LPIPS(net="alex", verbose=False).eval()


@torch.no_grad()
def _lpips_of(network: Any, a: Levels, b: Levels) -> float:
    x, y = (torch.from_numpy(v).float().permute(2, 0, 1)[None] / 127.5 - 1 for v in (a, b))
    return float(network(x, y).item())
