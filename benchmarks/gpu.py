"""Rows from a GPU in a few short calls; the same command goes on where it stopped.

    benchmarks/gpu.sh --plan                          what is run in which call, and how long it may take
    benchmarks/gpu.sh --needs > needs.txt             what must be there, for pip download --no-deps
    benchmarks/gpu.sh --check --wheels wheels         whether all of it is there
    benchmarks/gpu.sh --out rows.csv --minutes 9      again and again until it says that nothing is left

The cases that decide come first. Each runs in a worker process with a time limit; its rows are on the disk
when they are made. A case that fails, hangs or takes the device with it gets a row that says so, and the next
one follows in a new worker. What is done is read from the rows: `--after` names files of earlier calls, and
`--again` makes those anew that failed, or rows of which did.
`--wheels` is a folder of wheels, or of packages: it goes before what is installed. Nothing here needs a
network, a store, typer or matplotlib; weights are random, of the families' true sizes, made on the device.
This file imports the standard library alone until everything is known to be there.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BENCHMARK = "gpu-case"
SPARE_S = 10.0
"""Kept back of a call's minutes for a worker to end in."""
START_S = 40.0
"""To import torch and wake the device."""


@dataclass(frozen=True)
class Case:
    """A group of rows that is made in one go."""

    name: str
    about_s: float
    """What it should take on a card of 2023 or later; it may take three times as much."""
    says: str

    @property
    def limit_s(self) -> float:
        return max(60.0, 3 * self.about_s)


CASES = (
    Case("smoke", 60, "every path once on a tiny model, without compilers: what breaks on this device"),
    Case(
        "card", 15, "the device's own rates: product, bandwidth; convolutions by layout, attention by kernel"
    ),
    Case("sd15-b1", 25, "SD 1.5, 512 px, batch 1: plain and auto, half precision"),
    Case("sd15-b1-graphs", 25, "the same with CUDA graphs"),
    Case("sd2-train", 60, "SD 2 training step at 512 px, the largest batch that pays"),
    Case("sd15-batch", 60, "SD 1.5, 512 px, batch 1 to 64: share of the dense rate"),
    Case("sdxl-batch", 80, "SDXL, 1024 px, batch 1 to 8"),
    Case("smoke-compile", 120, "what compiles and captures, on a tiny model; graph breaks and recompiles"),
    Case("profile", 20, "which kernels take the time: tables beside the rows"),
    Case("sd15-b8", 120, "SD 1.5, 512 px, batch 8: optimisations one by one, and what auto takes"),
    Case("sd2-train-compile", 90, "SD 2 training step, batch 32: in both layouts, and compiled by blocks"),
    Case("sd15-b1-compile", 70, "SD 1.5 batch 1, compiled by blocks, with CUDA graphs"),
    Case("sd2-train-whole", 150, "SD 2 training step, compiled whole"),
    Case("memory", 90, "peak memory against the plan: training and pictures"),
    Case("resume", 60, "bit-exact with deterministic kernels, and what they cost"),
    Case("sdxl-compile", 180, "SDXL batch 1 and 4, compiled by blocks"),
    Case("sd15-switches", 120, "each optimisation of SD 1.5 by itself"),
    Case("sd2-train-256", 75, "SD 2 training step at 256 px, in both layouts, and with checkpointing"),
    Case("serve", 240, "a mixed trace through the server and through plain ones"),
)
SERVES = (
    "fastapi",
    "uvicorn",
    "prometheus-client",
    "sqlalchemy",
    "python-multipart",
    "httpx",
    "typer",
    "rich",
)
"""Needed by the case `serve` alone."""
FEW = ("torchao", "schedulefree", "nvidia-ml-py")
"""Needed by single rows: 8-bit weights and optimisers, an optimiser, energy."""
WITH_TORCH = ("torch", "triton", "pytorch-triton", "setuptools")
"""Of the machine, as are packages whose names begin with `nvidia-`, `NVML` aside."""


# ---- what must be there


def needs() -> list[str]:
    """The packages that the cases import, as pyproject.toml has them; torch comes with the machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = "diffusers transformers tokenizers safetensors huggingface-hub numpy pillow pydantic pyyaml"
    wanted += " psutil regex peft accelerate"
    extras = project["optional-dependencies"]
    more = (line for extra in ("serve", "quant", "optim", "gpu") for line in extras[extra])
    listed = [*project["dependencies"], *more, "httpx>=0.28"]
    names = {name_of(line): line for line in listed}
    return [names[name] for name in (*wanted.split(), *SERVES, *FEW)]


def torch_floor() -> str:
    """The oldest torch that darkroom is for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(line.partition(">=")[2] for line in project["dependencies"] if name_of(line) == "torch")


def name_of(line: str) -> str:
    """The package of a requirement."""
    return re.split(r"[\[<>=~!; ]", line)[0]


def of_the_machine(name: str) -> bool:
    """Whether a package belongs to the machine's own torch and is never carried."""
    plain = name.lower().replace("_", "-")
    return plain in WITH_TORCH or (plain.startswith("nvidia-") and plain not in FEW)


def closed(lines: Sequence[str]) -> list[str]:
    """These requirements and all that they require, in the versions that are installed here.

    Without torch, for which pip would fetch gigabytes, and which would go before the machine's own.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    left = [Requirement(line) for line in lines]
    while left:
        one = left.pop()
        name = one.name.lower().replace("_", "-")
        if of_the_machine(name) or name in found:
            continue
        try:
            here = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise SystemExit(
                f"{name} is not installed here: ask --needs of a Python that has darkroom with its extras "
                "serve, quant, optim and gpu (python make.py setup)"
            ) from None
        found[name] = here.version
        for inner in map(Requirement, here.requires or ()):
            asked = [{"extra": extra} for extra in ("", *one.extras)]
            if inner.marker is None or any(map(inner.marker.evaluate, asked)):
                left.append(inner)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


CHECK = """
import importlib, importlib.metadata as have, json, os, shutil, sys, tempfile
found = {}
def numbers(text):
    return [int("0" + "".join(filter(str.isdigit, part))) for part in text.split(".")]
def fits(version, bounds):
    # such as 0.42,<0.43
    floor, *rest = bounds.split(",")
    roofs = [numbers(part[1:]) for part in rest if part.startswith("<")]
    return numbers(version) >= numbers(floor) and all(numbers(version) < roof for roof in roofs)
for line in json.loads(sys.argv[1]):
    name, _, bounds = line.partition(">=")
    name = name.partition("[")[0]
    known = {"pillow": "PIL", "pyyaml": "yaml", "nvidia-ml-py": "pynvml"}
    module = known.get(name, name.replace("-", "_"))
    try:
        importlib.import_module(module)
        version = have.version(name)
    except Exception as error:
        found[line] = f"{type(error).__name__}: {error}"
        continue
    if bounds and not fits(version, bounds):
        found[line] = f"{version} is installed"
try:
    import torch
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}", file=sys.stderr)
    if not fits(torch.__version__.partition("+")[0], sys.argv[3]):
        print(f"that torch is older than {sys.argv[3]}: what needs a newer one says so", file=sys.stderr)
    torch.empty(1, device=sys.argv[2])
    if sys.argv[2].startswith("cuda"):
        free, all_ = torch.cuda.mem_get_info()
        told = f"{free / 2**30:.0f} of {all_ / 2**30:.0f} GiB free"
        print(f"{torch.cuda.get_device_name()}: {told}", file=sys.stderr)
        if os.name == "posix" and not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
            print("no C compiler: nothing that Triton compiles will run", file=sys.stderr)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < 16 * 2**30:
        told = f"{free / 2**30:.0f} GiB free in {tempfile.gettempdir()}"
        print(f"{told}: the case serve takes 16", file=sys.stderr)
except Exception as error:
    found[f"torch with device {sys.argv[2]}"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def lacks(python: str, environ: dict[str, str], device: str) -> dict[str, str]:
    """What is missing or too old, and how that showed; looked at in a process of its own."""
    command = [python, "-c", CHECK, json.dumps(needs()), device, torch_floor()]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"a Python that starts": f"{python} ended with {done.returncode}"}
    told: dict[str, str] = json.loads(lines[-1])
    return told


def unpacked(wheels: Path) -> Path:
    """A folder of packages: of wheels, what is in them, in the system's temporary folder.

    The machine's own torch stays: wheels of it and of its libraries are passed over.
    """
    files = sorted(file for file in wheels.glob("*.whl") if not of_the_machine(file.name.partition("-")[0]))
    if not wheels.is_dir():
        raise SystemExit(f"--wheels '{wheels}' is no folder")
    if not files:
        return wheels.resolve()
    stamp = hashlib.sha256("\n".join(f"{f.name} {f.stat().st_size}" for f in files).encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"darkroom-wheels-{stamp}"
    if not place.exists():
        beside = Path(tempfile.mkdtemp(prefix="darkroom-wheels-"))
        for file in files:
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(beside)
        beside.replace(place)
    return place


def environment(wheels: Path | None) -> dict[str, str]:
    """What workers are started with."""
    ahead = [str(ROOT / "src"), *([str(unpacked(wheels))] if wheels else [])]
    path = os.pathsep.join([*ahead, *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # What deterministic kernels need, which torch reads once: at a process's first product.
    told.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    said = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & told.keys()  # the latter until torch 2.9
    return told if said else {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **told}


# ---- what is done, and what comes next


def done_in(files: Sequence[Path]) -> dict[str, str]:
    """Cases that rows say are over, and how they ended."""
    found: dict[str, str] = {}
    for file in files:
        if file.exists():
            with file.open(encoding="utf-8", newline="") as text:
                rows = [row for row in csv.DictReader(text) if row.get("benchmark") == BENCHMARK]
            found |= {row["case"]: row["note"] for row in rows}
    return found


def calls(cases: Sequence[Case], minutes: float) -> list[list[Case]]:
    """The cases of each call, as far as they take as long as they should."""
    plan: list[list[Case]] = [[]]
    left = minutes * 60 - START_S
    for case in cases:
        if plan[-1] and case.about_s > left:
            plan.append([])
            left = minutes * 60 - START_S
        plan[-1].append(case)
        left -= case.about_s
    return plan


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_plan(cases: Sequence[Case], minutes: float) -> None:
    """One block a call."""
    found = calls(cases, minutes)
    for number, some in enumerate(found, 1):
        total = START_S + sum(case.about_s for case in some)
        print(f"call {number} of {len(found)}: about {total / 60:.0f} of {minutes:g} minutes")
        for case in some:
            print(f"  {case.name:<18} {case.about_s:>4.0f} s  {case.says}")


class Worker:
    """A process that makes cases one by one and says when each begins and ends."""

    def __init__(self, command: Sequence[str], environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def next_line(self, within_s: float) -> str | None:
        """The next thing said; None where it has ended. TimeoutError where nothing comes."""
        try:
            return self.lines.get(timeout=max(0.01, within_s))
        except queue.Empty:
            raise TimeoutError from None

    def end(self) -> int:
        """Stop it and what it started, servers among them; its exit code."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):  # a worker leads a group of its own
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


def run(
    cases: Sequence[Case], end_s: float, start: object, note: object, clock: object = time.monotonic
) -> Iterator[tuple[Case, str]]:
    """Have cases made until the time is up; yields each that is over, and how it ended.

    `start(cases)` gives a worker for these; `note(case, why)` writes a row for one that its worker could not.
    """
    left = list(cases)
    while left and clock() < end_s:  # type: ignore[operator]
        worker = start(left)  # type: ignore[operator]
        current: Case | None = None
        limit_s = min(end_s, clock() + 3 * START_S)  # type: ignore[operator]
        try:
            while left:
                line = worker.next_line(limit_s - clock())  # type: ignore[operator]
                if line is None:
                    break
                word, _, rest = line.partition(" ")
                if word == "BEGIN":
                    current = next(case for case in left if case.name == rest)
                    say(f"{current.name} (about {current.about_s:.0f} s): {current.says}")
                    limit_s = min(end_s, clock() + current.limit_s)  # type: ignore[operator]
                elif word == "END" and current is not None:
                    left.remove(current)
                    yield current, rest
                    current = None
                elif word == "FULL":
                    return
            code = worker.end()
            if not left:
                return
            why = f"failed: the worker ended with {code}"
        except TimeoutError:
            worker.end()
            if clock() >= end_s:  # type: ignore[operator]
                if current is not None:
                    more = "" if current is not cases[0] else ", and needs more --minutes"
                    say(f"{current.name}: cut off by the end of the call; the next one begins it again{more}")
                return
            why = "failed: no end within its limit" if current else "failed: the worker did not start"
        finally:
            worker.end()
        if current is None:  # it never came to a case: another worker would not either
            raise SystemExit(f"{why}; see what it printed above")
        note(current, why)  # type: ignore[operator]
        left.remove(current)
        yield current, why


def written(out: Path, case: Case, why: str) -> None:
    """A row for a case whose worker is gone."""
    from darkroom.measure.timing import Measurement, append_csv

    append_csv(out, [Measurement(benchmark=BENCHMARK, case=case.name, note=why)])


def check_words(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """End with a line for what cannot be, before anything takes time."""
    if asked.out is None and not (asked.check or asked.plan):
        parser.error("--out FILE.csv says where the rows go")
    if asked.out is not None and asked.out.is_dir():
        parser.error(f"--out {asked.out} is a folder: name a file in it")
    for file in asked.after:
        if not file.is_file():
            parser.error(f"--after {file} is no file")
    if not asked.minutes * 60 >= START_S + SPARE_S:
        parser.error(f"--minutes {asked.minutes:g} is too short to import torch in: 1 or more")


def end_with_parent() -> None:
    """Have this process end with what it started when its parent is gone, also killed: a card would stay
    taken. The parent holds the other end of the standard input."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the CSV that rows are added to, anywhere")
    parser.add_argument("--after", type=Path, action="append", default=[], help="rows of earlier calls")
    parser.add_argument("--minutes", type=float, default=9.0, help="of one call (default: 9)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels or packages to use")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: the same paths with tiny models")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only these")
    parser.add_argument(
        "--again", action="store_true", help="make those anew that failed, or rows of which did"
    )
    parser.add_argument("--plan", action="store_true", help="print what is run in which call")
    parser.add_argument("--needs", action="store_true", help="print the packages, as pip wants them")
    parser.add_argument("--check", action="store_true", help="look whether all packages are there")
    asked = parser.parse_args()
    if asked.needs:
        print("\n".join(closed(needs())))
        return
    check_words(parser, asked)
    chosen = [case for case in CASES if not asked.case or case.name in asked.case]
    if asked.tiny:  # on a CPU that others use too
        chosen = [replace(case, about_s=20 * case.about_s) for case in chosen]
    over = done_in([*asked.after, *([asked.out] if asked.out else [])])
    if asked.again:
        over = {name: how for name, how in over.items() if how.startswith("done") and " failed," not in how}
    left = [case for case in chosen if case.name not in over]
    if asked.plan:
        print_plan(left, asked.minutes)
        return
    if not left and not asked.check:
        say(f"nothing is left: {len(over)} cases are in the rows")
        return
    begun = time.monotonic()
    say("looking whether all packages are there")
    environ = environment(asked.wheels)
    missing = lacks(sys.executable, environ, asked.device)
    for name, why in missing.items():
        say(f"missing: {name} ({why})")
    if any(name_of(name) not in (*SERVES, *FEW) for name in missing):
        raise SystemExit("put wheels of what is missing into a folder and give it as --wheels (see --needs)")
    if asked.check:
        return
    sys.path[:0] = environ.get("PYTHONPATH", "").split(os.pathsep)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    end_s = begun + asked.minutes * 60 - SPARE_S
    out = asked.out.resolve()

    def start(cases: Sequence[Case]) -> Worker:
        told = {
            "device": asked.device,
            "tiny": asked.tiny,
            "out": str(out),
            "cases": [(case.name, case.about_s) for case in cases],
            "seconds": end_s - time.monotonic(),
        }
        return Worker([sys.executable, str(HERE / "gpu_cases.py"), json.dumps(told)], environ)

    with closing(run(left, end_s, start, lambda case, why: written(out, case, why))) as ended:
        for case, how in ended:
            say(f"{case.name}: {how}")
    still = [case for case in chosen if case.name not in {**over, **done_in([out])}]
    say(f"rows: {out}; {len(chosen) - len(still)} of {len(chosen)} cases are over")
    if still:
        say("the same command goes on with " + ", ".join(case.name for case in still))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `timeout` ends the worker too
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted: the same command goes on")
        sys.exit(130)
