"""What stands around the steps: requests to rows (settings, text, first latents), latents to pictures."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from PIL import Image

from darkroom import sample
from darkroom.sample.backends import Backend
from darkroom.sample.checks import checked_size, table_for
from darkroom.serve.request import PictureRequest, Uploads
from darkroom.serve.work import Shape, Ticket, Work, preview_steps

if TYPE_CHECKING:
    from collections.abc import Hashable

    from darkroom.models import Model
    from darkroom.serve.library import Library

FORMATS = ("PNG", "JPEG", "WEBP")
"""Of uploads."""
Failures = list[tuple[Work, BaseException]]


def settings_of(request: PictureRequest) -> sample.GenerateSettings:
    """A request in the terms of `generate`."""
    return sample.GenerateSettings.of(
        negative=request.negative,
        seed=request.seed or 0,
        num=request.num,
        size=request.size,
        steps=request.steps,
        guidance=request.guidance,
        solver=request.solver,
        guidance_rescale=request.guidance_rescale,
        eta=request.eta,
        karras=request.karras,
        spacing=request.spacing,
        weighting=request.weighting,
        clip_skip=request.clip_skip,
        strength=request.strength,
    )


def shape_of(model: Model, request: PictureRequest, image: Image.Image | None = None) -> Shape:
    """What a request costs. InputError where the model cannot do it."""
    settings = settings_of(request)
    if image is not None and settings.strength is None:  # as much as a mask would have redone
        settings = settings.model_copy(update={"strength": 1.0})
    table = table_for(model, settings)
    width, height = checked_size(model, settings.size, image)
    guidance = settings.resolved(table.solver).guidance or 0.0
    distilled = getattr(model.unet.config, "time_cond_proj_dim", None) is not None  # type: ignore[union-attr]
    return Shape(width, height, len(table), 2 if guidance > 1 and not distilled else 1)


class Studio:
    """Prepares works and finishes their pictures; used on the aside's thread, but for `start`."""

    def __init__(self, model: Model, backend: Backend) -> None:
        self.model, self.backend = model, backend

    def prepare(self, works: Sequence[Work], library: Library | None) -> Failures:
        """Check and encode works; those that cannot be are returned with the reason."""
        failed: Failures = []
        for work in works:
            if work.prepared is not None:
                continue
            try:
                work.prepared = self._prepared(work, library)
            except Exception as error:
                failed.append((work, error))
        return failed

    def _prepared(self, work: Work, library: Library | None) -> sample.Job:
        adapted = library.lend(work) if library is not None and work.adapters else None
        uploads = work.uploads or Uploads()
        return sample.Job(
            self.model,
            [work.request.prompt],
            settings_of(work.request),
            self.backend,
            adapted=adapted,
            image=_opened(uploads.image),
            mask=_opened(uploads.mask),
        )

    def start(self, ticket: Ticket) -> None:
        """Give a ticket its row at the first step."""
        job = ticket.work.prepared
        assert job is not None
        ticket.row = job.row(ticket.index)
        if ticket.work.request.previews:
            ticket.preview_at = preview_steps(ticket.work.request.previews, len(job.table))

    def finish(self, tickets: Sequence[Ticket]) -> Failures:
        """Decode finished rows, those of one size together; a failure is traced by decoding each alone."""
        failed: Failures = []
        for some in _by_size(tickets):
            try:
                self._finish(some)
            except Exception:
                failed += self._finish_apart(some)
        return failed

    def _finish(self, tickets: Sequence[Ticket]) -> None:
        latents_BCHW = torch.stack([ticket.row.latents_CHW for ticket in tickets if ticket.row is not None])
        images = self.backend.decode(latents_BCHW)
        latents_BCHW = latents_BCHW.cpu()
        for i, (ticket, image) in enumerate(zip(tickets, images, strict=True)):
            job = ticket.work.prepared
            assert job is not None
            [picture] = job.finished(ticket.index, [image], latents_BCHW[i : i + 1])
            ticket.work.pictures[ticket.index] = picture
            ticket.done = True

    def _finish_apart(self, tickets: Sequence[Ticket]) -> Failures:
        failed: Failures = []
        for ticket in tickets:
            try:
                self._finish([ticket])
            except Exception as error:
                failed.append((ticket.work, error))
        return failed

    def preview(
        self, previews: Sequence[tuple[Ticket, int, torch.Tensor]]
    ) -> list[tuple[Ticket, int, Image.Image]]:
        """Decode what is on its way; what cannot be decoded is left out."""
        shown = []
        for ticket, index, latents_CHW in previews:
            try:
                shown.append((ticket, index, self.backend.decode(latents_CHW[None])[0]))
            except Exception:  # a preview is a courtesy: the picture itself will tell
                continue
        return shown


def _opened(content: bytes | None) -> Image.Image | None:
    """An upload that admission has let in."""
    return None if content is None else Image.open(io.BytesIO(content), formats=FORMATS)


def _by_size(tickets: Iterable[Ticket]) -> Iterable[list[Ticket]]:
    sizes: dict[Hashable, list[Ticket]] = {}
    for ticket in tickets:
        assert ticket.row is not None
        sizes.setdefault(tuple(ticket.row.latents_CHW.shape), []).append(ticket)
    return sizes.values()
