"""Optimisations by name, each on or off, in any combination that makes sense.

`table` holds them, chooses and refuses; `applied` holds what one is, what was made of the model, and its VAE
in less memory. How each works stands by subject: `precision` (and memory), `attention`, `compiled`,
`offload`, `tiny_vae` and `steps`.
"""

from darkroom.sample.optimisations.applied import (
    KINDS,
    LOSSLESS,
    LOSSY,
    OTHER,
    STATED,
    Applied,
    Choice,
    ComputeTarget,
    Optimisation,
)
from darkroom.sample.optimisations.steps import interval_of
from darkroom.sample.optimisations.table import (
    AUTO,
    NONE,
    OPTIMISATIONS,
    check,
    conflict,
    loading,
    optimise,
    parse,
    place_of,
    set_layout,
)

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
    "set_layout",
]
