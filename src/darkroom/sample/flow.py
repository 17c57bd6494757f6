"""Solvers of rectified flow: x = (1 - sigma) * picture + sigma * noise, and out is noise - picture.

The noise levels of `linspace` are diffusers' own: evenly spaced from 1 to the first training level, shifted.
That first level is shifted already, so with a shift the last step before the picture is shifted twice (a
shift of 3 ends at sigma 0.009, not 0.003). `trailing` takes whole strides of the timesteps and shifts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from darkroom.errors import InputError
from darkroom.sample.schedule import Array, Schedule
from darkroom.sample.solvers import Levels, Plan, dpmpp
from darkroom.sample.table import Sheet, Table

PREDICTION = "flow_prediction"
SPACINGS = ("linspace", "trailing")
# Settings that would change the levels and are not known here, with the value that leaves them alone.
UNKNOWN: dict[str, Any] = {
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "invert_sigmas": False,
    "stochastic_sampling": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
}


@dataclass(frozen=True)
class Flow(Schedule):
    """A straight line from picture to noise; `shift` moves the steps towards noise where it is above 1."""

    shift: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Flow:
        """Read a FlowMatch scheduler's configuration, or another's with use_flow_sigmas."""
        for key, harmless in UNKNOWN.items():
            if (given := config.get(key, harmless)) != harmless:
                raise InputError(f"the model's scheduler sets {key} to {given}", allowed=str(harmless))
        prediction = config.get("prediction_type", PREDICTION)
        if prediction != PREDICTION:
            raise InputError(f"prediction_type '{prediction}' with rectified flow", allowed=PREDICTION)
        shift = float(config.get("shift", config.get("flow_shift", 1.0)))
        if not shift > 0:
            raise InputError(f"the model's scheduler sets shift to {shift:g}", allowed="above 0")
        count = int(config.get("num_train_timesteps", 1000))
        sigmas = np.arange(1, count + 1) / count
        signal = (1 - sigmas) ** 2
        return cls(signal / (signal + sigmas**2), PREDICTION, zero_terminal_snr=True, shift=shift)

    def shifted(self, sigmas: Array) -> Array:
        """Levels moved as a larger picture needs them (Esser et al. 2024, equation 23)."""
        return self.shift * sigmas / (1 + (self.shift - 1) * sigmas)

    def levels(self, num_steps: int, spacing: str) -> Array:
        """Falling sigmas [S + 1] of Euler and Heun, from 1 to 0."""
        if spacing == "trailing":
            return self.shifted(np.linspace(1, 0, num_steps + 1))
        first = self.shifted(np.array([1 / self.num_train_timesteps]))[0]
        return np.append(self.shifted(np.linspace(1, first, num_steps)), 0.0)


def flow_of(plan: Plan) -> Flow:
    """The schedule of a plan for a flow solver."""
    assert isinstance(plan.schedule, Flow)
    return plan.schedule


def flow_euler(plan: Plan) -> Table:
    """Euler steps along the predicted velocity (Liu et al. 2023, rectified flow)."""
    flow = flow_of(plan)
    sigma = flow.levels(plan.num_steps, plan.spacing)
    sheet = _sheet(flow, sigma[:-1])
    ratio = sigma[1:] / sigma[:-1]
    sheet.term(0)[:], sheet.term(1)[:] = ratio, 1 - ratio
    return sheet.finish("flow_euler", plan.num_steps, notes=plan.notes)


def flow_heun(plan: Plan) -> Table:
    """Heun steps (Karras et al. 2022, algorithm 1) along the velocity: two calls each, the last step one.

    Call 2i leaves level i by Euler; call 2i - 1 takes the step that came there again, with the mean of the
    velocities at both its ends.
    """
    flow = flow_of(plan)
    sigma = flow.levels(plan.num_steps, plan.spacing)
    at = (np.arange(2 * plan.num_steps - 1) + 1) // 2
    sheet = _sheet(flow, sigma[at])
    euler, again = slice(0, None, 2), slice(1, None, 2)
    ratio = sigma[1:] / sigma[:-1]
    sheet.term(0)[euler], sheet.term(1)[euler] = ratio, 1 - ratio
    start, end = sigma[:-2], sigma[1:-1]
    half = (end - start) / 2
    sheet.term(0)[again], sheet.term(1)[again] = half / end, -half / end
    sheet.term(2)[again], sheet.term(3)[again] = 1 + half / start, -half / start
    return sheet.finish("flow_heun", plan.num_steps, notes=plan.notes)


def flow_dpmpp_2m(plan: Plan) -> Table:
    """DPM-Solver++ multistep (Lu et al. 2022, algorithm 2) on the levels of rectified flow."""
    flow = flow_of(plan)
    whole = np.linspace(1, 1 / flow.num_train_timesteps, plan.num_steps + 1)
    sigma = np.append(flow.shifted(1 - whole)[:0:-1], 0.0)
    levels: Levels = (1 - sigma, sigma, np.log((1 - sigma) / sigma))
    # diffusers tells the model whole timesteps here, their fractions cut off.
    timesteps = np.floor(sigma[:-1] * flow.num_train_timesteps)
    return dpmpp("flow_dpmpp_2m", plan, timesteps, levels, stochastic=False)


def _sheet(flow: Flow, sigma: Array) -> Sheet:
    sheet = Sheet(sigma * flow.num_train_timesteps)
    sheet.predict(PREDICTION, 1 - sigma, sigma)
    return sheet
