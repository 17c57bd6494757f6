"""Sets of tensors that wait in main memory, copied to a device while it computes with the set before.

Where a device has streams, copies run on one of their own. All their memory is of the computing stream, whose
work a copy waits for as far as it was given before the memory was; who uses a set waits for its copy by an
event. The host waits for nothing as long as what is copied lies in pinned memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from darkroom.hardware import accelerator

if TYPE_CHECKING:
    import torch

Tensors = Mapping[Any, "torch.Tensor"]


@dataclass(frozen=True, eq=False, repr=False)
class _OnItsWay:
    """A set on its way to the device."""

    key: object
    tensors: Tensors
    ready: torch.Event
    """On the stream that copies."""


class CopyAhead:
    """Brings sets of tensors to a device, and the next one's ahead of use. One thread at a time asks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = accelerator.new_stream(device)
        self._sent: _OnItsWay | None = None

    def arrive(self, key: object, waiting: Tensors) -> Tensors:
        """A set on the device, for the stream that computes: the one that was sent, if that has this key."""
        if self._stream is None:
            return {name: accelerator.to_device(tensor, self.device) for name, tensor in waiting.items()}
        computing = accelerator.current_stream(self._stream.device)
        sent, self._sent = self._sent, None
        if sent is not None:  # waited for also where another set is asked for: its memory is this stream's
            computing.wait_event(sent.ready)
        if sent is None or sent.key is not key:
            sent = self._copied(key, waiting, self._stream)
            computing.wait_event(sent.ready)
        return sent.tensors

    def send(self, key: object, waiting: Tensors) -> None:
        """Let a set begin its way, to be asked for next; nothing where copies cannot overlap with work."""
        if self._stream is not None:
            self._sent = self._copied(key, waiting, self._stream)

    def _copied(self, key: object, waiting: Tensors, stream: torch.Stream) -> _OnItsWay:
        import torch

        arriving = {name: torch.empty_like(one, device=stream.device) for name, one in waiting.items()}
        # What read this memory before has been given to the computing stream.
        stream.wait_stream(accelerator.current_stream(stream.device))
        with stream:
            for name, one in waiting.items():
                arriving[name].copy_(one, non_blocking=True)
        return _OnItsWay(key, arriving, stream.record_event())
