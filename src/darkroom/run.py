"""The run folder: recipe, environment, metrics, checkpoints, samples, model and bill of one training job.
And tidy tables of what was measured: one CSV, one row a finding.

`metrics.jsonl` has one row a step (`step, loss, lr, grad_norm, ...`), in order, each step once; what was
measured after a step (held-out loss) stands in that step's row. Row 0, where there is one, was measured
before the first step.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from darkroom.bill import Bill
from darkroom.errors import InputError, first_fault
from darkroom.hardware.system import lock_file, remove_file, remove_tree, write_atomically

# ---- the run folder

LOG = logging.getLogger("darkroom")
RECIPE, ENVIRONMENT, METRICS, BILL = "recipe.yaml", "environment.json", "metrics.jsonl", "bill.json"
ENDED, PLAN = "ended.json", "plan.json"
PROMPTS = "prompts.json"
_LOCK = ".lock"


class Run:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | str, recipe_text: str, environment: Mapping[str, Any]) -> Self:
        """A new run; InputError where there is one already."""
        run = cls(Path(path))
        if (run.path / RECIPE).exists():
            raise InputError(f"'{path}' is a run already", mend="choose another folder, or resume it")
        for folder in (run.path, run.checkpoints, run.samples):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            run.path / ENVIRONMENT, json.dumps(environment, indent=1, default=str) + "\n", durable=True
        )
        write_atomically(run.path / RECIPE, recipe_text, durable=True)  # last: with it the run exists
        return run

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """A run that exists; InputError names the ones nearby where it does not."""
        run = cls(Path(path))
        if not (run.path / RECIPE).is_file():
            near = [found.name for found in _run_folders(run.path.parent)][:8]
            raise InputError(f"no run at '{path}'", mend=f"runs there: {', '.join(near)}" if near else "")
        return run

    @property
    def checkpoints(self) -> Path:
        """Where the states are from which training goes on."""
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        """Where the sample grids are, by step."""
        return self.path / "samples"

    @property
    def model(self) -> Path:
        """Where the finished model is."""
        return self.path / "model"

    @property
    def outputs(self) -> list[Path]:
        """What training left: a model, an adapter, a learned word."""
        names = (self.model.name, "adapter.safetensors", "learned_embeds.safetensors")
        return [self.path / name for name in names if (self.path / name).exists()]

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe."""
        try:
            content = yaml.safe_load((self.path / RECIPE).read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise _no_run(self.path) from error
        if not isinstance(content, dict):
            raise _no_run(self.path)
        return content

    @property
    def environment(self) -> dict[str, Any]:
        """Where the newest session ran; `sessions` lists the earlier ones."""
        return _object_in(self.path / ENVIRONMENT)

    @property
    def ended_early(self) -> bool:
        """Whether it came to its end before its last step, because nothing got better."""
        return (self.path / ENDED).exists()

    def bill(self) -> Bill | None:
        """What the run used so far, all sessions together."""
        try:
            return Bill.load(self.path / BILL)
        except ValueError as error:  # also pydantic's, of what is no bill
            raise DamagedRun(f"'{self.path / BILL}' is damaged: it is no bill", mend=_MEND_FILE) from error

    def plan(self) -> dict[str, Any] | None:
        """What the plan said of it as it started; None where it was not asked."""
        return _object_in(self.path / PLAN, _OF_PLAN) if (self.path / PLAN).exists() else None

    def set_plan(self, plan: Mapping[str, Any]) -> None:
        """Keep what the plan says of it."""
        write_atomically(self.path / PLAN, json.dumps(_plain(plan), indent=1) + "\n", durable=True)

    def add_session(self, environment: Mapping[str, Any]) -> None:
        """Note where the run goes on, and keep where it was before."""
        before = self.environment
        sessions = [*before.pop("sessions", []), before]
        text = json.dumps({**environment, "sessions": sessions}, indent=1, default=str)
        write_atomically(self.path / ENVIRONMENT, text + "\n", durable=True)

    def set_recipe(self, recipe_text: str) -> None:
        """Replace the recipe, where what was changed is harmless."""
        write_atomically(self.path / RECIPE, recipe_text, durable=True)

    def tidy(self) -> None:
        """Clear away what a killed process left half-written; only for who holds the lock."""
        for path in self.path.glob(".*"):
            if path.name.startswith((f".{self.model.name}-", ".tokenizer")):
                remove_tree(path)
            elif path.name != _LOCK and path.is_file():
                remove_file(path)

    # ---- metrics

    def log(self, *rows: Mapping[str, Any]) -> None:
        """Append rows in one write, so that a killed process leaves whole rows."""
        if not rows:
            return
        text = "".join(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows)
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(text)

    def sync(self) -> None:
        """Make the metrics written so far survive a power cut."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All rows; one that a full disk or a power cut left torn at the end is left out."""
        return [row for row, _ in self._rows()]

    def truncate(self, step: int) -> None:
        """Drop the rows of steps later than `step`, and a torn one, atomically."""
        if (self.path / METRICS).exists():
            kept = [line for row, line in self._rows() if row["step"] <= step]
            write_atomically(self.path / METRICS, "".join(kept), durable=True)

    def _rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        try:
            text = (self.path / METRICS).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                return
            yield row, line

    # ---- one process at a time

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process; InputError if another trains it. A killed process lets go."""
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # `darkroom runs` holds it for a moment when it looks: try again before giving up.
            if not _try_lock(descriptor, tries=4):
                raise InputError(f"'{self.path}' is being trained by another process", mend="wait or stop it")
            yield
        finally:
            os.close(descriptor)

    def is_running(self) -> bool:
        """Whether a process trains it now."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDWR)
        except OSError:
            return False
        try:
            return not _try_lock(descriptor)
        finally:
            os.close(descriptor)


class DamagedRun(InputError):
    """A file of a run's folder that is not what training writes."""


_OF_PLAN = ("batch", "step_s", "images_per_s", "peak_bytes", "steps", "hours", "cost", "device")


def _object_in(path: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object with these keys at least; DamagedRun for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DamagedRun(f"'{path}' is missing", mend="bring back a copy of the run") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DamagedRun(f"'{path}' is damaged: {reason}", mend=_MEND_FILE) from error
    if not isinstance(content, dict) or not content.keys() >= set(keys):
        raise DamagedRun(f"'{path}' is damaged: it lacks what training writes", mend=_MEND_FILE)
    return content


_MEND_FILE = "bring back a copy of it, or remove it"


class NoRun(InputError):
    """A folder with a `recipe.yaml` that no training wrote."""


def _no_run(path: Path) -> NoRun:
    return NoRun(f"'{path / RECIPE}' is no recipe of a run", mend="a run's recipe has every key")


@dataclass(frozen=True)
class RunSummary:
    """One line of `darkroom runs`. Losses and rates are of the newest step."""

    path: str
    task: str
    base: str
    state: str  # running | finished | stopped
    step: int
    steps: int
    loss: float | None
    heldout_loss: float | None
    images_per_s: float | None
    wall_s: float | None
    usd: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def list_runs(root: Path | str) -> list[RunSummary]:
    """The runs in a folder (or the one run it is), by name."""
    root = Path(root)
    if not root.is_dir():
        raise InputError(f"no folder '{root}'")
    folders = _run_folders(root)
    if folders == [root]:
        return [summarise(Run(root))]
    found = []
    for path in folders:
        try:
            found.append(summarise(Run(path)))
        except NoRun:  # somebody's own recipe.yaml
            continue
        except DamagedRun as error:  # the others are listed
            LOG.warning("%s", error)
    return found


def summarise(run: Run) -> RunSummary:
    """How far a run is."""
    recipe, rows, bill = run.recipe, run.metrics(), run.bill()
    step = rows[-1]["step"] if rows else 0
    try:
        task, base, steps = str(recipe["task"]), str(recipe["model"]["base"]), int(recipe["train"]["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise _no_run(run.path) from error
    finished = bool(run.outputs) and (step >= steps or run.ended_early)
    state = "running" if run.is_running() else "finished" if finished else "stopped"
    return RunSummary(
        path=str(run.path),
        task=task,
        base=base,
        state=state,
        step=step,
        steps=steps,
        loss=_last(rows, "loss"),
        heldout_loss=_last(rows, "heldout_loss"),
        images_per_s=_last(rows, "images_per_s"),
        wall_s=bill.wall_s if bill else None,
        usd=bill.usd if bill else None,
    )


def compare(*paths: Path | str) -> dict[str, Any]:
    """Runs side by side: what differs of settings, last metrics and bills, each by its dotted key.

    Each value is (of the first run, of the second, ...).
    """
    found = [Run.open(path) for path in paths]
    settings = [run.recipe for run in found]
    metrics = [_final(run.metrics()) for run in found]
    bills = [bill.model_dump(mode="json") if (bill := run.bill()) else {} for run in found]
    return {
        "runs": tuple(str(path) for path in paths),
        "settings": _differing(settings),
        "metrics": _differing(metrics),
        "bill": _differing(bills),
    }


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where two nested settings differ: dotted key -> (value of a, value of b), None where missing."""
    return {key: (was, is_now) for key, (was, is_now) in _differing([a, b]).items()}


def is_free(path: Path) -> bool:
    """Whether a run may be made here: nothing is there, or what a process killed while making one left."""
    if not path.exists():
        return True
    own = {ENVIRONMENT, "checkpoints", "samples", "data"}
    return path.is_dir() and all(p.name in own or p.name.startswith(".") for p in path.iterdir())


def numbered_folder(path: Path) -> Path:
    """The folder itself if it is free, or the first free of `name-2`, `name-3`, ...

    A number at a name's end counts on where the name without it is there: `rank-8` is followed by `rank-8-2`.
    """
    if not path.exists():
        return path
    taken = {found.name for found in path.parent.iterdir()}
    stem = re.sub(r"-\d+$", "", path.name)
    stem = stem if stem in taken else path.name
    number = 2
    while f"{stem}-{number}" in taken:
        number += 1
    return path.with_name(f"{stem}-{number}")


def _try_lock(descriptor: int, *, tries: int = 1) -> bool:
    for left in reversed(range(tries)):
        try:
            lock_file(descriptor)
            return True
        except BlockingIOError:
            time.sleep(0.05 if left else 0)
    return False


def _run_folders(root: Path) -> list[Path]:
    if (root / RECIPE).is_file():
        return [root]
    return sorted(file.parent for file in root.glob(f"*/{RECIPE}")) if root.is_dir() else []


def _last(rows: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((row[key] for row in reversed(rows) if key in row), None)


def _final(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    final: dict[str, Any] = {}
    for row in rows[-1000:]:
        final |= row
    return final


def _side_by_side(*columns: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: tuple(column.get(key) for column in columns) for key in keys}


def _differing(columns: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """By dotted key, the values of nested settings that are not all the same."""
    rows = _side_by_side(*map(_flat, columns))
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


# ---- tidy tables: the columns are the fields of a pydantic model
#
# A table is replaced whole when rows are added, so that a reader never sees half of one.

Row = TypeVar("Row", bound=BaseModel)


def append_rows(path: Path, kind: type[Row], rows: Iterable[Row], *, digits: int = 6) -> Path:
    """Add rows, numbers with `digits` significant ones; InputError where the file is another table."""
    columns = tuple(kind.model_fields)
    before = check_table(path, kind)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not before:
        writer.writerow(columns)
    writer.writerows([_cell(getattr(row, name), digits) for name in columns] for row in rows)
    separator = "" if before.endswith("\n") or not before else "\n"
    write_atomically(path, before + separator + text.getvalue(), durable=True)
    return path


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a table; InputError where there is none."""
    if not path.is_file():
        raise InputError(f"no file '{path}'")
    dicts = [name for name, field in kind.model_fields.items() if "dict" in str(field.annotation)]
    found = []
    reader = csv.DictReader(io.StringIO(_text(path, kind)), strict=True)
    try:
        for cells in reader:
            if None in cells or None in cells.values():
                raise ValueError("another number of cells than the first line")
            values = {name: text for name, text in cells.items() if text}
            values |= {name: json.loads(cells[name] or "{}") for name in dicts}
            found.append(kind.model_validate(values))
    except (csv.Error, ValueError, RecursionError) as error:
        raise InputError(
            f"'{path}', line {reader.reader.line_num}, is no row of {_name(kind)}: {_reason(error)}"
        ) from error
    return found


def _name(kind: type[BaseModel]) -> str:
    return f"{kind.__name__.lower()}s"


def _reason(error: Exception) -> str:
    """Why, in one line."""
    if isinstance(error, ValidationError):
        return first_fault(error.errors())
    return " ".join(str(error).split())[:200]


def check_table(path: Path, kind: type[Row]) -> str:
    """What stands in the file, empty where there is none; InputError unless rows can be added to it."""
    if path.is_dir():
        raise InputError(f"'{path}' is a folder", mend="give the name of a CSV file")
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"'{path}' cannot be written: '{place}' takes no files", mend="choose another --out")
    return _text(path, kind) if path.exists() else ""


def _text(path: Path, kind: type[Row]) -> str:
    what = f"no table of {_name(kind)}"
    try:
        text = path.read_text(encoding="utf-8-sig")  # as Excel saves it
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is {what}", mend="write to a new file") from error
    header = tuple(text.split("\n", 1)[0].rstrip("\r").split(","))
    if text and header != tuple(kind.model_fields):
        raise InputError(
            f"'{path}' is {what}: it has the columns {', '.join(header)[:80]}", mend="write to a new file"
        )
    return text


def _cell(value: object, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
