"""What this processor can do, as far as this process may use it: the one place that is asked.

oneDNN (inside PyTorch and OpenVINO) and PyTorch's own kernels can be limited by environment variables, for
tests or to keep several kinds of machine alike. What they forbid is as if the processor did not have it.
Imports nothing heavy.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

from darkroom.hardware.system import CPUINFO

X86 = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "amx_int8", "amx_fp16"),
)
ARM = ("asimd", "sve", "bf16", "i8mm")
FEATURES = (*X86, *ARM)
"""What makes a difference to darkroom's work, as Linux names it."""
TORCH_NAMES = {"avx512f": "avx512_f", "asimd": "neon"}
"""What torch calls otherwise."""

BF16 = ("amx_bf16", "avx512_bf16", "bf16")
"""Any of them multiplies bfloat16 in hardware; without one it is emulated, up to 60 times slower."""

INT8 = ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm")
"""Any of them multiplies 8-bit integers and adds them up in 32 bits at once."""

_AVX512 = ("avx2", "avx_vnni", "avx512f")
_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
_FP16 = (*_BF16, "avx512_fp16")
_AMX = (*_FP16, "amx_bf16", "amx_int8")
ONEDNN: dict[str, tuple[str, ...]] = {
    "SSE41": (),
    "AVX": (),
    "AVX2": ("avx2",),
    "AVX2_VNNI": ("avx2", "avx_vnni"),
    "AVX2_VNNI_2": ("avx2", "avx_vnni"),
    "AVX512_CORE": _AVX512,
    "AVX512_CORE_VNNI": (*_AVX512, "avx512_vnni"),
    "AVX512_CORE_BF16": _BF16,
    "AVX512_CORE_FP16": _FP16,
    "AVX10_1_512": _FP16,
    "AVX512_CORE_AMX": _AMX,
    "AVX10_1_512_AMX": _AMX,
}
"""oneDNN's levels and what each lets through; any other value (ALL, later levels) lets everything through."""
ATEN: dict[str, tuple[str, ...]] = {"default": (), "avx2": ("avx2", "avx_vnni")}
LIMITS = {"ONEDNN_MAX_CPU_ISA": ONEDNN, "DNNL_MAX_CPU_ISA": ONEDNN, "ATEN_CPU_CAPABILITY": ATEN}


def instructions(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Of `FEATURES`, what the processor has and the environment leaves in use."""
    environment = os.environ if environment is None else environment
    have = hardware_instructions()
    for variable, levels in LIMITS.items():
        value = environment.get(variable, "")
        allowed = levels.get(value.upper() if levels is ONEDNN else value.lower())
        if allowed is not None:
            have = tuple(name for name in have if name in allowed or name in ARM)
    return have


def limits() -> tuple[str, ...]:
    """The environment variables that limit what is in use, as NAME=VALUE."""
    return tuple(f"{name}={value}" for name in LIMITS if (value := os.environ.get(name)))


def bf16_instructions() -> str | None:
    """What multiplies bfloat16 here; None where it would be emulated."""
    have = instructions()
    return next((name for name in BF16 if name in have), None)


def int8_instructions() -> str | None:
    """What multiplies 8-bit integers here, quickest first; None where it takes several instructions."""
    have = instructions()
    return next((name for name in INT8 if name in have), None)


@cache
def hardware_instructions() -> tuple[str, ...]:
    """Of `FEATURES`, what the processor has, whatever the environment says."""
    if platform.system() == "Darwin":
        return _apple()
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return _as_torch_says()
    for line in lines:
        if line.startswith(("flags", "Features")):
            have = set(line.partition(":")[2].split())
            return tuple(name for name in FEATURES if name in have)
    return ()


def _as_torch_says() -> tuple[str, ...]:
    """On Windows, which has no list of its own: torch has asked the processor."""
    import torch

    asked: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return tuple(name for name in FEATURES if asked.get(TORCH_NAMES.get(name, name)))


def _apple() -> tuple[str, ...]:
    keys = {"asimd": "AdvSIMD", "bf16": "arm.FEAT_BF16", "i8mm": "arm.FEAT_I8MM", "avx2": "avx2_0"}
    found = []
    for name, key in keys.items():
        command = ["sysctl", "-n", f"hw.optional.{key}"]
        try:
            done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5, check=False)
        except (OSError, subprocess.SubprocessError):
            continue
        if done.stdout.strip() == "1":
            found.append(name)
    return tuple(found)
