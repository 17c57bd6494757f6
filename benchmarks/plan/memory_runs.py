"""Memory of ordinary commands, as users start them, against their plans: cases from tiny to SDXL on a CPU.

    python benchmarks/plan/memory_runs.py                  all cases that have no row yet; 20 GB free
    python benchmarks/plan/memory_runs.py small            of these the small ones, about a minute each
    python benchmarks/plan/memory_runs.py full NAME        those whose name holds NAME
    python benchmarks/plan/memory_runs.py small --again    also those that have a row
    python benchmarks/plan/memory_runs.py full --list      what is left, and what the others took

A case's row is written when it has run, so the same command goes on where it was stopped. Each case is a
`darkroom train` or `darkroom generate` in a process of its own, with no variable set for the allocator; what
the system says was resident at its highest (wait4) stands beside what `darkroom plan` says of the same recipe
or picture on this machine. Of a training the planned seconds stand beside the bill's, too. Writes
memory-runs.csv beside this file; other rows of it stay. Exits with 1 where a case is more than 5 % off.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from darkroom.hardware import machine

HERE = Path(__file__).parent
FILE = HERE / "memory-runs.csv"
COLUMNS = (
    *("case", "planned", "low", "high", "measured", "error", "inside"),
    *("planned_s", "billed_s", "minutes", "date", "machine"),  # minutes: of the case's plan and run together
)
ALLOWED = 0.05
MALLOC = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")
SMALL, FULL = "small", "full"
WIDE = {"block_out_channels": [128, 256, 256], "layers_per_block": 2, "attention_head_dim": 8}


@dataclass(frozen=True)
class Case:
    """A command: a recipe to train, or a model to draw with."""

    name: str
    size: str
    recipe: dict[str, Any] = field(default_factory=dict)
    draw: tuple[str, ...] = ()  # model, side, pictures


def train(name: str, size: str, task: str, base: str, side: int, batch: int, **more: Any) -> Case:
    """A run of two steps on a folder of 16 pictures."""
    data = {"folder": "pictures", "resolution": side, "prompt": "a"}
    if task == "textual-inversion":
        data = {"folder": "pictures", "resolution": side}
    recipe: dict[str, Any] = {
        "task": task,
        "model": {"base": base, **more.pop("model", {})},
        "data": data,
        "train": {"steps": 2, "global_batch": batch, "micro_batch": batch, "precision": "float32",
                  "device": "cpu", **more.pop("train", {})},
        **more,
    }  # fmt: skip
    return Case(name, size, recipe)


def of_sd15(name: str, task: str, **more: Any) -> Case:
    """SD 1.5 at 256 px, a picture at a time, with a setting."""
    method = {"lora": "LoRA", "finetune": "fine-tune"}[task]
    return train(f"SD 1.5, {method}, 256 px, {name}", FULL, task, "sd15", 256, 1, **more)


LORA = {"adapter": {"rank": 8}}
AGAIN = {"train": {"gradient_checkpointing": True}}
WORD = {"model": {"word": {"token": "<new>", "initial": "a"}}}
LORA_OF_TEXT = {"adapter": {"rank": 8, "text_encoder": True}}
BOTH = {"model": {"train_text_encoder": True}, **AGAIN}
LORA_SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointed": AGAIN,
    "and text encoder": LORA_OF_TEXT,
    "bf16": {"train": {"precision": "bf16"}},
    **{f"{kind} base": {"model": {"base_precision": kind}} for kind in ("fp8", "int8", "nf4")},
}
FULL_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "and text encoder, checkpointed": BOTH,
    "fused backward": {"optim": {"fused_backward": True, "clip_norm": None}},
    "8-bit AdamW": {"optim": {"name": "adamw8bit"}},
    "Adafactor": {"optim": {"name": "adafactor"}},
    "Adafactor, fused backward": {"optim": {"name": "adafactor", "fused_backward": True, "clip_norm": None}},
    "Lion": {"optim": {"name": "lion"}},
    "bf16": {"train": {"precision": "bf16"}},
    "EMA": {"train": {"ema": {"enabled": True}}},
}
CASES = (
    *(train(f"tiny, fine-tune, batch {n}", SMALL, "finetune", "tiny", 64, n) for n in (1, 4, 16)),
    train("tiny, LoRA, batch 4", SMALL, "lora", "tiny", 64, 4, **LORA),
    train("tiny, LoRA at 256 px, batch 4", SMALL, "lora", "tiny", 256, 4, **LORA),
    train("tiny, LoRA at 256 px, batch 8, checkpointed", SMALL, "lora", "tiny", 256, 8, **LORA, **AGAIN),
    train("tiny, textual inversion, batch 2", SMALL, "textual-inversion", "tiny", 64, 2, **WORD),
    train("27 M U-Net, 256 px, batch 2", SMALL, "finetune", "tiny", 256, 2, model={"unet": WIDE}),
    train("27 M U-Net, 256 px, batch 4", SMALL, "finetune", "tiny", 256, 4, model={"unet": WIDE}),
    train("27 M U-Net, LoRA, 256 px, batch 4", SMALL, "lora", "tiny", 256, 4, model={"unet": WIDE}, **LORA),
    train("DiT, 256 px, batch 2", FULL, "finetune", "dit", 256, 2),
    Case("tiny, one picture", SMALL, draw=("tiny", "64", "1")),
    Case("tiny at 256 px, 4 pictures", SMALL, draw=("tiny", "256", "4")),
    Case("tiny at 512 px, 2 pictures", SMALL, draw=("tiny", "512", "2")),
    Case("SD 1.5 at 256 px, one picture", FULL, draw=("sd15", "256", "1")),
    Case("SD 1.5 at 512 px, one picture", FULL, draw=("sd15", "512", "1")),
    Case("SD 1.5 at 512 px, 2 pictures", FULL, draw=("sd15", "512", "2")),
    Case("SD 2 at 512 px, one picture", FULL, draw=("sd2", "512", "1")),
    Case("SDXL at 512 px, one picture", FULL, draw=("sdxl", "512", "1")),
    Case("SDXL at 1024 px, one picture", FULL, draw=("sdxl", "1024", "1")),
    train("SD 1.5, LoRA, 256 px, batch 1", FULL, "lora", "sd15", 256, 1, **LORA),
    train("SD 1.5, LoRA, 512 px, batch 1", FULL, "lora", "sd15", 512, 1, **LORA),
    train("SD 1.5, LoRA, 512 px, batch 2, checkpointed", FULL, "lora", "sd15", 512, 2, **LORA, **AGAIN),
    train("SD 1.5, textual inversion, 512 px", FULL, "textual-inversion", "sd15", 512, 1, **WORD),
    train("SD 1.5, fine-tune, 256 px, batch 1, checkpointed", FULL, "finetune", "sd15", 256, 1, **AGAIN),
    # Every setting that changes SD 1.5's memory, with the two rows above as what each is compared with.
    *(of_sd15(name, "lora", **LORA | more) for name, more in LORA_SETTINGS.items()),
    *(of_sd15(name, "finetune", **more) for name, more in FULL_SETTINGS.items()),
    train("SDXL, LoRA, 512 px, both text encoders", FULL, "lora", "sdxl", 512, 1, **LORA_OF_TEXT, **AGAIN),
)


def main(asked: list[str]) -> int:
    """Measure the cases asked for; 1 where one is more than 5 % off."""
    size, name, *_ = [*(one for one in asked if not one.startswith("--")), "", ""]
    made = {row["case"]: row for row in rows()}
    chosen = [case for case in CASES if name in case.name and (size != SMALL or case.size == SMALL)]
    if "--list" in asked:
        for case in chosen:
            row = made.get(case.name)
            print(f"{case.name:<52} {'to do' if row is None else (row['minutes'] or '?') + ' min'}")
        return 0
    if "--again" not in asked:
        chosen = [case for case in chosen if case.name not in made]
    worst = 0.0
    for case in chosen:
        row = compared(case)
        worst = max(worst, abs(float(row["error"])))
        planned, measured = row["planned"] / 1e9, row["measured"] / 1e9
        error = float(row["error"])
        print(
            f"{case.name:<52} {planned:6.2f} GB planned, {measured:6.2f} measured, {error:+.1%}", flush=True
        )
        write(row)
    return int(worst > ALLOWED)


def compared(case: Case) -> dict[str, Any]:
    """A case's plan and its run."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="darkroom-memory-") as folder:
        place = Path(folder)
        pictures(place / "pictures")
        if case.recipe:
            (place / "recipe.yaml").write_text(json.dumps(case.recipe), encoding="utf-8")
            plan, run = ("plan", "recipe.yaml", "--json"), ("train", "recipe.yaml", "--out", "run")
        else:
            model, side, number = case.draw
            same = ("--size", f"{side}x{side}", "--steps", "2")
            plan = ("plan", "generate", "--model", model, *same, "--batch", number, "--json")
            run = ("generate", model, "a house", *same, "--num", number, "--out", "drawn")
        planned = json.loads(started(plan, place)[1])["plans"][0]
        measured, _ = started(run, place)
        bill = place / "run" / "bill.json"
        billed = json.loads(bill.read_text())["wall_s"] if case.recipe else None
    error = planned["peak_bytes"] / measured - 1
    spread = planned["intervals"]["peak_bytes"]
    return {
        "case": case.name,
        "planned": round(planned["peak_bytes"]),
        "low": round(spread["low"]),
        "high": round(spread["high"]),
        "measured": measured,
        "error": f"{error:.4f}",
        "inside": spread["low"] <= measured <= spread["high"],
        "planned_s": f"{planned['hours'] * 3600:.1f}" if case.recipe else "",
        "billed_s": "" if billed is None else f"{billed:.1f}",
        "minutes": f"{(time.monotonic() - began) / 60:.1f}",
        "date": date.today().isoformat(),
        "machine": machine().name,
    }


def started(arguments: tuple[str, ...], place: Path) -> tuple[int, str]:
    """Run `darkroom` as a user would: bytes resident at its highest, and what it printed."""
    own = {name: value for name, value in os.environ.items() if name not in MALLOC}
    with (place / "out").open("w+", encoding="utf-8") as out, (place / "err").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "darkroom", *arguments], cwd=place, env=own, stdout=out, stderr=err
        )
        _, status, used = os.wait4(process.pid, 0)
        out.seek(0)
        err.seek(0)
        if status:
            raise SystemExit(f"darkroom {' '.join(arguments)} failed: {err.read()[-2000:]}")
        return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024), out.read()


def pictures(folder: Path) -> None:
    """Sixteen pictures of noise."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    draws = np.random.default_rng(0)
    for i in range(16):
        Image.fromarray(draws.integers(0, 256, (512, 512, 3), dtype=np.uint8)).save(folder / f"{i}.png")


def rows() -> list[dict[str, str]]:
    """The rows that are there."""
    if not FILE.is_file():
        return []
    with FILE.open(newline="") as file:
        return [{name: row.get(name) or "" for name in COLUMNS} for row in csv.DictReader(file)]


def write(row: dict[str, Any]) -> None:
    """Put a row into the file, in the place of an older one of the same case."""
    kept = [one for one in rows() if one["case"] != row["case"]]
    temporary = FILE.with_suffix(".tmp")
    with temporary.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, row])
    temporary.replace(FILE)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
