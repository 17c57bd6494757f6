"""A PostgreSQL of one's own on a local socket, by Debian's programs."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


class OwnPostgres:
    """Its data, socket and log are in `folder`, which it makes; removed with the `with` block."""

    def __init__(self, folder: Path, *, fsync: bool = True) -> None:
        self.folder, programs = folder, PROGRAMS[-1].parent
        folder.mkdir()
        user: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            account = pwd.getpwnam("postgres")
            os.chown(folder, account.pw_uid, account.pw_gid)
            user = {"user": account.pw_uid, "group": account.pw_gid}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._run: dict[str, Any] = {"cwd": folder, "check": True, **silent, **user}
        made = [programs / "initdb", "-D", folder / "data", "-U", "darkroom", "-A", "trust"]
        subprocess.run(made, **self._run)
        self._options = f"-c listen_addresses='' -c unix_socket_directories='{folder}'"
        self._options += "" if fsync else " -c fsync=off"
        self._control = [programs / "pg_ctl", "-D", folder / "data", "-w"]
        self.url = f"postgresql+psycopg://darkroom@/postgres?host={folder}"

    def start(self) -> None:
        """Begin to answer; after an immediate stop it recovers first."""
        started = [*self._control, "-o", self._options, "-l", self.folder / "log", "start"]
        subprocess.run(started, **self._run)

    def stop(self) -> None:
        """End without a warning to its clients, as a crash would."""
        subprocess.run([*self._control, "-m", "immediate", "stop"], **self._run)

    def __enter__(self) -> OwnPostgres:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
