"""The server: one core of durable jobs, and an API of several dialects in front of it.

A dialect (a file of `api/`) translates its requests to a `PictureRequest`, and the core's answers back:

    core.submit(request, key=, job_id=None, uploads=None) -> Job    accepted for good, or raises `Refused`
    core.get(job_id, key=) -> Job                                   as it is now
    core.jobs(key=, state=None, limit=100, before=None) -> list[Job]  newest first
    core.events(job_id, key=, after=0) -> async iterator of Event   ends with done, failed or cancelled
    core.finished(job_id, key=) -> Job                              waits for the end
    core.cancel(job_id, key=) -> Job                                its rows are free at the next step
    core.pictures(job_id, key=) -> list[StoredPicture]              PNG bytes and parameters
    core.catalogue: card(name) -> ModelCard; models(), adapters(), nets(), embeddings(): what there is to name
    core.status() -> Status; core.limits; core.glance(job_id, key=) -> PNG or None

All but `catalogue`, `glance`, `status` and `limits` are coroutines (`events` an async generator), to be
called from the server's event loop. `key` is the name of the caller's key: jobs of another key do not exist
for it. `api.shared` has what dialects share: the caller's key, and `all_made`, which cancels jobs when their
client disconnects.

A new dialect is a function `core -> APIRouter` in a file of `api/`, named in `app.ROUTERS`. Whatever raises
`Refused` is answered in one shape (`guard.error_object`), with its status and Retry-After; a dialect of
another shape catches it itself. A body that a pydantic model refuses becomes a 422 with the field's name.
Every path needs a key where the server has keys, unless it is one of `app.OPEN_PATHS`.

`request` says what a picture request may hold. `engine/` owns the models (`engine.pool`: loaded by name) and
forms the batch anew at each step, with `engine.tickets` choosing who is next. `jobs/` keeps jobs and their
pictures; `jobs.core` joins the two. `shared_queue` makes one server of several on a database. `hooks` are the
operator's own functions, `metrics` counts, and `api.app` runs the server until it is stopped.
"""

from darkroom.serve.request import AdapterChoice, Event, Job, PictureRequest, Refused, StoredPicture, Uploads
from darkroom.serve.settings import Limits, ServeSettings

__all__ = [
    "AdapterChoice",
    "Event",
    "Job",
    "Limits",
    "PictureRequest",
    "Refused",
    "ServeSettings",
    "StoredPicture",
    "Uploads",
]
