"""The native endpoints: jobs by id, their events and pictures, and what the server says of itself."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from darkroom.sample.control import find_map
from darkroom.serve.api.shared import (
    caller,
    check_signature,
    choices,
    control_pictures,
    decoded,
    repeatable_ids,
    sse,
    with_heartbeat,
)
from darkroom.serve.engine.tickets import png_of
from darkroom.serve.jobs.admission import check_map, checked_picture, served_maps
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import (
    JOB_ID,
    MOST_CONTROLS,
    ControlGiven,
    Event,
    Job,
    PictureRequest,
    Refused,
    State,
    Uploads,
)

JobId = Annotated[str, Path(pattern=f"^{JOB_ID}$", description="1 to 64 letters, digits, '-' or '_'")]
Index = Annotated[int, Path(ge=0, le=1000)]
PNG = {200: {"content": {"image/png": {}}, "description": "the picture"}}


class JobRequest(PictureRequest):
    """A picture request, perhaps with the pictures it starts from."""

    image: str | None = Field(None, description="PNG, JPEG or WebP in base64, to start from")
    mask: str | None = Field(None, description="the same, white where it is redone")
    controls: tuple[ControlGiven, ...] = Field(
        (), max_length=MOST_CONTROLS, description="nets of the server's folder, each with a picture"
    )

    def apart(self) -> tuple[PictureRequest, Uploads | None]:
        """The request, and the pictures as bytes."""
        pictures = {"image", "mask", "controls"}
        fields = {name: getattr(self, name) for name in self.model_fields_set - pictures}
        image, mask = (
            None if text is None else decoded(text, name)
            for name, text in (("image", self.image), ("mask", self.mask))
        )
        wanted = PictureRequest(**fields, controls=choices(self.controls))
        uploads = Uploads(image, mask, control_pictures(self.controls))
        return wanted, None if uploads == Uploads() else uploads


class MapRequest(BaseModel):
    """A picture, and what is to be made of it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image: str = Field(description="PNG, JPEG or WebP in base64")
    map: str = Field(max_length=40, description="one of `maps` of /model")


def _plain_job(job: Job) -> dict[str, Any]:
    """A job as JSON has it."""
    values = {name: value for name, value in vars(job).items() if name not in ("uid", "key")}
    return values | {"request": job.request.model_dump(mode="json")}


def health_router(core: Core) -> APIRouter:
    """Whether the process lives, and whether it takes jobs."""
    router = APIRouter(tags=["health"])

    @router.get("/live")
    async def live() -> dict[str, str]:
        """The process answers. 503 where only a restart helps."""
        if (trouble := core.pool.trouble) is not None:
            raise Refused(503, "broken", trouble)
        return {"state": "live"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether new jobs are taken; if not, why."""
        trouble = core.trouble()
        if trouble is not None:
            raise Refused(503, trouble[0], trouble[1], retry_after_s=5)
        return {"state": "ready"}

    return router


def jobs_router(core: Core) -> APIRouter:
    """Jobs, their events and their pictures."""
    router = APIRouter(tags=["jobs"])

    @router.post("/jobs", status_code=202)
    async def submit(body: JobRequest, request: Request) -> dict[str, Any]:
        """A new job under an id of the server's; sent again with the same Idempotency-Key it is that job."""
        wanted, uploads = await asyncio.to_thread(body.apart)
        job_id = next(iter(repeatable_ids(request, 1)), None)
        return _plain_job(await core.submit(wanted, key=caller(request), job_id=job_id, uploads=uploads))

    @router.put("/jobs/{job_id}", status_code=202)
    async def put(job_id: JobId, body: JobRequest, request: Request) -> dict[str, Any]:
        """A job under an id of yours. Sent twice it is the same job; with another body it is refused."""
        wanted, uploads = await asyncio.to_thread(body.apart)
        return _plain_job(await core.submit(wanted, key=caller(request), job_id=job_id, uploads=uploads))

    @router.get("/jobs")
    async def jobs(
        request: Request,
        state: State | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        before: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    ) -> dict[str, Any]:
        """Your jobs, newest first; `before` is the `created_s` of the last one already seen."""
        found = await core.jobs(key=caller(request), state=state, limit=limit, before=before)
        return {"jobs": [_plain_job(job) for job in found]}

    @router.get("/jobs/{job_id}")
    async def job(
        job_id: JobId,
        request: Request,
        wait_s: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False)] = 0.0,
    ) -> dict[str, Any]:
        """A job as it is now, or after up to `wait_s` seconds, as soon as it is over."""
        return _plain_job(await core.get(job_id, key=caller(request), wait_s=wait_s))

    @router.delete("/jobs/{job_id}")
    async def cancel(job_id: JobId, request: Request) -> dict[str, Any]:
        """Cancel a job: its rows are free at the next step. One that is over stays as it is."""
        return _plain_job(await core.cancel(job_id, key=caller(request)))

    @router.get("/jobs/{job_id}/events", response_class=StreamingResponse)
    async def events(
        job_id: JobId,
        request: Request,
        last_event_id: Annotated[int | None, Header(ge=0, le=2**53)] = None,
    ) -> StreamingResponse:
        """Server-sent events: queued, step, preview, and at last done, failed or cancelled."""
        key = caller(request)
        await core.get(job_id, key=key)
        stream = _lines(core.events(job_id, key=key, after=last_event_id or 0))
        return StreamingResponse(
            with_heartbeat(stream), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    @router.get("/jobs/{job_id}/pictures/{index}", response_class=Response, responses=PNG)  # type: ignore[arg-type]
    async def picture(job_id: JobId, index: Index, request: Request) -> Response:
        """A picture of a done job, as PNG with its parameters inside."""
        found = await core.picture(await core.get(job_id, key=caller(request)), index)
        return Response(found.png, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    @router.get("/signed/{uid}/{index}.png", response_class=Response, responses=PNG)  # type: ignore[arg-type]
    async def signed(
        uid: Annotated[str, Path(pattern="^[0-9a-f]{32}$")],
        index: Index,
        until: Annotated[int, Query(ge=0, le=2**53)],
        signature: Annotated[str, Query(pattern="^[0-9a-f]{64}$")],
    ) -> Response:
        """A picture by a signed address, which needs no key."""
        check_signature(core, uid, index, until, signature)
        found = await core.picture_by_uid(uid, index)
        return Response(found.png, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    return router


async def _lines(events: AsyncIterator[Event]) -> AsyncGenerator[str]:
    async for event in events:
        data = dict(event.data)
        if "png" in data:
            data["png"] = base64.b64encode(data["png"]).decode()
        yield sse(data, event=event.kind, number=event.id)


def server_router(core: Core) -> APIRouter:
    """The server about itself."""
    router = APIRouter(tags=["server"])

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        """Queue, rows on their way and their steps (those of other keys without their job), the bounds in
        force, those of your key, and what of its day's pictures is used."""
        values = asdict(core.status())
        for row in values["rows"]:
            if row.pop("key") != caller(request):
                row["job"] = None
        own = core.limits.of_key(caller(request)).model_dump()
        values["key"] = {**own, "pictures_today": await core.used_today(caller(request))}
        values["limits"] = core.limits.model_dump(exclude={"keys"})
        return values

    @router.get("/model")
    async def model(name: Annotated[str | None, Query(max_length=500)] = None) -> dict[str, Any]:
        """A model (the first for no `name`), the names of all, adapters, nets, embeddings and upscalers, and
        the limits of a request."""
        return {
            **asdict(core.catalogue.card(name)),
            "models": [card.name for card in core.catalogue.models()],
            "adapters": [asdict(card) for card in core.catalogue.adapters(name)],
            "controls": [asdict(card) for card in core.catalogue.nets(name)],
            "embeddings": [one.name for one in core.catalogue.embeddings(name).loaded],
            "upscalers": core.catalogue.upscalers.names(),
            "maps": served_maps(),
            "limits": core.limits.model_dump(exclude={"keys"}),
        }

    @router.post("/maps", response_class=Response, responses=PNG)  # type: ignore[arg-type]
    async def map_of(body: MapRequest, request: Request) -> Response:
        """What a net would see of a picture: its map, as PNG."""
        check_map(body.map)

        def made() -> bytes:
            image = checked_picture(decoded(body.image, "image"), core.limits, "image")
            return png_of(find_map(body.map)(image.convert("RGB")))

        return Response(await core.bench.do(caller(request), made), media_type="image/png")

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Prometheus' text format. Of what is counted by key only your own; `--metrics-port` has all."""
        text = core.metrics.text_for(caller(request))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
