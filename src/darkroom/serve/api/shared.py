"""What all dialects share: the caller, jobs while their client is connected, signed addresses, events."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import io
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from PIL import Image
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from darkroom.errors import fault_of
from darkroom.sample.provenance import Provenance, save_with_metadata
from darkroom.serve import logs
from darkroom.serve.api.guard import check_values
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import (
    MOST_ADAPTERS,
    MOST_CONTROLS,
    AdapterChoice,
    ControlChoice,
    ControlGiven,
    ControlUpload,
    HiresChoice,
    Job,
    PictureRequest,
    Refused,
    Uploads,
)

HEARTBEAT_S = 10.0
SIGNED_S = 3600
MOST_IDEMPOTENCY_KEY = 255


def caller(request: Request) -> str:
    """The name of the key that the caller came in with."""
    name: str = request.state.key
    return name


CLIENT_LEFT = 499
"""nginx's status; nobody is there to read it."""


async def all_made(
    core: Core,
    request: Request,
    wanted: Sequence[PictureRequest],
    *,
    uploads: Uploads | None = None,
    prefix: str = "",
) -> list[Job]:
    """Submit and wait for all; where one fails or the client leaves, the others are cancelled.

    With an Idempotency-Key they go on where the client leaves: it will ask again, and finds them. `prefix`
    begins the jobs' ids.
    """
    key, jobs = caller(request), []
    repeatable = repeatable_ids(request, len(wanted), prefix)
    ids = repeatable or ([f"{prefix}{uuid.uuid4().hex}" for _ in wanted] if prefix else [])
    if len(wanted) > 1:
        await core.check_together(wanted, key=key, ids=ids)
    try:
        for i, one in enumerate(wanted):
            job_id = ids[i] if ids else None
            jobs.append(await core.submit(one, key=key, uploads=uploads, job_id=job_id, together=wanted))
    except BaseException:
        if not repeatable:
            await _cancel_all(core, jobs)
        raise
    try:
        return await all_finished(core, request, jobs)
    except BaseException as error:
        if not (repeatable and _comes_again(error)):
            await _cancel_all(core, jobs)
        raise


def _comes_again(error: BaseException) -> bool:
    """Whether a request that may be sent again is of use then: no job of it has failed."""
    if not isinstance(error, Refused):
        return True
    return error.status == CLIENT_LEFT or error.retry_after_s is not None


async def _cancel_all(core: Core, jobs: Sequence[Job]) -> None:
    """Of no effect on a job that is over."""
    await asyncio.gather(*(core.cancel(job.id, key=job.key) for job in jobs), return_exceptions=True)


def repeatable_ids(request: Request, num: int, prefix: str = "") -> list[str]:
    """The ids of a request's jobs where it has an `Idempotency-Key`, so that sent again it finds them."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return []
    if not 1 <= len(given) <= MOST_IDEMPOTENCY_KEY:
        digest = f"Idempotency-Key: 1 to {MOST_IDEMPOTENCY_KEY} characters"
        raise Refused(422, "invalid_value", digest, param="Idempotency-Key")
    digest = hashlib.sha256(f"{request.method} {request.url.path}\n{given}".encode()).hexdigest()[:40]
    return [f"{prefix or 'idem-'}{digest}-{i}" for i in range(num)]


async def all_finished(core: Core, request: Request, jobs: Sequence[Job]) -> list[Job]:
    """The jobs once all are done; Refused where one ends otherwise, or the client leaves."""

    async def one(job: Job) -> Job:
        with core.attended(job):
            return checked(await core.finished(job.id, key=job.key))

    whole = asyncio.ensure_future(asyncio.gather(*(one(job) for job in jobs)))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        futures: set[asyncio.Future[Any]] = {whole, gone}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            raise Refused(CLIENT_LEFT, "client_left", "the client left")
        return list(whole.result())
    finally:
        for task in (whole, gone):
            task.cancel()
        await asyncio.gather(
            whole, gone, return_exceptions=True
        )  # else what a job ended with is logged as lost


async def _disconnected(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


STATUSES = {"cancelled": 410, "withheld": 400, "invalid_value": 422, "deadline": 504}
"""Of jobs that ended without pictures, by their error's code; 500 for all others."""


def checked(job: Job) -> Job:
    """The job, if it is done. No status here is one after which a client should ask again."""
    if job.state == "done":
        return job
    error = job.error or {"code": job.state, "message": f"the job was {job.state}"}
    raise Refused(STATUSES.get(error["code"], 500), error["code"], error["message"])


def sign(core: Core, uid: str, index: int, now_s: float | None = None) -> str:
    """The path of a picture that needs no key, good for an hour."""
    until = int(time.time() if now_s is None else now_s) + SIGNED_S
    return f"/signed/{uid}/{index}.png?until={until}&signature={_signature(core, uid, index, until)}"


def check_signature(core: Core, uid: str, index: int, until: int, signature: str) -> None:
    """403 unless this server gave out the address and it is still good."""
    given = signature.encode("utf-8", "replace")  # comparing texts raises where they are not ASCII
    genuine = hmac.compare_digest(_signature(core, uid, index, until).encode(), given)
    if not genuine or until < time.time():
        raise Refused(403, "bad_signature", "the address is not, or no longer, good")


def _signature(core: Core, uid: str, index: int, until: int) -> str:
    signed = f"{uid}/{index}/{until}".encode()
    return hmac.new(core.results.secret, signed, hashlib.sha256).hexdigest()


def sse(data: dict[str, Any], *, event: str | None = None, number: int | None = None) -> str:
    """One server-sent event."""
    lines = [f"id: {number}"] if number is not None else []
    lines += [f"event: {event}"] if event is not None else []
    return "\n".join([*lines, f"data: {json.dumps(data)}", "", ""])


async def with_heartbeat(stream: AsyncGenerator[str], every_s: float = HEARTBEAT_S) -> AsyncIterator[str]:
    """A stream with comments in its pauses, so that nothing between takes it for dead."""
    pending: asyncio.Task[str] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(_next(stream))
            ready, _ = await asyncio.wait({pending}, timeout=every_s)
            if not ready:
                yield ": still here\n\n"
                continue
            task, pending = pending, None
            try:
                yield task.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await pending
        with suppress(Exception):
            await stream.aclose()


async def _next(stream: AsyncGenerator[str]) -> str:
    return await anext(stream)


Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Shape = Callable[[Refused], dict[str, Any]]
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


def route_in(core: Core, shape: Shape, *, invalid: int = 422) -> type[APIRoute]:
    """A class of routes whose errors look as `shape` has them; `invalid` is the status of a mistake."""

    class Dialect(APIRoute):
        def get_route_handler(self) -> Handler:
            """The route's handler, its mistakes answered in the API's shape."""
            handle = super().get_route_handler()

            async def handle_or_refuse(request: Request) -> Response:
                """Answer a request, or its mistake in the API's shape."""
                try:
                    return await handle(request)
                except (RequestValidationError, ValidationError) as error:
                    refused = of_validation(error.errors())
                except Refused as error:
                    refused = error
                logs.refused(refused.code, refused.logged)
                status = invalid if refused.status == 422 else refused.status
                return JSONResponse(shape(refused), status, headers=refused.headers)

            return handle_or_refuse

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
    message = fault_of(first).encode("ascii", "replace").decode()[:500]
    codes = {"extra_forbidden": "unknown_field", "missing": "missing_field"}
    code = codes.get(first["type"], "invalid_value")
    return Refused(422, code, f"{param or 'the body'}: {message}", param=param)


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


def converted(png: bytes, kind: str, quality: int = 92, provenance: Provenance | None = None) -> bytes:
    """A PNG of the server's as JPEG or WEBP, with credentials of its own; PNG stays as it is."""
    if kind == "PNG":
        return png
    with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
        content = save_with_metadata(image, kind, quality)
    return content if provenance is None else provenance.converted(content, kind, png)


def sent(content: bytes) -> bytes:
    """A picture's file that the request at hand is answered with: its line in the log has the hash."""
    logs.sent(content)
    return content


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


def choices(given: Sequence[ControlGiven]) -> tuple[ControlChoice, ...]:
    """Controls as a request has them."""
    return tuple(one.choice for one in given)


STRUCTURED: dict[str, TypeAdapter[Any]] = {
    "controls": TypeAdapter(Annotated[list[ControlGiven], Field(max_length=MOST_CONTROLS)]),
    "adapters": TypeAdapter(Annotated[list[AdapterChoice], Field(max_length=MOST_ADAPTERS)]),
    "hires": TypeAdapter(HiresChoice | None),
}
"""Settings that are lists or objects, and what they must be."""


def read_value(name: str, given: Any) -> Any:
    """A setting of `STRUCTURED` in a dialect that has texts and numbers alone: as it is, or as its JSON."""
    try:
        if isinstance(given, str):
            check_values(given.encode("utf-8", "replace"))
            value = STRUCTURED[name].validate_json(given)
        else:
            value = STRUCTURED[name].validate_python(given)
    except ValidationError as error:
        refused = of_validation(error.errors())
        param = ".".join(filter(None, (name, refused.param)))
        raise Refused(422, refused.code, f"{name}: {refused.message}", param=param) from error
    return tuple(value) if name == "adapters" else value


def control_pictures(given: Sequence[ControlGiven]) -> tuple[ControlUpload, ...]:
    """The pictures of controls as bytes. Takes a while."""
    return tuple(
        ControlUpload(
            decoded(one.image, f"controls.{i}.image"),
            None if one.mask is None else decoded(one.mask, f"controls.{i}.mask"),
        )
        for i, one in enumerate(given)
    )


async def with_controls(given: Sequence[ControlGiven], uploads: Uploads | None = None) -> Uploads | None:
    """A request's pictures with those of its controls."""
    if not given:
        return uploads
    pictures = await asyncio.to_thread(control_pictures, given)
    return replace(uploads or Uploads(), controls=pictures)
