"""What a run holds beside its steps: counted as the run does it, and as much as a real run takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from darkroom import models
from darkroom.counting import ROUND_BYTES
from darkroom.plan.ask import ask_recipe, plans
from darkroom.plan.counts import DECODED, KINDS, LATENTS, SAMPLES, Profile
from darkroom.plan.targets import Target
from darkroom.plan.training import profile_recipe
from darkroom.recipe import make_recipe
from darkroom.train import setup as job
from darkroom.train.jobs import Pinned
from darkroom.train.setup import make_job
from scripts import load_script

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan" / "memory.py"
HEAVY = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 4}
PARTS = ("unet", "vae", "text_encoder")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder whose text encoder is worth laying into a file."""
    folder = tmp_path_factory.mktemp("models") / "heavy"
    overrides = {"text_encoder": HEAVY, "unet": {"cross_attention_dim": HEAVY["hidden_size"]}}
    models.save(models.create("tiny", overrides=overrides), folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(3):
        Image.fromarray(np.full((64, 64, 3), 60 * i, dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def content(base: Path | str, photos: Path, **more: Any) -> dict[str, Any]:
    return {
        "task": "lora",
        "model": {"base": str(base)},
        "data": {"folder": str(photos), "resolution": 64, "prompt": "a"},
        "train": {"steps": 2, "global_batch": 1, "micro_batch": 1, "device": "cpu", "precision": "float32"},
        **more,
    }


def counted(told: dict[str, Any], precision: str = "float32", *, gpu: bool = False) -> Profile:
    return profile_recipe(make_recipe(told).dump(), precision, gpu=gpu)


def weights(profile: Profile, *stages: str) -> set[float]:
    """Bytes of weights alive in stages; of the steps' own unless said."""
    beside = (LATENTS, SAMPLES, DECODED, "opened")
    of = [one for one in profile.moments if (one.stage in stages if stages else one.stage not in beside)]
    return {one.bytes["weights"].fixed for one in of}


def held(base: Path | str, *parts: str) -> int:
    """Bytes of a model's parts in float32, as an allocator rounds them."""
    ref = str(base)
    model = models.create(ref, parts=PARTS) if ref == "tiny" else models.load(ref)
    tensors = [
        t for part in parts for t in (*model.modules[part].parameters(), *model.modules[part].buffers())
    ]
    return sum(-(-t.nbytes // ROUND_BYTES) * ROUND_BYTES for t in tensors)


def test_latents_are_made_with_what_is_in_memory_then(base: Path, photos: Path) -> None:
    def early(told: dict[str, Any], precision: str = "float32", *, gpu: bool = False) -> float:
        [found] = weights(counted(told, precision, gpu=gpu), LATENTS)
        return found

    assert early(content(base, photos)) == held(base, "vae")  # the rest lies in the folder's files
    assert early(content("tiny", photos)) == held("tiny", *PARTS)  # random numbers lie in memory
    assert early(content("tiny", photos), gpu=True) == held("tiny", "vae")  # the rest goes there afterwards
    copied = early(content(base, photos), "bf16") - held(base, "vae")
    assert copied == pytest.approx(held(base, "unet") / 2, rel=0.1)  # the frozen U-Net's, rounded up
    data = {"instance": str(photos), "resolution": 64, "prompt": "a sks dog", "class_prompt": "a dog"}
    told = content(base, photos, task="dreambooth-lora", data=data)
    assert early(told, gpu=True) == held(base, *PARTS)  # they have drawn the class


def test_what_rests_is_what_the_run_lays_aside(
    base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid: list[int] = []
    offload = job.offload_mmap
    monkeypatch.setattr(job, "offload_mmap", lambda *given: laid.append(offload(*given)))
    for name, more in {
        "both": {},
        "trained": {"adapter": {"text_encoder": True}},
        "inline": {"data": {**content(base, photos)["data"], "encode": "inline"}},
    }.items():
        told = content(base, photos, **more)
        make_job(make_recipe(told), Pinned(tmp_path / name))
        on_cpu, on_gpu = counted(told), counted(told, gpu=True)
        [light], [whole] = weights(on_cpu), weights(on_gpu)
        assert whole - light == pytest.approx(laid[-1], rel=0.01, abs=1000), name
        assert weights(on_cpu, LATENTS) != {light}
    assert laid[0] > laid[2] > 0 == laid[1]  # VAE and text; text alone; neither is 32 MB


def test_samples_are_counted_where_they_are_drawn(base: Path, photos: Path) -> None:
    inline = {**content(base, photos)["data"], "encode": "inline"}  # no latents before, which take more here

    def drawing(**sample: Any) -> Profile:
        return counted(content(base, photos, data=inline, sample=sample))

    plain, drawn = drawing(), drawing(prompts=["one", "two", "three"])
    assert weights(plain, SAMPLES, DECODED) == set()
    [whole] = weights(drawn, SAMPLES, DECODED)
    assert whole == pytest.approx(held(base, *PARTS), rel=0.02)  # nothing rests then; the adapter is there
    assert sum(drawn.memory(1).values()) > sum(plain.memory(1).values())
    more = drawing(prompts=["a"] * 30)
    assert sum(more.memory(1).values()) > 1.2 * sum(drawn.memory(1).values())
    assert sum(more.memory(1).values()) == sum(more.memory(2).values())  # whatever the batch
    assert plain.flops(1) == more.flops(1)  # a step is a step
    # As many go through the U-Net at once as `generate` lets through, whatever the prompts.
    many, most = drawing(prompts=["a"] * 64), drawing(prompts=["a"] * 200)
    assert sum(more.memory(1).values()) < sum(many.memory(1).values()) == sum(most.memory(1).values())


def test_an_autoencoder_draws_no_prompts() -> None:
    told = {
        "task": "autoencoder",
        "model": {"base": "tiny"},
        "data": {"store": "nowhere", "resolution": 64},
        "sample": {"every": 1},
    }
    assert weights(counted(told), SAMPLES, DECODED) == set()


def test_no_more_pictures_are_encoded_at_once_than_there_are(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    def planned(folder: Path) -> float:
        file = tmp_path / "recipe.yaml"
        file.write_text(json.dumps(content("tiny", folder)))
        [plan] = plans(ask_recipe(file), Target())
        return sum(plan.memory_bytes[kind] for kind in KINDS)  # without the process around it

    of_three = planned(photos)
    for i in range(3, 9):
        Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save(photos / f"{i}.png")
    of_nine = planned(photos)  # counted once: the same recipe
    unbounded = sum(counted(content("tiny", tmp_path / "nowhere")).memory(1).values())
    assert of_three < of_nine < unbounded


def test_on_a_gpu_latents_are_made_before_the_rest_goes_there(
    base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands in for it: what is there is seen when the latents are to be made."""
    seen: dict[str, str] = {}

    def look(recipe: Any, model: Any, *_: Any) -> None:
        seen.update({name: next(module.parameters()).device.type for name, module in model.modules.items()})
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "prepare_own", look)
    monkeypatch.setattr(job, "own_device", lambda *_: torch.device("meta"))
    with pytest.raises(KeyboardInterrupt):
        make_job(make_recipe(content(base, photos)), Pinned(tmp_path / "run"))
    assert seen == {"unet": "cpu", "vae": "cpu", "text_encoder": "cpu"}


def test_an_adapters_frozen_text_encoder_is_halved_on_a_gpu(
    base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the run has it when it begins to train, and as the plan counts it. The VAE stays in float32."""
    seen: dict[str, torch.dtype] = {}

    def look(*_: Any) -> None:
        raise KeyboardInterrupt

    def run(on: str, **more: Any) -> dict[str, torch.dtype]:
        made: list[Any] = []
        real = job.make_task
        monkeypatch.setattr(job, "make_task", lambda *given: made.append(given[1]) or real(*given))
        monkeypatch.setattr(job, "own_device", lambda *_: torch.device(on))
        monkeypatch.setattr(job, "offload_mmap", look)
        data = {**content(base, photos)["data"], "encode": "inline"}
        train = {**content(base, photos)["train"], "precision": "bf16"}
        with pytest.raises(KeyboardInterrupt):
            make_job(
                make_recipe(content(base, photos, data=data, train=train, **more)), Pinned(tmp_path / on)
            )
        return {name: next(module.parameters()).dtype for name, module in made[0].modules.items()}

    seen = run("meta")  # stands in for a GPU
    assert (seen["text_encoder"], seen["vae"]) == (torch.bfloat16, torch.float32)
    assert run("cpu")["text_encoder"] == torch.float32  # rests in a file
    monkeypatch.undo()
    inline = {**content(base, photos)["data"], "encode": "inline"}
    on_gpu = counted(content(base, photos, data=inline), "bf16", gpu=True)
    on_cpu = counted(content(base, photos, data=inline), "bf16")
    [half], [whole] = weights(on_gpu), weights(on_cpu)
    text = held(base, "text_encoder")
    assert half < held(base, "vae") + 0.6 * text + 0.6 * held(base, "unet")
    assert whole != half


@pytest.mark.nightly
@pytest.mark.parametrize("samples", [False, True], ids=["latents", "samples"])
def test_a_real_run_takes_what_is_planned(samples: bool) -> None:
    """In a process of its own, each freed block given back; `benchmarks/plan/memory-cpu.csv` has the rows."""
    benchmark = load_script("benchmarks/plan/memory.py")
    [name] = [name for name in benchmark.SMALL if name.startswith("a run") and ("samples" in name) == samples]
    predicted = benchmark.predict(*benchmark.SMALL[name])["predicted"]
    run = [sys.executable, str(BENCHMARK), "--one", "measure", name]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | benchmark.EAGER, timeout=600)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])["measured"]
    assert predicted == pytest.approx(measured, rel=0.08)
