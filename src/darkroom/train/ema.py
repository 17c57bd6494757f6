"""Exponential moving average of the weights, kept in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class EmaSettings(BaseModel):
    """The averaged weights, which are sampled from and exported."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(default=True, description="keep averaged weights")
    decay: float = Field(default=0.999, ge=0, lt=1, description="share of the average that a step keeps")
    start_step: int = Field(
        default=0, ge=0, description="the first step that is averaged; until then the average is the weights"
    )
    every: int = Field(
        default=1,
        ge=1,
        description="steps between two updates, each of which keeps decay ** every: less work",
    )
    warmup: bool = Field(
        default=True,
        description="keep at most (1 + n) / (10 + n) after n averaged steps, so that early weights go",
    )


class Ema:
    """Averaged float32 weights beside the trained ones, by the parameters' names.

    Until the first averaged step there is no copy: the average is the weights, and costs nothing.
    """

    def __init__(self, params: Mapping[str, Tensor], settings: EmaSettings) -> None:
        self._params, self._settings = dict(params), settings
        self._average: dict[str, Tensor] = {}
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])

    def update(self, k: int) -> None:
        """Take in the weights after step k (from 0)."""
        n = k - self._settings.start_step
        if not self._settings.enabled or n < 0:
            return
        if n % self._settings.every:
            return
        if not self._average:
            self._start({name: param.detach() for name, param in self._params.items()})
        else:
            torch._foreach_lerp_(*self._pairs, 1.0 - ema_decay(n, self._settings))

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights by name; the trained ones while there is no average."""
        return self._average or {name: param.detach() for name, param in self._params.items()}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the average, empty until it starts."""
        return self._average

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's average back."""
        if state and self._settings.enabled:
            self._start({name: state[name] for name in self._params})

    def _start(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self._params.items():
            # The parameter's own memory layout lets lerp walk both in one order.
            average = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
            self._average[name] = average.detach().copy_(values[name])
        self._pairs = (list(self._average.values()), [p.detach() for p in self._params.values()])


def ema_decay(n: int, settings: EmaSettings) -> float:
    """How much of the average the update after n averaged steps keeps; little at first: early weights go."""
    decay = min(settings.decay, (1 + n) / (10 + n)) if settings.warmup else settings.decay
    return decay**settings.every
