"""Adapter files: every layout read to the same layers, written and read back to the bit, refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models.adapters.adapter import Adapter, Factors, Layer
from darkroom.models.adapters.read import adaptable, fit, merge, read_adapter, write_adapter
from darkroom.models.model import Model
from models.made_adapters import everywhere, made

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tiny() -> Model:
    return models.create("tiny", seed=1)


@pytest.fixture(scope="module")
def sd15() -> Model:
    return models.create("sd15", parts=("unet", "text_encoder"), device="meta")


def layers_of(adapter: Adapter) -> dict[str, tuple[list[float], list[float], float]]:
    return {
        name: (layer.down.flatten().tolist(), layer.up.flatten().tolist(), round(layer.scale, 6))
        for name, layer in adapter.layers.items()
        if isinstance(layer, Layer)
    }


def saved(tensors: Tensors, file: Path, **metadata: str) -> Path:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata=metadata or None)
    return file


# ---- layouts


def peft_keys(adapter: Adapter) -> Tensors:
    return {
        f"base_model.model.{name.removeprefix('unet.')}.lora_{'AB'[role == 'up']}.weight": tensor
        for name, layer in adapter.layers.items()
        for role, tensor in layer.tensors.items()
    }


def older_diffusers_keys(adapter: Adapter) -> Tensors:
    return {
        f"{name.replace('.to_out.0', '.to_out').replace('.to_', '.processor.to_')}_lora.{role}.weight": tensor
        for name, layer in adapter.layers.items()
        for role, tensor in layer.tensors.items()
    }


def dotted_lora_keys(adapter: Adapter) -> Tensors:
    return {
        f"{name}.lora.{role}.weight": tensor
        for name, layer in adapter.layers.items()
        for role, tensor in layer.tensors.items()
    }


def kohya_keys(adapter: Adapter) -> Tensors:
    told: Tensors = {}
    for name, layer in adapter.layers.items():
        stem = "lora_" + name.replace("text_encoder.", "te.text_model.").replace(".", "_")
        told |= {f"{stem}.lora_{role}.weight": tensor for role, tensor in layer.tensors.items()}
        told[f"{stem}.alpha"] = torch.tensor(float(layer.alpha))
    return told


@pytest.mark.parametrize("keys", [peft_keys, older_diffusers_keys, dotted_lora_keys, kohya_keys])
def test_each_layout_is_read_to_the_same_layers(
    tiny: Model, tmp_path: Path, keys: Callable[[Adapter], Tensors]
) -> None:
    adapter = made(tiny, 1, where=lambda path: path.startswith("unet.") and ".to_" in path)
    read = fit(read_adapter(saved(keys(adapter), tmp_path / "a.safetensors")), tiny)
    assert layers_of(read) == layers_of(adapter)


def test_kohya_keys_of_every_layer_are_told_apart(sd15: Model) -> None:
    """Names are joined by underscores and hold underscores: all 686 of SD 1.5 come back as they were."""
    from darkroom.models.adapters.keys import kohya_stem, split_key

    paths = list(adaptable(sd15))
    stems = {path: kohya_stem(path, sdxl=False) for path in paths}
    assert len(set(stems.values())) == len(paths)
    assert {path: split_key(f"{stem}.alpha") for path, stem in stems.items()} == {
        path: (path, "alpha") for path in paths
    }


def test_sdxl_keys_in_stabilitys_names_and_back() -> None:
    from darkroom.models.adapters.keys import kohya_stem, split_key

    sdxl = models.create("sdxl", parts=("unet",), device="meta")
    paths = list(adaptable(sdxl))
    stems = {path: kohya_stem(path, sdxl=True, attended=(0, 1)) for path in paths}
    assert stems["unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"] == (
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    )
    assert stems["unet.up_blocks.0.upsamplers.0.conv"] == "lora_unet_output_blocks_2_2_conv"
    assert stems["unet.mid_block.resnets.1.conv2"] == "lora_unet_middle_block_2_out_layers_3"
    assert len(set(stems.values())) == len(paths)
    assert all(split_key(f"{stem}.alpha") == (path, "alpha") for path, stem in stems.items())


def test_cloneofsimos_numbers_are_the_layers_of_early_2023(sd15: Model, tmp_path: Path) -> None:
    """Self-attention, feed-forward, cross-attention: a transformer block as it was then."""
    tensors: Tensors = {}
    for i, (inputs, outputs) in enumerate(
        [(320, 320)] * 4 + [(320, 2560), (320, 320), (768, 320), (768, 320)]
    ):
        tensors |= {
            f"unet:{i}:down": torch.full((2, inputs), float(i)),
            f"unet:{i}:up": torch.ones(outputs, 2),
        }
    tensors["<s1>"] = torch.ones(768)
    file = saved(tensors, tmp_path / "old.safetensors", **{"<s1>": "<embed>", "unet:0:rank": "2"})
    adapter = read_adapter(file)
    assert adapter.layout == "numbered"
    assert adapter.base == "sd15"
    assert adapter.notes == ("the trained word '<s1>' in it is not applied",)
    fitted = fit(adapter, sd15).layers
    block = "unet.down_blocks.0.attentions.0.transformer_blocks.0"
    order = [f"{block}.attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
    order += [f"{block}.ff.net.0.proj", *(f"{block}.attn2.{name}" for name in ("to_q", "to_k", "to_v"))]
    assert {name: layer.tensors["down"][0, 0].item() for name, layer in fitted.items()} == {
        name: float(i) for i, name in enumerate(order)
    }
    with pytest.raises(ModelError, match="by number only"):
        write_adapter(adapter, tmp_path / "new.safetensors")


def test_a_peft_folder_brings_its_alpha(tiny: Model, tmp_path: Path) -> None:
    adapter = made(tiny, 2, where=lambda path: path.startswith("unet.") and "attn1" in path)
    saved(peft_keys(adapter), tmp_path / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 2, "use_rslora": True, "alpha_pattern": {"attn1.to_k": 8}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    scales = {name.rsplit(".", 1)[-1]: layer.scale for name, layer in read_adapter(tmp_path).layers.items()}
    assert scales["to_q"] == 2 / 4**0.5
    assert scales["to_k"] == 8 / 4**0.5


# ---- writing


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3, 1 / 3])
def test_diffusers_to_kohya_and_back_is_equal_to_the_bit(tiny: Model, tmp_path: Path, scale: float) -> None:
    adapter = made(tiny, 3, scale=scale, where=everywhere)
    first = write_adapter(adapter, tmp_path / "1.safetensors")
    second = write_adapter(read_adapter(first), tmp_path / "2.safetensors", kohya=True)
    third = write_adapter(read_adapter(second), tmp_path / "3.safetensors")
    one, three = load_file(first), load_file(third)
    assert one.keys() == three.keys()
    assert all(torch.equal(one[key], three[key]) for key in one)
    with safe_open(first, "pt") as a, safe_open(third, "pt") as b:
        assert a.metadata()["lora_adapter_metadata"] == b.metadata()["lora_adapter_metadata"]
    other = load_file(write_adapter(made(tiny, 4, where=everywhere), tmp_path / "4.safetensors"))
    assert not all(torch.equal(one[key], other[key]) for key in one)


def test_the_header_says_what_other_tools_show(tiny: Model, tmp_path: Path) -> None:
    told = models.about(title="sks dog", trigger="a photo of sks dog", base_model="runwayml/sd15")
    adapter = Adapter("dog", made(tiny, 5, rank=2, scale=0.5).layers, told)
    with safe_open(
        write_adapter(adapter, tmp_path / "a.safetensors", kohya=True, family="sd15"), "pt"
    ) as file:
        header = file.metadata()
    assert header["modelspec.architecture"] == "stable-diffusion-v1/lora"
    assert header["modelspec.title"] == "sks dog"
    assert header["modelspec.trigger_phrase"] == "a photo of sks dog"
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("2", "1")
    assert header["ss_base_model_version"] == "sd_v1"
    assert "lora_adapter_metadata" not in header  # diffusers refuses a file that has both kinds of alpha


@pytest.mark.parametrize("family", ["sd15", "sd2", "sd2-v", "sdxl"])
def test_an_adapter_of_self_attention_alone_names_its_base(family: str, tmp_path: Path) -> None:
    """Nothing in its layers tells the base: the model it was trained on does."""
    model = models.create(family, parts=("unet",), device="meta")
    name = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    adapter = Adapter("it", {name: Layer(torch.randn(2, 1280), torch.randn(1280, 2))})
    assert adapter.base is None
    model.family = "custom"  # as of a folder or a hub id whose prediction is another
    told = {"family": models.base_family(model), "prediction": model.prediction}
    assert told["family"] == family
    written = write_adapter(adapter, tmp_path / "a.safetensors", kohya=True, **told)
    with safe_open(written, "pt") as file:
        header, keys = file.metadata(), list(file.keys())
    architecture, version, v2 = {
        "sd15": ("stable-diffusion-v1", "sd_v1", "False"),
        "sd2": ("stable-diffusion-v2-512", "sd_v2", "True"),
        "sd2-v": ("stable-diffusion-v2-768-v", "sd_v2_v", "True"),
        "sdxl": ("stable-diffusion-xl-v1-base", "sdxl_base_v1-0", "False"),
    }[family]
    assert header["modelspec.architecture"] == f"{architecture}/lora"
    assert (header["ss_base_model_version"], header["ss_v2"]) == (version, v2)
    assert header["modelspec.prediction_type"] == ("v" if family == "sd2-v" else "epsilon")
    stem = "middle_block_1" if family == "sdxl" else "mid_block_attentions_0"
    assert f"lora_unet_{stem}_transformer_blocks_0_attn1_to_q.lora_down.weight" in keys
    again = read_adapter(written)
    assert (again.base, list(again.layers)) == (family, [name])
    both = {**adapter.layers, name.replace("attn1.to_q", "attn2.to_k"): Layer(*cross(model))}
    wide = write_adapter(Adapter("both", both), tmp_path / "b.safetensors", **told)
    assert read_adapter(wide).base == family


def cross(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    width = model.unet.config.cross_attention_dim  # type: ignore[union-attr]
    return torch.randn(2, width), torch.randn(1280, 2)


def test_a_model_that_predicts_otherwise_keeps_its_family(tmp_path: Path) -> None:
    model = models.create("sd15", parts=("unet",), device="meta")
    model.scheduler = {**model.scheduler, "prediction_type": "v_prediction"}
    assert (models.base_family(model), model.prediction) == ("sd15", "v_prediction")
    model = models.create("sd2", parts=("unet",), device="meta")
    model.scheduler = {**model.scheduler, "prediction_type": "v_prediction"}
    assert models.base_family(model) == "sd2-v"
    assert models.base_family(models.create("tiny", parts=("vae",), device="meta")) is None


def test_doras_magnitudes_have_the_sides_of_their_weight_in_kohyas_keys(tiny: Model, tmp_path: Path) -> None:
    lora = made(tiny, 8, where=lambda path: path.endswith(("attn1.to_q", "resnets.0.conv1")))
    layers = {
        name: replace(layer, magnitude=torch.rand(len(layer.up))) for name, layer in lora.layers.items()
    }
    adapter = Adapter("it", layers, kind="dora")
    kohya = write_adapter(adapter, tmp_path / "1.safetensors", kohya=True)
    sides = {t.ndim: t.shape for key, t in load_file(kohya).items() if key.endswith("dora_scale")}
    assert sides.keys() == {2, 4}
    assert all(shape[0] > 1 and set(shape[1:]) == {1} for shape in sides.values())
    # What was written with two sides for convolutions too is read alike, and written anew as it should be.
    flat = {k: t.reshape(-1, 1) if k.endswith("dora_scale") else t for k, t in load_file(kohya).items()}
    older = read_adapter(saved(flat, tmp_path / "2.safetensors"))
    again = write_adapter(older, tmp_path / "3.safetensors", kohya=True)
    assert all(torch.equal(t, load_file(again)[key]) for key, t in load_file(kohya).items())
    back = load_file(write_adapter(read_adapter(kohya), tmp_path / "4.safetensors"))
    first = load_file(write_adapter(adapter, tmp_path / "5.safetensors"))
    assert all(torch.equal(back[key], t) for key, t in first.items())
    by_inputs = {
        name: replace(one, magnitude=torch.rand(1, one.down.shape[1])) for name, one in layers.items()
    }
    inputs = write_adapter(Adapter("i", by_inputs, kind="dora"), tmp_path / "6.safetensors", kohya=True)
    shapes = [t.shape for key, t in load_file(inputs).items() if key.endswith("dora_scale")]
    assert {(len(shape), shape[0]) for shape in shapes} == {(2, 1), (4, 1)}
    merged = []
    for file in (kohya, tmp_path / "2.safetensors", tmp_path / "5.safetensors"):
        model = models.create("tiny", seed=1)
        merge(model, read_adapter(file))
        merged.append(model.unet.state_dict())  # type: ignore[union-attr]
    assert all(torch.equal(merged[0][key], one[key]) for one in merged[1:] for key in merged[0])


def by_layer(model: Model) -> Adapter:
    """Layers of attention and text encoders with ranks of 2 to 4 and scales of 0.5 to 1.25."""
    draw, layers = torch.Generator().manual_seed(3), {}
    chosen = (n for n in adaptable(model) if n.endswith(("to_q", "to_out.0", "v_proj", "out_proj", "conv1")))
    for i, path in enumerate(chosen):
        shape, rank = adaptable(model)[path].weight.shape, 2 + i % 3
        down = 0.3 * torch.randn(rank, *shape[1:], generator=draw)
        up = 0.3 * torch.randn(shape[0], rank, *[1] * (len(shape) - 2), generator=draw)
        layers[path] = Layer(down, up, 0.5 + 0.25 * (i % 4))
    return Adapter("by layer", layers)


def test_diffusers_takes_ranks_and_alphas_by_layer_of_both_of_sdxls_encoders(tmp_path: Path) -> None:
    """transformers names the layers of one `encoder.`, of the other `text_model.encoder.`."""
    from diffusers import StableDiffusionXLPipeline

    words = models.train_tokenizer(["picture 0 1 2 3"] * 3, vocab_size=600)
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"projection_dim": 16, "vocab_size": len(words), "eos_token_id": len(words) - 1}
    unet = {"block_out_channels": [8, 8, 8], "transformer_layers_per_block": [1, 1, 1], "sample_size": 8}
    unet |= {"norm_num_groups": 4, "attention_head_dim": 4, "cross_attention_dim": 32, "layers_per_block": 1}
    unet |= {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 16 + 6 * 8}
    vae = {"block_out_channels": [8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 32}
    sizes = {"unet": unet, "vae": vae, "text_encoder": text, "text_encoder_2": text}
    models.save(models.create("sdxl", seed=1, tokenizer=words, overrides=sizes), tmp_path / "model")
    model, plain = models.load(tmp_path / "model"), models.load(tmp_path / "model")
    file = write_adapter(by_layer(model), tmp_path / "a.safetensors", family="sdxl")
    merge(model, read_adapter(file))
    pipeline = StableDiffusionXLPipeline.from_pretrained(tmp_path / "model", local_files_only=True)
    pipeline.load_lora_weights(str(file))
    parts = ["unet", "text_encoder", "text_encoder_2"]
    pipeline.fuse_lora(components=parts)
    pipeline.unload_lora_weights()
    for part in parts:
        theirs, ours, before = (
            dict(module.named_parameters())
            for module in (getattr(pipeline, part), model.modules[part], plain.modules[part])
        )
        assert theirs.keys() == ours.keys()
        assert max(float((theirs[n] - ours[n]).abs().max()) for n in ours) < 1e-6
        assert max(float((theirs[n] - before[n]).abs().max()) for n in ours) > 0.1  # the control


def test_alphas_that_diffusers_would_not_read_in_kohyas_keys_are_warned_of(
    tiny: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    several = by_layer(tiny)
    alike = {name: replace(one, scale=2 / one.rank) for name, one in several.layers.items()}
    other = {n: replace(one, scale=4 / one.rank) for n, one in alike.items() if n.endswith("conv1")}
    for i, (layers, warned) in enumerate(
        ((several.layers, True), (alike, False), (alike | other, False))  # it does read those of convolutions
    ):
        caplog.clear()
        write_adapter(Adapter("it", layers), tmp_path / f"{i}.safetensors", kohya=True)
        assert ("diffusers takes one alpha" in caplog.text) == warned
    caplog.clear()
    write_adapter(several, tmp_path / "own.safetensors")
    assert not caplog.text


def test_published_counts_of_query_and_value_adapters(sd15: Model) -> None:
    """`to_q` and `to_v` of all 32 attentions: the trainable parameters that Google's report prints."""
    chosen = [layer for path, layer in adaptable(sd15).items() if path.endswith(("to_q", "to_v"))]
    sizes = {rank: sum(rank * sum(layer.weight.shape) for layer in chosen) for rank in (4, 8, 16, 32)}
    assert sizes == {4: 398_592, 8: 797_184, 16: 1_594_368, 32: 3_188_736}


def test_precision_is_cast_as_asked(tiny: Model, tmp_path: Path) -> None:
    file = write_adapter(made(tiny, 6), tmp_path / "a.safetensors", kohya=True, dtype=torch.bfloat16)
    kinds = {key.rsplit(".", 1)[-1]: tensor.dtype for key, tensor in load_file(file).items()}
    assert kinds == {"weight": torch.bfloat16, "alpha": torch.float32}


# ---- what does not fit


def test_layers_that_the_model_lacks_are_named_and_counted(tiny: Model, sd15: Model, tmp_path: Path) -> None:
    keys = {f"lora_unet_down_blocks_{i}_bogus.lora_{role}.weight": torch.ones(2, 2) for i in range(5)
            for role in ("down", "up")}  # fmt: skip
    adapter = read_adapter(saved(keys, tmp_path / "a.safetensors"))
    with pytest.raises(
        ModelError, match=r"5 of 5 layers \(unet.down_blocks.0.bogus, .*, \.\.\.\) are not in"
    ):
        fit(adapter, tiny)
    query = made(
        sd15, 0, rank=1, where=lambda path: "down_blocks.0.attentions.0" in path and "attn2.to_k" in path
    )
    with pytest.raises(ModelError, match="another shape .* looks made for sd15"):
        fit(query, tiny)


def test_keys_that_are_no_adapters_are_named(tmp_path: Path) -> None:
    tensors = {"unet.conv_in.lora_A.weight": torch.ones(1, 4), "../../etc/passwd": torch.ones(1)}
    with pytest.raises(ModelError, match=r"1 of 2 keys \(\.\./\.\./etc/passwd\) are not understood"):
        read_adapter(saved(tensors, tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"unet.a.lora_A.weight": torch.ones(2, 4)}, "down and up together"),
        ({"unet.a.lora_A.weight": torch.ones(2, 4), "unet.a.lora_B.weight": torch.ones(4, 3)}, "go together"),
        ({"unet.a.lora_A.weight": torch.ones(0, 4), "unet.a.lora_B.weight": torch.ones(4, 0)}, "go together"),
        ({"unet.a.lora_A.weight": torch.ones(3), "unet.a.lora_B.weight": torch.ones(4, 3)}, "go together"),
        (
            {
                "unet.a.lora_A.weight": torch.tensor([[1.0, torch.nan]]),
                "unet.a.lora_B.weight": torch.ones(4, 1),
            },
            "not finite",
        ),
        (
            {"unet.a.lora_A.weight": torch.ones(1, 4), "lora_unet_a.lora_down.weight": torch.ones(1, 4)},
            "twice, by two names",
        ),
        ({"lora_unet_a.alpha": torch.ones(2)}, "alpha has 2 numbers"),
        ({"lora_unet_a.hada_w1_a": torch.ones(2, 2)}, "it has hada_w1_a"),
        ({"unet.a.lora_A.weight": torch.ones(1, 4, dtype=torch.int64)}, "holds I64"),
        ({"a" * 600 + ".lora_A.weight": torch.ones(1, 4)}, "name of 614 characters"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, tensors: Tensors, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        read_adapter(saved(tensors, tmp_path / "a.safetensors"))


def test_hostile_headers_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    entry = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}

    def put(header: bytes, *, claims: int | None = None, data: bytes = b"\0" * 4) -> None:
        length = len(header) if claims is None else claims
        file.write_bytes(struct.pack("<Q", length) + header + data)

    hostile: list[tuple[bytes, int | None, str]] = [
        (b"", None, "claims 0"),
        (b"{}", 2**63, "claims"),
        (b"{}", 100, "claims"),
        (b"[1]", None, "not an object"),
        (b"[" * 100_000, None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (json.dumps({"a.lora_A.weight": 3}).encode(), None, "holds None"),
        (json.dumps({"unet.a.lora_A.weight": {**entry, "shape": [2**40, 2**40]}}).encode(), None, "damaged"),
        (json.dumps({"unet.a.lora_A.weight": {**entry, "data_offsets": [0, 400]}}).encode(), None, "damaged"),
        (json.dumps({"unet.a.lora_A.weight": {**entry, "shape": [-1, 1]}}).encode(), None, "damaged"),
        (json.dumps({f"{i}.alpha": entry for i in range(20_001)}).encode(), None, "20,001 tensors"),
    ]
    for header, claims, told in hostile:
        put(header, claims=claims)
        with pytest.raises(ModelError, match=told):
            read_adapter(file)
    put(json.dumps({"\x1b[31munet.lora_A": entry}).encode())
    with pytest.raises(ModelError) as caught:
        read_adapter(file)
    assert "\x1b" not in str(caught.value)


def test_pefts_own_loha_and_lokr_folders_are_refused_by_name(tmp_path: Path) -> None:
    saved({"base_model.model.conv_in.lokr_w1": torch.ones(1, 1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LOKR", "alpha": 2, "r": 4}))
    with pytest.raises(ModelError, match="PEFT's LOKR"):
        read_adapter(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    for name, content in (("a.pt", b"x" * 20), ("b.safetensors", b"PK\3\4" + b"x" * 20)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match="is a pickle"):
            read_adapter(tmp_path / name)
    with pytest.raises(ModelError, match="no adapter file at"):
        read_adapter(tmp_path / "missing.safetensors")


@pytest.mark.parametrize("length", [640, 19280, 640 + 2**16])
def test_a_header_as_long_as_a_pickles_first_bytes_say_is_read(
    tiny: Model, tmp_path: Path, length: int
) -> None:
    """Its length, which comes first in the file, is then written as a pickle or a zip begins."""
    tensors = {f"{stem}.lora_{role}.weight": torch.ones(shape) for stem, role, shape in (
        ("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q", "down", (2, 64)),
        ("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q", "up", (64, 2)),
    )}  # fmt: skip
    file = saved(tensors, tmp_path / "a.safetensors")
    raw = file.read_bytes()
    before = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + before].rstrip().ljust(length)
    file.write_bytes(length.to_bytes(8, "little") + header + raw[8 + before :])
    assert file.read_bytes()[:2] in (b"\x80\x02", b"PK")
    assert len(read_adapter(file).layers) == 1


# ---- merging


def moved(tiny: Model, adapter: Adapter, weight: float = 1.0) -> dict[str, torch.Tensor]:
    """How far merging moves each adapted weight."""
    before = {path: layer.weight.detach().clone() for path, layer in adaptable(tiny).items()}
    fresh = models.create("tiny", seed=1)
    merge(fresh, adapter, weight)
    after = {path: layer.weight.detach() for path, layer in adaptable(fresh).items()}
    return {path: after[path] - before[path] for path in after if not torch.equal(after[path], before[path])}


def test_merging_adds_the_product(tiny: Model) -> None:
    adapter = made(tiny, 7, scale=0.5, where=everywhere)
    change = moved(tiny, adapter, -2.0)
    assert change.keys() == fit(adapter, tiny).layers.keys()
    for path, layer in fit(adapter, tiny).layers.items():
        assert isinstance(layer, Layer)
        expected = -2.0 * 0.5 * layer.up.flatten(1) @ layer.down.flatten(1)
        assert torch.allclose(change[path].flatten(1), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr"])
def test_other_kinds_merge_as_peft_merges_them(tiny: Model, kind: str, tmp_path: Path) -> None:
    import peft

    targets = ["attn1.to_q", "resnets.0.conv1"]
    configs = {
        "dora": peft.LoraConfig(
            r=4, lora_alpha=2, use_dora=True, target_modules=targets, init_lora_weights=False
        ),
        "loha": peft.LoHaConfig(r=4, alpha=2, target_modules=targets, init_weights=False),
        "lokr": peft.LoKrConfig(r=2, alpha=2, target_modules=targets, init_weights=False),
    }
    torch.manual_seed(3)
    theirs = peft.get_peft_model(models.create("tiny", seed=1).unet, configs[kind])
    tensors = peft.get_peft_model_state_dict(theirs)
    larger = {"dora": 1.0, "loha": 5.0, "lokr": 1.0}[kind]
    tensors = {key: t * (1.5 if "magnitude" in key else larger) for key, t in tensors.items()}
    peft.set_peft_model_state_dict(theirs, tensors)
    if kind == "dora":
        file = saved(tensors, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2}))
        read = read_adapter(tmp_path)
    else:
        kohya = {f"unet.{key.removeprefix('base_model.model.')}": t for key, t in tensors.items()}
        kohya |= {f"{key.rsplit('.', 1)[0]}.alpha": torch.tensor(2.0) for key in kohya}
        read = read_adapter(file := saved(kohya, tmp_path / "a.safetensors"))
    assert read.kind == kind, file
    whole = theirs.merge_and_unload()
    ours = models.create("tiny", seed=1)
    merge(ours, read)
    plain = models.create("tiny", seed=1)
    for name, weight in whole.state_dict().items():
        mine = ours.unet.state_dict()[name]  # type: ignore[union-attr]
        assert torch.allclose(mine, weight, atol=1e-5), name
        if name.endswith(("attn1.to_q.weight", "resnets.0.conv1.weight")):
            assert not torch.allclose(plain.unet.state_dict()[name], weight, atol=1e-3)  # type: ignore[union-attr]


def test_a_tucker_middle_is_folded(tiny: Model, tmp_path: Path) -> None:
    path = "unet.down_blocks.0.resnets.0.conv1"
    up, middle, down = torch.randn(32, 2, 1, 1), torch.randn(2, 2, 3, 3), torch.randn(2, 32, 1, 1)
    stem = "lora_" + path.replace(".", "_")
    tensors = {
        f"{stem}.lora_up.weight": up,
        f"{stem}.lora_mid.weight": middle,
        f"{stem}.lora_down.weight": down,
    }
    read = read_adapter(saved(tensors, tmp_path / "a.safetensors"))
    expected = torch.einsum("or,rshw,si->oihw", up[:, :, 0, 0], middle, down[:, :, 0, 0])
    assert torch.allclose(moved(tiny, read)[path], expected, atol=1e-4)


def test_factors_of_a_wrong_size_are_refused(tiny: Model) -> None:
    parts = {"lokr_w1": torch.ones(3, 3), "lokr_w2": torch.ones(3, 3)}
    name = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    with pytest.raises(ModelError, match="another shape"):
        fit(Adapter("k", {name: Factors("lokr", parts)}, kind="lokr"), tiny)


@pytest.mark.parametrize(
    ("was", "kept"),
    [
        ("/home/someone/models/dog.safetensors", "dog.safetensors"),
        (r"C:\Users\someone\dog.safetensors", "dog.safetensors"),
        (r"\\\\server\share\dog", "dog"),
        ("someone/dog", "someone/dog"),
        ("dog.safetensors", "dog.safetensors"),
    ],
)
def test_a_file_written_anew_says_no_path_of_whoever_trained_it(tmp_path: Path, was: str, kept: str) -> None:
    layers = {"unet.mid_block.attentions.0.proj_in": Layer(torch.ones(1, 4), torch.ones(4, 1))}
    metadata = {"ss_sd_model_name": was, "ss_vae_name": was, "modelspec.description": "/dog"}
    file = write_adapter(Adapter("a", layers, metadata=metadata), tmp_path / "a.safetensors")
    header = read_adapter(file).metadata
    assert (header["ss_sd_model_name"], header["ss_vae_name"]) == (kept, kept)
    assert header["modelspec.description"] == "/dog", "a text is left as it is"
