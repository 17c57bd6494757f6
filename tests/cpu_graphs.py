"""CUDA graphs where there is no card: what is launched while one is captured is launched again by a replay.

As on a card, the operations are those of the capture and read and write the same memory, and what asks for a
number while capturing ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


class Graph(TorchDispatchMode):
    """A graph; entered as a mode while it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in READS:
            raise RuntimeError("operation not permitted when stream is capturing\nlonger")
        out = func(*args, **kwargs)
        self.steps.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.steps:
            made = func(*args, **kwargs)
            for held, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
                # What is a view already, reads the memory that was written to.
                if isinstance(held, Tensor) and held.data_ptr() != new.data_ptr():
                    held.copy_(new)


class Stream:
    """Nothing is queued on a CPU."""

    def wait_stream(self, other: Stream) -> None: ...


class Captured:
    """The graphs that were made, and in which mode."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: list[Graph] = []
        self.modes: set[str] = set()

        @contextmanager
        def graph(one: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
            self.modes.add(capture_error_mode)
            with one:
                yield
            self.graphs.append(one)

        stand_ins = {
            "graph": graph,
            "CUDAGraph": Graph,
            "Stream": Stream,
            "current_stream": Stream,
            "graph_pool_handle": lambda: (0, 1),
            "stream": lambda stream: nullcontext(),
            "device": lambda device: nullcontext(),
        }
        for name, value in stand_ins.items():
            patch.setattr(torch.cuda, name, value)
