"""What the workers of an online feed do: rows of a batch read and cut on CPUs, encoded by actors.

A block is the rows of one rank's share of a global batch that the trainer itself would have encoded in one
call, so the numbers are those of `data.encode=inline`. Crops, flips and dropped captions are drawn where the
rows are read, from (seed, epoch, row) alone.

torch is imported where it is used: the keeper takes the encoder's class from here and needs none of it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from darkroom.cluster.encoders import device_here
from darkroom.cluster.shared_store import check_here
from darkroom.cluster.usage import BlockTimes

if TYPE_CHECKING:
    from darkroom.data.loader import Assembler, ReadSettings
    from darkroom.data.order import BatchRows

Columns = dict[str, Any]


@dataclass(frozen=True)
class RowSource:
    """Where rows come from and how they are read."""

    store: str
    version: int
    read: ReadSettings


@dataclass(frozen=True)
class OnlineAsk:
    """Rows to encode; their indices are positions in the store."""

    source: RowSource
    rows: BatchRows


@dataclass(frozen=True)
class Parts:
    """The frozen parts that encoders hold. Without text encoders captions stay captions."""

    identity: str
    vae: Any
    text_encoders: tuple[Any, ...] = ()
    tokenizers: tuple[Any, ...] = ()


def asked(source: RowSource, rows: BatchRows, most: int) -> list[OnlineAsk]:
    """A rank's rows of a batch in blocks of at most so many."""
    cuts = [slice(start, start + most) for start in range(0, len(rows), most)]
    return [
        OnlineAsk(
            source,
            replace(
                rows,
                epochs_B=rows.epochs_B[cut],
                indices_B=rows.positions_B[cut],
                positions_B=rows.positions_B[cut],
            ),
        )
        for cut in cuts
    ]


@lru_cache(maxsize=4)
def _assembler(source: RowSource) -> Assembler:
    """One a worker and source: the store is opened once."""
    from darkroom.data.loader import row_assembler
    from darkroom.data.store import Store

    check_here(source.store)
    store = Store.open(source.store, version=source.version)
    return row_assembler(store, source.read.model_copy(update={"draws": ()}))


def read_rows(ask: OnlineAsk, tokenizers: tuple[Any, ...] | None) -> tuple[Columns, BlockTimes]:
    """The CPU stage: pixels cut as this epoch has them, and captions or, with tokenizers, their token ids."""
    import numpy as np
    import torch

    from darkroom.prepare.making import token_ids

    began = time.perf_counter()
    columns = dict(_assembler(ask.source).build(ask.rows).columns)
    if tokenizers and "caption" in columns:
        rows = [token_ids(caption, tokenizers=tokenizers) for caption in columns.pop("caption")]
        columns["ids"] = [np.stack(each) for each in zip(*rows, strict=True)]
    arrays = {
        name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in columns.items()
    }
    return arrays, BlockTimes(ready_s=time.perf_counter() - began)


class OnlineEncoder:
    """An encoder actor of an online feed."""

    def __init__(self, parts: Parts) -> None:
        from darkroom.prepare.encoders import TextEncoder, VaeEncoder

        device = device_here()
        self._vae = VaeEncoder(parts.vae, device=device)
        encoders, tokenizers = parts.text_encoders, parts.tokenizers
        self._text = TextEncoder(encoders, tokenizers, device=device) if encoders else None

    def ping(self) -> int:
        """That it is up: its process."""
        return os.getpid()

    def encode(self, columns: Columns, ask: OnlineAsk) -> tuple[Columns, BlockTimes]:
        """Moments in place of pixels, states in place of token ids."""
        import torch

        began = time.perf_counter()
        out = {name: value for name, value in columns.items() if name not in ("pixels", "ids")}
        # Ray's arrays cannot be written to, and torch wants what it can.
        out["moments"] = self._vae.encode(torch.from_numpy(columns["pixels"].copy())).cpu().numpy()
        if self._text is not None and "ids" in columns:
            states, pooled = self._text.encode_tokens(
                [torch.from_numpy(ids.copy()) for ids in columns["ids"]]
            )
            out["text"] = states.cpu().numpy()
            if pooled is not None:
                out["pooled"] = pooled.cpu().numpy()
        return out, BlockTimes(encode_s=time.perf_counter() - began)
