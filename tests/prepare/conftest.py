"""A small store of real pictures and a tiny model for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest
from settings import fill, tiny

from darkroom.data.store import Store
from darkroom.models.model import Model


@pytest.fixture(scope="session")
def model() -> Model:
    return tiny()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """30 pictures in three fragments."""
    made = Store.create(tmp_path / "pictures.lance")
    for start in (0, 10, 20):
        fill(made, start, 10)
    return made
