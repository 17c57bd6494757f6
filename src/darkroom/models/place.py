"""Where and in what precision a model runs: the names users give, as torch has them."""

from __future__ import annotations

import torch

from darkroom.errors import InputError

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision(name: str) -> torch.dtype:
    """The type of a precision's name: float32, bf16 or fp16."""
    if name not in PRECISIONS:
        raise InputError(f"precision '{name}'", allowed=", ".join(PRECISIONS))
    return PRECISIONS[name]


def slow_bf16(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is bf16 on a processor that has to emulate it: float32 is 20 to 200 times as fast."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        return False
    has_kernels: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_kernels and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


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
