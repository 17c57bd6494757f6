"""Memory, time and cost before anything runs.

`ask_recipe`, `ask_generate` and `ask_prepare` say what is planned; `plans` gives its plan on a `Target`: this
machine, a card, or all cards. The counts come from running the real code under fake tensors.

`counts`, `training` and `tracing` count; `roofline` turns counts into seconds; `jobs` says what fits, how
long and how much; `show` how sure that is; `advise` searches settings; `calibrate` measures this machine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from darkroom.picture_settings import PictureSettings
    from darkroom.plan.ask import ask_generate, ask_prepare, ask_recipe, plans
    from darkroom.plan.jobs import Plan
    from darkroom.plan.show import to_dict
    from darkroom.plan.targets import PlanRequest, Target

__all__ = [
    "PictureSettings",
    "Plan",
    "PlanRequest",
    "Target",
    "ask_generate",
    "ask_prepare",
    "ask_recipe",
    "plans",
    "to_dict",
]

_MODULES = ("ask", "jobs", "show", "targets")


def __getattr__(name: str) -> Any:
    """Import what is used when it is used: planning on a card of the tables needs little."""
    for module in _MODULES if name in __all__ else ():
        if hasattr(found := import_module(f"darkroom.plan.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module 'darkroom.plan' has no attribute '{name}'")
