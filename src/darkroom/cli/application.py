"""The application, its exit codes, and how every verb prints."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import darkroom
from darkroom import options
from darkroom.errors import DarkroomError, RecipeError, is_out_of_memory, is_system_failure
from darkroom.hardware.system import (
    cache_folder,
    is_unicode,
    leaving_at_once,
    print_anything,
    reader_left,
    write_atomically,
)
from darkroom.libraries import collect_seldom, hush, keep_names, let_pandas_wait, limit_spinning

app = typer.Typer(
    name="darkroom",
    help="Stable Diffusion models, from pictures to pictures: import, prepare, train, generate, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure: rows of a tidy CSV.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

FIRST_TELLS_S = 10.0  # what rank 0 has to tell what all ranks know

SIGN_HELP = "PEM file of certificates and key that sign the pictures; default: a self-made one"
CREDENTIALS_HELP = "what the signed credentials say: model, settings, or all (the prompts too)"
PROVENANCE_HELP = "mark pictures (watermark) and sign them (C2PA)"
SIZE_HELP = "WIDTHxHEIGHT in pixels, or one number for a square; default: the model's own"
PRECISION_HELP = options.PRECISION_TEXT

Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Out = Annotated[Path | None, typer.Option("--out", help="where the result goes")]
RECIPE_HELP = "the recipe: a YAML file, or recipes:NAME for one that comes with darkroom"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code; a user's mistake is one line, never a traceback."""
    limit_spinning()
    collect_seldom()
    with suppress(RuntimeError):  # there is no home folder
        keep_names(cache_folder() / "transformers", write_atomically)
    hush()
    let_pandas_wait()
    for stream in (sys.stdout, sys.stderr):
        print_anything(stream)
    arguments = list(_renamed(sys.argv[1:] if arguments is None else arguments))
    try:
        with leaving_at_once(_at_once):
            code = app(args=arguments, prog_name="darkroom", standalone_mode=False)
    except typer.Abort:
        _leave(_failed("stopped", 1))
    except typer.TyperException as error:
        _leave(_misused(error))
    except DarkroomError as error:
        _leave(_failed(str(error), error.exit_code))
    except KeyboardInterrupt:
        _leave(_failed("stopped", 1))
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        _leave(_failed(_other_kind(error), 2))
    except Exception as error:
        if reader_left(error, sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _leave(1)
        if (message := _failure_of_machine(error)) is None:
            raise
        _leave(_failed(message, 1))
    # The parser turns Ctrl-C into 130; a stopped job is one that was not done.
    _leave(_failed("stopped", 1) if code == 130 else code if isinstance(code, int) else 0)


RENAMED = {
    "serve": {"--slots": "--max-loras", "--patience": "--adapter-affinity-timeout"},
    "plan": {"--head": "--recipe-header"},
    "prepare": {"--grows": "--wait-for-autoscaler"},
    "train": {"--grows": "--wait-for-autoscaler"},
}
"""Of each verb the options that had another name until this release."""


def _renamed(arguments: list[str]) -> Iterator[str]:
    """The command line with old names replaced, each with a line that says so."""
    names = RENAMED.get(arguments[0], {}) if arguments else {}
    for one in arguments:
        flag, equals, value = one.partition("=")
        if flag in names and os.environ.get("RANK", "0") == "0":
            print(f"darkroom: {flag} is now {names[flag]}; it goes with the next release", file=sys.stderr)
        yield f"{names.get(flag, flag)}{equals}{value}"


def _other_kind(error: OSError) -> str:
    """That a folder was given in a file's place, or a file in a folder's or in a new one's."""
    path = error.filename2 or error.filename  # the latter of a rename may be a name of ours
    if isinstance(error, IsADirectoryError):
        return f"'{path}' is a folder; give a file"
    if isinstance(error, FileExistsError):
        return f"'{path}' is there already; choose another name"
    return f"'{path}': a part of this path is a file; give a folder"


def _failure_of_machine(error: Exception) -> str | None:
    """What is said of an error of the system, which is no mistake of ours; None for any other."""
    if isinstance(error, OSError) and (error.filename is not None or error.errno is not None):
        return f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    if not is_system_failure(error):
        return None
    what = "no memory left" if is_out_of_memory(error) else "the machine failed"
    return f"{what}: {' '.join(str(error).split())[:300]}".rstrip(": ")


def _leave(code: int) -> NoReturn:
    """Exit. A rank that ends with an error leaves at once: its process group cannot be taken down without the
    others, and an exit that tears it down beneath gloo's threads aborts instead of telling its code.
    """
    if code and os.environ.get("WORLD_SIZE", "1") != "1":
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _at_once(kept: str) -> NoReturn:
    """After a second Ctrl-C, in its handler: one line, and nothing is waited for. What was saved is whole,
    because all files come to be by a rename.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, RuntimeError, ValueError):  # the handler may have come while one was written
            stream.flush()
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"darkroom: stopped at once{kept or '; what was saved before is whole'}\n".encode())
    os._exit(1)


def _misused(error: typer.TyperException) -> int:
    """A mistake on the command line: one line and where to look; nothing said at all shows the help."""
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if message.startswith("Usage:"):
        print(message)
        return 2
    where = context.command_path if context else "darkroom"
    return _failed(f"{' '.join(message.split())} (see '{where} --help')", 2)


def _failed(message: str, code: int) -> int:
    """Tell an error; of several ranks that found the same mistake the first tells it."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and code == 2:
        time.sleep(FIRST_TELLS_S)  # its end ends the others: what only this one finds is shown after
    message = "".join(sign if sign.isprintable() else " " for sign in message)  # names may hold anything
    if message:
        print(f"darkroom: {message}" if rank == "0" else f"darkroom: rank {rank}: {message}", file=sys.stderr)
    return code


def _version(value: bool) -> None:
    if value:
        print(f"darkroom {darkroom.__version__}")
        raise typer.Exit


@app.callback()
def _darkroom(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def recipe_file(given: Path | None) -> Path | None:
    """`recipes:emoji` as the file of that name among the recipes that come with darkroom."""
    kind, is_named, name = str(given).partition(":")
    if kind != "recipes" or not is_named:
        return given
    folder = next((place for place in _recipe_folders() if place.is_dir()), None)
    if folder is None:
        raise RecipeError(str(given), "no recipes came with this installation", mend="give a file")
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in names:
        raise RecipeError(str(given), "no such recipe", allowed=", ".join(names))
    return folder / f"{name}.yaml"


def _recipe_folders() -> Iterator[Path]:
    """Where they may lie: in a checkout; where a wheel puts them, for all or for one user."""
    yield Path(darkroom.__file__).parents[2] / "recipes"
    for scheme in (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")):
        yield Path(sysconfig.get_path("data", scheme)) / "share" / "darkroom" / "recipes"


def show(result: Any, as_json: bool, lines: Callable[[], Any]) -> None:
    """Print a result: one JSON object, or what `lines` gives, line by line."""
    if as_json:
        print(json.dumps(plain(result), ensure_ascii=not is_unicode(sys.stdout)))
        return
    for line in lines():
        print(line)


def size_of(text: str | None) -> tuple[int, int] | None:
    """What `--size` says, within what any model makes; None where it was not said."""
    if text is None:
        return None
    size = options.parse_size(text)
    options.check_side(size)
    return size


def plain(value: Any) -> Any:
    """A value as JSON has them: models, dataclasses and paths taken apart."""
    import dataclasses

    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def table(content: dict[str, Any], indent: str = "") -> Iterator[str]:
    """A dictionary as aligned lines, dictionaries in it indented below their name."""
    width = max((len(key) for key in content), default=0)
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}"
            yield from table(value, indent + "  ")
        else:
            yield f"{indent}{key:<{width}}  {cell(value)}"


def columns(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Dictionaries of the same keys as a table with a heading."""
    if not rows:
        return
    cells = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def console(as_json: bool) -> Callable[[str], None]:
    """Where a job prints its progress: with --json, on the error stream."""
    return lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(cell(v) for v in value) if isinstance(value, (list, tuple)) else str(value)


# ---- progress of a long job

Progress = Callable[[int, int | None], None]
"""Gets how much is done and how much there is, None where that is not known."""

LINE_EVERY_S = 10.0


@contextmanager
def progress_bar(label: str, quiet: bool) -> Iterator[Progress | None]:
    """A bar on a terminal, a plain line every few seconds in a log, nothing with `--json`.

    On the error stream, so that what the job prints stays clean.
    """
    if quiet:
        yield None
        return
    with _bar(label) if sys.stderr.isatty() else _lines(label) as advance:
        yield advance


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _lines(label: str) -> Iterator[Progress]:
    started = shown_at = time.monotonic()

    def advance(done: int, total: int | None) -> None:
        """Print how far the work is, at most every `LINE_EVERY_S` seconds."""
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= LINE_EVERY_S:
            shown_at = now
            print(f"{label}: {_so_far(done, total, now - started)}", file=sys.stderr, flush=True)

    yield advance


def _so_far(done: int, total: int | None, seconds: float) -> str:
    """'1 of 3, 64 s each, 2 min left': rates below one a second are shown as seconds each."""
    of = f" of {total:,}" if total else ""
    rate = done / seconds if seconds > 0 else 0.0
    if rate == 0:
        return f"{done:,}{of}, {seconds:.0f} s so far"
    each = 1 / rate
    speed = f"{rate:,.1f}/s" if rate >= 1 else f"{each:.1f} s each" if each < 10 else f"{each:.0f} s each"
    left = f", {_duration((total - done) / rate)} left" if total and total > done else ""
    return f"{done:,}{of}, {speed}{left}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
