"""The dialects of platforms that run servers: Vertex AI, Hugging Face's Inference Endpoints, KServe."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi import Path as PathParam
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

import darkroom
from darkroom.errors import InputError
from darkroom.sample.provenance import Provenance
from darkroom.serve.api.shared import (
    MEDIA_TYPES,
    STRUCTURED,
    all_made,
    body_of,
    choices,
    converted,
    decoded,
    encoded,
    json_body,
    pngs_of,
    read_value,
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
    Uploads,
)
from darkroom.serve.settings import VertexRoutes
from darkroom.serve.status import ModelCard

# ---- Vertex AI
#
# Vertex AI's custom container: health and prediction at the addresses that the platform says.
#
# `instances` have either a `prompt` (as Imagen has it: predictions with `bytesBase64Encoded`) or a `text` (as
# Model Garden's diffusion containers have it: predictions with `output`). Answers are JPEG, under 1.5 MB.

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
        _check_answer(body, core.catalogue.card(body.parameters.model))
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
        jpegs: list[bytes] = []
        for png in pngs:
            jpegs.append(converted(png, "JPEG", quality, provenance))
            if sum(len(jpeg) + 200 for jpeg in jpegs) * 4 / 3 > most_bytes:
                break
        else:
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


# ---- Hugging Face
#
# Hugging Face's text-to-image and image-to-image: `inputs` and `parameters` in, a picture's bytes out.

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
    async def of_model(name: Annotated[str, PathParam(max_length=500)], request: Request) -> Response:
        """The same, by the model's name."""
        core.catalogue.card(name)  # 404 before the body is read
        return await answer(request, name)

    return router


def _accepted(accept: str) -> str:
    """The first format that the client names; PNG where it names none."""
    for part in accept.lower().split(","):
        for kind, media in MEDIA_TYPES.items():
            if part.partition(";")[0].strip() == media:
                return kind
    return "PNG"


# ---- KServe
#
# KServe's v2 protocol (open inference): health, the models' metadata, and infer with BYTES tensors.
#
# Prompts come as a BYTES tensor `prompt`; everything else may come as a tensor of one value for all or one
# for each prompt, or in the request's `parameters`. darkroom's own settings and `controls` are parameters of
# all prompts; those that are lists or objects may be given as their JSON.
# The answer's tensor `image` holds base64 pictures. Each model has one version, 1, which may be named.

MOST_VALUES = 1000
TENSORS = {
    "prompt": ("prompt", "BYTES"),
    "negative_prompt": ("negative", "BYTES"),
    "seed": ("seed", "INT"),
    "num_inference_steps": ("steps", "INT"),
    "steps": ("steps", "INT"),
    "guidance_scale": ("guidance", "FP"),
    "width": ("width", "INT"),
    "height": ("height", "INT"),
    "solver": ("solver", "BYTES"),
}
"""Names of tensors and parameters: the field each is, and the start of its datatype."""
VERSION = "1"
Name = Annotated[str, PathParam(max_length=500)]
Version = Annotated[str, PathParam(max_length=20)]


class Tensor(BaseModel):
    """A tensor with its values in the JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(max_length=100)
    shape: list[Annotated[int, Field(ge=1, le=MOST_VALUES)]] = Field(min_length=1, max_length=4)
    datatype: str = Field(max_length=10)
    data: list[Any] = Field(max_length=MOST_VALUES)
    parameters: dict[str, Any] = Field(default_factory=dict)


class Output(BaseModel):
    """An output that is asked for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Literal["image"]
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferRequest(BaseModel):
    """The body of infer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = Field(None, max_length=200)
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: list[Tensor] = Field(min_length=1, max_length=20)
    outputs: list[Output] = Field(default_factory=list, max_length=1)


def kserve_router(core: Core) -> APIRouter:
    """The `/v2` routes."""
    route = route_in(core, lambda refused: {"error": refused.message, "code": refused.code})
    router = APIRouter(prefix="/v2", tags=["kserve"], route_class=route)

    _add_server_routes(router, core)

    @router.get("/models/{name}")
    async def model(name: Name) -> dict[str, Any]:
        """A model's tensors."""
        core.catalogue.card(name)
        types = {"BYTES": "BYTES", "INT": "INT64", "FP": "FP32"}
        inputs = [{"name": one, "datatype": types[kind], "shape": [-1]} for one, (_, kind) in TENSORS.items()]
        outputs = [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
        about = {"name": name, "versions": [VERSION], "platform": "darkroom"}
        return {**about, "inputs": inputs, "outputs": outputs}

    @router.get("/models/{name}/versions/{version}")
    async def model_version(name: Name, version: Version) -> dict[str, Any]:
        """The same of a version."""
        _check_version(version)
        return await model(name)

    @router.get("/models/{name}/ready")
    async def model_ready(name: Name) -> dict[str, Any]:
        """Whether the model takes requests; one that is not loaded is, once asked for."""
        core.catalogue.card(name)
        _check_ready(core)
        return {"name": name, "ready": True}

    @router.get("/models/{name}/versions/{version}/ready")
    async def model_version_ready(name: Name, version: Version) -> dict[str, Any]:
        """The same of a version."""
        _check_version(version)
        return await model_ready(name)

    @router.post("/models/{name}/infer")
    async def infer(
        name: Name,
        body: InferRequest,
        request: Request,
        inference_header_content_length: Annotated[str | None, Header(max_length=20)] = None,
    ) -> dict[str, Any]:
        """Pictures of the prompts in the tensor `prompt`."""
        return await _inferred(core, name, body, request, inference_header_content_length is not None)

    @router.post("/models/{name}/versions/{version}/infer")
    async def infer_version(
        name: Name,
        version: Version,
        body: InferRequest,
        request: Request,
        inference_header_content_length: Annotated[str | None, Header(max_length=20)] = None,
    ) -> dict[str, Any]:
        """The same by a version."""
        _check_version(version)
        return await infer(name, body, request, inference_header_content_length)

    return router


def _add_server_routes(router: APIRouter, core: Core) -> None:
    """The server itself, its health, and its models."""

    @router.get("")
    async def server() -> dict[str, Any]:
        """What this server is."""
        return {"name": "darkroom", "version": darkroom.__version__, "extensions": ["model_repository"]}

    @router.post("/repository/index")
    async def index() -> list[dict[str, str]]:
        """The models, as Triton's model repository lists them: a released one is loaded when asked for."""
        _check_ready(core)
        return [
            {"name": one["name"], "version": VERSION, "state": "READY", "reason": one["state"]}
            for one in core.status().models
        ]

    @router.get("/health/live")
    async def live() -> dict[str, bool]:
        """The process answers. 503 where only a restart helps."""
        if (trouble := core.pool.trouble) is not None:
            raise Refused(503, "broken", trouble)
        return {"live": True}

    @router.get("/health/ready")
    async def ready() -> dict[str, bool]:
        """Whether new requests are taken."""
        _check_ready(core)
        return {"ready": True}


async def _inferred(
    core: Core, name: str, body: InferRequest, request: Request, binary: bool
) -> dict[str, Any]:
    """The answer of `infer`."""
    core.catalogue.card(name)
    if binary:
        raise Refused(415, "binary", "tensors in the JSON only, not in a binary part")
    kind = _format(body)
    controls: list[ControlGiven] = read_value("controls", body.parameters.pop("controls", []))
    own = {
        field: body.parameters.pop(field) for field in OwnSettings.model_fields if field in body.parameters
    }
    own |= {field: read_value(field, own[field]) for field in STRUCTURED if field in own}
    own |= {"controls": choices(controls), "model": name}
    wanted = _requests_of(body, own, core.limits.pictures)
    jobs = await all_made(core, request, wanted, uploads=await with_controls(controls))
    pngs = await pngs_of(core, jobs)
    marks = core.provenance
    pictures = await asyncio.to_thread(
        lambda: [encoded(sent(converted(png, kind, provenance=marks))) for png in pngs]
    )
    output = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [len(pictures)],
        "parameters": {"content_type": MEDIA_TYPES[kind], "encoding": "base64"},
        "data": pictures,
    }
    answer = {
        "model_name": name,
        "model_version": VERSION,
        "outputs": [output],
        "parameters": {"seeds": _seeds(jobs)},
    }
    return answer if body.id is None else {"id": body.id, **answer}


def _seeds(jobs: Any) -> list[int]:
    return [job.request.seed for job in jobs]


def _check_ready(core: Core) -> None:
    trouble = core.trouble()
    if trouble is not None:
        raise Refused(503, trouble[0], trouble[1], retry_after_s=5)


def _check_version(given: str) -> None:
    """404 for a version that no model has."""
    if given != VERSION:
        raise Refused(404, "model_not_found", f"version: each has {VERSION} alone", param="version")


def _format(body: InferRequest) -> str:
    given = body.outputs[0].parameters.get("format", "PNG") if body.outputs else "PNG"
    if not isinstance(given, str) or given.upper() not in MEDIA_TYPES:
        raise Refused(422, "invalid_value", "outputs: format is png, jpeg or webp", param="outputs")
    return given.upper()


def _requests_of(body: InferRequest, own: dict[str, Any], most: int) -> list[PictureRequest]:
    """One request for each prompt; `own` is what all have."""
    columns: dict[str, list[Any]] = {}
    for tensor in body.inputs:
        field, kind = _known(tensor.name)
        if field in columns:
            raise Refused(422, "invalid_value", f"{tensor.name}: given twice", param=tensor.name)
        columns[field] = _values(tensor, kind)
    for name, value in body.parameters.items():
        field, _ = _known(name)
        columns.setdefault(field, [value])
    if "prompt" not in columns:
        raise Refused(422, "missing_field", "prompt: a BYTES tensor of prompts", param="prompt")
    num = len(columns["prompt"])
    if num > most:
        raise Refused(422, "over_limit", f"prompt: at most {most}", param="prompt")
    for field, values in columns.items():
        if len(values) not in (1, num):
            raise Refused(422, "invalid_value", f"{field}: one value, or one for each prompt", param=field)
    rows = [{field: values[i % len(values)] for field, values in columns.items()} for i in range(num)]
    if len(columns.get("seed", ())) == 1 and num > 1 and isinstance(rows[0]["seed"], int):
        rows = [{**row, "seed": row["seed"] + i} for i, row in enumerate(rows)]
    return [PictureRequest.model_validate({**row, **own}) for row in rows]


def _known(name: str) -> tuple[str, str]:
    if name not in TENSORS:
        shown = name[:100].encode("ascii", "replace").decode()
        raise Refused(422, "unknown_field", f"{shown}: known are {', '.join(TENSORS)}", param=shown)
    return TENSORS[name]


def _values(tensor: Tensor, kind: str) -> list[Any]:
    """The values of a tensor in one row; 422 unless datatype and shape fit them."""
    if not tensor.datatype.startswith(kind) and not (kind == "INT" and tensor.datatype.startswith("UINT")):
        raise Refused(422, "invalid_value", f"{tensor.name}: datatype {kind}", param=tensor.name)
    values = _flat(tensor.data)
    if len(values) != math.prod(tensor.shape):
        raise Refused(422, "invalid_value", f"{tensor.name}: shape and data differ", param=tensor.name)
    return values


def _flat(data: list[Any]) -> list[Any]:
    while any(isinstance(one, list) for one in data) and len(data) <= MOST_VALUES:
        data = [one for part in data for one in (part if isinstance(part, list) else [part])]
    return data
