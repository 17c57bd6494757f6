"""What a node of a cluster can tell of itself; the part of `doctor` that runs there."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darkroom.hardware.system import forget_cached

CHUNK_BYTES = 1 << 20
ACCEPT_S = 10.0
COMPARED = ("python", "darkroom", "ray", "torch", "diffusers", "transformers", "pylance", "pyarrow", "numpy")


@dataclass(frozen=True)
class About:
    """A node as its own processes see it."""

    host: str
    versions: dict[str, str]
    gpus: tuple[str, ...]  # names, as torch sees them
    cwd_seen: bool  # whether the driver's folder is there


class Probe:
    """An actor on a node."""

    def __init__(self) -> None:
        self._received = 0
        self._times: list[float] = []
        self._server: socket.socket | None = None

    def about(self, folder: str, counted: int) -> About:
        """What runs here. Imports torch, which takes a while, where there are GPUs or Ray counts some."""
        import darkroom
        from darkroom.hardware.machine import versions

        found = versions()
        found["darkroom"] = darkroom.__version__
        return About(
            host=socket.gethostname(),
            versions={name: found.get(name, "missing") for name in COMPARED},
            gpus=_gpus() if counted or _may_have_gpus() else (),
            cwd_seen=Path(folder).is_dir(),
        )

    def now(self) -> float:
        """This node's clock, in seconds since 1970."""
        return time.time()

    # ---- the network

    def listen(self, streams: int, token: bytes) -> int:
        """Take what comes over so many connections that begin with the token, and count it; the port."""
        self._received, self._times = 0, []
        self._server = socket.create_server(("", 0), backlog=streams)
        self._server.settimeout(ACCEPT_S)
        threading.Thread(target=self._accept, args=(self._server, streams, token), daemon=True).start()
        return int(self._server.getsockname()[1])

    def _accept(self, server: socket.socket, streams: int, token: bytes) -> None:
        with server, suppress(OSError):
            while streams:
                connection, _ = server.accept()
                connection.settimeout(ACCEPT_S)
                if connection.recv(len(token), socket.MSG_WAITALL) == token:
                    streams -= 1
                    threading.Thread(target=self._drain, args=(connection,), daemon=True).start()

    def _drain(self, connection: socket.socket) -> None:
        buffer, total = bytearray(CHUNK_BYTES), 0
        began = time.perf_counter()
        with connection, suppress(OSError):
            while count := connection.recv_into(buffer):
                total += count
        self._received += total
        self._times += [began, time.perf_counter()]

    def send(self, host: str, port: int, seconds: float, streams: int, token: bytes) -> str:
        """Send for so long; nothing, or why it could not be."""
        try:
            connections = [socket.create_connection((host, port), ACCEPT_S) for _ in range(streams)]
        except OSError as error:
            return str(error)
        until = time.perf_counter() + seconds
        threads = [threading.Thread(target=_pour, args=(one, until, token)) for one in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ""

    def received(self, streams: int) -> float:
        """Bytes a second that came in by all connections, from the first byte to the last."""
        until = time.perf_counter() + ACCEPT_S
        while len(self._times) < 2 * streams and time.perf_counter() < until:
            time.sleep(0.01)
        if len(self._times) < 2 * streams:
            return 0.0
        return self._received / (max(self._times) - min(self._times))

    # ---- storage

    def write(self, storage: str, name: str, size_bytes: int) -> tuple[float, str]:
        """Write a file of random bytes through to the storage: seconds, and its hash."""
        content = secrets.token_bytes(size_bytes)
        digest = hashlib.sha256(content).hexdigest()
        filesystem, root = opened(storage)
        began = time.perf_counter()
        if _is_local(filesystem):
            path = Path(root) / name
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        else:
            filesystem.pipe_file(f"{root}/{name}", content)
        return time.perf_counter() - began, digest

    def read(self, storage: str, name: str, digest: str) -> float:
        """Read what another node wrote: seconds. ValueError where it is not that."""
        filesystem, root = opened(storage)
        began = time.perf_counter()
        if _is_local(filesystem):
            with (Path(root) / name).open("rb") as file:
                forget_cached(file)  # not from this one's memory
                content = file.read()
        else:
            content = filesystem.cat_file(f"{root}/{name}")
        taken_s = time.perf_counter() - began
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{name} does not hold what was written")
        return taken_s

    def forget(self, storage: str, name: str) -> None:
        """Delete a file."""
        filesystem, root = opened(storage)
        with suppress(OSError):
            filesystem.rm_file(f"{root}/{name}")


def _may_have_gpus() -> bool:
    """Whether a driver has left a device file here; elsewhere than on Linux torch is asked."""
    devices = ("nvidiactl", "kfd", "dxg")  # NVIDIA's, AMD's, Windows' own Linux
    return sys.platform != "linux" or any(Path("/dev", name).exists() for name in devices)


def _gpus() -> tuple[str, ...]:
    from darkroom.hardware import machine

    return tuple(device.name for device in machine().devices)


def _pour(connection: socket.socket, until: float, token: bytes) -> None:
    content = memoryview(bytearray(CHUNK_BYTES))
    with connection, suppress(OSError):
        connection.sendall(token)
        while time.perf_counter() < until:
            connection.sendall(content)


def opened(storage: str) -> tuple[Any, str]:
    """The filesystem of a folder or an address, and the place in it. ImportError, ValueError as fsspec."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(storage)
    return filesystem, str(root).rstrip("/")


def _is_local(filesystem: Any) -> bool:
    """Whether it is a folder."""
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)
