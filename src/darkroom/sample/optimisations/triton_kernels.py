"""Kernels in Triton for tensors whose channels lie innermost: group norm with SiLU, GEGLU, and the sum of a
convolution's output with its bias and what it is added to.

PyTorch's group norm turns such a tensor back first, and takes another pass over the memory for SiLU, for a
bias and for each sum. Here a group's mean and variance are joined from those of its parts (Chan, Golub and
LeVeque 1983, "Algorithms for computing the sample variance"), in float32. How a row is divided among programs
depends on its own size, so a row's numbers do not change with the rows that share its batch.

Shapes: B rows, L places, C channels, D width.
"""

# Triton has no types of its own, and its kernels take none.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

SMALL = 16384
"""Values of a group up to which one program holds them all."""
MOST_CHUNKS = 64


@triton.jit
def _norm_of_group(
    x, y, weight, bias, shift, L, C, SIZE, eps,
    SHIFTED: tl.constexpr, SILU: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One group of one row, read once."""
    group, row = tl.program_id(0), tl.program_id(1)
    place, channel = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_S)
    inside = (place < L)[:, None] & (channel < SIZE)[None, :]
    columns = group * SIZE + channel
    at = row.to(tl.int64) * L * C + place[:, None] * C + columns[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        value += tl.load(shift + row * C + columns, mask=channel < SIZE, other=0.0).to(tl.float32)[None, :]
    count = L * SIZE
    mean = tl.sum(tl.sum(tl.where(inside, value, 0.0), 1), 0) / count
    away = tl.where(inside, value - mean, 0.0)
    spread = tl.sum(tl.sum(away * away, 1), 0) / count
    factor = tl.load(weight + columns, mask=channel < SIZE, other=0.0).to(tl.float32)
    offset = tl.load(bias + columns, mask=channel < SIZE, other=0.0).to(tl.float32)
    out = away * tl.rsqrt(spread + eps) * factor[None, :] + offset[None, :]
    if SILU:
        out = out * tl.sigmoid(out)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _moments(x, means, spreads, L, C, TIMES: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mean and sum of squared deviations of each channel in a part of a row's places."""
    part, row = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    start = part * TIMES * BLOCK_L
    base = x + row.to(tl.int64) * L * C
    mean, spread = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.float32)
    for k in range(TIMES):
        first = start + k * BLOCK_L
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < L)[:, None] & inside[None, :]
        at = place.to(tl.int64)[:, None] * C + columns[None, :]
        value = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
        before = 1.0 * tl.minimum(k * BLOCK_L, L - start)
        count = 1.0 * tl.minimum(tl.maximum(L - first, 0), BLOCK_L)
        own = tl.sum(value, 0) / tl.maximum(count, 1.0)
        away = tl.where(mask, value - own[None, :], 0.0)
        apart = own - mean
        mean += apart * (count / (before + count))
        spread += tl.sum(away * away, 0) + apart * apart * (before * count / (before + count))
    at = (row * tl.num_programs(0) + part) * C + columns
    tl.store(means + at, mean, mask=inside)
    tl.store(spreads + at, spread, mask=inside)


@triton.jit
def _factors(
    means, spreads, weight, bias, shift, factors, offsets, L, C, PER, PARTS, SIZE, eps,
    SHIFTED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """What each channel of a row is multiplied by, and what is added to it, from its group's moments."""
    group, row = tl.program_id(0), tl.program_id(1)
    channel, part = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
    inside = channel < SIZE
    columns = group * SIZE + channel
    moved = tl.zeros([BLOCK_S], tl.float32)
    if SHIFTED:
        moved = tl.load(shift + row * C + columns, mask=inside, other=0.0).to(tl.float32)
    mask = (part < PARTS)[:, None] & inside[None, :]
    at = (row * PARTS + part)[:, None] * C + columns[None, :]
    mean = tl.load(means + at, mask=mask, other=0.0) + moved[None, :]
    spread = tl.load(spreads + at, mask=mask, other=0.0)
    count = tl.maximum(tl.minimum(PER, L - part * PER), 0).to(tl.float32)[:, None]
    whole = L * SIZE
    centre = tl.sum(tl.sum(tl.where(mask, mean * count, 0.0), 1), 0) / whole
    away = mean - centre
    variance = tl.sum(tl.sum(tl.where(mask, spread + count * away * away, 0.0), 1), 0) / whole
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) * tl.rsqrt(variance + eps)
    offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32) + (moved - centre) * factor
    tl.store(factors + row * C + columns, factor, mask=inside)
    tl.store(offsets + row * C + columns, offset, mask=inside)


@triton.jit
def _scaled(x, y, factors, offsets, L, C, SILU: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    """Every value times its channel's factor, plus its offset, through SiLU."""
    row = tl.program_id(2)
    place = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    mask = (place < L)[:, None] & inside[None, :]
    at = row.to(tl.int64) * L * C + place.to(tl.int64)[:, None] * C + columns[None, :]
    factor = tl.load(factors + row * C + columns, mask=inside, other=0.0)
    offset = tl.load(offsets + row * C + columns, mask=inside, other=0.0)
    out = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * factor[None, :] + offset[None, :]
    if SILU:
        out = out * tl.sigmoid(out)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _summed(x, other, bias, N, C, BLOCK: tl.constexpr):
    """`x` plus `other` plus each channel's bias, into `x`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + at % C, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _gated(x, y, D, BLOCK: tl.constexpr):
    """The first half of a row's values times GELU of the second."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    value = tl.load(x + row * 2 * D + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * D + D + columns, mask=inside, other=0.0).to(tl.float32)
    out = value * gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(y + row * D + columns, out.to(y.dtype.element_ty), mask=inside)


def _innermost(x_BCHW: torch.Tensor) -> torch.Tensor:
    return x_BCHW.contiguous(memory_format=torch.channels_last)


def _block_of_channels(channels: int) -> int:
    return 128 if channels % 128 == 0 else 64


def _on_its_device(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Triton launches on the process's current card, whichever the tensors are on."""

    @wraps(function)
    def there(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        with torch.cuda.device_of(x):
            return function(x, *given, **named)

    return there


@_on_its_device
def group_norm(
    x_BCHW: torch.Tensor, norm: nn.GroupNorm, *, silu: bool, shift_BC: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, C, H, W] normed by groups, through SiLU where asked for, with channels innermost. `shift_BC` is
    added to each row's channels before.
    """
    x_BCHW = _innermost(x_BCHW)
    rows, channels, height, width = x_BCHW.shape
    places, size = height * width, channels // norm.num_groups
    out = torch.empty_like(x_BCHW)
    shift: Any = x_BCHW if shift_BC is None else shift_BC.contiguous()
    shifted, block_s = shift_BC is not None, triton.next_power_of_2(size)
    own: Any = (norm.weight, norm.bias, shift)
    block_l = triton.next_power_of_2(places)
    if block_l * block_s <= SMALL:
        _norm_of_group[(norm.num_groups, rows)](
            x_BCHW, out, *own, places, channels, size, norm.eps,
            SHIFTED=shifted, SILU=silu, BLOCK_L=block_l, BLOCK_S=block_s,
            num_warps=8 if block_l * block_s > 4096 else 4,
        )  # fmt: skip
        return out
    block_c = _block_of_channels(channels)
    block_l = 4096 // block_c
    parts = min(triton.cdiv(places, block_l), MOST_CHUNKS)
    times = triton.cdiv(triton.cdiv(places, parts), block_l)
    per = times * block_l
    parts, blocks = triton.cdiv(places, per), triton.cdiv(channels, block_c)
    means, spreads = x_BCHW.new_empty((2, rows, parts, channels), dtype=torch.float32)
    factors, offsets = x_BCHW.new_empty((2, rows, channels), dtype=torch.float32)
    _moments[(parts, blocks, rows)](
        x_BCHW, means, spreads, places, channels, TIMES=times, BLOCK_L=block_l, BLOCK_C=block_c
    )
    _factors[(norm.num_groups, rows)](
        means, spreads, *own, factors, offsets, places, channels, per, parts, size, norm.eps,
        SHIFTED=shifted, BLOCK_K=triton.next_power_of_2(parts), BLOCK_S=block_s,
    )  # fmt: skip
    _scaled[(triton.cdiv(places, block_l), blocks, rows)](
        x_BCHW, out, factors, offsets, places, channels, SILU=silu, BLOCK_L=block_l, BLOCK_C=block_c
    )
    return out


@_on_its_device
def add_(x_BCHW: torch.Tensor, other_BCHW: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """`x_BCHW` plus `other_BCHW` plus each channel's bias, in the place of `x_BCHW`, which must have its
    channels innermost."""
    total, channels = x_BCHW.numel(), x_BCHW.shape[1]
    _summed[(triton.cdiv(total, 1024),)](x_BCHW, _innermost(other_BCHW), bias_C, total, channels, BLOCK=1024)
    return x_BCHW


@_on_its_device
def geglu(x_BLD: torch.Tensor) -> torch.Tensor:
    """[..., 2 D] to [..., D]: the first half times GELU of the second (Shazeer 2020, arXiv 2002.05202)."""
    x_BLD = x_BLD.contiguous()
    width = x_BLD.shape[-1] // 2
    out = x_BLD.new_empty((*x_BLD.shape[:-1], width))
    _gated[(out.numel() // width, triton.cdiv(width, 1024))](x_BLD, out, width, BLOCK=1024)
    return out
