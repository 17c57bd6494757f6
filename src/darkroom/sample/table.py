"""`Table`: a solver written out as numbers, one row for each call of the U-Net.

The one-evaluation solvers are linear in the state and a short history. With x the latents before a step
and out what the U-Net gives, a step is

    x0 = k_x * x + k_out * out                     (epsilon, v and sample prediction alike)
    x' = sum_j c_j * h_j + c_clipped * clamp(x0) + c_noise * noise

where h = (x, x0, x_1, x0_1, x_2, x0_2, x_3, x0_3) holds this step's pair and up to three earlier ones.
Tables are computed in float64 and stored in float32.

Shapes: S steps (calls of the U-Net), K columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from darkroom.sample.schedule import Array

MAX_EARLIER = 3
NUM_TERMS = 2 * (1 + MAX_EARLIER)

# The columns of a table.
SCALE, TIMESTEP, K_X, K_OUT, NOISE, CLIPPED, CLIP_RANGE, TERMS = range(8)
NUM_COLUMNS = TERMS + NUM_TERMS


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """One way of denoising, as numbers. Read-only; any number of pictures share one table."""

    solver: str
    num_steps: int
    """The steps asked for; PNDM calls the U-Net once more."""
    values_SK: NDArray[np.float32]
    draws_S: tuple[bool, ...]
    """Whether a step draws noise from the generator (also where its weight is zero, as diffusers does)."""
    initial_scale: float
    """What standard normal noise is multiplied by to give the first latents."""
    notes: tuple[str, ...] = ()
    spacing: str = ""
    karras: bool = False
    levels_S2: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 2), np.float32))
    """What x is made of before each call: how much of the picture, how much of the noise."""
    earlier: int = field(init=False)
    """How many earlier (x, x0) pairs the steps look back at: 0 to 3."""

    def __post_init__(self) -> None:
        used = np.flatnonzero(np.abs(self.values_SK[:, TERMS + 2 :]).sum(axis=0))
        object.__setattr__(self, "earlier", int(used.max()) // 2 + 1 if len(used) else 0)

    def __len__(self) -> int:
        return len(self.draws_S)

    def begun_at(self, start: int) -> Table:
        """The same steps without the first `start` of them."""
        return replace(
            self,
            values_SK=self.values_SK[start:],
            draws_S=self.draws_S[start:],
            levels_S2=self.levels_S2[start:],
        )

    @property
    def timesteps(self) -> list[float]:
        """The timestep given to the U-Net at each call."""
        return [float(t) for t in self.values_SK[:, TIMESTEP]]


class Sheet:
    """A table being filled in, in float64: `columns` [S, K]; scale 1 and no clipping unless set."""

    def __init__(self, timesteps: Array) -> None:
        self.columns = np.zeros((len(timesteps), NUM_COLUMNS))
        self.columns[:, SCALE] = 1.0
        self.columns[:, TIMESTEP] = timesteps
        self.columns[:, CLIP_RANGE] = np.inf
        self.levels = np.zeros((len(timesteps), 2))

    def predict(self, prediction: str, alpha: Array, sigma: Array) -> None:
        """Set x0 = k_x * x + k_out * out for x = alpha * x0 + sigma * noise."""
        self.levels[:, 0], self.levels[:, 1] = alpha, sigma
        if prediction == "epsilon":
            k_x, k_out = 1 / alpha, -sigma / alpha
        elif prediction == "sample":
            k_x, k_out = np.zeros_like(alpha), np.ones_like(alpha)
        elif prediction == "flow_prediction":  # noise - picture
            k_x, k_out = 1 / (alpha + sigma), -sigma / (alpha + sigma)
        else:
            norm = np.sqrt(alpha**2 + sigma**2)
            k_x, k_out = alpha / norm**2, -sigma / norm
        self.columns[:, K_X], self.columns[:, K_OUT] = k_x, k_out

    def term(self, j: int) -> Array:
        """The coefficients of h_j, one a step; a view to write to."""
        column: Array = self.columns[:, TERMS + j]
        return column

    def finish(
        self,
        solver: str,
        num_steps: int,
        *,
        draws: list[bool] | bool = False,
        initial_scale: float = 1.0,
        notes: tuple[str, ...] = (),
    ) -> Table:
        """Round to float32 and hand out the table."""
        count = len(self.columns)
        return Table(
            solver,
            num_steps,
            self.columns.astype(np.float32),
            tuple(draws) if isinstance(draws, list) else (draws,) * count,
            float(initial_scale),
            notes,
            levels_S2=self.levels.astype(np.float32),
        )
