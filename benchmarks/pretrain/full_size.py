"""Stable Diffusion 2's U-Net at full size (866 M weights, random at first): real optimiser steps on this CPU.

    python benchmarks/pretrain/full_size.py --out results.csv

`darkroom train recipes/sd2-base-256.yaml` as a process of its own, with what a machine of 24 GiB needs: one
picture a step, Adafactor (its state is rows and columns), no average, one process. VAE and text encoder are
of full size too, with random weights, and encode inline; the tokenizer is a folder with CLIP's files. The job
writes its checkpoint and model at the end; the folder takes about 12 GB and goes when it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.measure.timing import Timing, append_csv, measurement

sys.path.insert(0, str(Path(__file__).parent))
from material import paint

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "sd2-base-256.yaml"


def overrides(store: Path, given: Any) -> list[str]:
    """What differs from the recipe."""
    return [
        f"model={{base: {given.base}, tokenizer: {given.tokenizer}}}",
        f"data.store={store}",
        f"data.resolution={given.resolution}",
        "data.encode=inline",
        "data.holdout=0",
        f"optim.name={given.optimiser}",
        *(["optim.lr=0.01"] if given.optimiser == "adafactor" else []),  # the recipe's is AdamW's
        "optim.warmup_steps=0",
        f"train.steps={given.steps}",
        f"train.global_batch={given.batch}",
        f"train.micro_batch={given.batch}",
        f"train.precision={given.precision}",
        f"train.gradient_checkpointing={str(given.checkpointing).lower()}",
        "train.log_every=1",
        "train.nonfinite_policy=stop",
        "train.device=cpu",
        "parallel.mode=none",
        f"checkpoint.every={10**6}",
        "evaluate.every=0",
        "sample.every=0",
        "sample.prompts=[]",
    ]


def train(store: Path, out: Path, given: Any) -> tuple[list[dict[str, Any]], int, float]:
    """Train; the run's rows, the highest resident set of the process, and the seconds of the whole."""
    command = [sys.executable, "-m", "darkroom", "train", str(RECIPE), *overrides(store, given)]
    began, peak = time.perf_counter(), 0
    with subprocess.Popen([*command, "--out", str(out)]) as job:
        seen = psutil.Process(job.pid)
        ended = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.05):
                try:
                    peak = max(peak, seen.memory_info().rss)
                except psutil.Error:
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        code = job.wait()
        ended.set()
        watcher.join()
    if code:
        raise SystemExit(code)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "images_per_s" in row], peak, time.perf_counter() - began


def main() -> None:
    """Read the command line, train, print, and write the row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="sd2", help="the family; tiny for a trial")
    parser.add_argument("--tokenizer", required=True, help="a folder with CLIP's tokenizer files")
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--optimiser", default="adafactor")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--work", type=Path, help="folder for the run; a temporary one if not said")
    parser.add_argument("--out", type=Path, help="CSV that the row is added to")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-", dir=given.work) as temporary:
        folder = Path(temporary)
        paint(folder / "pictures", 8)
        store = Store.create(folder / "pictures.lance")
        import_pictures(folder / "pictures", store)
        rows, peak, whole_s = train(folder / "pictures.lance", folder / "run", given)
    seconds = tuple(given.batch / row["images_per_s"] for row in rows)
    row = measurement(
        "pretrain-full-size",
        Timing(f"{given.base} U-Net, {len(seconds)} steps", seconds, 0.0, load),
        images=given.batch,
        steps=1,
        precision=given.precision,
        peak_memory_bytes=peak,
        settings={
            **{name: getattr(given, name) for name in ("resolution", "batch", "optimiser", "precision")},
            "gradient_checkpointing": given.checkpointing,
            "losses": [round(each["loss"], 4) for each in rows],
            "gradient_norms": [round(each["grad_norm"], 4) for each in rows],
        },
        note=f"the whole job, encoders, checkpoint and model folder included: {whole_s:.0f} s",
    )
    told = f"{row.median_s:.4g} s a step, peak {peak / 2**30:.1f} GiB, losses {row.settings['losses']}"
    print(f"{row.case}: {told}")
    if given.out is not None:
        append_csv(given.out, [row])


if __name__ == "__main__":
    main()
