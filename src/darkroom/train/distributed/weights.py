"""Float32 master weights, and the modules that compute with them in their own or a smaller precision.

In bf16 and fp16 the modules hold rounded copies of the masters: cast once a step, not once a forward
pass as autocast does. Gradients are added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from darkroom.errors import CheckpointError

if TYPE_CHECKING:
    from darkroom.train.checkpoint.format import Saved


MANY_KEYS = 1024
"""Attention over this many keys or more is the quicker one in bf16."""


class Weights:
    """Trained modules in float32: their own parameters are the masters.

    `masters` are all trained parameters by `<part>.<name>`, in a fixed order.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = dict(modules)
        self.computing = {
            f"{part}.{name}": param
            for part, module in modules.items()
            for name, param in module.named_parameters()
            if param.requires_grad
        }
        self.masters: dict[str, Tensor] = dict(self.computing)

    @property
    def dtype(self) -> torch.dtype:
        """What the modules compute in."""
        return torch.float32

    gradient_scale = 1.0
    """What a loss is multiplied with because gradients come back divided by it."""

    @property
    def parts(self) -> Mapping[str, tuple[int, int]]:
        """Of masters that are only some rows of a weight: the first row, and of how many in all."""
        return {}

    def expect(self, *, last: bool) -> None:
        """A micro-batch's backward pass follows, the `last` of its step or not."""

    def collect(self, *, first: bool) -> None:
        """Take up the gradients of a micro-batch; `first` of its step starts a new sum."""

    def exchange(self) -> None:
        """All micro-batches are through: make the masters' gradients those of the global batch."""

    def norm(self, own: Tensor) -> Tensor:
        """The norm of all gradients, of that of the gradients held here."""
        return own

    def publish(self) -> None:
        """Let the modules compute with what the masters are now."""

    def on_gradient(self, take: Callable[[Tensor], None]) -> None:
        """Call `take(master)` when a master has its gradient, inside the backward pass; then forget it."""

        def taken(param: Tensor) -> None:
            take(param)
            param.grad = None

        for param in self.computing.values():
            param.register_post_accumulate_grad_hook(taken)  # type: ignore[no-untyped-call]

    def clear_gradients(self) -> None:
        """Forget the step's gradients."""
        for param in self.masters.values():
            param.grad = None

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set the masters, by name; CheckpointError where they are another model's."""
        odd = sorted(values.keys() ^ self.masters.keys())
        odd += [
            name
            for name, param in self.masters.items()
            if name not in odd and values[name].shape != param.shape
        ]
        if odd:
            raise CheckpointError(
                f"the checkpoint is of another model: {odd[0]} differs, and {len(odd) - 1} more"
            )
        with torch.no_grad():
            for name, param in self.masters.items():
                param.copy_(values[name])
        self.publish()

    @contextmanager
    def showing(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, the modules hold these values (the averaged weights) instead of the masters."""
        trained = {name: param.data for name, param in self.masters.items()}
        for name, param in self.masters.items():
            param.data = values[name].to(param.device)
        try:
            yield
        finally:
            for name, param in self.masters.items():
                param.data = trained[name]


class CastWeights(Weights):
    """Trained modules in bf16 or fp16, with float32 masters."""

    def __init__(self, modules: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
        masters = Weights(modules).masters
        kept = {name: param.detach().to(torch.float32, copy=True) for name, param in masters.items()}
        for master in kept.values():
            master.requires_grad_()
        for module in modules.values():
            cast(module, dtype)
        super().__init__(modules)
        self.masters = kept
        self._dtype = dtype
        self._pairs = [(self.masters[name], param) for name, param in self.computing.items()]

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def collect(self, *, first: bool) -> None:
        """Add the gradients of the computing copies to those of the float32 masters."""
        pairs = [(master, param) for master, param in self._pairs if param.grad is not None]
        if first and len(pairs) < len(self._pairs):
            super().clear_gradients()  # of last step's, where this one has none
        for master, _ in pairs:
            if master.grad is None:
                master.grad = torch.empty_like(master, memory_format=torch.preserve_format)
        ups = [master.grad for master, _ in pairs if master.grad is not None]
        grads = [param.grad for _, param in pairs if param.grad is not None]
        if first:
            torch._foreach_copy_(ups, grads)
        else:
            torch._foreach_add_(ups, grads)
        for _, param in pairs:
            param.grad = None

    def on_gradient(self, take: Callable[[Tensor], None]) -> None:
        """Call `take` with each master as soon as its gradient is there."""
        masters: dict[Tensor, Tensor] = {param: master for master, param in self._pairs}

        def taken(param: Tensor) -> None:
            """Step a parameter's master as soon as its gradient is there, and drop both gradients."""
            assert param.grad is not None
            master = masters[param]
            master.grad, param.grad = param.grad.float(), None
            take(master)
            master.grad = None
            with torch.no_grad():
                param.copy_(master)

        for param in self.computing.values():
            param.register_post_accumulate_grad_hook(taken)  # type: ignore[no-untyped-call]

    def publish(self) -> None:
        self._show([master for master, _ in self._pairs])

    def clear_gradients(self) -> None:
        """Nothing to do: the next step's first micro-batch writes over them."""

    @contextmanager
    def showing(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, the modules have these values instead of the weights."""
        self._show([values[name] for name in self.computing])
        try:
            yield
        finally:
            self.publish()

    def _show(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_([param for _, param in self._pairs], values)


def held_rows(saved: Saved, weights: Weights) -> Mapping[str, Tensor]:
    """Of a checkpoint's tensors, what this process holds of each."""
    if not weights.parts:
        return saved
    if odd := sorted({name.rpartition("/")[0] or name for name in saved} - weights.computing.keys()):
        raise CheckpointError(f"the checkpoint is of another model: {odd[0]} differs")
    found = {}
    for name in saved:
        weight = name.rpartition("/")[0] or name
        if weight in weights.masters:
            found[name] = saved.rows(name, weights.parts[weight][0], len(weights.masters[weight]))
    return found


def make_weights(modules: Mapping[str, nn.Module], dtype: torch.dtype) -> Weights:
    """The trained modules' weights, for a precision to compute in."""
    if dtype == torch.float32:
        return Weights(modules)
    for module in modules.values():
        if device_of(module).type == "cpu":
            attend_in_float32(module)
    return CastWeights(modules, dtype)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module in place; diffusers' own `to` would warn of an empty list of layers to leave alone."""
    nn.Module.to(module, dtype)


def forget(module: nn.Module) -> None:
    """Give back the memory of a module's weights; it cannot be used any more."""
    for inner in module.modules():
        for name in [name for name, _ in inner.named_parameters(recurse=False)]:
            inner.register_parameter(name, None)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are."""
    return next(module.parameters()).device


def attend_in_float32(module: nn.Module) -> None:
    """Let a module's attention products of few keys run in float32, all else in the module's precision.

    torch 2.13's bf16 attention on CPU has a backward pass 2 to 7 times slower than the float32 one at up to
    256 keys; from 1,024 on it is the quicker one, by a third.
    """
    from darkroom.models.parts import Attention, AttnProcessor2_0, PreTrainedModel

    class Float32Attention(AttnProcessor2_0):  # type: ignore[misc]
        # The names of its parameters count: diffusers leaves out, with a warning, what is not among them.
        def __call__(
            self,
            attn: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor | None = None,
            attention_mask: Tensor | None = None,
            temb: Tensor | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            given = (attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            with _Float32Product():
                out: Tensor = super().__call__(*given, *args, **kwargs)
            return out

    if isinstance(module, PreTrainedModel):
        module.set_attn_implementation(_register_float32_attention())
    for part in module.modules():
        if isinstance(part, Attention):
            part.set_processor(Float32Attention())


def _register_float32_attention() -> str:
    """Tell transformers of the attention in float32; returns the name it knows it by."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return out.to(query.dtype), None

    name = "sdpa_float32"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)  # without it the mask, causal in CLIP, is left out
    return name


class _Float32Product(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention or args[1].shape[-2] >= MANY_KEYS:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        return func(*(arg.float() for arg in args), **(kwargs or {})).to(dtype)
