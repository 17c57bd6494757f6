"""Where and in what precision a model runs: the names users give, as torch has them."""

from __future__ import annotations

import torch

from darkroom import options
from darkroom.errors import InputError
from darkroom.hardware import cpu

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in PRECISIONS.items()}


def precision(name: str, device: torch.device | None = None) -> torch.dtype:
    """The type of a precision's name: float32, bf16 or fp16; `auto` is the quickest on the device."""
    if name == options.AUTO and device is not None:
        name = choose_precision(name, device)[0]
    if name not in PRECISIONS:
        raise InputError(f"precision '{name}'", allowed=", ".join(PRECISIONS))
    return PRECISIONS[name]


def choose_precision(asked: str, device: torch.device) -> tuple[str, str]:
    """The precision to compute in on a device, and why; `auto` takes the quickest that is not emulated."""
    if asked != options.AUTO:
        emulated = slow_bf16(precision(asked), device)
        return asked, f"asked for{', but emulated here: float32 is many times as fast' if emulated else ''}"
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported()
        return ("bf16", "the GPU has it") if has else ("fp16", "the GPU has no bf16")
    if device.type == "cpu":
        return options.cpu_precision()
    return "float32", f"the safe choice on {device.type}"


def slow_bf16(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is bf16 on a processor that has to emulate it: float32 is up to 60 times as fast."""
    return dtype == torch.bfloat16 and device.type == "cpu" and cpu.bf16_instructions() is None


def device(name: str) -> torch.device:
    """A device by name; 'auto' is the first CUDA (or ROCm) device, else Apple's, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device '{name}': {reason}", mend="auto takes what is here") from error
    return found
