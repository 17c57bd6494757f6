"""One file for what differs by system: what it does here, and with POSIX's modules and functions hidden."""

from __future__ import annotations

import asyncio
import builtins
import codecs
import errno
import importlib
import importlib.util
import io
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

import darkroom
import warm
from darkroom import errors
from darkroom.hardware import system

HIDDEN = {"fcntl", "resource"}
HIDDEN_OF_OS = ("sched_getaffinity", "fork", "getloadavg", "uname", "posix_fadvise")
ONCE_USED_THEM = (
    *("hardware.meters", "hardware.machine", "run", "data.versions", "data.sidecars", "data.importers.job"),
    *("data.importers.archives", "prepare.job", "train.ranks", "measure.timing"),
)


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """From darkroom's own modules, which are loaded once more as `copy.*`; Python's own need some of them."""
    real = builtins.__import__

    def import_(name: str, globals: Any = None, *more: Any, **named: Any) -> ModuleType:
        if name in HIDDEN and str((globals or {}).get("__name__")).startswith(("copy.", "darkroom")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, globals, *more, **named)

    monkeypatch.setattr(builtins, "__import__", import_)
    for name in HIDDEN_OF_OS:
        monkeypatch.delattr(os, name)


def load_copy(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"copy.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def source(name: str) -> Path:
    return Path(darkroom.__file__).parent / f"{name.replace('.', '/')}.py"


def test_modules_that_used_them_are_imported_where_posix_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ONCE_USED_THEM:
        importlib.import_module(f"darkroom.{name}")  # with what they import, which is not the question here
    hide(monkeypatch)
    for name in ONCE_USED_THEM:
        load_copy(monkeypatch, name, source(name))
    copy = load_copy(monkeypatch, "system", source("hardware.system"))
    assert copy.allowed_cores() == len(psutil.Process().cpu_affinity()) >= 1
    assert copy.load_average() is None
    monkeypatch.setattr(copy, "_STATUS", tmp_path / "none")
    assert copy.peak_resident_bytes() > 2**20
    (tmp_path / "control.py").write_text("import resource\n", "utf-8")
    with pytest.raises(ModuleNotFoundError, match="resource"):
        load_copy(monkeypatch, "control", tmp_path / "control.py")


@pytest.mark.nightly
def test_every_module_is_imported_where_posix_is_hidden() -> None:
    """In a process of its own, where none of them has been imported yet."""
    code = f"""
    import builtins, importlib, os, pkgutil, sys
    real = builtins.__import__
    def import_(name, globals=None, *more, **named):
        if name in {HIDDEN} and str((globals or {{}}).get("__name__")).startswith("darkroom"):
            raise ModuleNotFoundError(name)
        return real(name, globals, *more, **named)
    builtins.__import__ = import_
    import multiprocessing.util, asyncio, torch, ray  # they ask for some of it when they are imported
    for name in {HIDDEN_OF_OS}:
        delattr(os, name)
    import darkroom
    names = [one.name for one in pkgutil.walk_packages(darkroom.__path__, "darkroom.")]
    for name in names:
        if not name.endswith("__main__"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as missing:  # Triton comes with torch for NVIDIA alone
                if missing.name != "triton" or not name.endswith("triton_kernels"):
                    raise
    from typer.testing import CliRunner
    from darkroom.cli import app
    print(len(names), CliRunner().invoke(app, ["doctor"]).exit_code in (0, 1))
    try:
        exec("import fcntl", {{"__name__": "darkroom.control"}})
    except ModuleNotFoundError:
        print("hidden")
    """
    out = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True, timeout=300)
    number, doctor, control = out.split()[-3:]
    assert (doctor, control) == ("True", "hidden")
    assert int(number) == len(list(pkgutil.walk_packages(darkroom.__path__, "darkroom."))) > 200


def test_locks_exclude_and_share(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as one, path.open("ab") as two, path.open("ab") as three:
        system.lock_file(one, shared=True)
        system.lock_file(two.fileno(), shared=True, wait=True)
        with pytest.raises(BlockingIOError):
            system.lock_file(three)
        one.close()
        with pytest.raises(BlockingIOError):
            system.lock_file(three)
        two.close()
        system.lock_file(three)
        with path.open("ab") as four, pytest.raises(BlockingIOError):
            system.lock_file(four, shared=True)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as Windows would have it, as far as that goes without Windows' own calls."""
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        copy = load_copy(monkeypatch, "windows", source("hardware.system"))
    monkeypatch.setattr(copy, "sys", SimpleNamespace(platform="win32"))
    return copy


def test_on_windows_a_file_is_read_at_a_place_as_here(tmp_path: Path, windows: ModuleType) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    with path.open("rb") as file:
        for offset, length in ((10, 5), (0, 3), (190, 50), (300, 1)):
            here = system.read_at(file, offset, length)
            assert windows.read_at(file, offset, length) == here == bytes(range(200))[offset:][:length]
    windows.sync_folder(tmp_path / "there is none")  # nothing to flush
    with pytest.raises(FileNotFoundError):
        system.sync_folder(tmp_path / "there is none")
    windows.sync_file(path)
    assert windows.allow_open_files(10**9) is None


def test_on_windows_a_rename_waits_for_who_has_the_file_open(
    tmp_path: Path, windows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.replace, [2]

    def busy(*names: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise PermissionError(13, "in use")
        real(*names)

    (tmp_path / "new").write_text("new", "utf-8")
    monkeypatch.setattr(os, "replace", busy)
    with pytest.raises(PermissionError):
        system.atomic_replace(tmp_path / "new", tmp_path / "old")
    left[0] = 2
    assert windows.atomic_replace(tmp_path / "new", tmp_path / "old") == tmp_path / "old"
    assert (tmp_path / "old").read_text("utf-8") == "new"
    left[0] = 99
    monkeypatch.setattr(windows, "REPLACE_TRIES_S", (0.0, 0.0))
    with pytest.raises(PermissionError):
        windows.atomic_replace(tmp_path / "old", tmp_path / "new")


def loop_without_signals() -> asyncio.AbstractEventLoop:
    class Loop(asyncio.SelectorEventLoop):
        def add_signal_handler(self, *_: Any) -> None:  # as on Windows
            raise NotImplementedError

    return Loop()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, loop_without_signals])
def test_a_stop_signal_reaches_an_event_loop(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    before = {number: signal.getsignal(number) for number in system.STOP_SIGNALS}
    loop = new_loop()
    try:
        stopped = asyncio.Event()

        async def work() -> None:
            system.stop_in_loop(loop, stopped.set)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stopped.wait(), 10)

        loop.run_until_complete(work())
        assert stopped.is_set()
    finally:
        loop.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_stop_signal_is_noted_once_or_always() -> None:
    def old(*_: object) -> None:
        noted.append("old")

    noted: list[str] = []
    kept = signal.signal(signal.SIGTERM, old)
    try:
        for once, expected in ((False, ["new", "new"]), (True, ["new", "old"])):
            noted.clear()
            with system.on_stop_signal(lambda *_: noted.append("new"), once=once):
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            assert noted == expected
            assert signal.getsignal(signal.SIGTERM) is old
        noted.clear()
        with system.on_stop_signal(lambda *_: noted.append("new"), once=True):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)  # two requests to stop, by whichever signals they come
        assert noted == ["new", "old"]
    finally:
        signal.signal(signal.SIGTERM, kept)


LEAVES = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from darkroom.cli.application import _at_once
from darkroom.hardware import system
try:
    with system.leaving_at_once(_at_once), ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 600)
        print("at work", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_second_ctrl_c_waits_for_no_thread() -> None:
    """The first one interrupts, and the exit waits for a thread; the second leaves, with one line."""
    with warm.Popen([sys.executable, "-c", LEAVES], stdout=warm.PIPE, stderr=warm.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert said == "darkroom: stopped at once; what was saved before is whole\n"


def test_an_interrupt_is_as_before_where_none_came() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests
    try:
        with system.leaving_at_once(lambda kept: None):
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with system.leaving_at_once(lambda kept: None):  # as a shell's background jobs ignore it
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "CON",
            "nul.txt",
            "aux.tar.gz",
            "com1",
            "LPT³.x",
            "con .txt",
            "a:b",
            'say "hi" <now>?',
            "a/b\\c",
            "tail. ",
        ),
        *("..", ".", "", "a\nb", "question?", "x" * 300, "猫" * 100 + ".png", "pipe|star*"),
    ],
)
def test_a_name_from_elsewhere_is_a_file_name_on_all_systems(text: str, tmp_path: Path) -> None:
    name = system.file_name(text)
    assert name != text
    assert not set(name) & set('<>:"/\\|?*\n')
    assert name == name.rstrip(". ")
    assert name.partition(".")[0].rstrip(" ").lower() not in {"con", "nul", "aux", "com1", "lpt³"}
    assert len(os.fsencode(name)) <= system.LONGEST_NAME
    assert system.file_name(name) == name
    (tmp_path / name).write_text("x", "utf-8")
    assert os.listdir(tmp_path) == [name]


def test_good_names_stay_and_bad_ones_never_meet() -> None:
    for good in ("a dog, 3 cats.png", "console", "com", "lr-1e-4_rank-8", ".hidden", "猫.png", "a..b"):
        assert system.file_name(good) == good
    near = ["a:b", "a?b", "a_b", "A:b", "CON", "con", "_CON", "a_b.", "a_b "]
    assert len({system.file_name(text) for text in near}) == len(near)
    assert system.file_name("what?.png").endswith(".png")


def test_on_windows_a_delete_waits_for_who_has_the_file_open(
    tmp_path: Path, windows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.unlink, [0]

    def busy(*names: Any, **named: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise PermissionError(13, "in use")
        real(*names, **named)

    monkeypatch.setattr(os, "unlink", busy)
    for _ in range(2):
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "file").write_text("x", "utf-8")
        left[0] = 2
        assert windows.remove_tree(tmp_path / "one", must=True)
    (tmp_path / "file").write_text("x", "utf-8")
    left[0] = 2
    windows.remove_file(tmp_path / "file")
    windows.remove_file(tmp_path / "file")  # gone already
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(windows, "REPLACE_TRIES_S", (0.0, 0.0))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_text("x", "utf-8")
    left[0] = 99
    assert not windows.remove_tree(tmp_path / "one")
    with pytest.raises(PermissionError):
        windows.remove_tree(tmp_path / "one", must=True)
    left[0] = 1
    with pytest.raises(PermissionError):  # elsewhere nobody waits
        system.remove_file(tmp_path / "one" / "file")


def test_a_console_of_eight_bits_takes_every_character() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "cp1252")
    with pytest.raises(UnicodeEncodeError):
        stream.write("猫 é\n")
    system.print_anything(stream)
    stream.write("猫 é\n")
    stream.flush()
    assert raw.getvalue() == b"\\u732b \xe9" + os.linesep.encode()
    assert not system.is_unicode(stream)
    assert system.is_unicode(io.TextIOWrapper(raw, "utf-8"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.safetensors", ("a.safetensors", "")),
        ("a.safetensors:0.8", ("a.safetensors", "0.8")),
        (r"C:\nets\a.safetensors", (r"C:\nets\a.safetensors", "")),
        (r"C:\nets\a.safetensors:0.8", (r"C:\nets\a.safetensors", "0.8")),
        ("d:/nets/a.safetensors", ("d:/nets/a.safetensors", "")),
        ("a:0.5", ("a", "0.5")),
        ("a:b:0.5", ("a:b", "0.5")),
    ],
)
def test_a_drives_colon_is_no_weights(text: str, parts: tuple[str, str]) -> None:
    assert system.split_weight(text) == parts


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_text_is_read_as_windows_programs_write_it(encoding: str, tmp_path: Path) -> None:
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}.get(encoding, b"")
    (tmp_path / "text").write_bytes(mark + "steps: 3\r\nprompt: 猫\r\n".encode(encoding))
    assert system.read_typed(tmp_path / "text") == "steps: 3\nprompt: 猫\n"
    (tmp_path / "text").write_bytes("é".encode("cp1252"))
    with pytest.raises(UnicodeDecodeError):
        system.read_typed(tmp_path / "text")


def test_on_windows_no_two_servers_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as one:
        system.take_address(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    chosen: list[tuple[int, int, int]] = []
    listening: Any = SimpleNamespace(setsockopt=lambda *given: chosen.append(given))
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", -5, raising=False)
    system.take_address(listening)
    assert chosen == [(socket.SOL_SOCKET, -5, 1)]


def test_a_reader_that_left_is_told_from_other_errors(windows: ModuleType) -> None:
    def stream(error: OSError | None) -> Any:
        def flush() -> None:
            if error is not None:
                raise error

        return SimpleNamespace(flush=flush)

    invalid = OSError(errno.EINVAL, "Invalid argument")
    assert system.reader_left(BrokenPipeError(), stream(None))
    assert not system.reader_left(invalid, stream(invalid))  # it means something else here
    assert windows.reader_left(invalid, stream(invalid))
    assert not windows.reader_left(invalid, stream(None))
    assert not windows.reader_left(OSError(errno.ENOSPC, "full"), stream(invalid))


def test_lines_to_type_are_those_of_the_systems_shell(windows: ModuleType) -> None:
    assert system.set_variable("TORCH", "cuda", "python make.py setup") == "TORCH=cuda python make.py setup"
    assert system.set_variable("A", "1") == "export A=1"
    assert windows.set_variable("TORCH", "cuda", "make") == '$env:TORCH = "cuda"; make'
    assert windows.set_variable("A", "1") == '$env:A = "1"'


def test_nvidias_driver_is_found_on_windows(
    windows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSTEMROOT", str(tmp_path))
    (tmp_path / "System32").mkdir()
    assert not windows.has_nvidia_driver()
    (tmp_path / "System32" / "nvcuda.dll").touch()
    assert windows.has_nvidia_driver()


def test_windows_numbers_of_errors_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lance and safetensors have them in their messages: 28 is there a printer without paper."""

    def rust(number: int) -> OSError:
        return OSError(f"LanceError(IO): whatever it says (os error {number})")

    assert errors.is_disk_full(rust(28))
    assert not errors.is_disk_full(rust(112))
    monkeypatch.setattr(errors, "sys", SimpleNamespace(platform="win32"))
    assert errors.is_disk_full(rust(112))
    assert errors.is_disk_full(rust(39))
    assert not errors.is_disk_full(rust(28))
    assert all(errors.is_system_failure(rust(number)) for number in (4, 1455, 10060, 10061))
    assert not any(errors.is_system_failure(rust(number)) for number in (2, 5, 23, 110))
    paging = OSError(errno.EINVAL, "The paging file is too small")
    assert not errors.is_system_failure(paging)
    paging.winerror = 1455  # type: ignore[attr-defined]
    assert errors.is_system_failure(paging)


def test_windows_registry_tells_the_processor_and_long_paths(
    windows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = {"ProcessorNameString": "AMD Ryzen 9  7950X ", "LongPathsEnabled": 1}

    def value(key: str, name: str) -> tuple[Any, int]:
        return noted[name], 1

    opened = SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=lambda *_: nullcontext("key"), QueryValueEx=value)
    monkeypatch.setitem(sys.modules, "winreg", opened)
    assert (windows.processor_name(), windows.allows_long_paths()) == ("AMD Ryzen 9 7950X", True)
    noted["LongPathsEnabled"] = 0
    assert not windows.allows_long_paths()
    assert (system.processor_name(), system.allows_long_paths()) == ("", True)


def test_on_windows_threads_may_read_one_file(windows: ModuleType) -> None:
    """As those of an import read a zip: one moved the place between another's seek and read."""

    class Slow:
        at = 0

        def seek(self, at: int) -> None:
            self.at = at
            time.sleep(0.002)

        def read(self, length: int) -> bytes:
            return bytes(range(self.at, self.at + length))

    file: Any = Slow()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda at: windows.read_at(file, at, 2), range(40)))
    assert found == [bytes((at, at + 1)) for at in range(40)]


def test_the_cache_is_where_the_system_or_the_user_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DARKROOM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert system.cache_folder() == Path.home() / ".cache" / "darkroom"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert system.cache_folder() == tmp_path / "darkroom"
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path / "own"))
    assert system.cache_folder() == tmp_path / "own"
