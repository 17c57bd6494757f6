"""The adapter bank: many adapters side by side in one model, chosen row by row of a batch.

Each adapted layer holds the matrices of all slots stacked and padded with zeros to the largest rank, so rows
with different adapters share one call, a change of adapter is a copy into a slot, and shapes never change:
nothing recompiles, nothing is merged, captured graphs go on. Slot 0 is none. A call in which no row has an
adapter runs the layers as they were, bit for bit.

What is not of low rank stays apart: a factor for each output (DoRA's magnitudes, IA3), and where nothing
smaller tells it (LoHa, LoKr, OFT, BOFT, whole differences) the difference itself, as large as the layer,
which the rows that have it are multiplied with too.

Shapes: B rows of the batch, K adapters a row at most, N slots (with slot 0), r the largest rank, I inputs and
O outputs of a layer, L tokens or P pixels.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from darkroom.errors import ModelError
from darkroom.hardware import accelerator
from darkroom.models.adapters.adapter import (
    Adapter,
    Blocks,
    Change,
    by_layer,
    check_weight,
    low_rank_of,
)
from darkroom.models.adapters.read import changeable, check_untouched, fit

if TYPE_CHECKING:
    from darkroom.models.model import Model


Choice = Sequence[tuple[int, float]]
"""The adapters of one row: pairs of slot and weight."""
SLOTS, WEIGHTS = "adapter_slots", "adapter_weights"
"""Their name among the U-Net's other arguments in a batch."""
HOST = "_numbers_on_the_host"
"""Under which slots on a device keep the same numbers as a list."""
ROWS = "adapter_rows"
"""Where a U-Net or text encoder keeps its `RowAdapters`."""
STACKED = ("bank_down", "bank_up", "bank_gain")
# What a batch's matrices may take while they are kept between its steps; gathering them anew costs a copy.
MOST_KEPT_BYTES = 2**28


class _Dense(NamedTuple):
    """The rows of a call that have an adapter with differences as large as layers."""

    slot: int
    places: torch.Tensor | None
    """None is all rows."""
    weights: torch.Tensor
    """Of these rows."""


Rows = torch.Tensor | slice
"""Some rows of a call: a slice where they follow one another, so that nothing is copied to add to them."""


@dataclass(eq=False, repr=False)
class _GatheredMatrices:
    """The matrices of one batch's rows by layer, good as long as its slots and weights are."""

    weights_BK: torch.Tensor
    versions: tuple[int, int]
    weights_Bs1: torch.Tensor
    rank: int
    """The largest of the adapters that the rows have: no more of the slots is multiplied."""
    rows: Rows | None = None
    """The rows that have adapters, which alone are multiplied; None is all."""
    dense: Sequence[_Dense] = ()
    matrices: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By the id of the layer's `bank_down`, which is kept alive with them so that the id stays unique."""
    nbytes: int = 0


@dataclass(repr=False)
class _AdapterCall:
    """What the rows of a call have; None where no row has an adapter."""

    slots_BK: torch.Tensor | None = None
    weights_Bs1: torch.Tensor | None = None
    rank: int = 0
    kept: _GatheredMatrices | None = None
    dense: Sequence[_Dense] = ()


class _CallOfThread(threading.local):
    """The same, of each thread its own."""

    slots_BK: torch.Tensor | None = None
    weights_Bs1: torch.Tensor | None = None
    rank: int = 0
    kept: _GatheredMatrices | None = None
    dense: Sequence[_Dense] = ()


_LAYOUTS = itertools.count(1)


class RowAdapters:
    """Which adapters the rows of the `call` now running have.

    The weights are repeated for each rank of an adapter: `s` counts the ranks of a row's adapters, one after
    the other. Matrices gathered for a batch are kept while the batch lives and no slot is written to: from
    step to step the same tensors say who has what.
    """

    def __init__(self, max_rank: int, *, threads: bool = False) -> None:
        self.max_rank = max_rank
        self.width = 0
        """Adapters a row that a call is padded to, so that its shape stays the same; 0 is as they come."""
        self.ranks: dict[int, int] = {}
        """By slot, the largest rank of what it holds."""
        self.dense: set[int] = set()
        """The slots that hold differences as large as layers."""
        self.layout = next(_LAYOUTS)
        """A new number whenever layers begin to read other matrices: what was recorded before lacks them."""
        self.whole_calls = False
        """All rows are multiplied with them, at weight 0 where they have them not: the same shapes always."""
        self.call: _AdapterCall | _CallOfThread = _CallOfThread() if threads else _AdapterCall()
        self._kept: Any = WeakIdKeyDictionary()
        self._lock: AbstractContextManager[Any] = threading.Lock() if threads else nullcontext()

    def changed(self) -> None:
        """A layer reads other matrices from now on, or reads some for the first time."""
        self.layout = next(_LAYOUTS)

    @contextmanager
    def applied(self, slots_BK: torch.Tensor | None, weights_BK: torch.Tensor | None) -> Iterator[None]:
        """Calls in here see these rows' adapters; one row [1, K] holds for all rows of a call."""
        call = self.call
        if slots_BK is not None and weights_BK is not None:
            call.kept = self._kept_for(slots_BK, weights_BK)
            if call.kept is not None and call.kept.rank == 0:
                call.kept = slots_BK = None  # of a batch's parts, one without adapters
        if slots_BK is not None and weights_BK is not None:
            missing = (0, max(0, self.width - slots_BK.shape[1]))
            call.slots_BK = nn.functional.pad(slots_BK, missing) if missing[1] else slots_BK
            call.rank = call.kept.rank if call.kept else self.max_rank
            call.weights_Bs1 = call.kept.weights_Bs1 if call.kept else self._repeated(weights_BK, missing)
            call.dense = call.kept.dense if call.kept else self._dense_rows(slots_BK, weights_BK)
        try:
            yield
        finally:
            call.slots_BK = call.weights_Bs1 = call.kept = None
            call.dense = ()

    def _dense_rows(self, slots_BK: torch.Tensor, weights_BK: torch.Tensor) -> list[_Dense]:
        """Who has which difference as large as layers, in the order in which rows name them."""
        if not self.dense:
            return []
        found = []
        on_host = getattr(slots_BK, HOST, None)  # else a card is waited for
        table = slots_BK.tolist() if on_host is None else on_host
        for k in range(slots_BK.shape[1]):
            for slot in dict.fromkeys(row[k] for row in table):
                places = [i for i, row in enumerate(table) if row[k] == slot]
                if slot not in self.dense:
                    continue
                if len(places) == len(table):
                    found.append(_Dense(slot, None, weights_BK[:, k]))
                elif self.whole_calls:
                    found.append(_Dense(slot, None, weights_BK[:, k] * (slots_BK[:, k] == slot)))
                else:
                    index = accelerator.new_tensor(places, slots_BK.device)
                    found.append(_Dense(slot, index, weights_BK[index, k]))
        return found

    def _adapted_rows(self, slots_BK: torch.Tensor) -> tuple[Rows | None, int]:
        """The rows that have an adapter, and the largest rank of these; None where all count as such: they
        do, or only the card knows."""
        table = getattr(slots_BK, HOST, None)
        if self.whole_calls or (table is None and slots_BK.device.type != "cpu"):
            return None, self.max_rank
        table = slots_BK.tolist() if table is None else table
        rank = max(self.ranks.get(slot, self.max_rank) if slot else 0 for row in table for slot in row)
        places = [i for i, row in enumerate(table) if any(row)]
        if not places or len(places) == len(table):
            return None, rank
        if places[-1] - places[0] == len(places) - 1:
            return slice(places[0], places[-1] + 1), rank
        return accelerator.new_tensor(places, slots_BK.device, torch.int64), rank

    def _repeated(
        self, weights_BK: torch.Tensor, missing: tuple[int, int] = (0, 0), rank: int | None = None
    ) -> torch.Tensor:
        weights = nn.functional.pad(weights_BK, missing) if missing[1] else weights_BK
        return weights.repeat_interleave(self.max_rank if rank is None else rank, 1)[:, :, None]

    def _kept_for(self, slots_BK: torch.Tensor, weights_BK: torch.Tensor) -> _GatheredMatrices | None:
        """What is kept for these very tensors; None where nothing can be: code that is compiled, captured or
        sealed gathers within itself."""
        if self.width or slots_BK.is_inference() or weights_BK.is_inference() or _recorded():
            return None
        versions = slots_BK._version, weights_BK._version
        with self._lock:
            kept: _GatheredMatrices | None = self._kept.get(slots_BK)
            if kept is None or kept.weights_BK is not weights_BK or kept.versions != versions:
                dense = self._dense_rows(slots_BK, weights_BK)
                rows, rank = self._adapted_rows(slots_BK)
                weights_Bs1 = self._repeated(weights_BK, rank=rank)
                kept = _GatheredMatrices(weights_BK, versions, weights_Bs1, rank, rows, dense)
                self._kept[slots_BK] = kept
        return kept

    def forget(self) -> None:
        """A slot is written to: what was gathered from it no longer holds."""
        with self._lock:
            self._kept = WeakIdKeyDictionary()

    @property
    def adapted(self) -> Rows | None:
        """The rows of this call that `matrices` are of; None is all."""
        kept = None if torch.compiler.is_compiling() else self.call.kept
        return None if kept is None else kept.rows

    def matrices(self, down_NrI: torch.Tensor, up_NrO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's matrices of the `adapted` rows, [B, s, I] and [B, s, O], the latter with the weights."""
        call = self.call
        kept = None if torch.compiler.is_compiling() else call.kept
        if kept is not None and (found := kept.matrices.get(id(down_NrI))) is not None:
            return found[1], found[2]
        assert call.slots_BK is not None
        assert call.weights_Bs1 is not None
        slots_BK, weights_Bs1 = call.slots_BK, call.weights_Bs1
        if (rows := self.adapted) is not None:
            slots_BK, weights_Bs1 = slots_BK[rows], weights_Bs1[rows]
        down_BsI = down_NrI[:, : call.rank][slots_BK].flatten(1, 2)
        up_BsO = up_NrO[:, : call.rank][slots_BK].flatten(1, 2)
        up_BsO = up_BsO * weights_Bs1.to(up_BsO.dtype)
        if kept is not None:
            self._keep(kept, down_NrI, down_BsI, up_BsO)
        return down_BsI, up_BsO

    def _keep(
        self, kept: _GatheredMatrices, down_NrI: torch.Tensor, down_BsI: torch.Tensor, up_BsO: torch.Tensor
    ) -> None:
        more = down_BsI.nbytes + up_BsO.nbytes
        with self._lock:
            if sum(one.nbytes for one in self._kept.values()) + more <= MOST_KEPT_BYTES:
                kept.matrices[id(down_NrI)] = down_NrI, down_BsI, up_BsO
                kept.nbytes += more


def _recorded() -> bool:
    """Whether operations are recorded now, to be run again with other rows."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return True
    return accelerator.capturing()


def rows_of(module: Any) -> RowAdapters:
    """Where a call of a U-Net or text encoder, or of what stands for it, gets its rows' adapters."""
    rows: RowAdapters | None = getattr(module, ROWS, None)
    if rows is None:
        raise ValueError("rows have adapters, and the model has no adapter bank")
    return rows


class Banked:
    """Mixed into the class of a layer that some adapter changes; its own parameters and names stay."""

    bank_rows: RowAdapters
    bank_down: torch.Tensor | None
    """[N, r, I], a convolution's with its kernel in I; None where no adapter of low rank changes the layer"""
    bank_up: torch.Tensor | None
    """[N, r, O], each adapter's scale within"""
    bank_gain: torch.Tensor | None
    """[N, O], how much is added of the layer's own output without its bias"""
    bank_deltas: dict[int, tuple[torch.Tensor, torch.Tensor | None]]
    """By slot, what is added to the weight and to the bias"""

    def forward(self, x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        """The layer's own output, and what the row's adapters add to it."""
        out: torch.Tensor = super().forward(x, *rest, **more)  # type: ignore[misc]
        call = self.bank_rows.call
        slots_BK = call.slots_BK
        if slots_BK is None:
            return out
        if slots_BK.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"{x.shape[0]} rows, and adapters for {slots_BK.shape[0]}")
        if self.bank_gain is not None:
            assert call.weights_Bs1 is not None
            weights_BK1 = call.weights_Bs1[:, :: call.rank]
            out = _gained(self, out, (self.bank_gain[slots_BK] * weights_BK1.to(out.dtype)).sum(1))
        if self.bank_down is not None:
            out = self._low_rank(x, out, slots_BK)
        for dense in call.dense:
            if (delta := self.bank_deltas.get(dense.slot)) is not None:
                out = _add_dense(self, x, out, *delta, dense)
        return out

    def _low_rank(self, x: torch.Tensor, out: torch.Tensor, slots_BK: torch.Tensor) -> torch.Tensor:
        assert self.bank_down is not None
        assert self.bank_up is not None
        down_BsI, up_BsO = self.bank_rows.matrices(self.bank_down, self.bank_up)
        if (rows := self.bank_rows.adapted) is not None:
            return _add_to_rows(self, x, out, down_BsI, up_BsO, rows)
        if slots_BK.shape[0] != x.shape[0]:
            down_BsI, up_BsO = (t.expand(x.shape[0], -1, -1) for t in (down_BsI, up_BsO))
        return _add(self, x, out, down_BsI, up_BsO)


def _gained(layer: Any, out: torch.Tensor, gain_BO: torch.Tensor) -> torch.Tensor:
    """An output and so much of it, channel by channel, without the bias."""
    is_conv, bias = isinstance(layer, nn.Conv2d), layer.bias
    if is_conv:
        gain = gain_BO[:, :, None, None]
    else:
        gain = gain_BO.reshape(len(gain_BO), *[1] * (out.ndim - 2), gain_BO.shape[1])
    own = out if bias is None else out - (bias[:, None, None] if is_conv else bias)
    return torch.addcmul(out, own, gain)


def _add_dense(
    layer: Any,
    x: torch.Tensor,
    out: torch.Tensor,
    delta: torch.Tensor,
    bias: torch.Tensor | None,
    dense: _Dense,
) -> torch.Tensor:
    mine = x if dense.places is None else x[dense.places]
    if isinstance(layer, nn.Conv2d):
        added = nn.functional.conv2d(mine, delta, bias, layer.stride, layer.padding, layer.dilation)
    elif isinstance(layer, nn.GroupNorm):
        added = nn.functional.group_norm(mine, layer.num_groups, delta, bias, layer.eps)
    elif isinstance(layer, nn.LayerNorm):
        added = nn.functional.layer_norm(mine, layer.normalized_shape, delta, bias, layer.eps)
    else:
        added = nn.functional.linear(mine, delta, bias)
    weighted = added * dense.weights.to(added.dtype).reshape(-1, *[1] * (added.ndim - 1))
    return out + weighted if dense.places is None else out.index_add(0, dense.places, weighted)


def _add(
    layer: Any, x: torch.Tensor, out: torch.Tensor, down_BsI: torch.Tensor, up_BsO: torch.Tensor
) -> torch.Tensor:
    """An output with each row's own product added."""
    if isinstance(layer, nn.Conv2d):
        return out + _conv_product(layer, x, down_BsI, up_BsO).reshape(out.shape)
    x_BLI = x.reshape(x.shape[0], -1, x.shape[-1])
    out_BLO = out.reshape(x.shape[0], -1, out.shape[-1])
    h_BLs = torch.bmm(x_BLI, down_BsI.transpose(1, 2))
    if torch.is_grad_enabled():
        return torch.baddbmm(out_BLO, h_BLs, up_BsO).reshape(out.shape)
    return out_BLO.baddbmm_(h_BLs, up_BsO).reshape(out.shape)  # the layer's own output: nobody else has it


def _add_to_rows(
    layer: Any,
    x: torch.Tensor,
    out: torch.Tensor,
    down_BsI: torch.Tensor,
    up_BsO: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """An output with the products of the rows that have adapters added to these alone, rounded as often as in
    a batch of nothing else."""
    mine = out[rows]
    if isinstance(rows, slice) and not torch.is_grad_enabled():  # the layer's own output: nobody else has it
        if isinstance(layer, nn.Conv2d):
            mine.add_(_conv_product(layer, x[rows], down_BsI, up_BsO).reshape(mine.shape))
        elif mine.is_contiguous():
            _add(layer, x[rows], mine, down_BsI, up_BsO)
        else:
            mine.copy_(_add(layer, x[rows], mine, down_BsI, up_BsO))
        return out
    mine = _add(layer, x[rows], mine, down_BsI, up_BsO)
    if isinstance(rows, slice):
        rows = torch.arange(rows.start, rows.stop, device=out.device)
    return out.index_copy(0, rows, mine) if torch.is_grad_enabled() else out.index_copy_(0, rows, mine)


def _conv_product(
    layer: nn.Conv2d, x: torch.Tensor, down_BsI: torch.Tensor, up_BsO: torch.Tensor
) -> torch.Tensor:
    """What adapters add to a convolution's output, [B, O, P]."""
    rows, ranks = down_BsI.shape[:2]
    if layer.kernel_size == (1, 1) and layer.stride == (1, 1):
        h_BsP = torch.bmm(down_BsI, x.flatten(2))
    else:  # each row with kernels of its own: one convolution in as many groups as rows
        h = torch.nn.functional.conv2d(
            x.reshape(1, rows * x.shape[1], *x.shape[2:]),
            down_BsI.reshape(rows * ranks, x.shape[1], *layer.kernel_size),
            None,
            layer.stride,
            layer.padding,
            layer.dilation,
            groups=rows,
        )
        h_BsP = h.reshape(rows, ranks, -1)
    return torch.bmm(up_BsO.transpose(1, 2), h_BsP)


@functools.cache
def _banked(cls: Any) -> type[nn.Module]:
    """A layer's class with the bank before it; the same class for all layers, so that compiling sees one."""
    return type(f"Banked{cls.__name__}", (Banked, cls), {})


@dataclass(frozen=True, eq=False, repr=False)
class Staged:
    """An adapter checked, cast and on the device: putting it into a slot is a copy from here."""

    name: str
    changes: Mapping[str, Change]
    """By the path of the layer"""

    @property
    def dense_bytes(self) -> int:
        """Of differences as large as layers."""
        return sum(change.delta.nbytes for change in self.changes.values() if change.delta is not None)


class Bank:
    """Slots 1 to `slots` of a model's U-Net and text encoders, for adapters of rank `max_rank` at most.

    A row may blend up to `most_a_row` adapters. Only layers that some adapter changes hold memory: `load`
    adds them as needed, until `seal` is called (before compiling or capturing), when an adapter that touches
    other layers is refused; `reserve` adds layers beforehand. One call of the U-Net, and one of the text
    encoders, runs at a time, unless `threads` says that several threads call them at once; loading into a
    slot that no row uses may go on meanwhile. `whole_calls` has calls take the same shapes whatever rows use.
    """

    def __init__(
        self, model: Model, *, slots: int, max_rank: int, most_a_row: int = 4, threads: bool = False
    ) -> None:
        if slots < 1 or max_rank < 1 or most_a_row < 1:
            raise ModelError(
                f"a bank of {slots} slots, rank {max_rank}, {most_a_row} a row", allowed="1 or more"
            )
        self.model, self.slots, self.max_rank, self.most_a_row = model, slots, max_rank, most_a_row
        self.sealed = False
        self._known = changeable(model)
        self._held: dict[str, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._rows = {part: RowAdapters(max_rank, threads=threads) for part in ("unet", "text")}
        for name, part in model.modules.items():
            if name != "vae":
                setattr(part, ROWS, self._rows["unet" if name == "unet" else "text"])

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers that hold slots."""
        return tuple(self._held)

    @property
    def nbytes(self) -> int:
        """Memory that the slots take."""
        held: Any = self._held.values()
        stacked: list[torch.Tensor | None] = [
            one for layer in held for one in (layer.bank_down, layer.bank_up, layer.bank_gain)
        ]
        return sum(t.nbytes for t in stacked if t is not None) + self.dense_bytes()

    def dense_bytes(self, slot: int | None = None) -> int:
        """Memory of differences as large as layers, of one slot or of all."""
        held: Any = self._held.values()
        found = [one for layer in held for one in tuple(layer.bank_deltas.items())]
        deltas: list[tuple[int, tuple[torch.Tensor, torch.Tensor | None]]] = found
        return sum(delta.nbytes for at, (delta, _) in deltas if slot is None or at == slot)

    def take_whole_calls(self) -> None:
        """From now on calls have the same shapes whatever rows use."""
        for rows in self._rows.values():
            rows.whole_calls = True

    @property
    def names(self) -> dict[int, str]:
        """The names of the adapters by slot."""
        return dict(self._names)

    def slot_of(self, name: str) -> int | None:
        """The slot that holds an adapter."""
        return next((slot for slot, held in self._names.items() if held == name), None)

    def check(self, adapter: Adapter) -> None:
        """ModelError, by name, for an adapter that cannot share a batch: its kind or its rank."""
        if self.sealed and adapter.kind != "lora":
            raise ModelError(
                f"adapter '{adapter.name}' is a {adapter.kind}, which compiled and captured calls cannot add",
                allowed="LoRA",
                mend="merge it into a model of its own: darkroom export MODEL --merge ADAPTER --to FOLDER",
            )
        if (rank := low_rank_of(adapter)) > self.max_rank:
            raise ModelError(
                f"adapter '{adapter.name}' has rank {rank}", allowed=f"at most {self.max_rank} here"
            )

    def stage(self, adapter: Adapter, blocks: Blocks = ()) -> Staged:
        """What takes time before `load`: fit to the model, cast, move. The bank stays as it is.

        With weights of `blocks` each layer's change counts so much (`blocks.by_layer`).
        """
        self.check(adapter)
        changes: dict[str, Change] = {}
        factor_of = by_layer(self.model, blocks)
        with torch.inference_mode(False), torch.no_grad():
            for path, layer in fit(adapter, self.model).layers.items():
                if not (factor := factor_of(path)):
                    continue
                weight, place = accelerator.weight_of(self._known[path]), self._place(path)
                dtype: torch.dtype = self._known[path].weight.dtype
                change = Change.of(layer, weight, factor, place).cast(place, dtype)
                if not all(bool(torch.isfinite(t).all()) for t in change.tensors):
                    raise ModelError(f"adapter '{adapter.name}', layer '{path}': too large for {dtype}")
                changes[path] = change
        if self.sealed and (new := changes.keys() - self._held.keys()):
            message = f"adapter '{adapter.name}' changes {len(new)} layers that the bank has not reserved"
            raise ModelError(f"{message}: {min(new)}")
        return Staged(adapter.name, changes)

    def load(self, slot: int, adapter: Adapter | Staged) -> None:
        """Put an adapter into a slot, in place of what was there. ModelError where it does not fit."""
        self._check_slot(slot)
        staged = adapter if isinstance(adapter, Staged) else self.stage(adapter)
        low_rank = [path for path, change in staged.changes.items() if change.low_rank is not None]
        self.reserve(staged.changes, low_rank)
        self._empty(slot)
        with torch.inference_mode(False), torch.no_grad():
            for path, change in staged.changes.items():
                self._put(self._held[path], slot, change)
        self._names[slot] = staged.name
        ranks = [change.low_rank[0].shape[0] for change in staged.changes.values() if change.low_rank]
        for rows in self._rows.values():
            rows.ranks[slot] = max(ranks, default=1)
        if staged.dense_bytes:
            for rows in self._rows.values():
                rows.dense.add(slot)
        self._forget()

    def _put(self, layer: Any, slot: int, change: Change) -> None:
        if change.low_rank is not None:
            for stacked, given in zip((layer.bank_down, layer.bank_up), change.low_rank, strict=True):
                stacked[slot, : given.shape[0]].copy_(given, non_blocking=True)
        if change.gain is not None:
            if layer.bank_gain is None:
                shape = self.slots + 1, len(change.gain)
                layer.bank_gain = torch.zeros(shape, device=change.gain.device, dtype=change.gain.dtype)
                layer.bank_rows.changed()
            layer.bank_gain[slot].copy_(change.gain, non_blocking=True)
        if change.delta is not None:
            layer.bank_deltas[slot] = change.delta, change.bias

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._check_slot(slot)
        self._empty(slot)
        self._forget()
        self._names.pop(slot, None)

    def _empty(self, slot: int) -> None:
        self._forget()
        for rows in self._rows.values():
            rows.dense.discard(slot)
        held: Any = self._held.values()
        with torch.inference_mode(False), torch.no_grad():
            for layer in held:
                # Where up is zero nothing is added, whatever stands in down.
                for stacked in (layer.bank_up, layer.bank_gain):
                    if stacked is not None:
                        stacked[slot].zero_()
                layer.bank_deltas.pop(slot, None)

    def _forget(self) -> None:
        for rows in self._rows.values():
            rows.forget()

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot <= self.slots:
            raise ModelError(f"slot {slot} of the adapter bank", allowed=f"1 to {self.slots}")

    def reserve(self, paths: Iterable[str], low_rank: Iterable[str] | None = None) -> None:
        """Reserve layers before an adapter that changes them is loaded; for LoRAs in some or all."""
        paths = list(paths)
        new = [path for path in paths if path not in self._held]
        if new and self.sealed:
            raise ModelError(
                f"the adapter bank has nothing reserved for '{new[0]}'", mend="reserve it before sealing"
            )
        for path in new:
            if path not in self._known:
                raise ModelError(f"no layer '{path}' to adapt in this model")
            self._held[path] = self._wrap(path)
        for path in paths if low_rank is None else low_rank:
            self._stack(path)

    def seal(self) -> None:
        """From now on no layer is added: compiled and captured calls stay as they are."""
        self.sealed = True
        for rows in self._rows.values():
            rows.width = self.most_a_row

    def _wrap(self, path: str) -> nn.Module:
        layer = self._known[path]
        if isinstance(layer, Banked):
            raise ModelError(f"layer '{path}' is in another adapter bank", mend="detach that one first")
        check_untouched(path, layer)
        if isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
            raise ModelError(f"layer '{path}' pads in a way that adapters do not know")
        banked: Any = layer
        for name in STACKED:
            layer.register_buffer(name, None, persistent=False)
        banked.bank_deltas = {}
        banked.bank_rows = self._rows["unet" if path.startswith("unet.") else "text"]
        banked.__class__ = _banked(type(layer))  # type: ignore[arg-type]
        return layer

    def _stack(self, path: str) -> None:
        """Room in a layer for the matrices of all slots."""
        layer: Any = self._held[path]
        if layer.bank_down is not None:
            return
        weight, place = layer.weight, self._place(path)
        outputs, inputs = weight.shape[0], weight.numel() // weight.shape[0]
        with torch.inference_mode(False):
            nothing = torch.zeros(self.slots + 1, self.max_rank, 1, device=place, dtype=weight.dtype)
            layer.bank_up = nothing.repeat(1, 1, outputs)
            layer.bank_down = nothing.repeat(1, 1, inputs)
        layer.bank_rows.changed()

    def _place(self, path: str) -> torch.device:
        """Where a layer computes, and what adapters add to it has to lie: its weights may wait elsewhere."""
        return accelerator.computed_on(self.model.modules[path.partition(".")[0]])

    def verify(self) -> None:
        """ModelError where something that changed the model since then would pass the bank's layers by."""
        known = changeable(self.model)
        for path, layer in self._held.items():
            if known.get(path) is not layer or not isinstance(layer, Banked):
                raise ModelError(
                    f"layer '{path}' is no longer run by itself", mend="adapters need it as it was"
                )
            check_untouched(path, layer)

    def detach(self) -> None:
        """Give the model back as it was: no slots, no memory."""
        for layer in self._held.values():
            layer.__class__ = type(layer).__mro__[2]
            for name in (*STACKED, "bank_deltas", "bank_rows"):
                delattr(layer, name)
        for part in self.model.modules.values():
            if getattr(part, ROWS, None) in self._rows.values():
                delattr(part, ROWS)
        self._held.clear()
        self._names.clear()

    def applied(
        self, part: str, slots_BK: torch.Tensor | None, weights_BK: torch.Tensor | None
    ) -> AbstractContextManager[None]:
        """Calls of the U-Net (`unet`) or the text encoders (`text`) in here see these rows' adapters."""
        return self._rows[part].applied(slots_BK, weights_BK)

    def lay_out(self, choices: Sequence[Choice], device: torch.device | str) -> dict[str, torch.Tensor]:
        """Rows' adapters as the tensors that a call takes; nothing where no row has one."""
        for choice in choices:
            if len(choice) > self.most_a_row:
                raise ModelError(
                    f"{len(choice)} adapters on one picture", allowed=f"at most {self.most_a_row}"
                )
            for slot, weight in choice:
                if slot:
                    self._check_slot(slot)
                check_weight(weight)
        return lay_out(choices, device)


def lay_out(choices: Sequence[Choice], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Rows' adapters as tensors [B, K], K as wide as the fullest row; nothing where no row has one."""
    kept = [[(slot, weight) for slot, weight in choice if slot and weight] for choice in choices]
    width = max((len(choice) for choice in kept), default=0)
    if not width:
        return {}
    padded = [[*choice, *[(0, 0.0)] * (width - len(choice))] for choice in kept]
    numbers = [[s for s, _ in row] for row in padded]
    slots_BK = accelerator.new_tensor(numbers, device, torch.int64)
    setattr(slots_BK, HOST, numbers)
    return {
        SLOTS: slots_BK,
        WEIGHTS: accelerator.new_tensor([[w for _, w in row] for row in padded], device, torch.float32),
    }


def take_rows(
    added: Mapping[str, torch.Tensor], index: torch.Tensor | slice, rows: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Some rows of a call's further arguments: `index` on the device, `rows` the same numbers on the host, by
    which the bank knows who has which adapter without asking the device."""
    found = {name: value[index] for name, value in added.items()}
    numbers = getattr(added.get(SLOTS), HOST, None)
    if numbers is not None:
        setattr(found[SLOTS], HOST, [numbers[i] for i in rows])
    return found
