"""The accelerator of this machine, whatever its make: device, streams, waiting and memory.

`torch.accelerator` answers for all of them; `KINDS` has what it does not say. The one file that names
`torch.cuda`, `torch.xpu` and `torch.mps`, besides the CUDA graphs of `sample.optimisations.compiled`;
tests/test_import_rules.py holds the others to that. torch is imported inside functions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RUN, SUBSTITUTED, BELIEVED = "run by us", "proven by substitution", "believed"


@dataclass(frozen=True)
class AcceleratorKind:
    """What a kind of accelerator can do, as far as darkroom's work depends on it."""

    name: str
    makes: str
    """Whose cards they are, in a few words."""
    proof: str
    """How darkroom is known to work there: RUN, SUBSTITUTED or BELIEVED."""
    energy: str | None = None
    """The library that reads its energy counter."""
    tf32: bool = False
    graphs: bool = False
    """Whether calls are captured and replayed (CUDA graphs)."""
    autocast: tuple[str, ...] = ("bf16", "fp16")
    float64: bool = True
    """Whether it takes float64 and complex128 at all."""
    own_memory: bool = True
    """Whether its memory is its own, not the processor's too."""
    statistics: bool = True
    """Whether its allocator keeps the peak."""
    streams: bool = True
    """Whether streams run concurrently, and copies of pinned memory overlap with work."""
    scaled_adamw: bool = True
    """Whether PyTorch's fused AdamW divides by `grad_scale` and stands still for `found_inf`."""
    scaler: bool = True
    """Whether PyTorch's gradient scaler, without which fp16 does not train, works there."""
    collectives: str | None = None
    """torch.distributed's backend."""


KINDS = {
    kind.name: kind
    for kind in (
        AcceleratorKind(
            "cuda", "NVIDIA", SUBSTITUTED, energy="nvml", tf32=True, graphs=True, collectives="nccl"
        ),
        AcceleratorKind("rocm", "AMD", BELIEVED, graphs=True, collectives="nccl"),
        AcceleratorKind("xpu", "Intel", SUBSTITUTED, float64=False, collectives="xccl", scaler=False),
        AcceleratorKind(
            "mps", "Apple", SUBSTITUTED, float64=False, own_memory=False, statistics=False, streams=False,
            scaled_adamw=False,
        ),
    )
}  # fmt: skip
"""ROCm's devices are called cuda in torch, and answer to the same calls. Metal's fused AdamW passes both of
its numbers by until pytorch's change 186360; the scaler computes in float64, but on Apple's."""
CPU = AcceleratorKind(
    "cpu", "any", RUN, own_memory=False, statistics=False, streams=False, collectives="gloo"
)
UNPROVEN = "unproven: nobody has reported it"


def kind_of(device: torch.device | str) -> AcceleratorKind:
    """What is known of a device's kind; of one that is not in the table the least that any has."""
    import torch

    name = device.partition(":")[0] if isinstance(device, str) else device.type
    if name == "cuda" and torch.version.hip:
        name = "rocm"
    if name in ("cpu", "meta"):
        return CPU
    return KINDS.get(name) or AcceleratorKind(
        name, UNPROVEN, BELIEVED, float64=False, statistics=False, streams=False, scaled_adamw=False,
        scaler=False,
    )  # fmt: skip


def current() -> torch.device | None:
    """The accelerator that is here and works; None where there is none."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True)


def count() -> int:
    """How many of them there are."""
    import torch

    return torch.accelerator.device_count() if current() is not None else 0


def use(index: int) -> None:
    """Make the accelerator of a number the one that this process works on, where there are any."""
    import torch

    if current() is not None:
        torch.accelerator.set_device_index(index)


def name_of(device: torch.device | str) -> str:
    """The card's name, as its maker gives it; the kind's where the driver gives none."""
    import torch

    where = torch.device(device)
    module: Any = torch.get_device_module(where)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(where))
    return kind_of(where).name


def capability(device: torch.device | str) -> tuple[int, int]:
    """Of an NVIDIA card: (8, 0) is Ampere, (8, 9) Ada, (9, 0) Hopper; (0, 0) elsewhere.

    AMD's numbers count other things: an RX 7900 says (11, 0) and has neither TF32 nor fp8.
    """
    import torch

    where = torch.device(device)
    is_nvidia = where.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(where) if is_nvidia else (0, 0)


def collectives(device: torch.device | str) -> str | None:
    """torch.distributed's backend for a device, by its kind; gloo where torch is built without NCCL, as on
    Windows."""
    import torch.distributed as dist

    backend = kind_of(device).collectives
    return "gloo" if backend == "nccl" and not dist.is_nccl_available() else backend


def uuid_of(device: torch.device | str) -> str:
    """What a CUDA card is called whatever else is in the machine."""
    import torch

    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)


def has_bf16(device: torch.device | str) -> bool:
    """Whether an accelerator computes in bfloat16, as its own module says; False where it does not say.

    Of CUDA cards before Ampere it says yes, for they emulate it; fp16 is many times as fast there.
    """
    import torch

    where = torch.device(device)
    if kind_of(where).name == "cuda":
        return capability(where) >= (8, 0)
    module: Any = torch.get_device_module(where)
    return bool(module.is_bf16_supported()) if hasattr(module, "is_bf16_supported") else False


def round_float32(device: torch.device | str, allowed: bool) -> None:
    """Whether a CUDA card may round the factors of float32 products and convolutions to 10 bits (TF32).

    Unasked, PyTorch rounds those of convolutions alone. This is a setting of the whole process.
    """
    import torch

    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


class RoundedFloat32:
    """Within it a CUDA card rounds float32's factors to 10 bits; what was set before comes back. It can be
    entered again and again.
    """

    def __enter__(self) -> None:
        from torch.backends import cuda, cudnn

        self._before = (cuda.matmul.allow_tf32, cudnn.allow_tf32)
        cuda.matmul.allow_tf32 = cudnn.allow_tf32 = True

    def __exit__(self, *_: object) -> None:
        from torch.backends import cuda, cudnn

        cuda.matmul.allow_tf32, cudnn.allow_tf32 = self._before


def capturing() -> bool:
    """Whether calls are being recorded into a CUDA graph now."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# ---- waiting


def synchronize(device: torch.device | str) -> None:
    """Wait until a device has done what it was given; nothing to wait for on a CPU."""
    import torch

    where = torch.device(device)
    if where.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(where)


def new_stream(device: torch.device) -> torch.Stream | None:
    """A second stream of a device; None where it has only one."""
    import torch

    return torch.Stream(device) if kind_of(device).streams else None


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread gives its work to."""
    import torch

    return torch.accelerator.current_stream(device)


def new_event(device: torch.device) -> Any:
    """A mark in a stream's work that a thread can wait for without taking a core."""
    import torch

    if device.type == "cuda":
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return torch.Event(device, blocking=True)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """On a stream that has seen what this thread's own did, and whose work is done at the end."""
    if stream is None:
        yield
        return
    import torch

    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with stream:
        yield
    stream.synchronize()


def used_here(*tensors: torch.Tensor) -> None:
    """Say that this thread's stream reads tensors which another stream made.

    Freed, their memory goes back to the stream that they were made on, which would write to it at once: now
    only when this stream is through with what it was given by then.
    """
    import torch

    if current() is None:
        return
    for tensor in tensors:
        if kind_of(tensor.device).streams:
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class _OneThread:
    """A lock that a thread may take again; after a release a waiting thread has it first."""

    def __init__(self) -> None:
        self._queue, self._inside = threading.Lock(), threading.Lock()
        self._owner, self._depth = 0, 0

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            with self._queue:
                self._inside.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._inside.release()


_ONE_THREAD = _OneThread()


def alone(device: torch.device | str) -> AbstractContextManager[None]:
    """Within, no other thread that asks for this works on an accelerator of one stream.

    Metal ends a process whose threads both call it (pytorch issue 197805). Other devices are not held. It may
    be entered again within.
    """
    kind = kind_of(device)
    return nullcontext() if kind is CPU or kind.streams else _ONE_THREAD


# ---- copies


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on a device. From main memory it goes by way of pinned memory, which a card reads by itself:
    with pageable memory the host may wait for all work that the device was given before."""
    import torch

    where = torch.device(device)
    if tensor.device.type != "cpu" or where.type == "cpu":
        return tensor.to(where)
    return pinned(tensor, where).to(where, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of main memory where a device reads it by itself; where it lies for those that do not."""
    return tensor.pin_memory() if kind_of(device).streams and not tensor.is_pinned() else tensor


def new_tensor(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers as a tensor on a device, without waiting for it: `torch.tensor(..., device=...)` waits."""
    import torch

    return to_device(torch.tensor(values, dtype=dtype), device)


# ---- weights that wait elsewhere

COMPUTED_ON = "_computed_on"
"""Where a module whose weights wait elsewhere keeps the device that its calls are on."""
AT_HOME = "_at_home"
"""Where a layer keeps the weights that wait, by name, also while their copies are on the device."""


def computed_on(module: torch.nn.Module) -> torch.device:
    """The device of a module's calls, wherever its weights lie just now."""
    device: torch.device | None = getattr(module, COMPUTED_ON, None)
    return next(module.parameters()).device if device is None else device


def weight_of(layer: torch.nn.Module) -> torch.Tensor:
    """A layer's weight, to read its values: of one that waits elsewhere what waits, in the type that it has
    there. The copy of a call belongs to another stream, and between calls there may be none."""
    waiting: dict[str, torch.Tensor] = getattr(layer, AT_HOME, {})
    weight: Any = layer.weight
    found: torch.Tensor = waiting.get("weight", weight)
    return found


# ---- memory

NO_ALLOCATOR = "is not a DeviceAllocator"
"""What torch says of a backend whose allocator keeps no books."""


def allocated_bytes(device: torch.device | str) -> int:
    """Memory that tensors hold on an accelerator."""
    import torch

    where = torch.device(device)
    if where.type == "mps":  # torch.accelerator asks Apple's allocator only since torch 2.14
        return int(torch.mps.current_allocated_memory())
    return int(torch.accelerator.memory_allocated(where))


def peak_allocated_bytes(device: torch.device | str) -> int:
    """The most that tensors held since `reset_peak`, where a kind has `statistics`."""
    import torch

    return int(torch.accelerator.max_memory_allocated(torch.device(device)))


def reset_peak(device: torch.device | str) -> None:
    """Start the peak again from what is held now."""
    import torch

    torch.accelerator.reset_peak_memory_stats(torch.device(device))


def free_bytes(device: torch.device | str) -> int | None:
    """Memory of an accelerator that nobody holds; of Apple's what is left of what Metal recommends.

    None where a backend from outside of torch does not say.
    """
    info = _memory_info(device)
    return None if info is None else info[0]


def total_bytes(device: torch.device | str) -> int | None:
    """All the memory that a job can have on an accelerator; None where a backend does not say.

    A card's properties say it. Asked for what is free, the driver starts its context, which takes half a
    gigabyte of every card that each process of a job merely counts.
    """
    import torch

    where = torch.device(device)
    if where.type in ("cuda", "xpu"):
        module: Any = torch.get_device_module(where)
        return int(module.get_device_properties(where).total_memory)
    info = _memory_info(device)
    return None if info is None else info[1]


def _memory_info(device: torch.device | str) -> tuple[int, int] | None:
    """Free and all."""
    import torch

    where = torch.device(device)
    if where.type == "mps":
        total = int(torch.mps.recommended_max_memory())
        return max(0, total - int(torch.mps.driver_allocated_memory())), total
    try:
        free, total = torch.accelerator.get_memory_info(where)
    except RuntimeError as error:  # torch has no class of its own for either
        if where.type in KINDS or not (isinstance(error, NotImplementedError) or NO_ALLOCATOR in str(error)):
            raise
        module: Any = getattr(torch, where.type, None)
        if not hasattr(module, "mem_get_info"):
            return None
        free, total = module.mem_get_info(where)
    return int(free), int(total)


def empty_cache() -> None:
    """Give memory that the accelerator's allocator keeps and no tensor holds back to the driver."""
    import torch

    here = current()
    if here is None:
        return
    if here.type == "mps":
        torch.mps.empty_cache()
    else:
        torch.accelerator.empty_cache()
