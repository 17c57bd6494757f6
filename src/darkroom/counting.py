"""FLOPs, bytes moved and live memory of any callable, by running it on fake tensors: no data, no GPU.

The very code that trains or samples is run, so the count is of that code and not of a formula for it.
FLOPs are 2 per multiply-add of matrix products, convolutions and attention; element-wise work is left out.
A matrix operation without a formula is an error, never silence. Imports torch, without its compiler.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from darkroom.libraries import without_compiler

aten = torch.ops.aten
ROUND_BYTES = 512  # CUDA's caching allocator hands out multiples of this


class UncountedOperation(RuntimeError):
    """A matrix operation that no formula is known for: its FLOPs would be lost."""


@dataclass
class OpCount:
    """One operation, all its calls together."""

    calls: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Kernel:
    """One operation of a trace: what it computes and moves, in which stage; and its largest tensor."""

    op: str
    flops: int
    bytes: int
    stage: str
    largest: int  # bytes


@dataclass
class Trace:
    """Every operation in its order, and every storage's life: for time and memory of other batch sizes.

    `changes` are (number of operations begun, storage, bytes gained or lost); `born` says the stage in which
    a storage came to be, `kinds` what `Counter.tag` said it is.
    """

    kernels: list[Kernel] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    born: dict[int, str] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Count:
    """What a call does. `bytes` sums what each operation reads and writes, nothing kept in caches; memory is
    of live tensors, given and made, without workspaces inside kernels and without fragmentation.
    """

    flops: int
    bytes: int
    by_op: dict[str, OpCount] = field(repr=False)
    peak_memory_bytes: int
    start_memory_bytes: int  # weights, inputs and what earlier calls left behind
    end_memory_bytes: int


def count(fn: Callable[..., Any], *args: Any, warmup: int = 0, **kwargs: Any) -> Count:
    """Count one call of `fn(*args, **kwargs)` after `warmup` uncounted ones (optimiser state, caches).

    Modules among the arguments, `fn` itself and what its method belongs to run with fake weights for the time
    of the call, on the meta device or not; tensors among the arguments are replaced by fake ones. Where `fn`
    holds a module in any other way, use `counting`.
    """
    with counting(fn, getattr(fn, "__self__", None), args, kwargs) as counter:
        args, kwargs = counter.fake((args, kwargs))
        for _ in range(warmup):
            fn(*args, **kwargs)
        counter.reset()
        result = fn(*args, **kwargs)
        counted = counter.result()
        del result  # it lives at the end of the call
        return counted


@contextmanager
def counting(*holders: Any) -> Iterator[Counter]:
    """Everything inside runs on fake tensors and is counted; the modules among `holders` (in lists and dicts
    too) have fake weights meanwhile. Build optimisers inside.

    >>> with counting(unet) as counter:
    ...     optimiser = torch.optim.AdamW(unet.parameters(), fused=True)
    ...     step(unet, optimiser, counter.fake(batch))  # the optimiser makes its state
    ...     counter.reset()
    ...     step(unet, optimiser, counter.fake(batch))
    ...     counted = counter.result()
    """
    modules = [item for item in tree_leaves(holders) if isinstance(item, nn.Module)]
    with without_compiler():
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        weights = (weight for module in modules for weight in (*module.parameters(), *module.buffers()))
        device = next((w.device for w in weights if w.device.type != "meta"), _CPU)
        counter = Counter(fake_mode, device)
        with _fake_weights(modules, counter), fake_mode, counter:
            yield counter


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd; made by `counting`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a tenth of the time

    def __init__(self, fake_mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self._device = device
        self._results = _Results(fake_mode)
        self._live: dict[int, weakref.ref[Any]] = {}  # by storage
        self._live_bytes = 0
        self.stage = ""  # what the caller says is going on, noted in the trace
        self.trace: Trace | None = None
        self._serial: dict[int, int] = {}  # of live storages, by storage
        self._born = 0
        self._kinds: dict[int, str] = {}  # by serial, of live storages
        self.reset()

    def reset(self) -> None:
        """Forget what was counted; what is alive stays."""
        self._ops: dict[str, OpCount] = {}
        self._start_bytes = self._peak_bytes = self._live_bytes

    def result(self) -> Count:
        """What was counted since the last reset."""
        return Count(
            flops=sum(op.flops for op in self._ops.values()),
            bytes=sum(op.bytes for op in self._ops.values()),
            by_op=dict(sorted(self._ops.items(), key=lambda item: -item[1].flops)),
            peak_memory_bytes=self._peak_bytes,
            start_memory_bytes=self._start_bytes,
            end_memory_bytes=self._live_bytes,
        )

    def start_trace(self) -> Trace:
        """Forget what was counted and note every operation from here on; what is alive stands at its head."""
        self.reset()
        self.trace = Trace(kinds=dict(self._kinds))
        for key, serial in self._serial.items():
            storage = self._live[key]()
            if storage is not None:
                self._note(serial, _rounded(storage.nbytes()))
        return self.trace

    def tag(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what the memory of live tensors is: weights, gradients, ..."""
        for tensor in tensors:
            serial = self._serial.get(tensor.untyped_storage()._cdata)
            if serial is not None:
                self._kinds[serial] = kind
                if self.trace is not None:
                    self.trace.kinds[serial] = kind

    def _note(self, serial: int, size: int) -> None:
        if self.trace is not None:
            self.trace.changes.append((len(self.trace.kernels), serial, size))
            self.trace.born.setdefault(serial, self.stage)

    def fake(self, tree: Any) -> Any:
        """Lists, dicts and tuples with each tensor replaced by a fake one that counts as live."""
        return tree_map(lambda leaf: self.fake_tensor(leaf) if _is_real(leaf) else leaf, tree)

    def fake_tensor(self, tensor: Tensor) -> Tensor:
        """A fake tensor like the given one; one on the meta device comes to stand where the weights do, and
        where all of those are on it, on the CPU.
        """
        device = self._device if tensor.device.type == "meta" else tensor.device
        with self._fake_mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        fake.requires_grad_(tensor.requires_grad)
        self._hold([fake])
        return fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two of three calls
            return args[0].fake_device
        kwargs = kwargs or {}
        known = _operation(func)
        if known.bookkeeping:
            return func(*args, **kwargs)
        if not known.whole:
            # In inference mode composite operations arrive whole.
            with self:
                return func.decompose(*args, **kwargs)
        inputs = list(_tensors_in((args, kwargs)))
        self._refuse_real_weights(inputs)
        out = self._results.of(func, known, args, kwargs, inputs)
        outputs = list(_tensors_in(out))
        self._hold(inputs)
        self._hold(outputs)
        flops = 0
        if known.formula is not None:
            flops = int(known.formula(*args, **kwargs, out_val=out))
        elif known.unknown_product:
            raise UncountedOperation(f"{func}: add its FLOPs to FORMULAS in {__name__}")
        largest = max(map(_size, (*inputs, *outputs)), default=0)
        self._count(known.name, flops, _bytes_moved(known, inputs, outputs), largest)
        return out

    def _count(self, name: str, flops: int, moved: int, largest: int) -> None:
        op = self._ops.setdefault(name, OpCount())
        op.calls += 1
        op.flops += flops
        op.bytes += moved
        if self.trace is not None and (flops or moved):  # views and empty memory start nothing
            self.trace.kernels.append(Kernel(name, flops, moved, self.stage, largest))

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        """Count each storage once while it lives."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._live.get(key)
            if known is not None and known() is storage:
                continue
            size = _rounded(storage.nbytes())
            self._born += 1
            self._serial[key] = self._born
            self._live[key] = weakref.ref(storage, partial(self._free, key, self._born, size))
            self._live_bytes += size
            self._note(self._born, size)
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _free(self, key: int, serial: int, size: int, ref: weakref.ref[Any]) -> None:
        self._live_bytes -= size
        self._note(serial, -size)
        self._kinds.pop(serial, None)
        if self._live.get(key) is ref:
            del self._live[key], self._serial[key]

    def _refuse_real_weights(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            if isinstance(tensor, nn.Parameter) and not isinstance(tensor, FakeTensor):
                shape = tuple(tensor.shape)
                raise RuntimeError(
                    f"a weight of shape {shape} is real: hand its module to count() or counting()"
                )


@dataclass(frozen=True)
class _Operation:
    """What is known of an operation whatever its inputs are."""

    name: str
    bookkeeping: bool
    whole: bool  # it runs as one kernel; of those with parts too, the kernel is what runs
    formula: Callable[..., int] | None
    unknown_product: bool
    moves_nothing: bool  # views and empty memory
    in_place: bool
    alike: bool  # of inputs alike it gives results alike


@cache
def _operation(func: Any) -> _Operation:
    packet = func._overloadpacket
    formula = FORMULAS.get(packet)
    made_of_parts = func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    kernel = any(func.has_kernel_for_dispatch_key(key) for key in (DispatchKey.CPU, DispatchKey.CUDA))
    return _Operation(
        name=str(packet),
        bookkeeping=func.namespace in _BOOKKEEPING,
        whole=formula is not None or kernel or not made_of_parts,
        formula=formula,
        unknown_product=formula is None and _looks_like_matrix_work(func),
        moves_nothing=bool(func.is_view or _WRITES_NOTHING.match(str(func))),
        in_place=func._schema.is_mutable,
        alike=func.namespace == "aten" and not _DEPENDS.search(str(func)) and not _UNLIKE & set(func.tags),
    )


_Shape = tuple[Any, ...]  # size, stride, offset, dtype, device
_Made = tuple[int | None, _Shape | None]


class _NotAlike(Exception):
    """A result that depends on more than its inputs' shapes."""


class _Results:
    """Fake results by operation and shapes of inputs: a network's blocks are alike, and FakeTensorMode takes
    some ten times as long to say the same again.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._known: dict[Any, tuple[bool, list[_Made]]] = {}  # whether it is a tuple, and of what

    def of(
        self, func: Any, known: _Operation, args: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor]
    ) -> Any:
        """What the operation gives; without running it, where it was run on inputs alike."""
        key = None
        if known.alike:
            with suppress(_NotAlike):
                key = (func, _described(args), _described(tuple(kwargs.items())))
        if key in self._known:
            several, made = self._known[key]
            again = [self._again(one, inputs) for one in made]
            return tuple(again) if several else again[0]
        out = _run(func, args, kwargs)
        if key is not None:
            with suppress(_NotAlike):
                self._known[key] = type(out) is tuple, _made(out, func, inputs)
        return out

    def _again(self, made: _Made, inputs: Sequence[Tensor]) -> Tensor | None:
        of, shape = made
        if shape is None:
            return None if of is None else inputs[of]
        size, stride, offset, dtype, device = shape
        with torch._C._DisableTorchDispatch():
            found = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if of is not None:  # a view
                found.set_(inputs[of].untyped_storage(), offset, size, stride)
        return FakeTensor(self._fake_mode, found, device)


_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _described(value: Any) -> Any:
    """A key of an argument: a tensor by its shape, anything else as it is."""
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise _NotAlike
        return _shape(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple(map(_described, value))
    if kind not in _PLAIN:
        raise _NotAlike
    return kind, value


def _shape(tensor: FakeTensor) -> _Shape:
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device,
    )  # fmt: skip


def _made(out: Any, func: Any, inputs: Sequence[Tensor]) -> list[_Made]:
    """How to make each result again: it is nothing, an input, a view of one, or new memory."""
    each = list(out) if type(out) is tuple else [out]
    given = [tensor.untyped_storage()._cdata for tensor in inputs]
    found, new = list[_Made](), set[int]()
    for one in each:
        same = next((k for k, tensor in enumerate(inputs) if tensor is one), None)
        if one is None or same is not None:
            found.append((same, None))
            continue
        if type(one) is not FakeTensor or one.constant is not None:
            raise _NotAlike
        storage = one.untyped_storage()._cdata
        of = given.index(storage) if storage in given else None
        shares = func.is_view or func is aten._unsafe_view.default
        if (of is not None) != shares or not (shares or (_fills(one) and storage not in new)):
            raise _NotAlike
        new.add(storage)
        found.append((of, _shape(one)))
    return found


def _fills(tensor: Tensor) -> bool:
    """Whether a tensor's storage is just as large as the tensor."""
    last = sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors_in(item)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result; a value read out of a tensor is 1, as there are no values."""
    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        if func is not aten._local_scalar_dense.default:
            raise
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


@contextmanager
def _fake_weights(modules: list[nn.Module], counter: Counter) -> Iterator[None]:
    """Swap parameters and buffers for fake ones (tied ones stay tied) and put them back at the end."""
    fakes: dict[int, Tensor] = {}
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    for module in {id(part): part for whole in modules for part in whole.modules()}.values():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = _like(tensor, counter)
                swapped.append((table, name, tensor))
                table[name] = fakes[id(tensor)]
    fakes.clear()  # a cast inside lets the uncast weights go
    try:
        yield
    finally:
        for table, name, tensor in swapped:
            table[name] = tensor


def _like(tensor: Tensor, counter: Counter) -> Tensor:
    fake = counter.fake_tensor(tensor)
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True  # all that nn.Parameter does, but for a detach
    return fake


def _rounded(size: int) -> int:
    return -(-size // ROUND_BYTES) * ROUND_BYTES


def _is_real(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)


_BOOKKEEPING = ("prim", "profiler", "prims")
_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")
_DEPENDS = re.compile(r"aten\.(lift|resize|set_|_local_scalar|item|_foreach|_fused|scalar_tensor)")
_UNLIKE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_WRITES_NOTHING = re.compile(r"aten\.(empty|new_empty|lift_fresh|_local_scalar_dense)")


def _bytes_moved(known: _Operation, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes read and written; views and empty memory move nothing."""
    if known.moves_nothing:
        return 0
    read = sum(map(_size, {id(tensor): tensor for tensor in inputs}.values()))
    written = sum(map(_size, outputs))
    if not outputs and known.in_place:  # lists changed in place: gradients, moments, weights
        written = read
    return read + written


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor; an expanded one is no larger than what it is expanded from."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_MATRIX_WORDS = re.compile(
    r"^(conv\w*|\w*mm|mv|addmv|matmul|linear|bilinear|trilinear|einsum|dot|vdot|addr|ger|outer|attention|lstm"
    r"|gru|rnn|cdist|kron|tensordot)$"
)


def _looks_like_matrix_work(func: Any) -> bool:
    name = str(func._overloadpacket).partition(".")[2]
    if name.startswith(("upsample", "_upsample")):  # bilinear resizing is no product of matrices
        return False
    return any(_MATRIX_WORDS.match(word) for word in name.split("_"))


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and weighted values. Shapes: query [B, H, L, D], key [B, H, S, D], value [B, H, S, E]."""
    *rows, length, width = query.shape
    return 2 * prod(rows) * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward_flops(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """Twice the forward pass, as of any product of matrices. Flash kernels also compute the scores again;
    that is left out so that a count says what the model needs and is the same for every kernel and device.
    """
    return 2 * _attention_flops(query, key, value)


def _matvec_flops(matrix: Tensor, vector: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


FORMULAS: dict[Any, Callable[..., int]] = dict(flop_registry)
for _name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    FORMULAS[getattr(aten, f"_scaled_dot_product_{_name}")] = _attention_flops
    FORMULAS[getattr(aten, f"_scaled_dot_product_{_name}_backward")] = _attention_backward_flops
FORMULAS |= {
    aten.mv: _matvec_flops,
    aten.addmv: lambda _, matrix, vector, **kwargs: _matvec_flops(matrix, vector),
    aten.dot: _matvec_flops,
    aten.vdot: _matvec_flops,
    aten.ger: lambda a, b, **kwargs: 2 * a.numel() * b.numel(),
    aten.addr: lambda _, a, b, **kwargs: 2 * a.numel() * b.numel(),
}
