"""Memory, time and cost before anything runs.

`ask_recipe`, `ask_generate` and `ask_prepare` say what is planned; `plans` gives its plan on a `Target`: this
machine, a card, or all cards. The counts come from running the real code under fake tensors.

`counts`, `training` and `tracing` count; `roofline` turns counts into seconds; `jobs` says what fits, how
long and how much; `show` how sure that is; `advise` searches settings; `calibrate` measures this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.lazy import importer

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

_MODULES = {
    "ask": (
        "PictureSettings",
        "ask_generate",
        "ask_prepare",
        "ask_recipe",
        "plans",
    ),
    "jobs": ("Plan",),
    "show": ("to_dict",),
    "targets": (
        "PlanRequest",
        "Target",
    ),
}
__getattr__ = importer(__name__, _MODULES)
