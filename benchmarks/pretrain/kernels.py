"""Where a step's time goes, kernel by kernel: what is left to gain beside the loop of `against_accelerate`.

    python benchmarks/pretrain/kernels.py --out kernels.md

One training step of the same U-Net and data by darkroom and one plain forward, backward and AdamW step, each
after two that warm up, under torch's profiler. A line is a kernel and its own time in both.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from against_accelerate import _job
from material import make_base, make_store
from torch.profiler import ProfilerActivity, profile

import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported

SHOWN = 12


def own_times(step: Callable[[], object]) -> dict[str, float]:
    """Seconds by kernel of one step."""
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return {one.key: one.self_cpu_time_total / 1e6 for one in found.key_averages()}


def plain_step(base: Path, inputs: dict[str, Any]) -> Callable[[], object]:
    """Forward, backward and AdamW as a loop of diffusers' has them."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet").train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    t = torch.randint(0, 1000, (len(inputs["text"]),))
    noisy, noise = (torch.randn(len(t), 4, 32, 32) for _ in range(2))

    def step() -> None:
        out = unet(noisy, t, inputs["text"].float(), return_dict=False)[0]
        torch.nn.functional.mse_loss(out, noise).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Read the command line, run, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="darkroom-kernels-") as temporary:
        folder = Path(temporary)
        base = make_base(folder)
        told = {
            "base": str(base),
            "store": str(make_store(folder, base, 16)),
            "folder": str(folder / "job"),
            "batch": 8,
            "chunk": 1,
            "precision": given.precision,
            "ema": False,
            "channels_last": False,
        }
        job = _job(told)
        with job.feed(0) as batches:
            inputs = job.task.inputs(next(batches), job.device)
        ours = own_times(lambda: job.step(0, inputs))
        plain = own_times(plain_step(base, inputs))
    text = "\n".join(table(ours, plain, given.precision))
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


def table(ours: dict[str, float], plain: dict[str, float], precision: str) -> list[str]:
    """Markdown: the dearest kernels, the rest, and all."""
    dearest = sorted(ours, key=ours.__getitem__, reverse=True)[:SHOWN]
    lines = [
        f"| kernel, own seconds of one step | darkroom, {precision} | share | plain, float32 |",
        "| --- | --- | --- | --- |",
    ]
    whole = sum(ours.values())

    def line(name: str, mine: float, theirs: float) -> str:
        return f"| {name} | {mine:.3f} | {100 * mine / whole:.1f} % | {theirs:.3f} |"

    lines += [line(f"`{name}`", ours[name], plain.get(name, 0.0)) for name in dearest]
    rest = [sum(found.values()) - sum(found.get(name, 0.0) for name in dearest) for found in (ours, plain)]
    return [*lines, line("all others", *rest), line("**whole step**", whole, sum(plain.values()))]


if __name__ == "__main__":
    main()
