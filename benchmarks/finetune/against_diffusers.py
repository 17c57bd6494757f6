"""LoRA by darkroom's loop against two plain loops on diffusers and peft: one that encodes pictures and
prompts at each step, as diffusers' script does by default, and one that caches latents and text and lets go
of VAE and text encoder, as kohya's scripts do. The first ratio is what a user gains who comes from diffusers'
script; the second, what of it is the step itself; caching is worth the rest.

    python benchmarks/finetune/against_diffusers.py sd15 PHOTOS --resolution 256 --steps 3 --rounds 2

MODEL is a folder in diffusers' layout, or a family's name: then with random weights, which take as long.

The sides run in processes of their own, in turns (A B C A B C ...), one a round. Time is the median of a
process's steps after the first; memory is the highest resident set of the process while it trains (the
allocator's on CUDA). The same method, layers, rank, batch, precision, optimiser, photographs and prompt.
darkroom encodes pictures and prompt once, before the steps; VAE and text encoder then lie in a file and hold
no memory. What comes before the first step, caching and opening the model, is no part of the time of a step.
It stands in the row (`prepared_s`), and so does the peak of the whole process (`whole_peak_bytes`).

Take a model of real proportions: beside a U-Net of a few MB, what a process holds before any model is opened
(some 300 MB of imports) decides. `sd15 --batch 1 --resolution 256` does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported
from darkroom.hardware.meters import PeakMemory
from darkroom.measure.finetuning_results import alone
from darkroom.measure.timing import Timing, append_csv, measurement, synchronise

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
PROMPT = "a photo of sks dog"
RATE = 1e-4
Encoded: TypeAlias = Callable[[int], tuple[Any, Any]]
"""A photograph's latents and its prompt's states, by its number."""


def encoding(told: dict[str, Any]) -> dict[str, Any]:
    """diffusers + peft as in its script: VAE and text encoder run at each step."""
    return _peer(told, cached=False)


def caching(told: dict[str, Any]) -> dict[str, Any]:
    """diffusers + peft with latents and text encoded once, as kohya's scripts do when told to cache them."""
    return _peer(told, cached=True)


def _peer(told: dict[str, Any], *, cached: bool) -> dict[str, Any]:
    """A plain loop: autocast, AdamW on float32 adapters."""
    import torch
    import torch.nn.functional as F
    from diffusers import DDPMScheduler

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}[told["precision"]]
    torch.manual_seed(0)
    start = time.perf_counter()
    whole = PeakMemory(device)
    unet, trained = _adapted_unet(told, device, dtype)
    noising = DDPMScheduler.from_pretrained(told["model"], subfolder="scheduler")
    encoded = _encoder(told, device, dtype)
    if cached:
        encoded = _cached(encoded, told)
    prepared_s = time.perf_counter() - start
    optimiser = torch.optim.AdamW(trained, lr=RATE)
    batch = told["batch"]

    def train_step(step: int) -> None:
        rows = [encoded(step * batch + i) for i in range(batch)]
        latents = torch.cat([row[0] for row in rows])
        states = torch.cat([row[1] for row in rows])
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
    counted = sum(p.numel() for p in trained)
    return found | {"trained": counted, "whole_peak": whole.bytes(), "prepared_s": prepared_s}


def _adapted_unet(told: dict[str, Any], device: str, dtype: Any) -> tuple[Any, list[Any]]:
    """The U-Net with peft's LoRA, and the parameters that are trained."""
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig

    unet = UNet2DConditionModel.from_pretrained(told["model"], subfolder="unet").to(device, dtype)
    unet.requires_grad_(False)
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
    return unet, trained


def _encoder(told: dict[str, Any], device: str, dtype: Any) -> Encoded:
    """Latents [1, C, h, w] and text states [1, L, D] of photograph number i, made when they are asked for."""
    import numpy as np
    import torch
    from diffusers import AutoencoderKL
    from PIL import Image, ImageOps
    from transformers import CLIPTextModel, CLIPTokenizer

    base, side = told["model"], told["resolution"]
    tokenizer = CLIPTokenizer.from_pretrained(base, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(base, subfolder="text_encoder").to(device, dtype)
    vae = AutoencoderKL.from_pretrained(base, subfolder="vae").to(device, dtype)
    for module in (text_encoder, vae):
        module.requires_grad_(False)
    files = photographs(told)

    def encoded(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        with Image.open(files[number % len(files)]) as picture:
            cut = ImageOps.fit(picture.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(cut).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        latents = vae.encode(pixels.to(device, dtype)).latent_dist.sample() * vae.config.scaling_factor
        ids = tokenizer(
            [PROMPT],
            padding="max_length",
            truncation=True,
            max_length=tokenizer.model_max_length,
            return_tensors="pt",
        ).input_ids
        return latents, text_encoder(ids.to(device))[0]

    return encoded


def _cached(encoded: Encoded, told: dict[str, Any]) -> Encoded:
    """The same, encoded now: what is returned holds neither VAE nor text encoder."""
    kept = [encoded(number) for number in range(len(photographs(told)))]
    return lambda number: kept[number % len(kept)]


def photographs(told: dict[str, Any]) -> list[Path]:
    """The JPEGs of the folder, in order."""
    return sorted(file for file in Path(told["photos"]).iterdir() if file.suffix.lower() == ".jpg")


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


ENCODING, CACHING = "diffusers + peft, encoding", "diffusers + peft, caching"
SIDES = {ENCODING: encoding, CACHING: caching, "darkroom": ours}


def compare(told: dict[str, Any], rounds: int) -> list[Any]:
    """Rows of the sides, darkroom's against either peer; each repeat of a timing is the median step of one
    process."""
    import os

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    load = os.getloadavg()[0]
    for number in range(rounds):
        for name, side in SIDES.items():
            gone = time.perf_counter()
            found[name].append(alone(side, told))
            gone = time.perf_counter() - gone
            last = found[name][-1]
            step_s, peak_mb = statistics.median(last["seconds"]), last["peak"] / 1e6
            said = f"{step_s:.4g} s a step, peak {peak_mb:.0f} MB, {gone:.0f} s in all"
            print(f"round {number + 1} {name}: {said}", file=sys.stderr)
    trained = {name: runs[0]["trained"] for name, runs in found.items()}
    assert len(set(trained.values())) == 1, f"not the same adapter: {trained}"
    timings = {
        name: Timing(
            name, tuple(statistics.median(r["seconds"]) for r in runs), sum(r["warmup_s"] for r in runs), load
        )
        for name, runs in found.items()
    }
    peaks = {name: round(statistics.median(r["peak"] for r in runs)) for name, runs in found.items()}
    shared = {**told, "model": Path(told["model"]).name, "photos": Path(told["photos"]).name}
    pairs = [(ENCODING, ENCODING), (CACHING, ENCODING), ("darkroom", ENCODING), ("darkroom", CACHING)]
    return [
        measurement(
            "finetune-against-diffusers",
            timings[name],
            baseline=timings[other],
            images=told["batch"],
            steps=1,
            precision=told["precision"],
            device=found[name][0]["device"],
            peak_memory_bytes=peaks[name],
            settings=shared
            | {"trained": trained[name], "memory_ratio": round(peaks[name] / peaks[other], 4)}
            | _before(found[name]),
            note="a process a round, in turns; median step of each",
        )
        for name, other in pairs
    ]


def _before(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The peak of whole processes, and the seconds before the first step."""
    return {
        "whole_peak_bytes": round(statistics.median(r["whole_peak"] for r in runs)),
        "prepared_s": round(statistics.median(r["prepared_s"] for r in runs), 2),
    }


@contextmanager
def opened(model: str) -> Iterator[str]:
    """A model's folder; a family's name becomes one of random weights, for as long."""
    if Path(model).is_dir():
        yield model
        return
    from darkroom import models

    with tempfile.TemporaryDirectory(prefix="darkroom-bench-") as folder:
        models.save(models.create(model), Path(folder) / model)
        yield str(Path(folder) / model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model folder in diffusers' layout, or a family's name")
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
    with opened(given["model"]) as folder:
        rows = compare(given | {"model": folder}, rounds)
    for row in rows:
        memory = f"{row.peak_memory_bytes / 1e6:.0f} MB ({row.settings['memory_ratio']:.3f})"
        whole = f"{row.settings['whole_peak_bytes'] / 1e6:.0f} MB with preparing"
        print(
            f"{row.case}: {row.median_s:.4g} s a step ({row.ratio:.3f} of {row.ratio_to}), {memory}, {whole}"
        )
    if out is not None:
        append_csv(out, rows)


if __name__ == "__main__":
    main()
