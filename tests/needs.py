"""Programs that tests need beside Python's packages."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(told: str) -> NoReturn:
    """It is not here: a failure in continuous integration, a skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(told)
    pytest.skip(told)
