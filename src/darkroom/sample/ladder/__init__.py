"""The ladder: optimisations by name, each on or off, in any combination that makes sense.

`rungs` is the table; `choose` picks and refuses; `applied` holds what was made of the model. How each works
stands by subject: `precision`, `attention`, `compiled`, `smaller` and `vae` (memory), `tiny_vae`, `steps` and
`deep` (feature cache).
"""

from darkroom.sample.ladder.applied import Applied, Choice
from darkroom.sample.ladder.choose import AUTO, NONE, check, conflict, loading, optimise, parse, place_of
from darkroom.sample.ladder.rung import KINDS, LOSSLESS, LOSSY, OTHER, STATED, ComputeTarget, Optimisation
from darkroom.sample.ladder.rungs import RUNGS
from darkroom.sample.ladder.steps import interval_of

__all__ = [
    "AUTO",
    "KINDS",
    "LOSSLESS",
    "LOSSY",
    "NONE",
    "OTHER",
    "RUNGS",
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
