"""darkroom's training loop against a plain one on diffusers and accelerate: seconds of a step.

    python benchmarks/pretrain/against_accelerate.py --out results.csv

Four processes, plain and darkroom in float32 and in bf16, take turns (A B C D A B C D ...), a chunk of steps
each; those that wait stand still. Same U-Net (28.6 M weights, the same start), same prepared latents and text
in memory, batch, optimiser, gradient clipping and threads; a log line each chunk. The plain loop is what
diffusers' training scripts do: DDPMScheduler, autocast for bf16, AdamW, a constant schedule, accelerate's
clipping. `--ema` adds averaged weights on both sides: diffusers' EMAModel, and darkroom's. `--compile` is for
darkroom's alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported
from darkroom.hardware.meters import PeakMemory
from darkroom.measure.timing import Measurement, Timing, append_csv, measurement

sys.path.insert(0, str(Path(__file__).parent))
from material import content, make_base, make_store

PRECISIONS = {"float32": "no", "bf16": "bf16"}


class Turns:
    """One side's end of the line: waits for its turn, tells how long its chunk of steps took."""

    def __init__(self, told: dict[str, Any], line: Any) -> None:
        self._line, self._chunk, self._made = line, told["chunk"], 0
        self._started, self._peak = 0.0, PeakMemory("cpu")
        self.loss: float | None = None

    def ask(self) -> bool:
        """At the border of a step: at that of a chunk tell and wait; False where there is no further turn."""
        if self._made % self._chunk == 0:
            taken_s = time.perf_counter() - self._started
            self._line.send((taken_s / self._chunk, self._peak.bytes(), self.loss))
            if not self._line.recv():
                return False
            self._started = time.perf_counter()
        self._made += 1
        return True


def plain(told: dict[str, Any], line: Any) -> None:
    """The loop of diffusers' scripts, on latents and text states that lie in memory."""
    import torch
    import torch.nn.functional as F
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(told["threads"])
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=PRECISIONS[told["precision"]], cpu=True)
    unet = UNet2DConditionModel.from_pretrained(told["base"], subfolder="unet")
    unet.train()
    noising = DDPMScheduler.from_pretrained(told["base"], subfolder="scheduler")
    moments, text = _columns(told)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, weight_decay=0.01)
    batches = DataLoader(TensorDataset(moments, text), batch_size=told["batch"], shuffle=True, drop_last=True)
    schedule = get_scheduler("constant", optimizer)
    ema = EMAModel(unet.parameters(), decay=0.9999) if told["ema"] else None
    unet, optimizer, batches, schedule = accelerator.prepare(unet, optimizer, batches, schedule)
    turns, step = Turns(told, line), 0
    while True:
        for some, states in batches:
            if not turns.ask():
                return
            with accelerator.accumulate(unet):
                mean, std = some.float().unbind(1)
                latents = mean + std * torch.randn_like(mean)
                noise = torch.randn_like(latents)
                t = torch.randint(0, noising.config.num_train_timesteps, (len(latents),))
                noisy = noising.add_noise(latents, noise, t)
                predicted = unet(noisy, t, states.float(), return_dict=False)[0]
                loss = F.mse_loss(predicted.float(), noise.float())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if ema is not None:
                ema.step(unet.parameters())
            step += 1
            if step % told["chunk"] == 0:
                turns.loss = loss.detach().item()


def _columns(told: dict[str, Any]) -> tuple[Any, Any]:
    """All moments [N, 2, C, h, w] and text states [N, L, D] of the store, by darkroom's reader."""
    job = _job(told)
    with job.feed(0) as batches:
        parts = [next(batches) for _ in range(told["pictures"] // told["batch"])]
    import torch

    return torch.cat([part["moments"] for part in parts]), torch.cat([part["text"] for part in parts])


def _job(told: dict[str, Any]) -> Any:
    from darkroom.recipe import make_recipe
    from darkroom.train.jobs import Pinned
    from darkroom.train.setup import make_job

    settings = {
        "steps": 10**6,
        "global_batch": told["batch"],
        "micro_batch": told["batch"],
        "precision": told["precision"],
        "log_every": told["chunk"],
        "ema": {"enabled": told["ema"]},
        "channels_last": True if told["channels_last"] else "auto",
        "compile": told["compile"],
        "device": "cpu",
    }
    made = content(Path(told["base"]), Path(told["store"]), **settings)
    return make_job(make_recipe(made), Pinned(Path(told["folder"])))


class _Over(Exception):
    """All turns were taken."""


def ours(told: dict[str, Any], line: Any) -> None:
    """`darkroom train`'s own loop with its loader, metrics and bill."""
    from dataclasses import replace

    import torch

    torch.set_num_threads(told["threads"])
    from darkroom.hardware.machine import environment
    from darkroom.run import Run
    from darkroom.train.tracking import NoTracker
    from darkroom.train.trainer import Trainer

    job = _job(told)
    turns = Turns(told, line)

    @contextmanager
    def feed(k: int) -> Iterator[Iterator[Any]]:
        with job.feed(k) as batches:
            yield stopping(batches)

    def stopping(batches: Iterator[Any]) -> Iterator[Any]:
        while turns.ask():
            yield next(batches)
        raise _Over

    folder = Path(told["folder"]) / f"run-{told['precision']}"
    run = Run.create(folder, job.recipe.dump(), environment())
    trainer = Trainer(replace(job, feed=feed), run, tracker=NoTracker(), say=lambda _: None)
    with suppress(_Over):
        trainer.train()


SIDES = {"diffusers + accelerate": plain, "darkroom": ours}


def compare(folder: Path, told: dict[str, Any], rounds: int) -> list[Measurement]:
    """Rows of all sides; each repeat of a timing is one chunk of steps."""
    load = os.getloadavg()[0]
    context = multiprocessing.get_context("spawn")
    lines: dict[tuple[str, str], Any] = {}
    processes = []
    for precision in told.pop("precisions"):
        for name, side in SIDES.items():
            here, there = context.Pipe()
            one = {**told, "precision": precision, "folder": str(folder / f"{name} {precision}")}
            processes.append(context.Process(target=side, args=(one, there), daemon=True))
            processes[-1].start()
            there.close()
            here.recv()  # it stands at its first step
            lines[name, precision] = here
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in lines}
    last: dict[tuple[str, str], tuple[float, int, float | None]] = {}
    for number in range(rounds + 1):
        for key, line in lines.items():
            line.send(True)
            last[key] = line.recv()
            seconds[key].append(last[key][0])
            print(f"round {number} {' '.join(key)}: {last[key][0]:.4g} s a step", file=sys.stderr)
    for line, process in zip(lines.values(), processes, strict=True):
        line.send(False)
        process.join(60)
    timings = {
        key: Timing(" ".join(key), tuple(each[1:]), each[0] * told["chunk"], load)
        for key, each in seconds.items()
    }
    return [_row(told, key, timings, last[key][1]) for key in timings]


def _row(
    told: dict[str, Any], key: tuple[str, str], timings: dict[tuple[str, str], Timing], peak: int
) -> Any:
    plain_name, precision = next(iter(SIDES)), key[1]
    shown = ("batch", "threads", "ema", "channels_last", "compile", "chunk", "parameters")
    settings = {"precision": precision, "latents": "32x32", **{name: told[name] for name in shown}}
    widest = timings.get((plain_name, "float32"))
    if widest is not None and precision != "float32":
        settings["ratio_to_float32_plain"] = round(timings[key].ratio(widest), 4)
    return measurement(
        "pretrain-against-accelerate",
        timings[key],
        baseline=timings[plain_name, precision],
        images=told["batch"],
        steps=1,
        precision=precision,
        peak_memory_bytes=peak,
        settings=settings,
        note=f"seconds of a step, median of chunks of {told['chunk']}; processes in turns; data in memory",
    )


def main() -> None:
    """Read the command line, run, print, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--chunk", type=int, default=5, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="both if not said")
    parser.add_argument(
        "--channels", type=int, nargs="+", default=[96, 192, 288], help="of the U-Net's levels"
    )
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--channels-last", action="store_true", help="darkroom with train.channels_last=true")
    parser.add_argument(
        "--compile", choices=("none", "blocks", "whole"), default="none", help="darkroom's train.compile"
    )
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-") as temporary:
        folder = Path(temporary)
        base = make_base(folder, tuple(given.channels))
        told = {
            "base": str(base),
            "store": str(make_store(folder, base, given.pictures)),
            "parameters": _parameters(base),
            "precisions": given.precision or list(PRECISIONS),
            **{
                name: getattr(given, name)
                for name in ("batch", "threads", "chunk", "pictures", "ema", "channels_last", "compile")
            },
        }
        rows = compare(folder, told, given.rounds)
    for row in rows:
        print(
            f"{row.case}: {row.median_s:.4g} s a step ({row.ratio:.3f}), {row.peak_memory_bytes / 1e6:.0f} MB"
        )
    if given.out is not None:
        append_csv(given.out, rows)


def _parameters(base: Path) -> int:
    from darkroom import models

    made = models.load(base)
    assert made.unet is not None
    return sum(weight.numel() for weight in made.unet.parameters())


if __name__ == "__main__":
    main()
