"""A column that is to be made: its field, and how source values become what it holds.

Making has two halves. `ready` needs no accelerator and takes one value: a picture is decoded and cut, a
caption tokenised. `encode` takes the ready values of a batch to the encoder. One process does both; on a
cluster they run on different machines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from darkroom import models
from darkroom.data.images import PictureError, decode, nearest_bucket, resize_crop
from darkroom.data.images import buckets as bucket_sizes
from darkroom.errors import InputError, StoreError
from darkroom.prepare.columns import latents_field, text_field
from darkroom.prepare.encoders import TextEncoder, VaeEncoder, tokenize

Value = dict[str, Any] | None
Array = npt.NDArray[Any]
Ready = Callable[[Any], Any]
"""Turns one source value into what an encoder takes; None where that cannot be done."""


class Encode(Protocol):
    """Turns ready values into those of a prepared column."""

    def __call__(self, ready: Sequence[Any]) -> list[Value]:
        """One value for each, in the same order; None for None."""
        ...

    def on(self, device: str | torch.device) -> Encode:
        """The same on another device."""
        ...


@dataclass(frozen=True)
class Column:
    """A column to make: its field, what it is made from, how, and how many rows share an encoder's batch."""

    field: pa.Field
    source: str
    ready: Ready
    encode: Encode
    batch_rows: int
    ready_bytes: int  # of one ready value

    @property
    def name(self) -> str:
        """The column's name in the store."""
        return str(self.field.name)


def columns_to_make(
    model: models.Model | str | Path,
    resolution: int,
    latents: bool,
    text: bool,
    bucket_step: int,
    *,
    precision: str,
    device: torch.device,
    batch_rows: int,
) -> Iterator[Column]:
    """The columns that a model's encoders make."""
    parts = (["vae"] if latents else []) + (["text_encoder", "tokenizer"] if text else [])
    made = model if isinstance(model, models.Model) else models.load(model, parts=parts)
    if latents:
        if made.vae is None:
            raise StoreError("the model has no VAE to make latents with")
        vae = VaeEncoder(made.vae, precision=precision, device=device)
        yield _latents_job(vae, resolution, bucket_step=bucket_step, batch_rows=batch_rows)
    if text:
        encoder = TextEncoder(made.text_encoders, made.tokenizers, precision=precision, device=device)
        yield _text_job(encoder, made.tokenizers, batch_rows=batch_rows)


def _latents_job(vae: VaeEncoder, resolution: int, *, bucket_step: int = 0, batch_rows: int = 16) -> Column:
    """The column of this VAE's latents at a resolution."""
    odd = next((side for side in (bucket_step, resolution) if side % vae.factor), None)
    if odd is not None:
        name = "resolution" if odd == resolution else "buckets"
        raise InputError(f"{name} {odd}", allowed=f"multiples of {vae.factor}, the side of a latent pixel")
    sizes = bucket_sizes(resolution, step=bucket_step) if bucket_step else [(resolution, resolution)]
    crop = f"buckets-{bucket_step}" if bucket_step else "centre"
    made = latents_field(
        resolution,
        vae.identity,
        scaling=vae.scaling,
        crop=crop,
        precision=vae.precision,
        settings=vae.settings,
    )
    ready = partial(_cut_picture, sizes=sizes)
    return Column(made, "picture", ready, MakeLatents(vae), batch_rows, 3 * resolution**2)


def _text_job(text: TextEncoder, tokenizers: Sequence[Any], *, batch_rows: int = 16) -> Column:
    """The column of this text encoder's states."""
    made = text_field(text.identity, empty=text.empty(), precision=text.precision, settings=text.settings)
    ready = partial(token_ids, tokenizers=list(tokenizers))
    ids_bytes = sum(8 * int(tokenizer.model_max_length) for tokenizer in tokenizers)
    return Column(made, "caption", ready, MakeStates(text), batch_rows, ids_bytes)


def _cut_picture(picture: bytes, *, sizes: Sequence[tuple[int, int]]) -> Array | None:
    """A picture's bytes as uint8 [3, H, W] of the nearest size; None where it cannot be decoded."""
    try:
        image = decode(picture)
    except PictureError:
        return None
    cut = resize_crop(image, nearest_bucket(image.width, image.height, sizes))
    return np.ascontiguousarray(np.asarray(cut.convert("RGB")).transpose(2, 0, 1))


def token_ids(caption: str, *, tokenizers: Sequence[Any]) -> list[Array]:
    """A caption's token ids [L] for each text encoder."""
    return [ids[0].numpy() for ids in tokenize(tokenizers, [caption])]


@dataclass(frozen=True)
class MakeLatents:
    """Latents of cut pictures; those of one size share a call."""

    vae: VaeEncoder

    def __call__(self, ready: Sequence[Array | None]) -> list[Value]:
        out: list[Value] = [None] * len(ready)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, pixels in enumerate(ready):
            if pixels is not None:
                by_shape.setdefault(pixels.shape, []).append(i)
        for _, members in sorted(by_shape.items()):
            moments = self.vae.encode(torch.from_numpy(np.stack([ready[i] for i in members])))  # type: ignore[misc]
            for i, row in zip(members, moments.cpu().numpy(), strict=True):
                out[i] = {"moments": row.tobytes(), "height": row.shape[2], "width": row.shape[3]}
        return out

    def on(self, device: str | torch.device) -> MakeLatents:
        """The same on another device."""
        return replace(self, vae=copy.copy(self.vae).to(device))


@dataclass(frozen=True)
class MakeStates:
    """Text states of token ids."""

    text: TextEncoder

    def __call__(self, ready: Sequence[Sequence[Array]]) -> list[Value]:
        tokens = [torch.from_numpy(np.stack(each)) for each in zip(*ready, strict=True)]
        states, pooled = self.text.encode_tokens(tokens)
        pools = [None] * len(ready) if pooled is None else [row.tobytes() for row in pooled.cpu().numpy()]
        return [
            {"states": row.tobytes(), "length": row.shape[0], "width": row.shape[1], "pooled": pool}
            for row, pool in zip(states.cpu().numpy(), pools, strict=True)
        ]

    def on(self, device: str | torch.device) -> MakeStates:
        """The same on another device."""
        return replace(self, text=copy.copy(self.text).to(device))
