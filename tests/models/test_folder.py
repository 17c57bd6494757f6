"""Model folders: written, opened by darkroom and by diffusers, refused where something is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from darkroom import models
from darkroom.errors import ModelError
from darkroom.hardware import system
from darkroom.models import folder as model_folder


@pytest.fixture(scope="module")
def tiny():
    return models.create("tiny", seed=1)


@pytest.fixture
def folder(tiny, tmp_path):
    models.save(tiny, tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_comes_back_whole(tiny, folder):
    back = models.load(folder)
    assert back.family == "tiny"
    assert back.scheduler == tiny.scheduler
    assert back.modules.keys() == tiny.modules.keys()
    for name, module in tiny.modules.items():
        assert models.identity(module) == models.identity(back.modules[name]), name
    text = "A red circle on mars é"
    assert back.tokenizers[0](text).input_ids == tiny.tokenizers[0](text).input_ids


def test_a_saved_model_does_not_say_where_its_parts_were_opened(folder, tmp_path):
    """diffusers and transformers note the folder, and `save_pretrained` writes it."""
    opened = models.load(folder)
    assert str(tmp_path) in str(opened.unet.config)
    models.save(opened, tmp_path / "other")
    files = [file for file in (tmp_path / "other").rglob("*") if file.is_file()]
    assert len(files) > 5
    assert [file.name for file in files if str(folder).encode() in file.read_bytes()] == []
    assert models.identity(models.load(tmp_path / "other").unet) == models.identity(opened.unet)


def test_diffusers_opens_it_and_runs_the_same_weights(tiny, folder):
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    assert models.identity(pipe.unet) == models.identity(tiny.unet)
    picture = pipe("a red circle", num_inference_steps=2, output_type="np").images
    assert picture.shape == (1, 32, 32, 3)
    assert np.isfinite(picture).all()


def test_a_guidance_scale_is_noted_and_diffusers_does_not_mind(tiny, tmp_path, capfd):
    models.save(replace(tiny, guidance=1.5), tmp_path / "told")
    models.save(tiny, tmp_path / "untold")
    assert models.load(tmp_path / "told", parts=("unet",)).guidance == 1.5
    assert models.load(tmp_path / "untold", parts=("unet",)).guidance is None
    capfd.readouterr()
    StableDiffusionPipeline.from_pretrained(tmp_path / "told")
    assert "darkroom" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("noted", ['"seven"', "-1", "true", "1e9", '{"guidance": 2}'])
def test_a_damaged_note_of_guidance_is_none(folder, noted):
    index = folder / "model_index.json"
    note = '"_darkroom": {"guidance": ' + noted + "},"
    index.write_text(index.read_text().replace("{", "{" + note, 1))
    assert models.load(folder, parts=("unet",)).guidance is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/first/model", "first"),
        ("runs/first/model/", "first"),
        ("../first/model", "first"),
        ("plain/model", "model"),
        ("plain", "plain"),
        (".", "here"),
        ("sd15.safetensors", "sd15.safetensors"),
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", "stable-diffusion-v1-5"),
        ("/", "tiny"),
        (None, "tiny"),
    ],
)
def test_a_model_has_the_name_of_its_place(path, name, tmp_path, monkeypatch):
    for folder in ("here/runs/first/model", "first/model", "here/plain/model"):
        (tmp_path / folder).mkdir(parents=True)
    for run in ("here/runs/first", "first"):
        (tmp_path / run / "recipe.yaml").touch()
    monkeypatch.chdir(tmp_path / "here")
    assert models.Model("tiny", path=path).name == name


def test_identity_sees_one_changed_weight_but_not_its_type(tiny):
    before = models.identity(tiny.vae)
    other = models.create("tiny", seed=1).vae
    assert models.identity(other) == before
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-3
    assert models.identity(other) != before
    assert models.identity(tiny.vae, tiny.unet) != models.identity(tiny.unet, tiny.vae)


def test_saving_replaces_whole_and_leaves_nothing_beside(tiny, folder):
    (folder / "stray").write_text("old")
    models.save(tiny, folder)
    assert not (folder / "stray").exists()
    assert [entry.name for entry in folder.parent.iterdir()] == ["model"]


def test_weights_in_channels_last_are_laid_out_one_by_one(tiny, folder, tmp_path, monkeypatch):
    """Diffusers' own conversion holds a second copy of all of them; afterwards they are as they were."""
    model = models.load(folder)
    torch.nn.Module.to(model.unet, memory_format=torch.channels_last)
    layouts = {name: p.stride() for name, p in model.unet.named_parameters()}
    assert any(not p.is_contiguous() for p in model.unet.parameters())
    saver, seen = model_folder._saver, []

    def looked(module):
        seen.append(all(p.is_contiguous() for p in module.parameters()))
        return saver(module)

    monkeypatch.setattr(model_folder, "_saver", looked)
    models.save(model, tmp_path / "again")
    assert seen
    assert all(seen)
    assert {name: p.stride() for name, p in model.unet.named_parameters()} == layouts
    assert models.identity(model.unet) == models.identity(tiny.unet)
    file = "unet/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_parts_asked_for_must_be_there(folder):
    shutil.rmtree(folder / "vae")
    assert models.load(folder).vae is None
    with pytest.raises(ModelError, match="has no vae; it has unet, text_encoder, tokenizer"):
        models.load(folder, parts=("unet", "vae"))


def test_pickled_weights_are_refused(folder):
    (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(folder / "unet" / "model.bin")
    with pytest.raises(ModelError, match=r"no \.safetensors weights"):
        models.load(folder)


def test_a_damaged_file_is_one_clear_line(folder):
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="unet/diffusion_pytorch_model.safetensors' is damaged") as caught:
        models.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ref", ["nowhere", "/no/where", "./a/b"])
def test_what_is_no_model_is_refused(ref):
    with pytest.raises(ModelError, match="no model at"):
        models.load(ref)


def test_describe_tells_family_sizes_and_hashes(tiny, folder):
    told = models.describe(folder)
    assert told["family"] == "tiny"
    assert told["parameters"] == tiny.num_parameters
    assert told["sha256"]["vae"] == models.identity(tiny.vae)


def test_a_half_precision_load_is_the_cast_of_the_stored_weights(tiny, folder):
    back = models.load(folder, dtype=torch.bfloat16, parts=("unet",))
    weight = next(back.unet.parameters())
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, next(tiny.unet.parameters()).bfloat16())


@pytest.mark.parametrize("emulated", [True, False])
def test_bf16_on_a_processor_without_it_is_told(monkeypatch, caplog, emulated):
    for name in system.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(system, "hardware_instructions", lambda: ("avx2" if emulated else "avx512_bf16",))
    models.load("tiny", parts=["vae"])
    assert not caplog.records
    models.load("tiny", parts=["vae"], dtype=torch.bfloat16)
    assert ("float32 is many times as fast" in caplog.text) == emulated


def test_no_memory_left_is_no_damaged_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.save(models.create("tiny", parts=("vae",), seed=1), tmp_path / "model")
    assert models.load(tmp_path / "model", parts=("vae",)).vae is not None

    def raising(text: str) -> None:
        def from_config(*_: object, **__: object) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr("diffusers.AutoencoderKL.from_config", from_config)

    raising("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12345 bytes")
    with pytest.raises(RuntimeError, match="can't allocate"):
        models.load(tmp_path / "model", parts=("vae",))
    raising("Error(s) in loading state_dict: size mismatch")
    with pytest.raises(ModelError, match="size mismatch"):
        models.load(tmp_path / "model", parts=("vae",))


def test_a_folder_that_cannot_be_put_in_its_place_leaves_the_old_one(tiny, folder, monkeypatch):
    """As on Windows, where a scanner may have a new file open."""
    before, real = sorted(folder.rglob("*")), Path.replace

    def held(source, target):
        if Path(target) == folder and "-old-" not in str(source):
            raise PermissionError(13, "in use", str(source))
        return real(source, target)

    monkeypatch.setattr(Path, "replace", held)
    with pytest.raises(PermissionError):
        models.save(tiny, folder)
    assert sorted(folder.rglob("*")) == before
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}")] == []
