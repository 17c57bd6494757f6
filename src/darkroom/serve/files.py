"""Pictures in the database, where several servers share one: any of them gives out what another drew."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import sqlalchemy as sql

from darkroom.serve.store import METADATA, Store

FILES = sql.Table(
    "darkroom_files",
    METADATA,
    sql.Column("uid", sql.String(32), primary_key=True),
    sql.Column("name", sql.String(64), primary_key=True),
    sql.Column("content", sql.LargeBinary, nullable=False),
)
SECRET_UID = "secret"


class Files:
    """What `Results` is on a disk: the files of jobs by uid. StorageError where the database takes none."""

    folder = None

    def __init__(self, store: Store) -> None:
        self._store = store
        self.secret: bytes = store.do(_secret).result()
        """Signs the addresses of pictures, the same in every server."""

    def close(self) -> None:
        """Nothing is held."""

    def write(self, uid: str, files: dict[str, bytes]) -> int:
        """Keep a job's files, by name; returns their bytes."""

        def action(connection: sql.Connection) -> None:
            of_job = FILES.c.uid == uid
            connection.execute(sql.delete(FILES).where(of_job, FILES.c.name.in_(list(files))))
            if files:
                rows = [{"uid": uid, "name": name, "content": content} for name, content in files.items()]
                connection.execute(sql.insert(FILES), rows)

        self._store.do(action).result()
        return sum(len(content) for content in files.values())

    def read(self, uid: str, name: str) -> bytes | None:
        """One file of a job, None where it is gone."""
        query = sql.select(FILES.c.content).where(FILES.c.uid == uid, FILES.c.name == name)
        future: Future[Any] = self._store.do(lambda connection: connection.execute(query).scalar())
        content = future.result()
        return None if content is None else bytes(content)

    def delete(self, uid: str, names: Collection[str] | None = None) -> None:
        """Drop all files of a job, or those of these names."""
        gone = sql.delete(FILES).where(FILES.c.uid == uid)
        if names is not None:
            gone = gone.where(FILES.c.name.in_(list(names)))
        self._store.do(lambda connection: connection.execute(gone)).result()

    def uids(self) -> Collection[str]:
        """None to look through: files of no job are dropped with the jobs that are forgotten."""
        return ()


def _secret(connection: sql.Connection) -> bytes:
    query = sql.select(FILES.c.content).where(FILES.c.uid == SECRET_UID)
    found = connection.execute(query).scalar()
    if found is None:
        try:
            with connection.begin_nested():
                made = {"uid": SECRET_UID, "name": "signing", "content": secrets.token_bytes(32)}
                connection.execute(sql.insert(FILES).values(made))
        except sql.exc.IntegrityError:  # another server was quicker
            pass
        found = connection.execute(query).scalar()
    assert found is not None
    return bytes(found)
