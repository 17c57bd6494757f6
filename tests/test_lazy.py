"""Packages whose public names are imported when they are used."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from darkroom import data, evaluate, models, plan, train


@pytest.mark.parametrize("package", [data, evaluate, models, plan, train], ids=lambda one: one.__name__)
def test_every_public_name_is_found(package: ModuleType) -> None:
    listed = [name for names in package._MODULES.values() for name in names]
    assert sorted(listed) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize(
    ("first", "used", "heavy"),
    [
        ("from darkroom.models import reference", "models.create", "torch"),
        ("from darkroom.data.images import pictures_below", "data.Store", "lance"),
    ],
)
def test_little_is_imported_before(first: str, used: str, heavy: str) -> None:
    code = (
        f"import sys; from darkroom import data, models; {first}\n"
        f"first = {heavy!r} in sys.modules; {used}; print(first, {heavy!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
