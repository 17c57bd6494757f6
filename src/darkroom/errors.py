"""What can go wrong, as one small tree. The command line maps each class to an exit code.

DarkroomError                 exit 1: the work failed
├── InputError                exit 2: the user can mend it
│   ├── RecipeError           a key of a recipe, with its path
│   ├── StoreError            a picture store that is missing, damaged or lacks what is asked
│   │   └── ColumnError       a prepared column that is missing or was made by another encoder
│   ├── ModelError            a model folder, hub id or family
│   └── MissingExtra          an optional package that is not installed
├── CheckpointError           a checkpoint could not be written or read
│   └── DamagedCheckpoint     its files are not what was saved; the one before may be whole
├── LoaderError               reading ahead failed or stood still
└── Stopped                   asked to stop (Ctrl-C, SIGTERM); the state is saved
"""

from __future__ import annotations

import difflib
import errno
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "CheckpointError",
    "ColumnError",
    "DarkroomError",
    "InputError",
    "LoaderError",
    "MissingExtra",
    "ModelError",
    "RecipeError",
    "Stopped",
    "StoreError",
]


class DarkroomError(Exception):
    """Root of all errors that darkroom raises on purpose. They survive being sent between processes."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, self.__dict__)


class InputError(DarkroomError):
    """A user's mistake, in one line: what was given, what is allowed, how to mend it."""

    exit_code = 2

    def __init__(self, given: str, *, allowed: str = "", mend: str = "") -> None:
        self.given, self.allowed, self.mend = given, allowed, mend
        parts = [given, allowed and f"allowed: {allowed}", mend]
        super().__init__("; ".join(part for part in parts if part))


class RecipeError(InputError):
    """A recipe's key that is unknown, of the wrong type, or impossible with another."""

    def __init__(self, key: str, given: str, *, allowed: str = "", mend: str = "") -> None:
        self.key = key
        super().__init__(f"{key}: {given}", allowed=allowed, mend=mend)

    @classmethod
    def missing(cls, path: Path) -> RecipeError:
        """There is no such file; names one in the same folder with nearly the same name."""
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        mend = f"did you mean '{path.with_name(near[0])}'?" if near else ""
        return cls(str(path), "no such recipe file", mend=mend)


class StoreError(InputError):
    """A picture store that is missing, damaged, or lacks what is asked of it."""


class ColumnError(StoreError):
    """A prepared column that is missing, unfinished, or made by another encoder."""


class ModelError(InputError):
    """A model folder, hub id or family that cannot be opened."""


class MissingExtra(InputError):
    """An optional package is needed; names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", mend=install_extra(extra))


def install_extra(extra: str) -> str:
    """The line that brings an extra of pyproject.toml, typed in darkroom's checkout."""
    return f"pip install '.[{extra}]'"


class CheckpointError(DarkroomError):
    """A checkpoint could not be written or read: a disk, a network, or what it holds."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's files are not what was saved: one is missing, cut short or changed."""


class LoaderError(DarkroomError):
    """Reading ahead failed or stood still for longer than its time limit."""


class Stopped(DarkroomError):
    """Asked to stop by Ctrl-C or SIGTERM; what was done is saved and the same command goes on."""


OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


RUST = re.compile(r"\(os error (\d+)\)")
SYSTEM = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
)
"""Numbers of the machine's own failures, for which no file and no request is to blame."""
WINDOWS = {
    number: named
    for named, numbers in {
        errno.ENOSPC: (39, 112),
        errno.EDQUOT: (1295,),
        errno.EROFS: (19,),
        errno.ENOMEM: (8, 14, 1455),
        errno.EMFILE: (4,),
        errno.ETIMEDOUT: (121, 10060),
        errno.EHOSTUNREACH: (53, 10065),
        errno.ENETUNREACH: (10051,),
        errno.ECONNREFUSED: (10061,),
        errno.ECONNRESET: (64, 10054),
    }.items()
    for number in numbers
}
"""Windows' own numbers of the same, which are other numbers for Linux; 1455 is a paging file that is too
small. Python makes 22 (an invalid argument) of those that it does not know."""


def is_system_failure(error: BaseException) -> bool:
    """Whether the machine failed, not what was read: no memory, a full disk, no more files, a lost network.

    What catches errors of a file's or a request's making lets these pass: they are nobody's mistake, and
    trying again may do. A sector that cannot be read (EIO) is not among them: it is the file's own damage.
    """
    if is_out_of_memory(error) or isinstance(error, ConnectionError | TimeoutError):
        return True
    return _number(error) in SYSTEM


def is_disk_full(error: BaseException) -> bool:
    """Whether a write found the disk full, or the user's quota."""
    return _number(error) in (errno.ENOSPC, errno.EDQUOT)


def _number(error: BaseException) -> int | None:
    """The system's number of an error; libraries in Rust (Lance, safetensors) have it in their message."""
    own = getattr(error, "winerror", None)
    if own in WINDOWS:
        return WINDOWS[own]
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = RUST.search(str(error)) if isinstance(error, Exception) else None
    if match is None:
        return None
    return WINDOWS.get(int(match[1])) if sys.platform == "win32" else int(match[1])


ALLOWED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    "int_parsing_size": "a whole number of fewer digits",
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "of the form {pattern}",
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object with fields"),
    "too_short": "at least {min_length} values",
    "too_long": "at most {max_length} values",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""What a field may be, by the kind of a mistake, in pydantic's terms."""
COUNTED = ("string_too_short", "string_too_long", "too_short", "too_long")
NO_VALUE = {"missing": "missing", "extra_forbidden": "no such field"}


def allowed_of(mistake: Mapping[str, Any]) -> str:
    """What is allowed in the place of one of a `ValidationError`'s mistakes, in a few words."""
    if (allowed := ALLOWED.get(mistake["type"])) is None:
        return str(mistake["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    limits = mistake.get("ctx", {})
    return allowed.format(
        **{key: f"{one:.12g}" if isinstance(one, float) else one for key, one in limits.items()}
    )


def fault_of(mistake: Mapping[str, Any]) -> str:
    """The same as what is wrong: "must be ..."; the value given is not repeated."""
    kind, message = mistake["type"], str(mistake["msg"])
    if kind in NO_VALUE:
        return NO_VALUE[kind]
    if kind in ALLOWED or message.startswith("Input should be "):
        return f"must {'have' if kind in COUNTED else 'be'} {allowed_of(mistake)}"
    return allowed_of(mistake)


def first_fault(mistakes: Sequence[Mapping[str, Any]]) -> str:
    """The first of a `ValidationError`'s mistakes with its field's name, in one line."""
    where = ".".join(map(str, mistakes[0]["loc"]))
    return f"{where}: {fault_of(mistakes[0])}" if where else fault_of(mistakes[0])


def first_line(error: BaseException) -> str:
    """The first line of a library's message that says something; the error's name where none does."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocator with nothing left: Python's, or torch's on any device.

    What catches errors of a file's or a request's making lets these pass: they are nobody's mistake.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in OUT_OF_MEMORY)


def _again(kind: type[DarkroomError], args: tuple[Any, ...], state: dict[str, Any]) -> DarkroomError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
