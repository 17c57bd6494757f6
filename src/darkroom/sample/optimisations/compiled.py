"""Optimisations that compile or capture the U-Net: compile, compile_regional, cuda_graphs.

Compiled code is kept on disk by PyTorch's own cache, so that the next process starts quicker.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from darkroom.errors import InputError, first_line
from darkroom.models.adapters.bank import SLOTS, rows_of
from darkroom.models.compiling import MOST_SHAPES, Compiled, CompiledBlocks
from darkroom.sample.denoise import Unet
from darkroom.sample.optimisations.applied import Applied, CallOf, ComputeTarget
from darkroom.sample.optimisations.fused_norm import lacks_c_compiler

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CAPTURE_WARMUP = 3
Key = tuple[Any, ...]
LOG = logging.getLogger("darkroom")


def compile_whole(applied: Applied, argument: str) -> None:
    """The whole U-Net by torch.compile, a graph for each size."""
    applied.callee = Compiled(applied.own("unet"), _mode("compile", argument))
    _copy_outputs(applied, argument)


def compile_regional(applied: Applied, argument: str) -> None:
    """Each kind of repeated block once by torch.compile: a fraction of the compile time of the whole."""
    applied.callee = CompiledBlocks(applied.own("unet"), _mode("compile_regional", argument))
    _copy_outputs(applied, argument)


def _copy_outputs(applied: Applied, mode: str) -> None:
    """Inductor's own CUDA graphs write a call's result where that of the last one was, which may be needed:
    a step makes several calls where texts differ in length or memory is short."""
    if mode not in ("reduce-overhead", "max-autotune") or applied.device.type != "cuda":
        return

    def wrap(call: Unet) -> Unet:
        """The call with a result of its own."""

        def copied(
            x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
        ) -> torch.Tensor:
            """The U-Net's output in memory of its own, which the next call leaves as it is."""
            _know_this_thread()
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return call(x, t, text, added).clone()

        return copied

    applied.inner.append(wrap)


def _know_this_thread() -> None:
    """Before torch 2.13 Inductor's CUDA graphs end with an assertion in a thread other than the one that
    imported them (pytorch issue 123177), and a server takes its steps in one of its own."""
    from torch._inductor import cudagraph_trees as trees

    if not hasattr(trees, "_initialize_tls") and not hasattr(trees.local, "tree_manager_containers"):
        trees.local.tree_manager_containers = {}
        trees.local.tree_manager_locks = defaultdict(threading.Lock)


def _mode(name: str, argument: str) -> str | None:
    if argument and argument not in MODES:
        raise InputError(f"{name}:{argument}", allowed=", ".join(MODES))
    return argument or None


def lacks_compiler(place: ComputeTarget) -> str | None:
    """Inductor writes C++ for a CPU, and Triton for a card."""
    names = ("cl",) if os.name == "nt" else ("g++", "clang++")  # as Inductor looks for one
    wanted = os.environ.get("CXX", names[0])
    if place.device.type == "cpu" and not any(map(shutil.which, (wanted, *names[1:]))):
        return f"torch.compile needs a C++ compiler on a CPU, and there is no {' or '.join(names)}"
    return lacks_c_compiler("torch.compile") if place.device.type == "cuda" else None


class _ByShape:
    """A call made anew for each set of shapes and types, and kept; past `most` sets it is used as it is.

    What was recorded of rows with adapters holds for the layers that the bank changed then: those that read
    other matrices are recorded anew. Differences as large as layers are distinguished by row, on the host, so
    calls with these are not recorded.
    """

    def __init__(
        self,
        call: Unet,
        make: Callable[[Unet, list[torch.Tensor], tuple[str, ...]], Any],
        applied: Applied,
        most: int,
    ) -> None:
        self._call, self._make, self._applied, self._most = call, make, applied, most
        self.made: dict[Key, Any] = {}
        self._layout = 0
        self._full = False
        self.seconds = 0.0

    def __call__(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if SLOTS in added:
            rows = rows_of(self._applied.model.unet)
            if rows.dense:
                return self._call(x, t, text, added)
            if rows.layout != self._layout:
                self._layout = rows.layout
                self.made = {key: made for key, made in self.made.items() if SLOTS not in key}
        names = tuple(sorted(added))
        tensors = [x, t, text, *(added[name] for name in names)]
        key = (*names, *((tuple(v.shape), v.dtype) for v in tensors))
        if key not in self.made and len(self.made) >= self._most:
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


def _positional(call: Unet, names: tuple[str, ...]) -> Callable[..., torch.Tensor]:
    """A call with its tensors side by side, those that are added in the order of their names."""

    def run(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, *added: torch.Tensor) -> torch.Tensor:
        return call(x, t, text, dict(zip(names, added, strict=True)))

    return run


def cuda_graphs(applied: Applied, argument: str) -> None:
    """The U-Net call captured once a shape and replayed: the processor's launches cost nothing any more."""

    def outer(applied: Applied, call_of: CallOf) -> Unet:
        """The U-Net with each shape's calls captured in a CUDA graph; all graphs share one memory pool."""
        with torch.cuda.device(applied.device):
            place = _CapturePlace(applied.device, torch.cuda.graph_pool_handle(), torch.cuda.Stream())  # type: ignore[no-untyped-call]

        def captured(call: Unet, tensors: list[torch.Tensor], names: tuple[str, ...]) -> Any:
            """A captured call, or the plain one where the graph cannot hold it."""
            try:
                return _Captured(call, tensors, names, place)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # what a graph cannot hold: the same call, launched anew each time
                LOG.warning("no CUDA graph for %s: %s", tuple(tensors[0].shape), first_line(error))
                return _positional(call, names)

        return _ByShape(applied.plain(call_of), captured, applied, most=MOST_SHAPES)

    applied.outer = outer


@dataclass(frozen=True)
class _CapturePlace:
    """What the graphs of a model share: their device, the pool of their memory and the stream they record."""

    device: torch.device
    pool: Any
    stream: Any


class _Captured:
    """One call in a CUDA graph: inputs are copied to where it reads them, the result from where it writes.

    All on the model's own device: a stream of the thread's, which may be another, would record nothing.
    """

    def __init__(
        self, call: Unet, tensors: list[torch.Tensor], names: tuple[str, ...], place: _CapturePlace
    ) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        run = _positional(call, names)
        with torch.cuda.device(place.device):
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(CAPTURE_WARMUP):
                    run(*self._inputs)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may allocate meanwhile: a server's decodes pictures.
            with torch.cuda.graph(
                self._graph, pool=place.pool, stream=place.stream, capture_error_mode="thread_local"
            ):
                self._out = run(*self._inputs)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        for held, given in zip(self._inputs, tensors, strict=True):
            held.copy_(given)
        self._graph.replay()
        out: torch.Tensor = self._out.clone()
        return out
