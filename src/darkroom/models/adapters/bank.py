"""The adapter bank: many LoRAs side by side in one model, chosen row by row of a batch.

Each adapted layer holds the matrices of all slots stacked and padded with zeros to the largest rank, so rows
with different adapters share one call, a change of adapter is a copy into a slot, and shapes never change:
nothing recompiles, nothing is merged, captured graphs go on. Slot 0 is none. A call in which no row has an
adapter runs the layers as they were, bit for bit.

Shapes: B rows of the batch, K adapters a row at most, N slots (with slot 0), r the largest rank, I inputs and
O outputs of a layer, L tokens or P pixels.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from darkroom.errors import ModelError
from darkroom.hardware import accelerator
from darkroom.models.adapters.adapter import Adapter
from darkroom.models.adapters.layers import Layer
from darkroom.models.adapters.read import adaptable, check_untouched, fit

if TYPE_CHECKING:
    from darkroom.models.model import Model


Choice = Sequence[tuple[int, float]]
"""The adapters of one row: pairs of slot and weight."""
SLOTS, WEIGHTS = "adapter_slots", "adapter_weights"
"""What a batch calls them among what else the U-Net is told."""
ROWS = "adapter_rows"
"""Where a U-Net or text encoder keeps its `RowAdapters`."""
MAX_WEIGHT = 100.0
# What a batch's matrices may take while they are kept between its steps; gathering them anew costs a copy.
MOST_KEPT_BYTES = 2**28


@dataclass(eq=False, repr=False)
class _GatheredMatrices:
    """The matrices of one batch's rows by layer, good as long as its slots and weights are."""

    weights_BK: torch.Tensor
    versions: tuple[int, int]
    weights_Bs1: torch.Tensor
    matrices: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By the id of the layer's `bank_down`, which is held beside them so that the id stays its own."""
    nbytes: int = 0


@dataclass(repr=False)
class _AdapterCall:
    """What the rows of a call have; None where no row has an adapter."""

    slots_BK: torch.Tensor | None = None
    weights_Bs1: torch.Tensor | None = None
    kept: _GatheredMatrices | None = None


class _CallOfThread(threading.local):
    """The same, of each thread its own."""

    slots_BK: torch.Tensor | None = None
    weights_Bs1: torch.Tensor | None = None
    kept: _GatheredMatrices | None = None


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
        self.call: _AdapterCall | _CallOfThread = _CallOfThread() if threads else _AdapterCall()
        self._kept: Any = WeakIdKeyDictionary()
        self._lock: AbstractContextManager[Any] = threading.Lock() if threads else nullcontext()

    @contextmanager
    def applied(self, slots_BK: torch.Tensor | None, weights_BK: torch.Tensor | None) -> Iterator[None]:
        """Calls in here see these rows' adapters; one row [1, K] holds for all rows of a call."""
        call = self.call
        if slots_BK is not None and weights_BK is not None:
            call.kept = self._kept_for(slots_BK, weights_BK)
            missing = (0, max(0, self.width - slots_BK.shape[1]))
            call.slots_BK = nn.functional.pad(slots_BK, missing) if missing[1] else slots_BK
            call.weights_Bs1 = call.kept.weights_Bs1 if call.kept else self._repeated(weights_BK, missing)
        try:
            yield
        finally:
            call.slots_BK = call.weights_Bs1 = call.kept = None

    def _repeated(self, weights_BK: torch.Tensor, missing: tuple[int, int] = (0, 0)) -> torch.Tensor:
        weights = nn.functional.pad(weights_BK, missing) if missing[1] else weights_BK
        return weights.repeat_interleave(self.max_rank, 1)[:, :, None]

    def _kept_for(self, slots_BK: torch.Tensor, weights_BK: torch.Tensor) -> _GatheredMatrices | None:
        """What is kept for these very tensors; None where nothing can be: code that is compiled, captured or
        sealed gathers within itself."""
        if self.width or slots_BK.is_inference() or weights_BK.is_inference() or _recorded():
            return None
        versions = slots_BK._version, weights_BK._version
        with self._lock:
            kept: _GatheredMatrices | None = self._kept.get(slots_BK)
            if kept is None or kept.weights_BK is not weights_BK or kept.versions != versions:
                kept = _GatheredMatrices(weights_BK, versions, self._repeated(weights_BK))
                self._kept[slots_BK] = kept
        return kept

    def forget(self) -> None:
        """A slot is written to: what was gathered from it no longer holds."""
        with self._lock:
            self._kept = WeakIdKeyDictionary()

    def matrices(self, down_NrI: torch.Tensor, up_NrO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's matrices of all rows, [B, s, I] and [B, s, O], the weights within the latter."""
        call = self.call
        kept = None if torch.compiler.is_compiling() else call.kept
        if kept is not None and (found := kept.matrices.get(id(down_NrI))) is not None:
            return found[1], found[2]
        assert call.slots_BK is not None
        assert call.weights_Bs1 is not None
        down_BsI = down_NrI[call.slots_BK].flatten(1, 2)
        up_BsO = up_NrO[call.slots_BK].flatten(1, 2)
        up_BsO = up_BsO * call.weights_Bs1.to(up_BsO.dtype)
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
    """Where a call of a U-Net or text encoder, or of what stands for it, is told its rows' adapters."""
    rows: RowAdapters | None = getattr(module, ROWS, None)
    if rows is None:
        raise ValueError("rows have adapters, and the model has no adapter bank")
    return rows


class Banked:
    """Mixed into the class of a layer that some adapter changes; its own parameters and names stay."""

    bank_rows: RowAdapters
    bank_down: torch.Tensor
    """[N, r, I], a convolution's with its kernel in I"""
    bank_up: torch.Tensor
    """[N, r, O], each adapter's scale within"""

    def forward(self, x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        """The layer's own output, and what the row's adapters add to it."""
        out: torch.Tensor = super().forward(x, *rest, **more)  # type: ignore[misc]
        slots_BK = self.bank_rows.call.slots_BK
        if slots_BK is None:
            return out
        if slots_BK.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"{x.shape[0]} rows, and adapters for {slots_BK.shape[0]}")
        down_BsI, up_BsO = self.bank_rows.matrices(self.bank_down, self.bank_up)
        if slots_BK.shape[0] != x.shape[0]:
            down_BsI, up_BsO = (t.expand(x.shape[0], -1, -1) for t in (down_BsI, up_BsO))
        if isinstance(self, nn.Conv2d):
            return _add_conv(self, x, out, down_BsI, up_BsO)
        return _add_linear(x, out, down_BsI, up_BsO)


def _add_linear(
    x: torch.Tensor, out: torch.Tensor, down_BsI: torch.Tensor, up_BsO: torch.Tensor
) -> torch.Tensor:
    x_BLI = x.reshape(x.shape[0], -1, x.shape[-1])
    out_BLO = out.reshape(x.shape[0], -1, out.shape[-1])
    h_BLs = torch.bmm(x_BLI, down_BsI.transpose(1, 2))
    if torch.is_grad_enabled():
        return torch.baddbmm(out_BLO, h_BLs, up_BsO).reshape(out.shape)
    return out_BLO.baddbmm_(h_BLs, up_BsO).reshape(out.shape)  # the layer's own output: nobody else has it


def _add_conv(
    layer: nn.Conv2d, x: torch.Tensor, out: torch.Tensor, down_BsI: torch.Tensor, up_BsO: torch.Tensor
) -> torch.Tensor:
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
    return out + torch.bmm(up_BsO.transpose(1, 2), h_BsP).reshape(out.shape)


@functools.cache
def _banked(cls: Any) -> type[nn.Module]:
    """A layer's class with the bank before it; the same class for all layers, so that compiling sees one."""
    return type(f"Banked{cls.__name__}", (Banked, cls), {})


@dataclass(frozen=True, eq=False, repr=False)
class Staged:
    """An adapter checked, cast and on the device: putting it into a slot is a copy from here."""

    name: str
    tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """down [r, I] and up [r, O] with its scale, by the path of the layer"""


class Bank:
    """Slots 1 to `slots` of a model's U-Net and text encoders, for adapters of rank `max_rank` at most.

    A row may blend up to `most_a_row` adapters. Only layers that some adapter changes hold memory: `load`
    adds them as needed, until `seal` is called (before compiling or capturing), when an adapter that touches
    other layers is refused; `reserve` adds layers beforehand. One call of the U-Net, and one of the text
    encoders, runs at a time, unless `threads` says that several threads call them at once; loading into a
    slot that no row uses may go on meanwhile.
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
        self._known = adaptable(model)
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
        layers = self._held.values()
        return sum(layer.get_buffer(name).nbytes for layer in layers for name in ("bank_down", "bank_up"))

    @property
    def names(self) -> dict[int, str]:
        """The names of the adapters by slot."""
        return dict(self._names)

    def slot_of(self, name: str) -> int | None:
        """The slot that holds an adapter."""
        return next((slot for slot, held in self._names.items() if held == name), None)

    def _ups(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, layer in self._held.items():
            yield path, layer.get_buffer("bank_up")

    def check(self, adapter: Adapter) -> None:
        """ModelError, by name, for an adapter that cannot share a batch: its kind or its rank."""
        if adapter.kind != "lora":
            raise ModelError(
                f"adapter '{adapter.name}' is a {adapter.kind}, which cannot be added row by row",
                allowed="LoRA",
                mend="merge it into a model of its own: darkroom export MODEL --merge ADAPTER --to FOLDER",
            )
        if adapter.rank > self.max_rank:
            raise ModelError(
                f"adapter '{adapter.name}' has rank {adapter.rank}", allowed=f"at most {self.max_rank} here"
            )

    def stage(self, adapter: Adapter) -> Staged:
        """What takes time before `load`: fit to the model, cast, move. The bank stays as it is."""
        self.check(adapter)
        tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for path, layer in fit(adapter, self.model).layers.items():
                assert isinstance(layer, Layer)
                weight = self._known[path].weight
                up_rO = (layer.up.float() * layer.scale).flatten(1).T.contiguous()
                down_rI = layer.down.flatten(1)
                staged = down_rI.to(weight.device, weight.dtype), up_rO.to(weight.device, weight.dtype)
                if not all(bool(torch.isfinite(t).all()) for t in staged):
                    raise ModelError(
                        f"adapter '{adapter.name}', layer '{path}': too large for {weight.dtype}"
                    )
                tensors[path] = staged
        if self.sealed and (new := tensors.keys() - self._held.keys()):
            told = f"adapter '{adapter.name}' changes {len(new)} layers that the bank has no room for"
            raise ModelError(f"{told}: {min(new)}")
        return Staged(adapter.name, tensors)

    def load(self, slot: int, adapter: Adapter | Staged) -> None:
        """Put an adapter into a slot, in place of what was there. ModelError where it does not fit."""
        self._check_slot(slot)
        staged = adapter if isinstance(adapter, Staged) else self.stage(adapter)
        self.reserve(staged.tensors)
        self._forget()
        with torch.inference_mode(False), torch.no_grad():
            for path, ups in self._ups():
                ups[slot].zero_()  # where up is zero nothing is added, whatever stands in down
                if path in staged.tensors:
                    down_rI, up_rO = staged.tensors[path]
                    downs = self._held[path].get_buffer("bank_down")
                    downs[slot, : down_rI.shape[0]].copy_(down_rI, non_blocking=True)
                    ups[slot, : up_rO.shape[0]].copy_(up_rO, non_blocking=True)
        self._names[slot] = staged.name

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._check_slot(slot)
        self._forget()
        with torch.inference_mode(False), torch.no_grad():
            for _, ups in self._ups():
                ups[slot].zero_()
        self._names.pop(slot, None)

    def _forget(self) -> None:
        for rows in self._rows.values():
            rows.forget()

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot <= self.slots:
            raise ModelError(f"slot {slot} of the adapter bank", allowed=f"1 to {self.slots}")

    def reserve(self, paths: Iterable[str]) -> None:
        """Make room in layers before an adapter that changes them is loaded."""
        new = [path for path in paths if path not in self._held]
        if new and self.sealed:
            raise ModelError(f"the adapter bank has no room for '{new[0]}'", mend="reserve it before sealing")
        for path in new:
            if path not in self._known:
                raise ModelError(f"no layer '{path}' to adapt in this model")
            self._held[path] = self._wrap(path)

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
        weight = layer.weight
        outputs, inputs = weight.shape[0], weight.numel() // weight.shape[0]
        with torch.inference_mode(False):
            nothing = torch.zeros(self.slots + 1, self.max_rank, 1, device=weight.device, dtype=weight.dtype)
            layer.register_buffer("bank_down", nothing.repeat(1, 1, inputs), persistent=False)
            layer.register_buffer("bank_up", nothing.repeat(1, 1, outputs), persistent=False)
        banked: Any = layer
        banked.bank_rows = self._rows["unet" if path.startswith("unet.") else "text"]
        banked.__class__ = _banked(type(layer))  # type: ignore[arg-type]
        return layer

    def verify(self) -> None:
        """ModelError where something that changed the model since then would pass the bank's layers by."""
        known = adaptable(self.model)
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
            for name in ("bank_down", "bank_up", "bank_rows"):
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
        """Rows' adapters as the tensors that a call is told; nothing where no row has one."""
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


def check_weight(weight: float, name: str = "an adapter") -> float:
    """A weight that is a number within reason, else a ModelError."""
    if not abs(weight) <= MAX_WEIGHT:  # also NaN
        raise ModelError(f"weight {weight} of {name}", allowed=f"-{MAX_WEIGHT:g} to {MAX_WEIGHT:g}")
    return weight


def lay_out(choices: Sequence[Choice], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Rows' adapters as tensors [B, K], K as wide as the fullest row; nothing where no row has one."""
    kept = [[(slot, weight) for slot, weight in choice if slot and weight] for choice in choices]
    width = max((len(choice) for choice in kept), default=0)
    if not width:
        return {}
    padded = [[*choice, *[(0, 0.0)] * (width - len(choice))] for choice in kept]
    return {
        SLOTS: torch.tensor([[s for s, _ in row] for row in padded], dtype=torch.int64, device=device),
        WEIGHTS: torch.tensor([[w for _, w in row] for row in padded], dtype=torch.float32, device=device),
    }
