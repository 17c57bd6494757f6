"""What stands around the steps: requests to rows (settings, text, first latents), latents to pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from darkroom import sample
from darkroom.errors import Stopped
from darkroom.sample.backends import Backend
from darkroom.sample.checks import checked_size, table_for
from darkroom.sample.generate import second_pass
from darkroom.sample.pictures import while_wanted
from darkroom.serve.glance import Glance, channels_of
from darkroom.serve.request import PictureRequest, Uploads
from darkroom.serve.texts import Texts
from darkroom.serve.work import Shape, Ticket, Work, preview_steps

if TYPE_CHECKING:
    from collections.abc import Hashable

    from darkroom.models import Model
    from darkroom.sample.adapters import Encode
    from darkroom.serve.library import Library

FORMATS = ("PNG", "JPEG", "WEBP")
"""Of uploads."""
Failures = list[tuple[Work, BaseException]]
FEW_LATENTS = 16 * 16
"""So few values a channel the VAE decodes in no time: previews of such pictures are as the picture itself."""


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
        hires=None if request.hires is None else sample.Hires(**request.hires.model_dump()),
    )


def shape_of(model: Model, request: PictureRequest, image: Image.Image | None = None) -> Shape:
    """What a request costs. InputError where the model cannot do it."""
    settings = settings_of(request)
    if image is not None and settings.strength is None:  # as much as a mask would have redone
        settings = settings.model_copy(update={"strength": 1.0})
    table = table_for(model, settings)
    width, height = checked_size(model, settings.size, image)
    guidance = settings.resolved(table.solver, model.guidance).guidance or 0.0
    distilled = getattr(model.unet.config, "time_cond_proj_dim", None) is not None  # type: ignore[union-attr]
    evaluations = 2 if guidance > 1 and not distilled else 1
    larger = _larger(model, settings, (width, height), evaluations)
    return Shape(width, height, len(table), evaluations, larger)


def _larger(
    model: Model, settings: sample.GenerateSettings, size: tuple[int, int], evaluations: int
) -> Shape | None:
    found = second_pass(model, settings, size)
    return None if found is None else Shape(*found.size, len(found.table), evaluations)


class _Job(sample.Job):
    """A job whose texts may be known already."""

    def __init__(self, texts: Texts | None, *given: Any, **more: Any) -> None:
        self._texts = texts
        super().__init__(*given, **more)

    def _encode(self, clip_skip: int) -> Encode:
        encode = super()._encode(clip_skip)
        if self._texts is None:
            return encode
        return self._texts.through(encode, self.settings.weighting, clip_skip, self.size)


class Studio:
    """Prepares works and finishes their pictures; used on the aside's thread, but for `start`."""

    def __init__(self, model: Model, backend: Backend) -> None:
        self.model, self.backend = model, backend
        self._texts = Texts(model)
        self._glance: Glance | None = None
        self.stopping = False
        """The process ends: what is being encoded or decoded is left at the next slice or tile."""

    def get_ready(self) -> None:
        """What would keep the first jobs waiting: learn to glance at latents."""
        self._glance = self._glance or Glance.learnt(self.backend, channels_of(self.model))

    def prepare(self, works: Sequence[Work], library: Library | None) -> Failures:
        """Check and encode works, their texts together; those that cannot be are returned with the reason."""
        failed: Failures = []
        fresh = [work for work in works if work.prepared is None]
        self._texts.read(work for work in fresh if not _changes_texts(work, library))
        for work in fresh:
            try:
                with while_wanted(self._wanted([work])):
                    work.prepared = self._prepared(work, library)
            except Stopped:
                continue
            except Exception as error:
                failed.append((work, error))
        return failed

    def _wanted(self, works: Sequence[Work]) -> Callable[[], bool]:
        """Tells whether anybody waits for one of these still."""
        return lambda: not self.stopping and any(not work.over for work in works)

    def _prepared(self, work: Work, library: Library | None) -> sample.Job:
        adapted = library.lend(work) if library is not None and work.adapters else None
        uploads = work.uploads or Uploads()
        return _Job(
            None if _changes_texts(work, library) else self._texts,
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
        if ticket.row is not None:  # of its second pass
            return
        ticket.row = job.row(ticket.index)
        if ticket.work.request.previews:
            steps = ticket.work.steps_total // len(ticket.work.tickets)
            ticket.preview_at = preview_steps(ticket.work.request.previews, steps)

    def enlarge(self, tickets: Sequence[Ticket]) -> Failures:
        """Give tickets that are through their first pass the row of their second."""
        failed: Failures = []
        for ticket in tickets:
            job, row = ticket.work.prepared, ticket.row
            assert job is not None
            assert row is not None
            try:
                with while_wanted(self._wanted([ticket.work])):
                    [larger] = job.enlarged(ticket.index, [row])
            except Stopped:
                continue
            except Exception as error:
                failed.append((ticket.work, error))
            else:
                ticket.enlarge(larger)
        return failed

    def finish(self, tickets: Sequence[Ticket]) -> Failures:
        """Decode finished rows, those of one size together; a failure is traced by decoding each alone."""
        failed: Failures = []
        for some in _by_size(tickets):
            try:
                self._finish(some)
            except Stopped:
                continue
            except Exception:
                failed += self._finish_apart(some)
        return failed

    def _finish(self, tickets: Sequence[Ticket]) -> None:
        latents_BCHW = torch.stack([ticket.row.latents_CHW for ticket in tickets if ticket.row is not None])
        with while_wanted(self._wanted([ticket.work for ticket in tickets])):
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
            except Stopped:
                continue
            except Exception as error:
                failed.append((ticket.work, error))
        return failed

    def preview(
        self, previews: Sequence[tuple[Ticket, int, torch.Tensor]]
    ) -> list[tuple[Ticket, int, Image.Image]]:
        """Show what is on its way; what cannot be shown is left out."""
        shown = []
        for ticket, index, latents_CHW in previews:
            try:
                shown.append((ticket, index, self._shown(ticket, latents_CHW)))
            except Exception:  # a preview is a courtesy: the picture itself will tell
                continue
        return shown

    def _shown(self, ticket: Ticket, latents_CHW: torch.Tensor) -> Image.Image:
        if latents_CHW[0].numel() <= FEW_LATENTS:
            return self.backend.decode(latents_CHW[None])[0]
        self.get_ready()
        assert self._glance is not None
        return self._glance.at(latents_CHW, (ticket.shape.width, ticket.shape.height))


def _changes_texts(work: Work, library: Library | None) -> bool:
    """Whether its adapters have the text encoder read in a way of its own."""
    if library is None or not work.adapters:
        return False
    return any(path.startswith("text_encoder") for path in library.bank.layers)


def _opened(content: bytes | None) -> Image.Image | None:
    """An upload that admission has let in."""
    return None if content is None else Image.open(io.BytesIO(content), formats=FORMATS)


def _by_size(tickets: Iterable[Ticket]) -> Iterable[list[Ticket]]:
    sizes: dict[Hashable, list[Ticket]] = {}
    for ticket in tickets:
        assert ticket.row is not None
        sizes.setdefault(tuple(ticket.row.latents_CHW.shape), []).append(ticket)
    return sizes.values()
