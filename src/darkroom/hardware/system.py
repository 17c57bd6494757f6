"""What differs between Linux, macOS and Windows: locks, signals, memory, cores, limits, flushing, renaming;
and what this processor can do, as far as this process may use it.

The one file that names POSIX-only modules and functions, `/proc` and `/sys`; tests/test_import_rules.py holds
the others to that. Such modules are imported where they are used, so that this file can be imported on every
system. From the top: files, signals, processors, memory, instructions. Imports nothing heavy.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import hashlib
import io
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TextIO, TypeVar

import psutil

if TYPE_CHECKING:
    import asyncio


T = TypeVar("T")

CPUINFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
RAPL = Path("/sys/class/powercap")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
MAPS, SMAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_STAT = Path("/proc/self/stat")


# ---- files


def lock_file(file: IO[Any] | int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed; the system lets go when its process dies.

    Exclusive unless `shared`. BlockingIOError where somebody else holds it, unless it is to `wait`; another
    OSError where the file system has no locks. Two openings by one process exclude each other too.
    """
    handle = file if isinstance(file, int) else file.fileno()
    if sys.platform == "win32":
        _lock_on_windows(handle, shared, wait)
    else:
        import fcntl

        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(handle, how if wait else how | fcntl.LOCK_NB)


if sys.platform == "win32":

    def _lock_on_windows(handle: int, shared: bool, wait: bool) -> None:
        """LockFileEx, which knows shared locks and goes by the handle, as flock does.

        msvcrt.locking and filelock's FileLock are exclusive: with them in place of shared locks two writers
        of a store, which may be one process's, would wait for each other without end.
        """
        import msvcrt
        from ctypes import wintypes

        class Overlapped(ctypes.Structure):
            _fields_ = (
                ("internal", ctypes.c_void_p),
                ("internal_high", ctypes.c_void_p),
                ("offset", wintypes.DWORD),
                ("offset_high", wintypes.DWORD),
                ("event", wintypes.HANDLE),
            )

        fail_immediately, exclusive, held_by_another = 1, 2, 33
        # Locked bytes can be neither read nor written there: one is locked that no file reaches.
        where = Overlapped(offset_high=0x7FFFFFFF)
        flags = (0 if shared else exclusive) | (0 if wait else fail_immediately)
        call = ctypes.WinDLL("kernel32", use_last_error=True).LockFileEx
        call.argtypes = (
            *(wintypes.HANDLE, wintypes.DWORD, wintypes.DWORD, wintypes.DWORD, wintypes.DWORD),
            ctypes.POINTER(Overlapped),
        )
        call.restype = wintypes.BOOL
        if not call(msvcrt.get_osfhandle(handle), flags, 0, 1, 0, ctypes.byref(where)):
            code = ctypes.get_last_error()
            if code == held_by_another:
                raise BlockingIOError(code, "the file is locked")
            raise ctypes.WinError(code)


REPLACE_TRIES_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""On Windows a file that somebody has open or mapped can be neither renamed over nor deleted, and a folder
with such a file cannot be renamed: what is waited for them between tries."""


def _patiently(call: Callable[[], T]) -> T:
    if sys.platform == "win32":
        for pause_s in REPLACE_TRIES_S:
            try:
                return call()
            except PermissionError:
                time.sleep(pause_s)
    return call()


def atomic_replace(source: Path, target: Path | str) -> Path:
    """Rename a file or folder, over a file that is there, in one step."""
    return _patiently(lambda: source.replace(target))


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a small file so that a reader sees the old one or the new one whole; `durable`: also after a
    power cut. Folders that lack are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    atomic_replace(temporary, path)
    if durable:
        sync_folder(path.parent)


def cache_folder() -> Path:
    """Where darkroom keeps what can be made again: $DARKROOM_CACHE, or `darkroom` in the user's cache."""
    if asked := os.environ.get("DARKROOM_CACHE"):
        return Path(asked)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "darkroom"


def remove_file(path: Path | str) -> None:
    """Delete a file; one that is not there is gone already. OSError where it cannot be."""
    _patiently(lambda: Path(path).unlink(missing_ok=True))


def remove_tree(folder: Path | str, *, must: bool = False) -> bool:
    """Delete a folder with all in it; whether it is gone. What cannot be deleted stays, unless it `must` go:
    then OSError.
    """
    if sys.platform == "win32":  # where what is read-only cannot be deleted
        for at, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    os.chmod(os.path.join(at, name), 0o600)
    try:
        _patiently(lambda: shutil.rmtree(folder))
    except OSError:
        if must:
            raise
        shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
LONGEST_NAME = 200
"""In bytes of UTF-8: file systems allow 255, and the name of a file that is being written is longer."""


def file_name(text: str, longest: int = LONGEST_NAME) -> str:
    """A text that somebody else chose (a prompt, a source, an adapter) as a file name that all systems take.

    A good name stays as it is; two names that do not never meet: what was changed carries a hash of its text.
    """
    plain = _FORBIDDEN.sub("_", text).rstrip(". ")
    if _RESERVED.fullmatch(plain.partition(".")[0].rstrip(" ")):
        plain = f"_{plain}"
    if plain == text and text not in ("", ".", "..") and len(os.fsencode(text)) <= longest:
        return text
    stem, dot, ending = plain.rpartition(".")
    if not stem or len(os.fsencode(ending)) > 16:
        stem, dot, ending = plain, "", ""
    stem = (
        stem.encode("utf-8", "ignore")[: longest - 9 - len(os.fsencode(dot + ending))]
        .decode("utf-8", "ignore")
        .rstrip(". ")
    )
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{stem}-{digest}{dot}{ending}"


def folds_names(folder: Path) -> bool:
    """Whether names that differ in case alone are one file's in a folder, as on Windows and macOS; False for
    a folder in which no name has a letter."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for name in (entry.name for entry in entries):
            other = name.swapcase()
            if name.isascii() and other != name:
                return os.path.samefile(os.path.join(folder, name), os.path.join(folder, other))
    return False


def split_weight(text: str) -> tuple[str, str]:
    """FILE[:WEIGHT] in its two parts, the second empty where there is none. A drive's colon (C:\\...) parts
    nothing."""
    file, colon, tail = text.rpartition(":")
    is_drive = len(file) == 1 and file.isalpha() and tail[:1] in ("\\", "/")
    return (file, tail) if colon and not is_drive else (text, "")


def read_typed(path: Path) -> str:
    """A text that somebody wrote: UTF-8, or what its mark says. PowerShell's > makes UTF-16, Windows' editors
    put a mark before UTF-8. UnicodeDecodeError for another."""
    content = path.read_bytes()
    marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if marked else "utf-8-sig").replace("\r\n", "\n")


def allows_long_paths() -> bool:
    """Whether programs may use paths of more than 260 characters; on Windows a setting allows them."""
    if sys.platform != "win32":
        return True
    return bool(_of_registry(r"SYSTEM\CurrentControlSet\Control\FileSystem", "LongPathsEnabled"))


def _of_registry(path: str, name: str) -> Any:
    """What Windows notes for the whole machine; None where it notes nothing."""
    if sys.platform != "win32":
        return None
    import winreg

    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
            return winreg.QueryValueEx(key, name)[0]
    except OSError:
        return None


def sync_file(path: Path) -> None:
    """Flush the content of a file that is closed already to the disk."""
    # Windows flushes only what is open for writing.
    with path.open("r+b" if sys.platform == "win32" else "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk; Windows cannot, and NTFS's journal does it."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_READING = threading.Lock()


def read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Bytes of an open file at a place, for several threads; where the file stands is not to be relied on
    after it."""
    if sys.platform == "win32":
        with _READING:  # there a file has one place
            file.seek(offset)
            return file.read(length)
    return os.pread(file.fileno(), length, offset)


def forget_cached(file: IO[Any]) -> None:
    """Have the next read of a file come from the disk, where the system takes such advice."""
    if sys.platform == "linux":
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def allow_open_files(wanted: int) -> int | None:
    """Raise this process's limit of open files to `wanted`, as far as it may; the limit, None without one."""
    if sys.platform == "win32":
        return None
    try:
        import resource
    except ImportError:  # a Python without it
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return None if soft == resource.RLIM_INFINITY else soft


# ---- network


def take_address(listening: socket.socket) -> None:
    """Have a socket get its address at once after a restart, and for itself: SO_REUSEADDR, which does that on
    POSIX, lets two servers have one port on Windows."""
    exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE", None)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR if exclusive is None else exclusive, 1)


# ---- console


def set_variable(name: str, value: str, command: str = "") -> str:
    """A line that sets an environment variable, for a command alone where one is given and the shell can."""
    if sys.platform == "win32":
        return f'$env:{name} = "{value}"' + (f"; {command}" if command else "")
    return f"{name}={value} {command}" if command else f"export {name}={value}"


def reader_left(error: BaseException, stream: TextIO) -> bool:
    """Whether an error of writing to a stream is that its reader has gone, as `| head` does."""
    if isinstance(error, BrokenPipeError):
        return True
    if sys.platform != "win32" or not isinstance(error, OSError) or error.errno != errno.EINVAL:
        return False
    try:  # there it is an invalid argument, which may be another's
        stream.flush()
    except OSError:
        return True
    return False


def is_unicode(stream: TextIO) -> bool:
    """Whether a stream takes every character: a Windows console or pipe may have 8 bits each (cp1252)."""
    try:
        return codecs.lookup(stream.encoding or "utf-8").name.startswith("utf")
    except LookupError:
        return False


def print_anything(stream: TextIO) -> None:
    """Have a stream write \\u4e09 for a character that it lacks; without it printing one is an error."""
    if isinstance(stream, io.TextIOWrapper) and not is_unicode(stream):
        stream.reconfigure(errors="backslashreplace")


# ---- signals

if sys.platform == "win32":  # Ctrl-Break is what another process can send
    STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGBREAK)
else:
    STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


Handler = Callable[[int, FrameType | None], object]
_leave: Callable[[str], object] | None = None  # of a process that may end at once, which a library's may not


def _nothing_known() -> str:
    return ""


@contextmanager
def on_stop_signal(
    call: Handler, *, once: bool = False, kept: Callable[[], str] = _nothing_known
) -> Iterator[None]:
    """Within, what asks a process to stop calls this instead; with `once`, a second one is as before.

    In a `leaving_at_once` a second one leaves, and `kept` says what is on the disk by then. Python takes
    signals in the main thread only: in another nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def handler(number: int, frame: FrameType | None) -> None:
        """Call what was given; with `once` the signals first get back the handlers that they had."""
        if once:  # Ctrl-C and then SIGTERM are two: the other signal must not be noted in vain
            if (leave := _leave) is not None:  # also later, while what was noted ends the process
                before.update(dict.fromkeys(before, lambda *_: leave(kept())))
            for each, old in before.items():
                signal.signal(each, old)
        call(number, frame)

    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)


@contextmanager
def leaving_at_once(leave: Callable[[str], object]) -> Iterator[None]:
    """Within, the first Ctrl-C interrupts and a second request to stop calls `leave`, whatever is at work.

    That stays after an interrupt: an exit waits for threads. Where Ctrl-C is ignored it stays ignored.
    """
    global _leave
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Interrupt the main thread; from now on each signal calls `leave`."""
        nonlocal interrupted
        interrupted = True
        for each in STOP_SIGNALS:
            signal.signal(each, lambda *_: leave(""))
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    _leave = leave
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        _leave = None
        if signal.getsignal(signal.SIGINT) is interrupt and not interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """What asks the process to stop calls this in an event loop, from now on."""
    for number in STOP_SIGNALS:
        try:
            loop.add_signal_handler(number, call)
        except NotImplementedError:  # loops on Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))


# ---- processors


def allowed_cores() -> int:
    """Logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return len(process.cpu_affinity())
    return os.cpu_count() or 1


def processor_name() -> str:
    """What Windows calls the processor; empty elsewhere."""
    found = _of_registry(r"HARDWARE\DESCRIPTION\System\CentralProcessor\0", "ProcessorNameString")
    return " ".join(str(found or "").split())


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver is installed, whatever torch was built for."""
    if sys.platform == "win32":
        return (Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / "nvcuda.dll").exists()
    return NVIDIA_DRIVER.exists()


def load_average() -> float | None:
    """Processes that ran or waited, over the last minute; None on Windows, which counts none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def process_age_s() -> float:
    """Seconds since this process began: on Linux to a hundredth, elsewhere as its clock tells."""
    if sys.platform == "linux":  # both count from the machine's start: a clock that is set does not matter
        after_name = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        began_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    return max(0.0, time.time() - psutil.Process().create_time())


# ---- memory


def peak_resident_bytes() -> int:
    """The high-water mark of memory that the process held (RSS), since `reset_peak_resident` on Linux."""
    if _STATUS.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"))
        if found:
            return int(found.group(1)) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:
        import resource
    except ImportError:  # a Python without it
        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_resident() -> None:
    """Start the high-water mark again; outside Linux, and where it is forbidden, it stays as it is."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="utf-8")


# ---- instructions of the processor
#
# oneDNN (inside PyTorch and OpenVINO) and PyTorch's own kernels can be limited by environment variables, for
# tests or to keep several kinds of machine alike. What they forbid is as if the processor did not have it.


X86 = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "amx_int8", "amx_fp16"),
)
ARM = ("asimd", "sve", "bf16", "i8mm")
FEATURES = (*X86, *ARM)
"""What makes a difference to darkroom's work, as Linux names it."""
TORCH_NAMES = {"avx512f": "avx512_f", "asimd": "neon"}
"""What torch calls otherwise."""

BF16 = ("amx_bf16", "avx512_bf16", "bf16")
"""Any of them multiplies bfloat16 in hardware; without one it is emulated, up to 60 times slower."""

INT8 = ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm")
"""Any of them multiplies 8-bit integers and adds them up in 32 bits at once."""

_AVX512 = ("avx2", "avx_vnni", "avx512f")
_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
_FP16 = (*_BF16, "avx512_fp16")
_AMX = (*_FP16, "amx_bf16", "amx_int8")
ONEDNN: dict[str, tuple[str, ...]] = {
    "SSE41": (),
    "AVX": (),
    "AVX2": ("avx2",),
    "AVX2_VNNI": ("avx2", "avx_vnni"),
    "AVX2_VNNI_2": ("avx2", "avx_vnni"),
    "AVX512_CORE": _AVX512,
    "AVX512_CORE_VNNI": (*_AVX512, "avx512_vnni"),
    "AVX512_CORE_BF16": _BF16,
    "AVX512_CORE_FP16": _FP16,
    "AVX10_1_512": _FP16,
    "AVX512_CORE_AMX": _AMX,
    "AVX10_1_512_AMX": _AMX,
}
"""oneDNN's levels and what each lets through; any other value (ALL, later levels) lets everything through."""
ATEN: dict[str, tuple[str, ...]] = {"default": (), "avx2": ("avx2", "avx_vnni")}
LIMITS = {"ONEDNN_MAX_CPU_ISA": ONEDNN, "DNNL_MAX_CPU_ISA": ONEDNN, "ATEN_CPU_CAPABILITY": ATEN}


def instructions(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Of `FEATURES`, what the processor has and the environment leaves in use."""
    environment = os.environ if environment is None else environment
    have = hardware_instructions()
    for variable, levels in LIMITS.items():
        value = environment.get(variable, "")
        allowed = levels.get(value.upper() if levels is ONEDNN else value.lower())
        if allowed is not None:
            have = tuple(name for name in have if name in allowed or name in ARM)
    return have


def limits() -> tuple[str, ...]:
    """The environment variables that limit what is in use, as NAME=VALUE."""
    return tuple(f"{name}={value}" for name in LIMITS if (value := os.environ.get(name)))


def bf16_instructions() -> str | None:
    """What multiplies bfloat16 here; None where it would be emulated."""
    have = instructions()
    return next((name for name in BF16 if name in have), None)


def int8_instructions() -> str | None:
    """What multiplies 8-bit integers here, quickest first; None where it takes several instructions."""
    have = instructions()
    return next((name for name in INT8 if name in have), None)


@cache
def hardware_instructions() -> tuple[str, ...]:
    """Of `FEATURES`, what the processor has, whatever the environment says."""
    if platform.system() == "Darwin":
        return _apple()
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return _as_torch_says()
    for line in lines:
        if line.startswith(("flags", "Features")):
            have = set(line.partition(":")[2].split())
            return tuple(name for name in FEATURES if name in have)
    return ()


def _as_torch_says() -> tuple[str, ...]:
    """On Windows, which has no list of its own: torch has asked the processor."""
    import torch

    asked: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return tuple(name for name in FEATURES if asked.get(TORCH_NAMES.get(name, name)))


def _apple() -> tuple[str, ...]:
    keys = {"asimd": "AdvSIMD", "bf16": "arm.FEAT_BF16", "i8mm": "arm.FEAT_I8MM", "avx2": "avx2_0"}
    found = []
    for name, key in keys.items():
        command = ["sysctl", "-n", f"hw.optional.{key}"]
        try:
            done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5, check=False)
        except (OSError, subprocess.SubprocessError):
            continue
        if done.stdout.strip() == "1":
            found.append(name)
    return tuple(found)
