"""What stands around the steps: requests to rows (settings, text, first latents), latents to pictures."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from darkroom import sample
from darkroom.errors import Stopped
from darkroom.models.upscaler import Upscaler, Upscalers
from darkroom.picture_settings import DEFAULT_STEPS, PLAIN_UPSCALERS
from darkroom.sample.adapters import read_tags
from darkroom.sample.backends.backend import Backend, Decode
from darkroom.sample.choice import second_pass, table_for
from darkroom.sample.denoise import Condition
from darkroom.sample.inputs import checked_size
from darkroom.sample.pictures import while_wanted
from darkroom.sample.prompt_schedule import composed, readings
from darkroom.sample.prompts import encode_prompts, read_parts
from darkroom.serve.engine.tickets import EngineJob, Shape, Ticket, opened, preview_steps
from darkroom.serve.request import PictureRequest, Uploads

if TYPE_CHECKING:
    from collections.abc import Hashable

    from darkroom.models.model import Model
    from darkroom.sample.adapters import Encode
    from darkroom.serve.engine.adapters import Library
    from darkroom.serve.engine.nets import Nets


Failures = list[tuple[EngineJob, BaseException]]
FEW_LATENTS = 16 * 16
"""So few values a channel the VAE decodes in no time: previews of such pictures are as the picture itself."""


def settings_of(request: PictureRequest) -> sample.GenerateSettings:
    """A request in the terms of `generate`."""
    return sample.GenerateSettings.of(
        negative=request.negative,
        seed=request.seed or 0,
        num=request.num,
        variation_seed=request.variation_seed or 0,
        variation_strength=request.variation_strength,
        seed_size=request.seed_size,
        size=request.size,
        steps=request.steps,
        guidance=request.guidance,
        solver=request.solver,
        guidance_rescale=request.guidance_rescale,
        eta=request.eta,
        karras=request.karras,
        exponential=request.exponential,
        sigmas=request.sigmas,
        spacing=request.spacing,
        weighting=request.weighting,
        clip_skip=request.clip_skip,
        strength=request.strength,
        only_masked=request.only_masked,
        masked_content=request.masked_content,
        hires=None if request.hires is None else sample.Hires(**request.hires.model_dump()),
    )


def shape_of(model: Model, request: PictureRequest, image: Image.Image | None = None) -> Shape:
    """What a request costs. InputError where the model cannot do it."""
    settings = settings_of(request)
    if image is not None and settings.strength is None:  # as much as a mask would have redone
        settings = settings.model_copy(update={"strength": 1.0})
    table = table_for(model, settings)
    width, height = checked_size(model, settings.size, image if settings.only_masked is None else None)
    guidance = settings.resolved(table.solver, model.guidance).guidance or 0.0
    distilled = getattr(model.unet.config, "time_cond_proj_dim", None) is not None  # type: ignore[union-attr]
    prompts = len(composed(request.prompt)) if settings.weighting == "a1111" else 1
    evaluations = 1 + prompts if (guidance > 1 or prompts > 1) and not distilled else 1
    larger = _larger(model, settings, (width, height), evaluations, len(request.controls))
    if larger is not None and settings.hires is not None and settings.hires.upscaler not in PLAIN_UPSCALERS:
        larger = replace(larger, enlarged_pixels=width * height)
    nets = len(request.controls)
    return Shape(width, height, len(table), evaluations, larger, nets, calls_a_step=table.calls_a_step)


def _larger(
    model: Model, settings: sample.GenerateSettings, size: tuple[int, int], evaluations: int, nets: int
) -> Shape | None:
    found = second_pass(model, settings, size)
    if found is None:
        return None
    calls = found.table.calls_a_step
    return Shape(*found.size, len(found.table), evaluations, nets=nets, calls_a_step=calls)


class _CachedPromptGeneration(sample.Generation):
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

    def __init__(
        self, model: Model, backend: Backend, *, one_by_one: bool = False, decode: Decode | None = None
    ) -> None:
        self.model, self.backend = model, backend
        self._one_by_one = one_by_one
        """Texts are read alone: what shares a call may differ in the last bits."""
        self._decode = decode  # in place of the backend's
        self._texts = Texts(model)
        self._glance: Glance | None = None
        self.upscalers = Upscalers(None, backend.device)
        """Networks that a second pass may begin with."""
        self.stopping = False
        """The process ends: what is being encoded or decoded is left at the next slice or tile."""

    def get_ready(self) -> None:
        """What would keep the first jobs waiting: learn to glance at latents."""
        self._glance = self._glance or Glance.learnt(self.backend, _channels_of(self.model))

    def prepare(
        self, works: Sequence[EngineJob], library: Library | None, nets: Nets | None = None
    ) -> Failures:
        """Check and encode works, their texts together; those that cannot be are returned with the reason."""
        failed: Failures = []
        fresh = [work for work in works if work.prepared is None]
        if not self._one_by_one:
            self._texts.read(work for work in fresh if not _changes_texts(work, library))
        for work in fresh:
            try:
                with while_wanted(self._wanted([work])):
                    work.prepared = self._prepared(work, library, nets)
            except Stopped:
                continue
            except Exception as error:
                failed.append((work, error))
        return failed

    def _wanted(self, works: Sequence[EngineJob]) -> Callable[[], bool]:
        """Tells whether anybody waits for one of these still."""
        return lambda: not self.stopping and any(not work.over for work in works)

    def _prepared(self, work: EngineJob, library: Library | None, nets: Nets | None) -> sample.Generation:
        adapted = library.lend(work) if library is not None and work.adapters else None
        uploads = work.uploads or Uploads()
        return _CachedPromptGeneration(
            None if _changes_texts(work, library) else self._texts,
            self.model,
            [work.request.prompt],
            settings_of(work.request),
            self.backend,
            adapted=adapted,
            image=None if uploads.image is None else opened(uploads.image),
            mask=None if uploads.mask is None else opened(uploads.mask),
            controls=None if nets is None or not work.request.controls else nets.lend(work),
            enlarger=self._enlarger(work.request),
        )

    def _enlarger(self, request: PictureRequest) -> Upscaler | None:
        """The network that its second pass begins with."""
        if request.hires is None or request.hires.upscaler in PLAIN_UPSCALERS:
            return None
        return self.upscalers.get(request.hires.upscaler)

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
            images = (self._decode or self.backend.decode)(latents_BCHW)
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


def _changes_texts(work: EngineJob, library: Library | None) -> bool:
    """Whether its adapters have the text encoder read in a way of its own."""
    if library is None or not work.adapters:
        return False
    return any(path.startswith("text_encoder") for path in library.bank.layers)


def _by_size(tickets: Iterable[Ticket]) -> Iterable[list[Ticket]]:
    sizes: dict[Hashable, list[Ticket]] = {}
    for ticket in tickets:
        assert ticket.row is not None
        sizes.setdefault(tuple(ticket.row.latents_CHW.shape), []).append(ticket)
    return sizes.values()


PICTURES, SIDE, PATCHES = 8, 16, 4
"""To learn from: so many, of so many latent pixels a side, of so many colours a side that run into each
other."""


class Glance:
    """Latents to the colours of their pixels: `matrix` [C + 1, 3], whose last row is the colour of zero."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix

    @classmethod
    def learnt(cls, backend: Backend, channels: int) -> Glance:
        """From what the backend's VAE makes of latents of so many channels."""
        draw = torch.Generator().manual_seed(0)
        coarse_BCHW = 1.5 * torch.randn(PICTURES, channels, PATCHES, PATCHES, generator=draw)
        latents_BCHW = torch.nn.functional.interpolate(coarse_BCHW, size=(SIDE, SIDE), mode="bilinear")
        images = backend.decode(latents_BCHW.to(backend.device, backend.dtype))
        colours = [
            _values(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)) for image in images
        ]
        return cls(torch.linalg.lstsq(_with_one(latents_BCHW.movedim(1, -1)), torch.cat(colours)).solution)

    def at(self, latents_CHW: torch.Tensor, size: tuple[int, int]) -> Image.Image:
        """What latents look like, in a picture's size (width, height)."""
        height, width = latents_CHW.shape[1:]
        colours = _with_one(latents_CHW.float().cpu().movedim(0, -1)) @ self.matrix
        values = colours.reshape(height, width, 3).clamp(0, 255).round().to(torch.uint8)
        return Image.fromarray(values.numpy()).resize(size, Image.Resampling.BICUBIC)


def _channels_of(model: Model) -> int:
    """Of the model's latents."""
    vae: Any = model.vae
    return int(vae.config.latent_channels)


def _with_one(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels [..., C] as rows [N, C + 1] that end with 1."""
    rows = pixels.reshape(-1, pixels.shape[-1]).float()
    return torch.cat([rows, torch.ones(len(rows), 1)], dim=1)


def _values(image: Image.Image) -> torch.Tensor:
    """Pixels as rows [N, 3]."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32).reshape(-1, 3).copy())


LOG = logging.getLogger("darkroom.serve")
MOST_BYTES = 64 * 2**20
"""Of texts that are kept: one part is 236 KB for Stable Diffusion 1 in float32, and a text has up to 16."""


class Way(NamedTuple):
    """All that a text's states depend on but the text."""

    weighting: str
    clip_skip: int
    size: tuple[int, int] | None
    """For SDXL, which has it as a condition."""


Key = tuple[str, int, Way]
"""A text, in how many parts it is read at least, and how."""
Text = tuple[Condition, list[str]]


class Texts:
    """Texts as encoded lately: most requests share their negative text, and many a prompt comes again."""

    def __init__(self, model: Model, most_bytes: int = MOST_BYTES) -> None:
        self._model, self._most_bytes = model, most_bytes
        self._kept: OrderedDict[Key, Text] = OrderedDict()
        self.bytes = 0
        """Of what is kept."""

    def through(self, encode: Encode, weighting: str, clip_skip: int, size: tuple[int, int]) -> Encode:
        """`encode`, with what is known taken from here."""
        way = self._way(weighting, clip_skip, size)

        def remembered(prompts: Sequence[str], parts: Sequence[int]) -> tuple[list[Condition], list[str]]:
            texts = [self._text(encode, (*one, way)) for one in zip(prompts, parts, strict=True)]
            return [condition for condition, _ in texts], [note for _, notes in texts for note in notes]

        return remembered

    def _way(self, weighting: str, clip_skip: int, size: tuple[int, int]) -> Way:
        return Way(weighting, clip_skip, size if self._model.is_sdxl else None)

    def _text(self, encode: Encode, key: Key) -> Text:
        if (text := self._kept.get(key)) is None:
            [condition], notes = encode([key[0]], [key[1]])
            text = condition, notes
            self._keep(key, text)
        else:
            self._kept.move_to_end(key)
        return text

    def _keep(self, key: Key, text: Text) -> None:
        self._kept[key] = text
        self.bytes += _bytes(text)
        while self.bytes > self._most_bytes and len(self._kept) > 1:
            self.bytes -= _bytes(self._kept.popitem(last=False)[1])

    def read(self, works: Iterable[EngineJob]) -> None:
        """Encode what these works will ask for and nobody has yet, in one call for each way of reading.

        Only texts of one part, as most are. What cannot be encoded so fails in its work's own turn, alone.
        """
        asked: dict[Way, dict[str, None]] = {}
        for work in works:
            with suppress(Exception):
                for prompt, parts, way in self._wanted(work):
                    if parts == 1 and (prompt, parts, way) not in self._kept:
                        asked.setdefault(way, {})[prompt] = None
        for way, prompts in asked.items():
            try:
                self._read(way, list(prompts))
            except Exception as error:
                LOG.warning("%d texts could not be encoded together: %s", len(prompts), error)

    def _wanted(self, work: EngineJob) -> Iterator[Key]:
        """The texts of a work as `sample.Generation` asks for them."""
        request, shape = work.request, work.shape
        weighting, skip = request.weighting, request.clip_skip
        read = readings(
            read_tags(request.prompt)[0], request.negative or "", weighting, request.steps or DEFAULT_STEPS
        )
        texts = [(prompt, skip) for reading in read for prompt in reading.prompts]
        if shape.evaluations > 1 and (request.negative is not None or not self._model.is_sdxl):
            texts += [(reading.negative, skip if weighting == "a1111" else 0) for reading in read]
        parts = max(len(read_parts(self._model, text, weighting)[0]) for text, _ in texts)
        for text, skipped in texts:
            yield text, parts, self._way(weighting, skipped, (shape.width, shape.height))

    def _read(self, way: Way, prompts: Sequence[str]) -> None:
        size, settings = way.size or (0, 0), {"weighting": way.weighting, "clip_skip": way.clip_skip}
        conditions, _ = encode_prompts(self._model, prompts, size, **settings)  # type: ignore[arg-type]
        for prompt, condition in zip(prompts, conditions, strict=True):
            self._keep((prompt, 1, way), (_apart(condition), []))


def _apart(condition: Condition) -> Condition:
    """In memory of its own: the states of a call are slices of one tensor."""
    added = {name: value.clone() for name, value in condition.added.items()}
    return Condition(condition.text_LD.clone(), added)


def _bytes(text: Text) -> int:
    condition, _ = text
    return condition.text_LD.nbytes + sum(value.nbytes for value in condition.added.values())
