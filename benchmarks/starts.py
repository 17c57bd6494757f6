"""Processor seconds from a command to its first step, each a process of its own.

    python benchmarks/starts.py --quickstart quickstart --out FILE.csv [--rounds 5]

With the folder that `darkroom quickstart` left, of whose model and pictures:
- `generate`: one picture in one step, the whole process; beside diffusers' pipeline doing the same;
- `train`, `train lora`: until the first step is over and said;
- `serve`: until /ready answers 200;
- `plan`: of the same fine-tuning, when its counts are kept;
- `plan folder`: of a LoRA of a folder of pictures on a card of the tables, likewise;
- `plan advise`: of that on all of them, with advice.
Cases take turns. A row's seconds are of processors, user and system, of the process and what it waited for;
`wall_s` has those of a clock. A row's warm-up is the first start, which compiles what no start before it has
(Python keeps that; here too where PYTHONDONTWRITEBYTECODE says otherwise). At the end it shows what the last
start of each printed. Linux and macOS.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from darkroom.hardware.system import load_average
from darkroom.measure.timing import Measurement, Timing, append_csv, measurement

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "a red circle on a white background"
PEER = """
import sys, torch
from diffusers import StableDiffusionPipeline
pipe = StableDiffusionPipeline.from_pretrained(sys.argv[1], safety_checker=None)
pipe.set_progress_bar_config(disable=True)
pipe(sys.argv[2], num_inference_steps=1, height=32, width=32).images[0].save(sys.argv[3])
"""
RECIPE = """
task: {task}
model: {{base: {base}}}
data: {{store: {store}, resolution: 32, encode: inline, text: inline}}
optim: {{lr: 1.0e-4}}
train: {{steps: 1000, global_batch: 16, precision: float32, log_every: 1}}
"""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Started:
    """One start: seconds of processors and of a clock, and what was printed."""

    cpu_s: float
    wall_s: float
    printed: str


def environment() -> dict[str, str]:
    """This one's, where Python keeps what it has compiled, as it does by default."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if len(kept) < len(os.environ):
        kept.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / "darkroom-bytecode"))
    return {**kept, "PYTHONUNBUFFERED": "1"}


def until(command: Sequence[str], has_started: Callable[[Path], bool] | None, folder: Path) -> Started:
    """Runs a command to its end, or until it has started: then it is killed and its account read."""
    printed = folder / "printed.txt"
    begun = time.perf_counter()
    with printed.open("w") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(),
        )
    while has_started is not None and not has_started(printed):
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            sys.exit(f"{' '.join(command)} ended by itself: {printed.read_text()}")
        if time.perf_counter() - begun > TIMEOUT_S:
            child.kill()
            sys.exit(f"{' '.join(command)} did not start in {TIMEOUT_S:g} s: {printed.read_text()}")
        time.sleep(0.005)
    wall_s = time.perf_counter() - begun
    if has_started is not None:
        child.kill()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if has_started is None:
        wall_s = time.perf_counter() - begun
        if child.returncode:
            sys.exit(f"{' '.join(command)} ended with {child.returncode}: {printed.read_text()}")
    return Started(used.ru_utime + used.ru_stime, wall_s, printed.read_text())


def first_step_is_said(printed: Path) -> bool:
    """Whether a training run has told of its first step."""
    return re.search(r"^step +1/", printed.read_text(), re.M) is not None


def is_ready(port: int) -> Callable[[Path], bool]:
    """Whether a server answers that it is ready."""

    def asked(_: Path) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, ConnectionError, TimeoutError):
            return False

    return asked


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def cases(quickstart: Path, folder: Path) -> dict[str, Callable[[], Started]]:
    """What is started, by name."""
    model = quickstart / "runs" / "pretrain" / "model"
    recipes = {}
    for task in ("finetune", "lora"):
        recipes[task] = folder / f"{task}.yaml"
        text = RECIPE.format(task=task, base=model, store=quickstart / "pictures.lance")
        recipes[task].write_text(text, encoding="utf-8")
    darkroom = (sys.executable, "-m", "darkroom")
    lora = ROOT / "recipes" / "sd15-lora.yaml"
    of_folder = (*darkroom, "plan", str(lora), f"data.folder={quickstart / 'pictures'}")
    number = iter(range(1_000_000))

    def trained(task: str) -> Started:
        words = [*darkroom, "train", str(recipes[task]), "--out", str(folder / f"run{next(number)}")]
        return until(words, first_step_is_said, folder)

    def served() -> Started:
        port = free_port()
        return until([*darkroom, "serve", str(model), "--port", str(port)], is_ready(port), folder)

    drawn = [*darkroom, "generate", str(model), PROMPT, "--steps", "1", "--out", str(folder / "pictures")]
    peer = [sys.executable, "-c", PEER, str(model), PROMPT, str(folder / "peer.png")]
    return {
        "diffusers": lambda: until(peer, None, folder),
        "generate": lambda: until(drawn, None, folder),
        "train": lambda: trained("finetune"),
        "train lora": lambda: trained("lora"),
        "serve": served,
        "plan": lambda: until([*darkroom, "plan", str(recipes["finetune"])], None, folder),
        "plan folder": lambda: until([*of_folder, "--gpu", "A10G"], None, folder),
        "plan advise": lambda: until([*of_folder, "--gpu", "all", "--advise"], None, folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quickstart", type=Path, required=True, help="the folder of a quickstart")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="a case; all if not said")
    args = parser.parse_args()
    found: dict[str, list[Started]] = {}
    with tempfile.TemporaryDirectory() as folder:
        chosen = cases(args.quickstart.resolve(), Path(folder))
        if unknown := set(args.only or ()) - chosen.keys():
            parser.error(f"--only {', '.join(sorted(unknown))}: no such case; there are {', '.join(chosen)}")
        for number in range(args.rounds + 1):  # the first reads what is not yet in memory
            for name in args.only or chosen:
                one = chosen[name]()
                found.setdefault(name, []).append(one)
                print(f"{number} {name}: {one.cpu_s:.2f} CPU-s, {one.wall_s:.2f} s", flush=True)
    timings = {
        name: Timing(name, tuple(one.cpu_s for one in runs[1:]), runs[0].cpu_s, load_average())
        for name, runs in found.items()
    }
    append_csv(args.out, [as_row(timings, name, found[name][1:]) for name in found])
    for name, runs in found.items():
        print(f"--- {name} printed\n{runs[-1].printed}")


def as_row(timings: dict[str, Timing], name: str, runs: list[Started]) -> Measurement:
    """Seconds are of processors; the ratio is to diffusers' pipeline."""
    wall_s = round(statistics.median(one.wall_s for one in runs), 3)
    baseline = timings.get("diffusers") if name == "generate" else None
    settings = {"seconds_of": "processors", "wall_s": wall_s}
    return measurement("starts", timings[name], baseline=baseline, settings=settings)


if __name__ == "__main__":
    main()
