"""What the dialects share: refusals in a shape of their own, bodies as JSON, base64 and formats."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from PIL import Image
from pydantic import BaseModel, ValidationError

from darkroom.serve.bodies import check_values
from darkroom.serve.core import Core
from darkroom.serve.refused import Refused
from darkroom.serve.request import Job

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Shape = Callable[[Refused], dict[str, Any]]
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


def route_in(core: Core, shape: Shape, *, invalid: int = 422) -> type[APIRoute]:
    """A class of routes whose refusals are told as `shape` has them; `invalid` is the status of a mistake."""

    class Dialect(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def told(request: Request) -> Response:
                try:
                    return await handle(request)
                except (RequestValidationError, ValidationError) as error:
                    refused = of_validation(error.errors())
                except Refused as error:
                    refused = error
                core.metrics.refused.labels(refused.code).inc()
                status = invalid if refused.status == 422 else refused.status
                return JSONResponse(shape(refused), status, headers=refused.headers)

            return told

    return Dialect


def of_validation(errors: Sequence[Any]) -> Refused:
    """The first mistake, by the field's name; the value given is not repeated."""
    first = errors[0]
    where = [str(part) for part in first["loc"]]
    if where and where[0] in ("body", "query", "path", "header"):  # not a field that is called so
        del where[0]
    param = ".".join(where)[:200] or None
    if first["type"] == "json_invalid":
        return Refused(400, "bad_request", "the body is no JSON that can be read")
    message = str(first["msg"]).encode("ascii", "replace").decode()[:500]
    codes = {"extra_forbidden": "unknown_field", "missing": "missing_field"}
    code = codes.get(first["type"], "invalid_value")
    return Refused(422, code, f"{param}: {message}" if param else message, param=param)


async def json_body(request: Request) -> Any:
    """The body as JSON, whatever its content type says."""
    content = await request.body()
    check_values(content)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "bad_request", "the body is no JSON that can be read") from error


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a body that a handler reads by itself."""
    schema = model.model_json_schema()
    whole = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _inlined(part: Any, definitions: dict[str, Any]) -> Any:
    """A schema with its definitions in place: those of the whole document are elsewhere."""
    if isinstance(part, list):
        return [_inlined(one, definitions) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(one, definitions) for name, one in part.items()}


async def pngs_of(core: Core, jobs: Sequence[Job]) -> list[bytes]:
    """The pictures of done jobs, one after the other."""
    return [picture.png for job in jobs for picture in await core.pictures(job.id, key=job.key)]


def converted(png: bytes, kind: str, quality: int = 92) -> bytes:
    """A PNG of the server's as JPEG or WEBP; PNG stays as it is, with its parameters."""
    if kind == "PNG":
        return png
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
        image.convert("RGB").save(buffer, kind, quality=quality)
    return buffer.getvalue()


def encoded(content: bytes) -> str:
    """Bytes as base64."""
    return base64.b64encode(content).decode()


def decoded(text: str, param: str) -> bytes:
    """Base64, perhaps as a data URL, to bytes. An address is never followed."""
    if text.startswith(("http:", "https:", "file:")):
        raise Refused(
            422, "invalid_picture", f"{param}: pictures come as base64, not by address", param=param
        )
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(422, "invalid_picture", f"{param}: no base64 that can be read", param=param) from error
