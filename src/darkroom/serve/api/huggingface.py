"""Hugging Face's text-to-image and image-to-image: `inputs` and `parameters` in, a picture's bytes out."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from darkroom.serve.api.shared import (
    MEDIA_TYPES,
    all_made,
    body_of,
    choices,
    converted,
    decoded,
    json_body,
    pngs_of,
    route_in,
    sent,
    with_controls,
)
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import (
    MAX_SEED,
    MOST_CONTROLS,
    ControlGiven,
    OwnSettings,
    PictureRequest,
    Uploads,
)

PICTURE = {200: {"content": {kind: {} for kind in MEDIA_TYPES.values()}, "description": "the picture"}}


class HuggingFaceParameters(OwnSettings):
    """The task's parameters, and darkroom's own settings and controls."""

    model_config = ConfigDict(extra="forbid", strict=True)

    guidance_scale: float | None = Field(None, ge=0, le=1000, allow_inf_nan=False)
    negative_prompt: str | None = Field(None, max_length=100_000)
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    width: int | None = Field(None, ge=8, le=8192)
    height: int | None = Field(None, ge=8, le=8192)
    scheduler: str | None = Field(None, max_length=40, description="a solver's name")
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    controls: list[ControlGiven] = Field(default_factory=list, max_length=MOST_CONTROLS)


class TextToImage(BaseModel):
    """A request of the task."""

    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: str = Field(min_length=1, max_length=100_000, description="the prompt")
    parameters: HuggingFaceParameters = HuggingFaceParameters()
    options: dict[str, Any] = Field(default_factory=dict, description="taken and not used")

    @property
    def prompt(self) -> str:
        """What to draw."""
        return self.inputs

    def request(self) -> PictureRequest:
        """In the terms of the core."""
        parameters = self.parameters
        return PictureRequest(
            prompt=self.prompt,
            negative=parameters.negative_prompt,
            seed=parameters.seed,
            width=parameters.width,
            height=parameters.height,
            steps=parameters.num_inference_steps,
            guidance=parameters.guidance_scale,
            solver=parameters.scheduler,
            controls=choices(parameters.controls),
            **parameters.own(),
        )


class TargetSize(BaseModel):
    """Of the picture that is made."""

    model_config = ConfigDict(extra="forbid", strict=True)

    width: int = Field(ge=8, le=8192)
    height: int = Field(ge=8, le=8192)


class ImageParameters(HuggingFaceParameters):
    """The parameters of image-to-image."""

    prompt: str = Field("", max_length=100_000)
    strength: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="how much to redo")
    target_size: TargetSize | None = None


class ImageToImage(TextToImage):
    """A request of image-to-image."""

    inputs: str = Field(description="the picture in base64")
    parameters: ImageParameters = ImageParameters()

    @property
    def prompt(self) -> str:
        """What to draw."""
        return self.parameters.prompt

    def request(self) -> PictureRequest:
        """In the terms of the core."""
        size = self.parameters.target_size
        more: dict[str, Any] = {"strength": self.parameters.strength}
        if size is not None:
            more |= {"width": size.width, "height": size.height}
        return super().request().model_copy(update=more)


PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF")
"""How PNG, JPEG and WebP begin; in base64 below."""
PICTURES_BASE64 = ("iVBORw0KGgo", "/9j/", "UklGR")


async def _asked(request: Request) -> tuple[TextToImage, Uploads | None]:
    """A request of either task. A picture comes in base64 with its parameters, or as it is without any."""
    content = await request.body()
    if content.startswith(PICTURES):
        return ImageToImage(inputs=""), Uploads(content)
    body = await json_body(request)
    inputs = body.get("inputs") if isinstance(body, dict) else None
    parameters = body.get("parameters") if isinstance(body, dict) else None
    named = isinstance(parameters, dict) and "prompt" in parameters
    if not named and not (isinstance(inputs, str) and inputs.startswith(PICTURES_BASE64)):
        return TextToImage.model_validate(body), None
    wanted = ImageToImage.model_validate(body)
    return wanted, Uploads(await asyncio.to_thread(decoded, wanted.inputs, "inputs"))


def huggingface_router(core: Core) -> APIRouter:
    """POST to the server's address, as `InferenceClient(URL)` does, or to `/models/NAME`."""
    route = route_in(core, lambda refused: {"error": refused.message, "code": refused.code})
    router = APIRouter(tags=["huggingface"], route_class=route)

    async def answer(request: Request, model: str | None) -> Response:
        """A picture of the prompt, in the type that the request accepts."""
        wanted, uploads = await _asked(request)
        kind = _accepted(request.headers.get("accept", ""))
        uploads = await with_controls(wanted.parameters.controls, uploads)
        asked = wanted.request().model_copy(update={"model": model})
        jobs = await all_made(core, request, [asked], uploads=uploads)
        [png] = await pngs_of(core, jobs)
        headers = {"x-seed": str(jobs[0].request.seed), "Cache-Control": "no-store"}
        content = await asyncio.to_thread(converted, png, kind, provenance=core.provenance)
        return Response(sent(content), media_type=MEDIA_TYPES[kind], headers=headers)

    @router.post("/", response_class=Response, responses=PICTURE, openapi_extra=body_of(TextToImage))  # type: ignore[arg-type]
    async def text_to_image(request: Request) -> Response:
        """A picture of a prompt, as Hugging Face's clients ask for it."""
        return await answer(request, None)

    @router.post(
        "/models/{name:path}",
        response_class=Response,
        responses=PICTURE,  # type: ignore[arg-type]
        openapi_extra=body_of(TextToImage),
    )
    async def of_model(name: Annotated[str, Path(max_length=500)], request: Request) -> Response:
        """The same, by the model's name."""
        core.card(name)  # 404 before the body is read
        return await answer(request, name)

    return router


def _accepted(accept: str) -> str:
    """The first format that the client names; PNG where it names none."""
    for part in accept.lower().split(","):
        for kind, media in MEDIA_TYPES.items():
            if part.partition(";")[0].strip() == media:
                return kind
    return "PNG"
