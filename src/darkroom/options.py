"""What the words of a request mean, whichever way it comes: sizes, memory, solvers, precisions, backends.

Read by the command line before anything heavy is imported, by the server's APIs, by plans and by pictures'
own parameters: each name stands here once. Imports nothing heavy.
"""

from __future__ import annotations

import os
import re
from typing import Literal, NamedTuple, get_args

from darkroom.errors import InputError
from darkroom.hardware import system

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MAX_SIDE = 8192
PRECISIONS = ("float32", "bf16", "fp16")
AUTO = "auto"
INT8 = "int8"
BACKENDS = ("torch", "compile", "onnx", "openvino")


class Solver(NamedTuple):
    """A solver by the names it has elsewhere, and the defaults of the diffusers class that it follows."""

    a1111: tuple[str, ...]
    """A1111's names; one that ends in Karras asks for Karras sigmas."""
    scheduler: str
    """The diffusers class. Of two solvers of one class the first is what a model folder with it gets."""
    spacing: str
    takes_karras: bool = False
    """Whether its sigmas may be spaced otherwise than its timesteps: one of `SIGMAS`."""
    clips: bool = False
    """Whether the diffusers class clips x0 unless its configuration says not to."""
    knows: tuple[str, ...] = ()
    """Yes-or-no settings that the diffusers class has; others are ignored there and here."""


_SNR = ("rescale_betas_zero_snr",)
_CLIP = ("clip_sample", *_SNR)
SOLVERS: dict[str, Solver] = {
    "ddim": Solver(("DDIM",), "DDIMScheduler", "leading", clips=True, knows=_CLIP),
    "pndm": Solver(("PLMS",), "PNDMScheduler", "leading"),
    "euler": Solver(("Euler",), "EulerDiscreteScheduler", "linspace", takes_karras=True, knows=_SNR),
    "euler_a": Solver(
        ("Euler a",), "EulerAncestralDiscreteScheduler", "linspace", takes_karras=True, knows=_SNR
    ),
    "dpmpp_2m": Solver(
        ("DPM++ 2M", "DPM++ 2M Karras"),
        "DPMSolverMultistepScheduler",
        "linspace",
        takes_karras=True,
        knows=_SNR,
    ),
    "dpmpp_2m_sde": Solver(
        ("DPM++ 2M SDE", "DPM++ 2M SDE Karras"),
        "DPMSolverMultistepScheduler",
        "linspace",
        takes_karras=True,
        knows=_SNR,
    ),
    "unipc": Solver(("UniPC",), "UniPCMultistepScheduler", "linspace", takes_karras=True, knows=_SNR),
    "lms": Solver(("LMS", "LMS Karras"), "LMSDiscreteScheduler", "linspace", takes_karras=True),
    "heun": Solver(("Heun",), "HeunDiscreteScheduler", "linspace", takes_karras=True),
    "dpmpp_sde": Solver(
        ("DPM++ SDE", "DPM++ SDE Karras"), "DPMSolverSDEScheduler", "linspace", takes_karras=True
    ),
    "dpmpp_3m_sde": Solver(
        ("DPM++ 3M SDE", "DPM++ 3M SDE Karras"),
        "DPMSolverMultistepScheduler",
        "linspace",
        takes_karras=True,
        knows=_SNR,
    ),
    "lcm": Solver(("LCM",), "LCMScheduler", "leading", knows=_CLIP),
}
"""Every solver once: the command line, the server, the page, pictures' texts and the tests read this."""
PRECISION_TEXT = "float32, bf16, fp16, int8 with openvino, or auto: bf16 where it is quick"
SOLVER_NAMES = tuple(SOLVERS)
FLOW_SOLVER_NAMES = ("flow_euler", "flow_heun", "flow_dpmpp_2m", "flow_lcm")
LCM_SOLVERS = ("lcm", "flow_lcm")
"""Few steps without guidance, of models that were distilled to them."""
SAMPLERS: dict[str, tuple[str, bool | None]] = {
    name: (solver, name.endswith(" Karras") or None) for solver, row in SOLVERS.items() for name in row.a1111
}
"""A1111's samplers: the solver of each, and whether its sigmas are Karras'; None leaves that to the model."""
A1111_NAMES = {solver: row.a1111[0] for solver, row in SOLVERS.items()}
"""A1111's name of each solver."""
A1111_AUTOMATIC = {
    "dpmpp_2m": "karras",
    "dpmpp_sde": "karras",
    "dpmpp_2m_sde": "exponential",
    "dpmpp_3m_sde": "exponential",
}
"""How A1111 spaces a sampler's sigmas where the schedule is Automatic; of others as their timesteps are."""
Sigmas = Literal[
    "karras",
    "exponential",
    "beta",
    "align_your_steps",
    "kl_optimal",
    "simple",
    "normal",
    "ddim_uniform",
]
SIGMAS: tuple[str, ...] = get_args(Sigmas)
"""How a solver's sigmas may be spaced, if not as its timesteps are."""
A1111_SCHEDULES = {
    "Karras": "karras",
    "Exponential": "exponential",
    "Polyexponential": "exponential",  # the same with A1111's rho of 1
    "Align Your Steps": "align_your_steps",
    "KL Optimal": "kl_optimal",
    "Simple": "simple",
    "Normal": "normal",
    "DDIM": "ddim_uniform",
    "Beta": "beta",
}
"""A1111's schedules that are spacings of sigmas."""
_KNOWN: dict[str, str] = {
    **{name.lower(): solver for name, (solver, karras) in SAMPLERS.items() if not karras},
    **{name: name for name in (*SOLVER_NAMES, *FLOW_SOLVER_NAMES)},
    **{f"k_{name}": name for name, row in SOLVERS.items() if row.takes_karras},
}
_ENDINGS = {f" {name.lower()}": sigmas for name, sigmas in A1111_SCHEDULES.items()}


def find_solver(name: str) -> tuple[str, str | None] | None:
    """A solver by darkroom's or A1111's name, and which of `SIGMAS` the name asks for; None for no such name.

    A1111 took the schedule into a sampler's name until 2024 (DPM++ 2M SDE Exponential) and still reads it.
    """
    plain = " ".join(name.lower().split())
    if plain in _KNOWN:
        return _KNOWN[plain], None
    ending = next((one for one in _ENDINGS if plain.endswith(one)), "")
    solver = _KNOWN.get(plain.removesuffix(ending)) if ending else None
    takes = solver in SOLVERS and SOLVERS[solver].takes_karras
    return (solver, _ENDINGS[ending]) if solver is not None and takes else None


def parse_solver(name: str) -> tuple[str, str | None]:
    """`find_solver`, with an InputError for what is not known."""
    found = find_solver(name)
    if found is None:
        allowed = ", ".join((*SOLVER_NAMES, *FLOW_SOLVER_NAMES))
        raise InputError(f"solver '{name}'", allowed=f"{allowed}, or A1111's names such as 'DPM++ 2M Karras'")
    return found


def parse_size(text: str) -> tuple[int, int]:
    """'512x768' is width and height in pixels, '512' a square. InputError for anything else."""
    found = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", text.strip().lower(), re.ASCII)
    if found is None:
        raise InputError(
            f"size '{text}'", allowed="WIDTHxHEIGHT in pixels, such as 512x768, or one number for a square"
        )
    return int(found[1]), int(found[2] or found[1])


def check_side(size: tuple[int, int]) -> None:
    """InputError for sides that no model makes, said before one is opened."""
    if not all(0 < side <= MAX_SIDE for side in size):
        raise InputError(f"size {size[0]}x{size[1]}", allowed=f"sides of 8 to {MAX_SIDE} pixels")


def parse_bytes(text: str | int) -> int:
    """'3GB' (10^9 bytes), '800MiB' (2^20) or a number of bytes. InputError for anything else."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", str(text))
    unit = found[2].upper() if found else "?"
    if found is None or unit not in UNITS or float(found[1]) <= 0:
        raise InputError(f"memory '{text}'", allowed="such as 3GB, 800MB or 2.5GiB")
    return int(float(found[1]) * UNITS[unit])


def eight_bits(backend: str, precision: str, optimise: str) -> tuple[str, str]:
    """Precision and optimisations of a request for precision int8, which is OpenVINO's alone."""
    if precision != INT8:
        return precision, optimise
    check_names(backend, "float32")
    if backend != "openvino":
        raise InputError(
            f"precision int8 with backend {backend}",
            allowed="backend openvino",
            mend="backend torch has --optimise int8, of large linear layers",
        )
    others = [name for name in optimise.split(",") if name not in ("none", "")]
    named = any(name.partition(":")[0] == INT8 for name in others)
    return "float32", ",".join(others if named else [*others, INT8])


def check_names(backend: str, precision: str) -> None:
    """InputError for a backend or precision that does not exist."""
    if backend not in BACKENDS:
        raise InputError(f"backend '{backend}'", allowed=", ".join(BACKENDS))
    if precision not in (AUTO, *PRECISIONS):
        raise InputError(f"precision '{precision}'", allowed=", ".join((*PRECISIONS, AUTO, INT8)))


def check_pair(backend: str, precision: str, device: str) -> None:
    """InputError where a backend cannot compute in a precision on a kind of device (cpu, cuda, mps).

    What passes works, if perhaps slowly. ONNX Runtime computes a bf16 model in float32 on a CPU.
    """
    check_names(backend, precision)
    if device != "cpu":
        if backend == "openvino":
            raise InputError(f"backend openvino on {device}", allowed="device cpu")
        return
    if precision == "fp16":
        raise InputError(
            "precision fp16 on a CPU, about five times slower than float32",
            allowed="float32, bf16",
            mend="auto takes the quicker of them",
        )
    if backend == "openvino" and precision == "bf16" and system.bf16_instructions() is None:
        have = ", ".join(system.instructions()) or "none that are known"
        raise InputError(
            f"backend openvino with precision bf16: this processor has no bfloat16 instructions ({have})",
            allowed="float32",
            mend="auto takes bf16 where the processor has it",
        )


def cpu_precision() -> tuple[str, str]:
    """The quickest precision on this processor without leaving anything to emulation, and why."""
    found = system.bf16_instructions()
    if found is None:
        return "float32", "this processor has no bfloat16 instructions"
    return "bf16", f"this processor has {found}"


CREDENTIALS = ("model", "settings", "all")
"""What credentials say: the model alone; the settings too; the prompts as well."""


def check_credentials(given: str) -> None:
    """InputError for what credentials cannot state."""
    if given not in CREDENTIALS:
        raise InputError(f"--credentials {given}", allowed=", ".join(CREDENTIALS))


def provenance_wanted() -> bool:
    """Whether pictures are marked and signed unless said otherwise: `DARKROOM_PROVENANCE=0` says no."""
    return os.environ.get("DARKROOM_PROVENANCE", "1").lower() not in ("0", "no", "off", "false")


COPIED_BYTES = 64 * 2**20
"""A larger state on a CPU is written before training goes on: a copy would take as much memory again."""
