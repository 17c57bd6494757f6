"""What all tests share: real material, when it lies beside the project."""

from __future__ import annotations

from pathlib import Path

import pytest

import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real material; a test that needs it says so when it is missing."""
    if not SHARED.is_dir():
        pytest.skip("the real material is missing: no folder shared/data beside the project")
    return SHARED
