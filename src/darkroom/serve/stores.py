"""Where a server keeps its jobs and pictures, and with whom it shares them."""

from __future__ import annotations

import uuid

from darkroom.errors import InputError
from darkroom.serve.files import Files
from darkroom.serve.leases import Leases
from darkroom.serve.lives import Lives
from darkroom.serve.results import PictureFiles, Results
from darkroom.serve.settings import ServeSettings
from darkroom.serve.sharing import Sharing
from darkroom.serve.store import Store


def open_stores(settings: ServeSettings) -> tuple[PictureFiles, Store]:
    """Pictures and jobs. InputError where they cannot be kept."""
    if not settings.shared:
        results = Results(settings.state)
        return results, Store(settings.jobs or f"sqlite:///{settings.state / 'jobs.db'}", settings.name)
    if settings.jobs is None:
        raise InputError(
            "jobs that are shared, without a database", mend="give --jobs postgresql+psycopg://..."
        )
    store = Store(settings.jobs, settings.name, shared=True)
    return Files(store), store


def open_sharing(settings: ServeSettings, store: Store, lives: Lives) -> Sharing | None:
    """The server's part in a queue of several, None where it has one of its own."""
    if not settings.shared:
        return None
    leases = Leases(store, f"{settings.name}/{uuid.uuid4().hex}", settings.lease_s)
    return Sharing(leases, lives, settings.patience_s)
