"""`Optimisation`: one named optimisation. `table` holds them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from darkroom.hardware.accelerator import capability
from darkroom.sample.optimisations.applied import Applied

LOSSLESS, STATED, LOSSY, OTHER = "lossless", "stated", "lossy", "another model"
KINDS = {
    LOSSLESS: "the same picture but for rounding: within 2/255 in float32",
    STATED: "the same picture but for the rounding of a shorter number",
    LOSSY: "another picture of the same; the benches say how far off",
    OTHER: "another model's picture",
}


@dataclass(frozen=True)
class ComputeTarget:
    """What an optimisation is asked to work on."""

    device: torch.device
    dtype: torch.dtype
    """Of the U-Net's weights as they were given."""
    is_dit: bool = False
    """Whether a diffusion transformer stands in the U-Net's place."""

    @property
    def on_cuda(self) -> bool:
        """Whether it is a CUDA or ROCm card."""
        return self.device.type == "cuda"

    @property
    def capability(self) -> tuple[int, int]:
        """Of the NVIDIA card: (8, 0) is Ampere, (8, 9) Ada, (9, 0) Hopper; (0, 0) elsewhere."""
        return capability(self.device)


@dataclass(frozen=True)
class Optimisation:
    """One optimisation: what it is, where it works, what excludes it, and how it is put in place."""

    name: str
    kind: str
    says: str
    """What it does, in a few words."""
    apply: Callable[[Applied, str], None]
    """Puts it in place; the text is what stood behind the colon. InputError for a wrong one."""
    lacks: Callable[[ComputeTarget], str | None] = lambda place: None
    """Why it cannot work there; None where it can."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """What it excludes, and why. One side of a pair is enough."""
    argument: str = ""
    """How its argument is written; empty where it takes none."""
    needs_unet: bool = False
    """Whether it is of a U-Net's own parts, which a diffusion transformer does not have."""


def needs_cuda(what: str) -> Callable[[ComputeTarget], str | None]:
    """For optimisations that only a CUDA (or ROCm) device can do."""
    return lambda place: None if place.on_cuda else f"{what}; this is {place.device.type}"
