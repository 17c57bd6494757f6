"""What several files of plans start from."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory) -> Iterator[None]:
    """Counts of a file's own, kept for all its tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DARKROOM_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()
