"""Hugging Face's text-to-image task: `inputs` and `parameters` in, the picture's bytes out."""

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
    json_body,
    pngs_of,
    route_in,
    with_controls,
)
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import MAX_SEED, MOST_CONTROLS, AdapterChoice, ControlGiven, PictureRequest

PICTURE = {200: {"content": {kind: {} for kind in MEDIA_TYPES.values()}, "description": "the picture"}}


class HuggingFaceParameters(BaseModel):
    """The task's parameters, and darkroom's adapters and controls."""

    model_config = ConfigDict(extra="forbid", strict=True)

    guidance_scale: float | None = Field(None, ge=0, le=1000, allow_inf_nan=False)
    negative_prompt: str | None = Field(None, max_length=100_000)
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    width: int | None = Field(None, ge=8, le=8192)
    height: int | None = Field(None, ge=8, le=8192)
    scheduler: str | None = Field(None, max_length=40, description="a solver's name")
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    adapters: list[AdapterChoice] = Field(default_factory=list, max_length=16)
    controls: list[ControlGiven] = Field(default_factory=list, max_length=MOST_CONTROLS)


class TextToImage(BaseModel):
    """A request of the task."""

    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: str = Field(min_length=1, max_length=100_000, description="the prompt")
    parameters: HuggingFaceParameters = HuggingFaceParameters()
    options: dict[str, Any] = Field(default_factory=dict, description="taken and not used")

    def request(self) -> PictureRequest:
        """In the terms of the core."""
        parameters = self.parameters
        return PictureRequest(
            prompt=self.inputs,
            negative=parameters.negative_prompt,
            seed=parameters.seed,
            width=parameters.width,
            height=parameters.height,
            steps=parameters.num_inference_steps,
            guidance=parameters.guidance_scale,
            solver=parameters.scheduler,
            adapters=tuple(parameters.adapters),
            controls=choices(parameters.controls),
        )


def huggingface_router(core: Core) -> APIRouter:
    """POST to the server's address, as `InferenceClient(URL)` does, or to `/models/NAME`."""
    route = route_in(core, lambda refused: {"error": refused.message, "code": refused.code})
    router = APIRouter(tags=["huggingface"], route_class=route)

    async def answer(request: Request, model: str | None) -> Response:
        """A picture of the prompt, in the type that the request accepts."""
        wanted = TextToImage.model_validate(await json_body(request))
        kind = _accepted(request.headers.get("accept", ""))
        uploads = await with_controls(wanted.parameters.controls)
        asked = wanted.request().model_copy(update={"model": model})
        jobs = await all_made(core, request, [asked], uploads=uploads)
        [png] = await pngs_of(core, jobs)
        headers = {"x-seed": str(jobs[0].request.seed), "Cache-Control": "no-store"}
        content = await asyncio.to_thread(converted, png, kind, provenance=core.provenance)
        return Response(content, media_type=MEDIA_TYPES[kind], headers=headers)

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
