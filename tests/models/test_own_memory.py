"""What is kept of a file that a server reads is in memory of its own: the file may be replaced or deleted."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from darkroom import models
from darkroom.hardware.system import MAPS
from darkroom.models.adapters.bank import Bank
from darkroom.models.adapters.read import read_adapter, write_adapter
from darkroom.models.embeddings import read_embedding
from serve.conftest import make_adapter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for what is mapped")


def is_mapped(path: Path) -> bool:
    gc.collect()
    return path.name in MAPS.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model() -> models.Model:
    return models.create("tiny", seed=1)


def staged(model: models.Model, path: Path) -> Any:
    bank = Bank(model, slots=1, max_rank=4)
    try:
        write_adapter(make_adapter(model, "style", seed=1), path)
        return bank.stage(read_adapter(path))
    finally:
        bank.detach()


def inversion(model: models.Model, path: Path) -> Any:
    save_file({"emb_params": torch.ones(2, 64)}, path)
    return read_embedding(path)


@pytest.mark.parametrize("read", [staged, inversion])
def test_what_was_read_leaves_its_file_alone(
    model: models.Model, read: Callable[[models.Model, Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / f"kept-{read.__name__}.safetensors"
    kept = read(model, path)
    assert kept is not None
    assert not is_mapped(path)
    control = load_file(path)
    assert control
    assert is_mapped(path), "the control"
