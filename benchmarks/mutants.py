"""How many deliberate mistakes in a module its tests find: one row a module in `benchmarks/mutants.csv`.

    pip install cosmic-ray
    nice -n 10 python benchmarks/mutants.py --minutes 25
    nice -n 10 python benchmarks/mutants.py --minutes 25 --module data/order.py   # its rows alone are new

Mutants are the ones listed in CHOSEN, and of each module in TESTS as many of cosmic-ray's as time allows, in
an order drawn by seed. Each runs in a fork of a process that has imported torch, and only the tests that
reach the changed line run, quickest first; a change of what runs at import takes them all. The source on disk
stays as it is. What these tests do not notice is tried on all tests of the module; a mutant that none of them
notices has survived. Those that change nothing anybody can see stand in EQUIVALENT, each with its reason,
and are not run. Linux, macOS.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.machinery
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/darkroom"
TESTS = {
    "sample/solvers.py": ["sample/test_solvers.py", "sample/test_flow.py", "sample/test_schedules.py"],
    "sample/denoise.py": [
        "sample/test_denoise.py",
        "sample/test_prompt_schedule.py",
        "sample/test_from_pictures.py",
        "sample/test_variations.py",
    ],
    "data/order.py": ["data/test_order.py"],
    "train/objective.py": [
        "train/test_objective.py",
        "train/test_flow_objective.py",
        "train/test_losses.py",
        "train/test_step.py",
    ],
    "serve/engine/fairness.py": ["serve/engine/test_fairness.py"],
    "serve/jobs/admission.py": ["serve/test_admission.py"],
    "serve/jobs/intake.py": ["serve/test_admission.py", "serve/test_intake.py"],
    "models/adapters/bank.py": ["models/adapters/test_bank.py"],
    "train/checkpoint/format.py": ["train/checkpoint/test_format.py"],
    "train/checkpoint/storage.py": ["train/checkpoint/test_storage.py"],
    "train/checkpoint/saver.py": ["train/checkpoint/test_saver.py"],
}
OPERATORS = (
    "Comparison",
    "BinaryOperator",
    "Number",
    "ReplaceUnary",
    "ReplaceAnd",
    "ReplaceOr",
    "ReplaceTrue",
)
# Text before and after: each stands once in its module.
CHOSEN: tuple[tuple[str, str, str], ...] = (
    ("sample/solvers.py", "True)) and count < 15", "True)) and count < 12"),
    ("sample/solvers.py", "return 2 if i == count - 2 and few", "return 2 if i == count - 3 and few"),
    ("sample/solvers.py", 'timestep_scaling", 10.0', 'timestep_scaling", 11.0'),
    ("sample/solvers.py", "sigma.max() ** 2 + 1)", "sigma.max() ** 2)"),
    ("sample/solvers.py", "plan.eta > 0", "plan.eta >= 0"),
    ("sample/denoise.py", "low <= step / len(self.table) < high", "low <= step / len(self.table) <= high"),
    ("sample/denoise.py", "low <= step / len(self.table) < high", "low < step / len(self.table) < high"),
    ("sample/denoise.py", "self.guidance > 1", "self.guidance >= 1"),
    ("sample/denoise.py", "if len(text) == length]) for", "if len(text) <= length]) for"),
    ("sample/denoise.py", "self._rescale * ratio + 1 - self._rescale", "self._rescale * ratio + 1"),
    ("sample/denoise.py", "earlier[: 2 * row.table.earlier]", "earlier[: row.table.earlier]"),
    ("sample/denoise.py", "if step < len(table) else [1.0, 0.0]", "if step <= len(table) else [1.0, 0.0]"),
    ("data/order.py", "missing if place > self._tail_place", "missing if place >= self._tail_place"),
    ("data/order.py", "(offset >= self._held_offset(stratum))", "(offset > self._held_offset(stratum))"),
    (
        "data/order.py",
        "< self.total\n        return self.strata",
        "<= self.total\n        return self.strata",
    ),
    ("data/order.py", "index = index[index < self.num_rows]", "index = index[index <= self.num_rows]"),
    ("data/order.py", "np.arange(rounds) * _GOLDEN_RATIO) % 1.0", "np.arange(rounds)) % 1.0"),
    ("data/order.py", "if stride < 2:", "if stride < 1:"),
    ("train/objective.py", "torch.clamp(gamma / snr, max=1.0)", "torch.clamp(gamma / snr, max=2.0)"),
    ("train/objective.py", "clipped / (snr + 1)", "clipped / snr"),
    ("train/objective.py", "/ (1 + (self.shift - 1) * t_B)", "/ (1 + self.shift * t_B)"),
    ("train/objective.py", ".clamp(min=1e-6)", ".clamp(min=1e-1)"),
    ("train/objective.py", "return max(1.0, math.sqrt(", "return max(0.0, math.sqrt("),
    ("train/objective.py", '0.0) > config.get("beta_end"', '0.0) >= config.get("beta_end"'),
    ("serve/engine/fairness.py", "2 * quantum)", "9 * quantum)"),
    ("serve/engine/fairness.py", "if entry.cost <= self.credit[name]", "if entry.cost < self.credit[name]"),
    ("serve/engine/fairness.py", "self._had.get(key, least) - least", "self._had.get(key, 0.0) - least"),
    ("serve/engine/fairness.py", "sorted(self.rings, reverse=True)", "sorted(self.rings)"),
    ("serve/engine/fairness.py", "return max(1.0, item.work)", "return item.work"),
    ("serve/jobs/admission.py", "if given > most:", "if given >= most:"),
    ("serve/jobs/intake.py", "if there + num > most:", "if there + num >= most:"),
    ("serve/jobs/intake.py", "(left - num if left >= needed else left, now)", "(left - num, now)"),
    (
        "serve/jobs/admission.py",
        "max(shape.solver_steps, last.solver_steps) > limits.steps + 1",
        "shape.solver_steps > limits.steps + 1",
    ),
    ("serve/jobs/intake.py", "max(1.0, per_s * 10)", "max(1.0, per_s * 60)"),
    ("serve/jobs/admission.py", "if pixels > limits.upload_pixels:", "if pixels >= limits.upload_pixels:"),
    ("models/adapters/bank.py", "more <= MOST_KEPT_BYTES", "more > MOST_KEPT_BYTES"),
    ("models/adapters/bank.py", "stacked[slot].zero_()", "pass"),
    ("models/adapters/bank.py", "(layer.up.float() * layer.scale)", "(layer.up.float())"),
    ("models/adapters/bank.py", "if len(choice) > self.most_a_row:", "if len(choice) >= self.most_a_row:"),
    ("models/adapters/bank.py", "kept.versions != versions", "False"),
    ("models/adapters/bank.py", "layer.stride == (1, 1):", "True:"),
)
# A line of a module as a mutant leaves it, and why it does the same as the line that was there.
EQUIVALENT: dict[tuple[str, str], str] = {}
COLUMNS = (
    *("module", "mutants_from", "possible", "mutants", "killed", "survived", "equivalent"),
    *("tests", "wall_s", "survivors", "machine", "versions", "commit", "date"),
)


@dataclass(frozen=True)
class Mutant:
    """A module's text with one mistake, the lines that it changes, and what it is."""

    module: str
    text: str
    lines: frozenset[int]
    about: str


def make_mutant(module: str, whole: str, text: str) -> Mutant:
    """A mistake, with the lines of the statement that it changes."""
    pairs = enumerate(zip(whole.splitlines(), text.splitlines(), strict=False), 1)
    line, changed = next((i, after.strip()) for i, (before, after) in pairs if before != after)
    return Mutant(module, text, statement(whole, line), f"{line}: {changed}")


def chosen(module: str) -> Iterator[Mutant]:
    """Those listed above."""
    whole = (SOURCE / module).read_text()
    for of, before, after in CHOSEN:
        if of == module:
            assert whole.count(before) == 1, (module, before, whole.count(before))
            yield make_mutant(module, whole, whole.replace(before, after))


def drawn(module: str, seed: int) -> tuple[int, Iterator[Mutant]]:
    """How many mutants cosmic-ray's operators make of a module, and all of them in an order drawn by seed."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    whole = (SOURCE / module).read_text()
    lines = whole.splitlines()
    first_function = next(i for i, line in enumerate(lines, 1) if line.lstrip().startswith("def "))
    nodes = list(ast_nodes(get_ast(whole)))
    places = []
    for name in (name for name in operator_names() if any(part in name for part in OPERATORS)):
        positions = [at for node in nodes for at in get_operator(name)().mutation_positions(node)]
        for occurrence, ((line, _), _) in enumerate(positions):
            if line >= first_function and " | " not in lines[line - 1]:  # a type, not a value
                places.append((name, occurrence))
    random.Random(seed).shuffle(places)
    texts = (mutate_code(whole, get_operator(name)(), occurrence) for name, occurrence in places)
    return len(places), (make_mutant(module, whole, text) for text in texts)


@dataclass(frozen=True)
class Tests:
    """The tests of a module: how long each takes, and the lines of the module that it reaches."""

    seconds: dict[str, float]
    lines: dict[str, frozenset[int]]
    imported: frozenset[int]

    def all(self) -> list[str]:
        return sorted(self.seconds, key=self.seconds.__getitem__)

    def reaching(self, changed: frozenset[int]) -> list[str]:
        """The tests that reach these lines, quickest first."""
        if changed & self.imported:
            return self.all()
        return [name for name in self.all() if changed & self.lines.get(name, frozenset())]


class Reached:
    """A pytest plugin that notes each test's duration and the lines of one file that it reaches."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.lines: dict[str, set[int]] = {}
        self.seconds: dict[str, float] = {}
        self.now: set[int] = set()

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self.path:
            return None
        self.now.add(frame.f_lineno)
        return self.trace

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now = self.lines.setdefault(nodeid, set())
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


class Only:
    """A pytest plugin that runs some tests alone, in their order."""

    def __init__(self, names: list[str]) -> None:
        self.places = {name: place for place, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept = [item for item in items if item.nodeid in self.places]
        items[:] = sorted(kept, key=lambda item: self.places[item.nodeid])


def tests_of(module: str) -> Tests:
    """Runs a module's tests as they are; ends the program where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "reached.json"
        child = os.fork()
        if not child:
            reached = Reached(SOURCE / module)
            code = _pytest(module, reached, [])
            lines = {name: sorted(found) for name, found in reached.lines.items()}
            result.write_text(json.dumps([reached.seconds, lines]))
            os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the tests of {module} fail as they are")
        seconds, lines = json.loads(result.read_text())
    return Tests(seconds, {name: frozenset(at) for name, at in lines.items()}, run_at_import(module))


def run_at_import(module: str) -> frozenset[int]:
    """The lines of a module's and its classes' own code, without those of functions."""
    found: set[int] = set()

    def walk(code: CodeType) -> None:
        found.update(line for _, _, line in code.co_lines() if line)
        for inner in code.co_consts:
            if isinstance(inner, CodeType) and "__qualname__" in inner.co_names:  # a class
                walk(inner)

    walk(compile((SOURCE / module).read_text(), module, "exec"))
    return frozenset(found)


def statement(whole: str, line: int) -> frozenset[int]:
    """The lines of the statement at a line: all of a simple one, the head of one with a body."""
    spans = []
    for node in ast.walk(ast.parse(whole)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            if node.lineno <= line <= end:
                spans.append(range(node.lineno, end + 1))
    return frozenset(min(spans, key=len, default=range(line, line + 1)))


def start(mutant: Mutant, tests: list[str], seconds: int) -> int:
    """Runs these tests with the mistake in a process of their own; its number."""
    child = os.fork()
    if child:
        return child
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    _put_in_place(SOURCE / mutant.module, mutant.text)
    os._exit(_pytest(mutant.module, Only(tests), ["-x"]))


def run(mutants: Iterator[Mutant], tests: Tests, workers: int, until: float) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant and whether it survives, several at a time, until the time is over."""
    running: dict[int, tuple[Mutant, bool, float]] = {}
    again: list[Mutant] = []  # what the tests that reach it do not notice
    while True:
        while len(running) < workers:
            late = time.monotonic() > until
            if again:
                mutant, chosen = again.pop(), tests.all()
            elif late or (mutant := next(mutants, None)) is None:  # type: ignore[assignment]
                break
            else:
                chosen = tests.reaching(mutant.lines) or tests.all()
            everything = len(chosen) == len(tests.seconds)
            limit = 15 + 2 * round(sum(tests.seconds[name] for name in chosen))  # CPU seconds
            latest = time.monotonic() + 60 * limit  # of one that waits; others may use the machine
            running[start(mutant, chosen, limit)] = (mutant, everything, latest)
        if not running:
            return
        for child, (mutant, everything, latest) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended and time.monotonic() < latest:
                continue
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            del running[child]
            passed = bool(ended) and status == 0
            if passed and not everything:
                again.append(mutant)
            else:
                print(f"  {'survived' if passed else 'killed'}: {mutant.about}", flush=True)
                yield mutant, passed
        time.sleep(0.02)


def _pytest(module: str, plugin: Any, more: list[str]) -> int:
    """A module's tests in this process, without their output; the exit code."""
    import pytest

    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)
    files = [str(ROOT / "tests" / name) for name in TESTS[module]]
    quiet = ["-q", "-m", "not nightly", "-p", "no:cacheprovider", "--tb=no", f"--rootdir={ROOT}"]
    return int(pytest.main([*quiet, *more, *files], plugins=[plugin]))


def _put_in_place(path: Path, text: str) -> None:
    """Imports of the module read this text from now on."""
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
        if Path(self.path) == path:
            return compile(text, str(path), "exec")
        return plain(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=25, help="of all")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument(
        "--module", action="append", choices=sorted(TESTS), help="this alone; may be repeated"
    )
    parser.add_argument("--chosen-only", action="store_true", help="without cosmic-ray's")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cosmic-ray's")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/mutants.csv")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "src"))
    # What every fork needs; not lance, which does not bear forking.
    import diffusers  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    until = time.monotonic() + 60 * args.minutes
    modules = args.module or list(TESTS)
    for place, module in enumerate(modules):
        tests = tests_of(module)
        listed = list(chosen(module))
        kinds = {"chosen": (len(listed), iter(listed))}
        if not args.chosen_only:
            kinds["cosmic-ray"] = drawn(module, args.seed)
        print(f"{module}: {len(tests.seconds)} tests, {sum(tests.seconds.values()):.1f} s", flush=True)
        rows = []
        for kind, (possible, mutants) in kinds.items():
            start_s = time.monotonic()
            left_s = until - start_s
            share_s = left_s if kind == "chosen" else left_s / (len(modules) - place)
            same: list[Mutant] = []
            done = list(run(without(mutants, same), tests, args.workers, start_s + share_s))
            survivors = [mutant.about for mutant, survives in done if survives]
            print(f"  {kind}: {len(done)} of {possible} run, {len(survivors)} survived", flush=True)
            counts = (possible, len(done), len(done) - len(survivors), len(survivors), len(same))
            more = (len(tests.seconds), round(time.monotonic() - start_s), "; ".join(survivors))
            rows.append(dict(zip(COLUMNS, (module, kind, *counts, *more, *where()), strict=True)))
        write(args.out, rows)


def without(mutants: Iterator[Mutant], same: list[Mutant]) -> Iterator[Mutant]:
    """Mutants but for those of EQUIVALENT, which are put into `same`."""
    for mutant in mutants:
        if (mutant.module, mutant.about.partition(": ")[2]) in EQUIVALENT:
            same.append(mutant)
        else:
            yield mutant


def where() -> tuple[str, str, str, str]:
    """Machine, versions, commit and date."""
    from darkroom.hardware.machine import git_commit, machine, versions

    packages = ("torch", "diffusers", "numpy", "pytest", "cosmic-ray")
    commit = (git_commit(ROOT) or {}).get("commit", "")[:7]
    return machine().name, json.dumps(versions(packages)), commit, f"{datetime.now(UTC):%Y-%m-%d}"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Into a table of all modules, in the place of what it has of theirs."""
    new = {row["module"] for row in rows}
    kept = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if row["module"] not in new]
    order = list(TESTS)
    rows = sorted(kept + rows, key=lambda row: (order.index(row["module"]), row["mutants_from"]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
