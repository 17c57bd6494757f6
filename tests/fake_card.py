"""A card without a card: shapes, types and places are real, numbers are not.

`fake_cuda` lets torch.device("cuda") make tensors of torch's FakeTensorMode in a build without CUDA; it
cannot go backward, for autograd asks for CUDA's streams. `fake_card` makes a device of its own kind, which
can, and stays for the rest of the process: use it in one of its own. With both, mixing devices raises as on a
card, and so does whatever needs a number on the host. `Watched` sees each operation: copies between
devices that the host waits for, what reads a result back, and how many kernels are launched.
"""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from darkroom.hardware import accelerator

aten = torch.ops.aten
NO_KERNEL = {
    "aten::detach", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided", "aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias",
    "aten::alias", "aten::is_pinned", "aten::resize_", "aten::set_", "prim::device", "aten::sym_size",
}  # fmt: skip
"""Of what is no view, what launches nothing."""
COPIES = {"aten::copy_", "aten::_to_copy", "aten::to"}
PINS = {"aten::_pin_memory", "aten::pin_memory"}
PINNED = "_pinned"
"""What marks a fake tensor in memory that a card reads by itself."""
READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::_unique2", "aten::unique_dim", "aten::bincount", "aten::repeat_interleave.Tensor", "aten::item",
    "aten::_linalg_check_errors",
}  # fmt: skip
"""What the host waits for because it wants a number or a size."""


class Watched(TorchDispatchMode):
    """Notes what is launched and what is waited for."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: list[str] = []
        """Where the host waits for the device, as file:line of darkroom's own code."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_takes_itself_apart(kind) for kind in types):
            return NotImplemented  # seen again as what it is made of
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # seen again as what it is made of
            return func(*args, **kwargs)
        name = func._schema.name
        places = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        away = bool(places - {"cpu"})
        if name in COPIES:
            told = _named(func, args, kwargs)
            source = told["src"] if name == "aten::copy_" else told["self"]
            target = told["self"].device if name == "aten::copy_" else told.get("device")
            target = told["other"].device if "other" in told else target
            crosses = target is not None and torch.device(target).type != source.device.type
            pageable = crosses and torch.device(target).type != "cpu" and not hasattr(source, PINNED)
            if crosses and (pageable or not told.get("non_blocking", False)):
                where = f"{source.device.type} to {torch.device(target).type}"
                self.waits.append(f"{name} {where} at {_where()}")
        if away and (name in READS or (str(func) == "aten.index.Tensor" and _by_mask(args))):
            self.waits.append(f"{name} at {_where()}")
        if away and not func.is_view and name not in NO_KERNEL:
            self.kernels[name] += 1
        return func(*args, **kwargs)

    @property
    def launched(self) -> int:
        """Kernels in all, a foreach operation counted once."""
        return self.kernels.total()


def _takes_itself_apart(kind: type) -> bool:
    """Whether tensors of a class are made of others: DTensor, the 8-bit state of an optimiser."""
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor)


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What a call is given, by name. In inference mode `to` comes with its arguments in their places."""
    return {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})


def _by_mask(args: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1] or ())


def _where() -> str:
    frames = [f for f in traceback.extract_stack() if "/darkroom/" in f.filename]
    return " < ".join(f"{f.filename.rpartition('/darkroom/')[2]}:{f.lineno}" for f in frames[:-4:-1]) or "?"


CARD = "fakecard"
"""A kind of device of its own; torch knows it once `fake_card` has been entered."""
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
META = 14


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Within, new tensors are fake and may be put on `cuda`; a module is made on the CPU and moved there."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, GUARDS)
    # Indexing looks for the device's guard, which this build does not have: the meta device's does nothing.
    before, guards[1] = guards[1], guards[1] or guards[META]
    apply, torch.nn.Module._apply = torch.nn.Module._apply, _apply  # type: ignore[method-assign, assignment]
    try:
        with FakeTensorMode() as mode, _Pinned():
            yield mode
    finally:
        guards[1], torch.nn.Module._apply = before, apply  # type: ignore[method-assign]


@contextmanager
def fake_card() -> Iterator[FakeTensorMode]:
    """Within, new tensors are fake and may be put on `CARD`. Once in a process, before any backward pass."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Backend(_DummyBackendModule):
        # Streams and events of a CPU: nothing is queued, so nobody waits.
        Stream, Event = torch.cpu.Stream, torch.cpu.Event
        stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    _setup_privateuseone_for_python_backend(CARD, Backend())
    # As CUDA's are; nobody knows this card else.
    accelerator.KINDS[CARD] = replace(accelerator.kind_of(CARD), scaled_adamw=True, scaler=True, streams=True)
    accelerator.new_stream = accelerator.current_stream = _Stream
    torch.nn.Module._apply = _apply  # type: ignore[method-assign, assignment]
    FakeTensorMode.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    with FakeTensorMode() as mode, _Pinned(), _Made():
        yield mode


class _Stream:
    """A stream of the card: nothing is queued, so nobody waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: _Stream) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass

    def record_event(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Pinned(TorchDispatchMode):
    """Memory that a card reads by itself: fake memory is any kind, and is marked."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        if func._schema.name in PINS:
            setattr(args[0], PINNED, True)
            return args[0]
        if func._schema.name == "aten::to":  # of a constant, fake tensors would do it in earnest
            told = _named(func, args, kwargs)
            target = told["other"].device if "other" in told else told.get("device")
            if target is not None and torch.device(target).type != args[0].device.type:
                how = {name: told[name] for name in ("dtype", "non_blocking") if name in told}
                return aten._to_copy.default(args[0], device=target, **how)
        return func(*args, **(kwargs or {}))


class _Made(TorchFunctionMode):
    """torch.tensor on the card by way of the CPU, as it is on a real one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if func is Tensor.__bool__ and args[0].device.type == "cpu":
            return True  # drawn on the host, as PEFT does: nobody waits for the card
        return func(*args, **kwargs)


def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` for fake weights: torch swaps their insides, which it refuses of fakes it remembers."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for table in (self._parameters, self._buffers):
        for name, tensor in table.items():
            if tensor is None:
                continue
            tensor.constant = None  # fake tensors would move known numbers in earnest
            with torch.no_grad():
                made = fn(tensor)
            if made is not tensor:
                is_weight = isinstance(tensor, torch.nn.Parameter)
                table[name] = torch.nn.Parameter(made, tensor.requires_grad) if is_weight else made
    return self


def outside(call: Callable[[], Any]) -> Any:
    """A call that needs real numbers."""
    with _disable_current_modes():
        return call()


def elsewhere(tensors: Any, device: str) -> list[str]:
    """What of some tensors (modules' or a tree's) is not on the device."""
    if isinstance(tensors, torch.nn.Module):
        named = [*tensors.named_parameters(), *tensors.named_buffers()]
    else:
        named = [(str(i), leaf) for i, leaf in enumerate(tree_leaves(tensors)) if isinstance(leaf, Tensor)]
    return [name for name, tensor in named if tensor.device.type != device]
