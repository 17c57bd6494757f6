"""Damaged model folders: each is refused in one line that names the file, before anything is drawn."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models.model import PARTS

WEIGHTS = {
    "unet": "unet/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}
SCHEDULER = "scheduler/scheduler_config.json"
Damage = Callable[[Path], object]
PIPES = {"a pipe": os.mkfifo} if hasattr(os, "mkfifo") else {}
PIPES["a device without end"] = lambda path: Path(path).symlink_to("/dev/zero")
"""What is no plain file: reading it waits for ever, or takes all memory. Windows has neither."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    overrides: dict[str, Any] = {
        "vae": {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1},
        "unet": {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2},
        "text_encoder": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
    }
    overrides["unet"] |= {"layers_per_block": 1, "cross_attention_dim": 16}
    overrides["text_encoder"] |= {"num_hidden_layers": 1}
    models.save(models.create("tiny", seed=1, overrides=overrides), folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def tensors(part: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        held = load_file(folder / WEIGHTS[part])
        change(held)
        save_file(held, folder / WEIGHTS[part], metadata={"format": "pt"})

    return damage


def setting(file: str, **values: Any) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))

    return damage


def content(file: str, new: bytes | Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / file
        path.write_bytes(new if isinstance(new, bytes) else new(path.read_bytes()))

    return damage


def header(part: str, change: Callable[[str], str]) -> Damage:
    def changed(raw: bytes) -> bytes:
        (length,) = struct.unpack("<Q", raw[:8])
        text = change(raw[8 : 8 + length].decode()).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    return content(WEIGHTS[part], changed)


def twice(text: str) -> str:
    told = json.loads(text)
    name = next(name for name in told if name != "__metadata__")
    return f"{text.rstrip()[:-1]}, {json.dumps(name)}: {json.dumps(told[name])}}}"


def shards(part: str, index: Callable[[dict[str, str]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / WEIGHTS[part]
        shard = file.with_name(file.name.replace(".safetensors", "-00001-of-00001.safetensors"))
        places = dict.fromkeys(load_file(file), shard.name)
        file.rename(shard)
        file.with_name(f"{file.name}.index.json").write_text(json.dumps(index(places)))

    return damage


def instead(file: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return damage


def first(held: dict[str, torch.Tensor]) -> str:
    return min(name for name in held if held[name].dim() == 1)


def of_every_part(part: str) -> dict[str, tuple[Damage, str]]:
    config, weights = f"{part}/config.json", WEIGHTS[part]
    damaged = rf"{weights}' is damaged: "
    return {
        "a tensor lacks": (
            tensors(part, lambda t: t.pop(first(t))),
            rf"/{part}' lacks the tensor '[\w.]+bias'",
        ),
        "whole numbers": (
            tensors(part, lambda t: t.update({first(t): t[first(t)].long()})),
            rf"/{part}' holds whole numbers for the tensor '[\w.]+'; allowed: floats",
        ),
        "another shape": (
            tensors(part, lambda t: t.update({first(t): torch.zeros(3, 3)})),
            r"expected shape .*8|\[3, 3\] in the file, \[16\] by config.json",
        ),
        "a tensor twice": (header(part, twice), rf"{weights}' holds the tensor '[\w.]+' twice"),
        "cut short": (content(weights, lambda raw: raw[: len(raw) // 2]), damaged),
        "empty": (content(weights, b""), damaged),
        "a header too long": (content(weights, lambda raw: struct.pack("<Q", 2**40) + raw[8:]), damaged),
        "a shape of NaN": (header(part, lambda h: h.replace('"shape":[', '"shape":[NaN,', 1)), damaged),
        "an unknown type": (header(part, lambda h: h.replace('"F32"', '"F99"', 1)), damaged),
        "no config": (lambda folder: (folder / config).unlink(), rf"{config}' cannot be read: No such file"),
        "an empty config": (content(config, b""), rf"{config}' is no JSON"),
        "a list as config": (content(config, b"[]"), rf"{config}' holds a list; allowed: a JSON object"),
        "null as config": (content(config, b"null"), rf"{config}' holds null"),
        "a config of nothing": (
            content(config, b"{}"),
            rf"/{part}'.* could not be opened|another shape|lacks the tensor",
        ),
        "another class": (
            setting(config, _class_name="FluxTransformer2DModel", model_type="bert"),
            rf"/{part}' is a (FluxTransformer2DModel|bert); allowed: ",
        ),
        "a shard lacks": (
            shards(part, lambda places: {"weight_map": places | {"x": "gone.safetensors"}}),
            r"index.json' names 'gone.safetensors', which is not next to it",
        ),
        "a shard elsewhere": (
            shards(part, lambda places: {"weight_map": {"x": "../../secret"}}),
            r"index.json' names '../../secret', which is not next to it",
        ),
        "an index of nothing": (shards(part, lambda places: []), r"index.json' holds a list"),
        "an index without a map": (shards(part, lambda places: {}), r"index.json' has no weight_map"),
    }


CASES: dict[str, tuple[Damage, str]] = {
    f"{part}: {name}": case for part in WEIGHTS for name, case in of_every_part(part).items()
}
CASES |= {
    "unet: wider text": (
        setting("unet/config.json", cross_attention_dim=24),
        r"/unet' could not be .*24",
    ),
    "unet: no groups": (setting("unet/config.json", norm_num_groups=0), "norm_num_groups is 0; allowed: 1"),
    "unet: a text of widths": (
        setting("unet/config.json", block_out_channels="ab"),
        "/unet' could not be opened",
    ),
    "unet: no such block": (setting("unet/config.json", down_block_types=["No"] * 2), "No does not exist"),
    "unet: layers without end": (
        setting("unet/config.json", layers_per_block=10**400),
        r"unet/config.json': layers_per_block is 10000.*; allowed: 1 to 1,000",
    ),
    "unet: a width without end": (
        setting("unet/config.json", block_out_channels=[8, 10**30]),
        r"unet/config.json': block_out_channels is 1000",
    ),
    "vae: layers without end": (setting("vae/config.json", layers_per_block=10**6), "1 to 1,000"),
    "text_encoder: layers without end": (
        setting("text_encoder/config.json", num_hidden_layers=10**6),
        r"text_encoder/config.json': num_hidden_layers is 1000000;",
    ),
    "text_encoder: no end": (
        setting("text_encoder/config.json", eos_token_id=None),
        "eos_token_id is None; allowed: 0 to 10,000,000",
    ),
    "text_encoder: an attention that is not installed": (
        setting("text_encoder/config.json", attn_implementation="flash_attention_2"),
        "/text_encoder' could not be opened: FlashAttention2",
    ),
    "tokenizer: another kind": (
        content("tokenizer/tokenizer.json", lambda raw: raw.replace(b'"BPE"', b'"WordPiece"')),
        "model.type is 'WordPiece'; allowed: BPE",
    ),
    "tokenizer: a text as length": (
        setting("tokenizer/tokenizer_config.json", model_max_length="x"),
        "model_max_length is 'x'; allowed: a number above 0",
    ),
    "vae: groups below none": (setting("vae/config.json", norm_num_groups=-1), "norm_num_groups is -1"),
    "vae: one width": (setting("vae/config.json", block_out_channels=5), "/vae' could not be opened"),
    "text_encoder: odd heads": (
        setting("text_encoder/config.json", num_attention_heads=3),
        "not a multiple of",
    ),
    "text_encoder: a text as width": (
        setting("text_encoder/config.json", hidden_size="x"),
        "expected int, got str",
    ),
    "text_encoder: few words": (
        setting("text_encoder/config.json", vocab_size=10),
        r"\[10, 16\] by config",
    ),
    "scheduler: a list": (content(SCHEDULER, b"[]"), f"{SCHEDULER}' holds a list"),
    "scheduler: empty": (content(SCHEDULER, b""), f"{SCHEDULER}' is no JSON"),
    "scheduler: bytes": (content(SCHEDULER, b"\xff\xfe\x00"), f"{SCHEDULER}' is no JSON"),
    "index: a list": (content("model_index.json", b"[]"), "model_index.json' holds a list"),
    "tokenizer: gone": (lambda f: (f / "tokenizer/tokenizer.json").unlink(), "/tokenizer' has no tokenizer"),
    "tokenizer: a list": (content("tokenizer/tokenizer.json", b"[]"), "tokenizer.json' holds a list"),
    "tokenizer: no model": (content("tokenizer/tokenizer.json", b"{}"), "has no model of vocabulary"),
}
CASES |= {
    f"unet: {key} {value}": (
        setting("unet/config.json", **{key: value}),
        rf"unet/config.json': {key} is .*; allowed: ",
    )
    for key, value in [
        *(("sample_size", n) for n in (None, 0, -8, "8", 10**6, [8, 8])),
        *(("norm_eps", n) for n in (None, "x", -1)),
        *(("layers_per_block", -1), ("in_channels", 10**9), ("conv_in_kernel", 10**5)),
    ]
}
CASES |= {
    f"scheduler: {key} {value}": (
        setting(SCHEDULER, **{key: value}),
        rf"{SCHEDULER}': {key} is .*; allowed: ",
    )
    for key, value in [
        *(("num_train_timesteps", n) for n in ("x", 0, 10**9, None)),
        *(("beta_start", "x"), ("beta_start", float("nan")), ("beta_end", [1]), ("prediction_type", "no")),
        *(("prediction_type", 3), ("_class_name", 5), ("trained_betas", "x"), ("steps_offset", "x")),
        ("rescale_betas_zero_snr", "x"),
    ]
}


if sys.platform != "win32":
    CASES |= {
        f"{part}: {name}": (instead(file, make), rf"{file}' cannot be read: it is no plain file")
        for name, make in PIPES.items()
        for part, file in (("unet", "unet/config.json"), ("vae", WEIGHTS["vae"]), ("scheduler", SCHEDULER))
    }


@pytest.mark.parametrize("name", CASES)
def test_damage_is_told_in_one_line(model: Path, name: str) -> None:
    damage, message = CASES[name]
    damage(model)
    part = name.partition(":")[0]
    with pytest.raises(ModelError, match=message) as caught:
        models.load(model, parts=(part if part in PARTS else "vae",))
    assert "\n" not in str(caught.value)


def vocabulary(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "tokenizer/tokenizer.json"
        told = json.loads(file.read_text())
        change(told["model"])
        file.write_text(json.dumps(told))

    return damage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(vocab={}), "its vocabulary is empty"),
        (lambda m: m["vocab"].update(a="x"), "a word's number is 'x'"),
        (lambda m: m["vocab"].update(a=-1), "a word's number is -1"),
        (lambda m: m["vocab"].update(a=m["vocab"]["b"]), "2 words have the number"),
        (
            lambda m: m["merges"].append(["a", "nowhere"]),
            "the merge a nowhere needs 'nowhere', which no word is",
        ),
        (lambda m: m["merges"].append(["a"]), r"\['a'\] is no merge"),
        (lambda m: m["vocab"].update({"w": 10**6}), "words up to number 1000000, its text encoder knows"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(
    model: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    vocabulary(change)(model)
    with pytest.raises(ModelError, match=message) as caught:
        models.load(model)
    assert "\n" not in str(caught.value)


def test_an_older_tokenizers_files_are_looked_through(model: Path) -> None:
    """vocab.json and merges.txt, as the published models have them."""
    learned = json.loads((model / "tokenizer/tokenizer.json").read_text())["model"]
    (model / "tokenizer/tokenizer.json").unlink()
    merges = ["#version: 0.2", *(" ".join(pair) for pair in learned["merges"])]
    (model / "tokenizer/vocab.json").write_text(json.dumps(learned["vocab"]))
    (model / "tokenizer/merges.txt").write_text("\n".join(merges) + "\n")
    assert models.load(model).tokenizers[0].get_vocab() == learned["vocab"]
    (model / "tokenizer/merges.txt").write_text("\n".join([*merges, "a nowhere"]))
    with pytest.raises(ModelError, match="merges.txt': the merge a nowhere needs 'nowhere'"):
        models.load(model)
    (model / "tokenizer/merges.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="merges.txt' is no text"):
        models.load(model)


@pytest.mark.parametrize("part", WEIGHTS)
def test_a_tensor_too_many_is_named_and_shards_are_read(
    model: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    def identity() -> str:
        return models.identity(models.load(model, parts=(part,)).modules[part])

    before = identity()
    assert not [line for line in caplog.messages if "not used" in line]
    tensors(part, lambda held: held.update({"odd.one": torch.ones(2)}))(model)
    assert identity() == before
    assert f"'{model / part}': 1 tensors are not used, such as odd.one" in caplog.messages
    shards(part, lambda places: {"metadata": {}, "weight_map": places})(model)
    assert identity() == before


def test_a_part_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    """Each part whole, but one listens to text, or makes latents, of another width."""
    for name, overrides in (
        ("text", {"unet": {"cross_attention_dim": 24}}),
        ("latents", {"unet": {"cross_attention_dim": 16, "in_channels": 8, "out_channels": 3}}),
    ):
        unet = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2}
        other = models.create("tiny", parts=("unet",), overrides={"unet": unet | overrides["unet"]})
        models.save(other, tmp_path / name)
        shutil.rmtree(model / "unet")
        shutil.copytree(tmp_path / name / "unet", model / "unet")
        message = {
            "text": "its unet takes text of width 24, its text encoders give 16; a part is of another model",
            "latents": "its unet makes latents of 3 channels, its VAE reads 4",
        }[name]
        with pytest.raises(ModelError, match=message):
            models.load(model)
        assert models.load(model, parts=("unet",)).unet is not None  # by itself it is whole


def test_a_vae_in_diffusers_older_names_opens(model: Path) -> None:
    before = models.identity(models.load(model, parts=("vae",)).modules["vae"])
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def rename(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if ".attentions." in name]:
            new = next((name.replace(a, b) for a, b in older.items() if f".{a}." in name), name)
            held[new] = held.pop(name)

    tensors("vae", rename)(model)
    assert "encoder.mid_block.attentions.0.query.weight" in load_file(model / WEIGHTS["vae"])
    assert models.identity(models.load(model, parts=("vae",)).modules["vae"]) == before
    tensors("vae", lambda t: t.pop("encoder.mid_block.attentions.0.query.weight"))(model)
    with pytest.raises(ModelError, match="lacks the tensor"):
        models.load(model, parts=("vae",))


def test_a_single_file_is_looked_through_too(whole: Path, tmp_path: Path) -> None:
    file = models.save_single_file(models.load(whole), tmp_path / "one.safetensors")
    held = load_file(file)
    models.load(file)
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = twice(raw[8 : 8 + length].decode()).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with pytest.raises(ModelError, match="one.safetensors' holds the tensor '.*' twice"):
        models.load(file)
    name = next(name for name in held if name.endswith("input_blocks.0.0.weight"))
    save_file(held | {name: held[name].long()}, file)
    with pytest.raises(ModelError, match=f"holds whole numbers for the tensor '{name}'"):
        models.load(file)


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("vae", {"block_out_channels": "abc"}),
        ("vae", {"block_out_channels": []}),
        ("vae", {"block_out_channels": [None]}),
        ("vae", {"norm_num_groups": 7}),
        ("vae", {"act_fn": "exec"}),
        ("vae", {"sample_size": "big"}),
        ("vae", {"_class_name": 5}),
        ("unet", {"down_block_types": ["Unknown", "X"]}),
        ("unet", {"layers_per_block": 10**9}),
        ("text_encoder", {"architectures": 5, "num_attention_heads": 0}),
        ("text_encoder", {"hidden_size": "x"}),
    ],
)
def test_an_outline_of_what_cannot_be_is_refused_in_one_line(model: Path, part: str, values: Any) -> None:
    """`generate` looks at the outline before it opens the model."""
    assert models.outlined(str(model), PARTS).unet is not None
    setting(f"{part}/config.json", **values)(model)
    with pytest.raises(ModelError, match=str(model / part)) as error:
        models.outlined(str(model), PARTS)
    assert "\n" not in str(error.value)
