"""Weights that wait elsewhere: in main memory, or, for a CPU, in the model's own files.

A part's weights lie on the card while it is called, or a layer's for its own call. Of the latter only tensors
of `SMALL_BYTES` and more move: norms and biases stay on the card. What moves waits in pinned memory, so that
the host never waits for a copy:

- `offload_sequential` copies on the stream that computes. One layer's weights lie on the card.
- `offload_group` copies the next layer's on a second stream (`hardware.copy_ahead`), in the order in which
  the layers came last time. Two layers' weights lie there.

`offload_mmap` is for a CPU with little memory. The files are mapped; a layer's weights are read, and cast to
what is computed in, just before its call, and released right after. Nothing is rounded that is not rounded in
the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from darkroom.errors import InputError
from darkroom.hardware import accelerator
from darkroom.hardware.copy_ahead import CopyAhead, Tensors
from darkroom.hardware.meters import drop_file_pages, file_mappings
from darkroom.models.adapters.bank import Banked
from darkroom.models.model import are_mapped, is_mapped
from darkroom.sample.optimisations.applied import Applied, ComputeTarget

SMALL_BYTES = 2**18
"""Tensors smaller than this stay on the card: a copy of their own would cost more than it saves."""


def offload_model(applied: Applied, argument: str) -> None:
    """Text encoders, U-Net and VAE on the device one after the other."""
    from accelerate import cpu_offload_with_hook

    hook = None
    parts = applied.own_all()
    for module in parts.values():
        module.to("cpu")
        setattr(module, accelerator.COMPUTED_ON, applied.device)
    for name in sorted(parts, key=lambda name: (name == "vae", name == "unet")):  # as they are called
        _, hook = cpu_offload_with_hook(parts[name], applied.device, hook)
        _move_deltas(parts[name], applied.device)
        if name != "vae":  # which no other sends away
            hook.offload = _kept_at_home(parts[name])


def _kept_at_home(part: nn.Module) -> Callable[[], None]:
    """Keep a part's weights in main memory also while it is on the device; what puts them back there.

    An adapter may be fitted to them in another thread meanwhile: those on the device may be freed under it.
    """
    at_home = {}
    for layer in part.modules():
        if own := {name: p.detach() for name, p in layer._parameters.items() if p is not None}:
            at_home[layer] = own
            setattr(layer, accelerator.AT_HOME, own)

    def put_back() -> None:
        """Nothing is copied: what was on the device is dropped. Buffers stay there."""
        own = {
            id(layer._parameters[name]): at for layer, all_ in at_home.items() for name, at in all_.items()
        }
        part._apply(lambda tensor: own.get(id(tensor), tensor))  # type: ignore[no-untyped-call]

    return put_back


def offload_sequential(applied: Applied, argument: str) -> None:
    """Every layer on the device for its own call only."""
    for part in applied.own_all().values():
        _offload(part, applied.device, _InTurn(applied.device))


def offload_group(applied: Applied, argument: str) -> None:
    """Layers copied to the device on a stream of their own while the one before is computing."""
    for part in applied.own_all().values():
        _offload(part, applied.device, _Ahead(applied.device))


def staying_bytes(part: nn.Module) -> int:
    """Of a part's weights, those that stay on the card."""
    return sum(p.nbytes for p in part.parameters() if p.nbytes < SMALL_BYTES)


class _InTurn:
    """Each layer's weights by the stream that computes, when it is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def arrive(self, layer: nn.Module, names: tuple[str, ...]) -> Tensors:
        """A layer's weights on the device."""
        return {name: accelerator.to_device(layer._parameters[name].data, self._device) for name in names}  # type: ignore[union-attr]


class _Ahead:
    """A layer's weights while the one before computes. One thread at a time calls a part."""

    def __init__(self, device: torch.device) -> None:
        self._copies = CopyAhead(device)
        self._names: dict[nn.Module, tuple[str, ...]] = {}
        self._next: dict[nn.Module, nn.Module] = {}
        """The layer that came after each last time."""
        self._called: set[nn.Module] = set()
        """In the pass now running: a layer that comes again begins another."""
        self._last: nn.Module | None = None

    def arrive(self, layer: nn.Module, names: tuple[str, ...]) -> Tensors:
        """A layer's weights on the device, and the next one's on their way."""
        self._names[layer] = names
        arrived = self._copies.arrive(layer, self._waiting(layer))
        if layer in self._called:
            self._called.clear()
        elif self._last is not None:
            self._next[self._last] = layer
        self._called.add(layer)
        self._last = layer
        if (following := self._next.get(layer)) is not None:
            self._copies.send(following, self._waiting(following))
        return arrived

    def _waiting(self, layer: nn.Module) -> Tensors:
        device = self._copies.device
        return {name: accelerator.pinned(layer._parameters[name].data, device) for name in self._names[layer]}  # type: ignore[union-attr]


def _offload(part: nn.Module, device: torch.device, way: _InTurn | _Ahead) -> None:
    """Have a part's large weights wait in main memory but for their layer's call; all else is moved."""
    setattr(part, accelerator.COMPUTED_ON, device)
    for layer in part.modules():
        names = tuple(n for n, p in layer._parameters.items() if p is not None and p.nbytes >= SMALL_BYTES)
        for name, p in layer._parameters.items():
            if p is not None:
                at_home = p.data.to("cpu") if name in names else p.data
                moved = accelerator.pinned(at_home, device) if name in names else p.data.to(device)
                layer._parameters[name] = _still(moved)
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                layer._buffers[name] = buffer.to(device)
        if names:
            _stream(layer, names, way)
    _move_deltas(part, device)


def _move_deltas(part: nn.Module, device: torch.device) -> None:
    """What adapters add to whole weights is read at each call, and no buffer of the layer's."""
    for layer in part.modules():
        if isinstance(layer, Banked):
            layer.bank_deltas = {
                slot: (delta.to(device), None if bias is None else bias.to(device))
                for slot, (delta, bias) in layer.bank_deltas.items()
            }


def _stream(layer: nn.Module, names: tuple[str, ...], way: _InTurn | _Ahead) -> None:
    waiting = {name: layer._parameters[name] for name in names}
    setattr(layer, accelerator.AT_HOME, waiting)

    def arrive(*_: Any) -> None:
        arrived = way.arrive(layer, names)
        waiting.update({name: layer._parameters[name] for name in names})
        layer._parameters.update({name: _still(tensor) for name, tensor in arrived.items()})

    def leave(*_: Any) -> None:
        layer._parameters.update(waiting)

    layer.register_forward_pre_hook(arrive)
    layer.register_forward_hook(leave, always_call=True)


def _still(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


SAMPLE_BYTES = 64 * 2**20
"""How much is read to say what reading costs."""
READ = "read weights a U-Net call"


def offload_mmap(applied: Applied, argument: str) -> None:
    """Each layer's weights in memory for its own call only, read from the model's files."""
    if not (applied.model.in_files and are_mapped(applied.model.modules.values())):
        raise InputError(
            "offload_mmap: these weights do not lie in files as they are needed",
            allowed="a model opened from a folder, a .safetensors file or the hub, with --memory",
            mend="random weights: darkroom export FAMILY --to FOLDER first",
        )
    dtype = computed_in(applied)
    parts = applied.own_all()
    files = file_mappings()
    applied.times_s[READ] = _seconds_to_read(parts["unet"], dtype, files)
    for module in parts.values():
        for layer in module.modules():
            _read_when_called(layer, dtype, files)


def computed_in(applied: Applied) -> torch.dtype:
    """As asked, else the weights' own type, or float32 where that is float16: CPUs emulate it."""
    weight = next(applied.model.unet.parameters())  # type: ignore[union-attr]
    return applied.dtype or (torch.float32 if weight.dtype == torch.float16 else weight.dtype)


def lacks_mmap(place: ComputeTarget) -> str | None:
    """On a card weights wait in main memory instead."""
    return None if place.device.type == "cpu" else f"it is of CPUs, and this is {place.device.type}"


def _seconds_to_read(module: nn.Module, dtype: torch.dtype, files: list[tuple[int, int]]) -> float:
    """What reading and casting all weights of a part takes, by its largest layers."""
    parameters = sorted(module.parameters(), key=lambda p: p.nbytes, reverse=True)
    total, read = sum(p.nbytes for p in parameters), 0
    start = time.perf_counter()
    for p in parameters:
        p.detach().to(dtype, copy=True)
        if is_mapped(p, files):
            drop_file_pages(p.data_ptr(), p.nbytes)
        read += p.nbytes
        if read >= SAMPLE_BYTES:
            break
    return (time.perf_counter() - start) * total / max(read, 1)


def _read_when_called(layer: nn.Module, dtype: torch.dtype, files: list[tuple[int, int]]) -> None:
    """Have a layer's own weights wait in their file."""
    own = {name: p for name, p in layer._parameters.items() if p is not None}
    for name, buffer in layer._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            layer._buffers[name] = buffer.to(dtype)
    if sum(p.numel() for p in own.values()) * dtype.itemsize < SMALL_BYTES:
        layer._parameters.update({name: _still(p.detach().to(dtype, copy=True)) for name, p in own.items()})
        return
    waiting = {name: _still(torch.zeros((), dtype=dtype).expand(p.shape)) for name, p in own.items()}
    in_files = [p for p in own.values() if is_mapped(p, files)]
    setattr(layer, accelerator.AT_HOME, own)

    def arrive(*_: Any) -> None:
        layer._parameters.update({name: _still(p.detach().to(dtype)) for name, p in own.items()})

    def leave(*_: Any) -> None:
        layer._parameters.update(waiting)
        for p in in_files:
            drop_file_pages(p.data_ptr(), p.nbytes)

    layer._parameters.update(waiting)
    layer.register_forward_pre_hook(arrive)
    layer.register_forward_hook(leave, always_call=True)
