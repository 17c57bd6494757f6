"""What Lance says when another writer was quicker, and a second look where files vanish under the first."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOKS = 10
VANISHED = re.compile(
    r"not found.*/(_versions/[^/,]+\.manifest|data/[^/,]+\.lance,|_deletions/|_transactions/)", re.I
)
PATH = re.compile(r"\S*/\S*")


def conflicted(error: Exception) -> bool:
    """Whether a commit conflicts with one that came before it."""
    return "conflict" in PATH.sub("", str(error)).lower()


def vanished(error: Exception) -> bool:
    """Whether a file of a store's version is gone: the version was dropped, or the store is damaged."""
    return VANISHED.search(str(error)) is not None


def wait(attempt: int) -> None:
    """Let the others go first: 20 to 100 ms, up to ten times as long after many attempts."""
    time.sleep(random.uniform(0.02, 0.1) * min(attempt + 1, 10))


def look(call: Callable[[], T]) -> T:
    """What `call` returns, called up to ten times where what it listed is gone before it is read."""
    for _ in range(LOOKS - 1):
        try:
            return call()
        except (OSError, ValueError) as error:
            if not vanished(error):
                raise
            wait(0)
    return call()
