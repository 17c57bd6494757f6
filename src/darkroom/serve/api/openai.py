"""OpenAI's Images dialect: generations, edits, variations, models; darkroom's own settings come on top."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict, Field

from darkroom.errors import InputError
from darkroom.options import MAX_SIDE, parse_size
from darkroom.sample.provenance import Provenance
from darkroom.serve.api.guard import error_object
from darkroom.serve.api.shared import (
    STRUCTURED,
    all_made,
    caller,
    checked,
    choices,
    converted,
    encoded,
    read_value,
    repeatable_ids,
    route_in,
    sent,
    sign,
    sse,
    with_controls,
    with_heartbeat,
)
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import (
    MAX_SEED,
    MOST_CONTROLS,
    ControlGiven,
    Event,
    Job,
    OwnSettings,
    PictureRequest,
    Refused,
    Uploads,
)
from darkroom.serve.settings import Limits
from darkroom.serve.status import ModelCard

Format = Literal["png", "jpeg", "webp"]


class ImagesRequest(OwnSettings):
    """OpenAI's fields; those after `partial_images` are darkroom's, with all of `OwnSettings`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, max_length=100_000)
    model: str | None = Field(None, max_length=500, description="one of /v1/models; none: the first")
    n: int | None = Field(None, ge=1, le=1000)
    size: str | None = Field(None, max_length=20, description="WIDTHxHEIGHT or auto")
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Format | None = None
    output_compression: int | None = Field(None, ge=0, le=100, description="quality of jpeg and webp")
    quality: str | None = Field(None, max_length=20, description="taken and not used")
    background: Literal["auto", "opaque"] | None = None
    moderation: str | None = Field(None, max_length=20, description="taken and not used")
    style: str | None = Field(None, max_length=20, description="taken and not used")
    user: str | None = Field(None, max_length=500, description="taken and not used")
    stream: bool | None = None
    partial_images: int | None = Field(None, ge=0, le=3)

    negative_prompt: str | None = Field(None, max_length=100_000)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    guidance_scale: float | None = Field(None, ge=0, le=1000, allow_inf_nan=False)
    solver: str | None = Field(None, max_length=40)
    controls: list[ControlGiven] = Field(default_factory=list, max_length=MOST_CONTROLS)

    def request(self) -> PictureRequest:
        """In the terms of the core."""
        width, height = _size(self.size)
        return PictureRequest(
            prompt=self.prompt,
            model=self.model,
            negative=self.negative_prompt,
            num=self.n or 1,
            seed=self.seed,
            width=width,
            height=height,
            steps=self.num_inference_steps,
            guidance=self.guidance_scale,
            solver=self.solver,
            controls=choices(self.controls),
            previews=(self.partial_images or 0) if self.stream else 0,
            **self.own(),
        )


class EditsRequest(ImagesRequest):
    """The fields of an edit besides its pictures."""

    input_fidelity: str | None = Field(None, max_length=20, description="taken and not used")
    strength: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="how much to redo")

    reference_net: str | None = Field(
        None,
        max_length=200,
        description="the IP-Adapter that further pictures guide by; none: the first by name",
    )
    reference_weight: float = Field(
        1.0, ge=-10, le=10, allow_inf_nan=False, description="how much further pictures count"
    )

    def request(self) -> PictureRequest:
        """In the terms of the core."""
        return super().request().model_copy(update={"strength": self.strength})


class VariationsRequest(EditsRequest):
    """The fields of a variation besides its picture. It needs no prompt."""

    prompt: str = Field("", max_length=100_000)


def _size(text: str | None) -> tuple[int | None, int | None]:
    if text is None or text == "auto":
        return None, None
    try:
        size = parse_size(text)
    except InputError:
        size = (0, 0)
    if not 8 <= min(size) <= max(size) <= MAX_SIDE:
        message = f"size: WIDTHxHEIGHT of 8 to {MAX_SIDE} pixels, or auto"
        raise Refused(422, "invalid_value", message, param="size")
    return size


def openai_router(core: Core) -> APIRouter:
    """The `/v1` routes. A mistake is answered with 400, as OpenAI does."""
    route = route_in(core, error_object, invalid=400)
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=route)

    @router.post("/images/generations", response_model=None)
    async def generations(wanted: ImagesRequest, request: Request) -> dict[str, Any] | StreamingResponse:
        """Pictures of a prompt, as OpenAI's clients ask for them."""
        return await _answer(core, wanted, request, None, "image_generation")

    @router.post("/images/edits", response_model=None, openapi_extra=_form_body(["image", "prompt"]))
    async def edits(request: Request) -> dict[str, Any] | StreamingResponse:
        """Pictures that start from one: a multipart form with `image`, `prompt`, and perhaps `mask`. Further
        pictures (`image[]`) guide it by an IP-Adapter of the server's."""
        wanted, uploads = await _edit(core, request, EditsRequest)
        return await _answer(core, wanted, request, uploads, "image_edit")

    @router.post("/images/variations", response_model=None, openapi_extra=_form_body(["image"]))
    async def variations(request: Request) -> dict[str, Any] | StreamingResponse:
        """Pictures like one: a multipart form with `image`."""
        wanted, uploads = await _edit(core, request, VariationsRequest)
        return await _answer(core, wanted, request, uploads, "image_variation")

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The models served."""
        return {"object": "list", "data": [_model(card) for card in core.models()]}

    @router.get("/models/{name}")
    async def model(name: Annotated[str, Path(max_length=500)]) -> dict[str, Any]:
        """A model by its name."""
        return _model(core.card(name))

    return router


def _form_body(required: list[str]) -> dict[str, Any]:
    """The OpenAPI entry of a form with pictures."""
    file = {"type": "string", "format": "binary"}
    properties = {"image": file, "mask": file, "prompt": {"type": "string"}}
    schema = {"type": "object", "required": required, "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


IMAGES = ("image", "image[]")
MOST_PARTS = 40


async def _edit(core: Core, request: Request, kind: type[EditsRequest]) -> tuple[EditsRequest, Uploads]:
    """A form as a request: its texts become the numbers that the fields are."""
    texts, images, mask = await _form_of(request, core.limits)
    values = {name: read_value(name, texts.pop(name)) for name in STRUCTURED if name in texts}
    # Texts of a form: numbers may be given as such, unlike in JSON.
    wanted = kind.model_validate_strings(texts).model_copy(update=values)
    if references := images[1:]:
        core.card(wanted.model)  # 404 before its nets are looked at
        net = wanted.reference_net or await core.reference_net(wanted.model)
        if net is None:
            message = "image: one picture; further ones need an IP-Adapter among the server's --controls"
            raise Refused(422, "invalid_value", message, param="image")
        more = [
            ControlGiven(net=net, image=encoded(one), weight=wanted.reference_weight) for one in references
        ]
        wanted = wanted.model_copy(update={"controls": [*wanted.controls, *more]})
    return wanted, Uploads(images[0], mask)


async def _form_of(request: Request, limits: Limits) -> tuple[dict[str, str], list[bytes], bytes | None]:
    """A form's texts, its pictures (at least one), and its mask."""
    most = 1 + min(limits.controls, MOST_CONTROLS)
    try:
        # `controls` is a text with pictures inside: the bound on bodies holds for it, not Starlette's 1 MiB.
        bounds = {"max_files": MOST_PARTS, "max_fields": MOST_PARTS}
        form = await request.form(**bounds, max_part_size=limits.body_bytes)
    except (OSError, MemoryError):  # a full disk or no memory for the parts is not the client's mistake
        raise
    except Exception as error:  # whatever a parser makes of hostile bytes
        raise Refused(400, "bad_request", "the body is no form that can be read") from error
    texts: dict[str, str] = {}
    images: list[bytes] = []
    mask: bytes | None = None
    for name, value in form.multi_items():
        if isinstance(value, str):
            texts[name] = value
            continue
        if name in IMAGES and len(images) < most:
            images.append(await value.read())
        elif name == "mask" and mask is None:
            mask = await value.read()
        else:
            message = f"{name[:100]}: at most {most} images and one mask"
            raise Refused(422, "unknown_field", message, param=name[:100])
    if not images:
        raise Refused(422, "missing_field", "image: a picture to start from", param="image")
    return texts, images, mask


def _model(card: ModelCard) -> dict[str, Any]:
    return {"id": card.name, "object": "model", "created": card.created_s, "owned_by": "darkroom"}


async def _answer(
    core: Core, wanted: ImagesRequest, request: Request, uploads: Uploads | None, kind: str
) -> dict[str, Any] | StreamingResponse:
    core.card(wanted.model)  # 404 before its pictures are looked at
    uploads = await with_controls(wanted.controls, uploads)
    if wanted.stream:
        job_id = next(iter(repeatable_ids(request, 1)), None)
        job = await core.submit(wanted.request(), key=caller(request), job_id=job_id, uploads=uploads)
        stream = with_heartbeat(_stream(core, job, wanted, kind, goes_on=job_id is not None))
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
    [job] = await all_made(core, request, [wanted.request()], uploads=uploads)
    return {
        "created": int(time.time()),
        "data": await _data(core, job, wanted, request),
        **_described(job, wanted),
        "usage": _usage(job),
    }


async def _data(core: Core, job: Job, wanted: ImagesRequest, request: Request) -> list[dict[str, Any]]:
    if wanted.response_format == "url":
        here = core.settings.public_url or request.state.address + core.settings.prefix
        return [{"url": here + sign(core, job.uid, i)} for i in range(len(job.pictures))]
    pictures = await core.pictures(job.id, key=job.key)
    marks = core.provenance
    return [
        {"b64_json": await asyncio.to_thread(_encoded, picture.png, wanted, marks)} for picture in pictures
    ]


async def _stream(
    core: Core, job: Job, wanted: ImagesRequest, kind: str, *, goes_on: bool
) -> AsyncGenerator[str]:
    """Partial pictures as they come, then each picture; what fails is reported in the stream."""
    try:
        with core.attended(job):
            async for event in core.events(job.id, key=job.key):
                if event.kind == "preview":
                    yield _event(f"{kind}.partial_image", job, wanted, await _partial(event, wanted))
        over = checked(await core.finished(job.id, key=job.key))
        for picture in await core.pictures(job.id, key=job.key):
            content = await asyncio.to_thread(_encoded, picture.png, wanted, core.provenance)
            more = {"b64_json": content, "usage": _usage(over)}
            yield _event(f"{kind}.completed", over, wanted, more)
    except Refused as refused:
        yield sse(error_object(refused), event="error")
    finally:
        if not goes_on:
            await core.cancel(job.id, key=job.key)  # of no effect on a job that is over


async def _partial(event: Event, wanted: ImagesRequest) -> dict[str, Any]:
    content = await asyncio.to_thread(_encoded, event.data["png"], wanted)
    return {"b64_json": content, "partial_image_index": event.data["index"]}


def _event(kind: str, job: Job, wanted: ImagesRequest, more: dict[str, Any]) -> str:
    content = {"type": kind, "created_at": int(time.time()), **_described(job, wanted), **more}
    return sse(content, event=kind)


def _described(job: Job, wanted: ImagesRequest) -> dict[str, Any]:
    size = wanted.size or "auto"
    if job.pictures:
        size = f"{job.pictures[0]['width']}x{job.pictures[0]['height']}"
    return {
        "background": "opaque",
        "output_format": wanted.output_format or "png",
        "quality": "auto",
        "size": size,
    }


def _usage(job: Job) -> dict[str, Any]:
    """Tokens are not counted here; the field is there for clients that read it."""
    details = {"image_tokens": 0, "text_tokens": 0}
    return {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, "input_tokens_details": details}


def _encoded(png: bytes, wanted: ImagesRequest, provenance: Provenance | None = None) -> str:
    """A picture in the format asked for, as base64."""
    quality = 90 if wanted.output_compression is None else wanted.output_compression
    return encoded(sent(converted(png, (wanted.output_format or "png").upper(), quality, provenance)))
