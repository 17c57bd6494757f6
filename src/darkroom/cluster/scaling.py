"""How many replicas the jobs at hand need. A file of its own: Ray copies it by value to its controller."""

from __future__ import annotations

import math
from typing import Any

WAITING, DRAWN = "waiting", "drawn"
"""What each replica tells: jobs that nobody works on, the same ones to all, and those it has itself."""


class ByQueue:
    """So many jobs a replica; Ray adds the bounds and delays of its own configuration."""

    def __init__(self, jobs_per_replica: float = 16.0) -> None:
        self.jobs_per_replica = jobs_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Replicas wanted, for what the replicas told lately."""
        told = context.aggregated_metrics or {}
        waiting = max(told.get(WAITING, {}).values(), default=0.0)
        drawn = sum(told.get(DRAWN, {}).values())
        if not told:
            return context.target_num_replicas, {}
        return math.ceil((waiting + drawn) / self.jobs_per_replica), {}
