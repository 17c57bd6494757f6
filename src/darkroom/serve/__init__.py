"""The server: one job core, and doors of several dialects in front of it.

What a door (a file of `http/`) needs is all here; it translates a dialect to a `PictureRequest` and back:

    core.submit(request, key=, job_id=None, uploads=None) -> Job    accepted for good, or raises `Refused`
    core.get(job_id, key=) -> Job                                   as it is now
    core.jobs(key=, state=None, limit=100, before=None) -> list[Job]  newest first
    core.events(job_id, key=, after=0) -> async iterator of Event   ends with done, failed or cancelled
    core.finished(job_id, key=) -> Job                              waits for the end
    core.cancel(job_id, key=) -> Job                                its rows are free at the next step
    core.pictures(job_id, key=) -> list[StoredPicture]              PNG bytes and parameters
    core.model -> ModelCard; core.adapters() -> list[AdapterCard]; core.status() -> Status; core.limits

All but `model`, `adapters`, `status` and `limits` are coroutines (`events` an async generator), to be called
from the server's event loop. `key` is the name of the caller's key: jobs of another key do not exist for it.
`http.common` has what doors share: the caller's key, and `all_made`, which cancels jobs when their client
leaves.

A new dialect is a function `core -> APIRouter` in a file of `http/`, named in `app.ROUTERS`. Whatever raises
`Refused` is answered in one shape (`guard.error_object`), with its status and Retry-After; a dialect of
another shape catches it itself. A body that a pydantic model refuses becomes a 422 with the field's name.
Every path needs a key where the server has keys, unless it is one of `app.OPEN_PATHS`.

`request` says what a picture request may hold; `limits` bounds it. `fairness` picks who is next, `engine` is
the thread that owns the model and packs rows anew for each step, `library` keeps the bank of adapters full.
`store` keeps jobs durably, `results` their pictures. `core` joins these, with `loop` (the event loop's side),
`lives` (jobs that are not over), `endings`, `watchers` and `house`; `sharing`, `leases` and `files` make one
server of several on a database. `hooks` are the operator's own functions. `guard` and `keys` decide who may
come in; `metrics` counts; `app` puts the doors together and `process` runs them until told to stop.
"""

from darkroom.serve.errors import Refused
from darkroom.serve.request import AdapterChoice, Event, Job, PictureRequest, StoredPicture, Uploads
from darkroom.serve.settings import Limits

__all__ = ["AdapterChoice", "Event", "Job", "Limits", "PictureRequest", "Refused", "StoredPicture", "Uploads"]
