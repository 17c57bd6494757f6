"""Optimisations that compile or capture the U-Net: compile, compile_regional, cuda_graphs, trace.

Compiled code is kept on disk by PyTorch's own cache, so that the next process starts quicker.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from darkroom.errors import InputError
from darkroom.models.compiling import MOST_SHAPES, Compiled, CompiledBlocks
from darkroom.sample.denoise import Unet
from darkroom.sample.optimisations.applied import Applied, CallOf
from darkroom.sample.optimisations.optimisation import ComputeTarget

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CAPTURE_WARMUP = 3
Key = tuple[Any, ...]
LOG = logging.getLogger("darkroom")


def compile_whole(applied: Applied, argument: str) -> None:
    """The whole U-Net by torch.compile, a graph for each size."""
    applied.callee = Compiled(applied.own("unet"), _mode("compile", argument))


def compile_regional(applied: Applied, argument: str) -> None:
    """Each kind of repeated block once by torch.compile: a fraction of the compile time of the whole."""
    applied.callee = CompiledBlocks(applied.own("unet"), _mode("compile_regional", argument))


def _mode(name: str, argument: str) -> str | None:
    if argument and argument not in MODES:
        raise InputError(f"{name}:{argument}", allowed=", ".join(MODES))
    return argument or None


def lacks_compiler(place: ComputeTarget) -> str | None:
    """Inductor writes C++ for a CPU, and Triton for a card."""
    if place.device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        return "torch.compile needs a C++ compiler on a CPU, and there is no g++ or clang++"
    compilers = (os.environ.get("CC", "gcc"), "clang")
    if place.device.type == "cuda" and os.name == "posix" and not any(map(shutil.which, compilers)):
        return "torch.compile's Triton needs a C compiler, and there is no gcc or clang"
    return None


def trace(applied: Applied, argument: str) -> None:
    """torch.jit.trace of the U-Net in this process, one trace a shape; no file is written or read."""
    applied.own("unet")  # its weights ask for no gradients, so that the trace can hold them
    applied.outer = lambda applied, call_of: _ByShape(applied.plain(call_of), _traced)


class _ByShape:
    """A call made anew for each set of shapes and types, and kept; past `most` sets it is used as it is."""

    def __init__(
        self,
        call: Unet,
        make: Callable[[Unet, list[torch.Tensor], tuple[str, ...]], Any],
        most: int | None = None,
    ) -> None:
        self._call, self._make, self._most = call, make, most
        self.made: dict[Key, Any] = {}
        self._full = False
        self.seconds = 0.0

    def __call__(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        names = tuple(sorted(added))
        tensors = [x, t, text, *(added[name] for name in names)]
        key = (*names, *((tuple(v.shape), v.dtype) for v in tensors))
        if key not in self.made and self._most is not None and len(self.made) >= self._most:
            if not self._full:
                self._full = True
                LOG.warning("%d sizes are kept; further ones run without", self._most)
            return self._call(x, t, text, added)
        if key not in self.made:
            start = time.perf_counter()
            self.made[key] = self._make(self._call, tensors, names)
            self.seconds += time.perf_counter() - start
        out: torch.Tensor = self.made[key](*tensors)
        return out


class _Positional(nn.Module):
    """A call with its tensors side by side, as tracing wants them."""

    def __init__(self, call: Unet, names: tuple[str, ...]) -> None:
        super().__init__()
        self._call, self._names = call, names

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, *added: torch.Tensor
    ) -> torch.Tensor:
        return self._call(x, t, text, dict(zip(self._names, added, strict=True)))


def _traced(call: Unet, tensors: list[torch.Tensor], names: tuple[str, ...]) -> Any:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        return torch.jit.trace(_Positional(call, names), tuple(tensors), check_trace=False, strict=False)  # type: ignore[no-untyped-call]


def cuda_graphs(applied: Applied, argument: str) -> None:
    """The U-Net call captured once a shape and replayed: the processor's launches cost nothing any more."""

    def outer(applied: Applied, call_of: CallOf) -> Unet:
        """The U-Net with each shape's calls captured in a CUDA graph; all graphs share one memory pool."""
        pool = torch.cuda.graph_pool_handle()

        def captured(call: Unet, tensors: list[torch.Tensor], names: tuple[str, ...]) -> Any:
            """A captured call, or the plain one where the graph cannot hold it."""
            try:
                return _Captured(call, tensors, names, pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # what a graph cannot hold: the same call, launched anew each time
                LOG.warning("no CUDA graph for %s: %s", tuple(tensors[0].shape), str(error).splitlines()[0])
                return _Positional(call, names)

        return _ByShape(applied.plain(call_of), captured, most=MOST_SHAPES)

    applied.outer = outer


class _Captured:
    """One call in a CUDA graph: inputs are copied to where it reads them, the result from where it writes."""

    def __init__(self, call: Unet, tensors: list[torch.Tensor], names: tuple[str, ...], pool: Any) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        run = _Positional(call, names)
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(CAPTURE_WARMUP):
                run(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: a server's decodes pictures.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._out = run(*self._inputs)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        for held, given in zip(self._inputs, tensors, strict=True):
            held.copy_(given)
        self._graph.replay()
        out: torch.Tensor = self._out.clone()
        return out
