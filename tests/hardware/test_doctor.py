"""The doctor finds what is there, and each lack comes with the line that mends it."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging import markers
from packaging.requirements import Requirement

from darkroom.hardware import doctor, system
from darkroom.hardware.machine import bf16_speedup, declared_extras

ROOT = Path(__file__).resolve().parents[2]


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


def test_what_an_extra_lacks_on_this_system_is_named(monkeypatch):
    """`pip install '.[provenance]'` brings nothing more on Windows."""

    def check():
        return next(check for check in doctor() if check.name == "extra one")

    needs = ['here; extra == "one"', 'there; sys_platform != "win32" and extra == "one"']
    monkeypatch.setattr(metadata, "requires", lambda name: ["base>=1", *needs])
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    assert (check().ok, check().detail, check().mend) == (True, "here, there", "")
    windows = {**markers.default_environment(), "sys_platform": "win32"}
    monkeypatch.setattr(markers, "default_environment", lambda: windows)
    assert declared_extras() == {"one": ["here"]}
    assert (check().ok, check().mend) == (False, "")
    assert check().detail == "here; there has no wheel for this system"
    assert check().lines()[0].startswith("--")
    monkeypatch.setattr(metadata, "requires", lambda name: needs[1:])
    assert check().detail == "there has no wheel for this system"


def test_what_no_wheel_is_left_out_for_is_in_the_installation_page():
    """Each package that an extra or the lock leaves out on some system, besides what a system alone needs."""
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    said = page.partition("### What is left out")[2].partition("\n#")[0]
    needs = [line for line in metadata.requires("darkroom-sd") or () if "sys_platform" in line]
    assert needs
    assert all(f"`{Requirement(line).name}`" in said for line in needs)


def test_every_extra_is_in_the_table_of_the_installation_page():
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    table = page.partition("| extra | for | brings |")[2].partition("\n\n")[0]
    rows = {row.split("`")[1]: row for row in table.splitlines() if row.startswith("| `")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(rows) == set(project["optional-dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        if extra not in ("all", "dev"):
            names = {Requirement(line).name for line in lines}
            assert {name for name in names if name not in rows[extra]} == set(), extra


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
