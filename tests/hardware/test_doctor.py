"""The doctor finds what is there, and each lack comes with the line that mends it."""

from __future__ import annotations

from importlib import metadata

import pytest

from darkroom.hardware import doctor
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
