"""torch.compile with a graph for each set of shapes: of a whole denoiser, or of each of its blocks.

Shapes are static: with open ones Inductor keeps convolutions in the layout that they come in, and knows no
size when it picks its kernels. A graph is kept for each of `MOST_SHAPES` sets of shapes. The next set has the
dimensions that have differed so far marked dynamic, and one graph with these open takes all further sizes;
blocks, which see no marks, run as they are for further sizes, and that is logged.
"""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from darkroom.hardware.system import remove_file

LOG = logging.getLogger("darkroom.models")
MOST_SHAPES = 16
BLOCKS = ("BasicTransformerBlock", "ResnetBlock2D", "DiTBlock")
"""What denoisers are made of: few classes, each many times, and nearly all of the work."""
WAYS = ("down_blocks", "mid_block", "up_blocks", "blocks")
"""A U-Net's parts as a forward pass takes them; a transformer has blocks alone."""
KINDS_OF_A_BLOCK = 24
"""Widths and sizes that one class of block has within one call."""
Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def compile_blocks(module: nn.Module, mode: str | None = None, backend: str = "inductor") -> int:
    """Compile each block of a denoiser by itself, in place; returns how many. The rest runs as it is."""
    _prepare()
    blocks = blocks_in_order(module)
    for block in blocks:
        block.compile(fullgraph=True, dynamic=False, mode=mode, backend=backend)
    return len(blocks)


def blocks_in_order(module: nn.Module) -> list[nn.Module]:
    """The blocks of a denoiser in the order in which a forward pass comes to them.

    A U-Net's go down, through the middle and up; in each part of it residual blocks and transformers take
    turns.
    """
    named = [(name, part) for name, part in module.named_modules() if type(part).__name__ in BLOCKS]
    return [part for _, part in sorted(named, key=lambda one: _turn(one[0]))]


def _turn(name: str) -> tuple[int, ...]:
    """Sorts `down_blocks.1.attentions.0.transformer_blocks.2` by way, part, place, kind and place again."""
    way, *rest = name.split(".")
    numbers = [int(one) for one in rest if one.isdigit()]
    part = numbers.pop(0) if way in ("down_blocks", "up_blocks") else 0
    turn = WAYS.index(way) if way in WAYS else len(WAYS)
    return turn, part, *numbers[:1], int("attentions" in rest), *numbers[1:]


def compile_whole(module: nn.Module, mode: str | None = None, backend: str = "inductor") -> None:
    """Compile a module as one, in place, with static shapes."""
    _prepare()
    module.compile(dynamic=False, mode=mode, backend=backend)


def _prepare() -> None:
    """Remove broken libraries, and raise Dynamo's limits: it counts graphs by their code, which the blocks of
    a class share.
    """
    _remove_half_libraries()
    config: Any = torch._dynamo.config
    most = MOST_SHAPES * KINDS_OF_A_BLOCK
    config.recompile_limit = max(config.recompile_limit, most)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 2 * most)


def _remove_half_libraries() -> None:
    """Remove what a compiler that was killed left half written in Inductor's cache: every later process would
    fail on it. What another process is writing is locked, and stays.
    """
    if not sys.platform.startswith("linux"):
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils._filelock import FileLock

    folder = Path(cache_dir())
    for library in folder.glob("*/*.so"):
        with suppress(OSError):  # it is gone by now, or another's, or locked (TimeoutError)
            if not _is_whole(library):
                lock = folder / "locks" / f"{library.name.partition('.')[0]}.lock"
                with FileLock(str(lock), timeout=0):
                    if not _is_whole(library):
                        remove_file(library)
                        LOG.warning("%s was left half written: it is compiled anew", library)


def _is_whole(library: Path) -> bool:
    """Whether a library (ELF of 64 bits) reaches to the end of its table of sections, which stands last."""
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    (start,), (size, number) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return bool(start) and library.stat().st_size >= start + size * number


class Compiled:
    """A denoiser whose calls are compiled, one graph a set of shapes; otherwise it looks like the module."""

    def __init__(self, module: Any, mode: str | None = None, backend: str = "inductor") -> None:
        self._module = module
        self.shapes: set[Shapes] = set()
        self._static: Any = torch.compile(module, dynamic=False, mode=mode, backend=backend)
        self._open: Any = torch.compile(module, mode=mode, backend=backend)
        self._said = False
        _prepare()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        if _known(self.shapes, shapes := shapes_of(given, named)):
            return self._static(*given, **named)
        if not self._said:
            self._said = True
            LOG.warning("more than %d sizes: further ones share one graph of open sizes", MOST_SHAPES)
        _mark(given, named, _varying({*self.shapes, shapes}))
        return self._open(*given, **named)


class CompiledBlocks:
    """A denoiser whose blocks are compiled; past `MOST_SHAPES` sets of shapes new ones run uncompiled."""

    def __init__(self, module: Any, mode: str | None = None, backend: str = "inductor") -> None:
        self._module = module
        self.shapes: set[Shapes] = set()
        self._said = False
        compile_blocks(module, mode, backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        stance: AbstractContextManager[Any] = nullcontext()
        if not _known(self.shapes, shapes_of(given, named)):
            if not self._said:
                self._said = True
                LOG.warning("more than %d sizes: further ones run uncompiled", MOST_SHAPES)
            stance = torch.compiler.set_stance("eager_on_recompile")
        with stance:
            return self._module(*given, **named)


def _known(seen: set[Shapes], shapes: Shapes) -> bool:
    """Whether a call has a graph of its own, noted now if there is a free place."""
    if shapes not in seen:
        if len(seen) >= MOST_SHAPES:
            return False
        seen.add(shapes)
    return True


def _tensors(given: Any, named: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in [*enumerate(given), *sorted(named.items())]:
        if isinstance(value, Tensor):
            yield f"{path}{name}", value
        elif isinstance(value, Mapping):
            yield from _tensors((), value, f"{path}{name}.")


def shapes_of(given: Any, named: Mapping[str, Any]) -> Shapes:
    """What tells the graphs of a call's tensors apart: names, shapes and types."""
    return tuple((name, tuple(value.shape), value.dtype) for name, value in _tensors(given, named))


def _varying(seen: set[Shapes]) -> dict[str, set[int]]:
    """By a tensor's name, the dimensions in which calls have differed."""
    by_name: dict[str, list[tuple[int, ...]]] = {}
    for shapes in seen:
        for name, shape, _ in shapes:
            by_name.setdefault(name, []).append(shape)
    return {
        name: {i for i in range(len(some[0])) if len({shape[i] for shape in some if i < len(shape)}) > 1}
        for name, some in by_name.items()
    }


def _mark(given: Any, named: Mapping[str, Any], varying: Mapping[str, set[int]]) -> None:
    for name, value in _tensors(given, named):
        for dimension in varying.get(name, ()):
            torch._dynamo.maybe_mark_dynamic(value, dimension)
