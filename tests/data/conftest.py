"""A small store for the tests of this room."""

from __future__ import annotations

import pytest
from material import rows

from darkroom.data.store import Store


@pytest.fixture
def store(tmp_path) -> Store:
    """A store of 50 rows in three fragments."""
    made = Store.create(tmp_path / "pictures.lance")
    for start, num in ((0, 20), (20, 20), (40, 10)):
        made.append(rows(num, start))
    return made
