"""Optimisations that change the steps: guidance_interval, feature_cache, lcm.

`feature_cache` reuses the U-Net's deep features (DeepCache: Ma, Fang and Wang 2023, arXiv 2312.00858). What
the deep layers give changes little from step to step. Every N-th step runs the whole U-Net and keeps what
enters its last layers; the steps between run only the first and the last layers. Lossy.

What is kept belongs to a row, and is decided on for each row by its own steps: it is gone with the row, never
meets another run, and a row's picture does not depend on who shares its batch.

Shapes: B rows, C H W features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from darkroom.errors import InputError
from darkroom.hardware.accelerator import new_tensor
from darkroom.models.adapters.bank import take_rows
from darkroom.models.model import is_lcm_scheduler
from darkroom.sample.denoise import Owner, Row, Unet
from darkroom.sample.optimisations.applied import Applied, CallOf
from darkroom.sample.solvers import SolverTable

LAYERS = 2
"""Last layers of the last up block that every step computes, as the paper's own setting for SD."""
EVERY = 2


@dataclass(repr=False)
class _KeptFeatures:
    """A row's deep features, and at which of its steps they were computed."""

    step: int
    features_CHW: torch.Tensor


class Shallow:
    """The first and last layers of a U-Net with the deep features given: called as the U-Net is."""

    def __init__(self, unet: Any, layers: int = LAYERS) -> None:
        self._unet = unet
        self._layers = min(layers, len(unet.up_blocks[-1].resnets))
        self.features: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unet, name)

    @property
    def entrance(self) -> Any:
        """The layer whose input holds the deep features, before the skip connection's channels."""
        return self._unet.up_blocks[-1].resnets[-self._layers]

    def skip_channels(self) -> int:
        """Channels of the skip connection that enters with the deep features."""
        unet = self._unet
        first = unet.down_blocks[0]
        return int(
            first.resnets[self._layers - 2].out_channels if self._layers > 1 else unet.conv_in.out_channels
        )

    def __call__(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        *,
        encoder_hidden_states: torch.Tensor,
        timestep_cond: torch.Tensor | None = None,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
        return_dict: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor]:
        unet = self._unet
        assert self.features is not None
        time = unet.time_embedding(unet.get_time_embed(sample=sample, timestep=timestep), timestep_cond)
        added = unet.get_aug_embed(
            emb=time, encoder_hidden_states=encoder_hidden_states, added_cond_kwargs=added_cond_kwargs
        )
        time = time if added is None else time + added
        text = unet.process_encoder_hidden_states(
            encoder_hidden_states=encoder_hidden_states, added_cond_kwargs=added_cond_kwargs
        )
        hidden = unet.conv_in(sample)
        skips = [hidden]
        for i in range(self._layers - 1):
            hidden = _layer(unet.down_blocks[0], i, hidden, time, text)
            skips.append(hidden)
        last = unet.up_blocks[-1]
        # Where a call is split in parts, each takes its own rows' features.
        hidden, self.features = self.features[: len(sample)], self.features[len(sample) :]
        for i in range(len(last.resnets) - self._layers, len(last.resnets)):
            hidden = _layer(last, i, torch.cat([hidden, skips.pop()], dim=1), time, text)
        if unet.conv_norm_out:
            hidden = unet.conv_act(unet.conv_norm_out(hidden))
        return (unet.conv_out(hidden),)


def _layer(block: Any, i: int, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The i-th residual layer of a block, and its attention where it has any."""
    hidden: torch.Tensor = block.resnets[i](x, time)
    attentions = getattr(block, "attentions", None)
    if attentions:
        hidden = attentions[i](hidden, encoder_hidden_states=text, return_dict=False)[0]
    return hidden


class FeatureCache:
    """A U-Net that runs whole at every `every`-th step of a row, and its first and last layers between."""

    def __init__(self, whole: Unet, shallow: Unet, parts: Shallow, every: int) -> None:
        self._whole, self._shallow, self._parts, self._every = whole, shallow, parts, every
        self._kept: WeakKeyDictionary[Row, dict[int, _KeptFeatures]] = WeakKeyDictionary()
        self._seen: list[torch.Tensor] = []
        parts.entrance.register_forward_pre_hook(self._see)

    def _see(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._seen.append(inputs[0])

    def __call__(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The whole U-Net: nothing is known of whose rows these are."""
        out = self._whole(x, t, text, added)
        self._seen.clear()
        return out

    def of_rows(self, owners: Sequence[Owner]) -> Unet:
        """The call for rows of which is known whose they are."""
        return partial(self._call, owners)

    def _call(
        self,
        owners: Sequence[Owner],
        x: torch.Tensor,
        t: torch.Tensor,
        text: torch.Tensor,
        added: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        near = [place for place, owner in enumerate(owners) if self._reuses(*owner)]
        far = [place for place, owner in enumerate(owners) if not self._reuses(*owner)]
        given = (x, t, text, added)
        if not near:
            return self._run_whole(owners, given)
        if not far:
            return self._run_shallow(owners, given)
        shallow = self._run_shallow([owners[i] for i in near], _taken(given, near))
        whole = self._run_whole([owners[i] for i in far], _taken(given, far))
        return torch.cat([shallow, whole])[new_tensor([*near, *far], whole.device).argsort()]

    def _reuses(self, row: Row, which: int) -> bool:
        kept = self._kept.get(row, {}).get(which)
        return kept is not None and 0 < row.step - kept.step < self._every

    def _run_whole(self, owners: Sequence[Owner], given: Any) -> torch.Tensor:
        self._seen.clear()
        out = self._whole(*given)
        channels = self._seen[0].shape[1] - self._parts.skip_channels()
        features = [feature for seen in self._seen for feature in seen[:, :channels].unbind()]
        self._seen.clear()
        for (row, which), feature in zip(owners, features, strict=True):
            self._kept.setdefault(row, {})[which] = _KeptFeatures(row.step, feature)
        return out

    def _run_shallow(self, owners: Sequence[Owner], given: Any) -> torch.Tensor:
        self._parts.features = torch.stack([self._kept[row][which].features_CHW for row, which in owners])
        try:
            return self._shallow(*given)
        finally:
            self._parts.features = None
            self._seen.clear()


def _taken(given: Any, places: list[int]) -> Any:
    x, t, text, added = given
    index = new_tensor(places, x.device)  # a list would be copied anew for each, and waited for
    return x[index], t[index], text[index], take_rows(added, index, places)


INTERVAL = (0.28, 5.42)
"""Noise levels of Kynkaanniemi et al. 2024 (arXiv 2404.07724) for Stable Diffusion XL."""
MOST_EVERY = 10


def guidance_interval(applied: Applied, argument: str) -> None:
    """Guidance only at middling noise levels; elsewhere a picture takes one U-Net row, not two."""
    low, high = INTERVAL
    if argument:
        found = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", argument)
        low, high = (float(found[1]), float(found[2])) if found else (1.0, 0.0)
        if low >= high:
            raise InputError(
                f"guidance_interval:{argument}",
                allowed="LOW-HIGH, noise levels (sigma) such as 0.28-5.42; SD's lie between 0.03 and 14.6",
            )
    applied.guidance_interval = (low, high)
    applied.notes.append(f"guidance_interval: guided where {low:g} < sigma <= {high:g}")


def interval_of(table: SolverTable, low: float, high: float) -> tuple[float, float]:
    """The steps of a table with noise levels above `low` and not above `high`, as fractions of all steps.

    The level is the noise's share by the picture's share. No step at all: an empty interval.
    """
    picture, noise = table.levels_S2[:, 0], table.levels_S2[:, 1]
    inside = [i for i in range(len(table)) if low * picture[i] < noise[i] <= high * picture[i]]
    return (inside[0] / len(table), (inside[-1] + 1) / len(table)) if inside else (0.0, 0.0)


def feature_cache(applied: Applied, argument: str) -> None:
    """The whole U-Net at every N-th step only; its first and last layers between."""
    every = int(argument) if argument.isdecimal() else 0 if argument else EVERY
    if not 2 <= every <= MOST_EVERY:
        raise InputError(
            f"feature_cache:{argument}", allowed=f"N of 2 to {MOST_EVERY}: whole steps in every N"
        )
    applied.own("unet")

    def outer(applied: Applied, call_of: CallOf) -> Unet:
        parts = Shallow(applied.model.unet)
        return FeatureCache(applied.plain(call_of), applied.plain(call_of, parts), parts, every)

    applied.outer = outer
    applied.notes.append(f"feature_cache: deep layers of the U-Net at one step in {every} only")


def lcm(applied: Applied, argument: str) -> None:
    """A latent consistency model's few steps: its weights as they are, or an adapter added to the U-Net."""
    model = applied.model
    if argument:
        _merge(applied, argument)
    elif not is_lcm(model):
        raise InputError(
            "lcm: this model was not distilled to few steps", mend="give an LCM adapter: lcm:FILE"
        )
    applied.notes.append("lcm: another model's picture, in few steps without guidance")


def _merge(applied: Applied, file: str) -> None:
    """Add an adapter to copies of the weights that it changes."""
    from darkroom.models.adapters.read import changeable, fit, merge, read_adapter

    adapter = read_adapter(file)
    applied.own_all()
    layers = changeable(applied.model)
    for path in fit(adapter, applied.model).layers:
        for parameter in layers[path].parameters(recurse=False):
            parameter.data = parameter.data.clone()
    merge(applied.model, adapter)


def is_lcm(model: object) -> bool:
    """Whether a model is a consistency model itself."""
    config = getattr(getattr(model, "unet", None), "config", None)
    scheduler = getattr(model, "scheduler", {})
    takes_guidance = getattr(config, "time_cond_proj_dim", None) is not None
    return takes_guidance or is_lcm_scheduler(scheduler)
