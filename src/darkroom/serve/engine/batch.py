"""Rows of one size in one U-Net call: packed anew when one comes or goes, apart when a step fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import TYPE_CHECKING

import torch

from darkroom import sample
from darkroom.errors import is_out_of_memory
from darkroom.models.adapters.bank import take_rows
from darkroom.sample.denoise import Unet
from darkroom.serve.engine.tickets import GLANCE, Ticket

if TYPE_CHECKING:
    from collections.abc import Hashable


# A device that answers with this is lost to the process.
DEVICE_LOST: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)


@dataclass(repr=False)
class Stepped:
    """What a step did."""

    wall_s: float
    evaluations: float
    """Of the U-Net, with those of nets."""
    finished: list[Ticket] = field(default_factory=list)
    failed: list[tuple[Ticket, BaseException]] = field(default_factory=list)
    previews: list[tuple[Ticket, int, torch.Tensor]] = field(default_factory=list)
    """Ticket, which preview, and its latents as predicted [C, H, W]."""
    out_of_memory: bool = False


def bucket_of(row: sample.Row) -> Hashable:
    """Rows of one bucket fit in one U-Net call."""
    return tuple(row.latents_CHW.shape), row.extra_CHW is None, tuple(sorted(row.positive.added))


class Bucket:
    """The rows of one size on their way."""

    def __init__(self, had_s: float = 0.0) -> None:
        self.had_s = had_s
        """Seconds of steps that a row has had, from those of the size that had least when this one came. Who
        had least is next, so that a large size takes no more of the device than a small one."""
        self.tickets: list[Ticket] = []
        self._batch: sample.RunningBatch | None = None
        self.meter_s = 0.0
        """Seconds that one evaluation a step has cost since the bucket was made."""

    def add(self, ticket: Ticket) -> None:
        """Add a prepared row to the running batch, for the next step."""
        self._unpack()
        ticket.meter_s = self.meter_s
        self.tickets.append(ticket)

    def drop_over(self) -> list[Ticket]:
        """Let go of the rows whose work is over."""
        gone = [ticket for ticket in self.tickets if ticket.work.over]
        if gone:
            self._leave(gone)
        return gone

    def _leave(self, gone: Sequence[Ticket]) -> None:
        self._unpack()
        for ticket in gone:
            assert ticket.row is not None
            self.tickets.remove(ticket)
            ticket.work.device_s += (self.meter_s - ticket.meter_s) * ticket.work.shape.row_cost

    def _unpack(self) -> None:
        if self._batch is not None:
            self._batch.unpack()
            self._batch = None

    def step(self, unet: Unet, pace: Callable[[], None] = lambda: None) -> Stepped:
        """One step with every row; `pace` waits for what is to be counted as its time. A failure is traced to
        its row by stepping each alone.
        """
        start = time.perf_counter()
        stepped = Stepped(0.0, sum(ticket.work.shape.row_cost for ticket in self.tickets))
        failed = False
        try:
            self._together(unet, stepped)
            pace()
        except DEVICE_LOST as error:
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            failed = stepped.out_of_memory = True
        except Exception as error:
            failed, stepped.out_of_memory = True, is_out_of_memory(error)
        if failed:  # here, where the error no longer holds the step's tensors
            self._apart(unet, stepped)
        stepped.wall_s = time.perf_counter() - start
        self.meter_s += stepped.wall_s / stepped.evaluations
        done = [ticket for ticket in self.tickets if ticket.row is not None and ticket.row.done]
        stepped.finished = done
        if done or stepped.failed:
            self._leave([*done, *(ticket for ticket, _ in stepped.failed)])
        return stepped

    def _together(self, unet: Unet, stepped: Stepped) -> None:
        if self._batch is None:
            self._batch = sample.RunningBatch(
                [ticket.row for ticket in self.tickets if ticket.row is not None]
            )
        _, x0_BCHW = self._batch.advance(unet)
        for i, ticket in enumerate(self.tickets):
            if ticket.preview_at and ticket.step in ticket.preview_at:
                stepped.previews.append((ticket, ticket.preview_at[ticket.step], x0_BCHW[i]))
            if ticket.glance:
                ticket.glance = False
                stepped.previews.append((ticket, GLANCE, x0_BCHW[i]))

    def _apart(self, unet: Unet, stepped: Stepped) -> None:
        """Each row by itself: those that fail alone too are to blame."""
        self._unpack()
        for ticket in self.tickets:
            assert ticket.row is not None
            try:
                sample.advance(unet, [ticket.row])
            except Exception as alone:
                clear_frames(alone.__traceback__)  # what it holds of memory the next row needs
                stepped.failed.append((ticket, alone))


@dataclass(frozen=True, repr=False)
class _Filled:
    """The conditions of a call, filled up: the same tensors at each step, by which matrices are kept."""

    text_BLD: torch.Tensor
    added: dict[str, torch.Tensor]
    index: torch.Tensor
    text: torch.Tensor
    more: dict[str, torch.Tensor]

    @classmethod
    def of(cls, text_BLD: torch.Tensor, added: dict[str, torch.Tensor], size: int) -> _Filled:
        count = len(text_BLD)
        with torch.inference_mode(False), torch.no_grad():
            index = torch.zeros(size, dtype=torch.int64, device=text_BLD.device)
            index[:count] = torch.arange(count, device=text_BLD.device)
            more = take_rows(added, index, [i if i < count else 0 for i in range(size)])
            return cls(text_BLD, added, index, text_BLD[index], more)


MOST_FILLED = 4  # texts of several lengths have calls of their own


def padded(unet: Unet, sizes: Sequence[int]) -> Unet:
    """A U-Net that is only called with these numbers of rows (and beyond the largest as it comes).

    What is compiled or captured for a few batch sizes is then used again. The rows added repeat the first.
    """
    rising = sorted(sizes)
    laid: list[_Filled] = []

    def call(
        x_BCHW: torch.Tensor, t_B: torch.Tensor, text_BLD: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The U-Net's call filled up to one of the compiled sizes with copies of the first row."""
        count = len(x_BCHW)
        size = next((size for size in rising if size >= count), count)
        if size == count:
            return unet(x_BCHW, t_B, text_BLD, added)
        filled = next((one for one in laid if one.text_BLD is text_BLD and one.added is added), None)
        if filled is None:
            filled = _Filled.of(text_BLD, added, size)
            laid[:] = [filled, *laid[: MOST_FILLED - 1]]  # of the next steps too, until others join or leave
        index = filled.index
        return unet(x_BCHW[index], t_B[index], filled.text, filled.more)[:count]

    return call
