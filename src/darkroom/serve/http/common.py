"""What all dialects share: the caller, jobs while their client is connected, signed addresses, events."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from fastapi import Request

from darkroom.serve.core import Core
from darkroom.serve.refused import Refused
from darkroom.serve.request import Job, PictureRequest, Uploads

HEARTBEAT_S = 10.0
SIGNED_S = 3600


def caller(request: Request) -> str:
    """The name of the key that the caller came in with."""
    name: str = request.state.key
    return name


async def all_made(
    core: Core,
    request: Request,
    wanted: Sequence[PictureRequest],
    *,
    uploads: Uploads | None = None,
    ids: Sequence[str] = (),
) -> list[Job]:
    """Submit and wait for all; where one fails or the client leaves, the others are cancelled."""
    key, jobs = caller(request), []
    try:
        for i, one in enumerate(wanted):
            job_id = ids[i] if ids else None
            jobs.append(await core.submit(one, key=key, uploads=uploads, job_id=job_id))
        return await _all_finished(core, request, jobs)
    except BaseException:
        cancelled = (core.cancel(job.id, key=key) for job in jobs)  # of no effect on a job that is over
        await asyncio.gather(*cancelled, return_exceptions=True)
        raise


async def _all_finished(core: Core, request: Request, jobs: Sequence[Job]) -> list[Job]:
    async def one(job: Job) -> Job:
        with core.attended(job):
            return checked(await core.finished(job.id, key=job.key))

    whole = asyncio.ensure_future(asyncio.gather(*(one(job) for job in jobs)))
    gone = asyncio.ensure_future(disconnected(request))
    try:
        futures: set[asyncio.Future[Any]] = {whole, gone}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            raise Refused(499, "client_left", "the client left")
        return list(whole.result())
    finally:
        for task in (whole, gone):
            task.cancel()


async def disconnected(request: Request) -> None:
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
    told = f"{uid}/{index}/{until}".encode()
    return hmac.new(core.results.secret, told, hashlib.sha256).hexdigest()


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
