"""LoRA by darkroom's loop against a plain loop on diffusers and peft, which encodes pictures and prompts at
each step as diffusers' script does by default.

    python benchmarks/finetune/against_diffusers.py MODEL PHOTOS --batch 1 --resolution 512 --out results.csv

Both sides run in processes of their own, in turns (A B A B ...): a pair of processes a round. Time is the
median of a process's steps after the first; memory is the highest resident set of the process while it trains
(the allocator's on CUDA). The same method, layers, rank, batch, precision, optimiser, photographs and prompt.
darkroom encodes pictures and prompt once, before the steps; VAE and text encoder then lie in a file and hold
no memory. What that takes is no part of the time of a step. It stands in the row (`prepared_s`, with opening
the model), and so does the peak of the whole process, preparing included (`whole_peak_bytes`).

Take a model of real proportions: beside a U-Net of a few MB, what a process holds before any model is opened
(some 300 MB of imports) decides. `/path/sd15 --batch 1 --resolution 256 --precision bf16` does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported
from darkroom.hardware.memory import PeakMemory
from darkroom.measure.finetuning_results import alone
from darkroom.measure.timing import Timing, append_csv, measurement, synchronise

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
PROMPT = "a photo of sks dog"
RATE = 1e-4


def plain(told: dict[str, Any]) -> dict[str, Any]:
    """diffusers + peft: VAE and text encoder run at each step, autocast, AdamW on float32 adapters."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from peft import LoraConfig
    from PIL import Image, ImageOps
    from transformers import CLIPTextModel, CLIPTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}[told["precision"]]
    torch.manual_seed(0)
    base = told["model"]
    whole = PeakMemory(device)
    tokenizer = CLIPTokenizer.from_pretrained(base, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(base, subfolder="text_encoder").to(device, dtype)
    vae = AutoencoderKL.from_pretrained(base, subfolder="vae").to(device, dtype)
    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet").to(device, dtype)
    noising = DDPMScheduler.from_pretrained(base, subfolder="scheduler")
    for module in (text_encoder, vae, unet):
        module.requires_grad_(False)
    rank = told["rank"]
    unet.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=TARGETS)
    )
    if told["checkpointing"]:
        unet.enable_gradient_checkpointing()
    unet.train()
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimiser = torch.optim.AdamW(trained, lr=RATE)
    side, batch = told["resolution"], told["batch"]
    files = sorted(file for file in Path(told["photos"]).iterdir() if file.suffix.lower() == ".jpg")

    def pixels(step: int) -> torch.Tensor:
        made = []
        for i in range(batch):
            with Image.open(files[(step * batch + i) % len(files)]) as picture:
                cut = ImageOps.fit(picture.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
            made.append(torch.from_numpy(np.asarray(cut).copy()).permute(2, 0, 1).float() / 127.5 - 1)
        return torch.stack(made)

    def train_step(step: int) -> None:
        latents = vae.encode(pixels(step).to(device, dtype)).latent_dist.sample() * vae.config.scaling_factor
        ids = tokenizer(
            [PROMPT] * batch,
            padding="max_length",
            truncation=True,
            max_length=tokenizer.model_max_length,
            return_tensors="pt",
        ).input_ids
        states = text_encoder(ids.to(device))[0]
        noise = torch.randn_like(latents)
        t = torch.randint(0, noising.config.num_train_timesteps, (batch,), device=device)
        noisy = noising.add_noise(latents, noise, t)
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            predicted = unet(noisy, t, states).sample
        velocity = noising.config.prediction_type == "v_prediction"
        target = noising.get_velocity(latents, noise, t) if velocity else noise
        F.mse_loss(predicted.float(), target.float()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()

    found = _timed(train_step, told["steps"], device)
    return found | {"trained": sum(p.numel() for p in trained), "whole_peak": whole.bytes()}


def ours(told: dict[str, Any]) -> dict[str, Any]:
    """darkroom's step with its loader; latents and text states are made once, before."""
    import torch

    from darkroom.recipe import make_recipe
    from darkroom.train.jobs import Pinned
    from darkroom.train.setup import make_job

    recipe = make_recipe(
        {
            "task": "lora",
            "model": {"base": told["model"]},
            "data": {"folder": told["photos"], "prompt": PROMPT, "resolution": told["resolution"]},
            "adapter": {"targets": "attention", "rank": told["rank"]},
            "optim": {"lr": RATE, "clip_norm": 1.0},
            "train": {
                "steps": told["steps"] + 1,
                "global_batch": told["batch"],
                "micro_batch": told["batch"],
                "precision": told["precision"],
                "gradient_checkpointing": told["checkpointing"],
            },
        }
    )
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-") as folder:
        start = time.perf_counter()
        whole = PeakMemory("cuda" if torch.cuda.is_available() else "cpu")
        job = make_job(recipe, Pinned(Path(folder)))
        prepared_s = time.perf_counter() - start
        with job.feed(0) as batches:

            def train_step(step: int) -> None:
                job.step(step, job.task.inputs(next(batches), job.device))

            found = _timed(train_step, told["steps"], str(job.device))
        trained = sum(master.numel() for master in job.step.weights.masters.values())
        return found | {"trained": trained, "prepared_s": prepared_s, "whole_peak": whole.bytes()}


def _timed(train_step: Any, steps: int, device: str) -> dict[str, Any]:
    """Seconds of the first step and of those after it, and the peak while they ran."""
    peak, seconds = PeakMemory(device), []
    for step in range(steps + 1):
        synchronise(device)
        start = time.perf_counter()
        train_step(step)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:], "warmup_s": seconds[0], "peak": peak.bytes(), "device": device}


SIDES = {"diffusers + peft": plain, "darkroom": ours}


def compare(told: dict[str, Any], rounds: int) -> list[Any]:
    """Rows of both sides; each repeat of a timing is the median step of one process."""
    import os

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    load = os.getloadavg()[0]
    for number in range(rounds):
        for name, side in SIDES.items():
            found[name].append(alone(side, told))
            last = found[name][-1]
            step_s, peak_mb = statistics.median(last["seconds"]), last["peak"] / 1e6
            print(f"round {number + 1} {name}: {step_s:.4g} s a step, peak {peak_mb:.0f} MB", file=sys.stderr)
    trained = {name: runs[0]["trained"] for name, runs in found.items()}
    assert len(set(trained.values())) == 1, f"not the same adapter: {trained}"
    timings = {
        name: Timing(
            name, tuple(statistics.median(r["seconds"]) for r in runs), sum(r["warmup_s"] for r in runs), load
        )
        for name, runs in found.items()
    }
    baseline = timings["diffusers + peft"]
    peaks = {name: round(statistics.median(r["peak"] for r in runs)) for name, runs in found.items()}
    shared = {**told, "model": Path(told["model"]).name, "photos": Path(told["photos"]).name}
    return [
        measurement(
            "finetune-against-diffusers",
            timing,
            baseline=baseline,
            images=told["batch"],
            steps=1,
            precision=told["precision"],
            device=found[name][0]["device"],
            peak_memory_bytes=peaks[name],
            settings=shared
            | {"trained": trained[name], "memory_ratio": round(peaks[name] / peaks[baseline.name], 4)}
            | _before(found[name]),
            note="a process a round, in turns; median step of each",
        )
        for name, timing in timings.items()
    ]


def _before(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The peak of whole processes, and what was made before the first step, where anything was."""
    told = {"whole_peak_bytes": round(statistics.median(r["whole_peak"] for r in runs))}
    if "prepared_s" in runs[0]:
        told["prepared_s"] = round(statistics.median(r["prepared_s"] for r in runs), 2)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model folder in diffusers' layout")
    parser.add_argument("photos", help="a folder of JPEGs")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--precision", choices=("float32", "bf16", "fp16"), default="float32")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    given = vars(parser.parse_args())
    rounds, out = given.pop("rounds"), given.pop("out")
    rows = compare(given, rounds)
    for row in rows:
        memory = f"{row.peak_memory_bytes / 1e6:.0f} MB ({row.settings['memory_ratio']:.3f})"
        whole = f"{row.settings['whole_peak_bytes'] / 1e6:.0f} MB with preparing"
        print(f"{row.case}: {row.median_s:.4g} s a step ({row.ratio:.3f}), {memory}, {whole}")
    if out is not None:
        append_csv(out, rows)


if __name__ == "__main__":
    main()
