"""Streams that stand in for a card's: what each operation depends on, by clocks that waiting passes on."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")


class Clocked(TorchDispatchMode):
    """What each operation depends on, in a card's two streams: a clock for each, passed on by waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.computing, self.copying = Stream(self, "computing"), Stream(self, "copying")
        self.current = self.computing
        self.copies = 0
        self.there, self.most_there = 0, 0
        """Bytes of copies that are alive."""
        self.wrong: list[str] = []
        self._given: dict[int, int] = {}
        self._written: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = self.current
        stream.clock[stream.name] += 1
        if stream is self.copying:
            self._copy(args[0])
        else:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and not self._seen(leaf):
                    self.wrong.append(f"{func} before its weights are there")
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default:
            self._given[out.data_ptr()] = self.computing.clock["computing"]
            self._written.pop(out.data_ptr(), None)
        return out

    def _copy(self, target: torch.Tensor) -> None:
        place, time = target.data_ptr(), self.copying.clock["copying"]
        if self.copying.clock["computing"] < self._given[place]:
            self.wrong.append("a copy into memory that is still read")
        self._written[place] = time
        self.copies += 1
        self.there += target.nbytes
        self.most_there = max(self.most_there, self.there)
        weakref.finalize(target, self._dropped, time, target.nbytes)

    def _dropped(self, time: int, size: int) -> None:
        self.there -= size
        if self.computing.clock["copying"] < time:
            self.wrong.append("memory given back while it is written")

    def _seen(self, tensor: torch.Tensor) -> bool:
        return self.computing.clock["copying"] >= self._written.get(tensor.data_ptr(), 0)


class Stream:
    """A stream that knows what it has waited for."""

    device = CPU

    def __init__(self, clocked: Clocked, name: str) -> None:
        self.name, self.clock, self._clocked = name, {"computing": 0, "copying": 0}, clocked

    def record_event(self) -> dict[str, int]:
        return dict(self.clock)

    def wait_event(self, event: dict[str, int]) -> None:
        self.clock = {name: max(time, event[name]) for name, time in self.clock.items()}

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.clock)

    def __enter__(self) -> None:
        self._clocked.current = self

    def __exit__(self, *_: object) -> None:
        self._clocked.current = self._clocked.computing
