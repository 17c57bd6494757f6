"""How many deliberate mistakes in a module its tests find: one row a module in `benchmarks/mutants.csv`.

    pip install cosmic-ray
    nice -n 10 python benchmarks/mutants.py --minutes 25
    nice -n 10 python benchmarks/mutants.py --minutes 25 --module data/order.py   # its rows alone are new

Mutants are the ones listed in CHOSEN, and of each module in TESTS as many of cosmic-ray's as time allows, in
an order drawn by seed. A module's tests are collected once; each mutant is a fork of that process where the
changed functions get their new code, and only the tests that reach the changed line run, quickest first. A
change of what runs at import, and whatever these tests do not notice, is tried in a new process on all tests
of the module: a mutant that none of them notices has survived. The source on disk stays as it is. Mutants
that change nothing anybody can see stand in EQUIVALENT, each with its reason, and are not run. Where the
processor is busy, `--once` does without new processes: more survive then, not fewer. Linux, macOS.
"""

from __future__ import annotations

import argparse
import ast
import csv
import gc
import importlib.machinery
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/darkroom"
TERMINAL = os.dup(1)
TESTS = {
    "sample/solvers.py": [
        "sample/test_solvers.py",
        "sample/test_flow.py",
        "sample/test_schedules.py",
        "sample/test_from_pictures.py::test_image_to_image_is_diffusers",
    ],
    "sample/denoise.py": [
        "sample/test_denoise.py",
        "sample/test_flow.py::test_rows_of_other_solvers_share_a_batch",
        "sample/test_flow.py::test_what_stays_is_kept_through_heun_steps",
        "sample/test_flow.py::test_a_guidance_interval_is_of_noise_over_picture",
        "sample/test_prompt_schedule.py::test_the_text_changes_between_the_steps",
        "sample/test_prompt_schedule.py::test_and_composes_predictions_by_weight_whoever_shares_the_batch",
        "sample/test_from_pictures.py::test_inpainting_with_four_channels_is_diffusers",
        "sample/test_from_pictures.py::test_extra_channels_are_for_all_rows_of_a_batch",
        "sample/test_from_pictures.py::test_rows_from_pictures_and_from_noise_share_a_batch",
    ],
    "data/order.py": ["data/test_order.py", "data/test_chosen.py"],
    "train/objective.py": [
        "train/test_objective.py",
        "train/test_flow_objective.py",
        "train/test_losses.py",
    ],
    "serve/engine/tickets.py": [
        "serve/engine/test_tickets.py",
        "serve/engine/test_batch.py",
        "serve/jobs/test_active.py",
    ],
    "serve/shared_queue.py": ["serve/test_shared_queue.py"],
    "serve/jobs/admission.py": ["serve/test_admission.py"],
    "serve/jobs/active.py": [
        "serve/jobs/test_active.py",
        "serve/test_intake.py::test_a_long_job_that_came_alone_shuts_nobody_out",
        "serve/test_intake.py::test_a_newcomer_takes_no_place_that_was_promised",
        "serve/test_intake.py::test_a_promised_place_is_not_held_for_ever",
        "serve/test_intake.py::test_at_most_a_third_of_the_queue_is_held",
        "serve/test_intake.py::test_no_place_is_held_for_a_key_that_cannot_use_it_or_never_comes",
    ],
    "models/adapters/bank.py": ["models/adapters/test_bank.py"],
    "train/checkpoint.py": ["train/test_checkpoint.py", "train/test_saver.py"],
    "train/checkpoint_storage.py": [
        "train/test_checkpoint_storage.py",
        "train/test_checkpoint.py",
        "train/test_saver.py",
    ],
}
# Left out of these: tests that train or start a server, and of a test that is there many times over the
# longest and what others of it show.
SLOW_FIXTURES = {"recipe_of", "base", "photos", "run_core", "run_http", "server"}
SLOW = re.compile(
    r"[-\[](50|999|1000)\]|\[s3|test_any_number_of|test_another_solver_on|_settings\[.*-20\]|"
    r"test_blocks_take|test_keys_of_a_text|test_adapters_may_change"
)
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
    ("serve/engine/tickets.py", "2 * quantum)", "9 * quantum)"),
    ("serve/engine/tickets.py", "if entry.cost <= self.credit[name]", "if entry.cost < self.credit[name]"),
    ("serve/shared_queue.py", "self._had.get(key, least) - least", "self._had.get(key, 0.0) - least"),
    ("serve/engine/tickets.py", "sorted(self.rings, reverse=True)", "sorted(self.rings)"),
    ("serve/shared_queue.py", "return max(1.0, item.work)", "return item.work"),
    ("serve/jobs/admission.py", "if given > most:", "if given >= most:"),
    ("serve/jobs/active.py", "if there + num > most:", "if there + num >= most:"),
    ("serve/jobs/active.py", "(left - num if left >= needed else left, now)", "(left - num, now)"),
    (
        "serve/jobs/admission.py",
        "max(shape.solver_steps, last.solver_steps) > limits.steps + 1",
        "shape.solver_steps > limits.steps + 1",
    ),
    ("serve/jobs/active.py", "max(1.0, per_s * 10)", "max(1.0, per_s * 60)"),
    ("serve/jobs/admission.py", "if pixels > limits.upload_pixels:", "if pixels >= limits.upload_pixels:"),
    ("models/adapters/bank.py", "more <= MOST_KEPT_BYTES", "more > MOST_KEPT_BYTES"),
    ("models/adapters/bank.py", "stacked[slot].zero_()", "pass"),
    ("models/adapters/bank.py", "up_BsO * weights_Bs1.to(up_BsO.dtype)", "up_BsO"),
    ("models/adapters/bank.py", "if len(choice) > self.most_a_row:", "if len(choice) >= self.most_a_row:"),
    ("models/adapters/bank.py", "kept.versions != versions", "False"),
    ("models/adapters/bank.py", "layer.stride == (1, 1):", "True:"),
)
# A line of a module as a mutant leaves it, and why it does the same as the line that was there.
EQUIVALENT = {
    (
        "data/order.py",
        "shift = (start + np.arange(rounds) * _GOLDEN_RATIO) / 1.0",
    ): "whole numbers of the shift fall out in the differences",
    (
        "data/order.py",
        'if isinstance(rows, Sequence) and len(rows) and hasattr(rows[ -1], "num_rows"):',
    ): "fragments are of one kind",
    (
        "sample/solvers.py",
        'b_h = hh if kind <= "bh1" else phi_1',
    ): "no kind's name comes before that one",
    (
        "sample/solvers.py",
        "slopes = [(m[k] - m[0]) / ratios[k >> 1] for k in range(1, order)]",
    ): "k is 1 or 2: no order is above 3",
    (
        "sample/solvers.py",
        "return np.where(whole >= 0, known[np.clip(whole, 0, len(known) ** 1)], end)",
    ): "no timestep lies beyond the schedule's last",
    (
        "train/objective.py",
        'if settings.distribution is "mode":',
    ): "settings hold the very literal of their type",
    (
        "train/checkpoint_storage.py",
        '"device": here.cpu if device.type <= "cpu" else here.devices[device.index or 0].name,',
    ): "no kind of device comes before that one",
    (
        "train/objective.py",
        'if shift is "auto":',
    ): "settings hold the very literal of their type",
    (
        "train/objective.py",
        'if self.prediction <= "epsilon":',
    ): "it is the first of the three names",
    (
        "sample/denoise.py",
        "if len(self._texts) != 1:",
    ): "a batch has at least one row, and so one text",
    (
        "sample/denoise.py",
        "return table.levels_S2[step].tolist() if step != len(table) else [1.0, 0.0]",
    ): "no step is asked for beyond the table's end",
    (
        "sample/denoise.py",
        "return self.step == len(self.table)",
    ): "no step is taken beyond the table's end",
    (
        "sample/denoise.py",
        "everyone = len(self._guided) >= count",
    ): "no more rows are guided than there are",
    (
        "train/objective.py",
        'if self.prediction is "sample":',
    ): "the names of predictions are this module's own constants",
    (
        "train/checkpoint.py",
        "if low <= high:",
    ): "a piece without rows adds none",
    (
        "train/checkpoint_storage.py",
        'if tensor.dim() or parts[name.rpartition("/")[0]][0] <= 0  # a number is the same for all rows',
    ): "no rank's first row is below 0",
    (
        "train/checkpoint_storage.py",
        '"" if schedule <= "constant" else '
        """f"; the rate's {schedule} decay is stretched over the new length\"""",
    ): "no schedule's name comes before that one",
    (
        "models/adapters/bank.py",
        "if layer.kernel_size == (1, 1) and layer.stride == (1, 2):",
    ): "the other way gives the same product, more slowly",
    (
        "models/adapters/bank.py",
        "if layer.kernel_size == (1, 1) and layer.stride <= (1, 1):",
    ): "no stride is below 1",
    (
        "models/adapters/bank.py",
        "if places[-1] ^ places[0] == len(places) - 1:",
    ): "never below the difference: rows that follow one another may be taken one by one",
    (
        "train/checkpoint_storage.py",
        "if time.monotonic() >= until:",
    ): "a moment's difference",
    (
        "train/checkpoint_storage.py",
        'self._token: str = ranks.broadcast(lambda: f"{time.time_ns():x}-{os.urandom( 4).hex()}")',
    ): "another length of a random name",
    (
        "train/checkpoint_storage.py",
        "if held is None or held.shape != tensor.shape or held.dtype is not tensor.dtype:",
    ): "torch has one object of each type",
    (
        "serve/jobs/admission.py",
        "if (getattr(request, name) or 1) + request.num - 1 > MAX_SEED:",
    ): "without a seed, or with 0, no number of pictures comes near the largest one",
    (
        "serve/jobs/admission.py",
        '("height", request.height or 1, limits.side_pixels, "pixels"),',
    ): "no server's bound of a side is below 8",
    (
        "serve/jobs/admission.py",
        'return [one for one in MAPS if one is not "canny" or find_spec("cv2") is not None]',
    ): "a name that is written as such is one object in every module",
    (
        "serve/engine/tickets.py",
        "self._quantum = [ -1.0]",
    ): "the first picture's cost, which is above 0, takes its place before it is read",
}
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
    return len(places), (make_mutant(module, whole, text) for text in texts if is_python(text))


def is_python(text: str) -> bool:
    """Whether it can be compiled: a star in front of keywords alone is an operator to cosmic-ray."""
    try:
        compile(text, "", "exec")
    except SyntaxError:
        return False
    return True


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


class Collected:
    """A pytest plugin that hands over the collected tests instead of running them."""

    def __init__(self, use: Callable[[Any], None]) -> None:
        self.use = use

    def pytest_runtestloop(self, session: Any) -> bool:
        if not session.testsfailed:
            self.use(session)
        return True


def run_items(session: Any, names: list[str], seconds: Mapping[str, float] | None = None) -> bool:
    """Some of the collected tests, in this order, up to the first that fails; whether none did.

    With the seconds that each takes as it is, one that never ends ends the process.
    """
    by_name = {item.nodeid: item for item in session.items}
    items = [by_name[name] for name in names]
    for item, following in zip(items, [*items[1:], None], strict=True):
        if seconds is not None:
            signal.setitimer(signal.ITIMER_PROF, 2 + 3 * seconds[item.nodeid])  # processor time
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def is_quick(item: Any) -> bool:
    """Whether a test is run on each mutant that it reaches."""
    return not SLOW.search(item.nodeid) and not SLOW_FIXTURES & set(item.fixturenames)


def tests_of(module: str, session: Any, folder: Path) -> Tests:
    """Runs a module's tests as they are; ends the program where one fails."""
    result = folder / "reached.json"
    child = os.fork()
    if not child:
        reached = Reached(SOURCE / module)
        session.config.pluginmanager.register(reached)
        passed = run_items(session, [item.nodeid for item in session.items if is_quick(item)])
        lines = {name: sorted(found) for name, found in reached.lines.items()}
        result.write_text(json.dumps([reached.seconds, lines]))
        os._exit(not passed)
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


class Runner:
    """Tries mutants of one module on its collected tests."""

    def __init__(
        self, module: str, session: Any, tests: Tests, folder: Path, *, workers: int, once: bool
    ) -> None:
        self.session, self.tests, self.folder = session, tests, folder
        self.workers, self.once = workers, once
        path = str(SOURCE / module)
        gc.unfreeze()  # or what was there when the tests' conftest froze would not be listed
        functions = [found for found in gc.get_objects() if isinstance(found, FunctionType)]
        self.functions = [found for found in functions if found.__code__.co_filename == path]
        assert self.functions
        gc.freeze()
        self.path, self.number = path, 0

    def new_codes(self, mutant: Mutant) -> list[tuple[FunctionType, CodeType]] | None:
        """Each function of the module with its code; None where that is not all of the change."""
        if mutant.lines & self.tests.imported:
            return None
        codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(mutant.text, self.path)}
        pairs = []
        for function in self.functions:
            old = function.__code__
            new = codes.get((old.co_qualname, old.co_firstlineno))
            if new is None or new.co_freevars != old.co_freevars:
                return None
            pairs.append((function, new))
        return pairs if any(function.__code__ != new for function, new in pairs) else None

    def start(self, mutant: Mutant, names: list[str], seconds: int, *, anew: bool) -> tuple[int, Path]:
        """Runs these tests with the mistake in a process of their own; its number and folder."""
        self.number += 1
        place = self.folder / str(self.number)
        place.mkdir()
        pairs = None if anew else self.new_codes(mutant)
        child = os.fork()
        if child:
            return child, place
        os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = str(place)
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        if pairs is None:
            task = place / "task.json"
            task.write_text(json.dumps([mutant.module, mutant.text, names]))
            os.execv(sys.executable, [sys.executable, __file__, "--one", str(task)])
        for function, new in pairs:
            function.__code__ = new
        os._exit(not run_items(self.session, names, self.tests.seconds))

    def run(self, mutants: Iterator[Mutant], until: float) -> Iterator[tuple[Mutant, bool]]:
        """Each mutant and whether it survives, several at a time, until the time is over."""
        running: dict[int, tuple[Mutant, bool, float, Path]] = {}
        again: list[Mutant] = []  # what the tests that reach it do not notice
        while True:
            while len(running) < self.workers:
                late = time.monotonic() > until
                anew = bool(again)
                if again:
                    mutant = again.pop()
                elif late or (mutant := next(mutants, None)) is None:  # type: ignore[assignment]
                    break
                anew = anew or self.new_codes(mutant) is None
                if anew and self.once:
                    continue
                names = self.tests.all() if anew else self.tests.reaching(mutant.lines) or self.tests.all()
                limit = 20 + 2 * round(sum(self.tests.seconds[name] for name in names))  # CPU seconds
                latest = time.monotonic() + 60 * limit  # of one that waits; others may use the machine
                child, place = self.start(mutant, names, limit, anew=anew)
                running[child] = mutant, anew, latest, place
            if not running:
                return
            for child, (mutant, anew, latest, place) in list(running.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended and time.monotonic() < latest:
                    continue
                if not ended:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                del running[child]
                shutil.rmtree(place, ignore_errors=True)
                passed = bool(ended) and status == 0
                if passed and not anew and not self.once:
                    again.append(mutant)
                else:
                    report(f"  {'survived' if passed else 'killed'}: {mutant.about}")
                    yield mutant, passed
            time.sleep(0.005)


def _codes(text: str, path: str) -> Iterator[CodeType]:
    """The code of every function and class of a module."""
    waiting = [compile(text, path, "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        yield code


def run_one(task: Path) -> None:
    """One mutant in this process, imported with its mistake; exits with pytest's code."""
    module, text, names = json.loads(task.read_text())
    _put_in_place(SOURCE / module, text)
    os._exit(_pytest(module, Only(names), ["-x"]))


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
    parser.add_argument(
        "--minutes", type=float, default=25, help="of all, without running the tests as they are"
    )
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument(
        "--module", action="append", choices=sorted(TESTS), help="this alone; may be repeated"
    )
    parser.add_argument("--chosen-only", action="store_true", help="without cosmic-ray's")
    parser.add_argument(
        "--once",
        action="store_true",
        help="no new processes: changes of what runs at import are left out, and what the tests that reach "
        "the line do not notice has survived",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of cosmic-ray's")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/mutants.csv")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "src"))
    if args.one:
        run_one(args.one)
    until = time.monotonic() + 60 * args.minutes
    modules = args.module or list(TESTS)
    for place, module in enumerate(modules):
        share_s = max(0.0, until - time.monotonic()) / (len(modules) - place)
        child = os.fork()
        if not child:
            os._exit(_pytest(module, Collected(partial(try_all, module, args, share_s)), []))
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the tests of {module} fail as they are")


def try_all(module: str, args: argparse.Namespace, share_s: float, session: Any) -> None:
    """All mutants of a module for which there is time, into the table."""
    with tempfile.TemporaryDirectory() as folder:
        tests = tests_of(module, session, Path(folder))
        until = time.monotonic() + share_s
        runner = Runner(module, session, tests, Path(folder), workers=args.workers, once=args.once)
        listed = list(chosen(module))
        kinds = {"chosen": (len(listed), iter(listed))}
        if not args.chosen_only:
            kinds["cosmic-ray"] = drawn(module, args.seed)
        report(f"{module}: {len(tests.seconds)} tests, {sum(tests.seconds.values()):.1f} s")
        rows = []
        for kind, (possible, mutants) in kinds.items():
            start_s, same = time.monotonic(), list[Mutant]()
            done = list(runner.run(without(mutants, same), until))
            if not done:
                continue
            survivors = [mutant.about for mutant, survives in done if survives]
            report(f"  {kind}: {len(done)} of {possible} run, {len(survivors)} survived")
            counts = (possible, len(done), len(done) - len(survivors), len(survivors), len(same))
            more = (len(tests.seconds), round(time.monotonic() - start_s), "; ".join(survivors))
            rows.append(dict(zip(COLUMNS, (module, kind, *counts, *more, *where()), strict=True)))
        if rows:
            write(args.out, rows)


def report(line: str) -> None:
    """To the terminal, while the tests' own output goes nowhere."""
    os.write(TERMINAL, f"{line}\n".encode())


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
            read = [row for row in csv.DictReader(file) if row["module"] in TESTS]  # not of one that is gone
            kept = [row for row in read if row["module"] not in new]
    order = list(TESTS)
    rows = sorted(kept + rows, key=lambda row: (order.index(row["module"]), row["mutants_from"]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
