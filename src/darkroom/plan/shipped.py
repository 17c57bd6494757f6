"""The counts behind the published tables, kept with the package so that the proof answers at once.

benchmarks/plan/count.py makes the file anew; what the file lacks is counted on the spot.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from darkroom.plan import ask
from darkroom.plan.profile import Kernels, Line, Moment, Profile

FILE = Path(__file__).with_name("published_counts.json")


@dataclass(frozen=True)
class OthersStep:
    """A training step as the diffusers and Composer scripts wrote it."""

    family: str
    resolution: int
    rank: int | None = None  # LoRA on queries and values; None: all weights
    checkpointing: bool = False
    encodes: bool = True  # VAE and text encoder at each step
    encoders: str = "float32"  # or half
    ema: bool = False
    pure_half: bool = False  # half-precision weights and no autocast


@cache
def others_profile(step: OthersStep) -> Profile:
    """A training step as the published scripts wrote it."""

    def count() -> Profile:
        from darkroom.plan import others

        return others.others_profile(step)

    return _kept({"others": asdict(step)}, count)


@cache
def pictures_of_2022(precision: str, *, autocast: bool = True, softmax: str = "copied") -> Profile:
    """Making pictures with the attention of 2022."""

    def count() -> Profile:
        from darkroom.plan import others

        return others.pictures_of_2022(precision, autocast=autocast, softmax=softmax)

    return _kept({"pictures of 2022": [precision, autocast, softmax]}, count)


@cache
def picture_profile(precision: str, attention: str, family: str = "sd15", side: int = 512) -> Profile:
    """Making square pictures, guided; the VAE decodes the whole batch at once."""
    key = {"pictures": [precision, attention, family, side]}
    return _kept(key, lambda: ask.picture_profile(family, side, side, True, precision, attention, whole=True))


@cache
def preparing_profile(family: str, side: int, precision: str) -> Profile:
    """Encoding pictures and captions."""
    return _kept(
        {"preparing": [family, side, precision]}, lambda: ask.preparing_profile(family, side, True, precision)
    )


def _kept(key: dict[str, Any], count: Callable[[], Profile]) -> Profile:
    found = _file().get(json.dumps(key, sort_keys=True))
    return unpacked(found) if found is not None else count()


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return content


def packed(profile: Profile) -> dict[str, Any]:
    """A profile in few characters."""
    return {
        "kernels": [[k.stage, k.kind, k.calls, *_pair(k.flops), *_pair(k.bytes)] for k in profile.kernels],
        "moments": [
            [m.stage, {kind: _pair(line) for kind, line in m.bytes.items()}] for m in profile.moments
        ],
        "parameters": profile.parameters,
        "trained": profile.trained,
        "chunks": profile.chunks,
    }


def _pair(line: Line) -> list[float]:
    return [round(line.fixed), round(line.row)]


def unpacked(content: dict[str, Any]) -> Profile:
    """A profile as `packed` made it."""
    kernels = tuple(
        Kernels(stage, kind, calls, Line(a, b), Line(c, d))
        for stage, kind, calls, a, b, c, d in content["kernels"]
    )
    moments = tuple(
        Moment(stage, {kind: Line(*pair) for kind, pair in held.items()})
        for stage, held in content["moments"]
    )
    plain = {name: content[name] for name in ("parameters", "trained", "chunks")}
    return Profile(kernels, moments, **plain)
