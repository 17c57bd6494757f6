"""What several files of plans start from."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def shared_counts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Counts are kept for the session, whichever worker made them: a cache of no other use."""
    base = tmp_path_factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DARKROOM_CACHE", str(session / "plans"))
        yield
