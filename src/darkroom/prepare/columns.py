"""Encoders, which turn pictures into latent moments and captions into states, stored or inline alike; and the
columns that hold what they make.

Legend: B rows, H and W pixels, C channels, h and w latent pixels, L tokens, D width of a state, P of a
pooled.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from darkroom import __version__, models
from darkroom.data.images import PictureError, decode, nearest_bucket, resize_crop
from darkroom.data.images import buckets as bucket_sizes
from darkroom.data.loader import Batch
from darkroom.data.store import Store
from darkroom.errors import ColumnError, InputError, ModelError, StoreError
from darkroom.hardware.accelerator import to_device
from darkroom.models.model import LatentScaling

# ---- encoders

_COUNTS = ("act_fn", "hidden_act", "norm_num_groups", "num_attention_heads", "layer_norm_eps")
"""Of an encoder's configuration: what its weights' names and shapes do not tell and its numbers depend on."""


def encoder_settings(*modules: nn.Module) -> str:
    """What of these encoders' configurations decides their numbers besides the weights, as JSON."""
    found = []
    for module in modules:
        config: Any = module.config
        given = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        found.append({name: given[name] for name in _COUNTS if name in given})
    return json.dumps(found, sort_keys=True)


def _compute_type(precision: str, device: torch.device) -> torch.dtype:
    """The number format to encode in; InputError for float16 on a CPU, where it is five times slower."""
    if precision == "fp16" and device.type == "cpu":
        raise InputError("precision fp16 on a CPU", allowed="float32, or bf16 (faster where the CPU has it)")
    return models.precision(precision)


def _placed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The module on a device in a number format, in eval mode; a copy where the caller's would change."""
    here = next(module.parameters())
    if here.device != device or here.dtype != dtype or module.training:
        module = nn.Module.to(copy.deepcopy(module), device, dtype).eval()
    return module


class VaeEncoder:
    """Pictures to the mean and standard deviation of their latents.

    `identity` is the SHA-256 of the VAE's float32 weights, `settings` what else its numbers depend on,
    `scaling` how its latents become the U-Net's.
    """

    def __init__(
        self, vae: nn.Module, *, precision: str = "float32", device: str | torch.device = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.precision, self._dtype = precision, _compute_type(precision, self.device)
        self.identity, self.settings = models.identity(vae), encoder_settings(vae)
        config: Any = vae.config
        self.scaling = models.LatentScaling.of(vae)
        self.channels = int(config.latent_channels)
        self.factor: int = 2 ** (len(config.block_out_channels) - 1)
        self._vae = _placed(vae, self.device, self._dtype)

    def to(self, device: str | torch.device) -> Self:
        """Move to a device, in place."""
        self.device = torch.device(device)
        self._dtype = _compute_type(self.precision, self.device)
        self._vae = _placed(self._vae, self.device, self._dtype)
        return self

    def encode(self, pixels_B3HW: Tensor) -> Tensor:
        """Moments float16 [B, 2, C, h, w] of uint8 pictures: mean and standard deviation, not scaled."""
        return encode_moments(self._vae, to_device(pixels_B3HW, self.device))


@torch.no_grad()
def encode_moments(vae: Any, pixels_B3HW: Tensor) -> Tensor:
    """What a VAE makes of uint8 pictures on its device, in its precision; moments as `VaeEncoder.encode`."""
    x_B3HW = (pixels_B3HW.float() / 127.5 - 1).to(next(vae.parameters()).dtype)
    latents = vae.encode(x_B3HW).latent_dist
    return torch.stack([latents.mean, latents.std], dim=1).to(torch.float16)


def sample_latents(
    moments_B2CHW: Tensor, posterior_BCHW: Tensor | None, scaling: models.LatentScaling
) -> Tensor:
    """Latents as the U-Net takes them, float32: mean + std * draw, scaled; without a draw the mean."""
    mean, std = moments_B2CHW.float().unbind(1)
    return scaling.seen(mean if posterior_BCHW is None else mean + std * posterior_BCHW.to(mean))


def tokenize(tokenizers: Sequence[Any], captions: Sequence[str]) -> list[Tensor]:
    """Token ids int64 [B, L] of each tokenizer, cut and padded to its length as diffusers' pipelines do."""
    return [
        tokenizer(
            models.spelled(tokenizer, captions),
            padding="max_length",
            max_length=tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        for tokenizer in tokenizers
    ]


def text_states(encoders: Sequence[nn.Module], tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """States [B, L, D] as the U-Net takes them, and SDXL's pooled state [B, P]; keeps gradients.

    One encoder: its last hidden state. Two (SDXL): their penultimate layers side by side, and the second's
    projected pooled state.
    """
    if len(encoders) == 1:
        states: Tensor = encoders[0](tokens[0]).last_hidden_state
        return states, None
    outs = [encoder(ids, output_hidden_states=True) for encoder, ids in zip(encoders, tokens, strict=True)]
    return torch.cat([out.hidden_states[-2] for out in outs], dim=-1), outs[-1].text_embeds


class TextEncoder:
    """Captions to text states.

    `identity` is the SHA-256 over the encoders' float32 weights and the tokenizers' vocabularies: the same
    weights read other words through another tokenizer. `settings` is what else their numbers depend on.
    """

    def __init__(
        self,
        encoders: Sequence[nn.Module],
        tokenizers: Sequence[Any],
        *,
        precision: str = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        if not encoders or len(encoders) != len(tokenizers):
            raise ModelError(f"{len(encoders)} text encoders and {len(tokenizers)} tokenizers")
        self.device = torch.device(device)
        self.precision, dtype = precision, _compute_type(precision, self.device)
        self.identity, self.settings = _text_identity(encoders, tokenizers), encoder_settings(*encoders)
        self._tokenizers = list(tokenizers)
        self._encoders = [_placed(encoder, self.device, dtype) for encoder in encoders]

    def to(self, device: str | torch.device) -> Self:
        """Move to a device, in place."""
        self.device = torch.device(device)
        dtype = _compute_type(self.precision, self.device)
        self._encoders = [_placed(encoder, self.device, dtype) for encoder in self._encoders]
        return self

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """States float16 [B, L, D] and, for SDXL, pooled float16 [B, P]."""
        return self.encode_tokens(tokenize(self._tokenizers, captions))

    @torch.no_grad()
    def encode_tokens(self, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The same of token ids [B, L], one for each text encoder."""
        states, pooled = text_states(self._encoders, [to_device(ids, self.device) for ids in tokens])
        return states.to(torch.float16), None if pooled is None else pooled.to(torch.float16)

    def empty(self) -> str:
        """The empty caption's states as the JSON that a text column's metadata keeps."""
        states, pooled = self.encode([""])
        parts = {"text": states[0]} | ({} if pooled is None else {"pooled": pooled[0]})
        packed = {
            name: {
                "data": base64.b64encode(part.cpu().contiguous().numpy().tobytes()).decode(),
                "shape": list(part.shape),
            }
            for name, part in parts.items()
        }
        return json.dumps(packed)


def _text_identity(encoders: Sequence[nn.Module], tokenizers: Sequence[Any]) -> str:
    digest = hashlib.sha256(models.identity(*encoders).encode())
    for tokenizer in tokenizers:
        kept = {"length": tokenizer.model_max_length, "vocabulary": tokenizer.get_vocab()}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    return digest.hexdigest()


class InlineEncoder:
    """Adds to a batch of pixels and captions what prepared columns would have given: the same numbers."""

    def __init__(self, vae: VaeEncoder | None = None, text: TextEncoder | None = None) -> None:
        self._vae, self._text = vae, text

    def __call__(self, batch: Batch) -> Batch:
        """The batch itself, with `moments` and `text` (and `pooled`) where it lacks them."""
        if self._vae is not None and "moments" not in batch:
            batch.columns["moments"] = self._vae.encode(batch["pixels"])
        if self._text is not None and "text" not in batch:
            states, pooled = self._text.encode(batch["caption"])
            batch.columns["text"] = states
            if pooled is not None:
                batch.columns["pooled"] = pooled
        return batch


# ---- prepared columns: names, types and metadata, finding the one that a model made, and making one
#
# A column that is to be made has its field, and how source values become what it holds.
#
# Making has two halves. `ready` needs no accelerator and takes one value: a picture is decoded and cut, a
# caption tokenised. `encode` takes the ready values of a batch to the encoder. One process does both; on a
# cluster they run on different machines.

# Latents and states hardly compress: trying only costs time.
_RAW = {"lance-encoding:compression": "none"}

LATENTS_TYPE = pa.struct(
    [
        pa.field("moments", pa.large_binary(), metadata=_RAW),  # float16 [2, C, h, w], little-endian
        pa.field("height", pa.int16()),  # h
        pa.field("width", pa.int16()),  # w
    ]
)
TEXT_TYPE = pa.struct(
    [
        pa.field("states", pa.large_binary(), metadata=_RAW),  # float16 [L, D], little-endian
        pa.field("length", pa.int16()),  # L
        pa.field("width", pa.int32()),  # D
        pa.field("pooled", pa.large_binary()),  # float16 [P]; null but for SDXL
    ]
)
COUNTED_FRAGMENTS = 4096
_MADE_ALIKE = ("kind", "encoder", "resolution", "crop", "precision")
SETTINGS = "encoder_settings"
"""What an encoder's numbers depend on besides its weights. Columns of earlier versions do not note it."""


def _latents_name(resolution: int, identity: str) -> str:
    """The column that holds the latents of one VAE at one resolution."""
    return f"latents_{resolution}_{identity[:8]}"


def _text_name(identity: str) -> str:
    """The column that holds the states of one text encoder."""
    return f"text_{identity[:8]}"


def latents_field(
    resolution: int, identity: str, *, scaling: LatentScaling, crop: str, precision: str, settings: str = ""
) -> pa.Field:
    """The latents column with its metadata; `settings` as `VaeEncoder` has them."""
    noted = {
        "kind": "latents",
        "encoder": identity,
        "resolution": str(resolution),
        **scaling.noted(),
        "crop": crop,
        "precision": precision,
        "made_by": __version__,
        **({SETTINGS: settings} if settings else {}),
    }
    return pa.field(_latents_name(resolution, identity), LATENTS_TYPE, metadata=_prefixed(noted))


def text_field(identity: str, *, empty: str, precision: str, settings: str = "") -> pa.Field:
    """The text column with its metadata, the empty caption's states among it; `settings` as `TextEncoder` has
    them.
    """
    noted = {
        "kind": "text",
        "encoder": identity,
        "precision": precision,
        "empty": empty,
        "made_by": __version__,
        **({SETTINGS: settings} if settings else {}),
    }
    return pa.field(_text_name(identity), TEXT_TYPE, metadata=_prefixed(noted))


def _prefixed(noted: dict[str, str]) -> dict[str, str]:
    return {f"darkroom.{key}": value for key, value in noted.items()}


def check_made_alike(store: Store, field: pa.Field) -> None:
    """ColumnError when the store's column of that name was made in another way."""
    there = store.columns()[field.name]
    new = {key.decode(): value.decode() for key, value in field.metadata.items()}
    for what in _MADE_ALIKE:
        made, wanted = (noted.get(f"darkroom.{what}") for noted in (there, new))
        if made != wanted:
            raise ColumnError(
                f"{store.path}: column {field.name} was made with {what} {made}, not {wanted}",
                mend=f"prepare with {what} {made}, or drop the column",
            )
    _check_settings(store, field.name, there, new.get(f"darkroom.{SETTINGS}", ""))


def settings_that_differ(noted: Mapping[str, str], settings: str) -> list[str]:
    """Which settings an encoder of the same weights had otherwise when it made a column."""
    before = noted.get(f"darkroom.{SETTINGS}")
    if not before or not settings or before == settings:
        return []
    pairs = zip(json.loads(before), json.loads(settings), strict=False)
    return [
        f"{key} {was[key]}, the model's has {key} {now[key]}"
        for was, now in pairs
        for key in was
        if key in now and was[key] != now[key]
    ]


def _check_settings(store: Store, name: str, noted: Mapping[str, str], settings: str) -> None:
    """ColumnError where a column's encoder had the same weights and computed otherwise."""
    if other := settings_that_differ(noted, settings):
        raise ColumnError(
            f"{store.path}: column {name} was made by an encoder of the same weights with {'; '.join(other)}",
            mend="prepare in another store, or encode inline (data.encode=inline, data.text=inline)",
        )


@dataclass(frozen=True)
class Layout:
    """Where a column lies in the fragments' files: its own field ids and its source's."""

    leaves: frozenset[int]
    source: int

    @classmethod
    def of(cls, dataset: lance.LanceDataset, column: str, source: str) -> Layout:
        """The layout of a column in this version of the dataset."""
        schema = dataset.lance_schema
        leaves = [child.id() for child in schema.field(column).children()]
        return cls(frozenset(leaves), schema.field(source).id())

    def file(self, fragment: Any) -> str | None:
        """The file that holds the column's values of a fragment; None where all rows are still null."""
        return next((str(f.path) for f in fragment.files if self.leaves & set(f.fields)), None)

    def base(self, fragment: Any) -> str:
        """The file that holds what is encoded."""
        return next(str(f.path) for f in fragment.files if self.source in f.fields)


def latents_column(store: Store, resolution: int, identity: str, settings: str = "") -> str:
    """The finished latents column of this VAE (`VaeEncoder.identity`, `.settings`) at a resolution; else
    ColumnError.
    """
    command = f"darkroom prepare {store.path} --model MODEL --resolution {resolution}"
    made = _of_kind(store, "latents")
    alike = {name: noted for name, noted in made.items() if noted["darkroom.resolution"] == str(resolution)}
    if made and not alike:
        there = sorted({int(noted["darkroom.resolution"]) for noted in made.values()})
        raise ColumnError(
            f"{store.path} has no latents at resolution {resolution}",
            allowed=f"resolution {', '.join(map(str, there))}",
            mend=f"or run: {command}",
        )
    name = _by_identity(store, alike, "latents", identity, "picture", command)
    _check_settings(store, name, made[name], settings)
    return name


def text_column(store: Store, identity: str, settings: str = "") -> str:
    """The finished text column of this text encoder (`TextEncoder.identity`, `.settings`); else
    ColumnError.
    """
    command, made = f"darkroom prepare {store.path} --model MODEL --text", _of_kind(store, "text")
    name = _by_identity(store, made, "text", identity, "caption", command)
    _check_settings(store, name, made[name], settings)
    return name


def _of_kind(store: Store, kind: str) -> dict[str, dict[str, str]]:
    return {name: noted for name, noted in store.columns().items() if noted.get("darkroom.kind") == kind}


def _by_identity(
    store: Store, made: dict[str, dict[str, str]], kind: str, identity: str, source: str, command: str
) -> str:
    for name, noted in made.items():
        if noted["darkroom.encoder"] == identity:
            _check_finished(store, name, source, command)
            return name
    if not made:
        raise ColumnError(f"{store.path} has no {kind} prepared", mend=f"run: {command}")
    others = ", ".join(noted["darkroom.encoder"] for noted in made.values())
    raise ColumnError(
        f"{store.path} has {kind} of another encoder: {others}, the model's is {identity}",
        mend=f"run: {command}",
    )


def _check_finished(store: Store, column: str, source: str, command: str) -> None:
    missing = _missing_rows(store, column, source)
    if missing:
        raise ColumnError(
            f"{store.path}: {missing} of {store.num_rows} rows have no {column} yet", mend=f"run: {command}"
        )


def _missing_rows(store: Store, column: str, source: str) -> int:
    """Rows that a column is null in: counted, or for a huge store read from the manifest alone.

    Counting reads a few hundred bytes a fragment (the heights, which compress to nothing). The manifest does
    not know of single nulls in fragments that were joined; those are noticed when they are read.
    """
    fragments = store.dataset.get_fragments()
    if len(fragments) <= COUNTED_FRAGMENTS:
        return int(store.dataset.count_rows(f"{column} IS NULL"))
    layout = Layout.of(store.dataset, column, source)
    metadata = [fragment.metadata for fragment in fragments]
    return sum(fragment.num_rows for fragment in metadata if layout.file(fragment) is None)


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
