"""What is refused or announced before a model is opened, and weights that wait in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from darkroom import models, sample
from darkroom.errors import InputError
from darkroom.hardware.meters import resident_bytes
from darkroom.sample import memory
from darkroom.sample.optimisations import offload

CPU = torch.device("cpu")
PROMPT = "a red circle"


def before(size: tuple[int, int], **more: Any) -> list[str]:
    said: list[str] = []
    outline = models.outlined("tiny", ("unet", "vae", "text_encoder", "tokenizer"))
    settings = sample.GenerateSettings.of(size=size, **more.pop("settings", {}))
    asked = {"optimise": "auto", "device": CPU, "dtype": torch.float32, "notice": said.append}
    memory.check_before(outline, settings, 1, **{**asked, **more})
    return said


def test_a_size_that_cannot_fit_is_refused_and_a_long_one_announced(monkeypatch):
    assert before((256, 256)) == []
    monkeypatch.setattr(memory, "LONG_S", 0.0)
    assert "256x256 takes at least" in before((256, 256))[0]
    assert before((64, 64)) == []  # near the model's own size nothing is counted
    monkeypatch.setattr(memory, "memory_of", lambda device: 10**7)
    with pytest.raises(InputError, match=r"size 256x256 needs about .* GB in \w+; allowed: what fits"):
        before((256, 256))
    with pytest.raises(InputError, match="size 256x256 needs"):  # hires counts at its larger size
        before((32, 32), settings={"hires": sample.Hires(scale=8)})


def test_what_cannot_fit_by_its_settings_alone_is_refused_at_once(monkeypatch, folder):
    asked: dict[str, Any] = {"tiled": False, "device": CPU, "dtype": torch.float32}
    with pytest.raises(InputError, match=r"weights of 'sd15' take 4.26 GB; .*darkroom export sd15 --to"):
        memory.check_at_once("sd15", (512, 512), limit_bytes=3 * 10**9, **asked)
    memory.check_at_once("sd15", (512, 512), limit_bytes=5 * 10**9, **asked)
    monkeypatch.setattr(memory, "memory_of", lambda device: 24 * 10**9)
    with pytest.raises(InputError, match="8192x8192 needs at least 68.7 GB in decoding"):
        memory.check_at_once("sd15", (8192, 8192), **asked)
    with pytest.raises(InputError, match="65536x65536 needs at least 4,398 GB in decoding"):
        memory.check_at_once("sd15", (65536, 65536), **asked)
    memory.check_at_once("sd15", (8192, 8192), **{**asked, "tiled": True})
    memory.check_at_once("sd15", (2048, 2048), **asked)
    with pytest.raises(InputError, match="needs at least"):
        memory.check_at_once(str(folder), (16384, 16384), **asked)


@pytest.mark.parametrize("widths", ["abc", [], [None], 5, [[8]], [True]])
def test_a_vae_without_known_widths_is_left_to_those_who_open_it(tmp_path, widths):
    asked: dict[str, Any] = {"tiled": False, "device": CPU, "dtype": torch.float32}
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"block_out_channels": widths}))
    memory.check_at_once(str(tmp_path), (64, 64), **asked)
    (tmp_path / "vae" / "config.json").write_text("[" * 50_000)
    with pytest.raises(InputError, match="is no JSON: maximum recursion"):
        memory.check_at_once(str(tmp_path), (64, 64), **asked)


@pytest.mark.parametrize("family", ["tiny", "tiny-dit"])
def test_a_family_knows_its_parameters(family):
    assert models.FAMILIES[family].num_parameters == sum(models.create(family).num_parameters.values())


def test_what_a_model_cannot_make_is_told_by_its_outline():
    with pytest.raises(InputError, match="multiples of"):
        before((33, 32))
    with pytest.raises(InputError, match="rectified flow"):
        before((32, 32), settings={"solver": "flow_heun"})
    with pytest.raises(InputError, match=r"allowed: \d\.\d\d GB or more"):
        before((32, 32), limit_bytes=10**6)
    assert before((32, 32), limit_bytes=40 * 10**9) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in float16, as a folder."""
    made = tmp_path_factory.mktemp("half") / "model"
    models.save(models.create("tiny", seed=1).to(dtype=torch.float16), made)
    return made


def test_streamed_pictures_are_the_same_to_the_bit(folder, monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 0)  # every layer waits, as in a large model
    asked: dict[str, Any] = {"steps": 2, "seed": 3}
    plain = sample.generate(models.load(folder), PROMPT, **asked)
    waiting = models.load(folder, dtype=None)
    assert next(waiting.unet.parameters()).dtype == torch.float16
    said: list[str] = []
    made = sample.generate(
        waiting, PROMPT, memory="40GB", optimise="auto,offload_mmap", notice=said.append, **asked
    )
    assert torch.equal(made[0].latents, plain[0].latents)
    assert made[0].image.tobytes() == plain[0].image.tobytes()
    assert made[0].parameters["precision"] == "float32"
    assert any("reading weights adds about" in line for line in said)
    roomy = sample.generate(waiting, PROMPT, memory="40GB", **asked)  # cast once, where there is room
    assert torch.equal(roomy[0].latents, plain[0].latents)
    assert "offload_mmap" not in roomy[0].parameters["optimise"]
    other = sample.generate(waiting, PROMPT, memory="40GB", optimise="offload_mmap", steps=2, seed=4)
    assert not torch.equal(other[0].latents, plain[0].latents)
    assert models.identity(waiting.unet) == models.identity(models.load(folder).unet)


def test_weights_that_may_have_changed_are_not_let_go_of(folder):
    """A change in place is in no file: letting go of the page would undo it."""
    with pytest.raises(InputError, match="do not lie in files"):
        sample.generate(models.load(folder), PROMPT, steps=1, optimise="offload_mmap")
    with pytest.raises(InputError, match="do not lie in files"):
        sample.generate(models.create("tiny"), PROMPT, steps=1, optimise="offload_mmap")


def test_a_models_file_is_hashed(folder, tmp_path, monkeypatch):
    import hashlib

    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.safetensors"
    models.save_single_file(models.create("tiny", seed=1), file)
    for _ in range(2):  # hashed, then read from the cache
        found = models.file_digest(models.load(file))
        assert found == {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    found = models.file_digest(models.load(folder))
    assert found is not None
    assert found["file"] == "unet/diffusion_pytorch_model.safetensors"
    assert models.file_digest(models.create("tiny")) is None


MEASURED = """
import re, sys
from darkroom import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as left:
    assert not left.code
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.nightly
def test_sd15_at_512_keeps_to_3_gb_on_a_cpu(tmp_path):
    """A whole run of the command line, at full size, in float32 from a float16 folder."""
    import re
    import subprocess
    import sys

    model = models.create("sd15", tokenizer=models.train_tokenizer([], vocab_size=514))
    models.save(model.to(dtype=torch.float16), tmp_path / "sd15")
    del model
    arguments = ["generate", str(tmp_path / "sd15"), PROMPT, "--memory", "3GB", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments, "--size", "512", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    told = re.search(r"memory: offload_mmap.* ([\d.]+) GB at most", done.stderr)
    assert told is not None, done.stderr
    peak = int(re.search(r"peak (\d+)", done.stdout)[1]) * 1024  # type: ignore[index]
    assert peak < float(told[1]) * 1e9 <= 3e9
    assert peak > resident_bytes() * 0.1  # control: the mark was read
