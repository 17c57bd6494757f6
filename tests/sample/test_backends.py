"""Each backend's pictures against torch in float32, and the cache of exports.

The models are small, and the tests share one cache: an export takes seconds even so, one to ONNX ten times
as long.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import warm
from darkroom import models
from darkroom.errors import InputError, MissingExtra
from darkroom.hardware import system
from darkroom.models.model import Model
from darkroom.sample import generate
from darkroom.sample.backends import open_backend
from darkroom.sample.backends.exported import CacheKey, exported
from darkroom.sample.pictures import Picture

PROMPTS = ["a red circle on a blue background", "a photo of an astronaut"]
LOSSLESS, MOVED = 2, 10
BF16_MEAN = 3.0
"""Mean absolute error a pixel that bfloat16 may have to float32: torch's own is 1 to 2 on this model."""
SMALL = {
    "unet": {"block_out_channels": [16, 32], "norm_num_groups": 4},
    "vae": {"block_out_channels": [8, 16, 16], "norm_num_groups": 4},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the file, so that each module is exported once."""
    before = os.environ.get("DARKROOM_CACHE")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["DARKROOM_CACHE"] = str(folder)
    yield folder / "backends"
    del os.environ["DARKROOM_CACHE"]
    if before is not None:
        os.environ["DARKROOM_CACHE"] = before


@pytest.fixture(scope="module")
def small() -> Model:
    return models.create("tiny", seed=1, overrides=SMALL)


def array(pictures: list[Picture]) -> np.ndarray:
    return np.stack([np.asarray(picture.image) for picture in pictures]).astype(np.int16)


def apart(one: list[Picture], other: list[Picture]) -> int:
    return int(np.abs(array(one) - array(other)).max())


def mean_apart(one: list[Picture], other: list[Picture]) -> float:
    return float(np.abs(array(one) - array(other)).mean())


def said(notices: list[str], what: str) -> int:
    return sum(what in notice for notice in notices)


def check_like_torch(model: Model, backend: str) -> None:
    """Pictures within 2/255 of torch's at several sizes and batches, and moved by another seed and prompt."""
    opened = open_backend(backend, model, notice=lambda text: None)
    side = model.sample_size
    unit = model.vae_factor * 2 ** (len(model.unet.config.block_out_channels) - 1)  # type: ignore[union-attr]
    for prompts, size, more in (
        (PROMPTS, None, {}),
        (PROMPTS[:1], (side + unit, side), {"solver": "euler_a"}),
        (PROMPTS[:1], None, {"guidance": 1.0, "num": 3}),
        (PROMPTS, None, {"batch_rows": 1, "negative": "blue"}),
    ):
        asked: dict[str, Any] = {"steps": 4, "seed": 5, "size": size, **more}
        ours = generate(model, prompts, backend=opened, **asked)
        theirs = generate(model, prompts, optimise="none", **asked)
        assert apart(ours, theirs) <= LOSSLESS
        for mine, plain in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.latents, plain.latents, atol=2e-3, rtol=1e-3)
        assert ours[0].parameters["backend"] == backend
    other_seed = generate(model, PROMPTS, backend=opened, steps=4, seed=6)
    other_words = generate(model, PROMPTS[::-1], backend=opened, steps=4, seed=5)
    plain = generate(model, PROMPTS, steps=4, seed=5, optimise="none")
    assert apart(other_seed, plain) >= MOVED
    assert apart(other_words, plain) >= MOVED


def test_openvino_draws_what_torch_draws(small: Model, cache: Path) -> None:
    check_like_torch(small, "openvino")


@pytest.mark.nightly
def test_onnx_draws_what_torch_draws(small: Model, cache: Path) -> None:
    check_like_torch(small, "onnx")


def test_openvino_draws_what_sdxl_draws(small_xl: Model, cache: Path) -> None:
    check_like_torch(small_xl, "openvino")


@pytest.mark.nightly
def test_onnx_draws_what_sdxl_draws(small_xl: Model, cache: Path) -> None:
    check_like_torch(small_xl, "onnx")


@pytest.mark.nightly
def test_compile_draws_what_torch_draws(small: Model, cache: Path) -> None:
    notices: list[str] = []
    opened = open_backend("compile", small, optimise="none", notice=notices.append)
    for size in (None, (32, 48)):
        ours = generate(small, PROMPTS, backend=opened, steps=3, size=size)
        theirs = generate(small, PROMPTS, steps=3, size=size, optimise="none")
        assert apart(ours, theirs) <= LOSSLESS
    assert said(notices, "compiled at its first call") == 1
    assert opened.times_s["compile unet"] > 0
    other = generate(small, PROMPTS, backend=opened, steps=3, size=(32, 48), seed=9)
    assert apart(other, theirs) >= MOVED


def test_a_distilled_unet_is_told_its_guidance(cache: Path) -> None:
    overrides = {**SMALL, "unet": {**SMALL["unet"], "time_cond_proj_dim": 16}}
    model = models.create("tiny", seed=4, overrides=overrides)
    with torch.no_grad():  # at random it says little
        model.unet.time_embedding.cond_proj.weight.mul_(8)  # type: ignore[union-attr]
    asked: dict[str, Any] = {"steps": 3, "seed": 2, "solver": "lcm"}
    ours = generate(model, PROMPTS, backend="openvino", guidance=8.0, **asked)
    assert apart(ours, generate(model, PROMPTS, guidance=8.0, optimise="none", **asked)) <= LOSSLESS
    assert apart(ours, generate(model, PROMPTS, guidance=1.0, optimise="none", **asked)) >= MOVED


def test_openvino_in_bfloat16_is_as_near_as_torch_in_bfloat16(small: Model, cache: Path) -> None:
    half = models.create("tiny", seed=1, overrides=SMALL).to(dtype=torch.bfloat16)
    if system.bf16_instructions() is None:
        with pytest.raises(InputError, match="no bfloat16 instructions"):
            generate(half, PROMPTS, steps=4, backend="openvino")
        return
    plain = generate(small, PROMPTS, steps=4, seed=5, optimise="none")
    torchs = generate(half, PROMPTS, steps=4, seed=5, optimise="none")
    ours = generate(half, PROMPTS, steps=4, seed=5, backend="openvino")
    assert ours[0].parameters["precision"] == "bfloat16"
    assert mean_apart(ours, plain) <= max(1.5 * mean_apart(torchs, plain), 1.0)
    assert mean_apart(ours, plain) < BF16_MEAN
    assert mean_apart(generate(half, PROMPTS, steps=4, seed=6, backend="openvino"), plain) > 3 * BF16_MEAN


@pytest.mark.parametrize("optimise", ["none", "bf16"])
def test_openvino_refuses_bfloat16_that_would_be_emulated(
    small: Model, cache: Path, monkeypatch: pytest.MonkeyPatch, optimise: str
) -> None:
    """Whether the weights are bfloat16 or are to be cast: before anything is exported or compiled."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    model = small if optimise == "bf16" else models.create("tiny", seed=1, overrides=SMALL)
    if optimise == "none":
        model.to(dtype=torch.bfloat16)
    notices: list[str] = []
    with pytest.raises(InputError, match="no bfloat16 instructions .*; allowed: float32; auto takes"):
        open_backend("openvino", model, optimise=optimise, notice=notices.append)
    assert not notices
    open_backend("openvino", small, notice=notices.append)  # control: float32 is for any processor


@pytest.mark.parametrize("backend", ["openvino", pytest.param("onnx", marks=pytest.mark.nightly)])
def test_a_tiny_decoder_is_exported_like_the_models_own(
    small: Model, cache: Path, tmp_path: Path, backend: str
) -> None:
    """Its weights are its own key in the cache: the control is another tiny decoder, and the model's VAE."""
    from diffusers import AutoencoderTiny

    drawn: list[list[Picture]] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        blocks = {"num_encoder_blocks": (1, 1, 1), "num_decoder_blocks": (1, 1, 1)}
        widths = {"encoder_block_out_channels": (8, 8, 8), "decoder_block_out_channels": (8, 8, 8)}
        AutoencoderTiny(**widths, **blocks).save_pretrained(tmp_path / f"tiny{seed}")
        optimise = f"tiny_vae:{tmp_path / f'tiny{seed}'}"
        notices: list[str] = []
        told: dict[str, Any] = {"steps": 2, "seed": 5}
        ours = generate(small, PROMPTS, backend=backend, optimise=optimise, notice=notices.append, **told)
        assert said(notices, "the VAE's decoder is exported") == 1
        assert apart(ours, generate(small, PROMPTS, optimise=optimise, **told)) <= LOSSLESS
        assert any("decoded by tiny" in note for note in ours[0].parameters["notes"])
        drawn.append(ours)
    assert apart(*drawn) >= MOVED
    assert apart(drawn[0], generate(small, PROMPTS, **told)) >= MOVED


def files_of(cache: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in sorted(cache.glob("[!.]*/*"))}


def test_an_export_is_made_once_and_again_for_other_weights(small: Model, cache: Path) -> None:
    first = generate(small, PROMPTS, steps=2, backend="openvino", notice=lambda text: None)
    files = files_of(cache)
    assert {file.name for file in files} >= {"model.xml", "model.bin", "export.json"}
    notices: list[str] = []
    again = generate(small, PROMPTS, steps=2, backend="openvino", notice=notices.append)
    assert not said(notices, "exported")
    assert files_of(cache) == files
    assert apart(first, again) == 0

    other = models.create("tiny", seed=1, overrides=SMALL)
    with torch.no_grad():
        other.unet.conv_in.weight.mul_(1.5)  # type: ignore[union-attr]
    changed = generate(other, PROMPTS, steps=2, backend="openvino", notice=notices.append)
    assert said(notices, "the U-Net is exported") == 1
    assert said(notices, "M parameters") == 1
    assert not said(notices, "the VAE's decoder is exported")
    assert len(files_of(cache)) == len(files) + 3
    assert apart(changed, generate(other, PROMPTS, steps=2, optimise="none")) <= LOSSLESS
    assert apart(changed, first) >= MOVED


def test_a_setting_that_no_weight_shows_makes_another_export(small: Model, cache: Path) -> None:
    """The number of heads is not seen in the weights."""
    heads = {**SMALL, "unet": {**SMALL["unet"], "attention_head_dim": 2}}
    other = models.create("tiny", seed=1, overrides=heads)
    assert models.identity(other.unet) == models.identity(small.unet)  # type: ignore[arg-type]
    open_backend("openvino", small, notice=lambda text: None)
    notices: list[str] = []
    ours = generate(other, PROMPTS, steps=2, backend="openvino", notice=notices.append)
    assert said(notices, "the U-Net is exported") == 1
    assert apart(ours, generate(other, PROMPTS, steps=2, optimise="none")) <= LOSSLESS


def test_damaged_files_are_exported_again(
    small: Model, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_backend("openvino", small, notice=lambda text: None)
    shutil.copytree(cache, tmp_path / "backends")
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path))
    for file in (tmp_path / "backends").glob("openvino-unet-*/model.bin"):
        os.truncate(file, file.stat().st_size // 2)
    for file in (tmp_path / "backends").glob("openvino-vae*/export.json"):
        file.write_text(json.dumps({"key": "another"}))
    notices: list[str] = []
    ours = generate(small, PROMPTS, steps=2, backend="openvino", notice=notices.append)
    assert said(notices, "exported") == 2
    assert apart(ours, generate(small, PROMPTS, steps=2, optimise="none")) <= LOSSLESS


EXPORT = """
import sys, torch
from darkroom import models
from darkroom.sample.backends import open_backend
model = models.create("tiny", seed=1, overrides={overrides})
open_backend("openvino", model, notice=lambda text: print(text, flush=True))
print("open", flush=True)
"""


def start_export(cache: Path) -> warm.Popen:
    code = EXPORT.format(overrides=SMALL)
    environment = {**os.environ, "DARKROOM_CACHE": str(cache)}
    return warm.Popen([sys.executable, "-c", code], env=environment, stdout=warm.PIPE, text=True)


@pytest.mark.nightly
def test_a_killed_export_leaves_nothing_half(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path))
    process = start_export(tmp_path)
    folder = tmp_path / "backends"
    deadline = time.monotonic() + 120
    while not list(folder.glob(".openvino-unet-*-*/")) and time.monotonic() < deadline:
        time.sleep(0.01)
        if process.poll() is not None:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [place for place in folder.iterdir() if place.is_dir() and place.name.startswith(".")]
    assert left, "it was killed in the middle"
    assert not list(folder.glob("openvino-unet-*"))
    ours = generate(small, PROMPTS, steps=2, backend="openvino", notice=lambda text: None)
    assert apart(ours, generate(small, PROMPTS, steps=2, optimise="none")) <= LOSSLESS
    assert not [place for place in folder.iterdir() if place.is_dir() and place.name.startswith(".")]


@pytest.mark.nightly
def test_two_processes_export_once(tmp_path: Path) -> None:
    processes = [start_export(tmp_path) for _ in range(2)]
    told = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(text.rstrip().endswith("open") for text in told)
    assert sum(text.count("the U-Net is exported") for text in told) == 1


def test_a_server_of_many_shapes_keeps_drawing(
    small: Model, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first shapes, one compiled for any shape takes the rest."""
    from darkroom.sample.backends import openvino_engine

    monkeypatch.setattr(openvino_engine, "MOST_KEPT", 2)
    opened = open_backend("openvino", small, notice=lambda text: None)
    for num in (1, 2, 3, 4, 1):
        ours = generate(small, PROMPTS[:1], num=num, steps=2, backend=opened, guidance=1.0)
        assert apart(ours, generate(small, PROMPTS[:1], num=num, steps=2, guidance=1.0, optimise="none")) <= 2


def test_the_model_is_as_it_was(cache: Path) -> None:
    model = models.create("tiny", seed=1, overrides=SMALL)
    half = model.to(dtype=torch.bfloat16 if system.bf16_instructions() else torch.float32)
    before = {name: value.data_ptr() for name, value in half.unet.state_dict().items()}  # type: ignore[union-attr]
    processors = {name: id(p) for name, p in half.unet.attn_processors.items()}  # type: ignore[union-attr]
    open_backend("openvino", half, notice=lambda text: None)
    after = half.unet.state_dict()  # type: ignore[union-attr]
    assert {name: value.data_ptr() for name, value in after.items()} == before
    assert len({value.dtype for value in after.values()}) == 1
    assert {name: id(p) for name, p in half.unet.attn_processors.items()} == processors  # type: ignore[union-attr]


def test_what_is_done_beside_the_unet_goes_with_any_backend(small: Model, cache: Path) -> None:
    asked: dict[str, Any] = {"steps": 4, "seed": 3, "optimise": "guidance_interval:1-8"}
    ours = generate(small, PROMPTS, backend="openvino", **asked)
    assert apart(ours, generate(small, PROMPTS, **asked)) <= LOSSLESS
    with pytest.raises(InputError, match="feature_cache"):
        generate(small, PROMPTS, backend="openvino", optimise="feature_cache")


@pytest.mark.parametrize("backend", ["torch", "compile", "onnx", "openvino"])
def test_float16_on_a_cpu_is_refused(backend: str) -> None:
    half = models.create("tiny", seed=1, overrides=SMALL).to(dtype=torch.float16)
    with pytest.raises(InputError, match="fp16 on a CPU.*allowed: float32, bf16"):
        generate(half, PROMPTS, backend=backend)


def test_an_unknown_backend_is_refused(small: Model) -> None:
    with pytest.raises(InputError, match="backend 'tensorrt'; allowed: torch, compile, onnx, openvino"):
        generate(small, PROMPTS, backend="tensorrt")


def test_a_missing_package_names_its_extra(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[onnx\]'"):
        open_backend("onnx", small)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[openvino\]'"):
        open_backend("openvino", small)


def test_a_bank_in_the_unet_is_refused(cache: Path) -> None:
    from darkroom.models.adapters.bank import ROWS

    model = models.create("tiny", seed=1, overrides=SMALL)
    setattr(model.unet, ROWS, object())
    with pytest.raises(InputError, match="merge"):
        open_backend("openvino", model)


def test_a_cache_that_cannot_be_written_is_told(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="DARKROOM_CACHE"):
        open_backend("openvino", small, notice=lambda text: None)


def test_what_was_used_longest_ago_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path))
    monkeypatch.setenv("DARKROOM_CACHE_GB", "3.6e-6")

    def made(part: str) -> Path:
        key = CacheKey("onnx", part, "0" * 64, "{}", "float32", "x?", ())
        place = exported(key, lambda folder: (folder / "model.bin").write_bytes(b"0" * 1000) and None)
        os.utime(place, (now[0], now[0]))
        now[0] += 10
        return place

    now = [1_000_000]
    first, second = made("first"), made("second")
    assert (first / "model.bin").is_file()
    assert (second / "model.bin").is_file()
    made("first")  # used again
    third = made("third")
    assert not second.exists()
    assert (first / "model.bin").is_file()
    assert (third / "model.bin").is_file()
    monkeypatch.setenv("DARKROOM_CACHE_GB", "a lot")
    with pytest.raises(InputError, match="gigabytes above 0"):
        made("fourth")


def test_nothing_is_reported_to_anyone(small: Model, cache: Path) -> None:
    open_backend("openvino", small, notice=lambda text: None)
    from openvino.tools.ovc import convert_impl, telemetry_stub, telemetry_utils

    assert convert_impl.tm is telemetry_utils.tm is telemetry_stub
    assert sys.modules["openvino_telemetry"] is None
