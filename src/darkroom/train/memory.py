"""What a run takes of memory: how many rows fit at once, and frozen weights in fewer bits.

The micro-batch, where a recipe leaves it to us: first an estimate from what autograd keeps of one row, then,
on a GPU, a trial: forward and backward passes of more rows while they find memory, of fewer where they do
not. What is learned is the same whichever it is.

A frozen layer of 8 or 4 bits makes its weight in the precision of computation for the forward pass and again
for the backward pass; in between its bits alone are held. (torchao's tensors would keep the weight that was
made until then, and are of linear layers alone: half of SD 1.5's U-Net are convolutions.)
"""

from __future__ import annotations

import math
import mmap
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.errors import RecipeError
from darkroom.hardware import accelerator
from darkroom.hardware.meters import drop_file_pages, file_mappings, give_back
from darkroom.models.model import is_mapped
from darkroom.recipe.rules import divisors
from darkroom.recipe.sections import TrainSettings
from darkroom.train.ranks import Ranks
from darkroom.train.step import Step, micro_batches
from darkroom.train.tasks.diffusion import Task

# Gradients, the backward pass's temporaries and the allocator come on top of what autograd keeps.
MARGIN = 1.6
SHARE = 0.6  # of the free memory
MOST_TRIALS = 6
ESTIMATED = "estimated, "


class NotOneFits(RecipeError):
    """Not even one picture's forward and backward pass finds memory."""


def choose_micro_batch(
    settings: TrainSettings,
    task: Task,
    inputs: Mapping[str, Tensor],
    device: torch.device,
    share: int | None = None,
) -> tuple[int, str]:
    """Rows of a forward pass, and why so many. `inputs` are those of at least one row; `share` is what one
    process has of a global batch, all of it unless said.
    """
    if settings.micro_batch != "auto":
        return settings.micro_batch, "asked for"
    batch = share or settings.global_batch
    row_bytes = activation_bytes(task, next(micro_batches(inputs, 1))) * MARGIN * task.rows_a_picture
    free = _free_memory_bytes(device)
    if free is None:
        return 1, f"{device.type} does not say how much memory is free: give train.micro_batch"
    free_bytes = free * SHARE
    fitting = [size for size in divisors(batch) if size * row_bytes <= free_bytes] or [1]
    message = f"{ESTIMATED}{row_bytes / 2**20:,.0f} MiB a row, {free_bytes / 2**30:,.1f} GiB to use"
    return max(fitting), message


def tried_micro_batch(
    fits: Callable[[int], bool], sizes: Sequence[int], estimate: int
) -> tuple[int | None, str]:
    """The largest of the ascending `sizes` that fits, tried from the estimate on; None where none does.

    Up while it fits, else down; at most `MOST_TRIALS` upwards, since each is a whole pass.
    """
    at = sizes.index(estimate)
    if fits(sizes[at]):
        for larger in sizes[at + 1 : at + 1 + MOST_TRIALS]:
            if not fits(larger):
                return sizes[at], f"found by trial: {larger} ran out of memory"
            at += 1
        return sizes[at], "found by trial"
    for smaller in reversed(sizes[:at]):
        if fits(smaller):
            return smaller, f"found by trial: {sizes[sizes.index(smaller) + 1]} ran out of memory"
    return None, "not one row fits"


def try_micro_batches(
    step: Step, task: Task, global_batch: int, inputs: Mapping[str, Tensor], ranks: Ranks
) -> tuple[int, str]:
    """The largest micro-batch that every rank finds memory for, by trial from the estimate, and why it; the
    step has it then. `inputs` are one row's. RecipeError where not one picture fits.
    """
    sizes = divisors(global_batch // ranks.size)
    each, estimate = task.rows_a_picture, step.micro_batch
    found, notes = tried_micro_batch(lambda size: step.fits(alike(inputs, size * each)), sizes, estimate)
    micro = ranks.smallest(found or 0)
    if not micro:
        raise NotOneFits(
            "train.micro_batch",
            "auto, but not one picture's forward and backward pass finds memory",
            mend="set train.gradient_checkpointing=true, a smaller data.resolution, or in the environment "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, which leaves fewer gaps",
        )
    step.set_micro_batch(micro)
    return micro, notes if micro == found else "what fits on every rank, found by trial"


def alike(inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """So many rows of inputs, the first over and over: what a trial is made with."""
    return {name: tensor[:1].repeat(rows, *(1,) * (tensor.dim() - 1)) for name, tensor in inputs.items()}


def activation_bytes(task: Task, inputs: Mapping[str, Tensor]) -> int:
    """What autograd keeps of one forward pass, weights apart, by running it."""
    weights = {
        held.untyped_storage().data_ptr()
        for module in task.modules.values()
        for held in chain(module.parameters(), module.buffers())
    }
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        """Count a saved tensor's storage once; returns the tensor as it is."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no later tensor takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        task.losses(inputs)
    return sum(kept.values())


def _free_memory_bytes(device: torch.device) -> int | None:
    """Memory that is free now; None where a device does not say."""
    if accelerator.kind_of(device).own_memory:
        return accelerator.free_bytes(device)
    return int(psutil.virtual_memory().available)


class FrozenConv2d(nn.Conv2d):
    """A convolution that keeps its weight alone while that is not trained; the same numbers otherwise."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        if trained or not input.requires_grad or self.padding_mode != "zeros":
            kept: Tensor = super()._conv_forward(input, weight, bias)
            return kept
        given = (self.stride, self.padding, self.dilation, self.groups)
        made: Tensor = _WithoutInput.apply(input, weight, bias, given)  # type: ignore[no-untyped-call]
        return made


class _WithoutInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, given: tuple[Any, ...]
    ) -> Tensor:
        """conv2d that saves its weight alone: the input's gradient needs no input."""
        ctx.save_for_backward(weight)
        ctx.given, ctx.size, ctx.stride = given, input.size(), input.stride()
        return F.conv2d(input, weight, bias, *given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The input's gradient; the input itself stands in by its shape."""
        (weight,) = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.given
        # Its shape and layout are looked at, never its numbers.
        blank = grad.new_empty_strided(ctx.size, ctx.stride)
        made = torch.ops.aten.convolution_backward(
            grad, blank, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
        )
        return made[0], None, None, None


def forget_inputs(module: nn.Module) -> None:
    """Let the convolutions of a module whose weights are frozen keep no input, in place.

    Names, weights and results stay as they are. A convolution that is trained later is an ordinary one again.
    """
    for part in module.modules():
        plain = type(part) is nn.Conv2d and not isinstance(part.padding, str)
        if plain and not any(param.requires_grad for param in part.parameters()):
            part.__class__ = FrozenConv2d


LEAST_BYTES = 32 * 1024**2  # below, a file is not worth it
ALIGNMENT = 64


def offload_mmap(modules: Iterable[nn.Module], folder: Path) -> int:
    """Lay the frozen weights of parts on a CPU into a file in `folder`; returns how many bytes.

    The parts work as before: a weight that is read comes back into memory, and after the part has run it
    is released again. Nothing is done where the file cannot be written, or for less than `LEAST_BYTES`.
    """
    parts = list(modules)
    tensors = [tensor for part in parts for tensor in _frozen(part)]
    if sum(tensor.nbytes for tensor in tensors) < LEAST_BYTES:
        return 0
    try:
        mapped, places = _written(tensors, folder)
    except OSError:
        return 0  # a full or read-only disk: they stay where they are
    for tensor, start in zip(tensors, places, strict=True):
        tensor.data = _view(mapped, tensor, start)
    for part in parts:
        for runs in _what_runs(part):
            runs.register_forward_hook(lambda *_: _release(mapped))
    _release(mapped)
    give_back()
    return mapped.nbytes


def laid_aside(named: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Copies of tensors in a file in `folder`, in memory only while they are read; else in memory."""
    try:
        mapped, places = _written(list(named.values()), folder)
    except OSError:  # a full or read-only disk
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
    pairs = zip(named.items(), places, strict=True)
    return {name: _view(mapped, tensor, start) for (name, tensor), start in pairs}


def _view(mapped: Tensor, like: Tensor, start: int) -> Tensor:
    return mapped[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _frozen(part: nn.Module) -> list[Tensor]:
    """Dense weights on the CPU that nothing trains."""
    found = (tensor for tensor in chain(part.parameters(), part.buffers()) if not tensor.requires_grad)
    plain = (tensor for tensor in found if type(tensor.data) is Tensor and tensor.device.type == "cpu")
    return [tensor for tensor in plain if tensor.is_contiguous() and tensor.nbytes]


def _written(tensors: list[Tensor], folder: Path) -> tuple[Tensor, list[int]]:
    """The file mapped as bytes, and where each tensor starts in it. It has no name, and goes with the map."""
    places = []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            places.append(file.tell())
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        # By its handle: on Windows such a file cannot be opened by a name.
        return torch.frombuffer(mmap.mmap(file.fileno(), file.tell()), dtype=torch.uint8), places


def _what_runs(part: nn.Module) -> list[nn.Module]:
    """A VAE is called by its halves, never as a whole."""
    halves = [getattr(part, name, None) for name in ("encoder", "decoder")]
    found = [half for half in halves if isinstance(half, nn.Module)]
    return found or [part]


def _release(mapped: Tensor) -> None:
    drop_file_pages(mapped.data_ptr(), mapped.nbytes)


BLOCKS = re.compile(r"(down_blocks|mid_block|up_blocks|blocks)\.")
LEAST_WEIGHTS = 1024  # a smaller layer is not worth it
BLOCK = 64  # weights of nf4 that share a scale, as in QLoRA's paper
LARGEST_FP8 = 448.0  # of float8_e4m3fn
LARGEST_INT8 = 127.0
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen values of QLoRA's 4-bit NormalFloat (Dettmers et al. 2023, appendix E)."""


def pack(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A weight as bytes and float32 scales, of fp8 and int8 one a row (output), of nf4 one for 64 weights."""
    values = weight.detach().float()
    values = values.reshape(-1, BLOCK) if kind == "nf4" else values.flatten(1)
    largest = values.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
    if kind == "nf4":
        levels = torch.tensor(NF4, device=weight.device)
        codes = torch.bucketize(values / largest, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        return codes[:, ::2] << 4 | codes[:, 1::2], largest
    if kind == "int8":
        scales = largest / LARGEST_INT8
        return (values / scales).round_().to(torch.int8).view(torch.uint8), scales
    scales = largest / LARGEST_FP8
    codes = (values / scales).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def unpack(
    codes: Tensor,
    scales: Tensor,
    kind: str,
    shape: torch.Size,
    dtype: torch.dtype,
    levels: Tensor | None = None,
) -> Tensor:
    """The weight of these bytes and scales; `levels` are nf4's values, if they are on the device."""
    if kind == "nf4":
        levels = torch.tensor(NF4, device=codes.device) if levels is None else levels
        both = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(1)
        values = levels[both.int()]
    elif kind == "int8":
        values = codes.view(torch.int8).float()
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    return (values * scales).to(dtype).view(shape)


class MadeAnew(nn.Module):
    """A frozen layer that has its weight for a forward pass and again for the backward pass, not in between.

    What the weight is made of is its tensor `kept_as`, which may rest elsewhere: `bring` has it where the
    layer computes then.
    """

    kept_as: str
    bring: Callable[[nn.Module], Tensor] | None = None

    @property
    def table(self) -> dict[str, Any]:
        """The layer's parameters or buffers: those that have `kept_as`."""
        return self._parameters if self.kept_as in self._parameters else self._buffers

    def present(self) -> Tensor:
        """What the weight is made of, where the layer computes."""
        kept: Tensor = self.table[self.kept_as] if self.bring is None else self.bring(self)
        return kept

    def made(self, dtype: torch.dtype) -> Tensor:
        """The weight in a precision."""
        raise NotImplementedError


class LinearMadeAnew(MadeAnew, nn.Linear):
    """A linear layer without a weight between passes."""

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = _Linear.apply(input, self)  # type: ignore[no-untyped-call]
        return made


class Conv2dMadeAnew(MadeAnew, nn.Conv2d):
    """A convolution without a weight between passes. It keeps no input for the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = _Conv2d.apply(input, self)  # type: ignore[no-untyped-call]
        return made

    @property
    def given(self) -> tuple[Any, ...]:
        """How it convolves, as PyTorch's functions take it."""
        return self.stride, self.padding, self.dilation, self.groups


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: LinearMadeAnew) -> Tensor:
        ctx.layer = layer
        return F.linear(input, layer.made(input.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.layer.made(grad.dtype)
        # As PyTorch's own: a batched product, which `grad @ weight` may be, sums in another order.
        made = grad.reshape(-1, grad.shape[-1]) @ weight
        return made.view(*grad.shape[:-1], weight.shape[1]), None


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Conv2dMadeAnew) -> Tensor:
        ctx.layer, ctx.size, ctx.stride = layer, input.size(), input.stride()
        return F.conv2d(input, layer.made(input.dtype), layer.bias, *layer.given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input alone: the weight is frozen."""
        layer: Conv2dMadeAnew = ctx.layer
        stride, padding, dilation, groups = layer.given
        # The input's shape and layout are looked at, never its numbers.
        blank = grad.new_empty_strided(ctx.size, ctx.stride)
        weight, wanted = layer.made(grad.dtype), [True, False, False]
        made = torch.ops.aten.convolution_backward(
            grad, blank, weight, None, stride, padding, dilation, False, [0, 0], groups, wanted
        )
        return made[0], None


class Packed(MadeAnew):
    """A weight in bits: `codes`; `scales` and `levels` as bits of int32, which no cast changes."""

    kept_as = "codes"
    kind: str
    shape: torch.Size
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor
    levels: Tensor

    @property
    def num_weights(self) -> int:
        """Weights that are held as bits."""
        return math.prod(self.shape)

    @property
    def weight(self) -> Tensor:
        """The weight, made anew."""
        return self.made(self.dtype)

    def made(self, dtype: torch.dtype) -> Tensor:
        """The weight in a precision."""
        levels = self.levels.view(torch.float32) if self.kind == "nf4" else None
        return unpack(self.present(), self.scales.view(torch.float32), self.kind, self.shape, dtype, levels)


class PackedLinear(Packed, LinearMadeAnew):  # type: ignore[override]
    """A linear layer whose weight is bits."""


class PackedConv2d(Packed, Conv2dMadeAnew):  # type: ignore[override]
    """A convolution whose weight is bits."""


_PACKED: dict[type[nn.Module], type[Packed]] = {nn.Linear: PackedLinear, nn.Conv2d: PackedConv2d}


def pack_layers(module: nn.Module, kind: str) -> int:
    """Hold the frozen layers of a U-Net's blocks in 8 or 4 bits, in place; returns how many layers.

    Adapter layers, biases, norms, and what lies before and after the blocks stay as they are.
    """
    files, number = file_mappings(), 0
    for name, layer in module.named_modules():
        if not BLOCKS.match(name) or not _can_be_packed(layer, kind):
            continue
        weight: Tensor = layer._parameters.pop("weight")
        layer.__class__ = _PACKED[type(layer)]
        assert isinstance(layer, Packed)
        layer.kind, layer.shape, layer.dtype = kind, weight.shape, weight.dtype
        codes, scales = pack(weight, kind)
        layer.register_buffer("codes", codes, persistent=False)
        layer.register_buffer("scales", scales.view(torch.int32), persistent=False)
        if kind == "nf4":
            levels = torch.tensor(NF4, device=weight.device)
            layer.register_buffer("levels", levels.view(torch.int32), persistent=False)
        if type(weight.data) is Tensor and is_mapped(weight, files):
            drop_file_pages(weight.data_ptr(), weight.nbytes)
        number += 1
    give_back()
    return number


def can_be_made_anew(layer: nn.Module) -> bool:
    """Whether a layer is a plain frozen one of the kinds that compute with a weight that is made anew."""
    if type(layer) not in _PACKED or any(param.requires_grad for param in layer.parameters(recurse=False)):
        return False
    return not isinstance(layer, nn.Conv2d) or (
        layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )


def _can_be_packed(layer: nn.Module, kind: str) -> bool:
    if not can_be_made_anew(layer):
        return False
    weight = layer._parameters["weight"]
    assert weight is not None
    number = weight.numel()
    return number >= LEAST_WEIGHTS and (kind != "nf4" or number % BLOCK == 0)


def packed_weights(module: nn.Module) -> int:
    """Weights of a module that are held as bits, which are no parameters."""
    return sum(part.num_weights for part in module.modules() if isinstance(part, Packed))
