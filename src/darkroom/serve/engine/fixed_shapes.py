"""Calls of few shapes: a picture has the same bits whichever share its steps (`serve --deterministic`).

Kernels choose how to sum by the shapes of a call. Called with as many rows as before, a row's result has the
same bits whatever stands in the other rows and wherever it stands; with another number of rows it may differ
in the last bits. So each shape of a picture has a number of rows that its results are defined by. Other
numbers are used too where they were seen to give the very same bits: which these are decides how quick a
batch is, and never what a picture looks like. A call is filled up with its first row.

On a CPU two things make numbers differ that would not have to: the few rows of the timestep's embedding are
multiplied by other kernels than many, and with some processors and shapes so are convolutions of many
pictures. `steady` has both done in the same way for all, where a comparison at first sight of a shape finds
that it matters.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from darkroom.errors import InputError
from darkroom.models.adapters.bank import HOST, SLOTS, WEIGHTS, take_rows
from darkroom.sample.backends.backend import Decode
from darkroom.sample.denoise import Unet

LOG = logging.getLogger("darkroom.serve")
LEAVE_OUT = "leave --deterministic out, or those of --optimise"
EVEN = (16, 4, 12, 2, 32, 6, 24, 20, 10, 14, 28, 18, 22, 26, 30, 8)
TRIED = (*EVEN, 3, 5, 31, 7, 9, 29, 11, 13, 27, 15, 17, 25, 19, 21, 23, 1)
"""Numbers of rows that are compared with the defining one, the most useful first."""
TRYING_S = 2.0
"""Of this thread: once trying has taken so long, no further number is tried, and what was not is not used."""
CALL_ROWS = 2.5
"""What a call costs besides its rows, in rows, where rows are small (a model of 64 px on a CPU)."""
LEAST_LINES, LEAST_PICTURES, MOST_PICTURES = 16, 2, 12
"""Of a linear layer's input and of a convolution's: fewer are filled up, more are taken in parts."""
SHOWN, MOST_TRIALS = 2**17, 8
"""In 16 bits another order of sums shows in few numbers: so many are compared, in at most so many calls."""
DECODED, DECODED_PIXELS = 8, 16 * 16
"""Pictures decoded together at most, and the most latent pixels of one: larger ones gain nothing."""
Call = Callable[[torch.Tensor], torch.Tensor]


class _Seen:
    """For which shapes the plain call of a layer was seen to give the bits of the steady one."""

    def __init__(self) -> None:
        self._plain: dict[Hashable, bool] = {}

    def call(self, plain: Call, steady: Call, input: torch.Tensor) -> torch.Tensor:
        """The quicker of the two that gives the steady one's bits; kernels are chosen by threads as well."""
        key = input.shape, input.dtype, input.stride(), torch.get_num_threads()
        if (found := self._plain.get(key)) is None:
            found = self._plain[key] = self._same(plain, steady, input)
        return plain(input) if found else steady(input)

    def _same(self, plain: Call, steady: Call, like: torch.Tensor) -> bool:
        draw, compared = torch.Generator().manual_seed(0), 0
        for _ in range(MOST_TRIALS):
            noise = torch.empty_like(like).copy_(torch.randn(like.shape, generator=draw))
            expected = steady(noise)
            if not torch.equal(plain(noise), expected):
                return False
            compared += expected.numel()
            if like.dtype == torch.float32 or compared >= SHOWN:
                return True
        return False


class _SteadyLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Of `nn.Linear`."""
        if math.prod(input.shape[:-1]) >= LEAST_LINES:
            return super().forward(input)
        return _seen_of(self).call(super().forward, self._filled, input)

    def _filled(self, input: torch.Tensor) -> torch.Tensor:
        lines = math.prod(input.shape[:-1])
        filled = nn.functional.pad(input.reshape(lines, -1), (0, 0, 0, LEAST_LINES - lines))
        return super().forward(filled)[:lines].reshape(*input.shape[:-1], -1)


class _SteadyConv2d(nn.Conv2d):
    def _conv_forward(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        def whole(x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = super(_SteadyConv2d, self)._conv_forward(x, weight, bias)
            return made

        def in_parts(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([whole(part) for part in x.chunk(-(-len(x) // MOST_PICTURES))])

        def filled(x: torch.Tensor) -> torch.Tensor:
            return whole(torch.cat([x] * LEAST_PICTURES))[: len(x)]

        if LEAST_PICTURES <= len(input) <= MOST_PICTURES:
            return whole(input)
        steady = filled if len(input) < LEAST_PICTURES else in_parts
        return _seen_of(self).call(whole, steady, input)


def _seen_of(layer: nn.Module) -> _Seen:
    seen: _Seen = layer.__dict__.setdefault("_darkroom_seen", _Seen())
    return seen


_STEADY: dict[type, type] = {nn.Linear: _SteadyLinear, nn.Conv2d: _SteadyConv2d}


def steady(module: nn.Module) -> None:
    """Have a model's layers do the same for few rows as for many; parameters, names and hooks stay."""
    for layer in module.modules():
        layer.__class__ = _STEADY.get(type(layer), type(layer))


@dataclass(frozen=True)
class FixedRows:
    """The number of rows that defines a result: of the machine, the model and the picture's size alone, so
    that every start, lane and replica has the same."""

    most: int
    pixels: int | None = None
    """Latent pixels that fill a call: larger pictures have fewer rows, down to one. None: all have `most`."""
    tries: bool = False
    """Whether other numbers are tried; not where each new shape is compiled or captured."""

    def of(self, pixels: int) -> int:
        """Rows of a call whose rows have so many latent pixels each."""
        return self.most if self.pixels is None else max(1, min(self.most, math.ceil(self.pixels / pixels)))


@functools.lru_cache(maxsize=1024)
def parts_of(count: int, allowed: frozenset[int]) -> tuple[int, ...]:
    """The calls that so many rows are made in: the cheapest by their rows and their number."""
    cheapest: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for rows in range(1, count + 1):
        tried = ((cheapest[max(0, rows - one)], one) for one in sorted(allowed, reverse=True))
        cheapest.append(min((cost + one + CALL_ROWS, (one, *parts)) for (cost, parts), one in tried))
    return tuple(sorted(cheapest[count][1], reverse=True))


@dataclass(frozen=True, repr=False)
class _Part:
    """One call's share of the rows: which, and their texts and further conditions."""

    index: torch.Tensor
    count: int
    """Of them the first so many; the others fill the call up."""
    text_BLD: torch.Tensor
    added: dict[str, torch.Tensor]


@dataclass(frozen=True, repr=False)
class _Laid:
    """How a batch is laid out; good as long as it brings the same tensors."""

    added: dict[str, torch.Tensor]
    allowed: frozenset[int]
    parts: tuple[_Part, ...]

    def fits(self, added: dict[str, torch.Tensor], allowed: frozenset[int]) -> bool:
        """Whether it is for these tensors and calls."""
        same = self.added.keys() == added.keys() and all(self.added[k] is added[k] for k in added)
        return same and self.allowed == allowed


class FixedShapes:
    """A U-Net called with defined numbers of rows only. `adapters` is how many a row may have: calls in
    which some row has one have places for so many."""

    def __init__(self, unet: Unet, rows: FixedRows, adapters: int = 0) -> None:
        if getattr(unet, "of_rows", None) is not None:
            raise InputError(
                "--deterministic with optimisations that reuse work of earlier steps", mend=LEAVE_OUT
            )
        self._unet, self._rows, self._adapters = unet, rows, adapters
        self._allowed: dict[Hashable, frozenset[int]] = {}
        self._laid: Any = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def __call__(
        self, x_BCHW: torch.Tensor, t_B: torch.Tensor, text_BLD: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """As the U-Net's."""
        allowed = self._allowed_for(x_BCHW, t_B, text_BLD, added)
        if len(x_BCHW) in allowed and SLOTS not in added:
            return self._unet(x_BCHW, t_B, text_BLD, added)
        made = [
            self._unet(x_BCHW[part.index], t_B[part.index], part.text_BLD, part.added)[: part.count]
            for part in self._parts_for(text_BLD, added, allowed)
        ]
        return made[0] if len(made) == 1 else torch.cat(made)

    def _parts_for(
        self, text_BLD: torch.Tensor, added: dict[str, torch.Tensor], allowed: frozenset[int]
    ) -> tuple[_Part, ...]:
        """Laid out once for a batch: from step to step it brings the same tensors."""
        with self._lock:
            laid: _Laid | None = self._laid.get(text_BLD)
        if laid is None or not laid.fits(added, allowed):
            with torch.inference_mode(False), torch.no_grad():  # what a bank keeps for a batch is found again
                laid = _Laid(added, allowed, tuple(self._parts(text_BLD, added, allowed)))
            with self._lock:
                self._laid[text_BLD] = laid
        return laid.parts

    def _parts(
        self, text_BLD: torch.Tensor, added: dict[str, torch.Tensor], allowed: frozenset[int]
    ) -> Iterator[_Part]:
        added, start = self._with_places(added), 0
        for rows in parts_of(len(text_BLD), allowed):
            count = min(rows, len(text_BLD) - start)
            index = torch.full((rows,), start, dtype=torch.int64, device=text_BLD.device)
            index[:count] += torch.arange(count, device=text_BLD.device)
            more = take_rows(added, index, [start + i if i < count else start for i in range(rows)])
            yield _Part(index, count, text_BLD[index], more)
            start += count

    def _with_places(self, added: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rows' adapters as wide as they may be, with those of no weight in the places left over. A row
        without any has the same bits in a call without adapters: they would add zeros to it."""
        if SLOTS not in added:
            return added
        missing = self._adapters - added[SLOTS].shape[1]
        wide = {name: torch.nn.functional.pad(added[name], (0, missing)) for name in (SLOTS, WEIGHTS)}
        numbers = getattr(added[SLOTS], HOST, None)
        if numbers is not None:
            setattr(wide[SLOTS], HOST, [[*row, *[0] * missing] for row in numbers])
        return added | wide

    def _allowed_for(
        self, x_BCHW: torch.Tensor, t_B: torch.Tensor, text_BLD: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> frozenset[int]:
        """The numbers of rows for calls like this; tried when the first one comes.

        With adapters it is the defining one alone: what is tried holds for the weights it was tried with.
        """
        shapes = tuple((name, value.shape[1:]) for name, value in sorted(added.items()))
        key = x_BCHW.shape[1:], text_BLD.shape[1:], shapes, torch.get_num_threads()
        if (found := self._allowed.get(key)) is None:
            rows = self._rows.of(x_BCHW.shape[-2] * x_BCHW.shape[-1])
            tries = self._rows.tries and rows > 1 and SLOTS not in added
            given = x_BCHW[:1], t_B[:1], text_BLD[:1], {name: value[:1] for name, value in added.items()}
            found = self._tried(rows, *given) if tries else frozenset({rows})
            self._allowed[key] = found
        return found

    def _tried(
        self,
        rows: int,
        x_1CHW: torch.Tensor,
        t_1: torch.Tensor,
        text_1LD: torch.Tensor,
        added: dict[str, torch.Tensor],
    ) -> frozenset[int]:
        """The defining number of rows, and those with which every row has the same bits."""
        begun, most = time.thread_time(), -(-max(*TRIED, rows) // rows) * rows
        draw = torch.Generator().manual_seed(0)

        def drawn(like: torch.Tensor) -> torch.Tensor:
            return torch.randn(most, *like.shape[1:], generator=draw).to(like)

        x, t = drawn(x_1CHW), torch.linspace(999.0, 1.0, most).to(t_1)
        text = text_1LD + text_1LD.abs().mean() * drawn(text_1LD)  # each as large as one is
        more = {name: value.repeat(most, *[1] * (value.ndim - 1)) for name, value in added.items()}

        def called(start: int, count: int) -> torch.Tensor:
            part = slice(start, start + count)
            return self._unet(x[part], t[part], text[part], {k: v[part] for k, v in more.items()})

        expected, same = torch.cat([called(start, rows) for start in range(0, most, rows)]), {rows}
        for count in TRIED:
            if count != rows and time.thread_time() - begun < TRYING_S:
                starts = range(0, max(1, rows // count) * count, count)  # of about as many rows
                same_bits = (torch.equal(called(i, count), expected[i : i + count]) for i in starts)
                same |= {count} if all(same_bits) else set()
        size = "x".join(map(str, x_1CHW.shape[:-3:-1]))
        LOG.info(
            "deterministic: calls of %s rows at %s latent pixels, with the bits of %d",
            ", ".join(map(str, sorted(same))),
            size,
            rows,
        )
        return frozenset(same)


class FixedDecode:
    """Pictures decoded so that each has the same bits in any company: larger ones alone, small ones in pairs
    or in other numbers that were seen to give the very same bits.

    `decoder` is the module whose output is compared; without one all are decoded alone.
    """

    def __init__(self, decode: Decode, decoder: nn.Module | None) -> None:
        self._decode, self._decoder = decode, decoder
        self._allowed: dict[Hashable, frozenset[int]] = {}

    def __call__(self, latents_BCHW: torch.Tensor) -> list[Image.Image]:
        """As the backend's."""
        images: list[Image.Image] = []
        allowed = self._allowed_for(latents_BCHW)
        while left := len(latents_BCHW) - len(images):
            part = max((one for one in allowed if one <= left), default=min(allowed))
            some = latents_BCHW[len(images) : len(images) + part]
            if len(some) < part:
                some = torch.cat([some, some[:1].expand(part - len(some), -1, -1, -1)])
            images += self._decode(some)[: min(part, left)]
        return images

    def _allowed_for(self, latents_BCHW: torch.Tensor) -> frozenset[int]:
        """In how many at once; tried when the first picture of a size comes."""
        if self._decoder is None or latents_BCHW[0, 0].numel() > DECODED_PIXELS:
            return frozenset({1})
        key = latents_BCHW.shape[1:], latents_BCHW.dtype, torch.get_num_threads()
        if (found := self._allowed.get(key)) is None:
            found = self._allowed[key] = self._tried(latents_BCHW, self._decoder)
        return found

    def _tried(self, like_BCHW: torch.Tensor, decoder: nn.Module) -> frozenset[int]:
        noise = torch.randn(DECODED, *like_BCHW.shape[1:], generator=torch.Generator().manual_seed(0))
        x_BCHW, seen = noise.to(like_BCHW), list[torch.Tensor]()

        def numbers(count: int) -> torch.Tensor:
            seen.clear()
            for start in range(0, DECODED - count + 1, count):
                self._decode(x_BCHW[start : start + count])
            return torch.cat(seen) if seen else torch.empty(0)

        hook = decoder.register_forward_hook(lambda _, __, out: seen.append(out))
        try:
            pairs = numbers(2)
            if not len(pairs):
                return frozenset({1})
            # In 16 bits a single picture has too few numbers to show whether it would differ.
            least = 1 if pairs.dtype == torch.float32 else 2
            others = range(least, DECODED + 1)
            made = {one: numbers(one) for one in others}
            return frozenset({2, *(one for one, x in made.items() if torch.equal(x, pairs[: len(x)]))})
        finally:
            hook.remove()
