"""Weights that several processes train together: the same in all of them (ddp), or cut among them (fsdp).

ddp: while the backward pass of a step's last micro-batch runs, float32 gradients are summed bucket by bucket
in the order in which they come; earlier micro-batches are added up at home. fsdp: PyTorch's `fully_shard`,
block by block; the masters are this rank's rows of each weight, as plain tensors, so that optimiser,
average and checkpoint work on them as on any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from darkroom.train.precision import attend_in_float32
from darkroom.train.ranks import Ranks
from darkroom.train.step import CastWeights, Weights

BUCKET_BYTES = 25 * 2**20


class _Bucket:
    """Gradients that are sent together, as one flat tensor in float32 or what they are to be summed in."""

    def __init__(self, masters: list[Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.masters, self.waiting = masters, len(masters)
        self.flat = torch.zeros(sum(m.numel() for m in masters), device=masters[0].device, dtype=dtype)
        ends = accumulate(m.numel() for m in masters)
        pieces = [self.flat[end - m.numel() : end] for m, end in zip(masters, ends, strict=True)]
        # In each weight's own memory layout, as the optimiser's kernels want it.
        self.views = [
            piece.as_strided(m.size(), m.stride(), piece.storage_offset())
            for piece, m in zip(pieces, masters, strict=True)
        ]
        self.work: Any = None

    def send(self) -> None:
        """Begin the all-reduce of the bucket's gradients, packed into its flat tensor."""
        import torch.distributed as dist

        here = [m.grad for m in self.masters if m.grad is not None]
        views = [view for view, m in zip(self.views, self.masters, strict=True) if m.grad is not None]
        if len(here) < len(self.masters):
            self.flat.zero_()
        torch._foreach_copy_(views, here)
        self.work = dist.all_reduce(self.flat, async_op=True)

    def receive(self) -> None:
        """Wait for the sum and give each master its part of it."""
        self.work.wait()
        pairs = [(m, view) for m, view in zip(self.masters, self.views, strict=True) if m.grad is not None]
        if self.flat.dtype == torch.float32:
            for master, view in pairs:
                master.grad = view
        else:
            torch._foreach_copy_(
                [m.grad for m, _ in pairs if m.grad is not None], [view for _, view in pairs]
            )
        self.waiting = len(self.masters)


class Summing:
    """Sums the masters' gradients over all ranks, in buckets that leave as soon as they are full."""

    def __init__(self, masters: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self._buckets = [_Bucket(some, dtype) for some in _buckets(list(masters.values()))]
        self._of = {master: bucket for bucket in self._buckets for master in bucket.masters}
        self._sent = 0
        self.last = False

    def ready(self, master: Tensor) -> None:
        """This gradient is final. Buckets leave in one order on all ranks, whatever comes first."""
        self._of[master].waiting -= 1
        while self._sent < len(self._buckets) and self._buckets[self._sent].waiting == 0:
            self._send()

    def finish(self) -> None:
        """Send what is left, and put the sums in the gradients' place."""
        while self._sent < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            bucket.receive()
        self._sent = 0

    def _send(self) -> None:
        self._buckets[self._sent].send()
        self._sent += 1


def _buckets(masters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Masters in the order in which the backward pass reaches them, more or less: the last first."""
    some: list[Tensor] = []
    size = 0
    for master in reversed(masters):
        some.append(master)
        size += 4 * master.numel()
        if size >= BUCKET_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


class ReplicatedWeights(Weights):
    """Float32 weights that are the same on all ranks."""

    def __init__(self, modules: Mapping[str, nn.Module], reduce: torch.dtype = torch.float32) -> None:
        super().__init__(modules)
        self._summing = Summing(self.masters, reduce)
        for param in self.computing.values():
            param.register_post_accumulate_grad_hook(self._taken)  # type: ignore[no-untyped-call]

    def _taken(self, param: Tensor) -> None:
        if self._summing.last:
            self._summing.ready(param)

    def expect(self, *, last: bool) -> None:
        self._summing.last = last

    def exchange(self) -> None:
        self._summing.finish()


class ReplicatedCastWeights(CastWeights):
    """bf16 or fp16 copies with float32 masters that are the same on all ranks; sums are of float32 unless
    `reduce` says otherwise."""

    def __init__(
        self, modules: Mapping[str, nn.Module], dtype: torch.dtype, reduce: torch.dtype = torch.float32
    ) -> None:
        super().__init__(modules, dtype)
        self._summing = Summing(self.masters, reduce)
        masters: dict[Tensor, Tensor] = {param: master for master, param in self._pairs}
        self._begun = False

        def taken(param: Tensor) -> None:
            """Add a parameter's gradient to its float32 master's, and drop it."""
            if not self._summing.last:
                return
            master = masters[param]
            assert param.grad is not None
            if self._begun and master.grad is not None:
                master.grad.add_(param.grad)
            else:
                master.grad = param.grad.float()
            param.grad = None
            self._summing.ready(master)

        for param in self.computing.values():
            param.register_post_accumulate_grad_hook(taken)  # type: ignore[no-untyped-call]

    def expect(self, *, last: bool) -> None:
        if last and not self._begun:  # the only micro-batch: nothing of the step before may stay
            Weights.clear_gradients(self)
        self._summing.last = last

    def collect(self, *, first: bool) -> None:
        if not self._summing.last:
            super().collect(first=first)
            self._begun = True

    def exchange(self) -> None:
        self._summing.finish()
        self._begun = False

    def clear_gradients(self) -> None:
        Weights.clear_gradients(self)


class ShardedWeights(Weights):
    """Float32 weights cut among the ranks by their first dimension; blocks are gathered in `dtype`."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        dtype: torch.dtype,
        ranks: Ranks,
        shard: str,
        reduce: torch.dtype = torch.float32,
    ) -> None:
        for module in modules.values():
            if dtype != torch.float32 and next(module.parameters()).device.type == "cpu":
                attend_in_float32(module)
            _shard_module(module, dtype, ranks, shard, reduce)
        super().__init__(modules)
        self._dtype = dtype
        self.gradient_scale = float(ranks.size)  # fully_shard divides by it
        self._parts = {name: _part_of(param) for name, param in self.computing.items()}
        # This rank's rows, as leaves of their own on the same memory.
        with torch.no_grad():
            local = {name: param.to_local().detach() for name, param in self.computing.items()}  # type: ignore[attr-defined]
        self.masters = {name: rows.requires_grad_() for name, rows in local.items() if rows.numel()}

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def parts(self) -> Mapping[str, tuple[int, int]]:
        return self._parts

    def _blocks(self) -> Iterator[Any]:
        from torch.distributed.fsdp import FSDPModule

        for module in self.modules.values():
            yield from (inner for inner in module.modules() if isinstance(inner, FSDPModule))

    def expect(self, *, last: bool) -> None:
        for module in self.modules.values():
            module.set_requires_gradient_sync(last)  # type: ignore[operator]

    def exchange(self) -> None:
        for name, master in self.masters.items():
            grad: Any = self.computing[name].grad
            master.grad = None if grad is None else grad.to_local()

    def clear_gradients(self) -> None:
        super().clear_gradients()
        for param in self.computing.values():
            param.grad = None

    def norm(self, own: Tensor) -> Tensor:
        """The norm over all ranks' rows."""
        import torch.distributed as dist

        square = own.square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    @property
    def _group(self) -> Any:
        """The ranks that hold one copy of the weights between them."""
        mesh: Any = next(iter(self.computing.values())).device_mesh  # type: ignore[attr-defined]
        return mesh.get_group(mesh.ndim - 1)

    @contextmanager
    def showing(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, the modules have these values instead of the weights."""
        with torch.no_grad():
            # Whole weights that a forward pass left behind would be of other values.
            same = all(values[name].data_ptr() == master.data_ptr() for name, master in self.masters.items())
            trained = {} if same else {name: master.detach().clone() for name, master in self.masters.items()}
            self._put({} if same else values)
        try:
            yield
        finally:
            with torch.no_grad():
                self._put(trained)

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            if name in self.masters:
                self.masters[name].copy_(value)
        for block in self._blocks():
            block.reshard()


def _shard_module(
    module: nn.Module, dtype: torch.dtype, ranks: Ranks, shard: str, reduce: torch.dtype = torch.float32
) -> None:
    """Cut a module's weights among the ranks, each block by itself and the rest together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(module.parameters()).device.type
    nodes = ranks.size // ranks.local_size
    if shard == "hybrid" and nodes > 1:
        mesh = init_device_mesh(device, (nodes, ranks.local_size), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh(device, (ranks.size,), mesh_dim_names=("shards",))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=reduce)
    reshard = shard != "grads"
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    # A timestep in bf16 would be another one: what the whole module is given is cast here.
    whole = replace(policy, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=whole)
    if dtype != torch.float32:
        module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Latents [B, C, H, W] and text [B, L, D] in `dtype`; timesteps, sizes and pooled text as they are."""
    both: tuple[Any, Any] = tree_map_only(Tensor, lambda x: _cast_input(dtype, x), (args, kwargs))
    return both


def _cast_input(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.ndim > 2 else x


def shard_frozen(module: nn.Module, dtype: torch.dtype, ranks: Ranks, shard: str) -> None:
    """Cast a module that is not trained, and cut it among the same ranks as those that are; each block is
    gathered for its forward pass alone.
    """
    _shard_module(module.to(dtype), dtype, ranks, "hybrid" if shard == "hybrid" else "full")
    if hasattr(module, "reset_iter_state"):  # else what a backward pass would forget is kept for good
        module.register_forward_hook(lambda module, args, out: module.reset_iter_state())


def is_cut(module: nn.Module) -> bool:
    """Whether its weights are cut among ranks."""
    return any(hasattr(param, "to_local") for param in module.parameters())


def rows_here(weight: Tensor) -> Tensor:
    """This rank's rows of a weight that may be cut among ranks."""
    own: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return own


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks that run one after the other: members of the outermost lists, and a U-Net's middle."""
    for name, inner in module.named_children():
        if isinstance(inner, nn.ModuleList):
            yield from inner
        elif name == "mid_block":
            yield inner
        else:
            yield from blocks_of(inner)


def _part_of(param: Any) -> tuple[int, int]:
    """Which rows of a cut weight are here: the first, and of how many."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return int(offset[0]) if len(offset) else 0, int(param.shape[0]) if param.dim() else 1


def share_weights(
    modules: Mapping[str, nn.Module],
    dtype: torch.dtype,
    ranks: Ranks,
    shard: str,
    reduce: torch.dtype = torch.float32,
) -> Weights:
    """The trained modules as all ranks hold them; gradients are summed in `reduce`."""
    if ranks.sharded:
        return ShardedWeights(modules, dtype, ranks, shard, reduce)
    if dtype == torch.float32:
        return ReplicatedWeights(modules, reduce)
    return ReplicatedCastWeights(modules, dtype, reduce)
