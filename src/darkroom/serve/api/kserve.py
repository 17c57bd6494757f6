"""KServe's v2 protocol (open inference): health, the models' metadata, and infer with BYTES tensors.

Prompts come as a BYTES tensor `prompt`; everything else may come as a tensor of one value for all or one for
each prompt, or in the request's `parameters`. darkroom's own settings and `controls` are parameters of all
prompts; those that are lists or objects may be given as their JSON.
The answer's tensor `image` holds base64 pictures. Each model has one version, 1, which may be named.
"""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Request
from pydantic import BaseModel, ConfigDict, Field

import darkroom
from darkroom.serve.api.shared import (
    MEDIA_TYPES,
    STRUCTURED,
    all_made,
    choices,
    converted,
    encoded,
    pngs_of,
    read_value,
    route_in,
    sent,
    with_controls,
)
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import ControlGiven, OwnSettings, PictureRequest, Refused

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
Name = Annotated[str, Path(max_length=500)]
Version = Annotated[str, Path(max_length=20)]


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
        core.card(name)
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
        core.card(name)
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
    core.card(name)
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
