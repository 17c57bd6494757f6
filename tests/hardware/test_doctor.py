"""The doctor finds what is there, and each lack comes with the line that mends it."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest

from darkroom.hardware import doctor, system
from darkroom.hardware.doctor import bf16_speedup, declared_extras


@pytest.fixture(scope="module")
def checks():
    return {check.name: check for check in doctor()}


def test_what_the_issue_asks_for_is_looked_at(checks):
    wanted = {"python", "torch", "memory", "processor", "bf16", "disk", "openmp spin", "clip tokenizer"}
    assert wanted <= set(checks)
    assert any(name.startswith(("device", "accelerator")) for name in checks)
    assert checks["python"].ok
    assert checks["torch"].ok
    assert "GiB" in checks["memory"].detail


def test_every_failed_check_says_how_to_mend_it(checks):
    for check in checks.values():
        assert check.ok or check.mend or check.name == "bf16", check
        assert check.lines()[0].startswith("ok" if check.ok else ("--" if check.optional else "!!"))


def test_every_declared_extra_is_checked(checks):
    extras = declared_extras()
    assert extras["track"] == ["tensorboard", "wandb"]
    assert extras["gpu"] == ["nvidia-ml-py"]
    for extra, packages in extras.items():
        have = all(_installed(package) for package in packages)
        check = checks[f"extra {extra}"]
        assert check.ok == have
        assert check.mend == ("" if have else f"pip install '.[{extra}]'")


def _installed(package):
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def test_the_tokenizer_is_found_through_its_variable(monkeypatch, tmp_path):
    def check():
        return next(check for check in doctor() if check.name == "clip tokenizer")

    monkeypatch.delenv("DARKROOM_CLIP_TOKENIZER", raising=False)
    assert not check().ok
    monkeypatch.setenv("DARKROOM_CLIP_TOKENIZER", str(tmp_path))
    assert not check().ok
    assert str(tmp_path) in check().detail
    (tmp_path / "vocab.json").write_text("{}")
    assert check().ok


def test_the_speed_of_bf16_is_measured():
    assert 0.01 < bf16_speedup(size=128, repeats=2) < 100


def test_on_windows_a_lack_is_mended_in_powershell(monkeypatch, tmp_path):
    here = doctor.__globals__["machine"]()
    monkeypatch.setattr(system, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setitem(sys.modules, "winreg", SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=no_key))
    (tmp_path / "System32").mkdir()
    (tmp_path / "System32" / "nvcuda.dll").touch()
    monkeypatch.setenv("SYSTEMROOT", str(tmp_path))
    monkeypatch.delenv("DARKROOM_CLIP_TOKENIZER", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    facts = replace(here, system="Windows AMD64", devices=())
    monkeypatch.setitem(doctor.__globals__, "machine", lambda: facts)
    found = {check.name: check for check in doctor()}
    assert found["accelerator"].mend == '$env:TORCH = "cuda"; python make.py setup'
    assert found["clip tokenizer"].mend.startswith('$env:DARKROOM_CLIP_TOKENIZER = "FOLDER" (with ')
    assert found["system"].detail == "Windows AMD64: proven by substitution"
    assert not [check for check in found.values() if check.mend.startswith(("export ", "TORCH="))]
    assert "openmp spin" not in found  # of GNU's OpenMP, which torch has on Linux alone


def no_key(*_):
    raise FileNotFoundError("no such key")
