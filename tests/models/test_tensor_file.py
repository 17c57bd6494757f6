"""Files of weights can be read by whom the umask lets, not by their owner alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from darkroom import models
from darkroom.models.model import write_tensors
from models.made_adapters import made


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


@pytest.fixture(params=[(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)], ids=["022", "027", "077"])
def masked(request):
    """The mode that new files have under a umask, which holds during the test."""
    umask, expected = request.param
    before = os.umask(umask)
    yield expected
    os.umask(before)


def test_weights_have_the_mode_of_any_new_file(masked: int, tmp_path: Path) -> None:
    tiny = models.create("tiny", seed=1)
    models.write_adapter(made(tiny, seed=0), tmp_path / "adapter.safetensors", family="tiny")
    assert mode(tmp_path / "adapter.safetensors") == masked

    models.save(tiny, tmp_path / "model")
    weights = sorted((tmp_path / "model").rglob("*.safetensors"))
    assert len(weights) == 3
    assert {mode(file) for file in weights} == {masked}


def test_safetensors_itself_leaves_files_to_their_owner(tmp_path: Path) -> None:
    """Why modes are set at all: where this changes, `write_tensors` can go."""
    before = os.umask(0o022)
    try:
        save_file({"a": torch.zeros(2)}, tmp_path / "theirs.safetensors")
        write_tensors(tmp_path / "ours.safetensors", {"a": torch.zeros(2)})
    finally:
        os.umask(before)
    assert (mode(tmp_path / "theirs.safetensors"), mode(tmp_path / "ours.safetensors")) == (0o600, 0o644)
