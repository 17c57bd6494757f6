"""What the processor can do, as far as the environment lets it be used."""

from __future__ import annotations

import pytest

from darkroom.hardware import system

REAL = system.hardware_instructions
XEON = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@pytest.fixture(autouse=True)
def xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in system.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(system, "hardware_instructions", lambda: XEON)


@pytest.mark.parametrize(
    ("variable", "value", "left", "bf16"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", ("avx2",), None),
        ("ONEDNN_MAX_CPU_ISA", "avx512_core", ("avx2", "avx512f"), None),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", XEON[:4], "avx512_bf16"),
        ("DNNL_MAX_CPU_ISA", "AVX512_CORE_VNNI", XEON[:3], None),
        ("ATEN_CPU_CAPABILITY", "avx2", ("avx2",), None),
        ("ATEN_CPU_CAPABILITY", "avx512", XEON, "amx_bf16"),
        ("ONEDNN_MAX_CPU_ISA", "ALL", XEON, "amx_bf16"),
        ("SOMETHING_ELSE", "AVX2", XEON, "amx_bf16"),
    ],
)
def test_limits_take_instructions_away(variable, value, left, bf16, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert system.instructions() == left
    assert system.bf16_instructions() == bf16


def test_arm_has_its_own(monkeypatch):
    monkeypatch.setattr(system, "hardware_instructions", lambda: ("asimd", "sve", "bf16", "i8mm"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # of other processors
    assert system.bf16_instructions() == "bf16"


def test_where_the_system_has_no_list_torch_is_asked():
    """As on Windows; here both are there."""
    if not system.CPUINFO.exists():
        pytest.skip("this system has no list to compare with")
    listed = REAL()
    assert listed
    assert system._as_torch_says() == listed
