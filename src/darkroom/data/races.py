"""A store beside other writers: what is tried again because another was quicker."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRIES = 40
LOST = re.compile(
    r"conflict|not found.*/(_versions/[^/,]+\.manifest|data/[^/,]+\.lance,|_deletions/|_transactions/)", re.I
)


def patiently(call: Callable[[], T]) -> T:
    """What `call` returns, called again where another writer was quicker.

    So it is when a commit conflicts with one that came before it, and when files vanish: another process
    joined fragments or dropped the version that was being read. `call` begins from the newest version each
    time; what still fails after 40 tries, in about 20 s, is raised.
    """
    for attempt in range(TRIES - 1):
        try:
            return call()
        except (OSError, ValueError) as error:
            if not LOST.search(str(error)):
                raise
            time.sleep(random.uniform(0.02, 0.1) * min(attempt + 1, 10))
    return call()
