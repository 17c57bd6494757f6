"""A darkroom server as a process, and a client of it that costs little: HTTP/1.1 on kept connections."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from darkroom.errors import DarkroomError

READY_S = 300.0


class ServerProcess:
    """`darkroom serve` with a state folder, on a free port of loopback. Ended with the `with` block."""

    def __init__(self, model: str, state: Path, *options: str, threads: int = 0) -> None:
        state.mkdir(parents=True, exist_ok=True)
        self.log = state / "server.log"
        already = _addresses(self.log)
        command = [sys.executable, "-m", "darkroom", "serve", model, "--port", "0", "--state", str(state)]
        environment = dict(os.environ)
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        with self.log.open("a") as log:
            self.process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment)
        self.port = self._port(len(already))

    def _port(self, already: int) -> int:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if len(found := _addresses(self.log)) > already:
                return found[-1]
            self._check()
            time.sleep(0.02)
        raise DarkroomError(f"the server did not listen within {READY_S:g} s: {self.last_words()}")

    def _check(self) -> None:
        if self.process.poll() is not None:
            raise DarkroomError(f"the server has ended: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:])

    async def ready(self, client: Client) -> None:
        """Wait until it takes jobs."""
        end = time.monotonic() + READY_S
        while (answer := await client.ask("GET", "/ready"))[0] != 200:
            self._check()
            if b'"broken"' in answer[1] or time.monotonic() > end:
                raise DarkroomError(f"the server does not get ready: {self.last_words()}")
            await asyncio.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, as when the power goes."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _addresses(log: Path) -> list[int]:
    if not log.exists():
        return []
    return [int(port) for port in re.findall(r"listening on http://[^\s:]+:(\d+)", log.read_text())]


class Client:
    """Requests to one port, each on a connection that is free; counts the answers by status."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: Counter[int] = Counter()
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """The status and the body of an answer; a dropped connection is tried once more."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
        if content:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        while True:
            kept = bool(self._free)
            at = self._free.pop() if kept else await asyncio.open_connection("127.0.0.1", self.port)
            try:
                status, told = await _exchange(at, head.encode() + b"\r\n" + content)
            except (ConnectionError, asyncio.IncompleteReadError):
                at[1].close()
                if kept:
                    continue
                raise
            self._free.append(at)
            self.statuses[status] += 1
            return status, told

    async def json(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """The same, of an answer in JSON."""
        status, told = await self.ask(method, path, body)
        found: dict[str, Any] = json.loads(told)
        return status, found

    async def metrics(self) -> dict[str, float]:
        """The server's counters by name and labels."""
        _, told = await self.ask("GET", "/metrics")
        lines = [line.rsplit(" ", 1) for line in told.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def close(self) -> None:
        """Let go of all connections."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()


async def _exchange(
    at: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes
) -> tuple[int, bytes]:
    reader, writer = at
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = int(head.split(" ", 2)[1])
    length = re.search(r"(?i)\r\ncontent-length: *(\d+)", head)
    return status, await reader.readexactly(int(length[1]) if length else 0)


def mean_between(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """The mean of what a histogram has seen between two looks at the counters."""
    count = after[f"{name}_count"] - before[f"{name}_count"]
    return (after[f"{name}_sum"] - before[f"{name}_sum"]) / count if count else None


def most_between(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """The bound of the highest bucket that something fell into between two looks; None where nothing did."""
    count = after[f"{name}_count"] - before[f"{name}_count"]
    bounds: Sequence[tuple[float, str]] = sorted(
        (float(found[1]), key)
        for key in after
        if (found := re.fullmatch(rf'{name}_bucket{{le="([^"]+)"}}', key))
    )
    if not count:
        return None
    return next(bound for bound, key in bounds if after[key] - before[key] >= count)
