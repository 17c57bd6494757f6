"""Optimisations by name, each on or off, in any combination that makes sense.

`table` holds them; `choose` picks and refuses; `applied` holds what was made of the model. How each works
stands by subject: `precision`, `attention`, `compiled`, `smaller` and `vae` (memory), `tiny_vae`, `steps` and
`deep` (feature cache).
"""

from darkroom.sample.optimisations.applied import Applied, Choice
from darkroom.sample.optimisations.choose import (
    AUTO,
    NONE,
    check,
    conflict,
    loading,
    optimise,
    parse,
    place_of,
)
from darkroom.sample.optimisations.optimisation import (
    KINDS,
    LOSSLESS,
    LOSSY,
    OTHER,
    STATED,
    ComputeTarget,
    Optimisation,
)
from darkroom.sample.optimisations.steps import interval_of
from darkroom.sample.optimisations.table import OPTIMISATIONS

__all__ = [
    "AUTO",
    "KINDS",
    "LOSSLESS",
    "LOSSY",
    "NONE",
    "OPTIMISATIONS",
    "OTHER",
    "STATED",
    "Applied",
    "Choice",
    "ComputeTarget",
    "Optimisation",
    "check",
    "conflict",
    "interval_of",
    "loading",
    "optimise",
    "parse",
    "place_of",
]
