"""Single-file checkpoints: every weight's original name, as diffusers' converter has it; round trips."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils as theirs
from safetensors.torch import load_file, save_file

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models import single_file as original
from darkroom.models.model import Model
from darkroom.models.single_file import original_weights

SMALL_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 64,
}
SMALL_UNET: dict[str, Any] = {"sample_size": 8, "norm_num_groups": 8, "layers_per_block": 1}
SMALL_VAE = {"block_out_channels": [16, 16], "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16}
SMALL: dict[str, dict[str, Any]] = {
    "sd15": {
        "unet": {**SMALL_UNET, "block_out_channels": [32, 32, 64, 64], "cross_attention_dim": 64},
        "vae": SMALL_VAE,
        "text_encoder": SMALL_TEXT,
    },
    "sd2": {
        "unet": {
            **SMALL_UNET,
            "block_out_channels": [32, 32, 64, 64],
            "cross_attention_dim": 64,
            "attention_head_dim": [2, 2, 4, 4],
        },
        "vae": SMALL_VAE,
        "text_encoder": SMALL_TEXT,
    },
    "sdxl": {
        "unet": {
            **SMALL_UNET,
            "block_out_channels": [16, 32, 32],
            "transformer_layers_per_block": [1, 1, 2],
            "cross_attention_dim": 128,
            "attention_head_dim": [2, 4, 4],
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 64 + 6 * 8,
        },
        "vae": SMALL_VAE,
        "text_encoder": SMALL_TEXT,
        "text_encoder_2": SMALL_TEXT,
    },
}
TOKENIZER = models.train_tokenizer(["a red circle on a blue background"], vocab_size=600)


def small(family: str) -> Model:
    if family == "tiny":
        return models.create("tiny", seed=3)
    return models.create(family, seed=3, tokenizer=TOKENIZER, overrides=SMALL[family])


@pytest.fixture(scope="module", params=["tiny", "sd15", "sd2", "sdxl"])
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    model = small(request.param)
    return model, models.save_single_file(model, tmp_path_factory.mktemp("single") / "model.safetensors")


def test_a_round_trip_is_equal_to_the_bit(written: tuple[Model, Path]) -> None:
    model, file = written
    back = models.load(file)
    assert back.family == model.family
    assert back.scheduler == model.scheduler
    assert back.modules.keys() == model.modules.keys()
    for name, module in model.modules.items():
        ours, again = module.state_dict(), back.modules[name].state_dict()
        assert ours.keys() == again.keys()
        assert all(torch.equal(ours[key], again[key]) for key in ours), name
    assert back.tokenizers[-1]("a red zebra").input_ids == model.tokenizers[-1]("a red zebra").input_ids
    assert back.tokenizers[-1].pad_token_id == model.tokenizers[-1].pad_token_id
    other = models.create("tiny", seed=4)
    assert models.identity(other.vae) != models.identity(back.vae)


def test_its_guidance_scale_comes_along(tmp_path: Path) -> None:
    model = models.create("tiny")
    for name, scale in (("none", None), ("told", 2.5)):
        model.guidance = scale
        models.save_single_file(model, tmp_path / f"{name}.safetensors")
        assert models.load(tmp_path / f"{name}.safetensors", parts=("unet",)).guidance == scale


def test_it_draws_the_same_picture(written: tuple[Model, Path]) -> None:
    from darkroom.sample import generate

    model, file = written
    pictures = [generate(one, "a red circle", steps=2)[0] for one in (model, models.load(file))]
    assert torch.equal(pictures[0].latents, pictures[1].latents)


def as_diffusers_reads(model: Model, weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The file's weights through diffusers' own converters, by part."""
    assert model.unet is not None
    assert model.vae is not None
    parts = {
        "unet": theirs.convert_ldm_unet_checkpoint(dict(weights), dict(model.unet.config)),
        "vae": theirs.convert_ldm_vae_checkpoint(dict(weights), dict(model.vae.config)),
    }
    if any(key.startswith((original.CLIP, original.SDXL_CLIP)) for key in weights):
        parts["text_encoder"] = theirs.convert_ldm_clip_checkpoint(dict(weights))
    for name, prefix in (("text_encoder", original.OPENCLIP), ("text_encoder_2", original.SDXL_OPENCLIP)):
        if any(key.startswith(prefix) for key in weights):
            module = model.modules[name]
            parts[name] = theirs.convert_open_clip_checkpoint(module, dict(weights), prefix=prefix)
    return parts


def plain(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix("text_model."): value for key, value in weights.items()}


def test_diffusers_reads_the_same_weights_from_it(written: tuple[Model, Path]) -> None:
    model, file = written
    parts = as_diffusers_reads(model, load_file(file))
    assert parts.keys() == model.modules.keys()
    for name, read in parts.items():
        ours = plain(model.modules[name].state_dict())
        assert plain(read).keys() == ours.keys()
        assert all(torch.equal(value, ours[key]) for key, value in plain(read).items()), name


@pytest.mark.parametrize("family", ["sd15", "sd2", "sd2-v", "sdxl"])
def test_every_weight_of_the_full_size_has_its_original_name(family: str) -> None:
    model = models.create(family, parts=("unet", "vae", "text_encoder"), device="meta")
    weights = dict(original_weights(model))
    assert sum(weight.numel() for weight in weights.values()) == sum(model.num_parameters.values())
    for name, read in as_diffusers_reads(model, weights).items():
        ours = plain(model.modules[name].state_dict())
        shapes = {key: tuple(value.shape) for key, value in plain(read).items()}
        assert shapes == {key: tuple(value.shape) for key, value in ours.items()}, name


KNOWN = {
    "sd15": {
        "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 768),
        "model.diffusion_model.output_blocks.8.2.conv.weight": (640, 640, 3, 3),
        "model.diffusion_model.output_blocks.2.1.conv.weight": (1280, 1280, 3, 3),
        "first_stage_model.decoder.up.0.block.0.nin_shortcut.weight": (128, 256, 1, 1),
        "first_stage_model.encoder.mid.attn_1.q.weight": (512, 512, 1, 1),
        "cond_stage_model.transformer.text_model.encoder.layers.11.mlp.fc1.weight": (3072, 768),
    },
    "sd2": {"cond_stage_model.model.transformer.resblocks.22.attn.in_proj_weight": (3072, 1024)},
    "sdxl": {
        "model.diffusion_model.label_emb.0.0.weight": (1280, 2816),
        "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight": (768,),
        "conditioner.embedders.1.model.text_projection": (1280, 1280),
        "conditioner.embedders.1.model.positional_embedding": (77, 1280),
    },
}


@pytest.mark.parametrize("family", KNOWN)
def test_names_that_published_files_have(family: str) -> None:
    model = models.create(family, parts=("unet", "vae", "text_encoder"), device="meta")
    weights = dict(original_weights(model))
    assert {name: tuple(weights[name].shape) for name in KNOWN[family]} == KNOWN[family]


def published(
    family: str, file: Path, *, overrides: Any = None, extra: Any = None, spread: float = 0
) -> Path:
    """A file as published ones are: full size, float16, nothing in the metadata; its zeros take no room."""
    parts = ("unet", "vae", "text_encoder")
    model = models.create(family, parts=parts, device="meta", overrides=overrides)
    header: dict[str, Any] = {}
    at = 0
    shapes = {name: list(weight.shape) for name, weight in original_weights(model)}
    for name, shape in {**shapes, **(extra or {})}.items():
        size = 2 * int(torch.tensor(shape).prod()) if shape else 2
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)
        if spread:
            name = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
            values = torch.tensor([spread, -spread] * 160, dtype=torch.float16)
            out.seek(8 + len(text) + header[name]["data_offsets"][0])
            out.write(values.numpy().tobytes())
    return file


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("sd15", {}, "sd15"),
        ("sd2", {}, "sd2"),
        ("sd2", {"spread": 0.2}, "sd2-v"),
        ("sdxl", {}, "sdxl"),
        ("sdxl", {"extra": {"v_pred": [], "ztsnr": []}}, "sdxl"),
    ],
)
def test_published_files_are_known_by_their_shapes(
    family: str, options: Any, expected: str, tmp_path: Path, shared_data: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("DARKROOM_CLIP_TOKENIZER", str(shared_data / "clip_tokenizer"))
    file = published(family, tmp_path / "model.safetensors", **options)
    model = models.load(file, parts=("tokenizer",))
    assert model.family == expected
    assert len(model.tokenizers) == (2 if family == "sdxl" else 1)
    predicts_v = expected == "sd2-v" or "extra" in options
    assert model.scheduler["prediction_type"] == ("v_prediction" if predicts_v else "epsilon")
    assert model.scheduler.get("rescale_betas_zero_snr", False) == ("extra" in options)


def test_an_inpainting_file_has_its_nine_channels(tmp_path: Path) -> None:
    model = models.create("tiny", overrides={"unet": {"in_channels": 9}})
    back = models.load(models.save_single_file(model, tmp_path / "inpaint.safetensors"))
    assert back.unet is not None
    assert back.unet.config.in_channels == 9


def test_without_a_tokenizer_at_hand_it_is_one_clear_line(tmp_path: Path, monkeypatch: Any) -> None:
    file = published("sd15", tmp_path / "model.safetensors")
    monkeypatch.setenv("DARKROOM_CLIP_TOKENIZER", str(tmp_path / "none"))
    with pytest.raises(ModelError, match="vocab.json and merges.txt") as caught:
        models.load(file, parts=("tokenizer",))
    assert "\n" not in str(caught.value)
    assert models.load(file, parts=("vae",)).vae is not None


def test_what_else_is_in_the_file_is_passed_over_or_told(tmp_path: Path, caplog: Any) -> None:
    file = models.save_single_file(small("tiny"), tmp_path / "model.safetensors")
    weights, metadata = load_file(file), metadata_of(file)
    known = {
        "model_ema.decay": torch.ones(1),
        "betas": torch.ones(3),
        "alphas_cumprod": torch.ones(3),
        "first_stage_model.loss.logvar": torch.ones(1),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.ones(1, 77),
        "cond_stage_model.logit_scale": torch.ones(1),
    }
    save_file({**weights, **known}, file, metadata)
    with caplog.at_level(logging.WARNING):
        models.load(file)
    assert caplog.text == ""
    save_file({**weights, "control_model.zero.weight": torch.ones(1)}, file, metadata)
    with caplog.at_level(logging.WARNING):
        models.load(file)
    assert "1 tensors are not used, such as control_model.zero.weight" in caplog.text


def metadata_of(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        return dict(opened.metadata())


@pytest.mark.parametrize("prefix", ["first_stage_model.", ""])
def test_a_vae_alone_and_a_unet_alone(prefix: str, tmp_path: Path) -> None:
    model = small("tiny")
    file = models.save_single_file(model, tmp_path / "model.safetensors")
    weights, metadata = load_file(file), metadata_of(file)
    for part, start in (("vae", "first_stage_model."), ("unet", "model.diffusion_model.")):
        alone = {
            key.removeprefix("" if prefix else start): w
            for key, w in weights.items()
            if key.startswith(start)
        }
        save_file(alone, tmp_path / f"{part}.safetensors", metadata)
        back = models.load(tmp_path / f"{part}.safetensors")
        assert list(back.modules) == [part]
        assert models.identity(back.modules[part]) == models.identity(model.modules[part])
    with pytest.raises(ModelError, match=r"has no vae; it has unet"):
        models.load(tmp_path / "unet.safetensors", parts=("unet", "vae"))


def refused(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        models.load(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refusals(tmp_path: Path) -> None:
    file = models.save_single_file(small("tiny"), tmp_path / "model.safetensors")
    weights, metadata = load_file(file), metadata_of(file)
    name = "model.diffusion_model.out.2.weight"
    save_file({k: w for k, w in weights.items() if k != name}, file, metadata)
    assert f"lacks 1 weights, such as {name}" in refused(file)
    save_file({**weights, name: torch.ones(4, 5, 3, 3)}, file, metadata)
    assert f"{name} is [4, 5, 3, 3], not [4, 32, 3, 3]" in refused(file)
    save_file(weights, file)
    assert "has a U-Net of no known family; allowed: SD 1.x, SD 2.x, SDXL base" in refused(file)
    save_file(weights, file, {"darkroom": '{"family": "tiny", "configs": {"unet": {"__class__": 1}}}'})
    assert "no setting '__class__' in the unet" in refused(file)
    file.write_bytes(file.read_bytes()[:5000])
    assert "model.safetensors' is damaged" in refused(file)
    save_file({"lora_unet_x.lora_down.weight": torch.ones(1)}, file)
    assert "is an adapter, not a model" in refused(file)
    save_file({"down_blocks.0.resnets.0.conv1.weight": torch.ones(1)}, file)
    assert "is one part of a model folder; give the folder" in refused(file)
    save_file({"x": torch.ones(1)}, file)
    assert "is no Stable Diffusion checkpoint" in refused(file)
    for pickled in ("model.ckpt", "model.pt", "model.BIN"):
        (tmp_path / pickled).write_bytes(b"\x80\x04.")
        assert "is a pickle, which can run code when opened" in refused(tmp_path / pickled)
    assert refused(tmp_path / "nowhere.safetensors").startswith("no file")
    with pytest.raises(ModelError, match="ends in .safetensors"):
        models.save_single_file(small("tiny"), tmp_path / "model.ckpt")


def test_half_precision_is_written_as_it_is_and_read_as_float32(tmp_path: Path) -> None:
    model = small("tiny").to(dtype=torch.bfloat16)
    file = models.save_single_file(model, tmp_path / "half.safetensors")
    assert {weight.dtype for weight in load_file(file).values()} == {torch.bfloat16}
    back = models.load(file)
    assert models.identity(back.unet) == models.identity(model.unet)
    assert next(back.unet.parameters()).dtype == torch.float32
