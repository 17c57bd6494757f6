"""One optimiser step: micro-batches forward and backward, clipping, the optimiser. `measure` times it bare.

And what it trains, `Weights`: float32 masters, and the modules that compute with them in their own or a
smaller precision. In bf16 and fp16 the modules hold rounded copies of the masters: cast once a step, not once
a forward pass as autocast does. Gradients are added up in float32.

Shapes: B rows of the global batch, b of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from darkroom.errors import CheckpointError, is_out_of_memory
from darkroom.hardware import accelerator
from darkroom.recipe.sections import OptimSettings, TrainSettings
from darkroom.train.optim import (
    Ema,
    Optimiser,
    Rate,
    averaged_by_itself,
    make_each,
    make_optimiser,
    parameter_groups,
)
from darkroom.train.precision import attend_in_float32, cast

if TYPE_CHECKING:
    from darkroom.train.checkpoint import Saved

Inputs = Mapping[str, Tensor]


class Loss(Protocol):
    """What a step asks of a task."""

    def losses(self, inputs: Inputs) -> dict[str, Tensor]:
        """Of each row [b]: `loss`, which is trained on, and what else is to be logged."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What one step measured, still on the device: reading it waits for the step."""

    losses: dict[str, Tensor]
    grad_norm: Tensor
    lr: float


class Step:
    """The bare step and its state: master weights, optimiser, averaged weights.

    Calling it with the number k of the step (from 0) and a global batch's inputs trains once. Nothing in it
    waits for the device. `micro_batch` pictures are computed at a time, of `rows_a_picture` rows each; the
    result is the mean over the global batch whatever it is, up to rounding. `processes` share it, each with
    its rows.
    """

    def __init__(
        self,
        task: Loss,
        weights: Weights,
        *,
        train: TrainSettings,
        optim: OptimSettings,
        micro_batch: int,
        rates: Mapping[str, float] | None = None,
        rows_a_picture: int = 1,
        processes: int = 1,
    ) -> None:
        self.task, self.weights, self._train, self._optim = task, weights, train, optim
        # Tasks whose steps are of several kinds are given which one it is.
        self._begin: Callable[[int], None] = getattr(task, "begin", lambda k: None)
        # And those that compute with the averaged weights are given them.
        self._follow: Callable[[Mapping[str, Tensor]], None] | None = getattr(task, "follow", None)
        self._limit: Callable[[Mapping[str, Tensor]], None] = getattr(task, "limit", lambda masters: None)
        self._rows_a_picture = rows_a_picture
        self.set_micro_batch(micro_batch)
        self._size = processes
        # Of several ranks one alone must not make other passes than the rest.
        self._may_shrink = train.micro_batch == "auto" and processes == 1 and not optim.fused_backward
        peaks = dict.fromkeys(weights.modules, optim.lr) | dict(rates or {})
        groups = parameter_groups(self.weights.masters, peaks, optim.weight_decay, optim)
        if optim.fused_backward:
            self._fuse(make_each(groups, optim))
        else:
            self.optimiser = make_optimiser(groups, optim)
        self.ema = Ema(self.weights.masters, train.ema)
        device = next(iter(self.weights.masters.values())).device
        # bf16 has float32's range; fp16's gradients vanish unless the loss is scaled up.
        self.scaler = torch.amp.GradScaler(device.type, enabled=weights.dtype == torch.float16)

    def set_micro_batch(self, pictures: int) -> None:
        """Compute so many pictures at a time from now on: what is learned is the same, up to rounding."""
        self.micro_batch, self._micro_rows = pictures, pictures * self._rows_a_picture

    def __call__(self, k: int, inputs: Inputs) -> StepResult:
        torch.manual_seed(_step_seed(self._train.seed, k))  # dropout, where a model has any
        self._begin(k)
        if self._follow is not None:
            self._follow(self.ema.weights())
        factor = lr_factor(k, self._train.steps, self._optim)
        set_lr(self.optimiser, factor, k)
        losses = self._fitting_gradients(inputs)
        norm = self._square_norm.sqrt() if self._optim.fused_backward else self._update()
        self.weights.clear_gradients()
        self._limit(self.weights.masters)
        self.weights.publish()
        self.ema.update(k)
        return StepResult(losses, norm, self._optim.lr * factor)

    def _fuse(self, optimisers: Mapping[Tensor, Optimiser]) -> None:
        """Step each weight as soon as its gradient is there."""
        self.optimiser = Optimiser([inner for each in optimisers.values() for inner in each.inner])

        def take(master: Tensor) -> None:
            assert master.grad is not None
            self._square_norm += torch.linalg.vector_norm(master.grad).square()
            optimisers[master].step()

        self.weights.on_gradient(take)

    @property
    def averages(self) -> bool:
        """Whether there are averaged weights of their own to be kept."""
        return self._optim.name == "schedule-free" or bool(self.ema.state())

    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights by name: the optimiser's own, the moving average, or the trained ones."""
        own = averaged_by_itself(self.optimiser, self.weights.masters, self._optim)
        return self.ema.weights() if own is None else own

    def release(self) -> None:
        """Give back what only a next step would need: the optimiser's state and all gradients."""
        for inner in self.optimiser.inner:
            inner.state.clear()
        self._forget_gradients()

    def _update(self) -> Tensor:
        """Clip and take the optimiser's step; returns the norm of the gradients before."""
        masters, max_norm = list(self.weights.masters.values()), self._optim.clip_norm
        if not self.scaler.is_enabled():
            norm = self.weights.norm(gradient_norm(masters))
            clipped_step(self.optimiser, norm, max_norm, self._odd(norm))
            return norm
        for inner in self.optimiser.inner:
            self.scaler.unscale_(inner)
        norm = gradient_norm(masters)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(masters, max_norm, norm)
        for inner in self.optimiser.inner:
            self.scaler.step(inner)
        self.scaler.update()
        return norm

    def _odd(self, norm: Tensor) -> Tensor | None:
        """1 on the device where this step is to leave the weights as they are; None where none ever is."""
        if self._train.nonfinite_policy != "skip":
            return None
        most = self._train.spike_norm or torch.finfo(torch.float32).max
        return (~(norm <= most)).float()

    def pass_over(self, k: int) -> None:
        """Step k without its batch: the weights stay."""
        self.ema.update(k)

    def fits(self, inputs: Inputs) -> bool:
        """Whether one forward and backward pass of these rows finds memory besides the optimiser's state.

        Nothing is learned from it, and nothing is sent to other ranks.
        """
        masters = list(self.weights.masters.values())
        try:
            device = masters[0].device
            kept = 3 if self._train.ema.enabled else 2  # the optimiser's means, and the average
            state = kept * sum(master.nbytes for master in masters)
            limited = accelerator.kind_of(device).own_memory
            held = torch.empty(state if limited else 0, dtype=torch.uint8, device=device)
            self.weights.expect(last=False)
            self.task.losses(inputs)["loss"].sum().backward()  # type: ignore[no-untyped-call]
            self.weights.collect(first=True)
            del held
            found = True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found = False
        self._forget_gradients()
        return found

    def _forget_gradients(self) -> None:
        self.weights.clear_gradients()
        for computing in self.weights.computing.values():
            computing.grad = None
        accelerator.empty_cache()

    def _fitting_gradients(self, inputs: Inputs) -> dict[str, Tensor]:
        """The gradients; where `train.micro_batch` is ours to choose, with fewer rows at a time once memory
        runs out: nothing has been learned of the batch until all its gradients are there.
        """
        while True:
            try:
                return self._gradients(inputs)
            except (RuntimeError, MemoryError) as error:
                if not (self._may_shrink and self.micro_batch > 1 and is_out_of_memory(error)):
                    raise
            self._forget_gradients()  # here, where the error no longer holds the pass's tensors
            self.set_micro_batch(_next_smaller(num_rows(inputs) // self._rows_a_picture, self.micro_batch))

    def _gradients(self, inputs: Inputs) -> dict[str, Tensor]:
        """Forward and backward of every micro-batch; returns the means over the global batch.

        Of several ranks each returns its share of them: their sum is the mean.
        """
        rows = num_rows(inputs) * self._size
        total: dict[str, Tensor] = {}
        if self._optim.fused_backward:
            self._square_norm = torch.zeros((), device=next(iter(inputs.values())).device)
        last = -(-num_rows(inputs) // self._micro_rows) - 1
        for i, micro in enumerate(micro_batches(inputs, self._micro_rows)):
            self.weights.expect(last=i == last)
            means = {name: loss_b.sum() / rows for name, loss_b in self.task.losses(micro).items()}
            scale = self.weights.gradient_scale
            loss = means["loss"] if scale == 1.0 else means["loss"] * scale
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if not self._optim.fused_backward:
                self.weights.collect(first=i == 0)
            for name, mean in means.items():
                total[name] = total[name] + mean.detach() if name in total else mean.detach()
        self.weights.exchange()
        return total


def _next_smaller(batch: int, micro: int) -> int:
    """The largest divisor of the batch below a micro-batch."""
    return next(size for size in range(micro - 1, 0, -1) if batch % size == 0)


def num_rows(inputs: Inputs) -> int:
    """Rows of a batch of inputs; every tensor has them first."""
    return len(next(iter(inputs.values())))


def micro_batches(inputs: Inputs, size: int) -> Iterator[dict[str, Tensor]]:
    """A batch in parts of `size` rows; the last may be smaller."""
    for start in range(0, num_rows(inputs), size):
        yield {name: tensor[start : start + size] for name, tensor in inputs.items()}


def _step_seed(seed: int, k: int) -> int:
    """Torch's seed of step k: with it nothing random has to be saved, a step's number says it all."""
    return (seed * 0x9E3779B97F4A7C15 + k * 0xBF58476D1CE4E5B9 + 1) % 2**63


def lr_factor(k: int, steps: int, settings: OptimSettings) -> float:
    """The learning rate of step k (from 0) of `steps`, as a share of the peak.

    The rate of the first step is peak / warmup_steps, so that no step is idle.
    """
    if k < settings.warmup_steps:
        return (k + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant":
        return 1.0
    done = min((k - settings.warmup_steps) / max(steps - settings.warmup_steps, 1), 1.0)
    if settings.lr_schedule in ("linear", "polynomial"):
        falling = math.pow(1 - done, settings.power)
    else:  # a cycle's end is the next one's start, but for the last
        cycle = done * settings.num_cycles
        falling = 0.5 * (1 + math.cos(math.pi * (cycle % 1.0 if done < 1 else 1.0)))
    return settings.final_lr_ratio + (1 - settings.final_lr_ratio) * falling


def set_lr(optimiser: Optimiser, factor: float, k: int = 0) -> None:
    """Set every group's rate to its peak times `factor`, or to 0 where step k is not one of its own."""
    for group in optimiser.param_groups:
        rate: Rate = group["rate"]
        stays = k < rate.start or (rate.stop is not None and k >= rate.stop)
        lr = 0.0 if stays else group["peak_lr"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def gradient_norm(params: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together. It stays on the device: nothing waits for it."""
    norms = torch._foreach_norm([param.grad for param in params if param.grad is not None])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clipped_step(
    optimiser: Optimiser, norm: Tensor, max_norm: float | None, odd: Tensor | None = None
) -> None:
    """One step with the gradients scaled down so that their norm is at most `max_norm`.

    Where `odd` is 1 on the device, fused AdamW leaves weights and state as they are, and nobody waits, but
    on Metal.

    The fused kernel divides by `grad_scale` as it reads the gradients, which saves a pass over them.
    """
    if max_norm is None and odd is None:
        optimiser.step()
        return
    scale = torch.ones_like(norm) if max_norm is None else (norm / max_norm).clamp_(min=1.0)
    fused = [inner for inner in optimiser.inner if getattr(inner, "_step_supports_amp_scaling", False)]
    others = [inner for inner in optimiser.inner if inner not in fused]
    if others and odd is not None and bool(odd):
        return
    grads = [p.grad for o in others for g in o.param_groups for p in g["params"] if p.grad is not None]
    if grads:
        torch._foreach_div_(grads, scale)
    for inner in fused:
        inner.grad_scale = scale  # type: ignore[attr-defined]
        if odd is not None:
            inner.found_inf = odd  # type: ignore[attr-defined]
    try:
        optimiser.step()
    finally:
        for inner in fused:
            del inner.grad_scale  # type: ignore[attr-defined]
            if odd is not None:
                del inner.found_inf  # type: ignore[attr-defined]


# ---- what is trained


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


def make_weights(modules: Mapping[str, nn.Module], dtype: torch.dtype) -> Weights:
    """The trained modules' weights, for a precision to compute in."""
    if dtype == torch.float32:
        return Weights(modules)
    for module in modules.values():
        if next(module.parameters()).device.type == "cpu":
            attend_in_float32(module)
    return CastWeights(modules, dtype)


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
