"""How many deliberate mistakes in a module its tests find: one row a module in `benchmarks/mutants.csv`.

    pip install cosmic-ray
    nice -n 10 python benchmarks/mutants.py --minutes 25

Mutants are the ones listed in CHOSEN, and of each module in TESTS as many of cosmic-ray's as time allows, in
an order drawn by seed. Each runs in a fork of a process that has imported torch, so a mutant costs its tests
alone; the source on disk stays as it is. A mutant that no test notices has survived. Linux, macOS.
"""

from __future__ import annotations

import argparse
import csv
import importlib.machinery
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/darkroom"
TESTS = {
    "sample/solvers.py": ["sample/test_solvers.py"],
    "sample/denoise.py": ["sample/test_denoise.py"],
    "data/order.py": ["data/test_order.py"],
    "train/objective.py": ["train/test_objective.py", "train/test_flow_objective.py"],
    "serve/engine/fairness.py": ["serve/engine/test_fairness.py"],
    "serve/jobs/admission.py": ["serve/test_admission.py", "serve/test_intake.py"],
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
    ("serve/engine/fairness.py", "2 * self.quantum[0])", "9 * self.quantum[0])"),
    ("serve/engine/fairness.py", "if entry.cost <= self.credit[name]", "if entry.cost < self.credit[name]"),
    ("serve/engine/fairness.py", "self._had.get(key, least) - least", "self._had.get(key, 0.0) - least"),
    ("serve/engine/fairness.py", "sorted(self.rings, reverse=True)", "sorted(self.rings)"),
    ("serve/engine/fairness.py", "return max(1.0, item.work)", "return item.work"),
    ("serve/jobs/admission.py", "if given > most:", "if given >= most:"),
    ("serve/jobs/admission.py", "if there + num > most:", "if there + num >= most:"),
    ("serve/jobs/admission.py", "(left - 1 if left >= 1 else left, now)", "(left - 1, now)"),
    (
        "serve/jobs/admission.py",
        "max(shape.steps, last.steps) > limits.steps + 1",
        "shape.steps > limits.steps + 1",
    ),
    ("serve/jobs/admission.py", "max(1.0, self._per_s * 10)", "max(1.0, self._per_s * 60)"),
    ("serve/jobs/admission.py", "if pixels > limits.upload_pixels:", "if pixels >= limits.upload_pixels:"),
    ("models/adapters/bank.py", "more <= MOST_KEPT_BYTES", "more > MOST_KEPT_BYTES"),
    ("models/adapters/bank.py", "ups[slot].zero_()  # where", "pass  # where"),
    ("models/adapters/bank.py", "(layer.up.float() * layer.scale)", "(layer.up.float())"),
    ("models/adapters/bank.py", "if len(choice) > self.most_a_row:", "if len(choice) >= self.most_a_row:"),
    ("models/adapters/bank.py", "kept.versions != versions", "False"),
    ("models/adapters/bank.py", "layer.stride == (1, 1):", "True:"),
)


@dataclass(frozen=True)
class Mutant:
    """A module's text with one mistake, and where it is."""

    module: str
    text: str
    about: str


def chosen(module: str) -> Iterator[Mutant]:
    """Those listed above."""
    whole = (SOURCE / module).read_text()
    for of, before, after in CHOSEN:
        if of == module:
            assert whole.count(before) == 1, (module, before, whole.count(before))
            yield Mutant(module, whole.replace(before, after), f"{before!r} -> {after!r}")


def drawn(module: str, seed: int) -> list[Mutant]:
    """Every mutant that cosmic-ray's operators make of a module, shuffled."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    whole = (SOURCE / module).read_text()
    first_function = whole[: whole.index("\ndef ")].count("\n")
    found = []
    for name in operator_names():
        if not any(part in name for part in OPERATORS):
            continue
        occurrence = 0
        while (text := mutate_code(whole, get_operator(name)(), occurrence)) is not None:
            occurrence += 1
            lines = zip(whole.splitlines(), text.splitlines(), strict=False)
            line = next((i for i, (a, b) in enumerate(lines, 1) if a != b), 0)
            quiet = line <= first_function or " | " in whole.splitlines()[line - 1]  # a type, not a value
            if not quiet:
                changed = text.splitlines()[line - 1].strip()
                found.append(Mutant(module, text, f"{line}: {changed}"))
    random.Random(seed).shuffle(found)
    return found


def survives(mutant: Mutant | None, module: str, seconds: int) -> bool:
    """Whether the module's tests pass with the mistake; without one, whether they pass at all."""
    child = os.fork()
    if not child:
        _test(mutant, module, seconds)
    until = time.monotonic() + 20 * seconds  # the limit is of CPU seconds; others may use the machine
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _test(mutant: Mutant | None, module: str, seconds: int) -> None:
    import resource

    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if mutant is not None:
        _put_in_place(SOURCE / module, mutant.text)
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)
    files = [str(ROOT / "tests" / name) for name in TESTS[module]]
    code = pytest.main(["-x", "-q", "-m", "not nightly", "-p", "no:cacheprovider", "--tb=no", *files])
    os._exit(int(code))


def _put_in_place(path: Path, text: str) -> None:
    """Imports of the module read this text from now on."""
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
        if Path(self.path) == path:
            return compile(text, str(path), "exec")
        return plain(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    told.add_argument("--minutes", type=float, default=25, help="of all")
    told.add_argument("--module", action="append", choices=sorted(TESTS), help="this alone; may be repeated")
    told.add_argument("--chosen-only", action="store_true", help="without cosmic-ray's")
    told.add_argument("--seed", type=int, default=0, help="of the order of cosmic-ray's")
    told.add_argument("--out", type=Path, default=ROOT / "benchmarks/mutants.csv")
    args = told.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "src"))
    # What every fork needs; not lance, which does not bear forking.
    import diffusers  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    until = time.monotonic() + 60 * args.minutes
    rows = []
    modules = args.module or list(TESTS)
    for module in modules:
        begun = time.monotonic()
        if not survives(None, module, 300):
            sys.exit(f"the tests of {module} fail as they are")
        limit = max(15, 2 * round(time.monotonic() - begun))
        kinds = {"chosen": list(chosen(module))}
        if not args.chosen_only:
            kinds["cosmic-ray"] = drawn(module, args.seed)
        print(f"{module}: tests take {time.monotonic() - begun:.1f} s", flush=True)
        for kind, mutants in kinds.items():
            left_s = until - time.monotonic()
            share_s = left_s if kind == "chosen" else left_s / (len(modules) - modules.index(module))
            left = list(run(mutants, module, limit, time.monotonic() + share_s))
            done = len(left)
            survived = [mutant for mutant, lives in left if lives]
            rows.append((module, kind, len(mutants), done, done - len(survived), len(survived)))
            print(f"  {kind}: {done} of {len(mutants)} run, {len(survived)} survived", flush=True)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("module", "mutants_from", "possible", "mutants", "killed", "survived"))
        writer.writerows(rows)


def run(mutants: list[Mutant], module: str, limit: int, until: float) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant and whether it survives, until the time is over."""
    for mutant in mutants:
        if time.monotonic() > until:
            return
        lives = survives(mutant, module, limit)
        print(f"  {'survived' if lives else 'killed'}: {mutant.about}", flush=True)
        yield mutant, lives


if __name__ == "__main__":
    main()
