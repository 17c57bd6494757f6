"""`LatentScaling`: how a VAE's latents become what the denoiser sees, and back.

diffusers keeps it in the VAE's configuration, in two forms: `scaling_factor` with `shift_factor` (SD 3), and
`scaling_factor` with `latents_mean` and `latents_std`, a number for each channel (fine-tuned SDXL VAEs).

Shapes: B rows, C channels, H and W latent pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from darkroom.errors import ModelError


@dataclass(frozen=True)
class LatentScaling:
    """(latents - shift) * factor / std; `shift` and `std` hold one number, or one a channel, or are empty."""

    factor: float = 1.0
    shift: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def of(cls, vae: Any) -> LatentScaling:
        """What a VAE's configuration says; ModelError for what is no such number."""
        config: Mapping[str, Any] = dict(vae.config)
        channels = int(config.get("latent_channels", 0))
        factor = _numbers(config, "scaling_factor", 1) or (1.0,)
        shift = _numbers(config, "shift_factor", 1)
        mean, std = (_numbers(config, key, channels) for key in ("latents_mean", "latents_std"))
        if bool(mean) != bool(std) or (shift and mean):
            given = ", ".join(k for k in ("shift_factor", "latents_mean", "latents_std") if config.get(k))
            raise ModelError(
                f"the VAE's configuration has {given}",
                allowed="shift_factor alone, or latents_mean and latents_std together",
            )
        if factor[0] <= 0 or min(std, default=1.0) <= 0:
            raise ModelError(
                f"the VAE's scaling_factor is {factor[0]:g}, its latents_std {list(std)}",
                allowed="numbers above 0",
            )
        return cls(factor[0], mean or (shift if any(shift) else ()), std)

    def seen(self, latents_BCHW: Tensor) -> Tensor:
        """The VAE's latents as the denoiser sees them."""
        if self.shift:
            latents_BCHW = latents_BCHW - _channels(latents_BCHW, self.shift)
        return self.spread(latents_BCHW)

    def spread(self, std_BCHW: Tensor) -> Tensor:
        """The VAE's deviations as the denoiser sees them: scaled, not shifted."""
        return std_BCHW * (_channels(std_BCHW, self.factor_by_channel) if self.std else self.factor)

    def undone(self, latents_BCHW: Tensor) -> Tensor:
        """The denoiser's latents as the VAE decodes them."""
        latents_BCHW = latents_BCHW / self.factor
        if self.std:
            latents_BCHW = latents_BCHW * _channels(latents_BCHW, self.std)
        return latents_BCHW + _channels(latents_BCHW, self.shift) if self.shift else latents_BCHW

    @property
    def factor_by_channel(self) -> tuple[float, ...]:
        """What each channel is multiplied by."""
        return tuple(self.factor / std for std in self.std)

    def noted(self) -> dict[str, str]:
        """As a column of latents notes it."""
        metadata = {"scale": repr(self.factor)}
        metadata |= {"shift": repr(list(self.shift))} if self.shift else {}
        return metadata | ({"std": repr(list(self.std))} if self.std else {})


def _numbers(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """The finite numbers under a key, none where it is null; ModelError for anything else."""
    value = config.get(key)
    if value is None:
        return ()
    listed = count != 1 or key.startswith("latents_")
    found: Sequence[Any] = value if listed and isinstance(value, (list, tuple)) else (value,)
    plain = all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in found)
    if not plain or (listed and len(found) != count):
        raise ModelError(
            f"the VAE's {key} is {value!r}",
            allowed=f"{count} numbers, one a channel" if listed else "a number",
        )
    return tuple(map(float, found))


def _channels(like_BCHW: Tensor, values: Sequence[float]) -> Tensor:
    return like_BCHW.new_tensor(values).view(1, -1, 1, 1)
