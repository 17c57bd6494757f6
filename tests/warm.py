"""Python processes that start in milliseconds: forked from one that has darkroom and torch imported.

`Popen` and `run` are `subprocess`'s, for `[sys.executable, "-c" | "-m" | FILE, ...]`: a process of its own
with its own environment, folder, pipes and signals, without the eight seconds that importing takes. What an
interpreter reads only once at its start (an instruction set, an allocator) makes it start a fresh one.

A command that starts processes by torch's launcher, as `parallel.devices=2` does, gets them forked as well
where it is run with `ranks=2`: they are children of it, as ever, in sessions of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Self

PRELOAD = (
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d_condition",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "torch.utils.flop_counter",
    "torch.distributed.launcher.api",
    "lance",
    "fastapi",
    "uvicorn",
    *(f"darkroom.{part}" for part in ("cli", "data", "prepare", "recipe", "sample", "train.run")),
    *(f"darkroom.serve.{part}" for part in ("api.app", "jobs.core")),
)
READ_ONCE = ("ATEN_", "ONEDNN_", "MALLOC_", "GLIBC_", "LD_", "PYTHON", "KMP_", "GOMP_", "THP_")
PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL


class Popen:
    """A process that the warm one forks; what `subprocess.Popen` has and tests use of it."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Any = None,
        ranks: int = 0,
    ) -> None:
        self.args = [str(part) for part in args]
        self.returncode: int | None = None
        self.stdin, mine0 = _end(stdin, "w", text, 0)
        self.stdout, mine1 = _end(stdout, "r", text, 1)
        self.stderr, mine2 = (None, mine1) if stderr == STDOUT else _end(stderr, "r", text, 2)
        self._status, told = socket.socketpair()
        asked = {
            "args": self.args[1:],
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "ranks": ranks,
        }
        _server().ask(asked, [mine0, mine1, mine2, told.fileno()])
        told.close()
        for theirs, given in ((mine0, stdin), (mine1, stdout), (mine2, stderr)):
            if given in (PIPE, DEVNULL) and theirs > 2:
                os.close(theirs)
        self._lines = self._status.makefile("r")
        self.pid = int(self._lines.readline() or _server().failed())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._collect()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._collect()
        assert self.returncode is not None
        return self.returncode

    def _collect(self) -> None:
        line = self._lines.readline()
        self.returncode = os.waitstatus_to_exitcode(int(line)) if line else -signal.SIGKILL
        self._lines.close()
        self._status.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Everything that it writes, until it ends."""
        if self.stdin is not None:
            if input is not None:
                self.stdin.write(input)
            self.stdin.close()
            self.stdin = None
        ends = [file for file in (self.stdout, self.stderr) if file is not None]
        got: dict[int, Any] = {}
        readers = [
            threading.Thread(
                target=lambda file: got.update({id(file): file.read()}), args=(file,), daemon=True
            )
            for file in ends
        ]
        for reader in readers:
            reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for file in ends:
            file.close()
        return got.get(id(self.stdout)), got.get(id(self.stderr))


def run(
    args: Sequence[str],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    input: Any = None,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` by a warm process."""
    env = more.get("env") or os.environ
    if any(name.startswith(READ_ONCE) and os.environ.get(name) != value for name, value in env.items()):
        more.pop("ranks", None)
        return subprocess.run(
            args, capture_output=capture_output, check=check, timeout=timeout, input=input, **more
        )
    if capture_output:
        more |= {"stdout": PIPE, "stderr": PIPE}
    if input is not None:
        more["stdin"] = PIPE
    process = Popen(args, **more)
    try:
        out, err = process.communicate(input, timeout)
    except BaseException:
        process.kill()
        raise
    done = subprocess.CompletedProcess(args, process.wait(), out, err)
    if check:
        done.check_returncode()
    return done


def _end(given: Any, mode: str, text: bool, inherited: int) -> tuple[IO[Any] | None, int]:
    """Our end as a file, and the number of theirs."""
    if given == PIPE:
        read, write = os.pipe()
        ours, theirs = (write, read) if mode == "w" else (read, write)
        return open(ours, mode if text else f"{mode}b"), theirs
    if given == DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if given is None:
        return None, inherited
    return None, given if isinstance(given, int) else given.fileno()


class _Server:
    """The process that has everything imported; it ends with this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.NamedTemporaryFile(prefix="warm-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._socket = ours
        atexit.register(self.close)

    def ask(self, asked: dict[str, Any], fds: list[int]) -> None:
        content = json.dumps(asked).encode()
        try:
            socket.send_fds(self._socket, [len(content).to_bytes(4, "big")], fds)
            self._socket.sendall(content)
        except OSError:
            self.failed()

    def failed(self) -> NoReturn:
        raise RuntimeError(f"the warm process has ended: {Path(self._log.name).read_text()}")

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


_started: dict[int, _Server] = {}


def _server() -> _Server:
    if os.getpid() not in _started:
        _started[os.getpid()] = _Server()
    return _started[os.getpid()]


def _serve(number: int) -> None:
    """What the warm process does: import, then fork for everyone who asks."""
    import gc
    import importlib

    from darkroom.libraries import hush

    hush()
    gc.disable()  # all that is imported stays
    for name in PRELOAD:
        importlib.import_module(name)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert len(set(threads) - {"jemalloc_bg_thd"}) == 1, threads  # jemalloc's own thread is ready for forks
    gc.freeze()
    gc.enable()
    asked_by = socket.socket(fileno=number)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    running: dict[int, int] = {}
    while True:
        ready = select.select([asked_by, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                told = running.pop(pid)
                os.write(told, f"{status}\n".encode())
                os.close(told)
        if asked_by in ready:
            length, fds, _, _ = socket.recv_fds(asked_by, 4, 4)
            if not length:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return
            content = b""
            while len(content) < int.from_bytes(length, "big"):
                content += asked_by.recv(1 << 16)
            child = os.fork()
            if not child:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGINT):
                    signal.signal(
                        number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler
                    )
                for fd in (asked_by.fileno(), woken, wake, *running.values()):
                    os.close(fd)
                _become(json.loads(content), fds)
            running[child] = fds.pop()
            os.write(running[child], f"{child}\n".encode())
            for fd in fds:
                os.close(fd)


def _become(asked: dict[str, Any], fds: list[int]) -> None:
    """In the forked process: take the place that was asked for, run, end as an interpreter ends."""
    import runpy
    import traceback

    for to, fd in enumerate(fds[:3]):
        os.dup2(fd, to)
    for fd in fds:
        if fd > 2:
            os.close(fd)
    if fds:  # a rank has its launcher's
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    if asked["ranks"]:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = _Ranks(asked["ranks"]).start
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if "RANK" in os.environ:  # another process cannot read a forked one's variables
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    for name, value in os.environ.items():
        if name == "PYTHONPATH":
            sys.path[:0] = [part for part in value.split(os.pathsep) if part not in sys.path]
    args, code = [arg for arg in asked["args"] if arg != "-u"], 0
    try:
        if args[0] == "-c":
            sys.argv = ["-c", *args[2:]]
            exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
        elif args[0] == "-m":
            sys.argv = [args[1], *args[2:]]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = args
            sys.path.insert(0, str(Path(args[0]).parent))
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as left:
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Ranks:
    """Processes that wait for what torch's launcher has them do; forked while there is one thread."""

    def __init__(self, count: int) -> None:
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if not pid:
                for _, other in [*self._waiting, (0, ours)]:
                    other.close()  # so that the launcher's end ends them
                os.setsid()
                content = theirs.makefile("r").readline()
                theirs.close()
                if not content:
                    os._exit(0)
                _become(json.loads(content), [])
            theirs.close()
            self._waiting.append((pid, ours))

    def start(self, args: Sequence[str], env: Mapping[str, str], **more: Any) -> Any:
        """`subprocess.Popen`'s place in torch's launcher."""
        if not self._waiting or more.get("stdout") or more.get("stderr"):
            return subprocess.Popen(args, env=env, **more)
        pid, ours = self._waiting.pop(0)
        asked = {"args": [*args[1:]], "env": dict(env), "cwd": str(Path.cwd()), "ranks": 0}
        with ours, contextlib.suppress(OSError):  # one that was killed already
            ours.sendall(f"{json.dumps(asked)}\n".encode())
        return _Rank(pid)


class _Rank:
    """What torch's launcher uses of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
