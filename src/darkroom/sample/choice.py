"""Which solver to use, by its name or as the model's folder says; and the table of its steps at a size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from darkroom import options
from darkroom.errors import InputError
from darkroom.models.model import is_flow
from darkroom.options import FLOW_SOLVER_NAMES, SOLVER_NAMES, SOLVERS, Solver
from darkroom.picture_settings import MAX_STEPS, GenerateSettings
from darkroom.sample import solvers
from darkroom.sample.inputs import nearest_side
from darkroom.sample.optimisations.table import parse as parse_optimisations
from darkroom.sample.schedule import FLOW_SPACINGS, Flow, Schedule, check_spacing
from darkroom.sample.solvers import CLIP_RANGE, SolverRequest, SolverTable

if TYPE_CHECKING:
    from darkroom.models.model import Model

FILL: dict[str, Callable[[SolverRequest], SolverTable]] = {
    name: getattr(solvers, name) for name in (*options.SOLVER_NAMES, *options.FLOW_SOLVER_NAMES)
}
"""The function of each solver, which has its name."""
# What the same algorithm is called where the noise schedule is a rectified flow's.
FOR_FLOW = {
    "euler": "flow_euler",
    "heun": "flow_heun",
    "dpmpp_2m": "flow_dpmpp_2m",
    "lcm": "flow_lcm",
}

OF_CLASS = {
    **{row.scheduler: name for name, row in reversed(SOLVERS.items())},
    "FlowMatchEulerDiscreteScheduler": "flow_euler",
    "FlowMatchHeunDiscreteScheduler": "flow_heun",
    "FlowMatchLCMScheduler": "flow_lcm",
}
# Schedulers that are no table here, with the nearest that is.
INSTEAD_OF_CLASS = {
    "DDPMScheduler": "ddim",
    "DDIMInverseScheduler": "ddim",
    "DDIMParallelScheduler": "ddim",
    "DDPMParallelScheduler": "ddim",
    "IPNDMScheduler": "pndm",
    "KDPM2DiscreteScheduler": "dpmpp_2m",
    "KDPM2AncestralDiscreteScheduler": "euler_a",
    "DEISMultistepScheduler": "dpmpp_2m",
    "DPMSolverSinglestepScheduler": "dpmpp_2m",
    "SASolverScheduler": "dpmpp_2m_sde",
}
# Settings that would change the picture and are not known here, with the value that leaves it alone.
UNKNOWN = {
    "thresholding": (False, "a method for pixel models"),
    "use_lu_lambdas": (False, "Karras, exponential and beta sigmas are known"),
    "timestep_type": ("discrete", "continuous timesteps are not known"),
    "interpolation_type": ("linear", "only linear interpolation is known"),
    "predict_x0": (True, "UniPC is known on x0"),
    "variance_type": (None, ""),
}
# Stable Diffusion's own, for a model without a scheduler.
SD_SCHEDULE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "set_alpha_to_one": False,
}
STOCHASTIC_DPM = ("sde-dpmsolver++", "sde-dpmsolver")


def solvers_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the solvers that a scheduler configuration can be sampled with."""
    return FLOW_SOLVER_NAMES if is_flow(config) else SOLVER_NAMES


def default_solver(config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The solver of a scheduler configuration, and notes on what was substituted.

    Raises InputError where the scheduler is of another kind altogether (EDM, discrete).
    """
    cls = config.get("_class_name")
    if config.get("use_flow_sigmas"):
        own = cls == "DPMSolverMultistepScheduler"
        note = f"the model's scheduler {cls} is replaced by solver flow_dpmpp_2m"
        return "flow_dpmpp_2m", () if own else (note,)
    if cls is None:
        return "ddim", ("the model has no scheduler: solver ddim on Stable Diffusion's noise schedule",)
    if cls in INSTEAD_OF_CLASS and cls not in OF_CLASS:
        name = INSTEAD_OF_CLASS[cls]
        return name, (f"the model's scheduler {cls} is replaced by solver {name}",)
    if cls not in OF_CLASS:
        raise InputError(f"the model's scheduler {cls} is not known", allowed=", ".join(OF_CLASS))
    name = OF_CLASS[cls]
    if cls == "DPMSolverMultistepScheduler":
        return _dpm_variant(config)
    if name == "pndm" and not config.get("skip_prk_steps", False):
        return name, ("PNDM's Runge-Kutta warm-up is left out: PLMS steps from the start",)
    return name, ()


def _dpm_variant(config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    kind = config.get("algorithm_type", "dpmsolver++")
    name = "dpmpp_2m_sde" if kind in STOCHASTIC_DPM else "dpmpp_2m"
    if kind in ("dpmsolver", "sde-dpmsolver"):
        return name, (f"DPM-Solver's algorithm_type {kind} is replaced by {kind}++",)
    return name, ()


def make_table(
    solver: str | None,
    config: Mapping[str, Any],
    num_steps: int,
    *,
    eta: float = 0.0,
    spacing: str | None = None,
    karras: bool | None = None,
    exponential: bool | None = None,
    sigmas: str | None = None,
    is_sdxl: bool = False,
    strength: float = 1.0,
) -> SolverTable:
    """Fill a solver's table for a scheduler configuration (a dict in diffusers' terms).

    `solver` None takes the configuration's own. What is not given comes from the configuration and then from
    the defaults of the diffusers class, as its `from_config` does. `sigmas` is one of `options.SIGMAS`, of
    which `karras` and `exponential` are short forms; `is_sdxl` matters to align_your_steps alone. `eta` is
    for ddim alone. With a
    `strength` below 1 only that share of the steps is taken, the last ones, as in image-to-image. What was
    substituted or is unusual stands in the table's `notes`. Raises InputError on what cannot be.
    """
    notes: tuple[str, ...] = ()
    asked = _asked_sigmas(karras, exponential, sigmas)
    if solver is None:
        solver, notes = default_solver(config)
    if is_flow(config):
        return _flow_table(solver, config, num_steps, notes, eta, spacing, asked, strength)
    if config.get("_class_name") is None:
        config = {**SD_SCHEDULE, **config}
    known = _known(solver)
    is_own = known.scheduler == config.get("_class_name")
    settings = {
        key: value
        for key, value in config.items()
        if key not in ("clip_sample", "rescale_betas_zero_snr") or key in known.knows
    }
    _refuse_unknown(settings if is_own else {})
    if settings.get("solver_order") == 3 and solver == "dpmpp_2m_sde":
        settings["solver_order"] = 2
        notes += ("the third order of DPM-Solver++ SDE is replaced by the second",)
    if config.get("rescale_betas_zero_snr") and "rescale_betas_zero_snr" not in known.knows:
        notes += (f"solver {solver} leaves out the model's zero terminal SNR, as diffusers' class does",)
    clip = _clip(known, settings, is_own)
    if clip is not None:
        notes += (f"the model's scheduler clips x0 to +-{clip:g}, which is meant for pixels",)
    schedule = Schedule.from_config(settings)
    _check_request(solver, schedule, num_steps, eta, asked)
    plan = SolverRequest(
        schedule,
        num_steps,
        spacing or settings.get("timestep_spacing") or known.spacing,
        eta,
        asked or _own_sigmas(known, settings, karras, exponential),
        clip,
        settings,
        notes,
        _first_step(num_steps, strength),
        is_sdxl,
    )
    check_spacing(plan.spacing)
    with np.errstate(divide="ignore", invalid="ignore"):
        filled = replace(FILL[solver](plan), spacing=plan.spacing, sigmas=plan.sigmas)
    start = plan.start * filled.calls_a_step
    if len(filled) <= start:
        raise InputError(
            f"strength {strength:g} of {len(filled)} steps leaves none", mend="raise one of them"
        )
    return _checked(filled.begun_at(start) if start else filled, schedule)


def _asked_sigmas(karras: bool | None, exponential: bool | None, sigmas: str | None) -> str | None:
    """The one spacing of sigmas that is asked for; None where none is. InputError for two of them."""
    if sigmas is not None and sigmas not in options.SIGMAS:
        raise InputError(f"sigmas '{sigmas}'", allowed=", ".join(options.SIGMAS))
    short = {"karras": karras, "exponential": exponential}
    asked = list(dict.fromkeys([name for name in short if short[name]] + ([sigmas] if sigmas else [])))
    if len(asked) > 1:
        both = " and ".join(map(_shown, asked))
        raise InputError(f"{both} sigmas at once", mend="ask for one of them")
    return asked[0] if asked else None


def _shown(sigmas: str) -> str:
    """The name of a spacing of sigmas in a message."""
    return "Karras" if sigmas == "karras" else sigmas


def _own_sigmas(
    known: Solver, settings: Mapping[str, Any], karras: bool | None, exponential: bool | None
) -> str | None:
    """How the scheduler says that sigmas are spaced, unless that is refused; None for as timesteps are."""
    for name, asked in (("karras", karras), ("exponential", exponential), ("beta", None)):
        if asked is None and settings.get(f"use_{name}_sigmas") and known.takes_karras:
            return name
    return None


def _flow_table(
    solver: str,
    config: Mapping[str, Any],
    num_steps: int,
    notes: tuple[str, ...],
    eta: float,
    spacing: str | None,
    sigmas: str | None,
    strength: float,
) -> SolverTable:
    """`make_table` for a model of rectified flow."""
    if solver in FOR_FLOW:
        notes += (f"solver {solver} is {FOR_FLOW[solver]} on this model's rectified flow",)
        solver = FOR_FLOW[solver]
    if solver not in FLOW_SOLVER_NAMES:
        raise InputError(
            f"solver {solver} with a model of rectified flow",
            allowed=", ".join([*FLOW_SOLVER_NAMES, *FOR_FLOW]),
        )
    schedule = Flow.from_config(config)
    _check_request(solver, schedule, num_steps, eta, sigmas)
    spacing = spacing or ("trailing" if solver == "flow_lcm" else "linspace")
    allowed = FLOW_SPACINGS[:1] if solver == "flow_dpmpp_2m" else FLOW_SPACINGS
    if spacing not in allowed:
        raise InputError(f"spacing {spacing} with solver {solver}", allowed=" or ".join(allowed))
    start = _first_step(num_steps, strength)
    plan = SolverRequest(schedule, num_steps, spacing, settings=config, notes=notes, start=start)
    with np.errstate(divide="ignore", invalid="ignore"):
        filled = replace(FILL[solver](plan), spacing=spacing, sigmas=None)
    return _checked(filled.begun_at(filled.calls_a_step * start) if start else filled, schedule)


def _first_step(num_steps: int, strength: float) -> int:
    """How many of the steps are left out at the start, rounded as diffusers rounds."""
    if not 0 < strength <= 1:
        raise InputError(f"strength {strength:g}", allowed="above 0 to 1")
    start = num_steps - min(int(num_steps * strength), num_steps)
    if start == num_steps:
        raise InputError(
            f"strength {strength:g} of {num_steps} steps leaves none",
            mend="raise the strength or the steps",
        )
    return start


def _known(solver: str) -> Solver:
    if solver in FLOW_SOLVER_NAMES:
        raise InputError(f"solver {solver}, but the model is no rectified flow", allowed=", ".join(SOLVERS))
    if solver not in SOLVERS:
        raise InputError(f"solver '{solver}'", allowed=", ".join(SOLVERS))
    return SOLVERS[solver]


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    for key, (harmless, reason) in UNKNOWN.items():
        if (given := settings.get(key, harmless)) != harmless:
            raise InputError(
                f"the model's scheduler sets {key} to {given}",
                allowed=str(harmless),
                mend=reason or "name a solver",
            )


def _clip(known: Solver, settings: Mapping[str, Any], is_own: bool) -> float | None:
    """The range that x0 is clipped to. Another class's silence about clipping is not taken as a yes."""
    if "clip_sample" not in known.knows or not settings.get("clip_sample", known.clips and is_own):
        return None
    return float(settings.get("clip_sample_range", 1.0))


def _check_request(solver: str, schedule: Schedule, num_steps: int, eta: float, sigmas: str | None) -> None:
    most = min(MAX_STEPS, schedule.num_train_timesteps)
    if not 1 <= num_steps <= most:
        raise InputError(f"{num_steps} steps", allowed=f"1 to {most}")
    if not 0 <= eta <= 1:
        raise InputError(f"eta {eta:g}", allowed="0 (no noise) to 1 (as much as DDPM)")
    if eta and solver != "ddim":
        raise InputError(f"eta {eta:g} with solver {solver}", mend="eta is for ddim alone")
    if sigmas and not (solver in SOLVERS and SOLVERS[solver].takes_karras):
        able = [name for name, one in SOLVERS.items() if one.takes_karras]
        raise InputError(f"{_shown(sigmas)} sigmas with solver {solver}", allowed=", ".join(able))
    if schedule.prediction == "sample" and solver == "pndm":
        raise InputError("solver pndm with a model that predicts the sample", mend="use ddim or euler")


def _checked(filled: SolverTable, schedule: Schedule) -> SolverTable:
    if not np.isfinite(np.delete(filled.values_SK, CLIP_RANGE, axis=1)).all():
        raise InputError(
            f"solver {filled.solver} cannot start from no signal with {schedule.prediction} prediction",
            mend="with zero terminal SNR use v-prediction, or leading spacing, or euler",
        )
    return filled


def with_lcm(settings: GenerateSettings, optimise: Sequence[str] | str) -> GenerateSettings:
    """With the `lcm` optimisation the solver is its own, unless another is asked for."""
    lcm = any(choice.name == "lcm" for choice in parse_optimisations(optimise))
    return settings.model_copy(update={"solver": "lcm"}) if lcm and settings.solver is None else settings


def table_for(model: Model, settings: GenerateSettings) -> SolverTable:
    """The table that settings ask of a model's scheduler."""
    steps = settings.steps
    if steps is None:
        steps = settings.resolved(settings.solver or default_solver(model.scheduler)[0]).steps
    assert steps is not None
    return make_table(
        settings.solver,
        model.scheduler,
        steps,
        eta=settings.eta,
        spacing=settings.spacing,
        karras=settings.karras,
        exponential=settings.exponential,
        sigmas=settings.sigmas,
        is_sdxl=model.is_sdxl,
        strength=1.0 if settings.strength is None else settings.strength,
    )


# ---- a pass: a table at a size

# As many pictures a U-Net call as have this many latent pixels together: 8 of 512 px with a factor of 8.
CALL_LATENT_PIXELS, CALL_PICTURES = 8 * 64 * 64, 64


class Pass:
    """One way through a table at one size: `generate` takes one, with hires two."""

    def __init__(self, model: Model, table: SolverTable, size: tuple[int, int]) -> None:
        self.table, self.size = table, size
        width, height = size
        self.latent_shape = (model.latent_channels, height // model.vae_factor, width // model.vae_factor)
        self.most_a_call = CALL_PICTURES
        self.least_a_call = 1
        """What a card was found to have memory for."""

    @property
    def rows_a_call(self) -> int:
        """Pictures for one U-Net call: eight of 512 px, more of smaller ones or where memory was counted."""
        usual = pictures_a_call(self.latent_shape[1] * self.latent_shape[2], self.most_a_call)
        return max(usual, self.least_a_call)


def pictures_a_call(latent_pixels: int, most: int = CALL_PICTURES) -> int:
    """How many pictures of so many latent pixels go through the U-Net together."""
    return max(1, min(most, CALL_LATENT_PIXELS // latent_pixels))


def second_pass(model: Model, settings: GenerateSettings, size: tuple[int, int]) -> Pass | None:
    """The way through the larger size that follows the one through `size`, where there is one."""
    hires = settings.hires
    if hires is None:
        return None
    unit = model.size_unit
    width, height = (nearest_side(round(side * hires.scale), unit) for side in size)
    again = {"steps": hires.steps or settings.steps, "strength": hires.strength}
    return Pass(model, table_for(model, settings.model_copy(update=again)), (width, height))
