"""Vertex AI's custom container: health and prediction at the addresses that the platform says.

`instances` have either a `prompt` (as Imagen has it: predictions with `bytesBase64Encoded`) or a `text` (as
Model Garden's diffusion containers have it: predictions with `output`). Answers are JPEG, under 1.5 MB.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from darkroom.errors import InputError
from darkroom.sample.provenance import Provenance
from darkroom.serve.api.shared import (
    MEDIA_TYPES,
    all_made,
    choices,
    converted,
    encoded,
    pngs_of,
    route_in,
    sent,
    with_controls,
)
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import (
    MAX_SEED,
    MOST_CONTROLS,
    AdapterChoice,
    ControlGiven,
    Job,
    OwnSettings,
    PictureRequest,
    Refused,
)
from darkroom.serve.settings import VertexRoutes
from darkroom.serve.status import ModelCard

MOST_BYTES = 1_400_000
"""Of all pictures of an answer in base64: the public endpoint ends at 1.5 MB."""
QUALITIES = (95, 90, 85, 80, 70, 60, 50, 40, 30, 20, 10, 5, 1)
PIXEL_BYTES, PICTURE_BYTES = 0.06, 12_000
"""Of a JPEG of noise at the least quality; and of the credentials of one, which hold its texts besides."""
ROUTE = r"/[A-Za-z0-9_./:@-]*"


class Instance(BaseModel):
    """One picture's prompt, in either form."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = Field(None, min_length=1, max_length=100_000)
    text: str | None = Field(None, min_length=1, max_length=100_000)

    @model_validator(mode="after")
    def _one_of_both(self) -> Instance:
        if (self.prompt is None) == (self.text is None):
            raise ValueError("an instance has a prompt, or a text")
        return self


class VertexParameters(OwnSettings):
    """Of all instances. Model Garden's names, Imagen's where it has one, and darkroom's own settings."""

    model_config = ConfigDict(extra="forbid", strict=True)

    negative_prompt: str | None = Field(None, max_length=100_000)
    negativePrompt: str | None = Field(None, max_length=100_000)
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    guidance_scale: float | None = Field(None, ge=0, le=1000, allow_inf_nan=False)
    height: int | None = Field(None, ge=8, le=8192)
    width: int | None = Field(None, ge=8, le=8192)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    sampleCount: int = Field(1, ge=1, le=1000, description="pictures for each instance")
    lora_id: str | None = Field(None, max_length=200, description="an adapter's name; empty for none")
    lora_scale: float = Field(1.0, allow_inf_nan=False, ge=-100, le=100)
    solver: str | None = Field(None, max_length=40)
    model: str | None = Field(None, max_length=500, description="of the server's; none: its first")
    controls: list[ControlGiven] = Field(default_factory=list, max_length=MOST_CONTROLS)

    def all_adapters(self) -> tuple[AdapterChoice, ...]:
        """That of `lora_id`, then those of darkroom's own setting."""
        first = (AdapterChoice(name=self.lora_id, weight=self.lora_scale),) if self.lora_id else ()
        return (*first, *self.adapters)


class PredictRequest(BaseModel):
    """The body that the platform passes on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    instances: list[Instance] = Field(min_length=1, max_length=1000)
    parameters: VertexParameters = VertexParameters()

    def requests(self) -> list[PictureRequest]:
        """One for each instance, with seeds that follow each other."""
        parameters = self.parameters
        return [
            PictureRequest(
                prompt=one.prompt if one.prompt is not None else one.text or "",
                model=parameters.model,
                negative=parameters.negative_prompt
                if parameters.negative_prompt is not None
                else parameters.negativePrompt,
                num=parameters.sampleCount,
                seed=None if parameters.seed is None else parameters.seed + i * parameters.sampleCount,
                width=parameters.width,
                height=parameters.height,
                steps=parameters.num_inference_steps,
                guidance=parameters.guidance_scale,
                solver=parameters.solver,
                controls=choices(parameters.controls),
                **parameters.own() | {"adapters": parameters.all_adapters()},
            )
            for i, one in enumerate(self.instances)
        ]


def vertex_router(core: Core) -> APIRouter:
    """The platform's two routes; none where the server does not run on Vertex."""
    route = route_in(core, lambda refused: {"error": refused.message, "code": refused.code})
    router = APIRouter(tags=["vertex"], route_class=route)
    routes = core.settings.vertex
    if routes is None:
        return router

    @router.get(routes.health)
    async def vertex_health() -> dict[str, str]:
        """Whether new requests are taken."""
        trouble = core.trouble()
        if trouble is not None:
            raise Refused(503, trouble[0], trouble[1], retry_after_s=5)
        return {"state": "ready"}

    @router.post(routes.predict)
    async def predict(body: PredictRequest, request: Request) -> dict[str, Any]:
        """Predictions: a JPEG for each picture of each instance."""
        num = len(body.instances) * body.parameters.sampleCount
        if num > core.limits.pictures:
            raise Refused(
                422, "over_limit", f"instances: at most {core.limits.pictures} pictures", param="instances"
            )
        _check_answer(body, core.card(body.parameters.model))
        uploads = await with_controls(body.parameters.controls)
        jobs = await all_made(core, request, body.requests(), uploads=uploads)
        jpegs = await asyncio.to_thread(small_enough, await pngs_of(core, jobs), provenance=core.provenance)
        for jpeg in jpegs:
            sent(jpeg)
        pictures = [encoded(jpeg) for jpeg in jpegs]
        return {"predictions": _predictions(body, jobs, pictures)}

    return router


def _predictions(body: PredictRequest, jobs: list[Job], pictures: list[str]) -> list[dict[str, Any]]:
    asked = [one for one in body.instances for _ in range(body.parameters.sampleCount)]
    seeds = [parameters["seed"] for job in jobs for parameters in job.pictures]
    return [
        {"bytesBase64Encoded": picture, "mimeType": MEDIA_TYPES["JPEG"], "seed": seed}
        if one.prompt is not None
        else {"output": picture, "seed": seed}
        for one, picture, seed in zip(asked, pictures, seeds, strict=True)
    ]


def _check_answer(body: PredictRequest, card: ModelCard) -> None:
    """422 where the pictures might not fit into one answer: before the first of them is drawn."""
    parameters = body.parameters
    larger = parameters.hires.scale if parameters.hires is not None else 1
    width, height = (
        math.ceil(side * larger)
        for side in (parameters.width or card.width, parameters.height or card.height)
    )
    texts = max(len(f"{one.prompt}{one.negative}".encode()) for one in body.requests())
    each = width * height * PIXEL_BYTES + PICTURE_BYTES + 2 * texts
    most = int(MOST_BYTES * 3 / 4 / each)
    if len(body.instances) * parameters.sampleCount > most:
        message = f"at most {most} pictures of {width}x{height} fit into an answer of 1.5 MB"
        raise Refused(422, "too_large", message, param="instances")


def small_enough(
    pngs: list[bytes], most_bytes: int = MOST_BYTES, provenance: Provenance | None = None
) -> list[bytes]:
    """The pictures as JPEG, at the best quality at which all of them in base64 fit into one answer."""
    for quality in QUALITIES:
        jpegs = [converted(png, "JPEG", quality, provenance) for png in pngs]
        if sum(len(jpeg) + 200 for jpeg in jpegs) * 4 / 3 <= most_bytes:
            return jpegs
    raise Refused(
        422, "too_large", "the pictures do not fit into an answer of 1.5 MB: ask for fewer", param="instances"
    )


def routes_of(environment: Mapping[str, str] = os.environ) -> VertexRoutes:
    """The platform's routes and port. InputError where they cannot be used."""
    health = environment.get("AIP_HEALTH_ROUTE", "/health")
    predict = environment.get("AIP_PREDICT_ROUTE", "/predict")
    for name, route in (("AIP_HEALTH_ROUTE", health), ("AIP_PREDICT_ROUTE", predict)):
        if not re.fullmatch(ROUTE, route, re.ASCII):
            raise InputError(f"{name} '{route}'", allowed="a path such as /predict")
    port = environment.get("AIP_HTTP_PORT", "8080")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"AIP_HTTP_PORT '{port}'", allowed="1 to 65535")
    return VertexRoutes(health=health, predict=predict, port=int(port))


def model_of(environment: Mapping[str, str] = os.environ, mounted: Path = Path("/gcs")) -> str:
    """The model's folder by AIP_STORAGE_URI: a path, or a bucket that is mounted under /gcs."""
    uri = environment.get("AIP_STORAGE_URI", "")
    if not uri:
        raise InputError("no model", mend="darkroom serve MODEL, or set AIP_STORAGE_URI")
    if not uri.startswith("gs://"):
        return uri
    folder = mounted / uri.removeprefix("gs://").strip("/")
    if ".." in folder.parts or not folder.is_dir():
        raise InputError(
            f"AIP_STORAGE_URI '{uri}': '{folder}' is not there",
            mend="mount the bucket under /gcs (Cloud Storage FUSE), or put the model into the image",
        )
    return str(folder)
